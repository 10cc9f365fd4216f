"""RandAugment (Cubuk et al., 2020; torchvision's space): applies several operations to each training view, one after
the other. They are drawn uniformly, and all have the same strength.

The operations are those of `trivial`. Strengths range from 0 to 30, as in torchvision; the published levels range from
0 to 10.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from hyperbatch.data.augment import RAND_COLUMNS
from hyperbatch.data.trivial import OPERATIONS, SIGNED, STRENGTHS, Drawn

STRONGEST = STRENGTHS - 1
# The largest arguments: a slope, a fraction of the image's side, degrees, and the change of a blend's factor.
_LARGEST = {"Shear": 0.3, "Translate": 150 / 331, "Rotate": 30.0}
_LARGEST_BLEND = 0.9
_POSTERIZE_BITS_LESS = 4


def draw(uniforms: np.ndarray, operations: int, magnitude: int, size: int) -> list[Drawn]:
    """Returns the first, second, ... operation of each view. uniforms: float64[n, 2 * operations]. size: the side of
    the views in pixels."""
    arguments = _arguments(magnitude, size)
    drawn = []
    for column in range(0, RAND_COLUMNS * operations, RAND_COLUMNS):
        chosen = (uniforms[:, column] * len(OPERATIONS)).astype(np.int64)
        signs = np.where(SIGNED[chosen] & (uniforms[:, column + 1] < 0.5), -1.0, 1.0)
        drawn.append(Drawn(chosen, arguments[chosen] * signs))
    return drawn


@lru_cache(maxsize=16)
def _arguments(magnitude: int, size: int) -> np.ndarray:
    """Returns the argument of each operation, float64[operations]."""
    strength = magnitude / STRONGEST
    fixed = {
        "Posterize": 8 - np.rint(strength * _POSTERIZE_BITS_LESS),
        "Solarize": 255 * (1 - strength),
        "Identity": 0.0,
        "AutoContrast": 0.0,
        "Equalize": 0.0,
    }
    found = []
    for name in OPERATIONS:
        kind = name.rstrip("XY")
        largest = _LARGEST.get(kind, _LARGEST_BLEND) * (size if kind == "Translate" else 1)
        found.append(fixed.get(name, largest * strength))
    return np.array(found)
