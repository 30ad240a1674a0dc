"""The tags of runs that were recorded by name only: the one place that reads a run's name.

Schema 1 had no tags. `tags_of` gives them to such a run when its record is read.
"""

from __future__ import annotations

import re

Tag = str | int | float | bool

PATTERNS: tuple[tuple[str, str, dict[str, Tag]], ...] = (
    ("00", r"operation: (?P<operation>.+)", {"experiment": "operation"}),
    ("02", r"logging=(?P<logging>.+)", {"experiment": "logging"}),
    ("03", r"workers=(?P<workers>\d+)", {"experiment": "workers"}),
    ("03", r"prefetch=(?P<prefetch>\d+)", {"experiment": "prefetch"}),
    ("03", r"shm=(?P<shm>.+)", {"experiment": "shm"}),
    (
        "03",
        r"((?P<ahead>ahead): )?(?P<memory>pageable|pinned)\+(?P<copy>blocking|async)",
        {"experiment": "copies"},
    ),
    (
        "04",
        r"(?P<mode>reduce-overhead|max-autotune)(, accumulation=(?P<accumulation>\d+))?",
        {"experiment": "compile mode"},
    ),
    ("04", r"(?P<rung>.+)", {"experiment": "ladder"}),
    ("05", r"te-linear", {"experiment": "layer", "layer": "fp8-te"}),
    ("05", r"layer (?P<layer>[^,]+)(, (?P<compiled>compiled))?", {"experiment": "layer"}),
    ("05", r"survey (?P<weights>.+)", {"experiment": "survey"}),
    ("06", r"(?P<method>[^ ]+) b(?P<batch>\d+)(, (?P<again>again))?", {"experiment": "methods"}),
    (
        "06",
        r"same-tokens (?P<lengths>.+)",
        {"experiment": "replay", "tokens": "same"},
    ),
    ("06", r"(?P<lengths>static) fewer-tokens", {"experiment": "replay", "tokens": "fewer"}),
    ("06", r"form: (?P<form>[^,]+)(, to (?P<to>\d+))?", {"experiment": "forms"}),
    ("06", r"loss (?P<method>.+)", {"experiment": "loss"}),
    (
        "06",
        r"recompiles (?P<images>\w+)(, (?P<scope>blocks))?(, (?P<any_length>any length))?",
        {"experiment": "recompilation"},
    ),
    (
        "06",
        r"(?P<rung>bf16|workers|no host waits|fused optimizer|blocks compiled|packed|answers only"
        r"|cached features|FP8 weights)",
        {"experiment": "ladder"},
    ),
    ("07", r"outlier, (?P<constants>.+)", {"experiment": "outlier"}),
    ("07", r"rounding (?P<code>.+)", {"experiment": "rounding"}),
    ("07", r"chain: (?P<order>.+)", {"experiment": "chain"}),
    (
        "07",
        r"((?P<experiment>memory) of )?(?P<method>lora|qlora|unsloth) (?P<texts>short|long)"
        r"(, (batch (?P<batch>\d+)|(?P<checkpointing>checkpointed)|(?P<offloaded>offloaded)"
        r"|(?P<bits>4) bits|(?P<casts>no|fp32) casts|(?P<rows>packed|padded)"
        r"|(?P<fused_loss>fused loss)))*",
        {"experiment": "methods"},
    ),
    (
        "07",
        r"(?P<rung>q?lora( \+ offload)?|plain loop|plain adapters, device log|rewritten|fused loss"
        r"|packed|blocks compiled|whole-step graph|FP8 weights|4-bit weights"
        r"|4 bits in FP8, checkpointed)",
        {"experiment": "ladder"},
    ),
    (
        "08",
        r"(?P<model>dense|moe) (?P<texts>short|long)"
        r"(, (?P<variant>rewritten|grouped|captured|compiled))?"
        r"(, delay (?P<delay_us>\d+(\.\d+)?) us)?",
        {"experiment": "steps"},
    ),
    ("08", r"foretold", {"experiment": "predictions"}),
    (
        "09",
        r"(?P<toggle>base|float32|bf16|tf32|tf32 convolutions|channels last|cudnn.benchmark"
        r"|(optimizer loop|(foreach|fused|8-bit|paged) optimizer)|(selective )?checkpointing"
        r"|accumulation)",
        {"experiment": "toggles"},
    ),
    ("09", r"numbers: (?P<precision>.+)", {"experiment": "numbers"}),
    ("09", r"optimizer: (?P<optimizer>.+)", {"experiment": "optimizer"}),
    ("09", r"memory: (?P<workload>[^,]+), (?P<checkpointing>.+)", {"experiment": "memory"}),
    (
        "09",
        r"largest batch, (?P<search>from the prediction|accelerate)(, from (?P<start>\d+))?",
        {"experiment": "largest batch"},
    ),
    ("09", r"decode: (?P<format>[^,]+)(, (?P<on_gpu>GPU))?", {"experiment": "decode"}),
    ("09", r"files: (?P<cache>.+)", {"experiment": "files"}),
    (
        "09",
        r"data: (?P<format>\w+)( (?P<in_memory>in memory))?(, (?P<workers>\d+) workers)?",
        {"experiment": "image input"},
    ),
    ("09", r"threads: (?P<threads>.+)", {"experiment": "threads"}),
    ("09", r"launches (?P<launches>.+)", {"experiment": "launches"}),
    ("09", r"diagnosis: (?P<script>.+)", {"experiment": "diagnosis"}),
    ("09", r"tensorflow: (?P<case>.+)", {"experiment": "tensorflow"}),
    (
        "10",
        r"((?P<workload>qwen) )?((?P<trained>full) )?(?P<strategy>one process|ddp|fsdp)"
        r"( (?P<ranks>\d+))?( bucket (?P<bucket_mb>\d+)MB| (?P<sync>no_sync|sync each)"
        r"| (?P<bucket_view>bucket view)| (?P<rows>as they come)|, (?P<same_batch>same batch))?",
        {"experiment": "training", "workload": "sd15-lora", "trained": "lora", "ranks": 1},
    ),
    ("10", r"nccl (?P<settings>.+)", {"experiment": "nccl"}),
    (
        "10",
        r"(?P<event>rank killed|rank raises|resumed on fewer ranks)",
        {"experiment": "crash"},
    ),
    ("10", r"foretold", {"experiment": "predictions"}),
)
"""(lab, regular expression of the whole name, tags). A group adds its match under its own name."""

FLAGS = {
    *("again", "ahead", "any_length", "bucket_view", "compiled", "fused_loss"),
    *("in_memory", "offloaded", "on_gpu", "same_batch"),
}
"""Tags that are True where their group matched."""
WORDS = {
    "workload": {"qwen": "qwen3-lora-long"},
    "checkpointing": {"all kept": "off", "checkpointed": "blocks", "checkpointing": "blocks"},
}
"""Tag -> what stands in a name -> the tag's value."""


def tags_of(lab: str, name: str) -> dict[str, Tag]:
    """The tags of the run that `lab` named so; a name that no pattern fits is the experiment."""
    for of_lab, pattern, tags in PATTERNS:
        if of_lab == lab and (match := re.fullmatch(pattern, name)):
            groups = {key: text for key, text in match.groupdict().items() if text is not None}
            return tags | {key: _value(key, text) for key, text in groups.items()}
    return {"experiment": name}


def _value(tag: str, text: str) -> Tag:
    if tag in FLAGS:
        return True
    if tag == "delay_us":
        return float(text)
    return int(text) if text.isdecimal() else WORDS.get(tag, {}).get(text, text)
