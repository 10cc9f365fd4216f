"""`hyperbatch bench lars`: one optimizer step over a model's tensors, ours against common implementations.

Weights and gradients are random, in the model's shapes; there is no forward and no backward. On a GPU each candidate is
timed as plain calls ("eager": the time that a Python loop sees) and, if it can be captured, as a graph ("graph": the
device's time alone). All candidates of a model run in the same interleaved rounds.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hyperbatch.arena import Arena
from hyperbatch.bench import harness
from hyperbatch.bench.harness import Candidate
from hyperbatch.bench.step_runs import captured
from hyperbatch.errors import InputError
from hyperbatch.optim import LARS
from hyperbatch.plan.inventory import tensors
from hyperbatch.stopwatch import device_s, wall_s

MODELS = ("resnet50", "resnet152", "alexnet_bn", "thousand")
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
HYPER: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-5}


def shapes(model: str) -> list[tuple[str, tuple[int, ...]]]:
    """Returns (kind, shape) of each trainable tensor. `thousand`: 1,000 tensors of 1 to 65,536 elements."""
    if model == "thousand":
        return [("weight", (1 << (i % 17), 1)) if i % 2 else ("norm", (1 << (i % 17),)) for i in range(1000)]
    return [(spec.kind, spec.shape) for spec in tensors(model)]


class Values(nn.ParameterList):
    takes_fp32_parameters = True  # as a model's norm layers do


class Tensors(nn.Module):
    """A model's parameters without the model."""

    def __init__(self, table: list[tuple[str, tuple[int, ...]]], device: torch.device) -> None:
        super().__init__()
        self.kinds = [kind for kind, _ in table]
        self.values = Values(
            nn.Parameter(torch.randn(shape, device=device) * 0.02 + (kind == "norm")) for kind, shape in table
        )

    def groups(self) -> list[dict[str, Any]]:
        weights = [p for p, kind in zip(self.values, self.kinds, strict=True) if kind == "weight"]
        rest = [p for p, kind in zip(self.values, self.kinds, strict=True) if kind != "weight"]
        groups = [{"params": weights}, {"params": rest, "weight_decay": 0.0, "adapt": False}]
        return [group for group in groups if group["params"]]


def bench_lars(
    models: Sequence[str] | None = None,
    precisions: Sequence[str] = ("fp32", "fp16"),
    *,
    device: str = "auto",
    rounds: int = 20,
    peers: bool = True,
) -> dict[str, Any]:
    """Returns rows of milliseconds per step, for each model (default: all on a GPU, ResNet-50 on a CPU) and precision.

    Peers run in fp32, as they usually do.
    """
    target = harness.pick_device(device)
    models = models or (MODELS if target.type == "cuda" else MODELS[:1])
    for name in models:
        if name not in MODELS:
            raise InputError(f"bench lars: unknown model {name!r}; one of {', '.join(MODELS)}")
    table: list[dict[str, Any]] = []
    for model in models:
        candidates = [
            candidate for precision in precisions for candidate in _ours(shapes(model), target, PRECISIONS[precision])
        ]
        if peers:
            candidates += _peers(shapes(model), target)
        table += timed(model, candidates, target, rounds)
    return harness.result("lars", table)


def timed(model: str, candidates: list[Candidate], device: torch.device, rounds: int) -> list[dict[str, Any]]:
    if device.type == "cpu":
        named = _renamed(candidates, model, "eager")
        samples = harness.interleave(named, partial(wall_s, device=device), rounds=rounds, warmup=1)
        return harness.rows(named, samples, unit="ms", scale=1e3, model=model, clock="wall")
    eager = _renamed(candidates, model, "eager")
    samples = harness.interleave(eager, partial(wall_s, device=device, calls=5), rounds=rounds)
    table = harness.rows(eager, samples, unit="ms", scale=1e3, model=model, clock="wall")
    graphs = []
    for candidate in candidates:
        replay = _captured(candidate.run)
        if replay is not None:
            graphs.append(Candidate(name=candidate.name, run=replay, peer=candidate.peer))
    graphs = _renamed(graphs, model, "graph")
    samples = harness.interleave(graphs, partial(device_s, device=device, calls=10), rounds=rounds)
    return table + harness.rows(graphs, samples, unit="ms", scale=1e3, model=model, clock="device")


def _renamed(candidates: list[Candidate], model: str, mode: str) -> list[Candidate]:
    return [Candidate(name=f"{model} / {c.name} / {mode}", run=c.run, peer=c.peer) for c in candidates]


