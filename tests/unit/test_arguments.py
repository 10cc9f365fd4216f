"""Arguments of the wrong kind: one line that names the argument and its value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hyperbatch import (
    LAMB,
    LARS,
    AdamW,
    Arena,
    GradSync,
    GridComm,
    GridHookState,
    InputError,
    LossScaler,
    Muon,
    RankGrid,
    all_reduce,
    backward_order,
    broadcast_weights,
    create_model,
    ddp_bucket_bytes,
    ddp_kwargs,
    param_groups,
    param_specs,
    plan_groups,
    register_ddp_hook,
)

ORDER = ["weight", "bias"]


def layer() -> nn.Linear:
    return nn.Linear(4, 4)


def with_arena() -> tuple[nn.Linear, Arena]:
    model = layer()
    return model, Arena(model, ORDER)


def sync(**changes) -> GradSync:
    arena = Arena(layer(), ORDER)
    parts = {"arena": arena, "plan": plan_groups(arena.specs, "single"), "comm": GridComm(RankGrid(1, 1))}
    return GradSync(**{**parts, **changes})


def hook(**options) -> GridHookState:
    return GridHookState(GridComm(RankGrid(1, 1)), **options)


def reduced(tensor=None, **options) -> None:
    all_reduce(torch.ones(2) if tensor is None else tensor, GridComm(RankGrid(1, 1)), **options)


def scaler(precision: Any = "fp16", optimizer=None, **options) -> LossScaler:
    return LossScaler(precision, optimizer or LARS(layer().parameters(), lr=0.1), **options)


SETTINGS = [
    (LARS, {"lr": "0.1"}, "lr must be a number, not '0.1'"),
    (LARS, {"lr": [0.1]}, "lr must be a number, not [0.1]"),
    (LARS, {"lr": float("inf")}, "lr must be finite, but is inf"),
    (LARS, {"lr": torch.tensor(-1.0)}, "lr must not be negative, but is -1.0"),
    (LARS, {"momentum": None}, "momentum must be a number, not None"),
    (LARS, {"weight_decay": None}, "weight_decay must be a number, not None"),
    (LARS, {"trust_coefficient": "1"}, "trust_coefficient must be a number, not '1'"),
    (LARS, {"nesterov": "no"}, "nesterov must be True or False, not 'no'"),
    (LARS, {"arena": layer()}, "give the Arena of the model"),
    (LARS, {"arena": with_arena()[1]}, "arena holds none of the parameters; give the Arena of the same model"),
    (LAMB, {"betas": 0.9}, "betas must be two numbers in [0, 1), not 0.9"),
    (LAMB, {"betas": (0.9,)}, "betas must be two numbers in [0, 1), not (0.9,)"),
    (LAMB, {"betas": (0.9, None)}, "betas must be two numbers in [0, 1), not (0.9, None)"),
    (LAMB, {"eps": torch.tensor(-1.0)}, "eps must not be negative, but is -1.0"),
    (Muon, {"coefficients": None}, "three numbers per iteration, not None"),
    (Muon, {"coefficients": [(1, 2, 3), 4]}, "three numbers per iteration, not [(1, 2, 3), 4]"),
    (Muon, {"product_dtype": "bf16"}, "product_dtype must be a floating-point dtype of torch or None, not 'bf16'"),
    (Muon, {"product_dtype": torch.int8}, "not torch.int8"),
]


@pytest.mark.parametrize(("kind", "options", "message"), SETTINGS)
def test_settings_of_optimizers(kind, options, message):
    with pytest.raises(ValueError) as raised:
        kind(layer().parameters(), **{"lr": 0.1, **options})
    assert message in str(raised.value)


def test_a_setting_of_one_group():
    with pytest.raises(ValueError, match="adapt must be True or False, not 'no'"):
        LARS([{"params": layer().parameters(), "adapt": "no"}], lr=0.1)


@pytest.mark.parametrize(
    ("key", "meant"), [("adpat", "adapt"), ("weigth_decay", "weight_decay"), ("momentun", "momentum")]
)
def test_a_misspelt_key_of_a_group(key, meant):
    with pytest.raises(ValueError, match=f"'{key}' is no setting of a param group; did you mean '{meant}'"):
        LARS([{"params": layer().parameters(), key: 0}], lr=0.1)


@pytest.mark.parametrize(("key", "value"), [("maximize", True), ("amsgrad", True), ("decoupled_weight_decay", False)])
def test_a_setting_of_torchs_that_would_do_nothing_is_named(key, value):
    """A group of torch's optimizers with the values that change nothing is accepted."""
    groups = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]).state_dict()["param_groups"]
    group = {**groups[0], "params": [torch.nn.Parameter(torch.ones(3))]}
    AdamW([group])
    with pytest.raises(ValueError, match=f"{key}={value} is a setting of torch's optimizers that this one does not"):
        AdamW([{**group, key: value}])


def test_groups_may_have_keys_of_ones_own():
    keys = (
        "name",
        "lr_scale",
        "initial_lr",
        "max_lr",
        "min_lr",
        "base_momentum",
        "max_momentum",
        "dampening",
        "tag",
        7,
    )
    for kind in (LARS, LAMB, Muon):
        group = {"params": layer().parameters(), **dict.fromkeys(keys, 0)}
        assert group.items() >= {key: kind([group], lr=0.1).param_groups[0][key] for key in keys}.items()


