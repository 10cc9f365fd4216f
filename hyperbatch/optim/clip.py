"""Gradient clipping: if the norm over all parameters exceeds a limit, gradients are scaled down to it.

gradients (as exchanged, perhaps loss-scaled) --|g| of all layers--> divisor = max(loss scale, |g| / limit) --> update

No gradient is multiplied here. The update divides by the loss scale anyway, and now divides by this divisor instead.
The divisor is on the device, so clipping works in captured steps too. An inf or nan in the gradient still skips the
step.
"""

from __future__ import annotations

from functools import partial

import torch

from hyperbatch.arena import Arena
from hyperbatch.comm.collectives import all_reduce_now
from hyperbatch.comm.sync import GradSync
from hyperbatch.optim.base import LayerwiseOptimizer
from hyperbatch.optim.tensors import norms_of


class GradientClip:
    """Call `measure()` between the exchange and the update of every step. Create it after the loss scaler."""

    def __init__(self, limit: float, arena: Arena, sync: GradSync, optimizer: LayerwiseOptimizer) -> None:
        self._limit, self._arena, self._sync = limit, arena, sync
        scale = optimizer.scale_of_grads()
        wide = torch.promote_types(arena.dtype, torch.float32)
        self._loss_scale = torch.ones((), dtype=wide, device=arena.device) if scale is None else scale
        self._divisor = self._loss_scale.clone()
        optimizer.grad_scale = self._divisor

    @torch.no_grad()
    def measure(self) -> None:
        """Sets the divisor from the norm of the exchanged gradients in the arena. Every rank must call it."""
        sync, grads = self._sync, self._arena.grads
        if not sync.sharded:
            norm = torch.linalg.vector_norm(norms_of(list(grads.values())))
        else:
            mine = []  # this rank's part of each group
            for index, group in enumerate(sync.plan.groups):
                mine.append(grads[self._arena.slot(group.parameters[0]).dtype][slice(*sync.shard(index))])
            total = norms_of(mine).square().sum(0, keepdim=True)
            sync.comm.submit(partial(all_reduce_now, total, sync.comm, "flat", "sum"), total.device).wait()
            norm = total[0].sqrt()
        torch.maximum(self._loss_scale, (norm / self._limit).to(self._loss_scale.dtype), out=self._divisor)
