"""Our parts in a plain DistributedDataParallel script."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hyperbatch.comm.grid import GridComm
from hyperbatch.plan.types import GroupPlan


def ddp_kwargs(plan: GroupPlan) -> dict[str, Any]:
    raise NotImplementedError


def register_ddp_hook(
    ddp_model: DistributedDataParallel,
    comm: GridComm,
    *,
    algorithm: str = "torus",
    wire_dtype: torch.dtype | None = None,
) -> None:
    raise NotImplementedError
