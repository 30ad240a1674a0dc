"""What the doctor looks at. A check says what it sees, why that matters and what to type."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from labutils.data.file_cache import cache_folder
from labutils.profiling import machine
from labutils.profiling.cuda_architectures import runs_on
from labutils.tools.doctor.imports import Import, try_imports

OK, INFO, WARN, FAIL = "ok", "info", "warn", "fail"
CORE = ("torch", "transformers", "diffusers", "peft", "accelerate", "datasets")
EXTRAS = {
    "bitsandbytes": ("QLoRA's 4-bit weights come from it.", "make install"),
    "nvitop": ("Lab 02 reads the GPU's utilization through it.", "make install"),
    "triton": ("torch.compile makes its GPU kernels with it.", "make install"),
    "transformer_engine.pytorch": ("It has FP8 layers.", "make te"),
    "unsloth": ("It is another way to QLoRA.", "make unsloth"),
    "xformers": ("No lab needs it.", "pip uninstall xformers"),
}
"""Package -> (why, what to type). Those of `make install` are no option."""
WITHOUT_GPU = ("bitsandbytes", "nvitop")
"""Those that are of use without a GPU, too. They can be imported after those of `CORE`."""
BATCH_BYTES, PREFETCH, MOST_WORKERS = 512 * 512 * 3 * 4, 2, 12
"""One 512x512 image in float32, the batches a worker keeps ready, and where lab 03's sweep ends."""


@dataclass(frozen=True)
class Finding:
    """`status`: "ok", "info" (good to know), "warn" (a lab suffers) or "fail" (labs won't run)."""

    check: str
    status: str
    found: str
    why: str = ""
    do: str = ""


def check_versions() -> Iterator[Finding]:
    """The installed packages against what the course asks for, as pip sees them."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    wrong = [line for line in done.stdout.splitlines() if line.startswith("labutils ")]
    if wrong or not done.stdout:
        words = " ".join(wrong) or done.stderr.strip()
        why = "The labs were tested with other versions."
        yield Finding("Versions", WARN, words, why, "make install")
    else:
        words = f"Python {platform.python_version()}, packages as the course asks for"
        yield Finding("Versions", OK, words)


def check_gpu(torch: Import) -> Iterator[Finding]:
    """The driver and the GPU, as nvidia-smi and PyTorch see them."""
    facts, driver = torch.facts, machine.driver()
    built = f"torch {torch.version} for {'CUDA ' + facts['cuda'] if facts.get('cuda') else 'CPU'}"
    if torch.status != "ok":
        words = f"torch is {torch.status}: {torch.message}"
        yield Finding("GPU", FAIL, words, "Every lab needs it.", "make install")
    elif facts["available"]:
        words = f"{facts['card']}, {facts['gb']:.0f} GB; {built}"
        is_shared = facts["used_gb"] > 0.1 * facts["gb"]
        words += f"; {facts['used_gb']:.0f} GB are in use" * is_shared
        why = "Whatever holds its memory may also compute: times will vary."
        do = "nvidia-smi    (lists the processes)"
        yield Finding("GPU", WARN if is_shared else OK, words, why, do)
    elif driver and os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        words = f"hidden by CUDA_VISIBLE_DEVICES; {built}"
        yield Finding("GPU", INFO, words, "Labs run on the CPU.", "unset CUDA_VISIBLE_DEVICES")
    elif driver:
        words = f"there is one, with driver {driver}, but not for PyTorch ({built})"
        why = facts["warning"] or "A build for the CPU can't use it."
        serves_13 = int(driver.partition(".")[0]) >= 580  # the driver, CUDA 13
        yield Finding("GPU", FAIL, words, why, build_for("cu130" if serves_13 else "cu126"))
    elif shutil.which("nvidia-smi"):
        do = "nvidia-smi    (says why. Mostly a reboot helps; a container needs --gpus all)"
        yield Finding("GPU", FAIL, "nvidia-smi is here and fails", "No GPU can be used.", do)
    else:
        why = "All labs run on the CPU at scale tiny; the rest is shown from our GPUs' records."
        yield Finding("GPU", INFO, f"none; {built}", why)


def check_architectures(torch: Import) -> Iterator[Finding]:
    """The card's compute capability against the architectures that PyTorch was compiled for."""
    if not torch.facts.get("available"):
        return
    major, minor = torch.facts["capability"]
    built = torch.facts["architectures"]
    words = f"the card is sm_{major}{minor}; this PyTorch was compiled for {', '.join(built)}"
    how = runs_on(built, (major, minor))
    do = build_for("cu130" if (major, minor) >= (7, 5) else "cu126")
    if how == "no":
        why = 'It starts with a mere warning, then fails: "no kernel image is available".'
        yield Finding("Architectures", FAIL, words, why, do)
    elif torch.facts["trial"]:
        why = "The driver or a CUDA library is at fault."
        words = f"a small matrix product failed: {torch.facts['trial']}"
        yield Finding("Architectures", FAIL, words, why, do)
    elif how == "ptx":
        why = "The driver compiles each kernel at its first use: starts are slow."
        yield Finding("Architectures", WARN, words, why, do)
    else:
        words = f"compiled for this card (sm_{major}{minor}); a small matrix product ran"
        yield Finding("Architectures", OK, words)