def _captured(run: Callable[[], Any]) -> Callable[[], None] | None:
    """Returns a replay of one call, or None if it cannot be captured because it reads device values on the host."""
    try:
        return captured(run)
    except RuntimeError:
        # The failed capture leaves an error that the next call would report.
        torch.cuda.synchronize()
        return None


def _give_grads(params: list[Tensor]) -> None:
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3


def _ours(table: list[tuple[str, tuple[int, ...]]], device: torch.device, dtype: torch.dtype) -> list[Candidate]:
    name = str(dtype).removeprefix("torch.")
    capturable = device.type == "cuda"

    in_arena = Tensors(table, device)
    arena = Arena(in_arena, [n for n, _ in in_arena.named_parameters()], dtype=dtype)
    for buffer in arena.grads.values():
        buffer.normal_(std=1e-3)
    for slot in arena.slots:
        slot.param.grad = arena.grad_view(slot.name)
    fused = LARS(in_arena.groups(), **HYPER, capturable=capturable, arena=arena)
    candidates = [Candidate(name=f"hyperbatch arena {name}", run=fused.step)]
    if dtype in (torch.float16, torch.bfloat16):
        fused.grad_scale = torch.full((), 1024.0, device=device)

    loose = Tensors(table, device).to(dtype)
    _give_grads(list(loose.parameters()))
    plain = LARS(loose.groups(), **HYPER, capturable=capturable)
    candidates.append(Candidate(name=f"hyperbatch {name}", run=plain.step))
    if dtype == torch.float32 and device.type == "cuda":
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        scaler.scale(torch.ones((), device=device))  # creates the scaler's tensors
        scaled = Tensors(table, device)
        _give_grads(list(scaled.parameters()))
        optimizer = LARS(scaled.groups(), **HYPER, capturable=True)

        def with_scaler() -> None:
            scaler.step(optimizer)
            scaler.update()

        candidates.append(Candidate(name="hyperbatch float32 with GradScaler", run=with_scaler))
    if dtype == torch.float32:
        listed = Tensors(table, device)
        _give_grads(list(listed.parameters()))
        foreach = LARS(listed.groups(), **HYPER, capturable=capturable, foreach=True)
        candidates.append(Candidate(name="hyperbatch float32 foreach=True", run=foreach.step))
    return candidates


def _peers(table: list[tuple[str, tuple[int, ...]]], device: torch.device) -> list[Candidate]:
    def model() -> Tensors:
        made = Tensors(table, device)
        _give_grads(list(made.parameters()))
        return made

    listed = model()
    candidates = [Candidate(name="peer foreach LARS", run=ForeachLars(list(listed.parameters())).step, peer=True)]
    # Not LARS: torch's fused update without norms shows how fast an update can be. It does not count as a peer.
    sgd = torch.optim.SGD(model().parameters(), **HYPER, fused=True)
    candidates.append(Candidate(name="torch fused SGD (no LARS)", run=sgd.step))
    try:
        from timm.optim.lars import Lars  # type: ignore[import-not-found]

        timm_lars = Lars(model().parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5)
        candidates.append(Candidate(name="peer timm Lars", run=timm_lars.step, peer=True))
    except (ImportError, RuntimeError):  # not installed, or not importable with this torch
        pass
    try:
        from pytorch_optimizer import LARS as OtherLars  # type: ignore[import-not-found]

        other = OtherLars(model().parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5)
        candidates.append(Candidate(name="peer pytorch-optimizer LARS", run=other.step, peer=True))
    except ImportError:
        pass
    return candidates


class ForeachLars:
    """The multi-tensor form that people write by hand: no skipped steps, no masters, no loss scaling."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.grads = [param.grad for param in params if param.grad is not None]
        self.buffers = [torch.zeros_like(param) for param in params]

    @torch.no_grad()
    def step(self) -> None:
        lr, momentum, decay = HYPER["lr"], HYPER["momentum"], HYPER["weight_decay"]
        weight_norms = torch.stack(list(torch._foreach_norm(self.params)))
        grad_norms = torch.stack(list(torch._foreach_norm(self.grads)))
        trust = 0.001 * weight_norms / (grad_norms + decay * weight_norms)
        rate = torch.where((weight_norms > 0) & (grad_norms > 0), trust, 1.0) * lr
        update = torch._foreach_add(self.grads, self.params, alpha=decay)
        torch._foreach_mul_(update, list(rate.unbind()))
        torch._foreach_mul_(self.buffers, momentum)
        torch._foreach_add_(self.buffers, update)
        torch._foreach_sub_(self.params, self.buffers)
