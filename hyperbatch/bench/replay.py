"""A model whose backward is a recording: each gradient is there when it was in a real run, and nobody computes.

    backward      sleep . grad 0 . sleep . grad 1 ............ grad 160      hooks and buckets see real autograd

Eight ranks on two cores would spend a real backward fighting for the cores; asleep they leave them to the exchange.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyperbatch.arena import Arena, backward_order
from hyperbatch.comm.runner import Mark, mark, seconds_between
from hyperbatch.models import create_model
from hyperbatch.plan.types import TensorSpec

RECORDING = Path(__file__).with_name("resnet50_ready.json")


class ReplayModel(nn.Module):
    """`model().backward()` makes zero gradients for these tensors, at these fractions of `backward_s`."""

    def __init__(self, specs: Sequence[TensorSpec], ready: Sequence[float], backward_s: float = 0.0) -> None:
        """specs, ready: in backward order. Names keep theirs, with dots replaced."""
        super().__init__()
        self.backward_s = backward_s
        self.start_s = 0.0
        self._ready = list(ready)
        self._root = torch.zeros((), requires_grad=True)
        for spec in reversed(specs):  # definition order is forward's, as DDP expects
            dtype = getattr(torch, spec.dtype)
            self.register_parameter(spec.name.replace(".", "/"), nn.Parameter(torch.zeros(spec.shape, dtype=dtype)))

    def forward(self) -> Tensor:
        x = self._root
        for param, ready in zip(self.parameters(), reversed(self._ready), strict=True):
            x = _Replay.apply(x, param, self, ready)
        return x

    def replay(self, forward: Any = None) -> None:
        """Runs backward in the recorded time. forward: what wraps this model, e.g. DDP."""
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


def record_ready(*, device: str = "cuda", batch: int = 256, rounds: int = 5) -> dict[str, Any]:
    """A recording of ResNet-50 in bf16: when each gradient is there, as a fraction of backward; medians of rounds."""
    place = torch.device(device)
    model = create_model("resnet50").to(place).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    order = backward_order(model, lambda: model(torch.zeros(2, 3, 224, 224, device=place)).sum().backward())
    arena = Arena(model, order, dtype=torch.bfloat16 if place.type == "cuda" else torch.float32)
    marks: dict[str, Mark] = {}
    for slot in arena.slots:
        slot.param.register_post_accumulate_grad_hook(lambda _, name=slot.name: marks.update({name: mark(place)}))
    images = torch.randn(batch, 3, 224, 224, device=place, dtype=arena.dtype)
    images = images.to(memory_format=torch.channels_last)
    samples: list[list[float]] = []
    for _ in range(rounds + 3):
        arena.zero_grad()
        loss = model(images).float().sum()
        start = mark(place)
        loss.backward()
        end = mark(place)
        if place.type == "cuda":
            torch.cuda.synchronize(place)  # events can be read once they were reached
        samples.append([seconds_between(start, moment) for moment in (*(marks[name] for name in order), end)])
    *ready_s, backward_s = (statistics.median(column) for column in zip(*samples[3:]))
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU"
    return {
        "model": "resnet50",
        "device": name,
        "torch": torch.__version__,
        "batch": batch,
        "precision": str(arena.dtype).removeprefix("torch."),
        "backward_s": backward_s,
        "ready": {name: round(s / backward_s, 5) for name, s in zip(order, ready_s)},
    }


def recorded_ready() -> dict[str, float]:
    """Parameter of ResNet-50 -> fraction of backward at which its gradient is there; in backward order."""
    return json.loads(RECORDING.read_text())["ready"]
