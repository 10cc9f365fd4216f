"""Max-pool, norm and smooth activations in kernels, and the whole fused network, by Triton's interpreter.

The interpreter is chosen by an environment variable at import, so this file runs itself once more in a process that
has it; there the tests below do the work.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
from hopper import compile_launches
from torch import nn
from torch.nn import functional as F
from unit_reference import check, make

from hyperbatch.models import create_model
from hyperbatch.models.fused import why_not_fused

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process with Triton's interpreter")


@pytest.mark.skipif(INTERPRETED, reason="starts the other process")
def test_kernels_by_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
def test_kernels_compile_for_hopper_with_wide_accesses(monkeypatch):
    pytest.importorskip("triton")
    from hyperbatch.kernels import norm as kernels
    from hyperbatch.kernels import whiten
    from hyperbatch.kernels.norm import unit

    compiled = compile_launches(monkeypatch, unit, whiten)
    z, norm = make(64, 64, 31, 31)
    counters = kernels.new_counters(z.device)
    found, coef = unit.pool_statistics(z, norm, counters)
    unit.activate(found.value, coef, 0)
    grads = kernels.NormGradients(torch.empty(3, 64), torch.empty(64), torch.empty(64))
    unit.reduce_gradient(found.value, found.value, coef, grads, counters, 0)
    unit.apply_gradient(found.value, found.value, coef, grads.back, 0)
    unit.apply_unpool_gradient(found.value, found, coef, grads.back, 0, pixels=(31, 31))
    y = torch.empty(64, 256, 3, 3).half().to(memory_format=torch.channels_last).requires_grad_()
    unit.Peak.apply(y).sum().backward()
    whiten.whiten(
        torch.empty(64, 4, 32, 32).half().to(memory_format=torch.channels_last)[:, :3], nn.Conv2d(3, 24, 2).half(), 0
    )
    assert len(compiled) == 8
    for name in compiled:
        if name != "_whiten_kernel":
            assert "ld.global.v4.b32" in compiled[name], name
    assert "st.global.v4.b32" in compiled["_whiten_kernel"]


@inside
@pytest.mark.parametrize("name", ["silu", "gelu"])
@pytest.mark.parametrize(
    ("size", "pooled"),
    [
        ((2, 16, 7, 7), True),
        ((3, 64, 6, 5), True),
        ((2, 8, 2, 3), True),
        ((2, 16, 5, 5), False),
        ((1, 128, 3, 4), False),
    ],
    ids=str,
)
def test_agrees_with_float64(size, pooled, name):
    check(*make(*size), name, pooled=pooled)


@inside
def test_bf16():
    check(*make(2, 16, 5, 6, dtype=torch.bfloat16), "silu", pooled=True)


@inside
def test_of_equal_pixels_the_first_is_the_maximum():
    z, norm = make(2, 8, 6, 6)
    check(z.round(), norm, "silu", pooled=True)


@inside
def test_a_nan_goes_through_the_pool():
    from hyperbatch.kernels import norm as kernels
    from hyperbatch.kernels.norm import unit

    z, norm = make(1, 8, 4, 4)
    z[0, 3, 0, 1] = torch.nan
    pooled, _ = unit.pool_statistics(z, norm, kernels.new_counters(z.device))
    assert pooled.value[0, 3, 0, 0].isnan()
    assert pooled.value.isnan().sum() == 1


@inside
def test_the_peak_of_an_image_and_its_gradient_are_those_of_a_pool():
    from hyperbatch.kernels.norm.unit import Peak

    torch.manual_seed(0)
    y = torch.randn(3, 24, 3, 4).half().round(decimals=1).to(memory_format=torch.channels_last)  # with ties
    y[1, 5, 2, 2] = torch.nan
    ours, theirs = y.clone().requires_grad_(), y.clone().requires_grad_()
    weights = torch.randn(3, 24).half()
    peak, expect = Peak.apply(ours), F.max_pool2d(theirs, (3, 4)).flatten(1)
    torch.testing.assert_close(peak, expect, rtol=0, atol=0, equal_nan=True)
    (peak * weights)[[0, 2]].sum().backward()
    (expect * weights)[[0, 2]].sum().backward()
    assert torch.equal(ours.grad, theirs.grad)


@inside
@pytest.mark.parametrize("act", ["silu", "gelu"])
@pytest.mark.parametrize("channels", [1, 3])
def test_whitening_agrees_with_float64_and_pads_with_zeros(act, channels):
    from unit_reference import ACTIVATIONS

    from hyperbatch.kernels.whiten import whiten

    torch.manual_seed(0)
    function, number = ACTIVATIONS[act]
    conv = nn.Conv2d(channels, 8 * channels, 2).half().to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 9, 8).half().to(memory_format=torch.channels_last)[:, :channels]
    y = whiten(x, conv, number)
    expect = function(F.conv2d(x.double(), conv.weight.double(), conv.bias.double()))
    assert y.shape == (2, 32, 8, 7)
    assert not y[:, 8 * channels :].any()
    torch.testing.assert_close(y[:, : 8 * channels].double(), expect, rtol=2**-10, atol=2e-3)


@inside
@pytest.mark.parametrize("trained_bias", [False, True])
def test_the_fused_network_trains_as_its_layers(trained_bias):
    """In fp32, where the interpreter allows it, so that nothing but the order of sums differs."""
    from hyperbatch.models.fused import fuse

    torch.manual_seed(0)
    model = _narrow()  # the interpreter is slow
    model.whiten.bias.requires_grad_(trained_bias)
    plain = copy.deepcopy(model)
    fuse(model)
    x, labels = torch.randn(4, 3, 32, 32).to(memory_format=torch.channels_last), torch.arange(4)
    for network in (model, plain):
        network.train()
        F.cross_entropy(network(x), labels).backward()
    assert model.fused.can_run()
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if other.grad is None:
            assert param.grad is None, name
        else:
            torch.testing.assert_close(param.grad, other.grad, rtol=1e-3, atol=1e-5, msg=name)
    for (name, buffer), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=1e-4, atol=1e-5, msg=name)


def _narrow():
    from hyperbatch.models.whitenet import WhiteNet

    return WhiteNet((8, 16, 16), 2, classes=10, in_channels=3, activation="silu", bn_momentum=0.4, bn_eps=1e-5).to(
        memory_format=torch.channels_last
    )


@inside
def test_what_the_kernels_do_not_compute_is_refused():
    cpu = torch.device("cpu")
    assert why_not_fused(_narrow(), torch.float16, cpu) is None
    assert "shortcut" in why_not_fused(create_model("whitenet_deep", classes=10), torch.float16, cpu)
    model = _narrow()
    model.group1[0].act = nn.GELU("tanh")
    assert "approximation" in why_not_fused(model, torch.float16, cpu)
    model = _narrow()
    model.group2[0].pool = nn.MaxPool2d(3, 2, 1)
    assert "group2.0 pools in another way" in why_not_fused(model, torch.float16, cpu)
