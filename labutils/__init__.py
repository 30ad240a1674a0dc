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
from contextlib import suppress

__version__ = "0.1.0"

with suppress(ImportError):
    import nvidia.cudnn  # the folder of PyTorch's own cuDNN; nothing is loaded

    # Transformer Engine loads the system's cuDNN unless it is told of another, and two versions in
    # one process don't link. PEFT imports Transformer Engine wherever it is installed, and would
    # fail with it.
    os.environ.setdefault("CUDNN_HOME", nvidia.cudnn.__path__[0])