CALLS = {
    "rows and columns must be positive whole numbers": lambda: RankGrid("2", 1),
    "grid 2.0x1: rows and columns": lambda: RankGrid(2.0, 1),
    "grid is (1, 1); give a RankGrid(rows, columns)": lambda: GridComm((1, 1)),
    "ranks is [0]; give 1 rows of 1 ranks": lambda: GridComm(RankGrid(1, 1), ranks=[0]),
    "timeout is 5; give a datetime.timedelta": lambda: GridComm(RankGrid(1, 1), timeout=5),
    "algorithm None is unknown; known: flat": lambda: reduced(algorithm=None),
    "wire_dtype is 'bf16'; give one of torch.float16": lambda: reduced(wire_dtype="bf16"),
    "wire_dtype is torch.int8;": lambda: reduced(wire_dtype=torch.int8),  # which would round gradients to 0
    "hybrid_switch_bytes is '1'; give a number": lambda: reduced(hybrid_switch_bytes="1"),
    "tensor is [1.0]; give a torch.Tensor": lambda: reduced([1.0]),
    "comm is None; give a GridComm": lambda: all_reduce(torch.ones(2), None),
    "arena is a value of type Sequential; give the Arena": lambda: sync(arena=nn.Sequential(layer(), layer())),
    "plan is None; give the GroupPlan": lambda: sync(plan=None),
    "comm is 2; give a GridComm": lambda: sync(comm=2),
    "wire_dtype is 'fp16'; give one of": lambda: sync(wire_dtype="fp16"),
    "comm is 'world'; give a GridComm": lambda: GridHookState("world"),
    "wire_dtype is 16; give one of": lambda: hook(wire_dtype=16),
    "hybrid_switch_bytes is None; give a number": lambda: hook(hybrid_switch_bytes=None),
    "give a DistributedDataParallel": lambda: register_ddp_hook(layer(), GridComm(RankGrid(1, 1))),
    "ddp_model is None; give a Distributed": lambda: ddp_bucket_bytes(None),
    "plan is 'cubic'; give the GroupPlan": lambda: ddp_kwargs("cubic"),
    "grouping None is unknown; known: cubic": lambda: plan_groups(layer(), None),
    "grouping option count is 2.5; give a whole number": lambda: plan_groups(layer(), "equal", count=2.5),
    "grouping option base is 0; give a whole number of at least 1": lambda: plan_groups(layer(), "cubic", base=0),
    "an element of params is": lambda: plan_groups([nn.Parameter(torch.ones(2))], "single"),
    "3 has no named parameters; give a torch module": lambda: plan_groups(3, "single"),
    "order names 'weights', which is not a trainable parameter": lambda: param_specs(layer(), ["weights"]),
    "model is None; give a torch module": lambda: Arena(None, ORDER),
    "dtype is 'bf16'; give one of torch.float16": lambda: Arena(layer(), ORDER, dtype="bf16"),
    "dtype is torch.int8; give one of": lambda: Arena(layer(), ORDER, dtype=torch.int8),
    "order is None; give the names of backward_order": lambda: Arena(layer(), None),
    "order is 'weight'; give the names": lambda: Arena(layer(), "weight"),
    "twice ['bias']": lambda: Arena(layer(), [*ORDER, "bias"]),
    "unknown precision None; known: bf16": lambda: scaler(None),
    # torch's would step with gradients that are as much too large as the scale is
    "whose steps divide by the loss scale": lambda: scaler(optimizer=torch.optim.SGD(layer().parameters(), 0.1)),
    "initial_scale is -1.0; give a positive number": lambda: scaler(initial_scale=-1.0),
    "growth_factor is 0.5; give a number above 1": lambda: scaler(growth_factor=0.5),
    "backoff_factor is 2.0; give a number between 0 and 1": lambda: scaler(backoff_factor=2.0),
    "growth_interval_steps is 0; give a whole number": lambda: scaler(growth_interval_steps=0),
    "comm is 4; give a GridComm": lambda: Muon(layer().parameters(), lr=0.1).share(4),
    "has computed no gradient of the model; give a function that ends with loss.backward()": lambda: backward_order(
        layer(), lambda: None
    ),
    "arena is Linear(in_features=4, out_features=4, bias=True); give the Arena": lambda: broadcast_weights(
        layer(), GridComm(RankGrid(1, 1))
    ),
    "comm is 'gloo'; give a GridComm": lambda: broadcast_weights(with_arena()[1], "gloo"),
    "classes is '10'; give a whole number": lambda: create_model("resnet8", classes="10"),
    "in_channels is 0; give a whole number": lambda: create_model("resnet8", in_channels=0),
    "model is [1]; give a torch module": lambda: param_groups([1], 0.1),
    "weight_decay is None; give a number": lambda: param_groups(layer(), None),
    "layer_decay is 0; give a number above 0": lambda: param_groups(layer(), 0.1, layer_decay=0, lr=0.1),
    "lr is 'high'; give a number": lambda: param_groups(layer(), 0.1, lr="high"),
}


@pytest.mark.parametrize("message", CALLS)
def test_calls(message):
    with pytest.raises(InputError) as raised:
        CALLS[message]()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
