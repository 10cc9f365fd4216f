"""Muon distributed over ranks: each rank orthogonalises a share of the matrices, and all ranks receive all results.

    gradients  --all-reduce-->  directions (everywhere)  -->  polar factors of my matrices  --all-gather-->  weights

    flat buffer   [ rank 0 | rank 1 | rank 2 | rank 3 ][ rank 0 | rank 1 | rank 2 | rank 3 ]   segments of equal length
                    wave 0: sent while wave 1 is computed      wave 1

Only the products are distributed, because they take most of the time. Every rank updates all momentum and weights, so
its state is complete. Scattering the gradients would not help, because the shards of matrices would have to be gathered
before the products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hyperbatch.comm.shards import gather_now
from hyperbatch.optim.muon import MuonSettings, matrix_shape, polar_factors, product_dtype

if TYPE_CHECKING:
    from hyperbatch.comm.grid import GridComm

WAVES = 2


@dataclass(frozen=True, slots=True)
class Share:
    """The rank that orthogonalises a matrix, the wave, and the place of its elements in the flat buffer."""

    rank: int
    wave: int
    offset: int


@dataclass(frozen=True, slots=True)
class Deal:
    shares: tuple[Share, ...]  # one per matrix
    waves: tuple[tuple[int, int], ...]  # [start, stop) of each in the flat buffer

    @property
    def numel(self) -> int:
        return self.waves[-1][1] if self.waves else 0


def deal_out(costs: Sequence[float], sizes: Sequence[int], ranks: int, waves: int = WAVES) -> Deal:
    """Assigns matrices, costliest first, to the rank with the least work. A rank's matrices form `waves` waves."""
    load = [0.0] * ranks
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = load.index(min(load))
        hands[rank].append(i)
        load[rank] += costs[i]
    wave_of = [0] * len(costs)
    for hand, total in zip(hands, load, strict=True):
        done = 0.0
        for i in hand:
            wave_of[i] = min(waves - 1, int(waves * done / total)) if total else 0
            done += costs[i]
    shares = [Share(0, 0, 0)] * len(costs)
    bounds, start = [], 0
    for wave in range(waves):
        mine = [[i for i in hand if wave_of[i] == wave] for hand in hands]
        segment = max(sum(sizes[i] for i in part) for part in mine)
        for rank, part in enumerate(mine):
            offset = start + rank * segment
            for i in part:
                shares[i] = Share(rank, wave, offset)
                offset += sizes[i]
        bounds.append((start, start + ranks * segment))
        start += ranks * segment
    return Deal(tuple(shares), tuple(bounds))


def product_cost(rows: int, columns: int, iterations: int) -> int:
    """The number of multiplications in all iterations for one matrix: X X^T, its square, and their product with X."""
    side = min(rows, columns)
    return iterations * side**2 * (2 * max(rows, columns) + side)


class MatrixShares:
    """Distributes matrices over the ranks of `comm`, which all have the same gradients and take the same steps."""

    def __init__(self, comm: GridComm) -> None:
        self.comm = comm

    def deal(self, costs: Sequence[float], sizes: Sequence[int]) -> Deal:
        return deal_out(costs, sizes, self.comm.size)

    def gather(self, flat: Tensor) -> Any:
        """Sends every rank's segment of a wave to all others; the result is ready after the handle's wait()."""
        return self.comm.submit(partial(gather_now, flat, self.comm, "flat"), flat.device)

    def polar_factors(self, directions: list[Tensor], h: MuonSettings) -> list[Tensor]:
        """Like `hyperbatch.optim.muon.polar_factors`, but this rank computes only its share."""
        dtype = reduce(torch.promote_types, [product_dtype(h, direction) for direction in directions])
        costs = [product_cost(*matrix_shape(direction), h.steps) for direction in directions]
        deal = self.deal(costs, [direction.numel() for direction in directions])
        flat = torch.zeros(deal.numel, dtype=dtype, device=directions[0].device)
        handles = []
        for wave, (start, stop) in enumerate(deal.waves):
            mine = [i for i, share in enumerate(deal.shares) if (share.rank, share.wave) == (self.comm.rank, wave)]
            for i, found in zip(mine, polar_factors([directions[i] for i in mine], h), strict=True):
                offset = deal.shares[i].offset
                flat[offset : offset + found.numel()].view(found.shape).copy_(found)
            handles.append(self.gather(flat[start:stop]))
        for handle in handles:
            handle.wait()
        return [
            flat[share.offset : share.offset + direction.numel()].view(direction.shape).to(direction.dtype)
            for share, direction in zip(deal.shares, directions, strict=True)
        ]
