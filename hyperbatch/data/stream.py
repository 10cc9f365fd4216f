"""The sample stream: one endless, stateless order of training samples, keyed by (seed, epoch).

Stream position p lies in epoch p // n; within an epoch a keyed permutation of [0, n) gives the sample. Any rank computes
any stretch by itself, batches may straddle epochs, and position alone is enough to resume.
"""

from __future__ import annotations

import numpy as np


def permute(positions: np.ndarray, length: int, seed: int, epochs: np.ndarray) -> np.ndarray:
    """The sample at each position of its epoch: a bijection of [0, length) for every (seed, epoch)."""
    raise NotImplementedError


def stretch(start: int, count: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(epochs, sample ids) of stream positions [start, start + count)."""
    raise NotImplementedError


def rank_share(
    position: int, batch_per_rank: int, accumulation: int, world_size: int, rank: int, micro_step: int
) -> int:
    """Stream position at which this rank's micro-step starts; ranks take contiguous, disjoint stretches."""
    raise NotImplementedError


def uniforms(seed: int, epochs: np.ndarray, ids: np.ndarray, count: int) -> np.ndarray:
    """float64[len(ids), count] in [0, 1), keyed by (seed, epoch, sample): the randomness of augmentation."""
    raise NotImplementedError
