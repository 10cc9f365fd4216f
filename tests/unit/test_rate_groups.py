"""Rates per group: the same groups written out by hand for torch's SGD and for our rules give the same weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hyperbatch.arena import Arena
from hyperbatch.config import LayerRate, OptimConfig, ScheduleConfig
from hyperbatch.engine.snapshot import load_named_state, named_state
from hyperbatch.errors import InputError
from hyperbatch.optim import LAMB, LARS
from hyperbatch.optim.base import LayerwiseOptimizer
from hyperbatch.optim.build import build_optimizer, group_summary, set_rate
from hyperbatch.params import head_weight
from hyperbatch.schedule import learning_rate

SCHEDULE = ScheduleConfig(epochs=8.0, lr=0.02, warmup_epochs=2.0, decay_power=1.0, end_lr=0.0)
STEPS_PER_EPOCH = 2
SCALED = {"bias_lr_scale": 8.0, "head_lr_scale": 0.25, "whiten_bias_epochs": 3.0}


def network() -> nn.Sequential:
    """A whitening layer (8 outputs for the 4 elements of a patch), a frozen norm scale, and two linear layers."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 8, 2), nn.Tanh(), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 9, 6), nn.Linear(6, 3))
    model = nn.Sequential(*layers).double()
    for index in (0, 2):
        model[index].weight.requires_grad_(False)  # type: ignore[union-attr]
    return model


HEAD, EARLY = "5.weight", "0.bias"
BIASES, WEIGHTS = ["2.bias", "4.bias", "5.bias"], ["4.weight"]


def build(capturable: bool = False, **values) -> tuple[nn.Module, Arena, LayerwiseOptimizer]:
    model = network()
    arena = Arena(
        model, [name for name, param in model.named_parameters() if param.requires_grad][::-1], dtype=torch.float64
    )
    optim = OptimConfig(**{"decay_norm_bias": True, "weight_decay": 0.01, **SCALED, **values})
    return model, arena, build_optimizer(optim, model, arena, lr=SCHEDULE.lr, capturable=capturable)


def rates(step: int) -> tuple[float, float]:
    epoch = step / STEPS_PER_EPOCH
    return learning_rate(SCHEDULE, epoch), learning_rate(SCHEDULE, epoch, ends_epoch=3.0)


def backward(model: nn.Module, step: int) -> None:
    images = torch.randn(6, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    (model(images) - 1).square().mean().backward()


def train(model, arena, optimizer, steps) -> None:
    for step in steps:
        arena.zero_grad()
        backward(model, step)
        rate, early = rates(step)
        set_rate(optimizer, rate, early_lr=early)
        optimizer.step()


def by_hand(optimizer_of) -> nn.Module:
    """Trained with a group for each kind; its rate and decay are written out."""
    model = network()
    groups = {
        name: {"params": [dict(model.named_parameters())[n] for n in names], "weight_decay": decay, "adapt": adapt}
        for name, names, decay, adapt in (
            ("weights", WEIGHTS, 0.01, True),
            ("head", [HEAD], 0.01 / 0.25, True),
            ("biases", BIASES, 0.01 / 8, False),
            ("early", [EARLY], 0.01 / 8, False),
        )
    }
    optimizer = optimizer_of(list(groups.values()))
    for step in range(8 * STEPS_PER_EPOCH):
        optimizer.zero_grad()
        backward(model, step)
        rate, early = rates(step)
        for group, lr in zip(optimizer.param_groups, (rate, 0.25 * rate, 8 * rate, 8 * early), strict=True):
            group["lr"] = lr
        optimizer.step()
    return model


@pytest.mark.parametrize("capturable", [False, True])
def test_sgd_is_torchs_with_the_same_groups(capturable):
    model, arena, optimizer = build(optimizer="sgd", momentum=0.85, nesterov=True, capturable=capturable)
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    held = [group["lr"] for group in optimizer.param_groups]
    train(model, arena, optimizer, range(8 * STEPS_PER_EPOCH))
    if capturable:  # a captured graph reads these very tensors
        assert all(group["lr"] is lr for group, lr in zip(optimizer.param_groups, held, strict=True))
    expected = by_hand(lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.85, nesterov=True))
    for (name, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=1e-6, atol=1e-7, msg=name)
        assert torch.equal(param, start[name]) != param.requires_grad, name


RULES = {
    "lars": (
        {"optimizer": "lars", "trust_coefficient": 0.05},
        lambda groups: LARS(groups, lr=1.0, trust_coefficient=0.05),
    ),
    "lamb": ({"optimizer": "lamb"}, lambda groups: LAMB(groups, lr=1.0)),
}


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize(("options", "optimizer_of"), RULES.values(), ids=RULES)
def test_other_rules_take_each_groups_rate(options, optimizer_of, capturable):
    model, arena, optimizer = build(capturable=capturable, **options)
    train(model, arena, optimizer, range(8 * STEPS_PER_EPOCH))
    for param, other in zip(model.parameters(), by_hand(optimizer_of).parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=1e-6, atol=1e-7)
    assert set(optimizer.trust_ratios()) == {*WEIGHTS, HEAD}, "the report shows every adapted layer of every group"


