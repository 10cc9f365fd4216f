"""Muon against a singular value decomposition in numpy, torch's Muon and SGD, and its own paths against each other."""

from __future__ import annotations

import copy
import io
import itertools

import numpy as np
import pytest
import torch
from torch import nn

from hyperbatch.arena import Arena
from hyperbatch.optim import Muon
from hyperbatch.optim.muon import MUON_RULE, POLYNOMIALS, muon_update

PATHS = {"reference": {"foreach": False}, "foreach": {"foreach": True}, "default": {}}
every_path = pytest.mark.parametrize("path", [*PATHS.values()], ids=[*PATHS])
SHAPES = [(6, 4), (4, 6), (5, 5), (8, 3, 3, 3), (3, 8, 1, 1), (1, 7), (7, 1), (9,), (), (0, 4)]


def numpy_muon(w, grads, lrs, *, polynomials, mu, wd, nesterov, adjust, normalize=False, decoupled=False, sign=1.0):
    """Several steps in fp64. Singular values are mapped one by one, which no path does."""
    w, m, rows = w.astype(np.float64), np.zeros(w.shape), len(w)
    for g, lr in zip(grads, lrs, strict=True):
        g = sign * g
        m = mu * m + g
        u = (g + mu * m if nesterov else m).reshape(rows, -1)
        left, values, right = np.linalg.svd(u, full_matrices=False)
        values = values / np.linalg.norm(u)
        for a, b, c in polynomials:
            values = a * values + b * values**3 + c * values**5
        if normalize and lr > 0:
            w = w * np.sqrt(rows) / np.linalg.norm(w)
        if lr > 0:
            w = w * (1 - (wd if decoupled else lr * wd))
        w = w - lr * adjust * (left * values @ right).reshape(w.shape)
    return w


@every_path
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5), (8, 3, 3, 3), (1, 7)], ids=str)
@pytest.mark.parametrize(("nesterov", "normalize", "decoupled"), [*itertools.product([False, True], repeat=3)])
def test_every_variant_follows_its_formula(path, shape, nesterov, normalize, decoupled):
    rng = np.random.default_rng(3)
    start, grads, lrs = rng.normal(size=shape), rng.normal(size=(4, *shape)), [0.0, 0.2, 0.4, 0.1]
    rows, columns = shape[0], int(np.prod(shape[1:]))
    for adjust_lr, adjust in (
        ("original", max(1.0, rows / columns) ** 0.5),
        ("match_rms_adamw", 0.2 * max(rows, columns) ** 0.5),
        ("none", 1.0),
    ):
        param = nn.Parameter(torch.tensor(start))
        optimizer = Muon(
            [param],
            momentum=0.8,
            lr=1.0,
            weight_decay=0.05,
            nesterov=nesterov,
            normalize_weights=normalize,
            decoupled_weight_decay=decoupled,
            adjust_lr=adjust_lr,
            steps=4,
            coefficients="polar_express",
            maximize=adjust_lr == "none",
            **path,
        )
        for grad, lr in zip(grads, lrs, strict=True):
            optimizer.param_groups[0]["lr"] = lr
            param.grad = torch.tensor(grad)
            optimizer.step()
        expected = numpy_muon(
            start,
            grads,
            lrs,
            polynomials=POLYNOMIALS["polar_express"][:4],
            mu=0.8,
            wd=0.05,
            nesterov=nesterov,
            adjust=adjust,
            normalize=normalize,
            decoupled=decoupled,
            sign=-1.0 if adjust_lr == "none" else 1.0,
        )
        np.testing.assert_allclose(param.detach().numpy(), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("adjust_lr", "theirs"), [("original", None), ("match_rms_adamw", "match_rms_adamw")])
