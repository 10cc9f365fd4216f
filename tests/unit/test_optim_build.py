"""From a config to an optimizer, and its state by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hyperbatch import vocabulary
from hyperbatch.arena import Arena
from hyperbatch.config import OptimConfig
from hyperbatch.engine.snapshot import load_named_state, named_state
from hyperbatch.optim import LAMB, LARS, Muon
from hyperbatch.optim.build import OPTIMIZERS, build_optimizer, set_rate
from hyperbatch.optim.precision import working_dtype
from hyperbatch.optim.rates import RateTable
from hyperbatch.params import backward_order, param_groups


def build(optim, lr=0.1, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    order = backward_order(model, lambda: model(torch.ones(2, 6)).sum().backward())
    arena = Arena(model, order, dtype=working_dtype(optim.precision))
    return model, arena, build_optimizer(optim, model, arena, lr=lr, **options)


def train(model, arena, optimizer, seeds, dtype):
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        arena.zero_grad()
        inputs = torch.randn(8, 6, generator=generator).to(dtype)
        model(inputs).float().pow(2).sum().backward()
        set_rate(optimizer, 0.05 * (1 + seed))
        optimizer.step()


def test_every_field_reaches_the_optimizer():
    optim = OptimConfig(
        momentum=0.8,
        weight_decay=0.3,
        trust_coefficient=0.02,
        lars_eps=1e-5,
        nesterov=True,
        trust_clip=True,
        momentum_rule="rescaled",
        decoupled_weight_decay=True,
        decay_norm_bias=True,
        adapt_norm_bias=True,
    )
    _, _, optimizer = build(optim)
    assert isinstance(optimizer, LARS)
    for group in optimizer.param_groups:
        assert group["momentum"] == 0.8
        assert group["weight_decay"] == 0.3
        assert group["trust_coefficient"] == 0.02
        assert group["eps"] == 1e-5
        assert group["momentum_rule"] == "rescaled"
        assert all(group[name] for name in ("nesterov", "trust_clip", "decoupled_weight_decay", "adapt"))
    for name, eps, adapts in (("lamb", 1e-6, True), ("adamw", 1e-8, False)):
        _, _, optimizer = build(OptimConfig(optimizer=name, momentum=0.85, beta2=0.98))
        assert isinstance(optimizer, LAMB)
        assert (optimizer.param_groups[0]["betas"], optimizer.param_groups[0]["eps"]) == ((0.85, 0.98), eps)
        assert [group["adapt"] for group in optimizer.param_groups] == [adapts, False]


def test_every_field_reaches_muon_and_the_head_is_left_to_sgd():
    optim = OptimConfig(
        optimizer="muon",
        momentum=0.6,
        rest_momentum=0.85,
        weight_decay=0.3,
        nesterov=True,
        decoupled_weight_decay=True,
        muon_steps=3,
        muon_coefficients="polar_express",
        muon_adjust_lr="none",
        muon_normalize_weights=True,
    )
    _, _, optimizer = build(optim)
    assert isinstance(optimizer, Muon)
    for group in optimizer.param_groups:
        assert (group["steps"], group["coefficients"], group["adjust_lr"]) == (3, "polar_express", "none")
        assert all(group[name] for name in ("nesterov", "normalize_weights", "decoupled_weight_decay"))
    assert [(group["param_names"], group["adapt"], group["momentum"]) for group in optimizer.param_groups] == [
        (["0.weight"], True, 0.6),
        (["3.weight"], False, 0.85),
        (["0.bias", "1.weight", "1.bias", "3.bias"], False, 0.85),
    ]


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [("sgd", torch.optim.SGD, {"momentum": 0.9}), ("adamw", torch.optim.AdamW, {"betas": (0.9, 0.999)})],
)
def test_sgd_and_adamw_are_torchs(name, kind, options):
    """In fp64: AdamW makes a step of what rounding leaves of a gradient that is zero, as a bias before a norm has."""
    optim = OptimConfig(optimizer=name, weight_decay=1e-2, decay_norm_bias=True, precision="fp64")
    model, arena, optimizer = build(optim)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()
    theirs = kind(plain.parameters(), lr=0.1, weight_decay=1e-2, **options)
    train(model, arena, optimizer, range(3), torch.float64)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        theirs.zero_grad()
        plain(torch.randn(8, 6, generator=generator).double()).float().pow(2).sum().backward()
        theirs.param_groups[0]["lr"] = 0.05 * (1 + seed)
        theirs.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("capturable", [False, True])
def test_set_rate_keeps_the_base_decay(capturable):
    _, _, optimizer = build(OptimConfig(weight_decay=0.5, decoupled_weight_decay=True), capturable=capturable)
    rate = optimizer.param_groups[0]["lr"]
    for scale in (0.5, 0.25):
        set_rate(optimizer, 3.0, scale)
    weights, rest = optimizer.param_groups
    assert float(weights["lr"]) == float(rest["lr"]) == 3.0
    assert float(weights["weight_decay"]) == 0.125
    assert float(rest["weight_decay"]) == 0.0
    assert (weights["lr"] is rate) == capturable


def test_set_rate_reads_nothing_from_the_device(monkeypatch):
    """A step would wait for it."""
    _, _, optimizer = build(OptimConfig(weight_decay=0.5, decoupled_weight_decay=True), capturable=True)
    assert isinstance(optimizer.param_groups[0]["weight_decay"], torch.Tensor)
    for name in ("__float__", "item", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a value was read"))
    set_rate(optimizer, 3.0, 0.5)


def test_set_rate_scales_the_decay_of_torchs_optimizers_too():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(param_groups(model, 0.4), lr=1.0)
    for scale in (0.5, 0.25):
        set_rate(optimizer, 3.0, scale)
    weights, rest = optimizer.param_groups
    assert (weights["lr"], weights["weight_decay"], rest["weight_decay"]) == (3.0, 0.1, 0.0)


@pytest.mark.parametrize("capturable", [False, True])
def test_a_table_of_rates_sets_what_set_rate_sets(capturable):
    optim = OptimConfig(weight_decay=0.3, decoupled_weight_decay=True)
    (*_, expected), (*_, optimizer) = (build(optim, capturable=capturable) for _ in range(2))

    def settings(optimizer):
        return [
            (type(value), float(value))
            for group in optimizer.param_groups
            for value in (group["lr"], group["weight_decay"])
        ]

    table, rate = RateTable(optimizer, 3), optimizer.param_groups[0]["lr"]
    table.apply(2)
    assert settings(optimizer) == settings(expected), "before anything is written"
    rates = [(0.1, 0.5), (0.7, 1 / 3), (1e-3, 1.0)]
    table.write(rates[:2])
    table.write(rates)
    for row in (0, 2, 1):
        table.apply(row)
        set_rate(expected, *rates[row])
        assert settings(optimizer) == settings(expected)
    assert (optimizer.param_groups[0]["lr"] is rate) == capturable


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("optimizer_name", ["lars", "sgd", "lamb", "adamw", "muon"])
def test_a_resumed_run_takes_the_same_steps(precision, optimizer_name):
    optim = OptimConfig(optimizer=optimizer_name, precision=precision, momentum_rule="rescaled")
    dtype = working_dtype(precision)
    model, arena, optimizer = build(optim)
    train(model, arena, optimizer, range(3), dtype)
    saved_model = {name: value.clone() for name, value in model.state_dict().items()}
    saved = named_state(optimizer, model)
    train(model, arena, optimizer, range(3, 6), dtype)

    other, other_arena, resumed = build(optim)
    other.load_state_dict(saved_model)
    load_named_state(resumed, other, saved)
    train(other, other_arena, resumed, range(3, 6), dtype)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    for name, value in arena.named_masters().items():
        assert torch.equal(value, other_arena.named_masters()[name])


def test_state_is_by_name_on_the_cpu_and_complete_before_the_first_step():
    model, _, optimizer = build(OptimConfig(precision="bf16"))
    state = named_state(optimizer, model)
    assert set(state) == {
        *(f"momentum_buffer/{name}" for name, _ in model.named_parameters()),
        "master/0.weight",
        "master/0.bias",
        "master/3.weight",
        "master/3.bias",
        "group0/last_lr",
        "group1/last_lr",
    }
    assert all(value.dtype in (torch.float32, torch.float64) for value in state.values())
    state["momentum_buffer/0.weight"].fill_(7.0)  # a copy: the optimizer's own is untouched
    assert not named_state(optimizer, model)["momentum_buffer/0.weight"].any()
    del state["master/0.bias"]
    with pytest.raises(KeyError, match=r"master/0\.bias"):
        load_named_state(optimizer, model, state)


def test_every_name_of_the_config_has_a_rule():
    assert set(OPTIMIZERS) == set(vocabulary.OPTIMIZERS)
