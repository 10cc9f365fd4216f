"""A cluster as data: devices, nodes and links, in SI units. `plan.clusters` reads machine files into these classes.

node 0                          node 1
[d0 d1 d2 d3]  intra links      [d0 d1 d2 d3]
  |  nics  |___________ inter _______|  nics  |
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One direction of a link: the bandwidth that a long message reaches, and the latency of one hop."""

    bandwidth_bytes_per_s: float  # line rate
    latency_s: float  # time of one hop of a collective, including software
    efficiency: float = 1.0  # fraction of the line rate that a long message reaches

    @property
    def bytes_per_s(self) -> float:
        return self.bandwidth_bytes_per_s * self.efficiency


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """How the devices of a job are connected. The devices of a node share its NICs."""

    devices_per_node: int
    nics_per_node: int
    intra: Link  # per device
    inter: Link  # per NIC
    call_s: float = 0.0  # fixed cost of one collective call
    flat_algorithms: tuple[str, ...] = ("ring", "tree")  # algorithms among which the backend's own all-reduce chooses
    flat_uses_all_nics: bool = True  # NCCL makes one ring per NIC; gloo's single ring uses one NIC of a node
    torus_chunk_bytes: float | None = None  # for comm/pipeline.py on CPUs: chunks let rows overlap with columns

    @property
    def node_bytes_per_s(self) -> float:
        """The bandwidth out of a node for one collective: its NICs together, or the inner link if that is narrower."""
        nics = self.nics_per_node if self.flat_uses_all_nics else 1
        return min(self.intra.bytes_per_s, self.inter.bytes_per_s * nics)

    def nodes(self, world_size: int) -> int:
        return -(-world_size // self.devices_per_node)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A published or measured training speed on one node (or a few). The compute model is scaled to it."""

    model: str
    precision: str
    batch_per_device: int
    images_per_s_per_device: float
    devices: int = 1
    overlapped: bool = False  # whether the all-reduce of this run was hidden behind backward
    image_size: int = 224
    classes: int = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One training step, measured layer by layer.

    Only layers with parameters are listed, in forward order. Time between two of them counts towards the later one in
    its pass. Profiles of one model at several batches give ready times for any batch.
    """

    model: str
    precision: str
    batch_per_device: int
    layers: tuple[str, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    image_size: int = 224
    classes: int = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    name: str
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    peak_flop_per_s: dict[str, float]  # by precision: "fp32", "fp16", "bf16", "fp64"
    layer_overhead_s: float  # the part of a layer's time in one of the three passes that does not shrink with the batch
    power_w: float
    measured: tuple[Measured, ...] = ()
    profiles: tuple[Profile, ...] = ()  # a profiled model's layer times are used as measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    name: str
    description: str
    device: Device
    network: Network
    devices: int  # the number of devices that exist
    node_power_w: float
    price_usd_per_device_hour: float | None = None
    jitter: float = 0.0  # standard deviation of a rank's compute time, as a fraction of that time
    eval_overhead_s: float = 0.0  # fixed time of one evaluation: switching modes, reducing, logging
    init_s: float = 0.0  # time from launch to the first step
    node_mtbf_s: float | None = None  # mean time between failures of one node
    storage_bytes_per_s: float | None = None  # checkpoint speed of one writer
    sources: dict[str, str] = field(default_factory=dict)
