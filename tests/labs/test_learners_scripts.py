"""What a learner who has done a lab writes from its cells alone, without labutils."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("[0-9][0-9]_*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_learners_script_runs_and_checks_itself(script: Path, tmp_path: Path):
    text = script.read_text(encoding="utf-8")
    assert not re.search(r"^\s*(import|from) labutils", text, re.MULTILINE)
    assert re.search(r"^\s*assert |torch.testing.assert_close", text, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