def test_an_early_end_freezes_the_bias_for_good():
    model, arena, optimizer = build(optimizer="sgd", momentum=0.85)
    bias = model.get_parameter(EARLY)
    train(model, arena, optimizer, range(3 * STEPS_PER_EPOCH))
    then = bias.detach().clone()
    other = model.get_parameter("2.bias").detach().clone()
    train(model, arena, optimizer, range(3 * STEPS_PER_EPOCH, 8 * STEPS_PER_EPOCH))
    assert torch.equal(bias, then)
    assert not torch.equal(model.get_parameter("2.bias"), other)


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("optimizer_name", ["sgd", "lars", "lamb"])
def test_a_continued_run_takes_the_same_steps(optimizer_name, by_name):
    """From a checkpoint's state by name, and from torch's state dict."""
    options = {"optimizer": optimizer_name, "momentum_rule": "rescaled"}
    model, arena, optimizer = build(**options)
    train(model, arena, optimizer, range(5))
    other, other_arena, resumed = build(**options)
    other.load_state_dict(model.state_dict())
    if by_name:
        load_named_state(resumed, other, named_state(optimizer, model))
    else:
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [group["lr_scale"] for group in resumed.param_groups] == [1.0, 0.25, 8.0, 8.0]
    assert [group["ends_early"] for group in resumed.param_groups] == [False, False, True, False]
    train(model, arena, optimizer, range(5, 10))
    train(other, other_arena, resumed, range(5, 10))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_decoupled_decay_keeps_its_size():
    """No rate multiplies it, so there is nothing to make up for."""
    *_, optimizer = build(decoupled_weight_decay=True)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.01}


@pytest.mark.parametrize("decoupled", [False, True])
def test_layer_decay_multiplies_all_other_factors_and_what_the_rate_does_not_decay(decoupled):
    model, _, optimizer = build(
        optimizer="lars",
        layer_decay=0.5,
        layer_rates=(LayerRate("2", 3.0),),
        whiten_bias_epochs=None,
        decoupled_weight_decay=decoupled,
    )
    groups = {name: group for group in optimizer.param_groups for name in group["param_names"]}
    # Three weights, so three layers: the convolution with its norm, then a linear layer, then the head.
    layer = {"0.bias": 0.25, "2.bias": 0.25 * 3, "4.weight": 0.5, "4.bias": 0.5, "5.weight": 1.0, "5.bias": 1.0}
    kind = {name: 0.25 if name == HEAD else 8.0 if name.endswith("bias") else 1.0 for name in layer}
    assert {name: group["lr_scale"] for name, group in groups.items()} == {n: layer[n] * kind[n] for n in layer}
    for name, group in groups.items():  # a rate multiplies it, or it has the layer's factor itself
        assert group["weight_decay"] == (0.01 * layer[name] if decoupled else 0.01 / kind[name]), name
    summary = group_summary(OptimConfig(layer_decay=0.5, weight_decay=0.01), model)
    assert [(row.factor, row.count.tensors) for row in summary.factors] == [(0.25, 2), (0.5, 2), (1.0, 2)]
    assert (summary.decayed.tensors, summary.undecayed.tensors) == (2, 4)
    assert group_summary(OptimConfig(weight_decay=0.0), model).decayed.tensors == 0


def test_without_factors_the_groups_are_the_two_of_param_groups():
    *_, optimizer = build(bias_lr_scale=1.0, head_lr_scale=1.0, whiten_bias_epochs=None)
    assert [group["param_names"] for group in optimizer.param_groups] == [[*WEIGHTS, HEAD], [EARLY, *BIASES]]


def test_a_model_without_such_a_layer_is_refused():
    for model, values, message in (
        (nn.Sequential(nn.Conv2d(1, 2, 3)), {"head_lr_scale": 2.0}, "has no linear layer"),
        (nn.Sequential(nn.Conv2d(1, 2, 3)), {"whiten_bias_epochs": 1.0}, "has 2 outputs, not 18"),
        (nn.Sequential(nn.Conv2d(1, 8, 2, bias=False)), {"whiten_bias_epochs": 1.0}, "0 of Sequential has no bias"),
    ):
        with pytest.raises(InputError, match=message):
            build_optimizer(
                OptimConfig(**values), model, Arena(model, [n for n, _ in model.named_parameters()]), lr=0.1
            )


def test_the_head_is_the_last_linear_layer():
    assert head_weight(network()) == HEAD
    assert head_weight(nn.Conv2d(1, 1, 1)) is None
