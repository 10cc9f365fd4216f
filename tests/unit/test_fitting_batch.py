"""The batch that fits, where memory is counted: a counter that is played stands in for the GPU's allocator."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hyperbatch import memory
from hyperbatch.arena import Arena
from hyperbatch.config import OptimConfig
from hyperbatch.engine import measure
from hyperbatch.engine.ranks import Ranks
from hyperbatch.errors import InputError
from hyperbatch.plan import fit

CPU = torch.device("cpu")
FIXED, SAMPLE, FREE = 5000, 700, 10_000_000
KEPT = 900  # bytes of one sample as the probe counts them


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.5))
        self.head = nn.Linear(144, 3)
        self.seen: list[tuple[int, torch.dtype]] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen.append((len(images), images.dtype))
        return self.head(self.body(images))


@pytest.fixture
def counted(monkeypatch):
    """A CPU whose allocator counts: a step takes FIXED bytes and SAMPLE for each of its samples."""

    def peak(run, device) -> int:
        before = len(network.seen)
        run()
        ((samples, _),) = network.seen[before:]
        return FIXED + SAMPLE * samples

    torch.manual_seed(0)
    network = Network()
    monkeypatch.setattr(measure, "COUNTED", ("cpu",))
    monkeypatch.setattr(measure, "peak_bytes", peak)
    monkeypatch.setattr(measure, "free_bytes", lambda device, ranks: FREE)
    return network


def fitting(network: Network, cache_bytes: int = 0, precision: str = "bf16", optimizer: str = "lars") -> int:
    order = [name for name, _ in network.named_parameters()][::-1]
    config = OptimConfig(precision=precision, optimizer=optimizer)
    arena = Arena(network, order, dtype=getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[precision]))
    return measure.fitting_batch(config, network, arena, torch.zeros(2, 1, 8, 8), KEPT, cache_bytes, Ranks())


@pytest.mark.parametrize(("optimizer", "moments"), [("lars", 1), ("lamb", 2)])
def test_it_follows_from_the_peaks_of_two_steps_in_the_runs_precision(counted, optimizer, moments):
    momentum = 4 * moments * sum(param.numel() for param in counted.parameters())
    fits = fitting(counted, optimizer=optimizer)
    assert counted.seen == [(4, torch.bfloat16), (32, torch.bfloat16)]
    assert fits == int((0.8 * (FREE - momentum) - FIXED) / SAMPLE), "nothing is added for what was not measured"


def test_what_the_image_cache_may_take_is_left_to_it(counted):
    momentum = 4 * sum(param.numel() for param in counted.parameters())
    assert fitting(counted, cache_bytes=FREE // 4) == int((0.8 * (FREE - FREE // 4 - momentum) - FIXED) / SAMPLE)
    assert fitting(counted, cache_bytes=2 * FREE) == 1


def test_where_the_steps_do_not_fit_the_probe_decides(counted, monkeypatch):
    def peak(run, device):
        raise torch.OutOfMemoryError("as on a full GPU")

    monkeypatch.setattr(measure, "peak_bytes", peak)
    state = 12 * sum(param.numel() for param in counted.parameters())
    assert fitting(counted) == int((0.8 * FREE - state) / (fit.HEADROOM * KEPT // 2)), "half of fp32's bytes"


def test_a_cpu_is_not_measured(counted, monkeypatch):
    monkeypatch.setattr(measure, "COUNTED", ("cuda",))
    state = 12 * sum(param.numel() for param in counted.parameters())
    assert fitting(counted, precision="fp32") == int((0.8 * FREE - state) / (fit.HEADROOM * KEPT))
    assert counted.seen == []


def test_memory_that_does_not_grow_is_no_limit(counted, monkeypatch):
    monkeypatch.setattr(measure, "peak_bytes", lambda run, device: FIXED)
    assert fitting(counted) > 1_000_000


def test_measuring_leaves_no_trace(counted):
    def everything() -> list[torch.Tensor]:
        return [*(param.detach().clone() for param in counted.state_dict().values()), torch.get_rng_state()]

    counted.to(torch.float32)
    order = [name for name, _ in counted.named_parameters()][::-1]
    arena = Arena(counted, order, dtype=torch.float32, copy_on_ready=False)
    before, trials = everything(), torch.backends.cudnn.benchmark
    config = OptimConfig(precision="fp32")
    measure.fitting_batch(config, counted, arena, torch.zeros(2, 1, 8, 8), KEPT, 0, Ranks())
    assert len(counted.seen) == 2
    assert all(torch.equal(was, now) for was, now in zip(before, everything(), strict=True))
    assert all(param.grad is None for param in counted.parameters())
    assert torch.backends.cudnn.benchmark == trials


def test_a_control_group_bounds_what_is_free(monkeypatch, tmp_path):
    total = memory.host_memory_bytes()
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "LIMIT", limit)
    limit.write_text("max\n")
    assert memory.host_memory_bytes() >= total
    limit.write_text(f"{1 << 20}\n")
    assert memory.host_memory_bytes() == memory.free_host_memory_bytes() == 1 << 20
    assert measure.free_bytes(CPU, Ranks(local_size=4)) == 1 << 18


class Pair(Network):
    def forward(self, images: torch.Tensor):
        return super().forward(images), images


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (nn.Flatten(), "the network has no parameters"),
        (Pair(), r"returns a tuple; it must return the logits, a tensor of \[2, 10\]"),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Softmax(1)),
            "returns probabilities; it must return the logits",
        ),
        (nn.Linear(8, 10), r"returns a tensor of \[2, 1, 8, 10\]"),
        (Network(), r"2 images of 10 classes the network returns a tensor of \[2, 3\]"),
    ],
)
def test_a_network_that_cannot_be_trained_is_refused(network, words):
    with pytest.raises(InputError, match=words):
        measure.probe(network, torch.zeros(2, 1, 8, 8), 10)
