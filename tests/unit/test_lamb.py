"""LAMB against its formula in numpy, AdamW, and its own two paths against each other."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from hyperbatch.optim import LAMB, AdamW, param_groups

every_path = pytest.mark.parametrize("foreach", [False, True])


@every_path
@pytest.mark.parametrize("clip", [False, True])
def test_it_follows_the_paper(foreach, clip):
    rng = np.random.default_rng(1)
    w, grads = rng.normal(size=(4, 6)), rng.normal(size=(5, 4, 6))
    param = nn.Parameter(torch.tensor(w))
    optimizer = LAMB([param], lr=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.02, trust_clip=clip, foreach=foreach)
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(grads, start=1):
        param.grad = torch.tensor(g)
        optimizer.step()
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
        u = (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-3) + 0.02 * w
        trust = np.linalg.norm(w) / np.linalg.norm(u)
        w = w - 0.1 * (min(trust, 1.0) if clip else trust) * u
    np.testing.assert_allclose(param.detach().numpy(), w, rtol=1e-10)


@every_path
def test_without_trust_it_is_adamw(foreach):
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(20, dtype=torch.float64))
    theirs = copy.deepcopy(ours)
    # AdamW decays by lr wd w beside the Adam step: the same sum.
    lamb = LAMB([{"params": [ours], "adapt": False}], lr=0.01, eps=1e-8, weight_decay=0.1, foreach=foreach)
    adamw = torch.optim.AdamW([theirs], lr=0.01, eps=1e-8, weight_decay=0.1)
    assert_same_steps(lamb, adamw)


@every_path
def test_adamw_has_torchs_defaults_and_adapts_no_group(foreach):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)).double()
    copied = copy.deepcopy(model)
    assert_same_steps(AdamW(model.parameters(), foreach=foreach), torch.optim.AdamW(copied.parameters()))
    groups, theirs = param_groups(model, weight_decay=0.1), param_groups(copied, weight_decay=0.1)
    assert [group["adapt"] for group in groups] == [True, False]
    ours = AdamW(groups, lr=0.01, foreach=foreach)
    assert ours.adapted_names() == set()
    assert_same_steps(ours, torch.optim.AdamW(theirs, lr=0.01))


def assert_same_steps(ours: LAMB, theirs: torch.optim.AdamW) -> None:
    pairs = [
        (a, b)
        for group, their_group in zip(ours.param_groups, theirs.param_groups, strict=True)
        for a, b in zip(group["params"], their_group["params"], strict=True)
    ]
    for _ in range(5):
        for a, b in pairs:
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        ours.step()
        theirs.step()
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@every_path
def test_skipping_scaling_masters_and_zero_weights(foreach):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(8).half()), nn.Parameter(torch.zeros(3))]
    plain = [nn.Parameter(p.detach().float()) for p in params]
    optimizer, expected = LAMB(params, lr=0.01, foreach=foreach), LAMB(plain, lr=0.01, foreach=foreach)
    optimizer.grad_scale = torch.tensor(64.0)
    for step in range(4):
        for a, b in zip(params, plain, strict=True):
            b.grad = torch.randn_like(b).half().float()
            a.grad = (b.grad * 64).to(a.dtype)
        if step == 0:  # the very first: its bias corrections are 0
            params[0].grad[0] = float("inf")
        optimizer.step()
        if step:
            expected.step()
    assert optimizer.param_groups[0]["step"] == 3
    assert optimizer.skipped_steps == 1
    torch.testing.assert_close(optimizer.state[params[0]]["master"], plain[0].detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(params[1], plain[1], rtol=1e-6, atol=1e-7)
    assert params[1].detach().any()


def test_bad_settings_name_the_argument():
    for options, message in (({"betas": (1.0, 0.9)}, "betas"), ({"lr": -1.0}, "lr"), ({"eps": -1.0}, "eps")):
        with pytest.raises(ValueError, match=message):
            LAMB([nn.Parameter(torch.ones(2))], **options)
