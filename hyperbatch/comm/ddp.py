"""Adds planned gradient groups and our all-reduce to a plain DistributedDataParallel script.

plan = plan_groups(model, "cubic")
ddp = DistributedDataParallel(model, **ddp_kwargs(plan))            # DDP's buckets follow the plan
register_ddp_hook(ddp, GridComm(RankGrid(nodes, 8)), algorithm="torus", wire_dtype=torch.bfloat16)
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hyperbatch.comm.agree import check_agreement
from hyperbatch.comm.collectives import (
    HYBRID_SWITCH_BYTES,
    all_reduce_now,
    check_comm,
    message_bytes,
    resolve_algorithm,
)
from hyperbatch.comm.grid import GridComm
from hyperbatch.errors import InputError, check_kind, shown
from hyperbatch.plan.types import GroupPlan

MIB = 1 << 20


def ddp_kwargs(plan: GroupPlan) -> dict[str, Any]:
    """Returns arguments of DistributedDataParallel that make its buckets follow the plan.

    torch >= 2.13: one cap per bucket (`bucket_cap_mb_list`). A bucket closes once it holds its cap. With one dtype it
    therefore ends exactly where the group does, once DDP has rebuilt its buckets in backward order (second step); with
    several dtypes DDP starts the list again for each. Older versions get one `bucket_cap_mb` of the mean group size:
    the number of buckets is about right, and their sizes are equal. `ddp_bucket_bytes` returns the actual buckets.
    """
    check_kind("plan", plan, GroupPlan, "give the GroupPlan of plan_groups")
    if "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel.__init__).parameters:
        return {"bucket_cap_mb_list": [group.bytes / MIB for group in plan.groups]}
    return {"bucket_cap_mb": plan.bytes / len(plan.groups) / MIB}


def ddp_bucket_bytes(ddp_model: DistributedDataParallel) -> tuple[int, ...]:
    """Returns the sizes of the buckets that DDP uses now, in launch order; from its second step on, those of the
    rebuilt buckets."""
    _check_ddp(ddp_model)
    data = ddp_model._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes", "")
    return tuple(int(size) for size in str(sizes).split(", ") if size)


class GridHookState:
    """The state of `grid_hook`, for `ddp_model.register_comm_hook(GridHookState(comm), grid_hook)`."""

    def __init__(
        self,
        comm: GridComm,
        *,
        algorithm: str = "torus",
        wire_dtype: torch.dtype | None = None,
        hybrid_switch_bytes: int = HYBRID_SWITCH_BYTES,
    ) -> None:
        # Wrong arguments are reported here and not in the first backward.
        check_comm(comm)
        resolve_algorithm(algorithm, message_bytes(0, torch.float32, wire_dtype), hybrid_switch_bytes)
        self.comm, self.algorithm, self.wire_dtype = comm, algorithm, wire_dtype
        self.hybrid_switch_bytes = hybrid_switch_bytes


def grid_hook(state, bucket):  # no annotations: DDP compares them by identity, and ours would be strings
    """A communication hook for DistributedDataParallel. Returns a future of the bucket's mean over all ranks."""
    buffer = bucket.buffer()
    future: torch.futures.Future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    wire_bytes = message_bytes(buffer.numel(), buffer.dtype, state.wire_dtype)
    chosen = resolve_algorithm(state.algorithm, wire_bytes, state.hybrid_switch_bytes)

    def exchange() -> None:
        all_reduce_now(buffer, state.comm, chosen, "mean", state.wire_dtype)

    def then(error: BaseException | None) -> None:
        if error is None:
            future.set_result(buffer)
        else:
            future.set_exception(error)

    state.comm.submit(exchange, buffer.device, then)
    return future


def register_ddp_hook(
    ddp_model: DistributedDataParallel,
    comm: GridComm,
    *,
    algorithm: str = "torus",
    wire_dtype: torch.dtype | None = None,
    hybrid_switch_bytes: int = HYBRID_SWITCH_BYTES,
) -> None:
    """Makes DDP send its buckets with our all-reduce, in the precision `wire_dtype`. Gradients remain the mean over
    ranks.

    Every rank must call it at the same point. The ranks compare their arguments; a difference is an error on all ranks.
    """
    _check_ddp(ddp_model)
    check_comm(comm)
    options = {"algorithm": algorithm, "wire_dtype": wire_dtype, "hybrid_switch_bytes": hybrid_switch_bytes}
    state = problem = None
    try:
        state = GridHookState(comm, **options)
        theirs = dist.get_process_group_ranks(ddp_model.process_group)
        if theirs != comm.members:
            raise InputError(
                f"this DDP model averages over ranks {theirs}, and the grid holds {comm.members}; "
                "give both the same ranks (DistributedDataParallel has process_group=)"
            )
    except InputError as error:
        problem = str(error)
    comm.drain()  # another hook may share the groups
    check_agreement(comm.world, "the DDP hook", [f"{name} {value}" for name, value in options.items()], problem)
    ddp_model.register_comm_hook(state, grid_hook)


def _check_ddp(model: Any) -> None:
    if not hasattr(model, "register_comm_hook"):  # not isinstance: torch.compile wraps it in a module of its own
        raise InputError(f"ddp_model is {shown(model)}; give a DistributedDataParallel")
