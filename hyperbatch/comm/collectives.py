"""All-reduce four ways, in place: flat, hierarchical, 2D torus, hybrid. Free functions over a GridComm.

    flat           the backend's own all-reduce over all ranks
    hierarchical   reduce in each row to its first rank, all-reduce among those, broadcast in each row
    torus          reduce-scatter in rows, all-reduce of the shard in columns, all-gather in rows
    hybrid         hierarchical up to hybrid_switch_bytes on the wire, flat above

A tensor that rows do not divide is cut into equal shards and a tail of less than one element per rank; the tail
belongs to the last shard and travels beside it, so nothing is padded or copied for it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hyperbatch.comm.grid import GridComm
from hyperbatch.comm.runner import Handle
from hyperbatch.errors import InputError, nearest

ALGORITHMS = ("flat", "hierarchical", "torus", "hybrid")
HYBRID_SWITCH_BYTES = 1 << 20

# torch 2.13 renamed both and warns at the old names; 2.11 has only those.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_reduce(
    tensor: Tensor,
    comm: GridComm,
    *,
    algorithm: str = "flat",
    op: str = "mean",
    wire_dtype: torch.dtype | None = None,
    async_op: bool = False,
    hybrid_switch_bytes: int = HYBRID_SWITCH_BYTES,
) -> Handle | None:
    """In place, for a contiguous tensor. Every rank must call it in the same order.

    op: "mean" or "sum". wire_dtype: precision of the messages; sums inside a message are taken in it too.
    async_op: returns a Handle, and the tensor must not be touched before its wait().
    """
    algorithm = resolve_algorithm(algorithm, _wire_bytes(tensor, wire_dtype), hybrid_switch_bytes)
    _check(tensor, op)

    def job() -> None:
        all_reduce_now(tensor, comm, algorithm, op, wire_dtype)

    handle = comm.submit(job, tensor.device)
    if async_op:
        return handle
    handle.wait()
    return None


def reduce_scatter(output: Tensor, tensor: Tensor, comm: GridComm, *, op: str = "mean") -> None:
    """output: this rank's shard (see shard_bounds) of the sum or mean over all ranks; `tensor` stays as it is."""
    _check(tensor, op)
    start, stop = shard_bounds(tensor.numel(), comm.size, comm.rank)
    _check_shard(output, tensor, stop - start)

    def job() -> None:
        if comm.world is None:
            output.copy_(tensor.view(-1))
            return
        work = comm.scratch("scatter", tensor.numel(), tensor.dtype, tensor.device)
        _scaled_copy(work, tensor.view(-1), comm.size, op)
        _scatter_sum(work, comm, comm.world)
        output.copy_(work[start:stop])

    comm.submit(job, tensor.device).wait()


def all_gather(output: Tensor, tensor: Tensor, comm: GridComm) -> None:
    """The inverse of reduce_scatter: output holds every rank's shard. `tensor` may be a slice of it."""
    start, stop = shard_bounds(output.numel(), comm.size, comm.rank)
    _check(output, "sum")
    _check_shard(tensor, output, stop - start)

    def job() -> None:
        whole = output.view(-1)
        whole[start:stop].copy_(tensor)
        if comm.world is not None:
            _gather_shards(whole, comm.world)

    comm.submit(job, output.device).wait()


def shard_bounds(numel: int, parts: int, index: int) -> tuple[int, int]:
    """[start, stop) of one shard: equal ones, and the last also holds the tail."""
    chunk = numel // parts
    return index * chunk, numel if index == parts - 1 else (index + 1) * chunk


def resolve_algorithm(algorithm: str, wire_bytes: int, hybrid_switch_bytes: int = HYBRID_SWITCH_BYTES) -> str:
    """What hybrid stands for at this message size; other names as they are."""
    if algorithm not in ALGORITHMS:
        raise InputError(f"algorithm {algorithm!r} is unknown{nearest(algorithm, ALGORITHMS)}")
    if algorithm != "hybrid":
        return algorithm
    return "hierarchical" if wire_bytes <= hybrid_switch_bytes else "flat"


