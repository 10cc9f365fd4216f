"""Reduce-scatter and all-gather in place, over one group or over both directions of the grid.

    shards of 10 elements over 4 ranks     [ 0 1 | 2 3 | 4 5 | 6 7 + tail 8 9 ]

A tensor that a group does not divide is cut into equal shards and a tail of less than one element per rank. The tail
belongs to the last shard and is sent in a message of its own, so nothing is padded or copied for it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hyperbatch.comm.grid import GridComm
from hyperbatch.comm.phases import Log, phase

# torch 2.13 renamed both functions and warns about the old names; torch 2.11 has only the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def shard_bounds(numel: int, parts: int, index: int) -> tuple[int, int]:
    """Returns [start, stop) of one shard. All shards are equal, except that the last one also contains the tail."""
    chunk = numel // parts
    return index * chunk, numel if index == parts - 1 else (index + 1) * chunk


def own_shard(numel: int, comm: GridComm, algorithm: str) -> tuple[int, int]:
    """Returns [start, stop) of the part, about 1/N, that is valid on this rank after `scatter_now`.

    In a torus it is this rank's column shard of its row shard.
    """
    if comm.world is None:
        return 0, numel
    if algorithm != "torus":
        return shard_bounds(numel, comm.size, comm.rank)
    start, stop = shard_bounds(numel, comm.grid.columns, comm.column_index)
    # A group numbers its ranks in ascending order, for any order of the rows.
    place = 0 if comm.column is None else dist.get_rank(comm.column)
    first, last = shard_bounds(stop - start, comm.grid.rows, place)
    return start + first, start + last


def scatter_now(flat: Tensor, comm: GridComm, algorithm: str, log: Log = None) -> Tensor:
    """Sums `flat` over all ranks, in place. Returns `own_shard` of it, the only part that is valid afterwards."""
    if comm.world is None:
        return flat
    if algorithm != "torus":
        return scatter_sum(flat, comm, comm.world, "reduce-scatter", log)
    shard = flat if comm.row is None else scatter_sum(flat, comm, comm.row, "row reduce-scatter", log)
    return shard if comm.column is None else scatter_sum(shard, comm, comm.column, "column reduce-scatter", log)


def gather_now(flat: Tensor, comm: GridComm, algorithm: str, log: Log = None) -> None:
    """The inverse of `scatter_now`: every rank receives the own shards of all others."""
    if comm.world is None:
        return
    if algorithm != "torus":
        gather_shards(flat, comm.world, "all-gather", log)
        return
    if comm.column is not None:
        start, stop = shard_bounds(flat.numel(), comm.grid.columns, comm.column_index)
        gather_shards(flat[start:stop], comm.column, "column all-gather", log)
    if comm.row is not None:
        gather_shards(flat, comm.row, "row all-gather", log)


def scatter_sum(flat: Tensor, comm: GridComm, group: dist.ProcessGroup, name: str, log: Log = None) -> Tensor:
    """Sums `flat` over the group, in place. Returns this rank's shard, the only part that is valid afterwards."""
    parts, index = dist.get_world_size(group), dist.get_rank(group)
    start, stop = shard_bounds(flat.numel(), parts, index)
    chunk = flat.numel() // parts
    body, tail = flat[: chunk * parts], flat[chunk * parts :]
    with phase(log, name, flat.nbytes, flat.device):
        if chunk:
            mine = body[index * chunk : (index + 1) * chunk]
            if flat.is_cuda:
                _reduce_scatter(mine, body, group=group)
            else:
                # gloo's own reduce-scatter sends as many bytes as an all-reduce; an exchange and a local sum send half.
                received = comm.scratch("received", body.numel(), body.dtype, body.device)
                dist.all_to_all_single(received, body, group=group)
                sum_parts(received.view(parts, chunk), mine)
        if tail.numel():
            dist.reduce(tail, group=group, group_dst=parts - 1)
    return flat[start:stop]


def gather_shards(flat: Tensor, group: dist.ProcessGroup, name: str, log: Log = None) -> None:
    """All-gather in place: every rank of the group receives the shards of all others into `flat`."""
    parts, index = dist.get_world_size(group), dist.get_rank(group)
    chunk = flat.numel() // parts
    body, tail = flat[: chunk * parts], flat[chunk * parts :]
    with phase(log, name, flat.nbytes, flat.device):
        if chunk:
            all_gather(body, body[index * chunk : (index + 1) * chunk], group=group)
        if tail.numel():
            dist.broadcast(tail, group=group, group_src=parts - 1)


def sum_parts(parts: Tensor, out: Tensor) -> None:
    """Sums over rows. For two rows, the usual case, an addition is many times faster in 16 bits on a CPU."""
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=out)
    else:
        torch.sum(parts, 0, out=out)
