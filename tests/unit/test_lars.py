"""LARS against formulas written out in numpy, torch's SGD, and its own paths against each other."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hyperbatch.arena import Arena
from hyperbatch.optim import LARS, param_groups
from hyperbatch.optim.lars import MOMENTUM_RULES
from hyperbatch.optim.tensors import adopt_writes, norms_of

PATHS = {"reference": {"foreach": False}, "foreach": {"foreach": True}, "default": {}}
every_path = pytest.mark.parametrize("path", [*PATHS.values()], ids=[*PATHS])


def numpy_lars(w, grads, lrs, *, rule, c, mu, wd, eps=0.0, nesterov=False, decoupled=False, clip=False, adapt=True):
    """Several steps in fp64, straight from the papers' formulas."""
    w, m, last = w.astype(np.float64), np.zeros(w.shape), None
    for g, lr in zip(grads, lrs, strict=True):
        g = g.astype(np.float64)
        inner = 0.0 if decoupled else wd
        wn, gn = np.sqrt((w * w).sum()), np.sqrt((g * g).sum())
        trust = c * wn / (gn + inner * wn + eps) if adapt and wn > 0 and gn > 0 else 1.0
        if clip and adapt and wn > 0 and gn > 0 and lr > 0:
            trust = min(trust / lr, 1.0)
        d = g + inner * w
        if rule == "lr_inside":
            d, outside = lr * trust * d, 1.0
        elif rule == "rescaled":
            m = m * (lr / last if last else 1.0)
            d, outside = lr * trust * d, 1.0
        elif rule == "lr_outside":
            d, outside = trust * d, lr
        else:
            outside = lr * trust
        m = mu * m + d
        w = w - (wd * w if decoupled and lr > 0 else 0.0) - outside * (d + mu * m if nesterov else m)
        last = lr
    return w


@every_path
@pytest.mark.parametrize("rule", MOMENTUM_RULES)
@pytest.mark.parametrize(("nesterov", "decoupled", "clip"), [*itertools.product([False, True], repeat=3)])
def test_every_variant_follows_its_formula(path, rule, nesterov, decoupled, clip):
    rng = np.random.default_rng(3)
    start, grads = rng.normal(size=(5, 7)), rng.normal(size=(4, 5, 7))
    lrs = [0.0, 0.2, 0.4, 0.1]  # warm-ups start at 0, where rescaling would divide by it
    param = nn.Parameter(torch.tensor(start))
    optimizer = LARS(
        [param],
        lr=1.0,
        momentum=0.8,
        weight_decay=0.05,
        trust_coefficient=0.3,
        eps=0.01,
        nesterov=nesterov,
        trust_clip=clip,
        momentum_rule=rule,
        decoupled_weight_decay=decoupled,
        **path,
    )
    for grad, lr in zip(grads, lrs, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        param.grad = torch.tensor(grad)
        optimizer.step()
    expected = numpy_lars(
        start,
        grads,
        lrs,
        rule=rule,
        c=0.3,
        mu=0.8,
        wd=0.05,
        eps=0.01,
        nesterov=nesterov,
        decoupled=decoupled,
        clip=clip,
    )
    np.testing.assert_allclose(param.detach().numpy(), expected, rtol=1e-12, atol=1e-12)


def test_maximize_climbs():
    up, down = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    for param, sign in ((up, 1.0), (down, -1.0)):
        optimizer = LARS([param], lr=0.5, maximize=sign > 0)
        param.grad = torch.tensor([1.0, -2.0, 3.0]) * sign
        optimizer.step()
    assert torch.equal(up, down)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-3])
def test_without_trust_it_is_sgd_bit_for_bit(nesterov, weight_decay):
    torch.manual_seed(0)
    shapes = [(3,), (17, 9), (8, 3, 3, 3), (1001,)]
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = copy.deepcopy(ours)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": weight_decay, "nesterov": nesterov}
    lars = LARS([{"params": ours, "adapt": False}], momentum_rule="lr_outside", foreach=False, **options)
    sgd = torch.optim.SGD(theirs, foreach=False, **options)
    for _ in range(10):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        lars.step()
        sgd.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 300),
    seed=st.integers(0, 2**31),
    weight_power=st.integers(-15, 15),
    grad_power=st.integers(-15, 15),
    path=st.sampled_from(list(PATHS.values())),
)
def test_one_fp32_step_is_right_over_thirty_decades(count, seed, weight_power, grad_power, path):
    rng = np.random.default_rng(seed)
    sizes = rng.choice([0, 1, 2, 3, 7, 31, 64, 100, 257], size=count)
    params = [nn.Parameter(torch.tensor(rng.normal(size=n) * 10.0**weight_power, dtype=torch.float32)) for n in sizes]
    for i, param in enumerate(params):
        param.grad = torch.tensor(rng.normal(size=param.shape) * 10.0**grad_power, dtype=torch.float32)
        if i % 5 == 1:
            param.data.zero_()
        if i % 7 == 1:
            param.grad.zero_()
    before = [param.detach().double().numpy() for param in params]
    LARS(params, lr=0.7, weight_decay=1e-3, **path).step()
    for param, w in zip(params, before, strict=True):
        expected = numpy_lars(w, [param.grad.numpy()], [0.7], rule="lr_inside", c=0.001, mu=0.9, wd=1e-3)
        error = np.abs(param.detach().double().numpy() - expected)
        assert (error <= 1e-6 * (np.abs(w) + np.abs(expected - w))).all()


