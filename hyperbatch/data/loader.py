"""Batches on the device, ahead of the step that needs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hyperbatch.config import DataConfig
from hyperbatch.data.source import Source
from hyperbatch.schedule import Step


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-step: images [n, c, h, w] channels_last, normalised; labels [n]; mask [n] false on padding (evaluation)."""

    images: Tensor
    labels: Tensor
    mask: Tensor | None = None


class TrainLoader:
    def __init__(
        self,
        source: Source,
        config: DataConfig,
        *,
        seed: int,
        rank: int,
        world_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        raise NotImplementedError

    def batches(self, steps: Iterable[Step]) -> Iterator[Batch]:
        """One Batch per micro-step of each step, prefetched in order."""
        raise NotImplementedError

    @property
    def wait_s(self) -> float:
        """Seconds the consumer has spent waiting for a batch so far."""
        raise NotImplementedError

    @property
    def bad_samples(self) -> list[str]:
        """One line per sample that could not be read and was replaced."""
        raise NotImplementedError


def eval_batches(
    source: Source,
    config: DataConfig,
    *,
    batch_per_rank: int,
    rank: int,
    world_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[Batch]:
    """Every sample exactly once over all ranks; the same number of equally shaped batches on each."""
    raise NotImplementedError
