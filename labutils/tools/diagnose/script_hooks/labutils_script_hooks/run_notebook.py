"""Runs a notebook's cells as a script, in its folder: python run_notebook.py NOTEBOOK ARGUMENTS.

A cell is a file of its own name, "train.ipynb, cell 3". Magics and commands of the shell need
IPython.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    del sys.argv[0]
    path = os.path.abspath(sys.argv[0])
    with open(path, encoding="utf-8") as file:
        cells = json.load(file)["cells"]
    sys.path[0] = os.path.dirname(path)
    os.chdir(sys.path[0])
    names = vars(sys.modules["__main__"])
    names["display"] = print
    for number, cell in enumerate(cells, 1):
        if cell["cell_type"] == "code":
            source, name = "".join(cell["source"]), f"{path}, cell {number}"
            try:
                code = compile(source, name, "exec", dont_inherit=True)
            except SyntaxError:
                from IPython.terminal.interactiveshell import TerminalInteractiveShell

                shell = TerminalInteractiveShell.instance(user_module=sys.modules["__main__"])
                code = compile(shell.transform_cell(source), name, "exec", dont_inherit=True)
            exec(code, names)


if __name__ == "__main__":
    main()
