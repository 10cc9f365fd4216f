"""Published runs as data: the figure, the hardware, and how gradients were exchanged. The validation predicts them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

IMAGENET = 1_281_167


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One published figure.

    kind: "rate" (images/s per device while training), "run" (the same over the whole run, including evaluations) or
    "scaling" (the rate divided by that of `base` devices at the same batch per device).
    """

    name: str
    cluster: str
    devices: int
    batch_per_device: int
    kind: str
    published: float
    source: str
    base: int = 1
    model: str = "resnet50"
    precision: str = "fp16"
    epochs: float = 90
    comm: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TimedRun:
    """A whole run to MLPerf's target of which only the time is published."""

    devices: int
    global_batch: int  # assumed
    seconds: float


def run_rate(epochs: float, seconds: float, devices: int) -> float:
    """Images per second and device of a run of this many epochs of ImageNet."""
    return epochs * IMAGENET / seconds / devices


# Each system's exchange of gradients is from its paper or public source. If these do not describe it, it has overlapped
# groups and `simulate`'s own grid, hosts x devices per host (Sony's grids are not available).
_ONE = {"algorithm": "flat", "grouping": "single"}
_OVERLAPPED = {"algorithm": "flat", "grouping": "threshold", "group_threshold_bytes": 16 << 20}
_TENCENT = {"algorithm": "hybrid", "grouping": "threshold", "group_threshold_bytes": 16 << 20}
_FUJITSU = {"algorithm": "torus", "grouping": "cubic", "wire_dtype": "fp16"}
_SONY = {"algorithm": "torus", "grouping": "cubic"}

ROWS = (
    Row(
        name="Facebook, 256 P100",
        cluster="facebook_p100",
        devices=256,
        batch_per_device=32,
        precision="fp32",
        kind="scaling",
        base=8,
        published=0.90,
        source="Goyal et al. 2017: about 90 %",
        comm=_OVERLAPPED,
    ),
    Row(
        name="PFN, 1,024 P100",
        cluster="pfn_p100",
        devices=1024,
        batch_per_device=32,
        precision="fp32",
        kind="scaling",
        published=0.80,
        source="Akiba et al. 2017: about 80 %",
        comm={**_ONE, "wire_dtype": "fp16"},
    ),
    Row(
        name="Facebook, 256 P100: 65 min",
        cluster="facebook_p100",
        devices=256,
        batch_per_device=32,
        precision="fp32",
        kind="run",
        published=run_rate(90, 65 * 60, 256),
        source="Goyal et al. 2017",
        comm=_OVERLAPPED,
    ),
    Row(
        name="PFN, 1,024 P100: 15 min",
        cluster="pfn_p100",
        devices=1024,
        batch_per_device=32,
        precision="fp32",
        kind="run",
        published=run_rate(90, 15 * 60, 1024),
        source="Akiba et al. 2017",
        comm={**_ONE, "wire_dtype": "fp16"},
    ),
    Row(
        name="You et al., 2,048 KNL",
        cluster="stampede2_knl",
        devices=2048,
        batch_per_device=16,
        precision="fp32",
        kind="run",
        published=run_rate(90, 20 * 60, 2048),
        source="You et al. 2018, table 4: 20 min",
        comm=_OVERLAPPED,
    ),
    Row(
        name="You et al., 1,024 Skylake",
        cluster="stampede2_skx",
        devices=1024,
        batch_per_device=16,
        precision="fp32",
        kind="run",
        published=run_rate(90, 52 * 60, 1024),
        source="You et al. 2018, table 4: 52 min",
        comm=_OVERLAPPED,
    ),
    Row(
        name="You et al., 1,600 Skylake",
        cluster="stampede2_skx",
        devices=1600,
        batch_per_device=10,
        precision="fp32",
        kind="run",
        published=run_rate(90, 31 * 60, 1600),
        source="You et al. 2018, table 4: 31 min",
        comm=_OVERLAPPED,
    ),
    Row(
        name="Tencent, 2,048 P40",
        cluster="tencent_p40",
        devices=2048,
        batch_per_device=32,
        kind="scaling",
        published=0.879,
        source="GTC S9146: 87.9 %",
        comm=_TENCENT,
    ),
    Row(
        name="Sony, 1,088 V100",
        cluster="abci",
        devices=1088,
        batch_per_device=32,
        kind="scaling",
        base=4,
        published=0.9162,
        source="Mikami et al. 2018: 91.62 %",
        comm=_SONY,
    ),
    Row(
        name="NVIDIA v0.6, 1,536 V100",
        cluster="dgx2h_v100",
        devices=1536,
        batch_per_device=39,
        kind="run",
        published=939,
        source="MLPerf v0.6 logs: 79.9 s",
        comm=_ONE,
    ),
    Row(
        name="Fujitsu v0.6, 2,048 V100",
        cluster="abci",
        devices=2048,
        batch_per_device=42,
        kind="rate",
        published=840,
        source="MLPerf v0.6 logs",
        comm=_FUJITSU,
    ),
    Row(
        name="A100 x 64",
        cluster="dgx_a100",
        devices=64,
        batch_per_device=51,
        kind="rate",
        published=2619,
        source="MLPerf v2.0 logs",
        comm=_ONE,
    ),
    Row(
        name="A100 x 1,024",
        cluster="dgx_a100",
        devices=1024,
        batch_per_device=35,
        kind="rate",
        published=2307,
        source="MLPerf v2.0 logs",
        comm=_ONE,
    ),
    Row(
        name="A100 x 4,216",
        cluster="dgx_a100",
        devices=4216,
        batch_per_device=16,
        kind="run",
        epochs=86,
        published=1368,
        source="MLPerf v2.0 logs: 19.2 s",
        comm=_ONE,
    ),
)

