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
    try:
        with open(path, encoding="utf-8") as file:
            cells = [(c["cell_type"], "".join(c["source"])) for c in json.load(file)["cells"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        sys.exit(f"{path!r} can't be read as a notebook: {type(error).__name__}: {error}")
    sys.path[0] = os.path.dirname(path)
    os.chdir(sys.path[0])
    names = vars(sys.modules["__main__"])
    names["display"] = print
    for number, (kind, source) in enumerate(cells, 1):
        if kind == "code":
            name = f"{path}, cell {number}"
            try:
                code = compile(source, name, "exec", dont_inherit=True)
            except SyntaxError:
                from IPython.terminal.interactiveshell import TerminalInteractiveShell

                shell = TerminalInteractiveShell.instance(user_module=sys.modules["__main__"])
                code = compile(shell.transform_cell(source), name, "exec", dont_inherit=True)
            exec(code, names)


if __name__ == "__main__":
    main()
