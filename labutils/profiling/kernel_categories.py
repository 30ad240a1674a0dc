"""What kind of work a kernel or an operator does, read off its name.

A trace names kernels as their libraries do ("sm90_xmma_fprop_implicit_gemm_...",
"nvjet_hsh_128x256_..."); learners ask how much time convolutions or casts take. The table below is
ordered: the first pattern found in the lower-case name decides. "foreach" are PyTorch's kernels
over many small tensors at once: unscaling, clipping and the optimizer. Names change with library
versions, so whatever no pattern knows is shown as "other" and never dropped.
"""

from __future__ import annotations

import functools
import re
from typing import Any

_PATTERNS = {
    "communication": r"nccl",
    "attention": r"fmha|flash|attention|sdpa|dot_do_o|aten::_?scaled_dot",
    "foreach": r"multi_tensor_apply|fused_?adam|(?<![a-z])amp_|aten::_foreach|lpnorm",
    "compiled": r"^triton_(poi|per|red|unk)|^cpp_fused|graph_\d+_cpp|compiledfxgraph",
    "convolution": r"conv(?!ert)|implicit_gemm|fprop|dgrad|wgrad|winograd|im2col|col2im",
    "normalisation": r"(layer|group|batch|rms)_?norm|rowwisemoments|"
    r"computefusedparams|backwardfusedparams|"
    r"computeinternalgradients",
    "GEMM": r"gemm|gemv|cublas|cutlass|nvjet|splitk|wgmma|^triton_(tem|mm)|"
    r"aten::(addmm|mm|bmm|baddbmm|linear|matmul)$",
    "casts and layout": r"copy|convert|(?<!aten::)transpose|tensortransform|scalepacked|catarray|"
    r"nchwtonhwc|nhwctonchw|"
    r"aten::(_to_copy|to|contiguous|clone|cat)$",
    "views and allocation": r"aten::(\w*view|reshape|_reshape_alias|transpose|t|permute|expand|"
    r"as_strided|empty\w*|select|slice|narrow|unsqueeze|squeeze|flatten|unflatten|split\w*|chunk|"
    r"detach|alias|resize_|result_type)$",
    "reduction": r"reduce|softmax|aten::(sum|mean|norm|linalg_vector_norm)",
    "elementwise": r"elementwise|vectorized|fill|distribution|random|index|gelu|silu|upsample|"
    r"aten::(add|sub|mul|div|addc|pow|sqrt|exp|sigmoid|rand|normal|zero|sin|cos|neg|mse|embedding)",
}
_TABLE = tuple((category, re.compile(pattern)) for category, pattern in _PATTERNS.items())
_THIN = range(2, 65)
"""The smallest dimension of a product that a LoRA rank makes thin; 1 is a vector."""


@functools.cache  # a trace holds some hundred names, each of them thousands of times
def category_of(name: str) -> str:
    """The category of a kernel's or operator's name; "other" where no pattern knows it."""
    lowered = name.lower()
    if lowered.startswith("autograd::"):
        return "other"
    return next((category for category, pattern in _TABLE if pattern.search(lowered)), "other")


def is_thin(name: str, dims: Any) -> bool:
    """Whether a product's input shapes make the smallest of its three dimensions one of LoRA's
    ranks (2 to 64).

    `dims` are the "Input Dims" of the operator `name`, an mm or bmm, or one of those that add
    (addmm, baddbmm) and take a third matrix before the factors. Where a result is given to write
    to, as compiled code does, its shape comes last.
    """
    first = 1 if "add" in name else 0
    factors = list(dims or ())[first : first + 2]
    if len(factors) < 2 or not all(
        len(d) in (2, 3) and all(isinstance(size, int) for size in d) for d in factors
    ):
        return False
    (m, k), (_, n) = (factor[-2:] for factor in factors)
    return min(m, n, k) in _THIN
