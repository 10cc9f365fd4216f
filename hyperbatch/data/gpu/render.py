"""Cuts a batch of views from decoded images of any size: the tables for the fused kernel, and the readable reference.

The weights are those of Pillow's antialiased bilinear filter: a triangle as wide as the step between output pixels,
clipped at the image's edge (not the box's) and normalised. Pillow rounds to whole grey levels twice; here nothing is
rounded.
"""

from __future__ import annotations

import numpy as np

from hyperbatch.data import augment


def axis_weights(low: float, length: float, size: int, pixels: int) -> np.ndarray:
    """Returns float64[size, pixels]: the weight of each pixel of the image in each of `size` output pixels."""
    step = length / size
    spread = max(step, 1.0)
    centres = low + (np.arange(size) + 0.5) * step
    weights = np.maximum(1 - np.abs(np.arange(pixels) + 0.5 - centres[:, None]) / spread, 0)
    return weights / weights.sum(axis=1, keepdims=True)


def render_reference(pixels: np.ndarray, view: augment.View, size: int) -> np.ndarray:
    """Returns the view of uint8[h, w, c] as float64[size, size, c]: grey levels that are not rounded."""
    left, top, right, bottom = view.box
    rows = axis_weights(top, bottom - top, size, pixels.shape[0])
    columns = axis_weights(left, right - left, size, pixels.shape[1])
    return view.finish(np.einsum("yh,hwc,xw->yxc", rows, pixels.astype(np.float64), columns, optimize=True))


def view_table(views: np.ndarray) -> np.ndarray:
    """Returns the kernel's fp32 rows from `augment.batch_views`. The box becomes left, top, width, height; the
    differences are taken in full precision."""
    table = views.copy()
    table[:, 2:4] -= views[:, 0:2]
    return table.astype(np.float32)
