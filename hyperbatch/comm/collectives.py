"""In-place all-reduce with four algorithms: flat, hierarchical, 2D torus, hybrid. Free functions over a GridComm.

flat           the backend's own all-reduce over all ranks
hierarchical   reduce in each row to its first rank, all-reduce among those, broadcast in each row
torus          reduce-scatter in rows, all-reduce of the shard in columns, all-gather in rows
hybrid         hierarchical up to hybrid_switch_bytes on the wire, flat above
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hyperbatch.comm.grid import GridComm
from hyperbatch.comm.phases import Log, phase
from hyperbatch.comm.pipeline import pipelines, torus_in_chunks
from hyperbatch.comm.runner import ExchangeHandle
from hyperbatch.comm.scaling import scale, scaled_copy
from hyperbatch.comm.shards import gather_now, gather_shards, own_shard, scatter_now, scatter_sum
from hyperbatch.errors import InputError, check_kind, nearest, shown
from hyperbatch.params import FLOAT_DTYPES
from hyperbatch.vocabulary import ALGORITHMS, HYBRID_SWITCH_BYTES


def all_reduce(
    tensor: Tensor,
    comm: GridComm,
    *,
    algorithm: str = "flat",
    op: str = "mean",
    wire_dtype: torch.dtype | None = None,
    async_op: bool = False,
    hybrid_switch_bytes: int = HYBRID_SWITCH_BYTES,
) -> ExchangeHandle | None:
    """All-reduces a contiguous tensor in place. Every rank must call collectives in the same order.

    op: "mean" or "sum". wire_dtype: precision of the messages and of the sums; by default the tensor's own.
    async_op: returns an ExchangeHandle at once; the tensor must not be used before its wait().
    """
    check_comm(comm)
    _check(tensor, op)
    wire_bytes = message_bytes(tensor.numel(), tensor.dtype, wire_dtype)
    algorithm = resolve_algorithm(algorithm, wire_bytes, hybrid_switch_bytes)

    def exchange() -> None:
        all_reduce_now(tensor, comm, algorithm, op, wire_dtype)

    handle = comm.submit(exchange, tensor.device)
    if async_op:
        return handle
    handle.wait()
    return None


def reduce_scatter(
    output: Tensor, tensor: Tensor, comm: GridComm, *, op: str = "mean", algorithm: str = "flat"
) -> None:
    """Writes this rank's shard (see own_shard) of the sum or mean over all ranks to `output`; `tensor` is not changed.

    algorithm: "torus" works in rows, then in columns; any other works over all ranks at once.
    """
    _check(tensor, op)
    start, stop = own_shard(tensor.numel(), comm, algorithm)
    _check_shard(output, tensor, stop - start)

    def exchange() -> None:
        if comm.world is None:
            output.copy_(tensor.view(-1))
            return
        work = comm.scratch("scatter", tensor.numel(), tensor.dtype, tensor.device)
        scaled_copy(work, tensor.view(-1), comm.size, op)
        output.copy_(scatter_now(work, comm, algorithm))

    comm.submit(exchange, tensor.device).wait()


def all_gather(output: Tensor, tensor: Tensor, comm: GridComm, *, algorithm: str = "flat") -> None:
    """The inverse of reduce_scatter: fills `output` with every rank's shard. `tensor` may be a slice of it."""
    start, stop = own_shard(output.numel(), comm, algorithm)
    _check(output, "sum")
    _check_shard(tensor, output, stop - start)

    def exchange() -> None:
        whole = output.view(-1)
        whole[start:stop].copy_(tensor)
        gather_now(whole, comm, algorithm)

    comm.submit(exchange, output.device).wait()


def resolve_algorithm(algorithm: str, wire_bytes: int, hybrid_switch_bytes: int = HYBRID_SWITCH_BYTES) -> str:
    """Returns the algorithm that `hybrid` uses at this message size. Other names are returned unchanged."""
    if algorithm not in ALGORITHMS:
        raise InputError(f"algorithm {algorithm!r} is unknown{nearest(algorithm, ALGORITHMS)}")
    check_kind("hybrid_switch_bytes", hybrid_switch_bytes, (int, float), "give a number of bytes")
    if algorithm != "hybrid":
        return algorithm
    return "hierarchical" if wire_bytes <= hybrid_switch_bytes else "flat"


