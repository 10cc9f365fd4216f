"""LARS and LAMB on a CUDA device: kernels against the fp64 reference, graphs, loss scaling without a host wait."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hyperbatch.arena import Arena
from hyperbatch.optim import LAMB, LARS
from hyperbatch.optim.lamb import LAMB_RULE, lamb_update
from hyperbatch.optim.lars import LARS_RULE, MOMENTUM_RULES, lars_update
from hyperbatch.optim.precision import LossScaler

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

SHAPES = [(1,), (7,), (64,), (0,), (2048,), (4097,), (33, 65), (64, 3, 7, 7), (300, 300), (512, 512, 3, 3)]


def make_params(dtype=torch.float32, seed=0, magnitude=1.0, shapes=SHAPES):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    values = [torch.randn(shape, device="cuda", generator=generator) * magnitude for shape in shapes]
    values.append(torch.randn(16, 8, 3, 3, device="cuda", generator=generator).to(memory_format=torch.channels_last))
    values.append(torch.zeros(50, device="cuda"))
    params = [nn.Parameter(value.to(dtype)) for value in values]
    params.append(nn.Parameter(torch.randn(20, 30, device="cuda", generator=generator).to(dtype)[:, ::2]))
    return params


def set_grads(params, seed, magnitude=1.0, scale=1.0):
    generator = torch.Generator(device="cuda").manual_seed(1000 + seed)
    for param in params:
        grad = torch.randn(param.shape, device="cuda", generator=generator) * magnitude
        param.grad = (grad * scale).to(param.dtype)


def full(optimizer, param):
    return optimizer.state[param].get("master", param)


@pytest.mark.parametrize("magnitudes", [(1.0, 1.0), (1e-15, 1e15), (1e15, 1e-15), (1e15, 1e15), (1e-15, 1e-15)])
@pytest.mark.parametrize("rule", MOMENTUM_RULES)
def test_one_fused_step_agrees_with_the_fp64_reference(rule, magnitudes):
    params = make_params(magnitude=magnitudes[0])
    optimizer = LARS(params, lr=0.5, weight_decay=1e-2, momentum_rule=rule, nesterov=rule == "lr_outside", fused=True)
    for step in range(2):  # the second one carries |w| over and meets a filled buffer
        set_grads(params, step, magnitudes[1])
        before = [full(optimizer, p).detach().double() if step else p.detach().double() for p in params]
        buffers = [
            optimizer.state[p]["momentum_buffer"].double() if step else torch.zeros_like(p, dtype=torch.float64)
            for p in params
        ]
        group = dict(optimizer.param_groups[0])
        h = LARS_RULE.read({**group, "last_lr": float(group["last_lr"])})
        optimizer.step()
        for param, weight, buffer in zip(params, before, buffers, strict=True):
            expected = lars_update(weight, param.grad.double(), buffer, h).weight
            # A buffer that nearly cancels the new gradient leaves its own rounding behind: it counts, too.
            old = lars_update(weight, torch.zeros_like(weight), buffer, h).weight - weight
            bound = 1e-6 * (weight.abs() + (expected - weight).abs() + old.abs())
            assert ((param.double() - expected).abs() <= bound).all(), (param.shape, rule, step)


@pytest.mark.parametrize("magnitudes", [(1.0, 1.0), (1e-6, 1e6), (1e6, 1e-6)])
@pytest.mark.parametrize("options", [{}, {"betas": (0.5, 0.9), "trust_clip": True, "eps": 1e-3}], ids=str)
def test_one_fused_lamb_step_agrees_with_the_fp64_reference(options, magnitudes):
    params = make_params(magnitude=magnitudes[0])
    optimizer = LAMB(params, lr=0.5, weight_decay=1e-2, fused=True, **options)
    for step in range(3):
        set_grads(params, step, magnitudes[1])
        before = [full(optimizer, p).detach().double() if step else p.detach().double() for p in params]
        averages = [
            [optimizer.state[p][key].double() if step else torch.zeros_like(p, dtype=torch.float64) for p in params]
            for key in LAMB.state_names
        ]
        group = dict(optimizer.param_groups[0])
        h = LAMB_RULE.read({**group, "step": float(group["step"])})
        optimizer.step()
        for param, weight, *state in zip(params, before, *averages, strict=True):
            expected = lamb_update(weight, param.grad.double(), *state, h)
            moved = expected.weight - weight
            # An average that nearly cancels the new gradient leaves its own rounding behind: that of a typical move.
            bound = 2e-6 * (weight.abs() + moved.abs()) + (2e-6 * moved.square().mean().sqrt() if moved.numel() else 0)
            assert ((full(optimizer, param).double() - expected.weight).abs() <= bound).all(), (param.shape, step)
    assert float(optimizer.param_groups[0]["step"]) == 3.0


@pytest.mark.parametrize("kind", [LARS, LAMB])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_weights_follow_their_masters(dtype, kind):
    rate = 0.5 if kind is LARS else 0.01
    params = make_params(dtype)
    optimizer = kind(params, lr=rate, weight_decay=1e-2, fused=True)
    optimizer.grad_scale = torch.tensor(256.0, device="cuda")
    reference_params = make_params(dtype)
    reference = kind(reference_params, lr=rate, weight_decay=1e-2, foreach=False)
    reference.grad_scale = optimizer.grad_scale
    for step in range(3):
        for group, one in ((params, optimizer), (reference_params, reference)):
            set_grads(group, step, scale=256.0)
            one.step()
    for a, b in zip(params, reference_params, strict=True):
        # fp32 sums in another order, three steps: some 1e-7 each.
        torch.testing.assert_close(full(optimizer, a), full(reference, b), rtol=3e-6, atol=3e-6)
        assert torch.equal(a, full(optimizer, a).to(dtype))


def test_fused_without_trust_is_sgd_within_two_ulp():
    ours, theirs = make_params(), make_params()
    optimizer = LARS(
        [{"params": ours, "adapt": False}], lr=0.1, weight_decay=1e-3, momentum_rule="lr_outside", fused=True
    )
    sgd = torch.optim.SGD(theirs, lr=0.1, momentum=0.9, weight_decay=1e-3)
    start = [p.detach().clone() for p in ours]
    for group, one in ((ours, optimizer), (theirs, sgd)):
        set_grads(group, 0)
        one.step()
    for a, b, w in zip(ours, theirs, start, strict=True):
        assert ((a - b).abs() <= 2 * torch.finfo(torch.float32).eps * (w.abs() + (b - w).abs())).all()


def test_same_bits_on_every_run_and_after_taking_the_norms_anew():
    results = []
    for refresh in (False, False, True):
        params = make_params()
        optimizer = LARS(params, lr=0.5, weight_decay=1e-2, fused=True)
        for step in range(5):
            set_grads(params, step)
            if refresh:
                optimizer.refresh()
            optimizer.step()
        results.append([p.detach().clone() for p in params])
    for a, b, c in zip(*results, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)  # or a resumed run would drift from an unbroken one


def test_gradients_in_new_places_are_found():
    params, again = make_params(), make_params()
    moving, still = (LARS(p, lr=0.5, fused=True) for p in (params, again))
    for step in range(3):
        set_grads(again, step)
        still.step()
        moving.zero_grad(set_to_none=True)
        hole = torch.empty(1 << (step + 10), device="cuda")  # the next gradients cannot take the old addresses
        set_grads(params, step)
        moving.step()
        del hole
    for a, b in zip(params, again, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kwargs", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("unscaled_before", [False, True])
@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_grad_scaler_never_waits_and_skips_bad_steps(kind, kwargs, unscaled_before):
    params, plain = make_params(), make_params()
    rate = 0.5 if kind is LARS else 0.01
    optimizer, unscaled = kind(params, lr=rate, **kwargs), kind(plain, lr=rate, **kwargs)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=1000)
    scaler.scale(torch.ones((), device="cuda"))
    for step in range(4):
        bad = step == 2
        set_grads(params, step, scale=1024.0)
        set_grads(plain, step)
        if bad:
            params[3 + 1].grad.view(-1)[5] = float("inf")
        before = [p.detach().clone() for p in params]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step builds its tables
        try:
            if unscaled_before:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if bad:
            assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
            scaler.load_state_dict({**scaler.state_dict(), "scale": 1024.0})
        else:
            unscaled.step()
    assert optimizer.skipped_steps.item() == 1
    for a, b in zip(params, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("in_arena", [False, True])
@pytest.mark.parametrize("kwargs", [{"fused": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_graph_replay_equals_eager(kind, kwargs, in_arena):
    options = {"momentum_rule": "rescaled"} if kind is LARS else {}

    def build():
        model = nn.ParameterList(make_params(shapes=SHAPES[4:]))
        arena = Arena(model, [name for name, _ in model.named_parameters()]) if in_arena else None
        return model, arena, kind(model, lr=0.1, capturable=True, arena=arena, **options, **kwargs)

    def put_grads(model, seed):
        fresh = copy.deepcopy(list(model))
        set_grads(fresh, seed)
        for param, source in zip(model, fresh, strict=True):
            param.grad.copy_(source.grad)

    outcomes = []
    for captured in (False, True):
        model, arena, optimizer = build()
        for param in model:
            param.grad = torch.zeros_like(param)
        if arena is not None:
            arena.collect()
        run = optimizer.step
        put_grads(model, 99)
        optimizer.step()  # warm-up, the same on both sides
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            run = graph.replay
        for step in range(4):
            put_grads(model, step)
            if step == 2:
                model[0].grad.view(-1)[0] = float("nan")
            for group in optimizer.param_groups:
                group["lr"].fill_(0.1 * (step + 1))
            run()
        outcomes.append([p.detach().clone() for p in model])
        assert optimizer.skipped_steps.item() == 1
    for a, b in zip(*outcomes, strict=True):
        assert torch.equal(a, b)


def test_fp16_training_in_an_arena_on_the_device():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 5)
    ).cuda()
    arena = Arena(model, [name for name, _ in model.named_parameters()], dtype=torch.float16)
    optimizer = LARS(model.named_parameters(), lr=1.0, arena=arena)
    scaler = LossScaler("fp16", optimizer, device="cuda")
    images = torch.randn(32, 3, 8, 8, device="cuda", dtype=torch.float16)
    labels = torch.randint(5, (32,), device="cuda")
    losses = []
    for step in range(60):
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            arena.zero_grad()
            loss = nn.functional.cross_entropy(model(images).float(), labels)
            scaler.scale(loss).backward()
            optimizer.step()
            scaler.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        losses.append(loss.detach())
    assert losses[-1] < 0.2 * losses[0]
    assert torch.equal(model[0].weight, arena.named_masters()["0.weight"].half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("change", ["other layout", "double and back", "one vector", "clamp"])
def test_fused_follows_parameters_that_others_move_or_write(change, dtype):
    outcomes = []
    for kwargs in ({"fused": True}, {"foreach": True}):
        params = make_params(dtype)
        optimizer = LARS(params, lr=0.5, weight_decay=1e-2, **kwargs)
        for step in range(3):
            set_grads(params, step)
            optimizer.step()
            optimizer.zero_grad()
            if step == 0 and change == "clamp":
                for param in params:
                    param.data.clamp_(-0.5, 0.25)
            elif step == 0 and change == "one vector":
                dense = [param for param in params if param.is_contiguous()]
                nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(dense), dense)
            elif step == 0 and change == "double and back":
                for param in params:
                    param.data = param.data.double()
                    param.data = param.data.to(dtype)
            elif step == 0:
                params[9].data = params[9].data.to(memory_format=torch.channels_last)
        outcomes.append([full(optimizer, param).detach().clone() for param in params])
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-6, atol=3e-6)


def test_a_captured_step_holds_its_memory_and_refuses_what_moved():
    params = make_params()
    optimizer = LARS(params, lr=0.1, capturable=True, fused=True)
    set_grads(params, 0)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    graph.replay()
    params[9].data.mul_(2.0)
    optimizer.refresh()  # replays run no Python: they are told of edits
    norm = params[9].detach().double().norm().item()
    graph.replay()
    assert optimizer.layer_norms()["0.9"][0] == pytest.approx(norm, rel=1e-5)
    address = params[9].data_ptr()
    params[9].data = params[9].data.clone()
    grabbed = [torch.full_like(params[9], 7.0) for _ in range(4)]  # the old place would be handed out here
    graph.replay()
    torch.cuda.synchronize()
    assert all(tensor.data_ptr() != address and bool((tensor == 7.0).all()) for tensor in grabbed)
    with pytest.raises(RuntimeError, match="moved after a CUDA graph captured"):
        optimizer.step()


@pytest.mark.parametrize("kwargs", [{"fused": True}, {"foreach": True}], ids=str)
def test_layer_stats_follow_every_replay_and_keep_what_was_read(kwargs):
    params = make_params(shapes=SHAPES[4:])
    optimizer = LARS(params, lr=0.1, capturable=True, **kwargs)
    set_grads(params, 0)
    optimizer.step()
    graphs = []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            optimizer.step()
    graphs[0].replay()
    held = optimizer.layer_stats()
    first = held[0].grad_norms.tolist()
    for param in params:
        param.grad.mul_(3.0)
    graphs[0].replay()
    second = optimizer.layer_stats()[0].grad_norms.tolist()
    assert second == pytest.approx([3.0 * x for x in first], rel=1e-5)
    for param in params:
        param.grad.mul_(2.0)
    graphs[1].replay()
    assert optimizer.layer_stats()[0].grad_norms.tolist() == pytest.approx([6.0 * x for x in first], rel=1e-5)
    params[0].grad.view(-1)[0] = float("nan")
    graphs[0].replay()
    assert optimizer.layer_stats()[0].grad_norms.tolist() == pytest.approx([6.0 * x for x in first], rel=1e-5)
    assert held[0].grad_norms.tolist() == first


@pytest.mark.parametrize("kwargs", [{"fused": True}, {"foreach": True}], ids=str)
def test_rates_in_host_memory_are_read_there(kwargs):
    """torch.distributed.checkpoint puts one there while it makes empty state."""
    outcomes = []
    for rate in (0.3, torch.tensor([[0.3]]), torch.tensor(0.3, dtype=torch.float64, device="cuda")):
        params = make_params()
        set_grads(params, 0)
        LARS(params, lr=rate, **kwargs).step()
        outcomes.append(params)
    for params in outcomes[1:]:
        for a, b in zip(params, outcomes[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
