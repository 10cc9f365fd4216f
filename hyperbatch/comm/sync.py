"""GradSync: a group's all-reduce starts when its last gradient is there, straight from the arena."""

from __future__ import annotations

import torch

from hyperbatch.arena import Arena
from hyperbatch.comm.grid import GridComm
from hyperbatch.plan.types import GroupPlan, GroupTiming


class GradSync:
    """Launches groups in index order on every rank, whatever order their gradients become ready in."""

    def __init__(
        self,
        arena: Arena,
        plan: GroupPlan,
        comm: GridComm,
        *,
        wire_dtype: torch.dtype | None = None,
        algorithm: str = "flat",
        hybrid_switch_bytes: int = 1 << 20,
    ) -> None:
        """Compares the plan's hash over all ranks; a difference is an error on each of them."""
        raise NotImplementedError

    def begin(self, *, last_micro_step: bool = True) -> None:
        """Before each backward. Only the last micro-step of an accumulated step communicates."""
        raise NotImplementedError

    def finish(self) -> None:
        """After the last backward, before the update: gradients in the arena are the mean over ranks."""
        raise NotImplementedError

    def timings(self) -> tuple[GroupTiming, ...]:
        """Groups of the last finished step, times relative to its `begin`."""
        raise NotImplementedError

    def close(self) -> None:
        """Removes the hooks."""
        raise NotImplementedError
