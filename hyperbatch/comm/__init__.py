"""Process groups of a grid, collectives over them, and the runner that hides them behind backward."""

from hyperbatch.comm.collectives import all_gather, all_reduce, reduce_scatter, shard_bounds
from hyperbatch.comm.ddp import ddp_bucket_bytes, ddp_kwargs, param_specs, register_ddp_hook
from hyperbatch.comm.doctor import check_collectives
from hyperbatch.comm.grid import GridComm
from hyperbatch.comm.runner import Handle
from hyperbatch.comm.sync import GradSync

__all__ = [
    "GradSync",
    "GridComm",
    "Handle",
    "all_gather",
    "all_reduce",
    "check_collectives",
    "ddp_bucket_bytes",
    "ddp_kwargs",
    "param_specs",
    "reduce_scatter",
    "register_ddp_hook",
    "shard_bounds",
]
