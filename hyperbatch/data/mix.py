"""Mixup and CutMix: each training image takes a part of another image of its micro-batch, and of that one's label.

    rows of a micro-batch   0 1 | 2 3 | 4        neighbours are partners; the last of an odd number stays as it is
    mixup                   w * own + (1 - w) * partner                  w ~ Beta(alpha, alpha)
    CutMix                  a box of the partner, the rest its own       area of the box about 1 - w

A step (of all ranks) is mixed in one of the two ways, and each pair draws its own weight and box. Both are keyed by
(seed, place in the sample stream): neither resuming nor strides change them, and where every micro-batch is even,
neither do accumulation nor the number of ranks.
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
    """How the rows of a batch are mixed. What lies in a row's box is the partner's; outside of it, `weights` of a pixel
    is the row's own."""

    partners: np.ndarray  # int64[n]: rows
    boxes: np.ndarray  # int64[n, 4]: left, top, right, bottom in pixels; without area: none
    weights: np.ndarray  # fp32[n]
    shares: np.ndarray  # fp32[n]: of the row's own label


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
    """The mix of a batch whose samples lie at `places` in the stream of `length` samples.

    step_start: where the (first) step begins, on rank 0. micro_batches: samples of each of its micro-steps that the
    batch holds. size: side of the images.
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
    """int64[n, 4]: CutMix's boxes around a uniform centre, cut off at the image's edge."""
    half = (0.5 * np.sqrt(1 - weights) * size).astype(np.int64)
    x, y = (ux * size).astype(np.int64), (uy * size).astype(np.int64)
    return np.clip(np.stack([x - half, y - half, x + half, y + half], axis=1), 0, size)


@lru_cache(maxsize=4)
def beta_quantiles(alpha: float) -> np.ndarray:
    """float64[65536]: equally likely values of Beta(alpha, alpha). A table, so that a draw is one uniform.

    The density below 1/2, x^(alpha-1) (1-x)^(alpha-1), is integrated over v = x^power, which takes its pole away; the
    upper half is its mirror image.
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
    """The mixed images of [n, c, h, w], channels last; on a GPU by one kernel. 16-bit pixels are mixed in fp32."""
    device = images.device
    tables = [copy_to_device(part, device) for part in (mix.partners, mix.boxes, mix.weights)]
    on_gpu = (kernels.has_triton() and images.is_cuda) or kernels.interpreted()
    if on_gpu and images.dtype != torch.float64:
        from hyperbatch.kernels.mix import mix as launch  # here, because it loads Triton

        stored = images.permute(0, 2, 3, 1).contiguous()
        return launch(stored, *tables).permute(0, 3, 1, 2)
    return mix_reference(images, *tables)


def mix_reference(images: Tensor, partners: Tensor, boxes: Tensor, weights: Tensor) -> Tensor:
    """What `kernels.mix` must agree with."""
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
    """fp32[n, 3] from int64[n]: a row's label, its partner's, and the share of its own. Whole numbers up to 16 million
    are exact."""
    partners, shares = (copy_to_device(part, labels.device) for part in (mix.partners, mix.shares))
    return torch.stack([labels.float(), labels[partners].float(), shares], dim=1)


def _partners(n: int, micro_batches: tuple[int, ...]) -> np.ndarray:
    """Row i and its neighbour within each micro-batch. The batch holds these micro-batches once, or again and again."""
    rows = np.concatenate([np.arange(count) for count in micro_batches])
    counts = np.repeat(micro_batches, micro_batches)
    moves = np.where(rows ^ 1 < counts, (rows ^ 1) - rows, 0)
    return np.arange(n) + np.tile(moves, -(-n // len(moves)))[:n]


def _uniforms(seed: int, positions: np.ndarray, length: int) -> np.ndarray:
    epochs, places = np.divmod(positions, length)
    return stream.uniforms(seed, epochs, places, _WAY + 1, domain=stream.MIX_DOMAIN)