# Whole runs for which no usable single-node speed was published, except that of another model or another system.
BEYOND = (
    Row(
        name="Tencent, 2,048 P40: 6.6 min",
        cluster="tencent_p40",
        devices=2048,
        batch_per_device=32,
        kind="run",
        published=run_rate(90, 6.6 * 60, 2048),
        source="Jia et al. 2018",
        comm=_TENCENT,
    ),
    Row(
        name="Tencent AlexNet, 1,024 P40: 4 min",
        cluster="tencent_p40",
        devices=1024,
        batch_per_device=64,
        kind="run",
        model="alexnet_bn_pool5",
        epochs=95,
        published=run_rate(95, 4 * 60, 1024),
        source="GTC S9146",
        comm=_TENCENT,
    ),
    Row(
        name="You et al. AlexNet, 2,048 Skylake: 11 min",
        cluster="stampede2_skx",
        devices=2048,
        batch_per_device=16,
        kind="run",
        model="alexnet_bn",
        precision="fp32",
        epochs=100,
        published=run_rate(100, 11 * 60, 2048),
        source="You et al. 2018",
        comm=_OVERLAPPED,
    ),
    Row(
        name="Sony, 2,176 V100: 224 s",
        cluster="abci",
        devices=2176,
        batch_per_device=32,
        kind="run",
        published=run_rate(90, 224, 2176),
        source="Mikami et al. 2018",
        comm=_SONY,
    ),
    Row(
        name="Sony, 3,456 V100: 122 s",
        cluster="abci",
        devices=3456,
        batch_per_device=16,
        kind="run",
        published=run_rate(90, 122, 3456),
        source="Mikami et al. 2019",
        comm=_SONY,
    ),
)

# MLPerf v3.0, DGX H100 (the largest: CoreWeave's HGX H100), in minutes, as NVIDIA's performance page lists them. They
# were found long after the model and dgx_h100's machine file, whose one measured speed is from another round, had been
# written.
LATER_CLUSTER, LATER_SOURCE = "dgx_h100", "MLPerf v3.0: 3.0-2053, 2071, 2068, 2075, 2002"
LATER = (
    TimedRun(8, 3264, 13.466 * 60),
    TimedRun(64, 3264, 2.664 * 60),
    TimedRun(512, 16_384, 0.509 * 60),
    TimedRun(768, 24_576, 0.369 * 60),
    TimedRun(3584, 64_512, 0.183 * 60),
)
