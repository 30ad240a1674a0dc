"""What a cell printed when its lab was executed on our GPU, for machines that can't run it; and
whether an executed notebook is of the lab as it stands.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from labutils.results import records
from labutils.results.records import Runs

if TYPE_CHECKING:
    from nbformat import NotebookNode


def outputs_of(number: str, source: str) -> list[dict[str, Any]]:
    """The recorded outputs of lab `number`'s cell that reads `source`, without errors; [] where no
    recorded cell reads so, as after an edit."""
    for page in _pages(number):
        for cell in page["cells"]:
            if cell["cell_type"] == "code" and _text(cell["source"]).strip() == source.strip():
                return [output for output in cell["outputs"] if output["output_type"] != "error"]
    return []


def shown_runs(number: str) -> Runs:
    """Our runs that lab `number`'s recorded page shows, so that tables and text are of one machine;
    without a page those of the host that measured last."""
    runs = records.reference_runs(number)
    for page in _pages(number):
        if took := page["metadata"].get("papermill"):
            began, ended = took["start_time"][:19], took["end_time"][:19]
            return Runs(run for run in runs if began <= run.at[:19] <= ended)
    return runs.of_newest_host()


def _pages(number: str) -> Iterator[dict[str, Any]]:
    """Our recorded notebooks of lab `number`."""
    for path in records.REFERENCE.parents[1].glob(f"*/{number}_*.ipynb"):
        # As JSON: nbformat would take a second to import, in every lab.
        yield json.loads(path.read_text(encoding="utf-8"))


def _text(lines: str | list[str]) -> str:
    """A notebook keeps a text of several lines as their list."""
    return "".join(lines) if isinstance(lines, list) else lines


def cells_of_an_older_edition(executed: NotebookNode, today: NotebookNode) -> int:
    """How many of the lab's cells, as it stands `today`, are not in its `executed` notebook."""
    there = {cell.source.strip() for cell in executed.cells}
    return sum(cell.source.strip() not in there for cell in today.cells)


def source_of_this_cell() -> str:
    """The cell that is running; "" outside of a notebook."""
    from IPython import get_ipython

    shell = get_ipython()
    return shell.history_manager.input_hist_raw[-1] if shell else ""


def replay(outputs: list[dict[str, Any]]) -> None:
    """Show recorded outputs as a cell's own: text, tables and pictures."""
    from IPython.display import display

    for output in outputs:
        if output["output_type"] == "stream":
            print(_text(output["text"]), end="")
        else:
            display({kind: _text(data) for kind, data in output["data"].items()}, raw=True)
