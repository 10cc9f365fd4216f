"""Broadcasts weights and compares them over ranks: the gradient exchange keeps equal weights equal, but they must be
equal at the start.

engine/guard.py uses the checksums during a run to detect ranks that have drifted apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hyperbatch.arena import ALIGN_BYTES, Arena
from hyperbatch.comm.agree import check_agreement
from hyperbatch.comm.collectives import check_comm
from hyperbatch.comm.grid import GridComm
from hyperbatch.comm.shards import all_gather
from hyperbatch.errors import check_kind

_BLOCK = 1 << 22  # elements per block: limits the memory of their 64-bit products
_COLUMNS = ALIGN_BYTES // 8  # 64-bit words; slots begin and end at multiples of it
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as every factor here, so that no bit of an element is lost in the product


def broadcast_weights(arena: Arena, comm: GridComm) -> None:
    """Copies the first rank's weights and fp32 masters to all ranks. Every rank must call it before it creates
    GradSync.

    Frozen parameters and buffers are not in the arena and stay as they are.
    """
    check_kind("arena", arena, Arena, "give the Arena of the model")
    check_comm(comm)
    if comm.world is None:
        return
    arena.reclaim()
    comm.drain()  # the communication thread must not use the group during the broadcast
    for flat in arena.flat_weights():
        dist.broadcast(flat, group=comm.world, group_src=0)
    arena.notify_loaded()


def check_same_weights(arena: Arena, comm: GridComm, *, masters: bool) -> None:
    """Raises InputError on every rank if weights differ; the message names the first such parameter. masters: whether
    to compare the masters, too."""
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
    values = torch.stack(sums).tolist() if sums else []  # the only synchronisation; once, before training
    comm.drain()
    check_agreement(
        comm.world,
        "the initial model",
        [f"{line} {value:x}" for line, value in zip(lines, values, strict=True)],
        advice="load the same weights on every rank, or call hyperbatch.comm.broadcast_weights(arena, comm) first",
    )


def checksum(flat: Tensor) -> Tensor:
    """Returns the sum of the elements' bits modulo 2^64, each multiplied by its own odd number. It stays on the device.

    Any single flipped bit changes the sum, because no bit is lost in a product with an odd number. Elements of 64 bits
    count as two, because the highest of 64 bits would add the same at every position.
    """
    bits = flat.view(torch.int16 if flat.dtype.itemsize == 2 else torch.int32)
    factors = 2 * torch.arange(min(_BLOCK, len(bits)), device=flat.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(bits), _BLOCK):
        part = bits[start : start + _BLOCK]
        total = total * _STEP + (part * factors[: len(part)]).sum()
    return total


def word_sum(flat: Tensor) -> Tensor:
    """A faster checksum of an arena's buffer, or of a part of it between two slots, without a product per element.

    Words of 64 bits are added in 32 columns, modulo 2^64, and each column is multiplied by an odd number. Like
    `checksum`, it detects any flipped bit, but it does not detect that two words of a column were exchanged.
    """
    columns = flat.view(torch.int64).view(-1, _COLUMNS).sum(0)
    return (columns * (2 * torch.arange(_COLUMNS, device=flat.device) + 1)).sum()


def extremes(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the least and the greatest value of each tensor, on the device. They are finite only if all values
    are."""
    return torch.stack([bound.double() for tensor in tensors if tensor.numel() for bound in torch.aminmax(tensor)])


class Rows:
    """A few numbers from every rank. On a GPU they may still be in flight; `read` waits for them only."""

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
    """Returns the rows of all ranks, by rank, from one small all-gather after all exchanges submitted so far."""
    table = row.new_empty(comm.size, len(row)) if comm.world is not None else row[None]
    if comm.world is not None:
        # On a GPU the stream waits and the host continues; on a CPU the caller may use the group directly afterwards.
        comm.submit(partial(_all_gather, table, row, comm.world), row.device).wait()
    return Rows(table)


def _all_gather(table: Tensor, row: Tensor, group: dist.ProcessGroup) -> None:
    all_gather(table.view(-1), row, group=group)
