"""Answers to the exercises that are answered with numbers or words: here, so that no notebook's
check shows its own.

An answer is numbers, names or letters, the sentence that explains it, and what to say to those who
are not there yet. `labutils.course.exercises.check` compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What is right, why, and what helps.

    right: a number, a word, a set of words or numbers, or a tuple of numbers, which are asked for
    in that form. Case doesn't matter in words, nor whose numbers they are, PyTorch's or NumPy's.
    within: how far a number may be off, as a share of it. hint: for any other answer. slips: wrong
    answers that are often given -> what to say to them; of a set, those that have that word in
    them.
    """

    right: float | str | frozenset | tuple
    why: str
    hint: str
    example: str
    within: float = 0.005
    slips: Mapping[Any, str] = field(default_factory=dict)


ANSWERS: dict[str, Answer] = {
    "00.1": Answer(
        877.9e12 / 2 / 1792e9,
        "Below 245 FLOP per byte that card waits for its memory.",
        "Divide dense FLOPs a second by bytes a second; mind the units.",
        "100",
        within=0.01,
        slips={
            877.9e12 / 1792e9: "That is the ridge of the sparse peak; the dense one is half of it."
        },
    ),
    "04.1": Answer(
        800 * 0.34 - (95 + 799 * 0.25),
        "She loses 23 s: it would have paid after some 1,050 steps.",
        "Add up all 800 steps, with compiling (the long first one included) and without it.",
        "12.5",
        within=0.03,
        slips={72: "That is what 800 shorter steps save. What did the first one cost?"},
    ),
    "04.2": Answer(
        1221 * (2 * 4 * 64 * 64 + 77 * 768) * 2 / 1e6,
        "It fits beside the model on any GPU, and 1.5 GB of PNG files are not read again.",
        "It is numbers per image × images × bytes per number / 10⁶.",
        "50",
        within=0.02,
        slips={
            1221
            * (2 * 4 * 64 * 64 + 77 * 768)
            / 1e6: "That is half of it. How many bytes has a float16?"
        },
    ),
    "04.3": Answer(
        frozenset({"BatchNorm"}),
        "Dropout draws other random numbers, but from the same distribution.",
        "Which of them computes a mean over the examples of a batch?",
        '{"LayerNorm", "Dropout"}',
        slips=dict.fromkeys(
            ("GroupNorm", "LayerNorm"), "GroupNorm and LayerNorm average within one example."
        ),
    ),
    "06.1": Answer(
        145,
        "58 s to make up, at 0.4 s a step.",
        "Divide the extra seconds at the start by the seconds saved in each later step.",
        "100",
        slips={62 / 0.4: "You added the two starts. How much longer is one than the other?"},
    ),
    "06.2": Answer(
        576 + 24 * (72 + 1),
        "576 for the whole image, and 24 rows of 72 tokens and a newline.",
        "The whole image is 24 × 24 tokens. How many rows has the enlarged one, and how many "
        "tokens has each of them?",
        "24 * 24 + 1",
        within=0,
        slips={4 * 576: "Nearly. Where are the newlines?"},
    ),
    "06.3": Answer(
        frozenset("b"),
        "Seed by seed the difference is steady, though smaller than what changing the seed does.",
        "How large is the spread over seeds, and how large is the difference?",
        '{"a", "c"}',
        slips={"c": "Compare them seed by seed."},
    ),
    "07.1": Answer(
        -32,
        "127 / 5.2 = 24.42, times −1.3 is −31.75.",
        "The constant is 127 over the block's largest magnitude. Multiply, then round.",
        "-12",
        within=0,
        slips={32: "Nearly. Which sign has the number?", -31: "Nearly. Round to the nearest code."},
    ),
    "07.2": Answer(
        8 / 32 + 32 / (32 * 128),
        "0.258 bits: blocks of half the size need twice as many constants.",
        "The 8 bits are shared by one block's weights, the 32 bits by the weights of all blocks in "
        "a group.",
        "8 / 64 + 32 / (64 * 256)",
        slips={8 / 32 + 32 / 128: "Nearly. How many weights share one of the float32 constants?"},
    ),
    "07.3": Answer(
        11,
        "20 GB at any batch, 5 GB an example, and so 58 GB of room for examples.",
        "What does one example add, and what is there without any?",
        "8",
        within=0,
        slips={12: "Nearly. Is all of the card's memory PyTorch's?"},
    ),
    "08.1": Answer(
        (150, 96),
        "The host's 96 ms hide behind 150 ms of kernels, and come to light behind 75.",
        "Work out launches × host first. On each card the larger of the two times decides.",
        "(200, 100)",
    ),
    "08.2": Answer(
        2,
        "A step takes as long on either card, and A's holds twice as many examples.",
        "If the host decides, how long is a step on either card?",
        "1.5",
        slips={
            1: "How many examples are in a step on either card?",
            4.5: "Do the kernels matter here?",
        },
    ),
    "08.3": Answer(
        19.11 * (4 + 8 / 32) / 8 + 1.80 * 2,
        "13.75 GB: 10.15 for the experts and 3.60 for the rest.",
        "An expert's number has 4 bits and a 32nd of an 8-bit scale; each of the others has 16 "
        "bits.",
        "20.5",
        within=0.008,
        slips={19.11 / 2 + 3.6: "Nearly. In MXFP4, 32 numbers share a scale of 8 bits."},
    ),
    "09.1": Answer(
        (16, 10),
        "4 bytes each for weight and gradient, and two moments of 4 bytes or of 1.",
        "How many bytes has a number in float32, and how many moments does AdamW keep for each "
        "weight?",
        "(8, 5)",
        slips={
            (12, 9): "Nearly. AdamW keeps two moments.",
            (16, 6): "Nearly. Is the gradient in 8 bits, too?",
        },
    ),
    "09.2": Answer(
        9,
        "6 GB an example, 14 GB without any, and so 58 GB of room for examples.",
        "What does one example add, what is there without any, and how much room is left?",
        "5",
        within=0,
        slips={
            11: "Nearly. Keep a tenth of the card free.",
            12: "Nearly. What is there without any example?",
        },
    ),
    "09.3": Answer(
        0,
        "40 / 4 is less than 25 already: the step never waited for the decoder.",
        "Compare r / w with c, before and after.",
        "50",
        slips={50: "The decoder saves half of its own time. Does the step wait for it?"},
    ),
    "10.1": Answer(
        860e6 * 4 / 12.5e9 * 1e3,
        "275 ms, which is less than the backward pass: a perfect overlap would hide all but the "
        "end.",
        "Take the bytes of all gradients times 2 (N − 1) / N, and divide by the bus bandwidth.",
        "120",
        within=0.02,
        slips={860e6 * 2 / 12.5e9 * 1e3: "Half of it. How many bytes has a gradient in float32?"},
    ),
    "10.2": Answer(
        (5, 50),
        "Each bucket is sent before the next is full; only the last has no backward pass left to "
        "hide behind.",
        "When is the last gradient ready, and what is still to be sent then?",
        "(1, 2)",
    ),
    "10.3": Answer(
        frozenset({1, 2, 4}),
        "8 micro-batches can be shared by 4, 2 or 1 ranks. Six or three would not get equal "
        "shares.",
        "Each rank takes as many of the 8 micro-batches as every other.",
        "{6, 3}",
        slips={
            6: "Can six ranks take 8 micro-batches in equal shares?",
            8: "Only six GPUs are left.",
        },
    ),
    "11.1": Answer(
        "inconclusive",
        "The ranges overlap: A at its best takes 97 ms, B at its worst 99.",
        "Compare A at its best with B at its worst.",
        '"refuted"',
        slips={"confirmed": "The medians say so. What do the ranges say?"},
    ),
    "11.2": Answer(
        (2, 2),
        "The factors off are 2, 2 and 3, and the ratios 2, 0.5 and 3: on the whole the predictions "
        "are too high.",
        "Half as much and twice as much are both off by a factor of 2. The median is the middle "
        "one of the three.",
        "(1.5, 0.7)",
        slips={(2, 3): "Nearly. Put the three ratios in order: which is in the middle?"},
    ),
}
"""Lab and number of an exercise -> its answer."""
