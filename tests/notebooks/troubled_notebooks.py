"""Notebooks that misbehave, for the runner's tests: each a parameters cell, a first record, and
then the trouble.
"""

from __future__ import annotations

from pathlib import Path

import nbformat

PARAMETERS = """\
scale: str = "auto"  # tiny, small, full
weights: str = "random"
data: str = "generated"
results_dir: str = ""
steps: int = 3  # how many
rate: float = 0.5
loud: bool = False  # say more
word: str = "hello"
"""
FIRST = """\
import os, signal, sys, time
from labutils.results import BESIDE, SOURCES, Results, Run, read_runs, told
kept = Results(results_dir or os.environ["LABUTILS_RESULTS"])
kept.append(Run("{name}", "first", metrics=dict(steps=steps, rate=rate, loud=loud, word=word, python=sys.executable)))
"""
TROUBLE = {
    "fine": "",
    "raises": "raise ValueError('no such shape: 3 x 4')",
    "exits": "os._exit(3)",
    "deserts": """\
import subprocess
ranks = [subprocess.Popen(["sleep", "600"], start_new_session=own) for own in (False, True)]
kept.append(Run("{name}", "ranks", samples=dict(pids=[rank.pid for rank in ranks])))
os._exit(3)""",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "bus": "os.kill(os.getpid(), signal.SIGBUS)",
    "quits": "sys.exit(0)",
    "stops": "os.kill(os.getppid(), signal.SIGINT)\ntime.sleep(600)",
    "meets": """\
end = time.monotonic() + 60
while len(read_runs(kept.path)) < 2:  # until another lab is at work, too
    assert time.monotonic() < end, "alone"
    time.sleep(0.05)
names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
kept.append(Run("{name}", "met", metrics={{name: os.environ.get(name) for name in names}}, beside=told(BESIDE)))""",
    "sleeps": "print('asleep', flush=True)\ntime.sleep(600)",
}
LAST = "kept.done('{name}', sources=told(SOURCES))"


def write(folder: Path, name: str, trouble: str | None = None) -> Path:
    """Write the notebook `name`, which has the trouble of that name unless another is given;
    returns its path.
    """
    cells = [nbformat.v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})]
    cells += [nbformat.v4.new_markdown_cell("## 1 · What happens")]
    sources = [part.format(name=name) for part in (FIRST, TROUBLE[trouble or name], LAST)]
    cells += [nbformat.v4.new_code_cell(source) for source in sources if source]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
    }
    path = folder / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path