def all_reduce_now(
    tensor: Tensor, comm: GridComm, algorithm: str, op: str = "mean", wire_dtype: torch.dtype | None = None
) -> None:
    """The body of all_reduce, for code that already runs on the communication thread or stream."""
    if comm.world is None or tensor.numel() == 0:
        return
    flat = tensor.view(-1)
    if wire_dtype is None or wire_dtype == tensor.dtype:
        _scale(flat, comm.size, op)
        _sum(flat, comm, algorithm)
    else:
        wire = comm.scratch("wire", flat.numel(), wire_dtype, flat.device)
        _scaled_copy(wire, flat, comm.size, op)
        _sum(wire, comm, algorithm)
        flat.copy_(wire)


def _sum(flat: Tensor, comm: GridComm, algorithm: str) -> None:
    match algorithm:
        case "flat":
            dist.all_reduce(flat, group=comm.world)
        case "hierarchical":
            _hierarchical(flat, comm)
        case "torus":
            _torus(flat, comm)


def _hierarchical(flat: Tensor, comm: GridComm) -> None:
    if comm.row is not None:
        dist.reduce(flat, group=comm.row, group_dst=0)
    if comm.column is not None and comm.column_index == 0:
        dist.all_reduce(flat, group=comm.column)
    if comm.row is not None:
        dist.broadcast(flat, group=comm.row, group_src=0)


def _torus(flat: Tensor, comm: GridComm) -> None:
    shard = flat if comm.row is None else _scatter_sum(flat, comm, comm.row)
    if comm.column is not None and shard.numel():
        dist.all_reduce(shard, group=comm.column)
    if comm.row is not None:
        _gather_shards(flat, comm.row)


def _scatter_sum(flat: Tensor, comm: GridComm, group: dist.ProcessGroup) -> Tensor:
    """Sums over the group; only this rank's shard of `flat` is valid afterwards, and returned."""
    parts, index = dist.get_world_size(group), dist.get_rank(group)
    start, stop = shard_bounds(flat.numel(), parts, index)
    chunk = flat.numel() // parts
    body, tail = flat[: chunk * parts], flat[chunk * parts :]
    if chunk:
        mine = body[index * chunk : (index + 1) * chunk]
        if flat.is_cuda:
            _reduce_scatter(mine, body, group=group)
        else:
            # gloo's own reduce-scatter moves the bytes of an all-reduce; an exchange and a local sum move half.
            received = comm.scratch("received", body.numel(), body.dtype, body.device)
            dist.all_to_all_single(received, body, group=group)
            torch.sum(received.view(parts, chunk), 0, out=mine)
    if tail.numel():
        dist.reduce(tail, group=group, group_dst=parts - 1)
    return flat[start:stop]


def _gather_shards(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Every rank's shard of `flat` becomes valid everywhere."""
    parts, index = dist.get_world_size(group), dist.get_rank(group)
    chunk = flat.numel() // parts
    body, tail = flat[: chunk * parts], flat[chunk * parts :]
    if chunk:
        _all_gather(body, body[index * chunk : (index + 1) * chunk], group=group)
    if tail.numel():
        dist.broadcast(tail, group=group, group_src=parts - 1)


def _scale(flat: Tensor, ranks: int, op: str) -> None:
    """Before the sum, not after: a sum of fp16 gradients may overflow where their mean does not."""
    if op == "mean":
        flat.mul_(1.0 / ranks)


def _scaled_copy(target: Tensor, source: Tensor, ranks: int, op: str) -> None:
    """Scaled in the wider of both precisions."""
    if op == "mean" and target.dtype.itemsize <= source.dtype.itemsize:
        torch.mul(source, 1.0 / ranks, out=target)
    else:
        target.copy_(source)
        _scale(target, ranks, op)


def _wire_bytes(tensor: Tensor, wire_dtype: torch.dtype | None) -> int:
    return tensor.numel() * (wire_dtype or tensor.dtype).itemsize


def _check(tensor: Tensor, op: str) -> None:
    if op not in ("mean", "sum"):
        raise InputError(f"op {op!r} is unknown; choose mean or sum")
    if op == "mean" and not tensor.is_floating_point():
        raise InputError(f"the mean of {tensor.dtype} is not defined here; use op='sum'")
    if not tensor.is_contiguous():
        raise InputError(f"collectives need a contiguous tensor, this one has strides {tensor.stride()}")


def _check_shard(shard: Tensor, whole: Tensor, numel: int) -> None:
    if shard.ndim != 1 or shard.numel() != numel or shard.dtype != whole.dtype:
        raise InputError(
            f"a shard of {whole.numel()} {whole.dtype} elements is one-dimensional with {numel} of them here, "
            f"not {tuple(shard.shape)} of {shard.dtype}"
        )
