"""What the doctor looks at: plain data about a machine, and how it is collected without ever
hurting the one who asks.

Everything that can hang, crash or patch other libraries (imports, drivers, compilers, the network)
runs in a process of its own with a time limit. A collector that fails becomes a note in
`Facts.problems`; it never raises.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labutils.profiling import machine
from labutils.profiling.machine import usable_cores
from labutils.tools.doctor import import_probe
from labutils.tools.doctor.import_probe import MARK
from labutils.training.child_process import end_group

GB = 10**9
IMPORT_TIMEOUT_S = 18
CORE = ("torch", "transformers", "diffusers", "peft", "accelerate", "datasets")
OPTIONAL = (
    "bitsandbytes",
    "nvitop",
    "triton",
    "transformer_engine.pytorch",
    "torchao.float8",
    "xformers",
    "unsloth",
)


@dataclass(frozen=True)
class Import:
    """How importing a package went. `status`: ok, missing, broken (an exception), crashed or slow
    (given up).
    """

    status: str = "ok"
    version: str = ""
    message: str = ""


@dataclass(frozen=True)
class Card:
    """One GPU as the driver lists it; memory in 10^9 bytes, `capability` (major, minor), None where
    not told.
    """

    name: str
    memory_gb: float | None = None
    used_gb: float | None = None
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Driver:
    """What nvidia-smi says. `status`: ok, missing (no such command) or failed (`message` has its
    words).

    `cuda` is the newest CUDA version that the driver serves.
    """

    status: str = "missing"
    version: str = ""
    cuda: tuple[int, int] | None = None
    cards: tuple[Card, ...] = ()
    message: str = ""


@dataclass(frozen=True)
class Torch:
    """What PyTorch says about itself.

    `cuda`: what it was built with, None for a CPU build; `architectures`: what it was compiled for
    ("sm_90" machine code, "compute_90" PTX); `available`: whether it can use a GPU; `trial`: how a
    small product there failed, if so.
    """

    cuda: tuple[int, int] | None = None
    architectures: tuple[str, ...] = ()
    available: bool = False
    card: Card | None = None
    trial: str = ""
    warning: str = ""


@dataclass(frozen=True)
class Compiler:
    """The C++ compiler that torch.compile would use. `status`: ok, missing or broken."""

    status: str = "ok"
    path: str = ""
    message: str = ""
    python_headers: bool = True


@dataclass(frozen=True)
class Cache:
    """The folder where generated images, compiled code and downloads are kept."""

    path: str = ""
    writable: bool = True
    free_gb: float = 100.0
    message: str = ""


@dataclass(frozen=True)
class Hub:
    """Whether the model hub answers. `status`: reachable, unreachable, or offline (switched off on
    purpose).
    """

    status: str = "reachable"
    endpoint: str = "https://huggingface.co"
    message: str = ""


@dataclass(frozen=True)
class Facts:
    """A machine as the doctor sees it. The defaults describe a sound laptop without a GPU; tests
    change what they test.

    `visible_devices` is CUDA_VISIBLE_DEVICES; `problems` names the fields that could not be
    collected, and why.
    """

    os: str = "Linux"
    python: tuple[int, int] = (3, 11)
    container: bool = False
    visible_devices: str | None = None
    driver: Driver = Driver()
    torch: Torch = Torch()
    imports: dict[str, Import] = field(default_factory=lambda: dict.fromkeys(CORE, Import()))
    cores: int = 8
    machine_cores: int = 8
    ram_gb: float | None = 32.0
    shm_gb: float | None = 16.0
    shm_free_gb: float | None = 16.0
    compiler: Compiler = Compiler()
    cache: Cache = Cache()
    hub: Hub = Hub()
    problems: dict[str, str] = field(default_factory=dict)


def collect() -> Facts:
    """Look at this machine; a few seconds, at most about 20."""
    collectors: dict[str, Callable[[], dict[str, Any]]] = {
        "imports": _imports,  # the slowest first
        "driver": lambda: {"driver": driver()},
        "compiler": lambda: {"compiler": compiler()},
        "hub": lambda: {"hub": hub()},
        "cache": lambda: {"cache": cache()},
        "os": lambda: {
            "os": machine.os_name(),
            "python": sys.version_info[:2],
            "container": in_container(),
        },
        "visible_devices": lambda: {"visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES")},
        "cores": lambda: {
            "cores": usable_cores(),
            "machine_cores": os.cpu_count() or 1,
            "ram_gb": machine.ram_gb(),
        },
        "shm_gb": lambda: {"shm_gb": machine.shm_gb(), "shm_free_gb": _shm_free_gb()},
    }
    found, problems = {}, {}
    with ThreadPoolExecutor(len(collectors)) as pool:
        pending = {name: pool.submit(collector) for name, collector in collectors.items()}
        for name, future in pending.items():
            try:
                found |= future.result()
            except (
                Exception
            ) as error:  # whatever it is, the other findings must still reach the person
                problems[name] = f"{type(error).__name__}: {error}"
    return Facts(**found, problems=problems)


def in_container() -> bool:
    """Whether this process runs in a container."""
    return (
        any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv"))
        or "KUBERNETES_SERVICE_HOST" in os.environ
    )


def _shm_free_gb() -> float | None:
    return round(shutil.disk_usage("/dev/shm").free / GB, 3) if Path("/dev/shm").is_dir() else None


# What importing does


def _imports() -> dict[str, Any]:
    """Import each package in a process of its own (CORE, which build on each other, in one),
    several at once.
    """
    chains = [CORE] + [(name,) for name in OPTIONAL if _is_installed(name)]
    with ThreadPoolExecutor(max(2, min(4, usable_cores()))) as pool:
        answers = list(pool.map(try_imports, chains))
    imports = {name: Import(status="missing") for name in OPTIONAL} | {
        k: v for found, _ in answers for k, v in found.items()
    }
    return {"imports": imports, "torch": answers[0][1]}


def _is_installed(name: str) -> bool:
    """Whether there is a package of that name at all (asking does not import it)."""
    return importlib.util.find_spec(name.partition(".")[0]) is not None


def try_imports(
    names: tuple[str, ...], timeout_s: float = IMPORT_TIMEOUT_S
) -> tuple[dict[str, Import], Torch]:
    """Import `names` one after the other in a new process. Where that dies, the rest is tried in
    another one.
    """
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # some packages write a cache where they are imported
        command = [sys.executable, "-P", import_probe.__file__, *names]
        code, output, errors = run(command, timeout_s, cwd=folder, env=os.environ | quiet)
    said = [json.loads(line.partition(MARK)[2]) for line in output.split("\n") if MARK in line]
    imports = {
        word["name"]: Import(word["status"], word.get("version", ""), word.get("message", ""))
        for word in said
        if "name" in word
    }
    torch = next((_torch_from(word["torch"]) for word in said if "torch" in word), Torch())
    unfinished = [name for name in names if name not in imports]
    if unfinished:
        imports[unfinished[0]] = _death(code, errors, timeout_s)
        if code is not None and unfinished[1:]:
            imports |= try_imports(tuple(unfinished[1:]), timeout_s)[0]
        else:
            imports |= dict.fromkeys(
                unfinished[1:], Import("slow", message=f"not reached within {timeout_s:g} s")
            )
    return imports, torch


def _death(code: int | None, errors: str, timeout_s: float) -> Import:
    """What to say of an import that ended its process, or had to be ended."""
    if code is None:
        return Import("slow", message=f"not done after {timeout_s:g} s")
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    last = errors.strip().splitlines()[-1][:200] if errors.strip() else ""
    return Import(
        "crashed", message=f"the process ended with {how}" + (f": {last}" if last else "")
    )


def _torch_from(said: dict[str, Any]) -> Torch:
    card = None
    if said["available"]:
        card = Card(
            said["name"], round(said["memory"] / GB, 1), capability=tuple(said["capability"])
        )
    return Torch(
        cuda=_version_pair(said["cuda"] or ""),
        architectures=tuple(said["architectures"]),
        available=said["available"],
        card=card,
        trial=said["trial"],
        warning=said["warning"],
    )


def _version_pair(text: str) -> tuple[int, int] | None:
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def run(command: list[str], timeout_s: float, **options: Any) -> tuple[int | None, str, str]:
    """(exit code, output, errors) of `command`; the code is None where it had to be ended, with all
    it had started.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        **options,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
            return process.returncode, output, errors
        except subprocess.TimeoutExpired:
            end_group(process)
            output, errors = process.communicate()
            return None, output, errors


