"""LARS in fp16: every number of it is one that fp16 has, and that costs what it is there to show."""

from __future__ import annotations

import pytest
import torch

from hyperbatch.config import Config
from hyperbatch.errors import InputError
from hyperbatch.optim.build import build_optimizer
from hyperbatch.optim.half_lars import HalfLARS, half_lars_update
from hyperbatch.optim.lars import LARS, LarsSettings, lars_update

SETTINGS = LarsSettings(
    lr=0.5,
    momentum=0.9,
    weight_decay=1e-3,
    trust_coefficient=0.02,
    eps=0.0,
    nesterov=False,
    trust_clip=False,
    momentum_rule="lr_inside",
    decoupled_weight_decay=False,
    maximize=False,
    adapt=True,
)


def layer(size: float = 0.05):
    torch.manual_seed(0)
    return torch.randn(64, 9) * 0.1, torch.randn(64, 9) * size, torch.randn(64, 9) * 1e-3


def test_it_is_lars_to_the_digits_of_fp16():
    half, full = half_lars_update(*layer(), SETTINGS), lars_update(*layer(), SETTINGS)
    assert half.weight.dtype == half.state[0].dtype == half.trust.dtype == half.weight_norm.dtype == torch.float16
    torch.testing.assert_close(half.weight.float(), full.weight, rtol=2e-3, atol=1e-5)
    buffer = full.state[0]  # a sum of three terms that may cancel, each rounded to 11 bits, and twice rescaled
    torch.testing.assert_close(half.state[0].float(), buffer, rtol=0, atol=4 * 2**-11 * buffer.abs().max().item())
    assert half.trust.item() == pytest.approx(full.trust.item(), rel=2e-3)


def test_rates_on_the_device_do_not_widen_it():
    on_device = {name: torch.tensor(getattr(SETTINGS, name)) for name in ("lr", "weight_decay")}
    values = {name: getattr(SETTINGS, name) for name in LarsSettings.__dataclass_fields__}
    half = half_lars_update(*layer(), LarsSettings(**values | on_device))
    assert half.weight.dtype == half.trust.dtype == torch.float16
    torch.testing.assert_close(half.weight, half_lars_update(*layer(), SETTINGS).weight)


def test_small_gradients_and_updates_are_lost():
    weight, grad, buffer = layer(size=1e-9)
    assert lars_update(weight, grad, buffer * 0, SETTINGS).state[0].any()
    values = {name: getattr(SETTINGS, name) for name in LarsSettings.__dataclass_fields__} | {"weight_decay": 0.0}
    lost = half_lars_update(weight, grad, buffer * 0, LarsSettings(**values))
    assert not lost.state[0].any(), "1e-9 is 0 in fp16"
    assert lost.trust == 1


def test_steps_leave_weights_that_fp16_has():
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(8, 8)), torch.nn.Parameter(torch.randn(8))]
    optimizer = HalfLARS(params, lr=0.3, momentum=0.9, weight_decay=1e-2, trust_coefficient=0.02)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    for param in params:
        assert torch.equal(param, param.half().float())
        assert torch.equal(optimizer.state[param]["momentum_buffer"], optimizer.state[param]["momentum_buffer"].half())


def test_the_config_chooses_it():
    from hyperbatch.arena import Arena
    from hyperbatch.models import create_model

    model = create_model("resnet8", classes=4)
    arena = Arena(model, [name for name, _ in model.named_parameters()])
    for precision, kind in (("fp32", LARS), ("fp16", HalfLARS)):
        config = Config().override(lars_precision=precision)
        assert type(build_optimizer(config.optim, model, arena, lr=0.1)) is kind
    with pytest.raises(
        InputError, match="--lars-precision fp16: needs --optimizer lars or sgd, and --no-sharded-update"
    ):
        Config().override(lars_precision="fp16", optimizer="muon")
