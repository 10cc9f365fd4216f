"""`hyperbatch profile`: measures this device, and the links of the process group at hand, into a machine file.

Alone it times training steps at several batches; under torchrun it also fits latency and bandwidth of an all-reduce.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyperbatch.arena import Arena
from hyperbatch.comm import GridComm
from hyperbatch.config import OptimConfig
from hyperbatch.engine.measure import free_bytes, measure_link, probe
from hyperbatch.engine.ranks import Ranks, find_ranks, join
from hyperbatch.models import create_model, smoothed_cross_entropy
from hyperbatch.optim.build import build_optimizer
from hyperbatch.optim.precision import LossScaler, working_dtype
from hyperbatch.plan.machine import Cluster, Device, Link, Measured, Network
from hyperbatch.plan.types import RankGrid
from hyperbatch.sim.clusters import fitted_overhead, format_machine_file


def profile(model: str, *, device: str = "auto", output: Path, rounds: int = 10) -> dict[str, Any]:
    """Writes `output` on rank 0 and returns what was measured, for `simulate --cluster FILE`."""
    ranks = find_ranks() or Ranks()
    with join(ranks, device, timeout_s=300) as place:
        precision = "fp16" if place.type == "cuda" else "fp32"
        batches = (32, 128, 256) if place.type == "cuda" else (2, 8)
        size = 32 if model in ("resnet8", "resnet20", "resnet32", "resnet44", "resnet56") else 224
        points = tuple(
            Measured(
                model=model,
                precision=precision,
                batch_per_device=batch,
                images_per_s_per_device=batch / step_seconds(model, batch, size, precision, place, rounds),
                image_size=size,
            )
            for batch in batches
        )
        latency_s, seconds_per_byte = measure_link(GridComm(RankGrid(1, ranks.world_size)), "flat", place)
        memory = free_bytes(place, ranks)
        bandwidth = copy_bytes_per_s(place)
        peaks = {precision: matmul_flop_per_s(place, working_dtype(precision))}
    hops = max(1, 2 * (ranks.world_size - 1))
    # A ring moves 2 (n - 1) / n of the message through each link, in 2 (n - 1) hops.
    link = Link(
        bandwidth_bytes_per_s=hops / ranks.world_size / seconds_per_byte if seconds_per_byte else 10e9,
        latency_s=latency_s / hops if latency_s else 5e-6,
    )
    measured, assumed = f"measured here, {ranks.world_size} ranks, torch {torch.__version__}", "assumed; edit this"
    links = measured if seconds_per_byte else f"{assumed}, or profile under torchrun"
    cluster = Cluster(
        name=output.stem,
        description=f"profiled on {platform.node()}",
        devices=65536,
        device=Device(
            name=torch.cuda.get_device_name(place) if place.type == "cuda" else f"{os.cpu_count()} CPU cores",
            memory_bytes=float(memory),
            memory_bandwidth_bytes_per_s=bandwidth,
            peak_flop_per_s=peaks,
            layer_overhead_s=fitted_overhead(points),
            power_w=700.0 if place.type == "cuda" else 100.0,
            measured=points,
        ),
        network=Network(
            devices_per_node=ranks.local_size, nics_per_node=ranks.local_size, intra=link, inter=link, call_s=0.0
        ),
        node_power_w=300.0,
        sources={
            "device": measured,
            "device.power": assumed,
            "node": assumed,
            "links.intra": links,
            "links.inter": links,
        },
    )
    if ranks.rank == 0:
        output.write_text(format_machine_file(cluster))
    return {
        "machine_file": str(output),
        "device": cluster.device.name,
        "images_per_s": {str(p.batch_per_device): round(p.images_per_s_per_device, 1) for p in points},
        "memory_gbyte_per_s": bandwidth / 1e9,
        "matmul_tflop_per_s": next(iter(peaks.values())) / 1e12,
        "link_gbyte_per_s": link.bandwidth_bytes_per_s / 1e9,
        "link_latency_us": link.latency_s * 1e6,
        "links": links,
    }


def step_seconds(model: str, batch: int, size: int, precision: str, device: torch.device, rounds: int) -> float:
    """Median time of one training step (forward, backward, LARS) on data that is already there."""
    network: nn.Module = create_model(model).to(device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    order, _ = probe(network, torch.zeros(2, 3, size, size, device=device))
    dtype = working_dtype(precision)
    arena = Arena(network, order, dtype=dtype)
    optimizer = build_optimizer(OptimConfig(precision=precision), network, arena, lr=0.1)
    scaler = LossScaler(precision, optimizer, device=device)
    images = torch.randn(batch, 3, size, size, device=device, dtype=dtype).to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,), device=device)

    def step() -> None:
        arena.zero_grad()
        scaler.scale(smoothed_cross_entropy(network(images), labels, 0.1)).backward()
        optimizer.step()
        scaler.update()

    return _median_seconds(step, device, rounds)


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.empty(1 << (30 if device.type == "cuda" else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _median_seconds(lambda: target.copy_(source), device, 5)


def matmul_flop_per_s(device: torch.device, dtype: torch.dtype) -> float:
    side = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / _median_seconds(lambda: left @ right, device, 5)


def _median_seconds(call: Any, device: torch.device, rounds: int) -> float:
    seconds = []
    for i in range(rounds + 2):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the device's time is what is measured
        if i >= 2:  # the first rounds choose kernels and fill caches
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
