"""GPU Fine-Tuning Lab: what the notebooks call. Heavy libraries are imported where they are used.

The rooms, from the top; each imports from those below its own line only:

    cli         the command line: doctor, run, report, handouts, diagnose
    tools       those commands;  labs: experiments too long for a cell, one module a lab
    course      what a notebook calls: Lab, exercises, plots, tables
    training    the loop: trainer, step, benchmark, checkpoint, distributed
    workloads   what is trained: Stable Diffusion, LLaVA, language models
    layers      one technique a file;  data: what training reads
    profiling   what time and memory cost, measured and predicted
    results     what was found, and what it says: records, claims, judges, report
    recipe      what can be tuned about a run
"""

import os
import sys
from contextlib import suppress
from ctypes import CDLL
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


class OneCudnn:
    """Has Transformer Engine use PyTorch's own cuDNN, whoever imports it: PEFT does, wherever it is
    installed.

    Its library names all of cuDNN's as its own needs and says nowhere where they are. So the
    loader takes those that the process has, and the system's for the rest. Where PyTorch has used
    cuDNN before, two versions don't link: the import fails, and PEFT's with it. Where it hasn't,
    PyTorch computes with the system's version from then on. So all of PyTorch's are loaded first;
    the two that the others are built on, first of all.
    """

    first = ("graph", "ops")

    @classmethod
    def find_spec(cls, name: str, *_: Any) -> None:
        """Python asks this before it looks for a module; it finds none, and so Python goes on."""
        # Libraries look for it where it isn't installed, too: then there is nothing to load for.
        if name != "transformer_engine" or PathFinder.find_spec(name) is None:
            return
        with suppress(ImportError):
            import nvidia.cudnn  # PyTorch's, a folder
            import torch  # noqa: F401  so that what cuDNN needs is PyTorch's, too

            home = nvidia.cudnn.__path__[0]
            os.environ.setdefault("CUDNN_HOME", home)
            libraries = Path(home, "lib").glob("libcudnn*.so.*")
            for library in sorted(libraries, key=lambda path: (cls._place(path), path)):
                with suppress(OSError):
                    CDLL(str(library))

    @classmethod
    def _place(cls, library: Path) -> int:
        part = library.name.partition(".")[0].removeprefix("libcudnn_")
        return cls.first.index(part) if part in cls.first else len(cls.first)


sys.meta_path.insert(0, OneCudnn)
