"""GPU Fine-Tuning Lab: what the notebooks call. Heavy libraries are imported where they are used."""

import os
from contextlib import suppress

__version__ = "0.1.0"

with suppress(ImportError):
    import nvidia.cudnn  # the folder of PyTorch's own cuDNN; nothing is loaded

    # Transformer Engine loads the system's cuDNN unless it is told of another, and two versions in
    # one process don't link. PEFT imports Transformer Engine wherever it is installed, and would
    # fail with it.
    os.environ.setdefault("CUDNN_HOME", nvidia.cudnn.__path__[0])
