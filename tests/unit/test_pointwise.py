"""Convolutions of single pixels as an operation of torch, by each of its two ways: against torch's, and compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hyperbatch.models import pointwise as module
from hyperbatch.models.layers import Conv2d, adopt
from hyperbatch.models.pointwise import PointwiseConv2d
from hyperbatch.models.quick import quicken

pointwise = torch.ops.hyperbatch.pointwise


@pytest.fixture(params=[0, 1], ids=["by convolution", "by product"], autouse=True)
def way(request, monkeypatch):
    """Which of the two is taken; and that there are two."""

    def by_fastest(what, x, weight, *ways):
        assert len(ways) == 2
        return ways[request.param]()

    monkeypatch.setattr(module, "by_fastest", by_fastest)


def make(size=(5, 4), *, bias=True, dtype=torch.float64):
    random = torch.Generator().manual_seed(0)
    sizes = [(2, 6, *size), (10, 6, 1, 1), *([(10,)] if bias else [])]
    x, weight, *rest = (torch.randn(size, generator=random, dtype=torch.float64).to(dtype) for size in sizes)
    x = x.to(memory_format=torch.channels_last)
    return [tensor.requires_grad_() for tensor in (x, weight, *rest)] + [None] * (not bias)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("size", [(5, 4), (1, 1)], ids=["images", "one pixel"])
def test_agrees_with_torch(size, bias):
    inputs = make(size, bias=bias)
    wanted = [tensor for tensor in inputs if tensor is not None]
    z, expect = pointwise(*inputs), F.conv2d(*inputs)
    assert z.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(z, expect, rtol=1e-12, atol=1e-12)
    # A gradient of any layout.
    dz = torch.randn(z.shape, generator=torch.Generator().manual_seed(1), dtype=z.dtype)
    for got, grad in zip(torch.autograd.grad(z, wanted, dz), torch.autograd.grad(expect, wanted, dz), strict=True):
        torch.testing.assert_close(got, grad, rtol=1e-12, atol=1e-12)


def test_its_output_may_be_changed_in_place():
    """As by the activation of a squeeze-excite."""
    inputs = make((1, 1))
    expect = torch.autograd.grad(F.silu(F.conv2d(*inputs)).sum(), inputs)
    ours = torch.autograd.grad(F.silu(pointwise(*inputs), inplace=True).sum(), inputs)
    for got, grad in zip(ours, expect, strict=True):
        torch.testing.assert_close(got, grad, rtol=1e-12, atol=1e-12)


def test_a_wider_bias_keeps_its_dtype():
    x, weight, bias = (tensor.detach() for tensor in make(dtype=torch.bfloat16))
    bias = bias.float().requires_grad_()
    z = pointwise(x, weight, bias)
    assert z.dtype == torch.bfloat16
    (gradient,) = torch.autograd.grad(z.float().sum(), bias)
    assert torch.equal(gradient, torch.full_like(bias, z.numel() / z.shape[1]))


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_needs_no_gradient_gets_none(frozen):
    inputs = make()
    inputs[frozen].requires_grad_(False)
    pointwise(*inputs).sum().backward()
    assert [tensor.grad is None for tensor in inputs] == [i == frozen for i in range(3)]


def test_torch_may_trace_and_compile_it():
    inputs = make(dtype=torch.float32)
    torch.library.opcheck(pointwise, tuple(inputs))

    def block(x, weight, bias):
        return F.silu(pointwise(x, weight, bias)).mean((2, 3)).square().sum()

    compiled = torch.compile(block, fullgraph=True, dynamic=False, backend="aot_eager")
    expect = torch.autograd.grad(block(*inputs), inputs)
    for got, grad in zip(torch.autograd.grad(compiled(*inputs), inputs), expect, strict=True):
        assert torch.equal(got, grad)
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({}, True),
        ({"bias": False}, True),
        ({"kernel_size": 3, "padding": 1}, False),
        ({"stride": 2}, False),
        ({"padding": 1}, False),
        ({"groups": 2}, False),
    ],
    ids=str,
)
def test_only_single_pixels_are_replaced(options, ours):
    model = nn.Sequential(nn.Conv2d(**({"in_channels": 8, "out_channels": 6, "kernel_size": 1} | options)))
    x = torch.randn(2, 8, 6, 6)
    state, expect = list(model.state_dict()), model(x)
    quicken(adopt(model))
    assert type(model[0]) is (PointwiseConv2d if ours else Conv2d)
    assert list(model.state_dict()) == state
    assert torch.equal(model(x), expect)
