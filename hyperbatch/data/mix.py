"""Mixup and CutMix: each training image is mixed with another image of its micro-batch, and so are their labels.

    rows of a micro-batch   0 1 | 2 3 | 4        neighbours are partners; the last of an odd number stays as it is
    mixup                   w * own + (1 - w) * partner                  w ~ Beta(alpha, alpha)
    CutMix                  a box of the partner, the rest its own       area of the box about 1 - w

A step (of all ranks) uses one of the two methods, and each pair draws its own weight and box. Both are keyed by (seed,
place in the sample stream), so resuming and strides do not change them. If every micro-batch is even, accumulation and
the number of ranks do not change them either.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hyperbatch import kernels
from hyperbatch.config import DataConfig
from hyperbatch.data import stream
from hyperbatch.data.buffers import copy_to_device

_QUANTILES = 1 << 16
_INTEGRATION_POINTS = 1 << 17
_WEIGHT, _X, _Y, _WAY = range(4)  # columns of the uniforms


class Mix(NamedTuple):
    """How the rows of a batch are mixed. Pixels inside a row's box are the partner's. Outside of it, a pixel is weights
    * own + (1 - weights) * partner."""

    partners: np.ndarray  # int64[n]: the row of each row's partner
    boxes: np.ndarray  # int64[n, 4]: left, top, right, bottom in pixels; a box without area means no box
    weights: np.ndarray  # fp32[n]
    shares: np.ndarray  # fp32[n]: the weight of the row's own label


def mixes(config: DataConfig) -> bool:
    return bool(config.mixup or config.cutmix)


def draw(
    config: DataConfig,
    seed: int,
    length: int,
    places: stream.Stretches,
    *,
    step_start: int,
    micro_batches: tuple[int, ...],
    size: int,
) -> Mix:
    """Returns the mix of a batch whose samples lie at `places` in the stream of a set of `length` samples.

    step_start: the position at which the (first) step begins, on rank 0. micro_batches: the number of samples of each
    micro-step of a step that the batch holds. size: the side of the images.
    """
    n = places.count
    partners = _partners(n, micro_batches)
    positions = places.positions()
    pairs = _uniforms(seed, np.minimum(positions, positions[partners]), length)
    cuts = np.full(n, not config.mixup)
    if config.mixup and config.cutmix:
        step_starts = step_start + np.arange(n) // places.share * places.stride
        cuts = _uniforms(seed, step_starts, length)[:, _WAY] < 0.5
    places_in_table = (pairs[:, _WEIGHT] * _QUANTILES).astype(np.int64)
    weights = np.ones(n)
    for chosen, alpha in ((~cuts, config.mixup), (cuts, config.cutmix)):
        if chosen.any():
            weights[chosen] = beta_quantiles(alpha)[places_in_table[chosen]]
    alone = partners == np.arange(n)
    boxes = cut_boxes(weights, pairs[:, _X], pairs[:, _Y], size)
    boxes[~cuts | alone] = 0
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    weights[cuts | alone] = 1
    weights = weights.astype(np.float32)
    shares = np.where(cuts, (1 - areas / size**2).astype(np.float32), weights)
    return Mix(partners, boxes, weights, shares)


def cut_boxes(weights: np.ndarray, ux: np.ndarray, uy: np.ndarray, size: int) -> np.ndarray:
    """Returns CutMix's boxes, int64[n, 4], around a uniformly drawn centre and clipped to the image."""
    half = (0.5 * np.sqrt(1 - weights) * size).astype(np.int64)
    x, y = (ux * size).astype(np.int64), (uy * size).astype(np.int64)
    return np.clip(np.stack([x - half, y - half, x + half, y + half], axis=1), 0, size)


@lru_cache(maxsize=4)
def beta_quantiles(alpha: float) -> np.ndarray:
    """Returns float64[65536]: equally likely values of Beta(alpha, alpha). With this table, a draw takes one uniform.

    The density below 1/2, x^(alpha-1) (1-x)^(alpha-1), is integrated over v = x^power, which removes its pole. The
    upper half is the mirror image.
    """
    power = min(alpha, 1.0)
    v = np.linspace(0, 0.5**power, _INTEGRATION_POINTS)
    x = v ** (1 / power)
    density = x ** (alpha - power) * (1 - x) ** (alpha - 1)
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    wanted = (np.arange(_QUANTILES // 2) + 0.5) / (_QUANTILES // 2)
    low = np.interp(wanted * area[-1], area, v) ** (1 / power)
    table = np.concatenate([low, 1 - low[::-1]])
    table.flags.writeable = False
    return table


def mix_images(images: Tensor, mix: Mix) -> Tensor:
    """Returns the mixed images, [n, c, h, w] channels last. A GPU does it in one kernel. 16-bit pixels are mixed in
    fp32."""
    device = images.device
    tables = [copy_to_device(part, device) for part in (mix.partners, mix.boxes, mix.weights)]
    on_gpu = (kernels.has_triton() and images.is_cuda) or kernels.interpreted()
    if on_gpu and images.dtype != torch.float64:
        from hyperbatch.kernels.mix import mix as launch  # imported here because it loads Triton

        stored = images.permute(0, 2, 3, 1).contiguous()
        return launch(stored, *tables).permute(0, 3, 1, 2)
    return mix_reference(images, *tables)


def mix_reference(images: Tensor, partners: Tensor, boxes: Tensor, weights: Tensor) -> Tensor:
    """The reference for `kernels.mix`."""
    height, width = images.shape[2:]
    x = torch.arange(width, device=images.device)
    y = torch.arange(height, device=images.device)[:, None]
    left, top, right, bottom = boxes[:, :, None, None].unbind(1)
    inside = (x >= left) & (x < right) & (y >= top) & (y < bottom)
    wide = images.to(torch.promote_types(images.dtype, torch.float32))
    own = torch.where(inside, 0.0, weights[:, None, None])[:, None].to(wide.dtype)
    mixed = own * wide + (1 - own) * wide[partners]
    return mixed.to(images.dtype).contiguous(memory_format=torch.channels_last)


def mix_labels(labels: Tensor, mix: Mix) -> Tensor:
    """Returns fp32[n, 3] from int64[n]: the label of each row, its partner's label, and the weight of its own label.
    Labels up to 16 million are exact in fp32."""
    partners, shares = (copy_to_device(part, labels.device) for part in (mix.partners, mix.shares))
    return torch.stack([labels.float(), labels[partners].float(), shares], dim=1)


def _partners(n: int, micro_batches: tuple[int, ...]) -> np.ndarray:
    """Returns the partner of each row: its neighbour within its micro-batch. The batch holds this list of micro-batches
    once, or several times in a row."""
    rows = np.concatenate([np.arange(count) for count in micro_batches])
    counts = np.repeat(micro_batches, micro_batches)
    moves = np.where(rows ^ 1 < counts, (rows ^ 1) - rows, 0)
    return np.arange(n) + np.tile(moves, -(-n // len(moves)))[:n]


def _uniforms(seed: int, positions: np.ndarray, length: int) -> np.ndarray:
    epochs, places = np.divmod(positions, length)
    return stream.uniforms(seed, epochs, places, _WAY + 1, domain=stream.MIX_DOMAIN)
