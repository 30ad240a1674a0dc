"""The tags of runs that were recorded by name only: the one place that reads a run's name.

Schema 1 had no tags. `tags_of` gives them to such a run when its record is read.
"""

from __future__ import annotations

import re

Tag = str | int | float | bool

METHOD = (
    r"(?P<method>lora|qlora|unsloth) (?P<texts>short|long)(, (batch (?P<batch>\d+)"
    r"|(?P<checkpointing>checkpointed)|(?P<offloaded>offloaded)|(?P<bits>4) bits"
    r"|(?P<casts>no|fp32) casts|(?P<rows>packed|padded)|(?P<fused_loss>fused loss)))*"
)
LADDER_06 = (
    r"(?P<rung>bf16|workers|no host waits|fused optimizer|blocks compiled|packed|answers only"
    r"|cached features|FP8 weights)"
)
LADDER_07 = (
    r"(?P<rung>q?lora( \+ offload)?|plain loop|plain adapters, device log|rewritten|fused loss"
    r"|packed|blocks compiled|whole-step graph|FP8 weights|4-bit weights"
    r"|4 bits in FP8, checkpointed)"
)
STEPS_08 = (
    r"(?P<model>dense|moe) (?P<texts>short|long)(, (?P<variant>rewritten|grouped|captured"
    r"|compiled))?(, delay (?P<delay_us>\d+(\.\d+)?) us)?"
)
TOGGLES_09 = (
    r"(?P<toggle>base|float32|bf16|tf32|tf32 convolutions|channels last|cudnn.benchmark"
    r"|optimizer loop|(foreach|fused|8-bit|paged) optimizer|(selective )?checkpointing"
    r"|accumulation)"
)
TRAINING_10 = (
    r"((?P<workload>qwen) )?((?P<trained>full) )?(?P<strategy>one process|ddp|fsdp)"
    r"( (?P<ranks>\d+))?( bucket (?P<bucket_mb>\d+)MB| (?P<sync>no_sync|sync each)"
    r"| (?P<bucket_view>bucket view)| (?P<rows>as they come)|, (?P<same_batch>same batch))?"
)
PATTERNS = (
    ("00", "operation", r"operation: (?P<operation>.+)"),
    ("02", "logging", r"logging=(?P<logging>.+)"),
    ("03", "workers", r"workers=(?P<workers>\d+)"),
    ("03", "prefetch", r"prefetch=(?P<prefetch>\d+)"),
    ("03", "shm", r"shm=(?P<shm>.+)"),
    ("03", "copies", r"((?P<ahead>ahead): )?(?P<memory>\w+)\+(?P<copy>blocking|async)"),
    ("04", "compile mode", r"(?P<mode>reduce-overhead)(, accumulation=(?P<accumulation>\d+))?"),
    ("04", "compile mode", r"(?P<mode>max-autotune)"),
    ("04", "ladder", r"(?P<rung>.+)"),
    ("05", "layer", r"(?P<layer>te-linear)"),
    ("05", "layer", r"layer (?P<layer>[^,]+)(, (?P<compiled>compiled))?"),
    ("05", "survey", r"survey (?P<weights>.+)"),
    ("06", "methods", r"(?P<method>[^ ]+) b(?P<batch>\d+)(, (?P<again>again))?"),
    ("06", "replay", r"(?P<tokens>same)-tokens (?P<lengths>.+)"),
    ("06", "replay", r"(?P<lengths>static) (?P<tokens>fewer)-tokens"),
    ("06", "forms", r"form: (?P<form>[^,]+)(, to (?P<to>\d+))?"),
    ("06", "loss", r"loss (?P<method>.+)"),
    ("06", "recompilation", r"recompiles (?P<images>\w+)"),
    ("06", "recompilation", r"recompiles (?P<images>\w+), (?P<scope>blocks)"),
    ("06", "recompilation", r"recompiles (?P<images>\w+), (?P<scope>blocks), (?P<any_length>.+)"),
    ("06", "ladder", LADDER_06),
    ("07", "outlier", r"outlier, (?P<constants>.+)"),
    ("07", "rounding", r"rounding (?P<code>.+)"),
    ("07", "chain", r"chain: (?P<order>.+)"),
    ("07", "methods", METHOD),
    ("07", "memory", f"memory of {METHOD}"),
    ("07", "ladder", LADDER_07),
    ("08", "steps", STEPS_08),
    ("08", "predictions", r"foretold"),
    ("09", "toggles", TOGGLES_09),
    ("09", "numbers", r"numbers: (?P<precision>.+)"),
    ("09", "optimizer", r"optimizer: (?P<optimizer>.+)"),
    ("09", "memory", r"memory: (?P<workload>[^,]+), (?P<checkpointing>.+)"),
    ("09", "largest batch", r"largest batch, (?P<search>from the prediction)"),
    ("09", "largest batch", r"largest batch, (?P<search>accelerate), from (?P<start>\d+)"),
    ("09", "decode", r"decode: (?P<format>[^,]+)(, (?P<on_gpu>GPU))?"),
    ("09", "files", r"files: (?P<cache>.+)"),
    ("09", "image input", r"data: (?P<format>\w+)( (?P<in_memory>in memory))?"),
    ("09", "image input", r"data: (?P<format>\w+), (?P<workers>\d+) workers"),
    ("09", "threads", r"threads: (?P<threads>.+)"),
    ("09", "launches", r"launches (?P<launches>.+)"),
    ("09", "diagnosis", r"diagnosis: (?P<script>.+)"),
    ("09", "tensorflow", r"tensorflow: (?P<case>.+)"),
    ("10", "training", TRAINING_10),
    ("10", "nccl", r"nccl (?P<settings>.+)"),
    ("10", "crash", r"(?P<event>rank killed|rank raises|resumed on fewer ranks)"),
    ("10", "predictions", r"foretold"),
)
"""(lab, experiment, regular expression of the whole name). A group adds its match as a tag."""