@every_path
def test_memory_layout_does_not_matter(path):
    torch.manual_seed(0)
    value, grad = torch.randn(6, 4, 3, 3), torch.randn(6, 4, 3, 3)
    layouts = {
        "contiguous": value.clone(),
        "channels_last": value.to(memory_format=torch.channels_last),
        "transposed": value.transpose(0, 1).contiguous().transpose(0, 1),
        "with gaps": torch.stack([value, value], dim=-1)[..., 0],
    }
    results = {}
    for name, data in layouts.items():
        param = nn.Parameter(data)
        optimizer = LARS([param], lr=0.5, weight_decay=1e-2, **path)
        for _ in range(3):
            param.grad = grad.clone()
            optimizer.step()
        results[name] = param.detach().contiguous()
    for name, result in results.items():
        torch.testing.assert_close(result, results["contiguous"], rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("size", [1.0, 1e-15, 1e-20, 1e-24, 1e-38])
@pytest.mark.parametrize("shape", [(8192,), (100, 333), (64, 64, 3, 3)])
def test_long_norms_keep_their_digits(shape, size):
    torch.manual_seed(0)
    layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    tensor = (torch.randn(shape) * size).to(memory_format=layout)
    (ours,) = norms_of([tensor])
    assert ours.item() == pytest.approx(tensor.double().norm().item(), rel=1e-7, abs=0.0)


@every_path
def test_scale_free_and_of_known_length(path):
    """With wd = eps = 0: gradients times 1000 change nothing, and |dw| = lr c |w| on the first step."""
    torch.manual_seed(0)
    start, grad = torch.randn(40, 30), torch.randn(40, 30)
    moved = []
    for factor in (1.0, 1000.0):
        param = nn.Parameter(start.clone())
        param.grad = grad * factor
        LARS([param], lr=2.0, trust_coefficient=0.01, **path).step()
        moved.append(param.detach() - start)
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-5, atol=1e-7)
    assert moved[0].norm().item() == pytest.approx(2.0 * 0.01 * start.norm().item(), rel=1e-5)


@every_path
def test_a_zero_initialised_parameter_moves(path):
    param = nn.Parameter(torch.zeros(5))
    param.grad = torch.ones(5)
    LARS([param], lr=0.1, weight_decay=1e-4, **path).step()
    assert torch.allclose(param, torch.full((5,), -0.1))


@every_path
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_bad_gradient_leaves_everything_untouched(path, bad):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(3).half())]
    optimizer = LARS(params, lr=0.1, momentum_rule="rescaled", **path)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    before = copy.deepcopy([p.detach() for p in params]), copy.deepcopy(optimizer.state_dict())
    params[1].grad[1] = bad
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(params, before[0], strict=True))
    for index, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[1]["state"][index][key]) for key, value in state.items())
    assert float(optimizer.param_groups[0]["last_lr"]) == pytest.approx(0.1)
    assert optimizer.last_found_inf == 1
    assert optimizer.skipped_steps == 1


@every_path
@pytest.mark.parametrize("unscaled_before", [False, True])
def test_grad_scaler_protocol(path, unscaled_before):
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(3))]
    plain = copy.deepcopy(ours)
    optimizer, expected = LARS(ours, lr=0.1, **path), LARS(plain, lr=0.1, **path)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(torch.ones(()))  # makes its tensors
    for step in range(4):
        for a, b in zip(ours, plain, strict=True):
            b.grad = torch.randn_like(b)
            a.grad = b.grad * scaler.get_scale()
        if step == 2:
            ours[0].grad[0, 0] = float("inf")
        if unscaled_before:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if step != 2:
            expected.step()
    assert scaler.get_scale() == 128.0
    assert optimizer.skipped_steps == 1
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@every_path
def test_parameters_without_gradient_are_skipped_not_decayed(path):
    touched, untouched = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = LARS([touched, untouched], lr=0.1, weight_decay=0.1, **path)
    touched.grad = torch.ones(3)
    optimizer.step()
    assert not torch.equal(touched, torch.ones(3))
    assert torch.equal(untouched, torch.ones(3))
    assert optimizer.trust_ratios().keys() == {"0.0"}