# The driver


def driver(command: str = "nvidia-smi") -> Driver:
    """Ask nvidia-smi for the driver and its cards; a broken driver is an answer too."""
    if shutil.which(command) is None:
        return Driver("missing")
    fields = "driver_version,name,memory.total,memory.used,compute_cap"
    for asked in (
        fields,
        fields.removesuffix(",compute_cap"),
    ):  # drivers before 2021 don't know the last field
        code, output, errors = run(
            [command, f"--query-gpu={asked}", "--format=csv,noheader,nounits"], 15
        )
        if code == 0:
            break
    if code != 0:
        words = " ".join((output + " " + errors).split())[:300]
        return Driver(
            "failed",
            message=words
            or ("it did not answer within 15 s" if code is None else f"exit code {code}"),
        )
    rows = [
        [cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.strip()
    ]
    _, overview, _ = run([command], 15)
    served = re.search(r"CUDA[^\n:]*Version:\s*([\d.]+)", overview)
    return Driver(
        "ok",
        version=rows[0][0] if rows else "",
        cuda=_version_pair(served[1]) if served else None,
        cards=tuple(_card(row) for row in rows),
    )


def _card(row: list[str]) -> Card:
    """A row of nvidia-smi's answer; what it can't tell ("[N/A]") is None. Its MiB are 2^20 bytes."""
    total, used = (
        round(float(cell) * 2**20 / GB, 1) if re.fullmatch(r"[\d.]+", cell) else None
        for cell in row[2:4]
    )
    return Card(row[1], total, used, _version_pair(row[4]) if len(row) > 4 else None)


# The compiler, the cache, the hub


def compiler() -> Compiler:
    """Compile a line of C++ with OpenMP, as torch.compile does on a CPU, with the compiler that it
    would take.
    """
    headers = (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()
    named = os.environ.get("CXX")
    usual = ("clang++", "g++") if platform.system() == "Darwin" else ("g++", "clang++", "c++")
    path = next(
        (found for name in ([named] if named else usual) if (found := shutil.which(name))), None
    )
    if path is None:
        return Compiler("missing", path=named or "", python_headers=headers)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "trial.cpp"
        source.write_text(
            "#include <cmath>\n#include <vector>\nint main() "
            "{ return std::vector<int>(1).size() != 1; }\n"
        )
        openmp = [] if platform.system() == "Darwin" else ["-fopenmp"]
        code, output, errors = run(
            [path, *openmp, str(source), "-o", str(source.with_suffix(".out"))], 15
        )
    if code != 0:
        said = (errors or output).strip().splitlines()
        return Compiler("broken", path, said[0][:200] if said else f"exit code {code}", headers)
    return Compiler("ok", path, python_headers=headers)


def cache() -> Cache:
    """The course's cache folder: LABUTILS_CACHE, else ~/.cache/labutils."""
    path = Path(os.environ.get("LABUTILS_CACHE") or "~/.cache/labutils").expanduser()
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    free_gb = round(shutil.disk_usage(there).free / GB, 1)
    shown = str(path).replace(str(Path.home()), "~", 1)  # what a notebook prints is often passed on
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"doctor")
    except OSError as error:
        return Cache(shown, False, free_gb, error.strerror or type(error).__name__)
    return Cache(shown, True, free_gb)


def hub(timeout_s: float = 4) -> Hub:
    """Ask the model hub for its front page's header; any answer at all means that it can be
    reached.
    """
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    for switch in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(switch, "").upper() in ("1", "ON", "YES", "TRUE"):
            return Hub("offline", endpoint, f"{switch}={os.environ[switch]}")
    answer: list[str] = []
    asking = threading.Thread(
        target=lambda: answer.append(_refusal(endpoint, timeout_s)), daemon=True
    )
    asking.start()
    asking.join(timeout_s + 1)  # looking up a name has no time limit of its own
    refusal = answer[0] if answer else f"no answer within {timeout_s + 1:g} s"
    return Hub("unreachable" if refusal else "reachable", endpoint, refusal)


def _refusal(endpoint: str, timeout_s: float) -> str:
    """Why `endpoint` can't be reached, "" where it answers at all."""
    try:
        urllib.request.urlopen(
            urllib.request.Request(endpoint, method="HEAD"), timeout=timeout_s
        ).close()
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
    return ""


@functools.cache
def this_machine() -> Facts:
    """`collect()`, once in a process."""
    return collect()
