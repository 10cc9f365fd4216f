"""Muon on a CUDA device: kernels against the fp64 reference, graphs, skipped steps without a host wait."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import run_ranks
from torch import nn

from hyperbatch.arena import Arena
from hyperbatch.bench.lars import Tensors, shapes
from hyperbatch.comm import GridComm
from hyperbatch.optim import Muon
from hyperbatch.optim.muon import MUON_RULE, muon_update
from hyperbatch.optim.precision import LossScaler
from hyperbatch.plan.types import RankGrid

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

SHAPES = [(7,), (4097,), (0, 3), (33, 65), (65, 33), (64, 3, 7, 7), (300, 300), (1000, 256), (256, 256, 3, 3), (1, 9)]


def make_params(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator(device="cuda").manual_seed(0)
    values = [torch.randn(shape, device="cuda", generator=generator) for shape in shapes]
    values.append(torch.randn(16, 8, 3, 3, device="cuda", generator=generator).to(memory_format=torch.channels_last))
    params = [nn.Parameter(value.to(dtype)) for value in values]
    params.append(nn.Parameter(torch.randn(20, 30, device="cuda", generator=generator).to(dtype)[:, ::2]))
    return params


def set_grads(params, seed, magnitude=1.0):
    generator = torch.Generator(device="cuda").manual_seed(1000 + seed)
    for param in params:
        param.grad = (torch.randn(param.shape, device="cuda", generator=generator) * magnitude).to(param.dtype)


def full(optimizer, param):
    return optimizer.state[param].get("master", param).detach()


def expected_step(optimizer, params):
    """What the reference makes of the next step, in fp64: a list of updates."""
    outcomes = []
    h = MUON_RULE.read(optimizer.param_groups[0])
    for param in params:
        state = optimizer.init_state(param)
        weight, buffer = full(optimizer, param).double(), state["momentum_buffer"].double()
        outcomes.append(muon_update(weight, param.grad.double(), buffer, h))
    return outcomes


VARIANTS = [
    {},
    {"coefficients": "polar_express", "steps": 3, "normalize_weights": True, "nesterov": False},
    {"coefficients": ((3.0, -3.2, 1.2), (1.5, -0.5, 0.0)), "steps": 2, "maximize": True, "adjust_lr": "none"},
]


@pytest.mark.parametrize("path", [{"fused": True}, {"foreach": True}], ids=["fused", "foreach"])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("magnitude", [1.0, 1e-6, 1e6])
def test_products_in_fp32_agree_with_the_fp64_reference(options, magnitude, path):
    params = make_params()
    optimizer = Muon(params, lr=0.1, weight_decay=0.1, product_dtype=torch.float32, eps=1e-12, **options, **path)
    for step in range(2):
        set_grads(params, step, magnitude)
        outcomes = expected_step(optimizer, params)
        optimizer.step()
        for param, expected in zip(params, outcomes, strict=True):
            # Small singular values are amplified up to 485 times, and their rounding with them.
            torch.testing.assert_close(full(optimizer, param).double(), expected.weight, rtol=1e-4, atol=1e-4)
            buffer = optimizer.state[param]["momentum_buffer"].double()
            torch.testing.assert_close(buffer, expected.state[0], rtol=1e-5, atol=1e-5 * magnitude)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_products_in_bf16_are_as_near_as_torchs_operations(dtype, options):
    """The fused path may be at most half as far again from fp64 as batched products of torch's in bf16."""
    distances = {}
    for name, path in (("fused", {"fused": True}), ("foreach", {"foreach": True})):
        params = make_params(dtype)
        optimizer = Muon(params, lr=0.1, **options, **path)
        set_grads(params, 0)
        before = [full(optimizer, p).double() if optimizer.init_state(p) else None for p in params]
        outcomes = expected_step(optimizer, params)
        optimizer.step()
        moved = torch.cat([(e.weight - b).flatten() for e, b in zip(outcomes, before, strict=True)])
        wrong = torch.cat([(full(optimizer, p) - e.weight).flatten() for p, e in zip(params, outcomes, strict=True)])
        distances[name] = (wrong.norm() / moved.norm()).item()
        if name == "fused" and dtype != torch.float32:
            assert all(torch.equal(p, full(optimizer, p).to(dtype)) for p in params)
    assert distances["fused"] < 0.05
    assert distances["fused"] < 1.5 * distances["foreach"]


def resnet50(dtype=torch.float16):
    torch.manual_seed(0)
    model = Tensors(shapes("resnet50"), torch.device("cuda"))
    arena = Arena(model, [name for name, _ in model.named_parameters()], dtype=dtype)
    return model, arena