def test_it_is_a_torch_optimizer():
    model = nn.Linear(3, 2)
    optimizer = LARS(param_groups(model, 1e-4), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).pow(2).sum()
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.05]
    assert optimizer.step(closure).item() < first
    assert optimizer.trust_ratios().keys() == {"weight"}  # named, adapted ones only
    weight_norm, grad_norm, trust = optimizer.layer_norms()["weight"]
    assert trust == pytest.approx(0.001 * weight_norm / (grad_norm + 1e-4 * weight_norm))
    copy.deepcopy(optimizer).step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("in_arena", [False, True])
def test_state_dict_round_trip_keeps_full_precision(dtype, in_arena):
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        if in_arena:
            arena = Arena(model, [name for name, _ in model.named_parameters()], dtype=dtype)
        else:
            arena = None
            model.to(dtype)
        return model, LARS(param_groups(model, 1e-3), lr=0.3, momentum_rule="rescaled", arena=arena)

    def steps(model, optimizer, seeds):
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * seed
            optimizer.step()

    model, optimizer = build()
    steps(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    steps(model, optimizer, range(3, 6))
    other, resumed = build()
    steps(other, resumed, [9])  # not at its start any more
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert all(value.dtype == wide for state in resumed.state.values() for value in state.values())
    steps(other, resumed, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_16_bit_weight_written_by_others_wins_over_its_master():
    param = nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = LARS([param], lr=0.0)
    param.grad = torch.ones_like(param)
    optimizer.step()
    master = optimizer.state[param]["master"]
    master.fill_(1 + 2**-13)  # rounds to the same fp16: kept
    with torch.no_grad():
        param[2] = 5.0
    optimizer.step()
    assert master.tolist() == [1 + 2**-13, 1 + 2**-13, 5.0, 1 + 2**-13]


def test_capturable_rates_are_tensors_that_schedules_fill():
    param = nn.Parameter(torch.ones(3))
    optimizer = LARS([param], lr=0.1, momentum_rule="rescaled", capturable=True)
    rate = optimizer.param_groups[0]["lr"]
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    param.grad = torch.ones(3)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] is rate  # a captured graph reads this very tensor
    plain = nn.Parameter(torch.ones(3))
    expected = LARS([plain], lr=0.1, momentum_rule="rescaled")
    plain.grad = torch.ones(3)
    expected.step()
    torch.testing.assert_close(param, plain)


def test_moving_the_arena_takes_momentum_and_masters_along():
    model = nn.Linear(3, 3)
    twin = copy.deepcopy(model)
    arena = Arena(model, ["weight", "bias"], dtype=torch.bfloat16)
    optimizer = LARS(model.parameters(), lr=0.1, arena=arena)
    for step in range(2):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        if step == 0:
            for param in model.parameters():
                param.grad = None
                param.data = param.data.clone()  # what .to(device) does
    assert optimizer.state[model.weight]["master"].data_ptr() == arena.named_masters()["weight"].data_ptr()
    expected = LARS(twin.parameters(), lr=0.1)
    for _ in range(2):
        for param in twin.parameters():
            param.grad = torch.ones_like(param)
        expected.step()
    torch.testing.assert_close(arena.named_masters()["weight"], twin.weight.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "lr must not be negative"),
        ({"lr": float("nan")}, "lr must not be negative"),
        ({"momentum": 1.0}, "momentum must be in"),
        ({"momentum": -0.1}, "momentum must be in"),
        ({"weight_decay": -1.0}, "weight_decay must not be negative"),
        ({"eps": -1.0}, "eps must not be negative"),
        ({"trust_coefficient": 0.0}, "trust_coefficient must be positive"),
        ({"momentum_rule": "sideways"}, "momentum_rule 'sideways' is not one of lr_inside"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov needs a momentum"),
        ({"foreach": True, "fused": True}, "foreach and fused"),
        ({"fused": True}, "fused=True, but"),
    ],
)
def test_bad_settings_name_the_argument(options, message):
    with pytest.raises(ValueError, match=message):
        LARS([nn.Parameter(torch.ones(2))], **{"lr": 0.1, **options})


def test_bad_tensors_are_named():
    with pytest.raises(
        ValueError, match=r"real floating-point tensors, but parameter 0 of group 0 is torch\.complex64"
    ):
        LARS([nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1)
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    for params, name in ((table.named_parameters(), "weight"), (table.parameters(), "parameter 0 of group 0")):
        with pytest.raises(ValueError, match=f"the gradient of {name} is sparse.*use sparse=False in its layer"):
            LARS(params, lr=0.1).step()


def test_masters_stay_out_of_autograd():
    """Also where somebody forgets no_grad: a graph would keep them, and what made them, for the rest of the run."""
    weight = nn.Parameter(torch.randn(8).half())
    master = weight.detach().float()
    weight.data.add_(1)
    adopt_writes(weight, master)
    assert not master.requires_grad
    assert torch.equal(master.half(), weight)
