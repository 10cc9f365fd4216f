"""The same weights on every rank at the start: the exchange keeps ranks together, but does not bring them together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from hyperbatch.comm.agree import check_agreement
from hyperbatch.comm.grid import GridComm

if TYPE_CHECKING:
    from hyperbatch.arena import Arena

_BLOCK = 1 << 22  # elements at a time: bounds the memory of their 64-bit products
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
