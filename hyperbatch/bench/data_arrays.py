"""Rows of `hyperbatch bench data` for small images in memory: shifted with reflection, mirrored every other epoch.

On a GPU the set is in GPU memory. The peer is what speed-runs of CIFAR-10 do in plain torch: the whole set is padded
once, and every epoch is cropped, mirrored and shuffled as one tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyperbatch.bench import harness
from hyperbatch.bench.harness import Candidate
from hyperbatch.config import BatchPhase, DataConfig
from hyperbatch.data.loader import TrainLoader
from hyperbatch.data.source import ArraySource
from hyperbatch.schedule import resolve_phases, steps

_SHIFT = 2
_SIDE = 32
_EPOCHS = 2


def array_rows(
    images_per_s: Callable[[Callable[[], int]], float],
    *,
    images: int,
    batches: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
    peer: bool,
    told: Callable[[str, float], None],
) -> list[dict[str, Any]]:
    """Times two epochs in batches of each size.

    images_per_s: measures a function that returns how many images it made. peer: whether plain torch is measured too.
    told: as for `harness.interleave`.
    """
    pixels = np.random.default_rng(0).integers(0, 256, (images, _SIDE, _SIDE, 3), dtype=np.uint8)
    source = ArraySource(
        "arrays", pixels, np.arange(images) % 10, classes=tuple(map(str, range(10))), mean=(0.5,) * 3, std=(0.29,) * 3
    )
    config = DataConfig(
        image_size=_SIDE,
        eval_size=_SIDE,
        augment="shift",
        shift_pixels=_SHIFT,
        shift_padding="reflect",
        flip_alternates=True,
    )
    with TrainLoader(source, config, seed=0, rank=0, world_size=1, device=device, dtype=dtype) as loader:
        candidates = [
            Candidate(name=f"hyperbatch, arrays, batches of {batch}", run=_ours(loader, images, batch))
            for batch in batches
        ]
        if peer:
            epochs = _whole_epochs(source, batches[0], device, dtype)
            candidates.append(Candidate(name="torch, arrays, whole epochs", run=epochs, peer=True))
        samples = harness.interleave(candidates, images_per_s, rounds=rounds, warmup=1, told=told)
    shape = f"{_SIDE}x{_SIDE} px in memory"
    return harness.rows(candidates, samples, unit="img/s", higher_is_better=True, image=shape, images=images)


def _ours(loader: TrainLoader, images: int, batch: int) -> Callable[[], int]:
    plan = list(steps(resolve_phases((BatchPhase(0, batch),), images, 1), images, float(_EPOCHS)))
    return lambda: sum(len(made.labels) for made in loader.batches(plan))


def _whole_epochs(source: ArraySource, batch: int, device: torch.device, dtype: torch.dtype) -> Callable[[], int]:
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (source.mean, source.std))
    images = torch.from_numpy(source.images).to(device).permute(0, 3, 1, 2)
    images = ((images / 255 - mean) / std).to(dtype, memory_format=torch.channels_last)
    labels = torch.from_numpy(source.labels).to(device)
    turned = torch.rand(len(images), device=device) < 0.5
    images = torch.where(turned.view(-1, 1, 1, 1), images.flip(-1), images)
    padded = torch.nn.functional.pad(images, (_SHIFT,) * 4, mode="reflect")

    def epoch(index: int) -> list[tuple[Tensor, Tensor]]:
        moves = torch.randint(0, 2 * _SHIFT + 1, (len(images), 2), device=device)
        cut = torch.empty_like(images)
        for top in range(2 * _SHIFT + 1):
            for left in range(2 * _SHIFT + 1):
                here = (moves[:, 0] == top) & (moves[:, 1] == left)
                cut[here] = padded[here, :, top : top + _SIDE, left : left + _SIDE]
        cut = cut.flip(-1) if index % 2 else cut
        order = torch.randperm(len(images), device=device)
        return [(cut[ids], labels[ids]) for ids in order.split(batch)]

    return lambda: sum(len(found) for index in range(_EPOCHS) for _, found in epoch(index))
