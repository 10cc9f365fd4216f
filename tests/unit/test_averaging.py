"""Averaged weights against torch's own average and the rule as it is written down."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hyperbatch.arena import Arena
from hyperbatch.config import Config
from hyperbatch.errors import InputError
from hyperbatch.optim import LARS
from hyperbatch.optim.averaging import WeightAverage, average, new_share_at
from hyperbatch.vocabulary import AVERAGING

DECAY = 0.9


def settings(**values):
    return Config().override(**{"averaging": "ema", "averaging_decay": DECAY, **values}).optim


def setting_up(dtype=torch.float32, device="cpu", **values):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 16, 4))
    if dtype == torch.float64:
        model.double()
    model.to(device)
    order = [name for name, _ in reversed(list(model.named_parameters()))]
    arena = Arena(model, order, dtype=dtype)
    optimizer = LARS(model.parameters(), lr=0.5, trust_coefficient=0.05, arena=arena)
    return model, arena, optimizer, WeightAverage(settings(**values), model, arena, optimizer)


def step(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(16, 3, 6, 6, generator=generator)
    param = next(model.parameters())
    images = images.to(param.device, param.dtype)
    optimizer.zero_grad()
    model(images).float().square().mean().backward()
    optimizer.step()


def full(arena, model):
    """Weights in full precision and floating-point buffers, by name."""
    masters = arena.named_masters()
    weights = {name: masters.get(name, param).detach().clone() for name, param in model.named_parameters()}
    return weights | {name: b.clone() for name, b in model.named_buffers() if b.is_floating_point()}


def held(weight_average):
    return {n: t.clone() for n, t in (weight_average.weights() | weight_average.statistics()).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("every", [1, 3])
def test_the_ema_equals_torchs(dtype, every):
    model, _, optimizer, ours = setting_up(dtype, averaging_every_steps=every)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)
    for number in range(1, 8):
        step(model, optimizer, number)
        share = new_share_at(ours.config, step=number, done=number / 7)
        assert (share is None) == bool(number % every)
        if share is not None:
            ours.set_share(share)
            ours.update()
            theirs.update_parameters(model)
    wanted = dict(theirs.module.named_parameters()) | dict(theirs.module.named_buffers())
    found = held(ours)
    assert found.keys() == {name for name in wanted if "num_batches" not in name}
    for name, value in found.items():
        assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize("kind", ["ema", "lookahead"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_updates_follow_the_rule(dtype, kind):
    """Averages are kept in full precision, also of 16-bit weights; lookahead sets weights, masters and statistics."""
    model, arena, optimizer, ours = setting_up(dtype, averaging=kind)
    expected = full(arena, model)
    for number, share in enumerate((0.7, 0.25, 1.0, 0.0)):
        step(model, optimizer, number)
        now = full(arena, model)
        ours.set_share(share)
        ours.update()
        expected = {name: average(expected[name], now[name], share) for name in now}
        for name, value in held(ours).items():
            assert value.dtype == torch.promote_types(dtype, torch.float32)
            torch.testing.assert_close(value, expected[name], msg=name)
        after = full(arena, model)
        wanted = held(ours) if kind == "lookahead" else now
        assert all(torch.equal(after[name], wanted[name]) for name in after)
        for slot in arena.slots:
            assert torch.equal(slot.param, after[slot.name].to(slot.dtype)), "working weights follow the masters"
        expected = held(ours)


def test_a_share_of_zero_keeps_the_average_and_one_replaces_it():
    model, arena, optimizer, ours = setting_up()
    before = held(ours)
    step(model, optimizer, 0)
    ours.set_share(0.0)
    ours.update()
    assert all(torch.equal(value, before[name]) for name, value in held(ours).items())
    ours.set_share(1.0)
    ours.update()
    assert all(torch.equal(value, full(arena, model)[name]) for name, value in held(ours).items())


def test_padding_of_the_arena_stays_zero():
    model, arena, optimizer, ours = setting_up(averaging="lookahead")
    for number in range(3):
        step(model, optimizer, number)
        ours.set_share(0.5)
        ours.update()
    flat = arena.weights[torch.float32].clone()
    for slot in arena.slots:
        flat[slot.offset : slot.offset + slot.numel] = 0
    assert flat.count_nonzero() == 0


def test_a_reset_and_a_load_write_in_place():
    """Captured graphs read and write the same tensors in the next run."""
    model, arena, optimizer, ours = setting_up()
    places = [tensor.data_ptr() for tensor in ours.tensors()]
    kept = held(ours)
    step(model, optimizer, 0)
    ours.reset()
    assert all(torch.equal(value, full(arena, model)[name]) for name, value in held(ours).items())
    weights = {slot.name for slot in arena.slots}
    ours.load(
        {name: value for name, value in kept.items() if name in weights},
        {name: value for name, value in kept.items() if name not in weights},
    )
    assert all(torch.equal(value, kept[name]) for name, value in held(ours).items())
    assert [tensor.data_ptr() for tensor in ours.tensors()] == places


def test_a_model_without_buffers():
    model = nn.Linear(3, 2)
    arena = Arena(model, ["bias", "weight"])
    optimizer = LARS(model.parameters(), lr=0.1, arena=arena)
    ours = WeightAverage(settings(averaging="lookahead"), model, arena, optimizer)
    ours.update()
    assert ours.statistics() == {}


def test_what_a_step_does_is_known_beforehand():
    ema = settings(averaging_every_steps=5)
    assert [new_share_at(ema, step=n, done=n / 20) for n in (1, 4, 5, 6, 10, 20)] == [
        None,
        None,
        1.0,
        None,
        1 - DECAY,
        1 - DECAY,
    ]
    ahead = settings(averaging="lookahead", averaging_every_steps=5, averaging_decay=0.95**5, averaging_power=3.0)
    shares = [new_share_at(ahead, step=n, done=n / 22) for n in range(1, 23)]
    assert [n for n, share in enumerate(shares, 1) if share is not None] == [5, 10, 15, 20, 22]
    assert shares[9] == 1 - 0.95**5 * (10 / 22) ** 3
    assert shares[-1] == 0.0, "the run ends with the average itself"
    none = settings(averaging="none")
    assert new_share_at(none, step=1, done=1.0) is None
    assert AVERAGING == ("none", "ema", "lookahead")


def test_what_cannot_be_averaged_is_refused():
    with pytest.raises(InputError, match=r"--averaging ema: in 16 bits, cannot be combined with --sharded-update"):
        Config().override(averaging="ema", sharded_update=True, precision="bf16")
    Config().override(averaging="ema", sharded_update=True, precision="fp32")
    with pytest.raises(InputError, match=r"--averaging-decay 1: must be in \[0, 1\)"):
        Config().override(averaging_decay=1.0)
