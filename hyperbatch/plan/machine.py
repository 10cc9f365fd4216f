"""A cluster as data: devices, nodes and links, in SI units. `plan.clusters` reads the files that fill it in.

node 0                          node 1
[d0 d1 d2 d3]  intra links      [d0 d1 d2 d3]
  |  nics  |___________ inter _______|  nics  |
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One direction of a link: what a long message gets through it, and what one hop costs."""

    bandwidth_bytes_per_s: float  # line rate
    latency_s: float  # one hop of a collective, software included
    efficiency: float = 1.0  # part of the line rate that a long message reaches

    @property
    def bytes_per_s(self) -> float:
        return self.bandwidth_bytes_per_s * self.efficiency


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """How the devices of a job reach each other. The NICs of a node are shared by its devices."""

    devices_per_node: int
    nics_per_node: int
    intra: Link  # per device
    inter: Link  # per NIC
    call_s: float = 0.0  # fixed cost of one collective call
    flat_algorithms: tuple[str, ...] = ("ring", "tree")  # what the backend's own all-reduce chooses from
    flat_uses_all_nics: bool = True  # NCCL makes a ring per NIC; gloo's one ring leaves a node by one of them
    torus_chunk_bytes: float | None = None  # comm/pipeline.py on CPUs: in chunks, so that rows hide behind columns

    @property
    def node_bytes_per_s(self) -> float:
        """What one collective gets out of a node: its NICs together, or the link inside it when that is narrower."""
        nics = self.nics_per_node if self.flat_uses_all_nics else 1
        return min(self.intra.bytes_per_s, self.inter.bytes_per_s * nics)

    def nodes(self, world_size: int) -> int:
        return -(-world_size // self.devices_per_node)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A published or measured training speed on one node (or a few): what the compute model is anchored to."""

    model: str
    precision: str
    batch_per_device: int
    images_per_s_per_device: float
    devices: int = 1
    overlapped: bool = False  # its own all-reduce was hidden behind backward
    image_size: int = 224
    classes: int = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One training step measured layer by layer (those with parameters, in forward order; what lies between two of
    them counts with the later one in its pass). Several batches of one model make ready times for any batch."""

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
    layer_overhead_s: float  # time of one layer in one pass (of three) that does not shrink with the batch
    power_w: float
    measured: tuple[Measured, ...] = ()
    profiles: tuple[Profile, ...] = ()  # where a model was profiled here, its layers are taken as measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    name: str
    description: str
    device: Device
    network: Network
    devices: int  # as many as there are
    node_power_w: float
    price_usd_per_device_hour: float | None = None
    jitter: float = 0.0  # standard deviation of a rank's compute time, as a part of it
    eval_overhead_s: float = 0.0  # fixed cost of one evaluation: switch, reduce, log
    init_s: float = 0.0  # from launch to the first step
    node_mtbf_s: float | None = None  # mean time between failures of one node
    storage_bytes_per_s: float | None = None  # one writer's checkpoint speed
    sources: dict[str, str] = field(default_factory=dict)
