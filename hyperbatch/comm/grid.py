"""The process groups of a rank grid."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hyperbatch.plan.types import RankGrid


class GridComm:
    """This rank's row group, column group and the world, made once.

    Without an initialised process group only a 1x1 grid is accepted, and every collective is the identity.
    """

    grid: RankGrid
    rank: int
    world: dist.ProcessGroup | None
    row: dist.ProcessGroup | None  # the ranks of my node
    column: dist.ProcessGroup | None  # one rank of each node: my place in theirs

    def __init__(self, grid: RankGrid | DeviceMesh) -> None:
        raise NotImplementedError
