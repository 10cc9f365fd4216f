"""`hyperbatch profile`: measures this device and the links of the current process group, and writes a machine file.

    step at each batch   | forward: a mark after every layer | backward: a mark at every gradient | update |
    under torchrun       all-reduces inside a host and between hosts (engine/network.py)

The planner uses the measured times of layers: for this model on this device, they replace its own estimate of when
gradients are ready.
"""

from __future__ import annotations

import itertools
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hyperbatch.arena import Arena
from hyperbatch.config import OptimConfig
from hyperbatch.engine.measure import free_bytes, probe
from hyperbatch.engine.network import measure_network
from hyperbatch.engine.ranks import Ranks, find_ranks, host_grid, join
from hyperbatch.errors import InputError
from hyperbatch.models import create_model, smoothed_cross_entropy
from hyperbatch.models.layers import to_channels_last
from hyperbatch.optim.build import build_optimizer
from hyperbatch.optim.precision import LossScaler, working_dtype
from hyperbatch.plan.clusters import fitted_overhead, format_machine_file
from hyperbatch.plan.inventory import ask_for, layers, usual_data
from hyperbatch.plan.machine import Cluster, Device, Measured, Profile
from hyperbatch.stopwatch import Mark, copy_bytes_per_s, gradient_marks, mark, seconds_between, wait, wall_s
from hyperbatch.tables import text_table

BATCHES = {"cuda": (32, 128, 256), "cpu": (2, 8)}
CEILING_ROUNDS = 7  # the fastest of them counts, because the device's peak is to be found
LEAST_S = 1.0  # of measured steps on a CPU: the median of a few short steps depends on what else its cores do


class LayerRow(NamedTuple):
    """One layer of the step at the largest batch."""

    layer: str
    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProfile:
    """The main results, for people and scripts. The machine file contains all measurements."""

    machine_file: str
    device: str
    images_per_s: dict[str, float]  # by batch size
    layers: tuple[LayerRow, ...]
    memory_gbyte_per_s: float
    matmul_tflop_per_s: float
    inside_host_gbyte_per_s: float
    inside_host_latency_us: float
    between_hosts_gbyte_per_s: float
    between_hosts_latency_us: float
    links: dict[str, str]  # where the numbers of each kind of link come from

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "layers": [row._asdict() for row in self.layers]}


