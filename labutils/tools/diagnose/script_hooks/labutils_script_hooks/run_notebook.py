"""Runs a notebook's cells as a script, in its folder: python run_notebook.py NOTEBOOK ARGUMENTS.

A cell is a file of its own name, "train.ipynb, cell 3". Magics and commands of the shell need
IPython.
"""

from __future__ import annotations

import ast
import json
import linecache
import os
import sys
from typing import Any


def main() -> None:
    del sys.argv[0]
    path = os.path.abspath(sys.argv[0])
    with open(path, encoding="utf-8") as file:
        cells = json.load(file)["cells"]
    sys.path[0] = os.path.dirname(path)
    os.chdir(sys.path[0])
    names: dict[str, Any] = vars(sys.modules["__main__"])
    names["display"] = print
    for number, cell in enumerate(cells, 1):
        if cell["cell_type"] == "code":
            name, source = f"{path}, cell {number}", in_python("".join(cell["source"]), names)
            linecache.cache[name] = (len(source), None, source.splitlines(True), name)
            exec(compile(source, name, "exec", dont_inherit=True), names)


def in_python(source: str, names: dict[str, Any]) -> str:
    """A cell's code, its magics written as calls of IPython."""
    try:
        ast.parse(source)
    except SyntaxError:
        from IPython.core.interactiveshell import InteractiveShell

        shell = InteractiveShell.instance(user_ns=names)
        names["get_ipython"] = lambda: shell
        return shell.transform_cell(source)
    return source


if __name__ == "__main__":
    main()
