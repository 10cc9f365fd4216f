"""TrivialAugment (Mueller and Hutter, 2021; the "wide" space that torchvision and timm use): applies one operation to
each training view. The operation and its strength are drawn uniformly.

    view, grey levels uint8[n, h, w, c] ──> rows by operation ──┬─ geometry    each pixel looks up its source pixel
                                                                ├─ tables      each level looks up another level
                                                                └─ blends      between the image and a degenerate one

These are plain torch operations on groups of rows, on the device of the views. They give the same pixels as Pillow, and
therefore as torchvision for images that a data set opens with Pillow. `rand_augment` draws from the same operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hyperbatch.data.buffers import copy_to_device

STRENGTHS = 31  # number of strengths, from no effect to the operation's maximum
_LARGEST = {"shear": 0.99, "translate": 32.0, "rotate": 135.0, "enhance": 0.99}
_POSTERIZE_BITS_LESS = 6


class Drawn(NamedTuple):
    """The operation of each row, as an index into `OPERATIONS`, and its argument."""

    operations: np.ndarray  # int64[n]
    arguments: np.ndarray  # float64[n]


def draw(uniforms: np.ndarray) -> Drawn:
    """Draws from uniforms, float64[n, 3]: operation, strength, sign."""
    operations = (uniforms[:, 0] * len(OPERATIONS)).astype(np.int64)
    strengths = (uniforms[:, 1] * STRENGTHS).astype(np.int64)
    signs = np.where(uniforms[:, 2] < 0.5, -1.0, 1.0)
    return Drawn(operations, _ARGUMENTS[operations, strengths] * np.where(SIGNED[operations], signs, 1.0))


def apply(levels: Tensor, drawn: Drawn) -> Tensor:
    """Returns the augmented views of uint8[n, h, w, c] with 1 or 3 channels."""
    out = levels.clone()
    for index, operation in enumerate(OPERATIONS.values()):
        rows = np.flatnonzero(drawn.operations == index)
        if operation is None or not len(rows):
            continue
        chosen, arguments = (copy_to_device(part, levels.device) for part in (rows, drawn.arguments[rows]))
        out[chosen] = operation(levels[chosen], arguments)
    return out


# --- geometry: each pixel looks up its source pixel; pixels from outside the image are black


def _moved(levels: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    """Returns for each (x, y) the pixel at matrix (float64[n, 2, 2]) @ (x, y) + offset (float64[n, 2]) of its image, in
    coordinates that are 0 at the image's edge."""
    n, height, width, channels = levels.shape
    x = torch.arange(width, dtype=torch.float64, device=levels.device) + 0.5
    y = torch.arange(height, dtype=torch.float64, device=levels.device)[:, None] + 0.5
    (a, b), (c, d) = (row.unbind(1) for row in matrix[:, :, :, None, None].unbind(1))
    source_x = torch.floor(a * x + b * y + offset[:, 0, None, None]).long()
    source_y = torch.floor(c * x + d * y + offset[:, 1, None, None]).long()
    inside = (source_x >= 0) & (source_x < width) & (source_y >= 0) & (source_y < height)
    places = torch.where(inside, source_y * width + source_x, 0).view(n, -1, 1).expand(-1, -1, channels)
    found = levels.reshape(n, height * width, channels).gather(1, places)
    return found.view_as(levels) * inside[..., None]