def profile(
    model: str,
    *,
    device: str = "auto",
    output: Path,
    batches: Sequence[int] | None = None,
    image_size: int | None = None,
    rounds: int | None = None,
) -> DeviceProfile:
    """Measures this device and its links. Rank 0 writes the machine file `output`, for `simulate --cluster FILE` and
    `plan`. Returns the main results."""
    usual_size, classes = usual_data(model)
    size = image_size or usual_size
    ask_for(model)
    layers(model, classes=classes, image_size=size)  # raises for an unknown model before anything starts
    if not output.parent.is_dir() or output.is_dir():
        raise InputError(f"--output {output}: use a file in an existing folder")
    if not os.access(output if output.exists() else output.parent, os.W_OK):
        raise InputError(f"--output {output} cannot be written; give another file")
    if batches is not None and (not batches or min(batches) < 1):
        raise InputError(f"batches {list(batches)}: must be positive numbers, e.g. 32,128")
    ranks = find_ranks() or Ranks()
    with join(ranks, device, timeout_s=300) as place:
        grid = host_grid(ranks)
        hosts = grid.rows
        if grid.columns != ranks.local_size:
            raise InputError(
                "profile: the hosts have different numbers of ranks, which a machine file cannot describe; start "
                "the same number on each host"
            )
        precision = "fp16" if place.type == "cuda" else "fp32"
        found = [
            step_profile(
                model,
                batch,
                image_size=size,
                classes=classes,
                precision=precision,
                device=place,
                rounds=rounds or (10 if place.type == "cuda" else 3),
                least_s=LEAST_S if place.type == "cpu" and not rounds else 0.0,
            )
            for batch in sorted(set(batches or BATCHES[place.type]))
        ]
        network = measure_network(grid, place)
        memory = free_bytes(place, ranks)
        bandwidth = copy_bytes_per_s(place)
        peaks = {precision: matmul_flop_per_s(place, working_dtype(precision))}
        if precision != "fp32":
            peaks["fp32"] = matmul_flop_per_s(place, torch.float32)
    points = tuple(point for point, _ in found)
    here, assumed = f"measured here, torch {torch.__version__}", "assumed; edit this"
    sources = {"device": here, "device.power": assumed, "node.power": assumed}
    sources["links.intra"] = here if ranks.local_size > 1 else f"{assumed}, or profile under torchrun"
    sources["links.inter"] = here if hosts > 1 else f"{assumed}, or profile under torchrun on several hosts"
    cluster = Cluster(
        name=output.stem,
        description=f"profiled on {platform.node()}, hosts: {hosts}, ranks on each: {ranks.local_size}",
        devices=65536,
        device=Device(
            name=torch.cuda.get_device_name(place) if place.type == "cuda" else f"{os.cpu_count()} CPU cores",
            memory_bytes=float(memory),
            memory_bandwidth_bytes_per_s=bandwidth,
            peak_flop_per_s=peaks,
            layer_overhead_s=fitted_overhead(points),
            power_w=700.0 if place.type == "cuda" else 100.0,
            measured=points,
            profiles=tuple(steps for _, steps in found),
        ),
        network=network,
        node_power_w=300.0 + ranks.local_size * (700.0 if place.type == "cuda" else 0.0),
        sources=sources,
    )
    if ranks.rank == 0:
        output.write_text(format_machine_file(cluster))
    largest = found[-1][1]
    return DeviceProfile(
        machine_file=str(output),
        device=cluster.device.name,
        images_per_s={str(p.batch_per_device): round(p.images_per_s_per_device, 1) for p in points},
        layers=tuple(map(LayerRow, largest.layers, largest.forward_s, largest.backward_s)),
        memory_gbyte_per_s=bandwidth / 1e9,
        matmul_tflop_per_s=peaks[precision] / 1e12,
        inside_host_gbyte_per_s=network.intra.bytes_per_s / 1e9,
        inside_host_latency_us=network.intra.latency_s * 1e6,
        between_hosts_gbyte_per_s=network.inter.bytes_per_s / 1e9,
        between_hosts_latency_us=network.inter.latency_s * 1e6,
        links={name: sources[f"links.{name}"] for name in ("intra", "inter")},
    )


def format_profile(measured: DeviceProfile) -> str:
    """Returns the result of `profile` as text."""
    slowest = sorted(measured.layers, key=lambda row: -(row.forward_s + row.backward_s))[:8]
    layers = [(row.layer, f"{row.forward_s * 1e3:.3f}", f"{row.backward_s * 1e3:.3f}") for row in slowest]
    speeds = [(batch, f"{speed:,.1f}") for batch, speed in measured.images_per_s.items()]
    links = [
        (
            place.replace("_", " "),
            measured.links[link],
            f"{getattr(measured, f'{place}_gbyte_per_s'):.2f}",
            f"{getattr(measured, f'{place}_latency_us'):.1f}",
        )
        for place, link in (("inside_host", "intra"), ("between_hosts", "inter"))
    ]
    file = measured.machine_file
    return "\n".join(
        [
            f"{measured.device}: memory {measured.memory_gbyte_per_s:,.1f} GB/s, "
            f"matrix products {measured.matmul_tflop_per_s:,.2f} TFLOP/s",
            "",
            *text_table(("images per step", "images/s"), speeds, left=0),
            "",
            *text_table(("slowest layers", "forward ms", "backward ms"), layers),
            "",
            *text_table(("link", "source", "GB/s", "latency us"), links, left=2),
            "",
            f"machine file: {file} (`hyperbatch simulate RECIPE --cluster {file} --gpus N` uses it)",
        ]
    )