def fill_grads(arena, seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    for buffer in arena.grads.values():
        buffer.copy_(torch.randn(buffer.shape, device="cuda", generator=generator) * 1e-2)
    for slot in arena.slots:
        slot.param.grad = arena.grad_view(slot.name)


def test_resnet50_is_the_same_bits_every_time_and_for_every_way_to_launch(monkeypatch):
    from hyperbatch.optim import fused_muon

    outcomes = []
    for one_launch in (True, True, False):
        monkeypatch.setattr(fused_muon, "ONE_LAUNCH", one_launch)
        model, arena = resnet50()
        optimizer = Muon(model.groups(), lr=0.02, arena=arena, fused=True)
        for step in range(5):
            fill_grads(arena, step)
            optimizer.step()
        outcomes.append(arena.masters.clone())
    assert torch.isfinite(outcomes[0]).all()
    assert all(torch.equal(outcomes[0], other) for other in outcomes[1:])


def test_resnet50_agrees_with_foreach():
    distances = []
    outcomes = []
    for path in ({"fused": True}, {"foreach": True}):
        model, arena = resnet50(torch.float32)
        start = arena.weights[torch.float32].clone()
        optimizer = Muon(model.groups(), lr=0.02, arena=arena, **path)
        fill_grads(arena, 0)
        optimizer.step()
        outcomes.append(arena.weights[torch.float32] - start)
        distances.append(outcomes[-1].norm())
    assert (outcomes[0] - outcomes[1]).norm() < 0.05 * distances[1]  # both round to bf16 in places of their own


def test_a_captured_step_replays_skips_and_follows_rates_without_a_host_wait():
    model, arena = resnet50()
    twin, twin_arena = resnet50()
    optimizer = Muon(model.groups(), lr=0.02, arena=arena, capturable=True)
    plain = Muon(twin.groups(), lr=0.02, arena=twin_arena)
    scaler = LossScaler("fp16", optimizer, device="cuda", initial_scale=4.0)
    plain.grad_scale = torch.full((), 4.0, device="cuda")
    fill_grads(arena, 0)
    fill_grads(twin_arena, 0)
    optimizer.step()
    plain.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in range(1, 4):
        fill_grads(arena, step)
        fill_grads(twin_arena, step)
        for group, other in zip(optimizer.param_groups, plain.param_groups, strict=True):
            group["lr"].fill_(0.01 * step)
            other["lr"] = 0.01 * step
        if step == 2:
            arena.grads[torch.float16][1234] = torch.inf
            twin_arena.grads[torch.float16][1234] = torch.inf
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        graph.replay()
        plain.step()
        torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(arena.masters, twin_arena.masters), step
    assert optimizer.skipped_steps.item() == 1
    assert scaler.enabled


def test_a_resumed_run_takes_the_same_steps():
    model, arena = resnet50()
    optimizer = Muon(model.groups(), lr=0.02, arena=arena)
    for step in range(2):
        fill_grads(arena, step)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    weights = {name: value.clone() for name, value in arena.named_masters().items()}
    norms = {name: p.detach().clone() for name, p in model.named_parameters() if name not in weights}
    for step in range(2, 4):
        fill_grads(arena, step)
        optimizer.step()
    other, other_arena = resnet50()
    with torch.no_grad():
        for name, value in norms.items():
            other.get_parameter(name).copy_(value)
    other_arena.load_masters(weights)
    resumed = Muon(other.groups(), lr=0.02, arena=other_arena)
    resumed.load_state_dict(saved)
    for step in range(2, 4):
        fill_grads(other_arena, step)
        resumed.step()
    assert torch.equal(arena.masters, other_arena.masters)


def share(rank):
    outcomes = []
    for captured, shared in ((False, False), (False, True), (True, True)):
        model, arena = resnet50()
        optimizer = Muon(model.groups(), lr=0.02, arena=arena, capturable=captured)
        comm = GridComm(RankGrid(1, 2))
        if shared:
            optimizer.share(comm)
        graph = None
        for step in range(3):
            fill_grads(arena, step)
            if captured and step == 1:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    optimizer.step()
            graph.replay() if graph is not None else optimizer.step()
        torch.cuda.synchronize()
        del graph  # NCCL closes no communicator that a graph still holds
        comm.close()
        outcomes.append(arena.masters.clone())
    assert all(torch.equal(outcomes[0], other) for other in outcomes[1:])


def test_two_ranks_share_the_matrices_with_the_same_bits():
    run_ranks(2, share, cuda=True, timeout_s=240)


def test_three_launches():
    """As the profiler sees them in a replay: direction, products, weights."""
    model, arena = resnet50()
    optimizer = Muon(model.groups(), lr=0.02, arena=arena, capturable=True)
    fill_grads(arena, 0)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        graph.replay()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert sorted(name for name in names if "kernel" in name) == ["apply_kernel", "direction_kernel", "product_kernel"]
