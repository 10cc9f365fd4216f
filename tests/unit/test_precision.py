"""Loss scaling, and the failure that fp32 masters and norms prevent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_half_lars import SETTINGS
from torch import nn

from hyperbatch.arena import Arena
from hyperbatch.errors import InputError
from hyperbatch.optim import LARS, param_groups
from hyperbatch.optim.lars import lars_update
from hyperbatch.optim.precision import LossScaler, working_dtype


def test_names_and_a_misspelt_one():
    assert working_dtype("bf16") == torch.bfloat16
    assert working_dtype("fp64") == torch.float64
    with pytest.raises(InputError, match="did you mean 'fp16'"):
        working_dtype("fp-16")


def build(precision, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2, bias=False)
    arena = Arena(model, ["weight"], dtype=working_dtype(precision))
    optimizer = LARS(param_groups(model, 0.0), lr=0.1, arena=arena)
    return model, arena, optimizer, LossScaler(precision, optimizer, **options)


def test_scale_backs_off_grows_and_counts():
    model, arena, optimizer, scaler = build("fp16", initial_scale=8.0, growth_interval_steps=2)
    scales = []
    for bad in (True, False, False, False, True):
        arena.zero_grad()
        loss = model(torch.ones(1, 4).half()).float().sum()
        scaler.scale(loss * (float("inf") if bad else 1.0)).backward()
        before = model.weight.detach().clone()
        optimizer.step()
        scaler.update()
        assert torch.equal(before, model.weight) == bad
        scales.append(scaler.state_dict()["scale"])
    assert scales == [4.0, 4.0, 8.0, 8.0, 4.0]
    assert scaler.skipped == 2


def test_the_update_does_not_depend_on_the_scale():
    weights = []
    for scale in (1.0, 2.0**12):
        model, arena, optimizer, scaler = build("fp16", initial_scale=scale)
        for _ in range(3):
            arena.zero_grad()
            scaler.scale(model(torch.ones(1, 4).half()).float().pow(2).sum()).backward()
            optimizer.step()
            scaler.update()
        weights.append(arena.named_masters()["weight"].clone())
    # Without the scale some gradients lose digits as fp16 subnormals; with it none does.
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_other_precisions_scale_nothing_but_still_skip(precision):
    model, arena, optimizer, scaler = build(precision)
    loss = torch.ones(())
    assert scaler.scale(loss) is loss
    arena.zero_grad()
    model.weight.grad = torch.full_like(model.weight, float("nan"))
    optimizer.step()
    scaler.update()
    assert scaler.state_dict() == {"scale": 1.0, "good_steps": 0, "skipped": 1}


def test_state_round_trip():
    *_, scaler = build("fp16")
    state = {"scale": 32.0, "good_steps": 7, "skipped": 3}
    scaler.load_state_dict(state)
    assert scaler.state_dict() == state


def test_a_16_bit_loss_does_not_overflow_when_scaled():
    *_, scaler = build("fp16", initial_scale=2.0**16)
    assert torch.isfinite(scaler.scale(torch.ones((), dtype=torch.float16)))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32", "fp64"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_backward_gives_the_bits_of_the_scaled_loss(precision, dtype):
    *_, scaler = build(precision, initial_scale=2.0**12)
    start = torch.linspace(-1, 1, 7, dtype=dtype)
    grads = []
    for run in (scaler.backward, lambda loss: scaler.scale(loss).backward()):
        for shape in ((), (1,)):
            x = start.clone().requires_grad_()
            run((x.exp().sum() / 3).reshape(shape))
            grads.append(x.grad)
    assert all(torch.equal(grad, grads[0]) for grad in grads)
    assert torch.equal(scaler._scale, torch.tensor(2.0**12 if precision == "fp16" else 1.0))
    exact = start.double().exp() / 3 * scaler._scale
    torch.testing.assert_close(grads[0].double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_a_hook_on_the_loss_cannot_change_the_scale():
    *_, scaler = build("fp16", initial_scale=2.0**12)
    loss = torch.ones((), requires_grad=True) * 1
    loss.register_hook(lambda gradient: gradient.mul_(2))
    scaler.backward(loss)
    assert scaler._scale == 2.0**12


def test_lars_in_fp16_stalls_where_ours_converges():
    """The same least-squares problem, 16-bit gradients and weights in both; only the update's precision differs."""
    torch.manual_seed(0)
    inputs, best = torch.randn(256, 32), torch.randn(32, 1)
    target, start = inputs @ best, 1.25 * best

    def grad_of(weight):
        return (2 / len(inputs) * inputs.T @ (inputs @ weight.float() - target)).half()

    def loss_of(weight):
        return (inputs @ weight.float() - target).pow(2).mean().item()

    h = replace(SETTINGS, lr=0.02, weight_decay=0.0, trust_coefficient=0.001)
    weight, buffer = start.half(), torch.zeros_like(start).half()
    param = nn.Parameter(start.half())
    optimizer = LARS([param], lr=0.02)
    first = loss_of(start)
    for _ in range(2000):
        weight, (buffer,), *_ = lars_update(weight, grad_of(weight), buffer, h)  # all of it in fp16
        param.grad = grad_of(param.detach())
        optimizer.step()
    # With momentum a step is 10 lr c |w| = 2e-4 |w|: less than half a unit in fp16's last place, so nothing moves.
    assert loss_of(weight) > 0.9 * first
    assert loss_of(param.detach()) < 0.01 * first
