"""Notebooks that misbehave: parameters, a first record, and then the trouble."""

from pathlib import Path

import nbformat

PARAMETERS = """\
scale: str = "auto"  # tiny, small, full
results_dir: str = ""
steps: int = 3  # how many
loud: bool = False  # say more
"""
FIRST = """\
import os, signal, subprocess, sys, time
from labutils.results.records import Results, Run
kept = Results(os.environ["LABUTILS_RESULTS"])
metrics = dict(steps=steps, loud=loud, python=sys.executable, backend=os.environ["MPLBACKEND"])
metrics["transport"] = get_ipython().kernel.parent.transport
kept.append(Run("{name}", "first", metrics=metrics))
"""
TROUBLE = {
    "fine": "steps",
    "raises": "raise ValueError('no such shape: 3 x 4' + chr(27) + '[2J')",
    "exits": """\
ranks = [subprocess.Popen(["sleep", "600"], start_new_session=own) for own in (False, True)]
kept.append(Run("{name}", "ranks", samples=dict(pids=[rank.pid for rank in ranks])))
os._exit(3)""",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "bus": "os.kill(os.getpid(), signal.SIGBUS)",
    "quits": "sys.exit(0)",
    "stops": """\
import atexit, tempfile
made = tempfile.TemporaryDirectory(prefix=os.environ["LABUTILS_RESULTS"] + "-")
atexit.register(time.sleep, 4)  # a slow machine
os.kill(os.getppid(), signal.SIGINT)
while True:
    time.sleep(0.1)  # a signal that comes right as a sleep begins waits for its end""",
    "sleeps": "signal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(600)",
}


def write(folder: Path, name: str, trouble: str | None = None) -> str:
    """Write the notebook `name` with its own trouble, or another; its path."""
    cells = [nbformat.v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})]
    cells += [nbformat.v4.new_markdown_cell("# [A] lab <meta>\n\n## 1 · What happens")]
    sources = [part.format(name=name) for part in (FIRST, TROUBLE[trouble or name])]
    cells += [nbformat.v4.new_code_cell(source) for source in [*sources, "1 + 1"]]
    path = folder / f"{name}.ipynb"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
    return str(path)
