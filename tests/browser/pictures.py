"""Pictures as numbers, for the tests that look at them."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from PIL import Image


def picture_of(shot: bytes, size: tuple[int, int] | None = None) -> np.ndarray:
    """A screenshot, or any picture, as height x width x 3 numbers of 0..255; made smaller to
    `size`, where given.
    """
    picture = Image.open(BytesIO(shot)).convert("RGB")
    return np.asarray(picture.resize(size, Image.Resampling.BOX) if size else picture, dtype=float)
