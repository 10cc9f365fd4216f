"""Process groups of a grid, collectives over them, and the runner that overlaps them with backward.

The word group has two meanings here. As an argument, `group` is a torch process group, as in torch.distributed. In a
`GroupPlan` and in `GradSync`, a group is a gradient group: parameters whose gradients are sent in one message.
"""

from hyperbatch.comm.collectives import all_gather, all_reduce, reduce_scatter
from hyperbatch.comm.ddp import GridHookState, ddp_bucket_bytes, ddp_kwargs, grid_hook, register_ddp_hook
from hyperbatch.comm.doctor import check_collectives
from hyperbatch.comm.grid import GridComm
from hyperbatch.comm.heartbeat import Heartbeat
from hyperbatch.comm.runner import ExchangeHandle
from hyperbatch.comm.shards import own_shard, shard_bounds
from hyperbatch.comm.sync import GradSync, PhaseTiming
from hyperbatch.comm.weights import broadcast_weights
from hyperbatch.plan.types import param_specs

__all__ = [
    "ExchangeHandle",
    "GradSync",
    "GridComm",
    "GridHookState",
    "Heartbeat",
    "PhaseTiming",
    "all_gather",
    "all_reduce",
    "broadcast_weights",
    "check_collectives",
    "ddp_bucket_bytes",
    "ddp_kwargs",
    "grid_hook",
    "own_shard",
    "param_specs",
    "reduce_scatter",
    "register_ddp_hook",
    "shard_bounds",
]