def message_bytes(numel: int, dtype: torch.dtype, wire_dtype: torch.dtype | None) -> int:
    """Returns the size of a message. Raises InputError for a dtype in which gradients cannot be sent."""
    if wire_dtype not in (None, *FLOAT_DTYPES):
        known = ", ".join(map(str, FLOAT_DTYPES))
        raise InputError(f"wire_dtype is {shown(wire_dtype)}; give one of {known}, or None for the gradients' own")
    return numel * (wire_dtype or dtype).itemsize


def check_comm(comm: Any) -> None:
    check_kind("comm", comm, GridComm, "give a GridComm")


def all_reduce_now(
    tensor: Tensor,
    comm: GridComm,
    algorithm: str,
    op: str = "mean",
    wire_dtype: torch.dtype | None = None,
    log: Log = None,
) -> None:
    """The body of all_reduce, for code that already runs on the communication thread or stream."""
    if comm.world is None or tensor.numel() == 0:
        return
    flat, wire_dtype = tensor.view(-1), wire_dtype or tensor.dtype
    if algorithm == "torus" and pipelines(flat, comm, wire_dtype):
        torus_in_chunks(flat, comm, op, wire_dtype, log)
        return
    wire = _to_wire(flat, comm, op, wire_dtype, log)
    match algorithm:
        case "flat":
            with phase(log, "all-reduce", wire.nbytes, wire.device):
                dist.all_reduce(wire, group=comm.world)
        case "hierarchical":
            _hierarchical(wire, comm, log)
        case "torus":
            _torus(wire, comm, log)
    _from_wire(wire, flat, log)


def reduce_scatter_now(
    tensor: Tensor, comm: GridComm, algorithm: str, wire_dtype: torch.dtype | None = None, log: Log = None
) -> None:
    """In place: `own_shard` of the tensor becomes the mean over ranks; the rest is overwritten with partial results."""
    if comm.world is None or tensor.numel() == 0:
        return
    flat = tensor.view(-1)
    wire = _to_wire(flat, comm, "mean", wire_dtype or tensor.dtype, log)
    scatter_now(wire, comm, algorithm, log)
    start, stop = own_shard(flat.numel(), comm, algorithm)
    _from_wire(wire[start:stop], flat[start:stop], log)


def _to_wire(flat: Tensor, comm: GridComm, op: str, wire_dtype: torch.dtype, log: Log) -> Tensor:
    """Returns the scaled tensor in the precision of the messages: the tensor itself, or a copy."""
    if wire_dtype == flat.dtype:
        scale(flat, comm.size, op)
        return flat
    with phase(log, "cast", flat.nbytes, flat.device):
        wire = comm.scratch("wire", flat.numel(), wire_dtype, flat.device)
        scaled_copy(wire, flat, comm.size, op)
    return wire


def _from_wire(wire: Tensor, flat: Tensor, log: Log) -> None:
    if wire.dtype != flat.dtype:
        with phase(log, "cast", flat.nbytes, flat.device):
            flat.copy_(wire)


def _hierarchical(flat: Tensor, comm: GridComm, log: Log) -> None:
    if comm.row is not None:
        with phase(log, "row reduce", flat.nbytes, flat.device):
            dist.reduce(flat, group=comm.row, group_dst=0)
    if comm.column is not None and comm.column_index == 0:
        with phase(log, "column all-reduce", flat.nbytes, flat.device):
            dist.all_reduce(flat, group=comm.column)
    if comm.row is not None:
        with phase(log, "row broadcast", flat.nbytes, flat.device):
            dist.broadcast(flat, group=comm.row, group_src=0)


def _torus(flat: Tensor, comm: GridComm, log: Log) -> None:
    shard = flat if comm.row is None else scatter_sum(flat, comm, comm.row, "row reduce-scatter", log)
    if comm.column is not None and shard.numel():
        with phase(log, "column all-reduce", shard.nbytes, shard.device):
            dist.all_reduce(shard, group=comm.column)
    if comm.row is not None:
        gather_shards(flat, comm.row, "row all-gather", log)


def _check(tensor: Tensor, op: str) -> None:
    check_kind("tensor", tensor, Tensor, "give a torch.Tensor")
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