DEFAULTS = {"training": {"workload": "sd15-lora", "trained": "lora", "ranks": 1}}
FLAGS = {
    *("again", "ahead", "any_length", "bucket_view", "compiled", "fused_loss"),
    *("in_memory", "offloaded", "on_gpu", "same_batch"),
}
"""Tags that are True where their group matched."""
WORDS = {
    "layer": {"te-linear": "fp8-te"},
    "workload": {"qwen": "qwen3-lora-long"},
    "checkpointing": {"all kept": "off", "checkpointed": "blocks", "checkpointing": "blocks"},
}
"""Tag -> what stands in a name -> the tag's value."""

RENUMBERED = {"10": "11", "11": "12"}
"""A lab's number in schema 1 -> its number today."""
MOVED = ("decode", "files", "image input", "threads", "launches", "visible devices", "diagnosis")
"""Experiments that schema 1 has as lab 09's, and that are lab 10's today; TensorFlow's, too."""


def number_today(lab: str, experiment: object) -> str:
    """A lab's number today, by its number and an experiment of schema 1."""
    moved = lab == "09" and experiment in (*MOVED, "tensorflow")
    return "10" if moved else RENUMBERED.get(lab, lab)


def tags_of(lab: str, name: str) -> dict[str, Tag]:
    """The tags of the run that `lab` named so; a name that no pattern fits is the experiment."""
    for of_lab, experiment, pattern in PATTERNS:
        if of_lab == lab and (match := re.fullmatch(pattern, name)):
            groups = {key: text for key, text in match.groupdict().items() if text is not None}
            tags = {"experiment": experiment} | DEFAULTS.get(experiment, {})
            return tags | {key: _value(key, text) for key, text in groups.items()}
    return {"experiment": name}


def _value(tag: str, text: str) -> Tag:
    if tag in FLAGS:
        return True
    if tag == "delay_us":
        return float(text)
    return int(text) if text.isdecimal() else WORDS.get(tag, {}).get(text, text)
