"""What the facts mean: each check turns them into findings, each with what was found, why it
matters and what to type.

A check is a plain function of `Facts`; nothing here looks at the machine itself. `CHECKS` is the
order of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from labutils.profiling.cuda_architectures import runs_on
from labutils.tools.doctor.facts import CORE, Card, Facts, Import

OK, INFO, WARN, FAIL = "ok", "info", "warn", "fail"

BATCH_BYTES = 512 * 512 * 3 * 4
"""One 512x512 image as the stock training script hands it over: float32, three channels."""
PREFETCH = 2
MOST_WORKERS = 12
"""Lab 03's sweep ends here, as article A1's did."""


@dataclass(frozen=True)
class Finding:
    """One thing the doctor noticed. `status`: ok, info (good to know), warn (a lab suffers), fail
    (labs won't run).
    """

    check: str
    status: str
    found: str
    why: str = ""
    do: str = ""


def torch_from(wheels: str, version: str = "torch>=2.11,<2.14") -> str:
    """The command that installs a build of PyTorch for one CUDA version, such as "cu130"."""
    return (
        f"pip install --upgrade '{version}' --index-url https://download.pytorch.org/whl/{wheels}"
    )


def cards(facts: Facts) -> tuple[Card, ...]:
    """The GPUs, from whoever sees them."""
    return facts.driver.cards or ((facts.torch.card,) if facts.torch.card else ())


def capability(facts: Facts) -> tuple[int, int] | None:
    """(major, minor) of the GPU the course would use, None where there is none or nobody tells."""
    if facts.torch.card:
        return facts.torch.card.capability
    return facts.driver.cards[0].capability if facts.driver.cards else None


def check_python(facts: Facts) -> Iterator[Finding]:
    found = f"Python {facts.python[0]}.{facts.python[1]} on {facts.os}" + (
        ", in a container" if facts.container else ""
    )
    if (3, 11) <= facts.python < (3, 13):
        yield Finding("Python", OK, found)
    else:
        yield Finding(
            "Python",
            FAIL if facts.python < (3, 11) else WARN,
            found,
            "The course is tested on Python 3.11 and 3.12; its pinned packages may not install on "
            "others.",
            "make clean && make PYTHON=python3.12 install",
        )


def check_gpu(facts: Facts) -> Iterator[Finding]:
    found = cards(facts)
    if not found:
        yield Finding(
            "GPU",
            INFO,
            "none",
            "All labs run on the CPU at scale tiny; numbers that need a GPU are shown from the "
            "reference runs.",
        )
    for card in found:
        memory = f", {card.memory_gb:.0f} GB" if card.memory_gb else ""
        busy = card.used_gb is not None and card.memory_gb and card.used_gb > 0.1 * card.memory_gb
        if busy:
            yield Finding(
                "GPU",
                WARN,
                f"{card.name}{memory}, of which {card.used_gb:.0f} GB in use",
                "Whatever holds that memory may also compute: timings will vary, and large models "
                "may not fit.",
                "nvidia-smi    (lists the processes; end those you don't need, idle notebook "
                "kernels first)",
            )
        else:
            yield Finding("GPU", OK, f"{card.name}{memory}")


def check_driver(facts: Facts) -> Iterator[Finding]:
    driver = facts.driver
    if driver.status == "ok":
        serves = f", serves CUDA up to {driver.cuda[0]}.{driver.cuda[1]}" if driver.cuda else ""
        yield Finding("Driver", OK, f"{driver.version}{serves}")
    elif driver.status == "failed":
        unusable = not facts.torch.available
        mismatch = "mismatch" in driver.message.lower()
        yield Finding(
            "Driver",
            FAIL if unusable else WARN,
            f"nvidia-smi fails: {driver.message}",
            (
                "The driver was updated while its old kernel module is still loaded. "
                if mismatch
                else ""
            )
            + (
                "No GPU can be used"
                if unusable
                else "PyTorch still sees the GPU, but its utilisation can't be read (lab 02)"
            )
            + ".",
            "sudo reboot    (and if it persists: reinstall the driver; in a container, start it "
            "with --gpus all)",
        )
    elif facts.torch.available:
        yield Finding(
            "Driver",
            INFO,
            "PyTorch sees the GPU, but there is no nvidia-smi on the PATH",
            "Utilisation is read through the driver's own library, so labs still run.",
        )


def check_torch(facts: Facts) -> Iterator[Finding]:
    torch, imported = facts.torch, facts.imports.get("torch", Import("missing"))
    if imported.status != "ok":
        yield Finding(
            "PyTorch",
            FAIL,
            f"torch {imported.status}: {imported.message}"
            if imported.message
            else f"torch is {imported.status}",
            "Every lab needs it.",
            "make install    (in a clean checkout; or: pip install -r requirements.txt)",
        )
        return
    built = f"CUDA {torch.cuda[0]}.{torch.cuda[1]}" if torch.cuda else "CPU"
    found = f"torch {imported.version}, built for {built}"
    if torch.available or not facts.driver.cards:
        yield Finding("PyTorch", OK, found)
    elif facts.visible_devices in ("", "-1"):
        yield Finding(
            "PyTorch",
            INFO,
            f"{found}; the GPU is hidden by CUDA_VISIBLE_DEVICES={facts.visible_devices!r}",
            "Labs run on the CPU.",
            "unset CUDA_VISIBLE_DEVICES",
        )
    elif torch.cuda is None:
        yield Finding(
            "PyTorch",
            FAIL,
            f"{found}, though there is a GPU",
            "A CPU build can't use it.",
            _build_for(facts),
        )
    else:
        yield Finding(
            "PyTorch",
            FAIL,
            f"{found}, but it can't use the GPU",
            _why_unavailable(facts),
            _build_for(facts),
        )


def _why_unavailable(facts: Facts) -> str:
    built, serves = facts.torch.cuda, facts.driver.cuda
    if built and serves and built[0] > serves[0]:
        return (
            f"The driver {facts.driver.version} serves CUDA up to {serves[0]}.{serves[1]}; this "
            "build needs one for "
            f"CUDA {built[0]}.x. Update the driver, or install a build for the CUDA version that "
            "it serves."
        )
    return "PyTorch says: " + (facts.torch.warning or "nothing about the reason") + "."


def _build_for(facts: Facts) -> str:
    """The command that installs a PyTorch which this card and this driver can run."""
    has, serves = capability(facts), facts.driver.cuda or (13, 0)
    if has and has < (7, 5):
        return torch_from("cu126") + "    (the last builds that contain cards before Turing)"
    if serves >= (13, 0):
        return torch_from("cu130")
    if has and has >= (10, 0):  # Blackwell needs CUDA 12.8 at least
        return (
            torch_from("cu128", "torch==2.11.*") + "    (or a driver of 580 or newer, then cu130)"
        )
    return torch_from("cu126") + "    (or a driver of 580 or newer, then cu130)"


def check_architectures(facts: Facts) -> Iterator[Finding]:
    torch, has = facts.torch, capability(facts)
    if not torch.available or has is None or not torch.architectures:
        return
    card, built = f"sm_{has[0]}{has[1]}", ", ".join(torch.architectures)
    how = runs_on(torch.architectures, has)
    if how == "no":
        yield Finding(
            "Architectures",
            FAIL,
            f"the card is {card}; this PyTorch was compiled for {built}",
            'It starts with a mere warning that the card is not compatible, then fails at the first kernel ("no kernel '
            'image is available"). Article A1 met this on Blackwell (sm_120) with PyTorch 2.3.',
            _build_for(facts),
        )
    elif torch.trial:
        yield Finding(
            "Architectures",
            FAIL,
            f"a small matrix product on the GPU failed: {torch.trial}",
            f"This PyTorch ({built}) is compiled for the card ({card}): the driver or a CUDA "
            "library is at fault.",
            _build_for(facts),
        )
    elif how == "ptx":
        yield Finding(
            "Architectures",
            WARN,
            f"the card is {card}; this PyTorch ({built}) has no machine code for it, only PTX",
            "The driver compiles each kernel at its first use: starts are slow, and libraries "
            "without PTX may fail.",
            _build_for(facts),
        )
    else:
        yield Finding(
            "Architectures", OK, f"compiled for this card ({card}); a small matrix product ran"
        )


def check_formats(facts: Facts) -> Iterator[Finding]:
    has = capability(facts)
    if has is None:
        return
    can = {
        "BF16": has >= (8, 0),
        "TF32": has >= (8, 0),
        "FP8": has >= (8, 9),
        "FP4": has >= (10, 0),
    }
    able, unable = ([name for name in can if can[name] is wanted] for wanted in (True, False))
    found = f"compute capability {has[0]}.{has[1]}: FP16" + "".join(f", {name}" for name in able)
    if "FP8" in able:
        yield Finding(
            "Number formats",
            OK,
            found,
            f"No matrix units for {', '.join(unable)}." if unable else "",
        )
    else:
        yield Finding(
            "Number formats",
            INFO,
            found,
            f"No matrix units for {', '.join(unable)}: sections that need them show the reference "
            "results. FP8 starts "
            "with Ada (8.9) and Hopper (9.0), FP4 with Blackwell (10.0), BF16 with Ampere (8.0).",
        )


def check_libraries(facts: Facts) -> Iterator[Finding]:
    sound = []
    for name in CORE[1:]:
        imported = facts.imports.get(name, Import("missing"))
        if imported.status == "ok":
            sound.append(f"{name} {imported.version}".strip())
        else:
            yield Finding(
                name,
                WARN if imported.status == "slow" else FAIL,
                f"{imported.status}: {imported.message}" if imported.message else imported.status,
                "The labs need it."
                if imported.status != "slow"
                else "A cold disk or a busy machine explains it, once; if it stays, something in the import hangs.",
                "labutils doctor    (again)"
                if imported.status == "slow"
                else "pip install -r requirements.txt",
            )
    if sound:
        yield Finding("Libraries", OK, ", ".join(sound))


@dataclass(frozen=True)
class _Extra:
    """A package that some labs use. `always`: `make install` brings it; `gpu`: it is of no use
    without one.
    """

    name: str
    why: str
    do: str
    always: bool = False
    gpu: bool = False


EXTRAS = (
    _Extra(
        "bitsandbytes",
        "QLoRA's 4-bit weights come from it.",
        "pip install --force-reinstall bitsandbytes",
        always=True,
    ),
    _Extra(
        "nvitop",
        "Lab 02 reads the GPU's utilisation through it.",
        "pip install --force-reinstall nvitop",
        always=True,
    ),
    _Extra(
        "triton",
        "torch.compile makes its GPU kernels with it (lab 04).",
        "pip install --force-reinstall triton",
        gpu=True,
        always=True,
    ),
    _Extra(
        "transformer_engine.pytorch",
        "It has FP8 layers. The package without its torch extension can be imported and is of no "
        "use.",
        "make te    (compiles for minutes; needs a CUDA toolkit)",
        gpu=True,
    ),
    _Extra(
        "xformers",
        'No lab needs it: PyTorch\'s own attention does the same. Article A1 found it refusing Blackwell ("too new").',
        "pip uninstall xformers    (so that diffusers can't pick it up)",
        gpu=True,
    ),
    _Extra("torchao.float8", "Lab 05 compares its FP8 layers.", "make torchao", gpu=True),
    _Extra("unsloth", "It is another way to QLoRA.", "make unsloth", gpu=True),
)


def check_extras(facts: Facts) -> Iterator[Finding]:
    gpu, useless_here = bool(cards(facts)), []
    for extra in EXTRAS:
        imported = facts.imports.get(extra.name, Import("missing"))
        said = f": {imported.message}" if imported.message else ""
        if imported.status == "ok":
            yield Finding(extra.name, OK, imported.version or "importable")
        elif extra.gpu and not gpu:
            useless_here.append(f"{extra.name} {imported.status}")
        elif imported.status == "missing":
            needed = extra.always
            do = extra.do if extra.name != "xformers" else ""
            yield Finding(extra.name, WARN if needed else INFO, "not installed", extra.why, do)
        else:
            again = "labutils doctor    (again; a first import is the slowest)"
            do = again if imported.status == "slow" else extra.do
            yield Finding(extra.name, WARN, f"{imported.status}{said}", extra.why, do)
    if useless_here:
        yield Finding(
            "GPU packages", INFO, ", ".join(useless_here), "They are of no use without a GPU."
        )


def check_compiler(facts: Facts) -> Iterator[Finding]:
    compiler = facts.compiler
    install = {"macOS": "xcode-select --install"}.get(
        facts.os.split()[0], "sudo apt install g++    (or your system's package)"
    )
    if compiler.status == "missing":
        named = f" (CXX names {compiler.path!r}, which is not there)" if compiler.path else ""
        why = "torch.compile builds C++ with it; without one, lab 04 skips its compiled rungs."
        yield Finding("C++ compiler", WARN, f"none found{named}", why, install)
    elif compiler.status == "broken":
        why = "torch.compile builds C++ with OpenMP; lab 04 would skip its compiled rungs."
        yield Finding(
            "C++ compiler",
            WARN,
            f"{compiler.path} can't build a program: {compiler.message}",
            why,
            install,
        )
    else:
        yield Finding(
            "C++ compiler", OK, f"{compiler.path.rpartition('/')[2]} builds programs with OpenMP"
        )
    if compiler.status == "ok" and not compiler.python_headers:
        yield Finding(
            "Python headers",
            WARN,
            "Python.h is not there",
            "What torch.compile and Triton build is loaded into Python, and compiling that needs "
            "the headers.",
            f"sudo apt install python{facts.python[0]}.{facts.python[1]}-dev    (or conda's "
            "Python, which has them)",
        )


def check_cores(facts: Facts) -> Iterator[Finding]:
    limited = facts.cores < facts.machine_cores
    found = f"{facts.cores} usable" + (
        f" of the machine's {facts.machine_cores}" if limited else ""
    )
    if facts.cores >= 4:
        yield Finding("CPU cores", OK, found)
    else:
        yield Finding(
            "CPU cores",
            INFO,
            found,
            "DataLoader workers share them with the training process: lab 03's best number of "
            "workers will be small.",
            "docker run --cpus=8 ...    (in a batch system: ask for more)" if limited else "",
        )


def check_ram(facts: Facts) -> Iterator[Finding]:
    if facts.ram_gb is None:
        return
    if facts.ram_gb >= 7:
        yield Finding("RAM", OK, f"{facts.ram_gb:.0f} GB")
    else:
        yield Finding(
            "RAM",
            WARN,
            f"{facts.ram_gb:.1f} GB",
            "Tests and labs with several workers need about 6 GB; where memory runs out, a "
            "notebook's kernel dies.",
            "docker run --memory=8g ...    (or close other programs)",
        )


def workers_that_fit(
    free_gb: float, batch_bytes: int = BATCH_BYTES, prefetch: int = PREFETCH
) -> int:
    """How many DataLoader workers can have `prefetch` batches each under way in `free_gb` of shared
    memory.
    """
    return int(free_gb * 1e9 // (batch_bytes * prefetch))


def check_shared_memory(facts: Facts) -> Iterator[Finding]:
    if facts.shm_gb is None:
        yield Finding(
            "Shared memory",
            INFO,
            "no /dev/shm on this system",
            "Workers hand batches over through files; lab 03 says so.",
        )
        return
    free = facts.shm_gb if facts.shm_free_gb is None else facts.shm_free_gb
    fit = workers_that_fit(free)
    size = f"{facts.shm_gb * 1e3:.0f} MB" if facts.shm_gb < 1 else f"{facts.shm_gb:.1f} GB"
    left = f", {free * 1e3:.0f} MB of it free" if free < 0.9 * facts.shm_gb else ""
    one = f"{BATCH_BYTES / 1e6:.1f} MB"
    if fit >= 4 * MOST_WORKERS:  # labs also run micro-batches of four
        yield Finding("Shared memory", OK, f"/dev/shm has {size}{left}")
        return
    yield Finding(
        "Shared memory",
        WARN if fit >= 1 else FAIL,
        f"/dev/shm has {size}{left}: enough for {fit} workers at batch 1, {fit // 4} at batch 4",
        f"Each DataLoader worker keeps {PREFETCH} batches there ({one} an image of 512x512 in "
        "float32). More "
        "workers die with a bus error: it is how article A1's 12 workers failed. Docker gives 64 "
        "MB unless told.",
        "docker run --shm-size=8g ..."
        if facts.container or facts.shm_gb < 0.1
        else "sudo mount -o remount,size=8G /dev/shm",
    )


def check_cache(facts: Facts) -> Iterator[Finding]:
    cache = facts.cache
    if not cache.writable:
        yield Finding(
            "Cache",
            FAIL,
            f"{cache.path} can't be written to: {cache.message}",
            "Generated images and compiled code are kept there.",
            "export LABUTILS_CACHE=/a/folder/you/own",
        )
    elif cache.free_gb < 10:
        yield Finding(
            "Cache",
            FAIL if cache.free_gb < 1 else WARN,
            f"{cache.path} has {cache.free_gb:.1f} GB free",
            'Generated images and compiled code take about 3 GB; real weights (weights="hub") 5 GB, later more.',
            "export LABUTILS_CACHE=/a/larger/disk",
        )
    else:
        yield Finding("Cache", OK, f"{cache.path}, {cache.free_gb:.0f} GB free")


def check_hub(facts: Facts) -> Iterator[Finding]:
    hub = facts.hub
    if hub.status == "reachable":
        yield Finding("Model hub", OK, f"{hub.endpoint} answers")
        return
    found = (
        f"switched off ({hub.message})"
        if hub.status == "offline"
        else f"{hub.endpoint} does not answer: {hub.message}"
    )
    yield Finding(
        "Model hub",
        INFO,
        found,
        'No lab needs it: the defaults are weights="random" and data="generated". Only "hub" for either does.',
        "unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE" if hub.status == "offline" else "",
    )


CHECKS: tuple[tuple[str, Callable[[Facts], Iterator[Finding]], tuple[str, ...]], ...] = (
    ("Python", check_python, ("os",)),
    ("GPU", check_gpu, ("driver", "imports")),
    ("Driver", check_driver, ("driver", "imports")),
    ("PyTorch", check_torch, ("imports", "driver")),
    ("Architectures", check_architectures, ("imports", "driver")),
    ("Number formats", check_formats, ("imports", "driver")),
    ("Libraries", check_libraries, ("imports",)),
    ("Extras", check_extras, ("imports", "driver")),
    ("C++ compiler", check_compiler, ("compiler",)),
    ("CPU cores", check_cores, ("cores",)),
    ("RAM", check_ram, ("cores",)),
    ("Shared memory", check_shared_memory, ("shm_gb",)),
    ("Cache", check_cache, ("cache",)),
    ("Model hub", check_hub, ("hub",)),
)
"""Name, check, and the collectors whose failure leaves it nothing to judge."""
