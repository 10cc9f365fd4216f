"""`hyperbatch bench muon`: one step of Muon over a model's tensors, ours against torch's and timm's.

As in `bench lars`, weights and gradients are random, there is no forward and no backward, and graphs and plain calls
are timed in interleaved rounds. Peers take five iterations with Jordan's polynomial, as we do unless a row says
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hyperbatch.arena import Arena
from hyperbatch.bench import harness
from hyperbatch.bench.harness import Candidate
from hyperbatch.bench.lars import PRECISIONS, Tensors, shapes, timed
from hyperbatch.optim import Muon

HYPER: dict[str, Any] = {"lr": 0.02, "momentum": 0.95}
THREE = {"coefficients": "polar_express", "steps": 3}


def bench_muon(
    models: Sequence[str] | None = None,
    precisions: Sequence[str] = ("fp32", "fp16"),
    *,
    device: str = "auto",
    rounds: int = 20,
    peers: bool = True,
) -> dict[str, Any]:
    """Returns rows of milliseconds per step by model (default: ResNet-50 on a GPU, ResNet-8 on a CPU) and precision."""
    target = harness.pick_device(device)
    table: list[dict[str, Any]] = []
    for model in models or (("resnet50",) if target.type == "cuda" else ("resnet8",)):
        candidates = []
        for precision in precisions:
            candidates += _ours(model, target, PRECISIONS[precision])
        if peers:
            candidates += _peers(model, target)
        table += timed(model, candidates, target, rounds)
    return harness.result("muon", table)


def _ours(model: str, device: torch.device, dtype: torch.dtype) -> list[Candidate]:
    name = str(dtype).removeprefix("torch.")
    candidates = []
    variants: list[tuple[str, dict[str, Any]]] = [("", {}), (", 3 iterations", THREE)]
    if dtype == torch.float32:
        variants.append((", foreach=True", {"foreach": True}))
    for label, options in variants:
        tensors = Tensors(shapes(model), device)
        arena = Arena(tensors, [n for n, _ in tensors.named_parameters()], dtype=dtype)
        for buffer in arena.grads.values():
            buffer.normal_(std=1e-3)
        for slot in arena.slots:
            slot.param.grad = arena.grad_view(slot.name)
        optimizer = Muon(tensors.groups(), **HYPER, capturable=device.type == "cuda", arena=arena, **options)
        candidates.append(Candidate(name=f"hyperbatch Muon arena {name}{label}", run=optimizer.step))
    return candidates


def _peers(model: str, device: torch.device) -> list[Candidate]:
    def params(*, flat: bool) -> list[Tensor]:
        """flat: whether tensors become matrices, the only parameters that torch's Muon takes."""
        made = [torch.randn(shape, device=device) * 0.02 for _, shape in shapes(model)]
        made = [p.flatten(1) if flat and p.ndim > 2 else p for p in made]
        for param in made:
            param.requires_grad_()
            param.grad = torch.randn_like(param) * 1e-3
        return made

    found = [Candidate(name="peer torch.optim.Muon and fused SGD", run=_torchs(params(flat=True)), peer=True)]
    try:
        from timm.optim.muon import Muon as TimmMuon  # type: ignore[import-not-found]
    except (ImportError, RuntimeError):  # not installed, or not importable with this torch
        return found
    theirs = TimmMuon(params(flat=False), **HYPER)
    return [*found, Candidate(name="peer timm Muon", run=theirs.step, peer=True)]


def _torchs(params: list[Tensor]) -> Callable[[], None]:
    muon = torch.optim.Muon([p for p in params if p.ndim == 2], **HYPER, weight_decay=0.0)
    rest = torch.optim.SGD([p for p in params if p.ndim < 2], **HYPER, nesterov=True, fused=True)

    def step() -> None:
        muon.step()
        rest.step()

    return step
