"""Depthwise convolutions as an operation of torch, and as layers: against torch's own, and compiled."""

from __future__ import annotations

import pytest
import torch
from depthwise_reference import Block
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

from hyperbatch.models.depthwise import DepthwiseConv2d, depthwise_layers
from hyperbatch.models.depthwise_sums import INPUT_GRADIENT, SumsInDepthwise
from hyperbatch.models.layers import adopt
from hyperbatch.models.quick import quicken
from hyperbatch.models.regions import find_regions

depthwise = torch.ops.hyperbatch.depthwise


def make(n=2, c=6, h=5, w=4, side=7, *, bias=True, dtype=torch.float64):
    random = torch.Generator().manual_seed(0)
    sizes = [(n, c, h, w), (c, 1, side, side), *([(c,)] if bias else [])]
    x, weight, *rest = (torch.randn(size, generator=random, dtype=torch.float64).to(dtype) for size in sizes)
    x = x.to(memory_format=torch.channels_last)
    return [tensor.requires_grad_() for tensor in (x, weight, *rest)] + [None] * (not bias)


def through_torch(x, weight, bias):
    return F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2, groups=len(weight))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("side", [3, 5, 7])
def test_agrees_with_torch(side, bias):
    inputs = make(side=side, bias=bias)
    wanted = [tensor for tensor in inputs if tensor is not None]
    z, expect = depthwise(*inputs), through_torch(*inputs)
    dz = torch.randn(z.shape, generator=torch.Generator().manual_seed(1), dtype=z.dtype)
    assert z.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(z, expect, rtol=1e-12, atol=1e-12)
    for got, grad in zip(torch.autograd.grad(z, wanted, dz), torch.autograd.grad(expect, wanted, dz), strict=True):
        # The sum for a bias is handed over in fp32.
        torch.testing.assert_close(got, grad, rtol=1e-6 if grad.dim() == 1 else 1e-12, atol=1e-12)


def test_a_wider_bias_keeps_its_dtype():
    x, weight, bias = (tensor.detach() for tensor in make(dtype=torch.bfloat16))
    bias = bias.float().requires_grad_()
    z = depthwise(x, weight, bias)
    assert z.dtype == torch.bfloat16
    (gradient,) = torch.autograd.grad(z.float().sum(), bias)
    assert torch.equal(gradient, torch.full_like(bias, x.numel() / x.shape[1]))


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_needs_no_gradient_gets_none(frozen):
    inputs = make()
    inputs[frozen].requires_grad_(False)
    depthwise(*inputs).sum().backward()
    assert [tensor.grad is None for tensor in inputs] == [i == frozen for i in range(3)]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_torch_may_trace_it(bias):
    torch.library.opcheck(depthwise, tuple(make(bias=bias, dtype=torch.float32)))


def test_compiled_whole_with_its_gradients():
    """As in a block of a model: between operations that inductor, or here autograd's tracer, takes apart."""
    inputs = make(dtype=torch.float32)

    def block(x, weight, bias):
        return F.layer_norm(depthwise(x, weight, bias).permute(0, 2, 3, 1), (6,)).square().sum()

    compiled = torch.compile(block, fullgraph=True, dynamic=False, backend="aot_eager")
    expect = torch.autograd.grad(block(*inputs), inputs)
    for got, grad in zip(torch.autograd.grad(compiled(*inputs), inputs), expect, strict=True):
        assert torch.equal(got, grad)


@pytest.mark.parametrize(
    ("block", "arguments"),
    [(lambda x, z: x + z.square(), 3), (lambda x, z: z.square() + x.sin(), 3), (lambda x, z: z.square(), 2)],
    ids=["shortcut", "shortcut with something in it", "no shortcut"],
)
def test_the_gradient_of_a_shortcut_is_added_where_the_other_one_is_made(block, arguments):
    """In the graph of a backward, as inductor hands it over."""
    inputs, seen = make(dtype=torch.float32), []

    def run(x, weight, bias):
        return block(x, depthwise(x, weight, bias)).square().sum()

    def rewritten(module, examples):
        SumsInDepthwise()(module.graph)
        module.graph.lint()
        module.recompile()
        seen.extend(len(n.args) for n in module.graph.find_nodes(op="call_function", target=INPUT_GRADIENT))
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=lambda module, _: make_boxed_func(module.forward), bw_compiler=rewritten)
    compiled = torch.compile(run, fullgraph=True, dynamic=False, backend=backend)
    got = torch.autograd.grad(compiled(*inputs), inputs)
    for a, b in zip(got, torch.autograd.grad(run(*inputs), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())
    assert seen == [arguments]
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({"kernel_size": 7, "padding": 3}, True),
        ({"kernel_size": 3, "padding": "same", "bias": False}, True),
        ({"kernel_size": 5, "padding": 2}, True),
        ({"kernel_size": 9, "padding": 4}, False),
        ({"kernel_size": 7, "padding": 2}, False),
        ({"kernel_size": (3, 5), "padding": (1, 2)}, False),
        ({"kernel_size": 3, "padding": 1, "stride": 2}, False),
        ({"kernel_size": 3, "padding": 2, "dilation": 2}, False),
        ({"kernel_size": 3, "padding": 1, "groups": 4}, False),
        ({"kernel_size": 3, "padding": 1, "out_channels": 16}, False),
        ({"kernel_size": 3, "padding": 1, "padding_mode": "circular"}, False),
    ],
    ids=str,
)
def test_only_layers_that_the_kernels_know_are_replaced(options, ours):
    conv = nn.Conv2d(8, **({"out_channels": 8, "groups": 8} | options))
    assert isinstance(quicken(conv), DepthwiseConv2d) == ours


def test_a_replaced_layer_is_the_same_module():
    class Own(nn.Conv2d):
        pass

    model = nn.Sequential(nn.Conv2d(6, 6, 7, padding=3, groups=6), Own(6, 6, 7, padding=3, groups=6))
    x = torch.randn(2, 6, 5, 4)
    state, parameters, expect = model.state_dict(), list(model.parameters()), model(x)
    quicken(adopt(model))
    assert [type(module) for module in model] == [DepthwiseConv2d, Own]
    assert list(model.state_dict()) == list(state)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(model(x), expect)
    assert not depthwise_layers(model)  # whose kernels could be compiled: not on a CPU


def test_blocks_are_still_found():
    stages = [[Block(width) for _ in range(depth)] for width, depth in ((4, 3), (8, 3), (16, 9), (32, 3))]
    model = adopt(nn.ModuleList(nn.Sequential(*stage) for stage in stages))
    before = [(region.name, region.kind) for region in find_regions(model)]
    assert (len(before), len({kind for _, kind in before})) == (18, 4)
    assert [(region.name, region.kind) for region in find_regions(quicken(model))] == before
