"""Which machine code runs on which card, and what happens where none does.

The rules are those of NVIDIA's CUDA C++ Programming Guide, "Binary Compatibility" and "PTX
Compatibility".
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from labutils.profiling import compat, cuda
from labutils.recipe import Unavailable

STABLE_BEFORE_BLACKWELL = ("sm_50", "sm_60", "sm_70", "sm_80", "sm_90")
"""What article A1's PyTorch 2.3 was compiled for, in its warning's words."""

_PTX = ".version 7.8\n.target sm_{number}\n.address_size 64\n.visible .entry nothing() {{ ret; }}\n"


def runs_on(architectures: Iterable[str], capability: tuple[int, int]) -> str:
    """How code compiled for `architectures` runs on a card of `capability` (major, minor):
    "native", "ptx" or "no".

    Machine code (sm_XY) runs on cards of the same major version and the same or a higher minor one;
    with the suffix "a" on exactly that capability, with "f" within its family. PTX (compute_XY) the
    driver compiles for any later card.
    """
    how = "no"
    for kind, number in re.findall(
        r"(?:^|\s)(sm|compute)_(\d\d+[af]?)(?=\s|$)", " ".join(architectures)
    ):
        digits = number.rstrip("af")
        built = (int(digits[:-1]), int(digits[-1]))
        same_family = built[0] == capability[0] and built[1] <= capability[1]
        fits = built == capability if number.endswith("a") else same_family
        if kind == "sm" and fits:
            return "native"
        if kind == "compute" and (fits if number != digits else built <= capability):
            how = "ptx"
    return how


def try_unlisted_architecture() -> dict[str, Any]:
    """What a PyTorch that lacks this card's architecture would do here: {warned, failed (0 or 1),
    message}.

    PyTorch's own check is given a list without this card (does it warn?), then the driver a kernel
    that was compiled for another major version only (does it load?). Nothing is left changed.
    Raises `Unavailable` without a GPU or an assembler.
    """
    capability = cuda.capability()
    if capability is None:
        raise Unavailable("there is no GPU whose architecture could be missing")
    said, refusal = _warning_without(capability), ""
    code = _assemble(90 if capability[0] == 8 else 80)
    try:
        compat.load_machine_code(code)
    except RuntimeError as error:
        refusal = str(error)
    return {"warned": int(bool(said)), "failed": int(bool(refusal)), "message": refusal or said}


def _warning_without(capability: tuple[int, int]) -> str:
    """What PyTorch's check warns of when its list has none of the card's major version; "" for
    nothing.
    """
    import torch

    others = [name for name in STABLE_BEFORE_BLACKWELL if runs_on([name], capability) == "no"]
    real = torch.cuda.get_arch_list
    try:
        torch.cuda.get_arch_list = lambda: others
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compat.capability_warning()
    finally:
        torch.cuda.get_arch_list = real
    return " ".join(str(caught[0].message).split()) if caught else ""


def _assemble(number: int) -> bytes:
    """An empty kernel as machine code of sm_`number`."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "nothing.ptx", Path(folder) / "nothing.cubin"
        source.write_text(_PTX.format(number=number))
        command = [_assembler(), f"-arch=sm_{number}", source, "-o", target]
        subprocess.run(command, check=True, capture_output=True)
        return target.read_bytes()


def _assembler() -> str:
    """The path of ptxas: Triton's, which PyTorch for GPUs brings, or the CUDA toolkit's."""
    with suppress(ImportError):
        from triton import knobs

        return knobs.nvidia.ptxas.path
    if path := shutil.which("ptxas"):
        return path
    raise Unavailable("there is no ptxas (Triton and the CUDA toolkit bring one)")
