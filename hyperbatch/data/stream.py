"""The sample stream: one endless, stateless order of training samples, keyed by (seed, epoch).

Stream position p lies in epoch p // n. Within an epoch, a keyed permutation of [0, n) gives the sample. Any rank can
compute any stretch by itself, batches may straddle epochs, and the position alone is enough to resume. If a GPU holds
the set, it computes the stream itself: `kernels.augment` repeats this file's arithmetic bit for bit.

    epoch 0                epoch 1                n = 7, global batch 4, 2 ranks
    5 2 0 6 3 1 4 | 1 6 3 0 5 4 2 | ...
    [r0 ][r1 ][r0 ][r1  ][r0 ][r1 ]               a step's batch is a stretch; each rank's share is a part of it
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: multiples of it do not repeat within a stream
_ORDER_DOMAIN = 0x6F72646572  # separates the permutation's keys from augmentation's
_UNIFORM_DOMAIN = 0x756E69666F
MIX_DOMAIN = 0x6D69786573
_FEISTEL_ROUNDS = 8  # 4 give a random-looking permutation; small sets have few values per round, so twice as many
_CACHED_LENGTH = 1 << 16  # for sets of up to this many samples, the order of whole epochs is cached


class Stretches(NamedTuple):
    """The stream positions of a batch: `share` positions from `start` on, and again every `stride`, `count` in total.

    These are one rank's samples of several steps: its share of each step, one global batch apart.
    """

    start: int
    count: int
    share: int
    stride: int

    @classmethod
    def single(cls, start: int, count: int) -> Stretches:
        return cls(start, count, share=count, stride=count)

    def positions(self) -> np.ndarray:
        rows = np.arange(self.count)
        return self.start + rows // self.share * self.stride + rows % self.share

    def samples(self, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (epochs, sample ids)."""
        if self.share >= self.count:
            return stretch(self.start, self.count, length, seed)
        parts = [
            stretch(self.start + i * self.stride, min(self.share, self.count - i * self.share), length, seed)
            for i in range(-(-self.count // self.share))
        ]
        epochs, ids = zip(*parts, strict=True)
        return np.concatenate(epochs), np.concatenate(ids)


def permute(positions: np.ndarray, length: int, seed: int, epochs: np.ndarray) -> np.ndarray:
    """Returns the sample at each position of its epoch: a bijection of [0, length) for every (seed, epoch).

    A Feistel network permutes a rows x columns grid that is just large enough for `length` values. A value that lands
    outside of [0, length) is permuted again until it is inside (cycle walking). The result is still a bijection, and
    this is rare, because the grid is less than a column too large.
    """
    values = np.array(positions, dtype=np.uint64)
    keys = _mix(_scalar_key(seed, _ORDER_DOMAIN) + np.asarray(epochs).astype(np.uint64) * np.uint64(_GOLDEN))
    keys = np.broadcast_to(keys, values.shape)
    rows, columns = grid(length)
    values = _feistel(values, keys, rows, columns)
    while (outside := np.flatnonzero(values >= length)).size:
        values[outside] = _feistel(values[outside], keys[outside], rows, columns)
    return values.astype(np.int64)


def grid(length: int) -> tuple[int, int]:
    """Returns (rows, columns) of the grid on which a permutation of [0, length) is computed."""
    columns = math.isqrt(length - 1) + 1
    return -(-length // columns), columns


def keys(seed: int) -> tuple[int, int]:
    """Returns the seed's keys of the permutation and of the uniforms, before they are combined with the epoch."""
    return int(_scalar_key(seed, _ORDER_DOMAIN)[0]), int(_scalar_key(seed, _UNIFORM_DOMAIN)[0])


def stretch(start: int, count: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (epochs, sample ids) of stream positions [start, start + count)."""
    first, offset = divmod(start, length)
    if length <= _CACHED_LENGTH and offset + count <= length:  # tiny batches: slicing is faster than hashing
        return np.full(count, first), _epoch_order(length, seed, first)[offset : offset + count]
    epochs, positions = np.divmod(np.arange(start, start + count, dtype=np.int64), length)
    return epochs, permute(positions, length, seed, epochs)


def rank_share(position: int, share_per_rank: int, world_size: int, rank: int) -> int:
    """Returns the stream position at which this rank's samples of a step start. Ranks take contiguous, disjoint
    stretches.

    A rank's micro-steps follow each other within its stretch, so its samples of a step do not depend on accumulation.
    """
    assert 0 <= rank < world_size
    return position + rank * share_per_rank


def uniforms(
    seed: int, epochs: np.ndarray, ids: np.ndarray, count: int, *, domain: int = _UNIFORM_DOMAIN
) -> np.ndarray:
    """Returns float64[len(ids), count] in [0, 1), keyed by (seed, epoch, sample): the random numbers of augmentation.

    domain: separates draws for different purposes.
    """
    key = _scalar_key(seed, domain)
    key = _mix(key + np.asarray(epochs).astype(np.uint64) * np.uint64(_GOLDEN))
    key = _mix(key + np.asarray(ids).astype(np.uint64) * np.uint64(_GOLDEN))
    counters = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return (_mix(key[:, None] + counters) >> np.uint64(11)) * 2.0**-53


@lru_cache(maxsize=4)
def _epoch_order(length: int, seed: int, epoch: int) -> np.ndarray:
    order = permute(np.arange(length), length, seed, np.full(length, epoch))
    order.flags.writeable = False
    return order


def _feistel(values: np.ndarray, keys: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """A bijection of [0, rows * columns): row and column are alternately rotated by a hash of the other."""
    sizes = (np.uint64(rows), np.uint64(columns))
    parts = list(np.divmod(values, sizes[1]))
    for turn in range(_FEISTEL_ROUNDS):
        target = turn % 2
        hashed = _mix(keys ^ (parts[1 - target] * np.uint64(_GOLDEN) + np.uint64(turn)))
        parts[target] = (parts[target] + hashed % sizes[target]) % sizes[target]
    return parts[0] * sizes[1] + parts[1]


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: every input bit affects every output bit. Arrays overflow silently, as intended."""
    x = x ^ (x >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)  # in place from here on: for small batches, calls and allocations dominate
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


@lru_cache(maxsize=8)
def _scalar_key(seed: int, domain: int) -> np.ndarray:
    # An array of one element, because numpy warns about the overflow of scalars but not of arrays.
    return _mix(np.array([(seed * _GOLDEN + domain) & _MASK], dtype=np.uint64))