def test_it_agrees_with_torchs_own(adjust_lr, theirs, nesterov, momentum, monkeypatch):
    """In fp64, where torch rounds to bf16. Its buffer is (1 - mu) times ours, which the polar factor does not see."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in [(40, 24), (24, 40), (32, 32)]]
    peers = copy.deepcopy(ours)
    options = {"lr": 0.02, "momentum": momentum, "nesterov": nesterov, "weight_decay": 0.1}
    muon = Muon(ours, **options, adjust_lr=adjust_lr)
    peer = torch.optim.Muon(peers, **options, adjust_lr_fn=theirs)
    for _ in range(5):
        for a, b in zip(ours, peers, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        muon.step()
        peer.step()
    for a, b in zip(ours, peers, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("path", [{"foreach": False}, {"foreach": True}], ids=["reference", "foreach"])
def test_in_bf16_it_is_torchs_own_but_for_rounding(path):
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in [(40, 24), (24, 40), (32, 32)]]
    start, peers = copy.deepcopy(ours), copy.deepcopy(ours)
    for a, b in zip(ours, peers, strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    Muon(ours, lr=0.02, product_dtype=torch.bfloat16, **path).step()
    torch.optim.Muon(peers, lr=0.02, weight_decay=0.0).step()
    for a, b, first in zip(ours, peers, start, strict=True):
        assert (a - b).norm() < 0.05 * (b - first).norm()  # some of bf16's 8 bits, amplified by the iterations


@every_path
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-3])
def test_what_is_no_matrix_and_other_groups_take_steps_of_sgd(path, nesterov, weight_decay):
    torch.manual_seed(0)
    plain = [nn.Parameter(torch.randn(shape)) for shape in [(3,), (), (1001,)]]
    told = [nn.Parameter(torch.randn(shape)) for shape in [(17, 9), (8, 3, 3, 3)]]
    theirs = copy.deepcopy([*plain, *told])
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": weight_decay, "nesterov": nesterov}
    muon = Muon([{"params": plain}, {"params": told, "adapt": False}], **options, **path)
    sgd = torch.optim.SGD(theirs, foreach=False, **options)
    for _ in range(10):
        for a, b in zip([*plain, *told], theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        muon.step()
        sgd.step()
    for a, b in zip([*plain, *told], theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_polar_express_is_closer_to_the_polar_factor_than_as_many_of_the_original():
    """Over singular values from 0.01 to 1: all within 2 % of 1 after six, which the original never is."""
    values = np.geomspace(0.01, 1.0, 1000)
    spread = {}
    for name, table in POLYNOMIALS.items():
        x = values
        for i in range(6):
            a, b, c = table[min(i, len(table) - 1)]
            x = a * x + b * x**3 + c * x**5
        spread[name] = np.abs(x - 1).max()
    assert spread["polar_express"] < 0.02
    assert 0.2 < spread["original"] < 0.4


def make_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    images = torch.randn(6, 4, 3, 3, generator=generator).to(dtype=dtype, memory_format=torch.channels_last)
    gaps = torch.randn(6, 10, generator=generator).to(dtype)[:, ::2]
    return [*params, nn.Parameter(images), nn.Parameter(gaps)]


def set_grads(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(100 + seed)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * scale).to(param.dtype)


@pytest.mark.parametrize("options", [{}, {"normalize_weights": True, "maximize": True}], ids=str)
def test_foreach_agrees_with_the_fp64_reference(options):
    params = make_params()
    optimizer = Muon(params, lr=0.1, weight_decay=0.01, **options)
    for step in range(3):
        set_grads(params, step)
        h = MUON_RULE.read(optimizer.param_groups[0])
        before = [(p.detach().double(), optimizer.state[p].get("momentum_buffer", p * 0).double()) for p in params]
        optimizer.step()
        for param, (weight, buffer) in zip(params, before, strict=True):
            expected = muon_update(weight, param.grad.double(), buffer, h)
            # 5 iterations amplify a small singular value, and its rounding, 485 times.
            torch.testing.assert_close(param.double(), expected.weight, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(optimizer.state[param]["momentum_buffer"].double(), expected.state[0])


def test_coefficients_may_be_given_for_each_iteration():
    """A sequence is read in order, its last entry again where steps go beyond it; an entry with c = 0 is a cubic."""
    outcomes = []
    table = ((3.0, -3.2, 1.2), (1.5, -0.5, 0.0))
    for coefficients, steps in ((table, 3), ([*table, table[1]], 3), ((*table, table[1], (9, 9, 9)), 3)):
        param = nn.Parameter(torch.eye(5, 3, dtype=torch.float64) * torch.arange(1, 4))
        param.grad = param.detach().clone()
        Muon([param], lr=1.0, momentum=0.0, coefficients=coefficients, steps=steps, adjust_lr="none").step()
        outcomes.append(param.detach())
    values = np.arange(1, 4) / np.sqrt(14)
    for a, b, c in (*table, table[1]):
        values = a * values + b * values**3 + c * values**5
    for found in outcomes:
        np.testing.assert_allclose(np.diagonal(found.numpy()), np.arange(1, 4) - values, rtol=1e-12)


@pytest.mark.parametrize(
    ("coefficients", "steps"), [("original", 5), ("polar_express", 3), (((3.0, -3.2, 1.2), (1.5, -0.5, 0.0)), 2)]
)
@pytest.mark.parametrize("shape", [(33, 65), (150, 100)])
def test_products_in_bf16_are_near_those_in_fp64(coefficients, steps, shape):
    outcomes = []
    for dtype in (torch.bfloat16, None):
        param = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        param.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()
        Muon([param], lr=1.0, coefficients=coefficients, steps=steps, product_dtype=dtype).step()
        outcomes.append(param.detach())
    assert (outcomes[0] - outcomes[1]).norm() < 0.03 * outcomes[1].norm()


@every_path
def test_skipping_scaling_and_masters(path):
    params, plain = make_params(torch.float16), [nn.Parameter(p.detach().float()) for p in make_params(torch.float16)]
    optimizer, expected = Muon(params, lr=0.01, **path), Muon(plain, lr=0.01, **path)
    optimizer.grad_scale = torch.tensor(64.0)
    for step in range(4):
        set_grads(params, step)
        for a, b in zip(params, plain, strict=True):
            b.grad = a.grad.float()
            a.grad = a.grad * 64
        if step == 1:
            params[0].grad[0, 0] = torch.inf
        before = [p.detach().clone() for p in params]
        optimizer.step()
        if step == 1:
            assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
        else:
            expected.step()
    assert optimizer.skipped_steps == 1
    for a, b in zip(params, plain, strict=True):
        torch.testing.assert_close(optimizer.state[a]["master"], b.detach(), rtol=1e-5, atol=1e-6)


def test_a_skipped_step_on_a_device_leaves_no_trace():
    """There the host does not know: every factor says so instead."""
    params = make_params()
    optimizer = Muon(params, lr=0.1, weight_decay=0.1, normalize_weights=True)
    set_grads(params, 0)
    optimizer.step()
    before = [(p.detach().clone(), optimizer.state[p]["momentum_buffer"].clone()) for p in params]
    set_grads(params, 1)
    params[0].grad[0, 0] = torch.nan
    h = MUON_RULE.read(optimizer.param_groups[0])
    for path in (MUON_RULE.foreach, MUON_RULE.reference):
        entries = optimizer._entries(optimizer.param_groups[0], [""] * len(params))
        with torch.no_grad():
            path(entries, h, torch.zeros(len(params), dtype=torch.float64), None, torch.tensor(True))
        for param, (weight, buffer) in zip(params, before, strict=True):
            assert torch.equal(param, weight)
            assert torch.equal(optimizer.state[param]["momentum_buffer"], buffer)


@pytest.mark.parametrize("in_arena", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_takes_the_same_steps(dtype, in_arena):
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(72, 5))
        names = [name for name, _ in model.named_parameters()]
        arena = Arena(model, names, dtype=dtype) if in_arena else None
        model = model if in_arena else model.to(dtype)
        return model, Muon(model.named_parameters(), lr=0.05, weight_decay=0.1, capturable=in_arena, arena=arena)

    def train(model, optimizer, seeds):
        for seed in seeds:
            set_grads([*model.parameters()], seed)
            if optimizer.arena is not None:
                optimizer.arena.collect()
            optimizer.step()

    model, optimizer = build()
    train(model, optimizer, range(2))
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    train(model, optimizer, range(2, 5))
    other, resumed = build()
    state = torch.load(io.BytesIO(saved.getvalue()))
    other.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    train(other, resumed, range(2, 5))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@every_path
def test_zero_gradients_and_zero_weights_stay_finite(path):
    params = [nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.ones(4, 6))]
    for param in params:
        param.grad = torch.zeros(4, 6)
    Muon(params, lr=0.1, normalize_weights=True, **path).step()
    assert torch.equal(params[0], torch.zeros(4, 6))
    torch.testing.assert_close(params[1], torch.full((4, 6), 4**0.5 / 24**0.5))


def test_bad_settings_name_the_argument():
    for options, message in (
        ({"momentum": 1.0}, "momentum"),
        ({"lr": -1.0}, "lr"),
        ({"eps": -1.0}, "eps"),
        ({"steps": 0}, "steps"),
        ({"coefficients": "cubic"}, "coefficients 'cubic' is not one of original, polar_express"),
        ({"coefficients": (1.0, 2.0)}, "coefficients must be"),
        ({"coefficients": ()}, "coefficients must be"),
        ({"adjust_lr": "torch"}, "adjust_lr"),
    ):
        with pytest.raises(ValueError, match=message):
            Muon([nn.Parameter(torch.ones(2, 2))], **{"lr": 0.1, **options})
