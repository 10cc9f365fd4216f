"""Process groups of a grid, collectives over them, and the runner that hides them behind backward."""

from hyperbatch.comm.collectives import all_gather, all_reduce, reduce_scatter
from hyperbatch.comm.ddp import ddp_kwargs, register_ddp_hook
from hyperbatch.comm.grid import GridComm
from hyperbatch.comm.sync import GradSync

__all__ = ["GradSync", "GridComm", "all_gather", "all_reduce", "ddp_kwargs", "reduce_scatter", "register_ddp_hook"]
