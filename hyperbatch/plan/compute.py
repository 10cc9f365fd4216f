"""Predicts the time of each layer on a device from a roofline model, scaled by a measured single-node speed.

The roofline gives the relative times of layers (a convolution is limited by arithmetic or bytes, a norm by bytes). One
measured training speed gives the ratio of the device's real speed to the roofline. A fixed time per layer accounts for
the lower efficiency of small batches. A model that `hyperbatch profile` has measured on the device needs none of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

from hyperbatch.plan.cost import all_reduce_cost
from hyperbatch.plan.inventory import LayerSpec, layers, tensors
from hyperbatch.plan.machine import Cluster, Device, Measured, Profile
from hyperbatch.plan.types import RankGrid
from hyperbatch.vocabulary import DTYPE_BYTES, PRECISION_DTYPE

PASSES = 3  # forward, gradient of the input, gradient of the weights
UPDATE_BYTES_PER_PARAMETER = 28  # LARS in fp32: reads w and g for the norms; reads w, g and m and writes w and m
MEMORY_EFFICIENCY = 0.9  # fraction of the data-sheet bandwidth a streaming kernel reaches (4.3 of 4.8 TB/s on an H200)
LEAST_STRETCH = 0.5  # a measured speed may exceed this roofline (fused kernels move fewer bytes), but at most twofold
DEFAULT_STRETCH = 2.0  # assumed ratio of measured to roofline time for a device without a measured speed


@dataclass(frozen=True, slots=True)
class LayerTime:
    """One layer of one step on one device; `parameters` get their gradients when its backward ends."""

    name: str
    forward_s: float
    backward_s: float
    parameters: tuple[str, ...]


def layer_times(
    cluster: Cluster,
    model: str,
    batch_per_rank: int,
    precision: str,
    *,
    classes: int = 1000,
    image_size: int = 224,
    in_channels: int = 3,
) -> list[LayerTime]:
    """The time of each layer in forward order, on a typical device (not the slowest of many)."""
    table = layers(model, classes=classes, image_size=image_size, in_channels=in_channels)
    known = (model, precision, image_size)
    profiles = [p for p in cluster.device.profiles if (p.model, p.precision, p.image_size) == known]
    if profiles:
        return profiled_times(profiles, table, batch_per_rank)
    k = stretch(cluster, precision)
    overhead = cluster.device.layer_overhead_s
    times = []
    for index, layer in enumerate(table):
        forward, backward = _roofline(cluster.device, layer, batch_per_rank, precision)
        if index == 0:
            backward /= 2  # the gradient of the images is not needed
        times.append(
            LayerTime(
                layer.name,
                k * forward + overhead,
                k * backward + (PASSES - 1) * overhead,
                tuple(spec.name for spec in layer.tensors),
            )
        )
    return times


def profiled_times(profiles: Sequence[Profile], table: Sequence[LayerSpec], batch_per_rank: int) -> list[LayerTime]:
    """The measured time of each layer, interpolated between the measured batches."""
    batches = sorted(profiles, key=lambda profile: profile.batch_per_device)
    parameters = {layer.name: tuple(spec.name for spec in layer.tensors) for layer in table}

    def at(seconds: Sequence[float]) -> float:
        points = [(p.batch_per_device, s) for p, s in zip(batches, seconds, strict=True)]
        return seconds_at(points, batch_per_rank)

    return [
        LayerTime(name, at([p.forward_s[i] for p in batches]), at([p.backward_s[i] for p in batches]), parameters[name])
        for i, name in enumerate(batches[0].layers)
    ]


def seconds_at(points: Sequence[tuple[int, float]], batch: float) -> float:
    """Interpolates linearly between times at other batches, which are given in ascending order.

    Beyond the largest batch the time is proportional to the batch. Below the smallest, the first line is extended, but
    the time per image never falls below that of the smallest batch.
    """
    first, last = points[0], points[-1]
    if batch >= last[0]:
        return last[1] * batch / last[0]
    for (x0, y0), (x1, y1) in pairwise(points):
        if batch <= x1:
            line = y0 + (y1 - y0) * (batch - x0) / (x1 - x0)
            return line if batch >= x0 else max(line, first[1] * batch / first[0])
    return first[1] * batch / first[0]


def update_time(device: Device, parameters: int, shards: int = 1) -> float:
    """The time of the optimizer step for this many parameters, or for one rank's shard of them."""
    return parameters / shards * UPDATE_BYTES_PER_PARAMETER / (device.memory_bandwidth_bytes_per_s * MEMORY_EFFICIENCY)


