"""The doctor: each check on machines that we don't have, and all of them on this one."""

import json
import os
import sys
from pathlib import Path

from labutils import cli
from labutils.tools import doctor
from labutils.tools.doctor import checks, imports
from labutils.tools.doctor.checks import FAIL, INFO, OK, WARN, Finding
from labutils.tools.doctor.imports import Import

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


def only(findings) -> Finding:
    (finding,) = findings
    return finding


def test_the_card_against_the_architectures():
    for facts, status in (
        ({}, OK),
        ({"architectures": ["sm_80", "sm_90"]}, FAIL),  # torch 2.3 on sm_120, as article A1 met it
        ({"architectures": ["sm_90", "compute_90"]}, WARN),
        ({"trial": "CUDA error"}, FAIL),
        ({"capability": [7, 0], "architectures": ["sm_80"]}, FAIL),
    ):
        finding = only(checks.check_architectures(torch(**facts)))
        assert finding.status == status
        assert finding.do.endswith("cu126") == (facts.get("capability") == [7, 0])


def program(folder: Path, name: str, script: str) -> str:
    """A folder with one program in it."""
    folder.mkdir()
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return str(folder)


def test_driver_and_build(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    new = program(tmp_path / "new", "nvidia-smi", "echo 580.1")
    old = program(tmp_path / "old", "nvidia-smi", "echo 550.1")
    broken = program(tmp_path / "broken", "nvidia-smi", "echo mismatch; exit 18")
    without = torch(available=False)
    cases = [
        (torch(), new, OK, ""),
        (torch(used_gb=50.0), new, WARN, "in use"),
        (without, new, FAIL, "cu130"),
        (without, old, FAIL, "cu126"),
        (without, broken, FAIL, "fails"),
        (without, str(tmp_path), INFO, "none"),
        (Import("torch", "missing"), new, FAIL, "make install"),
    ]
    for one, path, status, word in cases:
        monkeypatch.setenv("PATH", path)
        finding = only(checks.check_gpu(one))
        assert finding.status == status and word in finding.found + finding.do
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert only(checks.check_gpu(without)).status == INFO


def test_memory_host_and_disk(tmp_path):
    """Docker's 64 MB of shared memory are too little."""
    shared = [only(checks.check_shared_memory(gb)).status for gb in (0.064, 0.001, 8.0)]
    assert shared == [WARN, FAIL, OK]
    assert [only(checks.check_host(2, gb)).status for gb in (4, 16)] == [WARN, INFO]
    (tmp_path / "file").touch()
    assert only(checks.check_disk(tmp_path / "file" / "cache")).status == FAIL


def test_variables_that_would_change_what_labs_do(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    assert [finding.status for finding in checks.check_environment()] == [WARN, WARN]
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    assert "TORCHDYNAMO_DISABLE" in only(checks.check_environment()).found


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    planted = tmp_path / "labutils-99.dist-info"
    planted.mkdir()
    text = "Metadata-Version: 2.1\nName: labutils\nVersion: 99\nRequires-Dist: no-such-package\n"
    (planted / "METADATA").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = only(checks.check_versions())
    assert finding.status == WARN and "no-such-package" in finding.found


def test_the_compiler_is_tried(tmp_path, monkeypatch):
    for compiler in ("no-such-compiler", program(tmp_path / "bin", "cc", "exit 1") + "/cc"):
        monkeypatch.setenv("CXX", compiler)
        assert only(checks.check_compiler()).status == WARN


def test_libraries():
    tried = [torch(), Import("unsloth", "missing"), Import("bitsandbytes", "broken", "", "why")]
    assert sorted(found.status for found in checks.check_libraries(tried)) == [INFO, OK, WARN]
    assert FAIL in [f.status for f in checks.check_libraries([Import("peft", "crashed")])]


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
    assert imports.try_imports(("hangs_one",), timeout_s=2)[0].status == "slow"
    assert imports.try_imports(("not_there_at_all",))[0].status == "missing"
    assert not {"sound_one", "raises_one"} & set(sys.modules)


def test_this_machine_is_looked_at_for_real(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"Versions", "GPU", "Libraries", "Disk"} <= {one["check"] for one in told["findings"]}
    assert "PyTorch version" in told["environment"]
    for one in told["findings"]:
        assert one["status"] in (OK, INFO) or (one["why"] and one["do"])
    assert "\n" in doctor.render([Finding(**one) for one in told["findings"]])
