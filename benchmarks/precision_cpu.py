"""fp32 against bf16 on this CPU: images of a forward and backward pass per second of one thread's processor time.

Both precisions alternate, because other programs may slow the machine down. The tool prints medians.

    python -m benchmarks.precision_cpu > benchmarks/precision_cpu.txt
"""

from __future__ import annotations

import platform
import statistics
import time

import torch
from torch import nn

from hyperbatch import create_model
from hyperbatch.engine.agent import cpu_has_bf16
from hyperbatch.models.layers import to_channels_last
from hyperbatch.models.loss import smoothed_cross_entropy
from hyperbatch.record.checkout import commit

MODELS = (("resnet8", 8, 64), ("resnet20", 32, 64), ("resnet20x4", 32, 32), ("vit_cifar", 32, 32), ("resnet50", 96, 8))
ROUNDS, SECONDS = 5, 2.0


def images_per_s(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    begun, passes = time.process_time(), 0
    while (took := time.process_time() - begun) < SECONDS:
        smoothed_cross_entropy(model(images), labels, 0.1).backward()
        passes += 1
    return passes * len(labels) / took


def main() -> None:
    torch.set_num_threads(1)
    print(
        f"{platform.machine()}, instructions for bf16: {cpu_has_bf16()}, torch {torch.__version__}, commit {commit()}"
    )
    print(f"images per second of one thread, median of {ROUNDS} rounds in turn (lowest to highest)")
    for name, pixels, batch in MODELS:
        speeds: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
        labels = torch.arange(batch) % 10
        for _ in range(ROUNDS):
            for dtype, found in speeds.items():
                model = to_channels_last(create_model(name, classes=10).to(dtype))
                images = torch.randn(batch, 3, pixels, pixels).to(dtype, memory_format=torch.channels_last)
                model(images)  # so that oneDNN creates its kernels
                found.append(images_per_s(model, images, labels))
        fp32, bf16 = (statistics.median(found) for found in speeds.values())
        ranges = ", ".join(f"{min(found):,.0f} to {max(found):,.0f}" for found in speeds.values())
        print(f"{name:<12}{pixels} px  fp32 {fp32:,.0f}  bf16 {bf16:,.0f}  {bf16 / fp32:.2f}x  ({ranges})", flush=True)


if __name__ == "__main__":
    main()