def slowest_of(ranks: int, jitter: float) -> float:
    """Expected compute time of the slowest rank, relative to a typical rank. The step waits for the slowest one."""
    if ranks <= 1 or jitter == 0:
        return 1.0
    return 1.0 + jitter * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))  # Blom's expected maximum


def slowest_quantile(ranks: int, jitter: float, probability: float) -> float:
    """The slowest rank's relative compute time that a step does not exceed with the given probability."""
    if jitter == 0:
        return 1.0
    return 1.0 + jitter * NormalDist().inv_cdf(probability ** (1 / ranks))


def stretch(cluster: Cluster, precision: str) -> float:
    """The ratio of measured to roofline compute time, from the machine's measured points of this precision."""
    device = cluster.device
    points = [point for point in device.measured if point.precision == precision] or list(device.measured)
    if not points:
        return DEFAULT_STRETCH
    return max(LEAST_STRETCH, sum(_stretch_of(cluster, point) for point in points) / len(points))


def _stretch_of(cluster: Cluster, point: Measured) -> float:
    """The ratio for one measured speed, without the all-reduce, update and jitter that it includes."""
    device = cluster.device
    shape = {"classes": point.classes, "image_size": point.image_size}
    table = layers(point.model, **shape)
    specs = tensors(point.model, **shape, dtype=PRECISION_DTYPE[point.precision])
    nbytes = sum(spec.nbytes for spec in specs)
    exchange = 0.0
    if not point.overlapped:
        exchange = all_reduce_cost(cluster.network, RankGrid(1, point.devices), "flat", nbytes).seconds(nbytes)
    step = point.batch_per_device / point.images_per_s_per_device
    busy = step - exchange - update_time(device, sum(spec.numel for spec in specs))
    compute = busy / slowest_of(point.devices, cluster.jitter) - PASSES * len(table) * device.layer_overhead_s
    return compute / _roofline_step(device, table, point.batch_per_device, point.precision)


def _roofline_step(device: Device, table: Sequence[LayerSpec], batch: int, precision: str) -> float:
    total = 0.0
    for index, layer in enumerate(table):
        forward, backward = _roofline(device, layer, batch, precision)
        total += forward + (backward / 2 if index == 0 else backward)
    return total


def _roofline(device: Device, layer: LayerSpec, batch: int, precision: str) -> tuple[float, float]:
    """The shortest possible times of a layer's forward and backward: arithmetic or bytes, whichever takes longer."""
    item = DTYPE_BYTES[PRECISION_DTYPE[precision]]
    bandwidth = device.memory_bandwidth_bytes_per_s * MEMORY_EFFICIENCY
    if layer.kind in ("conv", "linear", "attention"):
        weights = sum(spec.numel for spec in layer.tensors)
        one_pass = max(
            2 * layer.macs * batch / peak_flops(device, precision),
            ((layer.inputs + layer.activations) * batch + weights) * item / bandwidth,
        )
        return one_pass, 2 * one_pass
    # A norm reads its input once for the statistics and once to apply them, and writes; its backward reads input and
    # gradient twice and writes. A pool reads and writes.
    reads_writes = (3, 5) if layer.kind == "norm" else (2, 3)
    moved = (layer.inputs + layer.activations) / 2 * batch * item / bandwidth
    return reads_writes[0] * moved, reads_writes[1] * moved


def peak_flops(device: Device, precision: str) -> float:
    """The device's peak in this precision, or its fp32 peak if the precision is not listed."""
    return device.peak_flop_per_s.get(precision) or device.peak_flop_per_s["fp32"]
