"""Blocks of ConvNeXt whose layer scale has its gradient from that of the layer before it."""

from __future__ import annotations

import copy

import pytest
import torch
from blocky import without_inductor
from test_quick import Mlp, TimmNorm, check_same
from torch import nn

from hyperbatch.engine import compiled
from hyperbatch.engine.measure import probe
from hyperbatch.models.layer_scale import product_of_columns, scaled_linear
from hyperbatch.models.layers import Linear, adopt
from hyperbatch.models.quick import quicken
from hyperbatch.models.regions import find_regions


class ConvNeXtBlock(nn.Module):
    """timm's."""

    def __init__(self, width, rate=0.0, *, scale=0.5, mlp=Mlp):
        super().__init__()
        self.conv_dw = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.mlp = TimmNorm(width), mlp(width, 4 * width, rate=rate)
        self.gamma = None if scale is None else nn.Parameter(torch.full((width,), scale) + torch.arange(width) / width)
        self.shortcut, self.drop_path = nn.Identity(), nn.Dropout(rate)

    def forward(self, x):
        y = self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        if self.gamma is not None:
            y = y.mul(self.gamma.reshape(1, -1, 1, 1))
        return self.drop_path(y) + self.shortcut(x)


ConvNeXtBlock.__module__ = "timm.models.convnext"


def images(dtype=torch.float64, width=16, size=5):
    x = torch.randn(2, width, size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x.to(dtype).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_compute_what_they_did(dtype):
    torch.manual_seed(0)
    block = adopt(ConvNeXtBlock(16).to(dtype))
    state = list(block.state_dict())
    wide = 1e-12 if dtype == torch.float64 else 5e-5
    check_same(block, images(dtype), rtol=wide, atol=wide)
    assert type(block).__name__ == "QuickConvNeXtBlock"
    assert list(block.state_dict()) == state
    assert type(copy.deepcopy(block)) is type(block) is type(quicken(ConvNeXtBlock(16)))
    model = quicken(nn.Sequential(*(ConvNeXtBlock(16) for _ in range(3))))
    assert [region.kind for region in find_regions(model)] == [0, 0, 0]


def test_blocks_are_compiled_whole(monkeypatch):
    monkeypatch.setattr(compiled, "compile_function", None)  # put back after the test
    without_inductor()
    model, x = nn.Sequential(*(ConvNeXtBlock(16) for _ in range(2))).double(), images().requires_grad_()
    plain = copy.deepcopy(model)
    regions = compiled.CompiledRegions(find_regions(quicken(model)), "on", {})
    with regions.compiling():
        model(x).square().sum().backward()
    assert (regions.about.regions, regions.about.compilations) == (2, 1)
    plain(x).square().sum().backward()
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12, msg=name)


def test_what_is_dropped_in_a_block_is_dropped():
    torch.manual_seed(0)
    block, x = ConvNeXtBlock(16, rate=0.5), images(torch.float32)
    plain = copy.deepcopy(block)
    quicken(block)
    for each in (block, plain):
        torch.manual_seed(1)
        each(x).square().sum().backward()
    for ours, theirs in zip(block.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_the_output_of_the_layer_is_not_kept():
    block, x = ConvNeXtBlock(16), images(torch.float32)
    kept = probe(block, x)[1]
    assert kept - probe(quicken(block), x)[1] == x[0].numel() * x.element_size()


def test_operations_are_what_torch_asks_of_one():
    a, b = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    torch.library.opcheck(product_of_columns, (a, b), test_utils=("test_schema", "test_faketensor"))
    layer = nn.Linear(5, 3, dtype=torch.float64)
    x, scale = torch.randn(2, 4, 5, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    x.requires_grad_(), scale.requires_grad_()
    torch.autograd.gradcheck(lambda x, scale, *_: scaled_linear(x, layer, scale), (x, scale, *layer.parameters()))


@pytest.mark.parametrize("scale", [1.0, 1e-6], ids=["one", "tiny"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_no_further_from_float64_than_torch(dtype, scale):
    """Also from where layer scale begins, with gradients as large as a scaled loss makes them."""
    torch.manual_seed(0)
    plain, factors = Linear(64, 16), scale * (1 + torch.rand(16))
    plain.weight.data = plain.weight.data.to(dtype)
    quick, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    x, dy = torch.randn(500, 64).to(dtype), (1024 * torch.randn(500, 16)).to(dtype)
    factors = factors.to(dtype)

    def run(forward, layer, wide):
        inputs = [t.detach().to(wide).requires_grad_() for t in (x, factors)]
        y = forward(inputs[0], layer, inputs[1])
        return [y.detach(), *torch.autograd.grad(y, [*inputs, *layer.parameters()], dy.to(y.dtype))]

    def torchs(x, layer, factors):
        return layer(x) * factors

    ours, theirs = run(scaled_linear, quick, dtype), run(torchs, plain, dtype)
    right = run(torchs, exact, torch.float64)
    assert [value.dtype for value in ours] == [value.dtype for value in theirs]
    for value, their, expect in zip(ours, theirs, right, strict=True):
        errors = [float((found.double() - expect).norm() / expect.norm()) for found in (value, their)]
        assert errors[0] <= 1.01 * errors[1]


class SubBlock(ConvNeXtBlock):
    pass


class OtherMlp(Mlp):
    pass


def hooked(block):
    block.mlp.register_forward_hook(lambda *_: None)
    return block


def other_norm(block):
    block.norm = nn.RMSNorm(16)
    return block


def extended(block):
    block.extra = nn.Identity()
    return block


@pytest.mark.parametrize(
    "block",
    [
        ConvNeXtBlock(16, scale=None),
        SubBlock(16),
        ConvNeXtBlock(16, mlp=OtherMlp),
        hooked(ConvNeXtBlock(16)),
        other_norm(ConvNeXtBlock(16)),
        extended(ConvNeXtBlock(16)),
    ],
    ids=["no scale", "another class", "another MLP", "hooked", "another norm", "another version"],
)
def test_blocks_that_are_not_known_stay(block):
    before = type(block)
    assert type(quicken(block)) is before