def _matrix(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return torch.stack([a, b, c, d], dim=1).view(-1, 2, 2)


def _shear_x(levels: Tensor, by: Tensor) -> Tensor:
    one, none = torch.ones_like(by), torch.zeros_like(by)
    return _moved(levels, _matrix(one, by, none, one), torch.stack([none, none], dim=1))


def _shear_y(levels: Tensor, by: Tensor) -> Tensor:
    one, none = torch.ones_like(by), torch.zeros_like(by)
    return _moved(levels, _matrix(one, none, by, one), torch.stack([none, none], dim=1))


def _translate_x(levels: Tensor, by: Tensor) -> Tensor:
    one, none = torch.ones_like(by), torch.zeros_like(by)
    return _moved(levels, _matrix(one, none, none, one), torch.stack([-by.trunc(), none], dim=1))


def _translate_y(levels: Tensor, by: Tensor) -> Tensor:
    one, none = torch.ones_like(by), torch.zeros_like(by)
    return _moved(levels, _matrix(one, none, none, one), torch.stack([none, -by.trunc()], dim=1))


def _rotate(levels: Tensor, degrees: Tensor) -> Tensor:
    """Rotates around the centre, counter-clockwise."""
    height, width = levels.shape[1:3]
    cos, sin = torch.cos(degrees * (math.pi / 180)), torch.sin(degrees * (math.pi / 180))
    x, y = width / 2, height / 2
    offset = torch.stack([x - cos * x + sin * y, y - sin * x - cos * y], dim=1)
    return _moved(levels, _matrix(cos, -sin, sin, cos), offset)


# --- blends: degenerate + factor * (image - degenerate), clamped to [0, 255] and rounded down


def _blend(degenerate: Tensor, levels: Tensor, strength: Tensor) -> Tensor:
    factor = (1 + strength).float()[:, None, None, None]
    degenerate = degenerate.float()
    return (degenerate + factor * (levels.float() - degenerate)).clamp(0, 255).to(torch.uint8)


def _grey(levels: Tensor) -> Tensor:
    """Returns the grey levels, int32[n, h, w, 1], with Pillow's weights of the channels."""
    if levels.shape[3] == 1:
        return levels.int()
    red, green, blue = levels.int().split(1, dim=3)
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


def _brightness(levels: Tensor, strength: Tensor) -> Tensor:
    return _blend(torch.zeros_like(levels), levels, strength)


def _color(levels: Tensor, strength: Tensor) -> Tensor:
    return _blend(_grey(levels), levels, strength)


def _contrast(levels: Tensor, strength: Tensor) -> Tensor:
    mean = (_grey(levels).double().mean(dim=(1, 2, 3), keepdim=True) + 0.5).floor()
    return _blend(mean, levels, strength)


def _sharpness(levels: Tensor, strength: Tensor) -> Tensor:
    """The degenerate image is smoothed, except for its outermost pixels."""
    height, width = levels.shape[1:3]
    if min(height, width) < 3:
        return levels
    inner = levels.int()[:, 1:-1, 1:-1]
    sums = F.avg_pool2d(levels.float().permute(0, 3, 1, 2), 3, stride=1, divisor_override=1).permute(0, 2, 3, 1)
    smooth = levels.clone()
    smooth[:, 1:-1, 1:-1] = ((sums + 4 * inner) / 13 + 0.5).floor().clamp(0, 255).to(torch.uint8)
    return _blend(smooth, levels, strength)


# --- tables


def _posterize(levels: Tensor, bits: Tensor) -> Tensor:
    return levels & (256 - 2 ** (8 - bits.long()))[:, None, None, None].to(torch.uint8)


def _solarize(levels: Tensor, threshold: Tensor) -> Tensor:
    return torch.where(levels < threshold[:, None, None, None], levels, 255 - levels)


def _auto_contrast(levels: Tensor, _: Tensor) -> Tensor:
    low, high = (edge.double() for edge in (levels.amin((1, 2), keepdim=True), levels.amax((1, 2), keepdim=True)))
    scale = 255 / (high - low).clamp(min=1)
    stretched = (levels * scale - low * scale).clamp(0, 255).to(torch.uint8)
    return torch.where(high > low, stretched, levels)


def _equalize(levels: Tensor, _: Tensor) -> Tensor:
    """Equalizes the histogram of each channel."""
    n, height, width, channels = levels.shape
    flat = levels.permute(0, 3, 1, 2).reshape(n * channels, height * width)
    # The levels are sorted, because counting them with atomic additions is not allowed in deterministic runs.
    ordered = flat.sort(dim=1).values.int().contiguous()
    values = torch.arange(256, dtype=torch.int32, device=levels.device).expand(n * channels, 256).contiguous()
    below = torch.searchsorted(ordered, values)  # pixels of lower levels
    brightest = below.gather(1, ordered[:, -1:].long())  # pixels that do not have the highest level
    step = brightest // 255
    table = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255)
    table = torch.where(step > 0, table, values).to(torch.uint8)
    return table.gather(1, flat.long()).view(n, channels, height, width).permute(0, 2, 3, 1)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor] | None] = {
    "Identity": None,
    "ShearX": _shear_x,
    "ShearY": _shear_y,
    "TranslateX": _translate_x,
    "TranslateY": _translate_y,
    "Rotate": _rotate,
    "Brightness": _brightness,
    "Color": _color,
    "Contrast": _contrast,
    "Sharpness": _sharpness,
    "Posterize": _posterize,
    "Solarize": _solarize,
    "AutoContrast": _auto_contrast,
    "Equalize": _equalize,
}


def _argument_table() -> np.ndarray:
    """Returns the arguments of the operations, float64[operations, strengths]."""
    steps = np.arange(STRENGTHS) / (STRENGTHS - 1)
    rows = {
        "Posterize": 8 - np.rint(steps * _POSTERIZE_BITS_LESS),
        "Solarize": 255 * (1 - steps),
        "Identity": 0 * steps,
        "AutoContrast": 0 * steps,
        "Equalize": 0 * steps,
    }
    kinds = {"Shear": "shear", "Translate": "translate", "Rotate": "rotate"}
    for name in OPERATIONS.keys() - rows.keys():
        kind = next((kind for start, kind in kinds.items() if name.startswith(start)), "enhance")
        rows[name] = _LARGEST[kind] * steps
    return np.stack([rows[name] for name in OPERATIONS])


_ARGUMENTS = _argument_table()
SIGNED = np.array(
    [name not in ("Identity", "Posterize", "Solarize", "AutoContrast", "Equalize") for name in OPERATIONS]
)
