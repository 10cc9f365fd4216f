"""A model whose backward is a recording: each gradient is ready when it was in a real run, without any computation.

    backward      sleep . grad 0 . sleep . grad 1 ............ grad 160      hooks and buckets see real autograd

On two cores, eight real backward passes would compete for the cores; sleeping ones leave them to the exchange.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyperbatch.plan.types import TensorSpec

RECORDING = Path(__file__).with_name("resnet50_ready.json")


class ReplayModel(nn.Module):
    """`model().backward()` produces zero gradients for these tensors, at these fractions of `backward_s`."""

    def __init__(self, specs: Sequence[TensorSpec], ready: Sequence[float], backward_s: float = 0.0) -> None:
        """specs, ready: in backward order. Names are unchanged except that dots are replaced."""
        super().__init__()
        self.backward_s = backward_s
        self.start_s = 0.0
        self._ready = list(ready)
        self._root = torch.zeros((), requires_grad=True)
        for spec in reversed(specs):  # definition order is forward order, as DDP expects
            dtype = getattr(torch, spec.dtype)
            self.register_parameter(spec.name.replace(".", "/"), nn.Parameter(torch.zeros(spec.shape, dtype=dtype)))

    def forward(self) -> Tensor:
        x = self._root
        for param, ready in zip(self.parameters(), reversed(self._ready), strict=True):
            x = _Replay.apply(x, param, self, ready)
        return x

    def replay(self, forward: Any = None) -> None:
        """Runs backward in the recorded time. forward: a wrapper of this model, e.g. DDP."""
        loss = (forward or self)()
        self.start_s = time.perf_counter()
        loss.backward()

    def order(self) -> list[str]:
        """Parameters in backward order."""
        return [name for name, _ in self.named_parameters()][::-1]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, param: Tensor, model: ReplayModel, ready: float) -> Tensor:
        ctx.param, ctx.model, ctx.ready = param, model, ready
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        left_s = ctx.model.start_s + ctx.ready * ctx.model.backward_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        return grad, torch.zeros_like(ctx.param), None, None


def recorded_ready() -> dict[str, float]:
    """Maps parameters of ResNet-50 to the fraction of backward at which their gradient is ready, in backward order."""
    return json.loads(RECORDING.read_text())["ready"]
