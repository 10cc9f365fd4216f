"""`hyperbatch bench step`: our training step against plain torch's, on synthetic data already on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hyperbatch.arena import Arena
from hyperbatch.bench.harness import Candidate, device_s, interleave, result, rows
from hyperbatch.config import OptimConfig
from hyperbatch.engine.measure import probe
from hyperbatch.models import create_model, smoothed_cross_entropy
from hyperbatch.optim.build import build_optimizer
from hyperbatch.optim.precision import LossScaler, working_dtype


def bench_step(model: str | None = None, *, batch: int | None = None, rounds: int = 10) -> dict[str, Any]:
    """Images per second of a whole step: forward, backward, update. ResNet-50 fp16 on a GPU, ResNet-20 on a CPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    model = model or ("resnet50" if on_gpu else "resnet20")
    batch = batch or (256 if on_gpu else 32)
    size, precision = (224, "fp16") if on_gpu else (32, "fp32")
    torch.backends.cudnn.benchmark = True
    images = torch.randn(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,), device=device)
    candidates = [
        Candidate(name=f"hyperbatch {precision}, LARS", run=our_step(model, images, labels, precision)),
        Candidate(name=f"torch eager {precision}, SGD", run=torch_step(model, images, labels, precision), peer=True),
    ]
    samples = interleave(candidates, device_s, rounds=rounds)
    speeds = {name: [batch / seconds for seconds in values] for name, values in samples.items()}
    table = rows(candidates, speeds, unit="images/s", higher_is_better=True, model=model, batch=batch)
    return result("step", table)


def our_step(model: str, images: torch.Tensor, labels: torch.Tensor, precision: str) -> Callable[[], None]:
    network, dtype = _network(model, images.device), working_dtype(precision)
    order, _ = probe(network, images[:2])
    arena = Arena(network, order, dtype=dtype)
    optimizer = build_optimizer(OptimConfig(precision=precision), network, arena, lr=0.1)
    scaler = LossScaler(precision, optimizer, device=images.device)
    images = images.to(dtype)

    def step() -> None:
        arena.zero_grad()
        scaler.scale(smoothed_cross_entropy(network(images), labels, 0.1)).backward()
        optimizer.step()
        scaler.update()

    return step


def torch_step(model: str, images: torch.Tensor, labels: torch.Tensor, precision: str) -> Callable[[], None]:
    """What a plain script does: autocast, GradScaler, torch's own SGD."""
    network, half = _network(model, images.device), precision == "fp16"
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5, fused=True)
    scaler = torch.amp.GradScaler(images.device.type, enabled=half)  # pyright: ignore[reportPrivateImportUsage]

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(images.device.type, dtype=torch.float16 if half else torch.bfloat16, enabled=half):
            loss = functional.cross_entropy(network(images), labels, label_smoothing=0.1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def _network(model: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return create_model(model).to(device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
