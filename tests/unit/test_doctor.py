"""The doctor on faked machines, and its way of looking without being hurt."""

import dataclasses
import json
import os
import pathlib
import stat
import sys
import time

import pytest

from labutils.tools import doctor
from labutils.tools.doctor import FAIL, INFO, OK, WARN, Facts, checks, examine, facts, render
from labutils.tools.doctor.facts import CORE, Cache, Card, Compiler, Driver, Hub, Import, Torch

H200 = Card("NVIDIA H200", 150.1, 0.5, (9, 0))
BLACKWELL = Card("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 102.0, 1.0, (12, 0))
EVERYTHING = dict.fromkeys((*CORE, *facts.OPTIONAL), Import("ok", "1.0"))
CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


def sound(**changes) -> Facts:
    """An H200 on which nothing is amiss, but for `changes`."""
    healthy = Facts(
        driver=Driver("ok", "580.95", (13, 0), (H200,)),
        torch=Torch((13, 0), CU130, True, H200),
        imports=EVERYTHING,
        cores=16,
        machine_cores=16,
    )
    return dataclasses.replace(healthy, **changes)


def named(findings, check):
    """The only finding of that name."""
    found = [finding for finding in findings if finding.check == check]
    assert len(found) == 1, [finding.check for finding in findings]
    return found[0]


def test_a_sound_machine_has_nothing_but_ok():
    findings = examine(sound())
    assert {finding.status for finding in findings} == {OK}, [f for f in findings if f.status != OK]
    assert "Everything the labs need is here." in render(findings)


def test_a_laptop_without_a_gpu_is_ready():
    findings = examine(
        Facts(imports=dict.fromkeys((*CORE, "bitsandbytes", "nvitop"), Import("ok", "1.0")))
    )
    assert {finding.status for finding in findings} == {OK, INFO}
    assert "scale tiny" in named(findings, "GPU").why
    assert not any(
        finding.check in ("Driver", "Architectures", "Number formats") for finding in findings
    )
    packages = named(findings, "GPU packages")
    assert packages.status == INFO and "unsloth missing" in packages.found and not packages.do


# article A1's Blackwell


def test_sm_120_with_torch_2_3_fails_before_a_lab_does():
    old = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
    torch = Torch(
        (12, 1),
        old,
        True,
        BLACKWELL,
        trial="RuntimeError: CUDA error: no kernel image is available",
    )
    machine = sound(driver=Driver("ok", "570.86", (12, 8), (BLACKWELL,)), torch=torch)
    finding = named(examine(machine), "Architectures")
    assert finding.status == FAIL
    assert "sm_120" in finding.found and "sm_90" in finding.found
    assert "warning" in finding.why and "A1" in finding.why
    assert "whl/cu128" in finding.do  # what this driver (CUDA 12.8) serves
    newer = dataclasses.replace(machine, driver=dataclasses.replace(machine.driver, cuda=(13, 0)))
    assert "whl/cu130" in named(examine(newer), "Architectures").do


def test_ptx_alone_works_slowly():
    torch = Torch((12, 4), ("sm_90", "compute_90"), True, BLACKWELL)
    finding = named(
        examine(sound(driver=Driver("ok", "580", (13, 0), (BLACKWELL,)), torch=torch)),
        "Architectures",
    )
    assert finding.status == WARN and "PTX" in finding.found


def test_a_listed_card_whose_kernel_fails_is_found():
    torch = Torch((13, 0), CU130, True, H200, trial="RuntimeError: CUBLAS_STATUS_NOT_INITIALIZED")
    finding = named(examine(sound(torch=torch)), "Architectures")
    assert finding.status == FAIL and "CUBLAS" in finding.found and "driver" in finding.why


def test_a_card_before_turing_gets_an_older_build():
    card = Card("Tesla P100-PCIE-16GB", 17.1, 0.1, (6, 0))
    torch = Torch((13, 0), CU130, True, card)
    assert (
        "whl/cu126"
        in named(
            examine(sound(driver=Driver("ok", "580", (13, 0), (card,)), torch=torch)),
            "Architectures",
        ).do
    )


@pytest.mark.parametrize(
    ("capability", "status", "has", "lacks"),
    [
        ((7, 5), INFO, "FP16", "BF16, TF32, FP8, FP4"),
        ((8, 6), INFO, "BF16", "FP8, FP4"),
        ((8, 9), OK, "FP8", "FP4"),
        ((9, 0), OK, "FP8", "FP4"),
        ((10, 0), OK, "FP4", ""),
        ((12, 0), OK, "FP4", ""),
    ],
)
def test_number_formats_by_capability(capability, status, has, lacks):
    card = Card("card", 80.0, 0.0, capability)
    machine = sound(
        driver=Driver("ok", "580", (13, 0), (card,)), torch=Torch((13, 0), CU130, True, card)
    )
    finding = named(examine(machine), "Number formats")
    assert finding.status == status and has in finding.found
    assert (f"No matrix units for {lacks}" in finding.why) == bool(lacks)


# drivers and builds


def test_a_cpu_build_beside_a_gpu():
    finding = named(examine(sound(torch=Torch())), "PyTorch")
    assert finding.status == FAIL and "CPU" in finding.found and "whl/cu130" in finding.do


def test_a_driver_too_old_for_the_build():
    machine = sound(
        driver=Driver("ok", "535.1", (12, 2), (H200,)),
        torch=Torch((13, 0), warning="driver is too old"),
    )
    finding = named(examine(machine), "PyTorch")
    assert finding.status == FAIL and "12.2" in finding.why and "whl/cu126" in finding.do


def test_hidden_gpu_is_a_choice():
    finding = named(examine(sound(torch=Torch((13, 0)), visible_devices="")), "PyTorch")
    assert finding.status == INFO and "CUDA_VISIBLE_DEVICES" in finding.do


def test_broken_nvidia_smi():
    message = "Failed to initialize NVML: Driver/library version mismatch"
    findings = examine(sound(driver=Driver("failed", message=message), torch=Torch((13, 0))))
    finding = named(findings, "Driver")
    assert finding.status == FAIL and message in finding.found and "reboot" in finding.do
    assert "kernel module" in finding.why
    still_seen = named(examine(sound(driver=Driver("failed", message=message))), "Driver")
    assert still_seen.status == WARN


def test_a_busy_gpu_is_told():
    busy = dataclasses.replace(H200, used_gb=60.0)
    finding = named(examine(sound(driver=Driver("ok", "580", (13, 0), (busy,)))), "GPU")
    assert finding.status == WARN and "60 GB in use" in finding.found


def test_no_torch_fails():
    imports = EVERYTHING | {"torch": Import("broken", message="OSError: libcudart.so.13")}
    finding = named(examine(sound(imports=imports, torch=Torch())), "PyTorch")
    assert finding.status == FAIL and "libcudart" in finding.found and finding.do


# packages


def test_broken_transformer_engine_warns():
    message = "RuntimeError: Found empty `transformer-engine` meta package installed."
    findings = examine(
        sound(
            imports=EVERYTHING | {"transformer_engine.pytorch": Import("broken", message=message)}
        )
    )
    finding = named(findings, "transformer_engine.pytorch")
    assert finding.status == WARN and message in finding.found and "make te" in finding.do
    assert not any(finding.status == FAIL for finding in findings)


def test_missing_extras_are_information_and_missing_parts_of_the_course_are_not():
    without = EVERYTHING | {
        name: Import("missing") for name in ("unsloth", "xformers", "bitsandbytes", "peft")
    }
    findings = examine(sound(imports=without))
    assert (
        named(findings, "unsloth").status == INFO
        and "make unsloth" in named(findings, "unsloth").do
    )
    assert named(findings, "xformers").status == INFO and not named(findings, "xformers").do
    assert named(findings, "bitsandbytes").status == WARN
    assert named(findings, "peft").status == FAIL
    assert "peft" not in named(findings, "Libraries").found


def test_a_crash_and_a_slow_import():
    crashed = Import("crashed", message="the process ended with SIGSEGV")
    imports = EVERYTHING | {
        "bitsandbytes": crashed,
        "unsloth": Import("slow", message="not done after 18 s"),
    }
    findings = examine(sound(imports=imports))
    assert (
        named(findings, "bitsandbytes").status == WARN
        and "SIGSEGV" in named(findings, "bitsandbytes").found
    )
    assert "again" in named(findings, "unsloth").do


# the host


def test_64_mb_of_shared_memory_is_where_the_article_failed():
    machine = sound(container=True, shm_gb=0.067, shm_free_gb=0.067)  # Docker's 64 MiB
    finding = named(examine(machine), "Shared memory")
    fit = checks.workers_that_fit(0.067)
    assert 8 <= fit < 12  # A1's 8 workers ran, its 12 did not
    assert finding.status == WARN and f"enough for {fit} workers" in finding.found
    assert "--shm-size" in finding.do and "bus error" in finding.why


def test_shared_memory_counts_what_is_free():
    assert named(examine(sound(shm_gb=8.6, shm_free_gb=0.001)), "Shared memory").status == FAIL
    full = named(examine(sound(shm_gb=8.6, shm_free_gb=0.02)), "Shared memory")
    assert full.status == WARN and "20 MB of it free" in full.found and "remount" in full.do
    assert named(examine(sound(shm_gb=None, shm_free_gb=None)), "Shared memory").status == INFO


def test_compiler_and_headers():
    assert named(examine(sound(compiler=Compiler("missing"))), "C++ compiler").status == WARN
    broken = named(
        examine(sound(compiler=Compiler("broken", "/usr/bin/g++", "no omp.h"))), "C++ compiler"
    )
    assert broken.status == WARN and "no omp.h" in broken.found
    assert (
        "xcode-select"
        in named(examine(sound(os="macOS 15", compiler=Compiler("missing"))), "C++ compiler").do
    )
    headers = named(
        examine(sound(compiler=Compiler("ok", "/usr/bin/g++", python_headers=False))),
        "Python headers",
    )
    assert headers.status == WARN and "python3.11-dev" in headers.do


def test_cache_cores_ram_python():
    assert (
        named(
            examine(sound(cache=Cache("~/x", writable=False, message="Permission denied"))), "Cache"
        ).status
        == FAIL
    )
    assert named(examine(sound(cache=Cache("~/x", free_gb=4.0))), "Cache").status == WARN
    assert named(examine(sound(cache=Cache("~/x", free_gb=0.4))), "Cache").status == FAIL
    cores = named(examine(sound(cores=2, machine_cores=64)), "CPU cores")
    assert (
        cores.status == INFO
        and "2 usable of the machine's 64" in cores.found
        and "--cpus" in cores.do
    )
    assert named(examine(sound(ram_gb=4.0)), "RAM").status == WARN
    assert named(examine(sound(python=(3, 13))), "Python").status == WARN
    assert named(examine(sound(python=(3, 10))), "Python").status == FAIL


@pytest.mark.parametrize(
    "hub", [Hub("unreachable", message="timed out"), Hub("offline", message="HF_HUB_OFFLINE=1")]
)
def test_no_hub_is_no_fault(hub):
    finding = named(examine(sound(hub=hub)), "Model hub")
    assert (
        finding.status == INFO and "No lab needs it" in finding.why and hub.message in finding.found
    )


# never a traceback


def test_what_could_not_be_looked_at_is_a_finding():
    findings = examine(sound(problems={"compiler": "OSError: no space left"}))
    assert "no space left" in named(findings, "C++ compiler").found
    assert named(findings, "PyTorch").status == OK


def test_a_failing_check_is_a_finding(monkeypatch):
    def breaks(machine):
        raise KeyError("oh")

    monkeypatch.setattr(doctor, "CHECKS", (("Odd", breaks, ()), *checks.CHECKS[:1]))
    findings = examine(sound())
    assert findings[0].status == WARN and "KeyError" in findings[0].found
    assert findings[1].check == "Python"


def test_collecting_survives_whatever_fails(monkeypatch):
    def breaks(*_):
        raise RuntimeError("broken on purpose")

    for name in ("_imports", "driver", "compiler", "hub", "cache"):
        monkeypatch.setattr(facts, name, breaks)
    monkeypatch.setattr(facts, "usable_cores", breaks)
    collected = facts.collect()
    assert set(collected.problems) == {"imports", "driver", "compiler", "hub", "cache", "cores"}
    findings = examine(collected)
    assert {finding.check for finding in findings} >= {
        "PyTorch",
        "Cache",
        "Python",
        "Shared memory",
    }
    assert "broken on purpose" in render(findings)


# main


@pytest.mark.parametrize(
    ("machine", "code"), [(sound(), 0), (sound(shm_free_gb=0.02), 0), (sound(torch=Torch()), 1)]
)
def test_exit_code_and_json(monkeypatch, capsys, machine, code):
    monkeypatch.setattr(doctor, "this_machine", lambda: machine)
    assert doctor.main(json=True) == code
    findings = json.loads(capsys.readouterr().out)
    assert all(set(finding) == {"check", "status", "found", "why", "do"} for finding in findings)
    assert doctor.main() == code
    printed = capsys.readouterr().out
    assert all(finding["check"] in printed for finding in findings)


def test_every_complaint_says_why_and_what_to_type():
    machines = [
        sound(
            torch=Torch(),
            compiler=Compiler("missing"),
            shm_free_gb=0.02,
            python=(3, 13),
            ram_gb=3.0,
        ),
        sound(
            cache=Cache("~/x", free_gb=2.0),
            imports=dict.fromkeys((*CORE, *facts.OPTIONAL), Import("broken", message="no")),
        ),
        sound(driver=Driver("failed", message="no"), torch=Torch((13, 0))),
    ]
    complaints = [f for machine in machines for f in examine(machine) if f.status in (WARN, FAIL)]
    assert len(complaints) > 12
    assert all(finding.why and finding.do for finding in complaints)


def test_commands_are_never_broken_over_lines():
    findings = examine(sound(torch=Torch()))
    lines = render(findings, width=60).splitlines()
    assert any(line.endswith("-> " + named(findings, "PyTorch").do) for line in lines)
    assert all(len(line) <= 60 or "-> " in line for line in lines[:-1])


# looking


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder of importable packages; `packages(name, source)` writes one."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(name, source):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text(source)

    return write


def test_imports_are_tried_where_they_can_do_no_harm(packages):
    packages("fine", "__version__ = '1.2'")
    packages("raises", "raise RuntimeError('Found empty meta package\\ninstalled.')")
    packages("leaves", "import sys; sys.exit(0)")
    packages(
        "crashes",
        "import os, signal; print('last words', flush=True); os.kill(os.getpid(), signal.SIGSEGV)",
    )
    packages("needs", "import what_is_not_there")
    names = ("raises", "leaves", "crashes", "needs", "absent", "fine")
    found, torch = facts.try_imports(names)
    assert {name: found[name].status for name in names} == {
        "raises": "broken",
        "leaves": "broken",
        "crashes": "crashed",
        "needs": "broken",
        "absent": "missing",
        "fine": "ok",
    }
    assert found["fine"].version == "1.2"
    assert found["raises"].message == "RuntimeError: Found empty meta package installed."
    assert "SIGSEGV" in found["crashes"].message
    assert torch == Torch()
    assert not {"fine", "raises", "crashes"} & set(sys.modules)


def test_transformer_engine_without_its_extension_is_broken(packages, tmp_path):
    packages("transformer_engine", "try:\n    from . import pytorch\nexcept Exception:\n    pass\n")
    (tmp_path / "transformer_engine" / "pytorch.py").write_text(
        "raise FileNotFoundError('transformer_engine_torch.so')"
    )
    found, _ = facts.try_imports(("transformer_engine", "transformer_engine.pytorch"))
    assert (
        found["transformer_engine"].status == "ok"
    )  # which is why the doctor does not ask for that
    assert found["transformer_engine.pytorch"].status == "broken"


def running(pid):
    """Whether the process is there and no zombie."""
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_an_import_that_hangs_is_ended_with_its_children(packages, tmp_path):
    mark = tmp_path / "child"
    packages(
        "hangs",
        "import pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"pathlib.Path({str(mark)!r}).write_text(str(child.pid))\n"
        "time.sleep(60)",
    )
    start = time.monotonic()
    found, _ = facts.try_imports(("hangs", "after"), timeout_s=3)
    assert time.monotonic() - start < 15
    assert found["hangs"].status == "slow" and found["after"].status == "slow"
    assert not running(int(mark.read_text()))


def executable(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_nvidia_smi_is_read(tmp_path):
    smi = executable(
        tmp_path / "nvidia-smi",
        'case "$1" in\n'
        "  --query*) echo '580.95.05, NVIDIA H200, 143771, 600, 9.0'\n"
        "            echo '580.95.05, NVIDIA H200, 143771, [N/A], 9.0';;\n"
        "  *) echo '| NVIDIA-SMI 580.95.05   Driver Version: 580.95.05   CUDA Version: 13.0 "
        "|';;\nesac",
    )
    found = facts.driver(smi)
    assert (found.status, found.version, found.cuda) == ("ok", "580.95.05", (13, 0))
    assert (
        found.cards[0] == Card("NVIDIA H200", 150.8, 0.6, (9, 0)) and found.cards[1].used_gb is None
    )


def test_nvidia_smi_of_an_old_driver_knows_no_capability(tmp_path):
    smi = executable(
        tmp_path / "nvidia-smi",
        'case "$1" in\n  *compute_cap*) echo "not a valid field to query" ; exit 2;;\n'
        "  --query*) echo '440.33, Tesla T4, 15109, 3';;\nesac",
    )
    found = facts.driver(smi)
    assert found.cards == (Card("Tesla T4", 15.8, 0.0, None),) and found.cuda is None


def test_nvidia_smi_that_fails_or_is_missing(tmp_path):
    smi = executable(
        tmp_path / "nvidia-smi",
        "echo 'NVIDIA-SMI has failed because it could not communicate'; exit 9",
    )
    found = facts.driver(smi)
    assert found.status == "failed" and "could not communicate" in found.message
    assert facts.driver(str(tmp_path / "absent")).status == "missing"


def test_the_compiler_is_tried(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", executable(tmp_path / "c++", "echo 'fatal: no omp.h' >&2; exit 1"))
    found = facts.compiler()
    assert found.status == "broken" and found.message == "fatal: no omp.h"
    monkeypatch.setenv("CXX", str(tmp_path / "absent"))
    assert facts.compiler().status == "missing"


@pytest.mark.skipif(os.name == "posix" and os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_folder_of_someone_else(tmp_path, monkeypatch):
    tmp_path.chmod(0o500)
    monkeypatch.setenv("LABUTILS_CACHE", str(tmp_path / "cache"))
    assert facts.cache().writable is False


def test_a_cache_folder_that_is_a_file(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("LABUTILS_CACHE", str(tmp_path / "cache"))
    found = facts.cache()
    assert found.writable is False and found.message
    monkeypatch.setenv("LABUTILS_CACHE", str(tmp_path / "fresh" / "cache"))
    assert facts.cache().writable is True


def test_hub(monkeypatch):
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert facts.hub().status == "offline"
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    found = facts.hub()
    assert found.status == "unreachable" and found.message
    monkeypatch.setenv("HF_ENDPOINT", "not an address")
    assert facts.hub().status == "unreachable"


def test_this_machine_is_looked_at_for_real():
    start = time.monotonic()
    found = doctor.collect()
    assert time.monotonic() - start < 60
    assert found.problems == {}
    assert found.imports["torch"].status in ("ok", "slow")
    assert found.cores >= 1 and found.cache.path
