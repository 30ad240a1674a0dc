"""The colours of the course, and the fills that stand for something in every picture that has it.

Colours are never the only carrier of meaning: fills differ in lightness and hatch as well.
"""

from __future__ import annotations

INK, GREY, PAPER = "#222222", "#777777", "#FFFFFF"
NAVY, RUST, TEAL, AMBER = "#0B3954", "#C1440E", "#2A9D8F", "#E9B44C"
PURPLE, MIST, ROSE = "#5E3A87", "#B3C4CF", "#EBA696"

Fill = tuple[str, str]
"""A colour and a hatch."""
LANE_MARKS = {
    "article": (NAVY, "o"),
    "same work": (TEAL, "s"),
    "same mathematics": (AMBER, "D"),
    "other": (PURPLE, "^"),
}
"""A lane's colour and marker; "other" for rungs in no lane of the course."""
FILLS = (
    (NAVY, ""),
    (AMBER, "///"),
    (TEAL, ""),
    (MIST, "..."),
    (RUST, "\\\\\\"),
    (ROSE, ""),
    (PURPLE, "---"),
    (GREY, "xxx"),
)
"""Fills of categories in order: neighbours differ in lightness and hatch; none is white, which
reads as nothing.
"""
PHASES = ("data", "encode", "forward", "log", "backward", "optimizer", "clip", "to_device")
PHASE_FILLS = dict(zip(PHASES, FILLS, strict=True))
"""Fills of the phases that the training loop marks, in every timeline the same."""
KIND_FILLS: dict[str, Fill] = {
    "attention": (RUST, "\\\\\\"),
    "convolution": (NAVY, ""),
    "GEMM": (MIST, "..."),
    "thin GEMM": (TEAL, "..."),
    "normalisation": (TEAL, ""),
    "elementwise": (AMBER, "///"),
    "casts and layout": (ROSE, ""),
    "foreach": (PURPLE, "---"),
    "compiled": (TEAL, "///"),
    "copy": (INK, ""),
    "launch call": (PURPLE, ""),
    "synchronisation": (RUST, ""),
    "reduction": (NAVY, "///"),
    "other": (GREY, "xxx"),
}
"""Fills of kinds of kernels and operators (`profiling.kernel_categories`) that take long, likewise;
rarer kinds get what is left.
"""
SHARE_FILLS: dict[str, Fill] = {
    "kernels": (TEAL, ""),
    "copies": (GREY, ""),
    "data": PHASE_FILLS["data"],
    "sync": (RUST, "\\\\\\"),
    "launch": (ROSE, ""),
    "host": (AMBER, "///"),
}
"""Fills of where a step's time goes (`profiling.trace.SHARES`), in every picture the same."""
DARK = (NAVY, RUST, PURPLE)
"""Fills on which text and hatches are white."""
MEMORY_FILLS: dict[str, Fill] = {
    "weights": (NAVY, ""),
    "optimizer": (AMBER, "///"),
    "gradients": (RUST, ""),
    "activations": (MIST, "..."),
    "logits": (TEAL, "---"),
    "temporaries": (ROSE, ""),
}
"""Fills of what memory is for (`profiling.memory`), in every picture the same; neighbours
differ in lightness.
"""