def build_for(wheels: str) -> str:
    """The command that installs the PyTorch of an index of wheels."""
    index = f"https://download.pytorch.org/whl/{wheels}"
    return f"pip install --upgrade 'torch>=2.11,<2.14' --index-url {index}"


def check_libraries(imports: Sequence[Import]) -> Iterator[Finding]:
    """How importing went, `imports` being of `CORE` and `EXTRAS`."""
    sound = []
    for one in imports:
        words = f"{one.name} {one.status}" + f": {one.message}" * bool(one.message)
        if one.status == "ok":
            sound.append(f"{one.name} {one.version}".strip())
        elif one.name in CORE:
            yield Finding("Libraries", FAIL, words, "The labs need it.", "make install")
        else:
            why, do = EXTRAS[one.name]
            is_option = one.status == "missing" and do != "make install"
            do = "" if is_option and one.name == "xformers" else do
            yield Finding("Libraries", INFO if is_option else WARN, words, why, do)
    yield Finding("Libraries", OK, ", ".join(sound))


def check_compiler() -> Iterator[Finding]:
    """The C++ compiler that torch.compile would use builds a program with OpenMP and Python.h."""
    is_mac = sys.platform == "darwin"
    compiler = os.environ.get("CXX") or ("clang++" if is_mac else "g++")
    openmp = [] if is_mac else ["-fopenmp"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "trial.cpp"
        source.write_text("#include <Python.h>\n#include <vector>\nint main() { return 0; }")
        words = [compiler, *openmp, f"-I{sysconfig.get_paths()['include']}", source]
        try:
            done = subprocess.run([*words, "-o", f"{folder}/trial"], capture_output=True, text=True)
            last = f"exit code {done.returncode}: {done.stderr.strip()[:200]}"
            problem = last if done.returncode else ""
        except OSError as error:
            problem = str(error)
    if problem:
        why = "torch.compile builds C++ with it; labs would skip what they compile."
        do = "xcode-select --install" if is_mac else "sudo apt install g++ python3-dev"
        yield Finding("C++ compiler", WARN, f"{compiler} fails: {problem}", why, do)
    else:
        yield Finding("C++ compiler", OK, f"{compiler} builds programs with OpenMP")


def check_host(cores: int, ram_gb: float) -> Iterator[Finding]:
    """Cores and RAM that this process may use."""
    words = f"{cores} cores, {ram_gb:.0f} GB of RAM"
    if ram_gb < 7:
        why = "Labs with several workers need about 6 GB; without it a notebook's kernel dies."
        yield Finding("Host", WARN, words, why, "docker run --memory=8g ...    (or close programs)")
    else:
        why = "DataLoader workers share them with the training: few workers will be best."
        yield Finding("Host", INFO if cores < 4 else OK, words, why)


def check_shared_memory(free_gb: float | None) -> Iterator[Finding]:
    """/dev/shm against the batches that DataLoader workers keep there."""
    if free_gb is None:
        yield Finding("Shared memory", INFO, "no /dev/shm here", "Workers hand over by files.")
        return
    fit = int(free_gb * 1e9 // (BATCH_BYTES * PREFETCH))
    words = f"/dev/shm has {free_gb:.3g} GB free, enough for {fit} workers at batch 1"
    status = WARN if fit else FAIL
    if fit >= 4 * MOST_WORKERS:  # labs also run micro-batches of four
        status = OK
    why = "More workers die with a bus error. Docker gives 64 MB unless told otherwise."
    do = "docker run --shm-size=8g ...    (or: sudo mount -o remount,size=8G /dev/shm)"
    yield Finding("Shared memory", status, words, why, do)


def check_disk(folder: Path) -> Iterator[Finding]:
    """Room in the cache of images, compiled code and downloads."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"doctor")
        free_gb = shutil.disk_usage(folder).free / 1e9
        words = f"{str(folder).replace(str(Path.home()), '~', 1)}, {free_gb:.0f} GB free"
    except OSError as error:
        free_gb, words = 0.0, f"{folder} can't be written to: {error.strerror}"
    status = FAIL if free_gb < 1 else WARN if free_gb < 10 else OK
    why = 'Images and compiled code take about 3 GB, real weights (weights="hub") 5 GB.'
    yield Finding("Disk", status, words, why, "export LABUTILS_CACHE=/a/larger/disk/of/yours")


def check_environment() -> Iterator[Finding]:
    """Variables of the shell that would change what labs do without a word."""
    if os.environ.get("TORCHDYNAMO_DISABLE", "0") != "0":
        why = "torch.compile does nothing: lab 04's compiled rungs would be eager ones."
        do = "unset TORCHDYNAMO_DISABLE"
        yield Finding("Environment", WARN, "TORCHDYNAMO_DISABLE is set", why, do)
    backend = os.environ.get("MPLBACKEND", "inline")
    if backend != "inline" and not backend.startswith("module://"):
        why = "Notebooks in JupyterLab would show no figures."
        yield Finding("Environment", WARN, f"MPLBACKEND is {backend}", why, "unset MPLBACKEND")


def examine() -> list[Finding]:
    """Every check of this machine, in the order of the table: some 20 s. Raises nothing."""
    with ThreadPoolExecutor(4) as pool:
        # These two run programs of their own: beside the imports, which take longer.
        versions = pool.submit(list, check_versions())
        compiler = pool.submit(list, check_compiler())
        imports = list(try_imports((*CORE, *WITHOUT_GPU)))  # in one process: they share much
        torch = imports[0]
        if torch.facts.get("available"):
            others = [(name,) for name in EXTRAS if name not in WITHOUT_GPU]
            imports += [tried[0] for tried in pool.map(try_imports, others)]
    shm = Path("/dev/shm")
    checks = (
        versions.result,
        partial(check_gpu, torch),
        partial(check_architectures, torch),
        partial(check_libraries, imports),
        compiler.result,
        lambda: check_host(machine.usable_cores(), machine.ram_gb()),
        lambda: check_shared_memory(shutil.disk_usage(shm).free / 1e9 if shm.is_dir() else None),
        lambda: check_disk(cache_folder()),
        check_environment,
    )
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check()
        except Exception as error:  # the other findings must still reach the person
            findings.append(Finding("Doctor", WARN, f"a check failed: {error!r}"))
    return findings
