"""The same weights on every rank at the start: the exchange keeps ranks together, but does not bring them together.

Whether they have stayed together is what checksums of a run's state tell (engine/guard.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hyperbatch.arena import ALIGN_BYTES, Arena
from hyperbatch.comm.agree import check_agreement
from hyperbatch.comm.grid import GridComm
from hyperbatch.comm.shards import all_gather

_BLOCK = 1 << 22  # elements at a time: bounds the memory of their 64-bit products
_COLUMNS = ALIGN_BYTES // 8  # slots begin and end at multiples of it
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as every factor here: no bit of an element is multiplied away


def broadcast_weights(arena: Arena, comm: GridComm) -> None:
    """The weights of the first rank on all of them, fp32 masters included. Every rank calls it, before GradSync."""
    if comm.world is None:
        return
    arena.reclaim()
    comm.drain()  # the thread must not use the group meanwhile
    for flat in arena.flat_weights():
        dist.broadcast(flat, group=comm.world, group_src=0)
    arena.notify_loaded()


def check_same_weights(arena: Arena, comm: GridComm, *, masters: bool) -> None:
    """Raises InputError on every rank, naming the first parameter that differs. masters: compare them, too."""
    if comm.size == 1:
        return
    arena.reclaim()
    sums, lines = [], []
    for slot in arena.slots:
        buffers = [arena.weights[slot.dtype]]
        if masters and arena.masters is not None and slot.dtype.itemsize == 2:
            buffers.append(arena.masters)
        for flat in buffers:
            sums.append(checksum(flat[slot.offset : slot.end]))
            lines.append(f"{slot.name} with {flat.dtype} checksum")
    values = torch.stack(sums).tolist() if sums else []  # once, before training: the only wait for the device
    comm.drain()
    check_agreement(
        comm.world,
        "the initial model",
        [f"{line} {value:x}" for line, value in zip(lines, values, strict=True)],
        advice="load the same weights on every rank, or call hyperbatch.comm.broadcast_weights(arena, comm) first",
    )


def checksum(flat: Tensor) -> Tensor:
    """A sum of the elements' bits modulo 2^64, each times an odd number of its own; it stays on the device.

    Whatever bit of whatever element flips, the sum changes: no bit vanishes when multiplied by an odd number. Elements
    of 64 bits count as two, since a highest bit of 64 would add the same at every place.
    """
    bits = flat.view(torch.int16 if flat.dtype.itemsize == 2 else torch.int32)
    factors = 2 * torch.arange(min(_BLOCK, len(bits)), device=flat.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(bits), _BLOCK):
        part = bits[start : start + _BLOCK]
        total = total * _STEP + (part * factors[: len(part)]).sum()
    return total


def word_sum(flat: Tensor) -> Tensor:
    """A checksum for often: one pass over an arena's buffer, or a part of it between two slots, without a product for
    each element. Words of 64 bits are added in 32 columns, modulo 2^64, and each column counts by an odd number.

    A flipped bit shows as in `checksum`; that two words of a column have changed places does not.
    """
    columns = flat.view(torch.int64).view(-1, _COLUMNS).sum(0)
    return (columns * (2 * torch.arange(_COLUMNS, device=flat.device) + 1)).sum()


def extremes(tensors: Sequence[Tensor]) -> Tensor:
    """The least and the greatest value of each, which are finite where all of its values are; on the device."""
    return torch.stack([bound.double() for tensor in tensors if tensor.numel() for bound in torch.aminmax(tensor)])


class Rows:
    """A few numbers of every rank; on a GPU they are on their way, and `read` waits for nothing queued after them."""

    def __init__(self, table: Tensor) -> None:
        self._table, self._arrived = table, None
        if table.is_cuda:
            self._table = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
            self._table.copy_(table, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[list[int]]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._table.tolist()


def gather_rows(row: Tensor, comm: GridComm) -> Rows:
    """The row of every rank, by rank: one small all-gather behind whatever the exchange has been given so far."""
    table = row.new_empty(comm.size, len(row)) if comm.world is not None else row[None]
    if comm.world is not None:
        # On a GPU the stream waits and the host goes on; on a CPU the caller may use the group itself afterwards.
        comm.submit(partial(_all_gather, table, row, comm.world), row.device).wait()
    return Rows(table)


def _all_gather(table: Tensor, row: Tensor, group: dist.ProcessGroup) -> None:
    all_gather(table.view(-1), row, group=group)
