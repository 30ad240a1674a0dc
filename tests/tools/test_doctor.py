"""The doctor: each check on machines that we don't have, and all of them on this one."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from labutils import cli
from labutils.tools import doctor
from labutils.tools.doctor import FAIL, INFO, OK, WARN, Import, checks, imports

BLACKWELL = {
    "cuda": "13.0",
    "available": True,
    "card": "RTX PRO 6000",
    "gb": 96.0,
    "used_gb": 0.5,
    "capability": [12, 0],
    "architectures": ["sm_90", "sm_120"],
    "trial": "",
    "warning": "",
}


def torch(**facts) -> Import:
    return Import("torch", "ok", "2.13.0", facts=BLACKWELL | facts)


def only(findings) -> doctor.Finding:
    (finding,) = findings
    return finding


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        ({}, OK),
        ({"architectures": ["sm_80", "sm_90"]}, FAIL),  # torch 2.3 on sm_120, as article A1 met it
        ({"architectures": ["sm_90", "compute_90"]}, WARN),
        ({"trial": "CUDA error"}, FAIL),
        ({"capability": [7, 0], "architectures": ["sm_80"]}, FAIL),
    ],
)
def test_the_card_against_the_architectures(facts, status):
    finding = only(checks.check_architectures(torch(**facts)))
    assert finding.status == status
    assert finding.do.endswith("cu126") == (facts.get("capability") == [7, 0])


def smi(folder: Path, script: str) -> str:
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


def test_driver_and_build(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    new, old = (smi(Path(f), f"echo {v}.1, H200") for f, v in folders(tmp_path, 580, 550))
    broken = smi(tmp_path, "echo Driver/library version mismatch; exit 18")
    without = torch(available=False)
    cases = [
        (torch(), new, OK, ""),
        (torch(used_gb=50.0), new, WARN, "in use"),
        (without, new, FAIL, "cu130"),
        (without, old, FAIL, "cu126"),
        (without, broken, FAIL, "mismatch"),
        (without, "no-such-program", INFO, "none"),
        (Import("torch", "missing"), new, FAIL, "make install"),
    ]
    for one, program, status, word in cases:
        finding = only(checks.check_gpu(one, program))
        assert finding.status == status and word in finding.found + finding.do
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert only(checks.check_gpu(without, new)).status == INFO


def folders(parent: Path, *names):
    for name in names:
        (parent / str(name)).mkdir()
        yield parent / str(name), name


def test_64_mb_of_shared_memory_are_too_little():
    assert only(checks.check_shared_memory(0.064)).status == WARN
    assert only(checks.check_shared_memory(0.001)).status == FAIL
    assert only(checks.check_shared_memory(8.0)).status == OK


def test_versions_host_disk_and_environment(tmp_path, monkeypatch):
    found = only(checks.check_versions(["torch>=99", "pytest>1", "no-such-package"]))
    assert found.status == WARN
    assert "torch" in found.found and "no-such" in found.found and "pytest" not in found.found
    assert [only(checks.check_host(2, gb)).status for gb in (4, 16)] == [WARN, INFO]
    (tmp_path / "file").touch()
    assert only(checks.check_disk(tmp_path / "file" / "cache")).status == FAIL
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert only(checks.check_environment()).status == WARN


def test_the_compiler_is_tried(tmp_path, monkeypatch):
    for program in ("no-such-compiler", smi(tmp_path, "exit 1")):
        monkeypatch.setenv("CXX", program)
        assert only(checks.check_compiler()).status == WARN


def test_libraries():
    tried = [torch(), Import("unsloth", "missing"), Import("bitsandbytes", "broken", "", "why")]
    statuses = [finding.status for finding in checks.check_libraries(tried, gpu=True)]
    assert sorted(statuses) == [INFO, OK, WARN]
    assert FAIL in [f.status for f in checks.check_libraries([Import("peft", "crashed")], False)]


def test_imports_are_tried_where_they_can_do_no_harm(tmp_path, monkeypatch):
    for name, source in {
        "sound_one": "__version__ = '1.2'",
        "raises_one": "import no_such_part",
        "exits_one": "import os; os._exit(7)",
        "hangs_one": "import subprocess; subprocess.run(['sleep', '600'])",
    }.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(tmp_path)
    tried = imports.try_imports(("raises_one", "exits_one", "sound_one"))
    assert [one.status for one in tried] == ["broken", "crashed", "ok"]
    assert tried[2].version == "1.2" and "no_such_part" in tried[0].message
    began = time.monotonic()
    assert imports.try_import("hangs_one", timeout_s=2).status == "slow"
    assert time.monotonic() - began < 60
    assert imports.try_import("not_there_at_all").status == "missing"
    assert not {"sound_one", "raises_one"} & set(sys.modules)


def test_this_machine_is_looked_at_for_real(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"Versions", "GPU", "Libraries", "Disk"} <= {one["check"] for one in told["findings"]}
    assert "PyTorch version" in told["environment"]
    for one in told["findings"]:
        assert one["status"] in (OK, INFO) or (one["why"] and one["do"])
    assert "\n" in doctor.render([doctor.Finding(**one) for one in told["findings"]])
