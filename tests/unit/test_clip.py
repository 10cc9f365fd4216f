"""Clipping by the norm of the whole gradient against torch's clip_grad_norm_, with and without a loss scale.

In the process with Triton's interpreter (`interpreter.py`), the optimizers' kernels take the clipped gradients.
"""

from __future__ import annotations

import pytest
import torch
from interpreter import INTERPRETED, outside, run_by_the_interpreter
from torch import nn

from hyperbatch.arena import Arena
from hyperbatch.comm import GradSync, GridComm
from hyperbatch.config import OptimConfig
from hyperbatch.errors import InputError
from hyperbatch.optim import LARS, param_groups
from hyperbatch.optim.build import build_optimizer
from hyperbatch.optim.clip import GradientClip
from hyperbatch.optim.precision import LossScaler, working_dtype
from hyperbatch.plan.strategies import plan_groups
from hyperbatch.plan.types import RankGrid

WIDTH = 12


@outside
def test_kernels_by_the_interpreter():
    run_by_the_interpreter(__file__)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 30), nn.Tanh(), nn.LayerNorm(30), nn.Linear(30, 5))


def batches(count: int = 3) -> list[torch.Tensor]:
    """Every other one has gradients ten times as large."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(6, WIDTH, generator=generator) * (1 if i % 2 else 10) for i in range(count)]


class Ours:
    def __init__(self, precision: str, limit: float, **optim) -> None:
        from hyperbatch.models.layers import adopt

        self.model = adopt(network()).to(working_dtype(precision) if precision == "fp64" else torch.float32)
        names = [name for name, _ in self.model.named_parameters()][::-1]
        self.arena = Arena(self.model, names, dtype=working_dtype(precision), copy_on_ready=False)
        config = OptimConfig(precision=precision, **optim)
        self.sync = GradSync(self.arena, plan_groups(self.arena.specs, "single"), GridComm(RankGrid(1, 1)))
        self.optimizer = build_optimizer(config, self.model, self.arena, lr=0.05)
        self.scaler = LossScaler(precision, self.optimizer, initial_scale=8.0)
        self.clip = GradientClip(limit, self.arena, self.sync, self.optimizer) if limit else None

    def step(self, x: torch.Tensor) -> None:
        self.arena.zero_grad()
        self.sync.begin()
        out = self.model(x.to(next(self.model.parameters()).dtype))
        self.scaler.backward(out.to(torch.promote_types(out.dtype, torch.float32)).square().sum())
        self.sync.finish()
        if self.clip is not None:
            self.clip.measure()
        self.optimizer.step()
        self.scaler.update()

    def weights(self) -> torch.Tensor:
        masters = self.arena.named_masters()
        named = [(name, masters.get(name, param)) for name, param in self.model.named_parameters()]
        return torch.cat([tensor.detach().double().flatten() for _, tensor in sorted(named, key=lambda item: item[0])])


def torchs(optimizer: str, limit: float) -> torch.Tensor:
    model = network().double()
    weights = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    if optimizer == "adamw":
        theirs = torch.optim.AdamW(groups, lr=0.05, betas=(0.9, 0.999), eps=1e-8, foreach=True)
    else:
        theirs = torch.optim.SGD(groups, lr=0.05, momentum=0.9, foreach=True)
    for x in batches():
        theirs.zero_grad()
        model(x.double()).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), limit, foreach=True)
        theirs.step()
    named = sorted(model.named_parameters(), key=lambda item: item[0])
    return torch.cat([param.detach().flatten() for _, param in named])


def ours(precision: str, limit: float, **optim) -> torch.Tensor:
    run = Ours(precision, limit, **optim)
    for x in batches():
        run.step(x)
    return run.weights()


OPTIMIZERS = {
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1},
    "sgd": {"optimizer": "sgd", "weight_decay": 0.1, "momentum_rule": "lr_outside"},
}


@pytest.mark.skipif(INTERPRETED, reason="the kernels do not compute in fp64")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("limit", [1.0, 30.0, 1e6])
def test_equals_torchs_in_float64(name, limit):
    # torch adds 1e-6 to the norm before it divides: 1e-6 of a norm of 1 and more.
    torch.testing.assert_close(ours("fp64", limit, **OPTIMIZERS[name]), torchs(name, limit), rtol=2e-6, atol=2e-7)


def test_16_bit_gradients_are_clipped_without_their_loss_scale():
    """bf16 has no loss scale, fp16 one of 8; both stay near float64, and far from what is not clipped."""
    expect = torchs("sgd", 1.0)
    loose = (torchs("sgd", 1e6) - expect).norm()
    for precision, share in (("fp16", 1e-3),) if INTERPRETED else (("fp32", 1e-6), ("fp16", 1e-3), ("bf16", 1e-2)):
        assert (ours(precision, 1.0, **OPTIMIZERS["sgd"]) - expect).norm() < share * loose


@outside
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_limit_that_no_gradient_reaches_changes_no_bit(precision):
    for optim in OPTIMIZERS.values():
        assert torch.equal(ours(precision, 1e30, **optim), ours(precision, 0.0, **optim))


@pytest.mark.parametrize("precision", ["fp16"] if INTERPRETED else ["fp32", "fp16"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_infinite_gradient_skips_the_step(precision, bad):
    run = Ours(precision, 1.0, **OPTIMIZERS["adamw"])
    run.step(batches()[0])
    before = run.weights()
    run.step(batches()[1] * bad)
    assert torch.equal(run.weights(), before)
    assert int(run.scaler.skipped) == 1
    run.step(batches()[2])
    assert run.weights().isfinite().all()
    assert not torch.equal(run.weights(), before)


@outside
def test_a_parameter_without_a_gradient_counts_as_zero():
    run = Ours("fp32", 1.0, **OPTIMIZERS["sgd"])
    run.step(batches()[0])
    run.arena.zero_grad()
    run.sync.begin()
    run.model[0].weight.sum().backward()  # ones: a norm of sqrt(12 * 30)
    run.sync.finish()
    assert run.clip is not None
    run.clip.measure()
    assert run.optimizer.scale_of_grads().item() == pytest.approx((WIDTH * 30) ** 0.5)


@outside
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_loop_of_ones_own_clips_by_the_loss_scaler(precision):
    """torch's clip_grad_norm_ would clip gradients that are 65,536 times too large."""
    limit, groups = 1.0, (lambda model: param_groups(model, 0.1))
    model, reference = network(), network().double()
    plain = [{**group, "adapt": False} for group in groups(model)]
    optimizer = LARS(plain, lr=0.05, momentum=0.9, momentum_rule="lr_outside")
    theirs = torch.optim.SGD(groups(reference), lr=0.05, momentum=0.9)
    scaler = LossScaler(precision, optimizer, growth_interval_steps=2)
    for i, x in enumerate(batches(6)):
        optimizer.zero_grad()
        scaler.backward(model(x).square().sum())
        theirs.zero_grad()
        reference(x.double()).square().sum().backward()
        if i % 3:  # the others are not clipped
            norm = scaler.clip_grad_norm_(limit)
            expect = nn.utils.clip_grad_norm_(reference.parameters(), limit)
            torch.testing.assert_close(norm.double(), expect, rtol=1e-5, atol=0)
        optimizer.step()
        scaler.update()
        theirs.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
    assert scaler.state_dict()["scale"] == (2.0**19 if precision == "fp16" else 1.0)
    with pytest.raises(InputError, match="max_norm is 0; give a positive number"):
        scaler.clip_grad_norm_(0)