def step_profile(
    model: str,
    batch: int,
    *,
    image_size: int,
    classes: int,
    precision: str,
    device: torch.device,
    rounds: int,
    least_s: float = 0.0,
) -> tuple[Measured, Profile]:
    """Measures a training step (forward, backward, LARS) on data that is already on the device: as a whole and layer by
    layer.

    rounds: the least number of steps that are measured. least_s: the least time that they take together.
    """
    network = to_channels_last(create_model(model, classes=classes).to(device))
    order, _ = probe(network, torch.zeros(2, 3, image_size, image_size, device=device))
    dtype = working_dtype(precision)
    arena = Arena(network, order, dtype=dtype)
    optimizer = build_optimizer(OptimConfig(precision=precision), network, arena, lr=0.1)
    scaler = LossScaler(precision, optimizer, device=device)
    images = torch.randn(batch, 3, image_size, image_size, device=device, dtype=dtype)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(classes, (batch,), device=device)
    marks: dict[str, Mark] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda *_: marks.update({name: mark(device)})

    table = [layer for layer in layers(model, classes=classes, image_size=image_size) if layer.tensors]
    modules = dict(network.named_modules())
    for layer in table:
        # A module that contains others ends when the last of them ends, which says nothing about its own parameters.
        holds = not layer.name or any(other.name.startswith(f"{layer.name}.") for other in table)
        if layer.macs or not holds:
            modules[layer.name].register_forward_hook(note(f"forward {layer.name}"))

    def step() -> None:
        arena.zero_grad()
        marks["start"] = mark(device)
        loss = scaler.scale(smoothed_cross_entropy(network(images), labels, 0.1))
        marks["backward"] = mark(device)
        loss.backward()
        optimizer.step()
        scaler.update()
        marks["end"] = mark(device)

    whole, forward, backward = [], [], []
    ready = [[spec.name for spec in layer.tensors] for layer in reversed(table)]
    with gradient_marks({slot.name: slot.param for slot in arena.slots}, device) as gradients:
        for i in itertools.count():
            step()
            wait(device)  # synchronises: events can be read once the device has reached them
            if i >= 2:  # the first rounds choose kernels and fill caches
                whole.append(seconds_between(marks["start"], marks["end"]))
                forward.append(_between(marks["start"], marks, [[f"forward {layer.name}"] for layer in table]))
                backward.append(_between(marks["backward"], gradients, ready)[::-1])
                if len(whole) >= rounds and sum(whole) >= least_s:
                    break
    run = {
        "model": model,
        "precision": precision,
        "batch_per_device": batch,
        "image_size": image_size,
        "classes": classes,
    }
    point = Measured(**run, images_per_s_per_device=batch / statistics.median(whole))
    steps = Profile(
        **run,
        layers=tuple(layer.name for layer in table),
        forward_s=tuple(statistics.median(column) for column in zip(*forward, strict=True)),
        backward_s=tuple(statistics.median(column) for column in zip(*backward, strict=True)),
    )
    return point, steps


def _between(start: Mark, marks: dict[str, Mark], stops: list[list[str]]) -> list[float]:
    """Returns the seconds of each layer: from the last mark of the layer before it to its own last mark. A layer that
    finished before its turn, or that has no marks, takes no time."""
    clock, seconds = 0.0, []
    for names in stops:
        moment = max((seconds_between(start, marks[name]) for name in names if name in marks), default=clock)
        seconds.append(max(0.0, moment - clock))
        clock = max(clock, moment)
    return seconds


def matmul_flop_per_s(device: torch.device, dtype: torch.dtype) -> float:
    side = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / min(wall_s(lambda: left @ right, device=device) for _ in range(CEILING_ROUNDS))
