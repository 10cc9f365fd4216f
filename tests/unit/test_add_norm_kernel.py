"""Residual sums with their layer norms in kernels, by Triton's interpreter, against float64 torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hopper import compile_launches, registers, spilled_bytes
from interpreter import inside, outside, run_by_the_interpreter
from torch import nn
from torch.nn import functional as F

from hyperbatch.models.lone_norm import norm_rows, quick_norm
from hyperbatch.models.residual import fork, join

EPS = 1e-6
ROUNDING = {torch.float16: 0.51, torch.bfloat16: 1.01}  # units in the last place; the interpreter cuts bf16 off


@outside
def test_kernels_by_the_interpreter():
    run_by_the_interpreter(__file__, Path(__file__).with_name("test_stack_kernel.py"))


@outside
@pytest.mark.parametrize("passing", [True, False], ids=["residual", "lone"])
@pytest.mark.parametrize("width", [96, 192, 384, 768, 1024])
def test_kernels_compile_for_hopper_with_wide_accesses(monkeypatch, width, passing):
    pytest.importorskip("triton")
    from hyperbatch.kernels import add_norm, gelu

    monkeypatch.setattr(add_norm, "processors", lambda: 132)
    compiled = compile_launches(monkeypatch, add_norm, gelu)
    x, scale, rows = torch.empty(4096, width, dtype=torch.float16), torch.empty(width), torch.empty(4096)
    add_norm.forward(x, x if passing else None, scale, scale, EPS)
    add_norm.backward(x if passing else None, x, x, scale, rows, rows, biases=passing)
    assert set(compiled) == {"_add_norm_kernel", "_add_norm_gradient_kernel", "_sum_kernel"}
    ptx = compiled["_add_norm_kernel"]
    assert "st.global.v4.b32" in ptx
    assert "ld.global.v4.b32" in ptx
    assert spilled_bytes(ptx) == 0
    # Rows of three blocks: 8 bytes a thread, 256 in a row a warp. In stages: through shared memory.
    ptx = compiled["_add_norm_gradient_kernel"]
    assert ("st.global.v4.b32" if width == 1024 else "st.global.v2.b32") in ptx
    assert ("cp.async.cg.shared.global" if width == 1024 else ", 0x8, ") in ptx
    assert spilled_bytes(ptx) == 0
    assert registers(ptx) <= 128  # of 256 threads: two programs run on a processor


def make(shape, dtype, *, wide=True):
    """x, branch, norm, and gradients of the sum and of the norm. wide: norm parameters are fp32."""
    generator = torch.Generator().manual_seed(sum(shape))

    def draw(*size):
        return torch.randn(size, generator=generator)

    layer = nn.LayerNorm(shape[-1], eps=EPS)
    with torch.no_grad():
        layer.weight.copy_(1 + draw(shape[-1]) / 4)
        layer.bias.copy_(draw(shape[-1]) / 4)
    if not wide:
        layer.to(dtype)
    x, branch = (3 + draw(*shape)).to(dtype), draw(*shape).to(dtype)
    return x, branch, layer, draw(*shape).to(dtype), draw(*shape).to(dtype)


def run(function, x, branch, layer, ds, dn, *biases):
    """s, n, and gradients of x, the branch (if there is one), scale and shift, and of biases."""
    x = x.detach().requires_grad_()
    branch = None if branch is None else branch.detach().requires_grad_()
    s, n = function(x, branch, layer)
    inputs = [x, *([] if branch is None else [branch]), layer.weight, layer.bias, *biases]
    return [s.detach(), n.detach(), *torch.autograd.grad([s, n], inputs, [ds.to(s.dtype), dn.to(n.dtype)])]


def ours(x, branch, layer):
    return fork(x, layer) if branch is None else join(x, branch, layer)


def torchs(x, branch, layer):
    s = x if branch is None else x + branch
    dtype = layer.weight.dtype
    return s.view_as(s), F.layer_norm(s.to(dtype), s.shape[-1:], layer.weight, layer.bias, EPS).to(s.dtype)


def exact(x, branch, layer, ds, dn, rounded):
    """In float64, from a sum that was rounded."""
    wide = nn.LayerNorm(x.shape[-1], eps=EPS, dtype=torch.float64)
    wide.load_state_dict(layer.state_dict())
    apart = None if branch is None else rounded.double() - x.double()
    return run(torchs, x.double(), apart, wide, ds.double(), dn.double())


def error(found, expect):
    return float((found.double() - expect).norm() / expect.norm())


@inside
@pytest.mark.parametrize(("joined", "wide"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 8), (21, 40), (67, 48), (2, 3, 384)], ids=str)
def test_no_further_from_float64_than_torch(shape, dtype, joined, wide):
    x, branch, layer, ds, dn = make(shape, dtype, wide=wide)
    branch = branch if joined else None
    found = run(ours, x, branch, layer, ds, dn)
    theirs = run(torchs, x, branch, layer, ds, dn)
    expect = exact(x, branch, layer, ds, dn, found[0])
    assert [value.dtype for value in found] == [value.dtype for value in theirs]
    unit = torch.finfo(dtype).eps
    if dtype == torch.float16:
        assert torch.equal(found[0], theirs[0])
    for value, right in zip(found[1:-2], expect[1:-2], strict=True):
        torch.testing.assert_close(value.double(), right, rtol=ROUNDING[dtype] * unit, atol=3e-6)
    for value, right in zip(found[-2:], expect[-2:], strict=True):
        rtol = 1e-5 if wide else ROUNDING[dtype] * unit
        torch.testing.assert_close(value.double(), right, rtol=rtol, atol=1e-5)
    if dtype == torch.float16:
        # Below 1e-6 both are as good as fp32 is.
        ratios = [
            max(error(value, right), 1e-6) / max(error(their, right), 1e-6)
            for value, their, right in zip(found[1:], theirs[1:], expect[1:], strict=True)
        ]
        assert max(ratios) <= 1.01, ratios


class Norm2d(nn.LayerNorm):
    """timm's."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@inside
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("images", [True, False])
def test_a_norm_without_a_sum_is_the_one_beside_it(images, dtype, monkeypatch):
    """The bits of `fork` where nothing passes the norm by; and layers take this path, whatever the layout."""
    x, _, layer, _, dn = make((3, 4, 5, 64), dtype, wide=False)
    fork_bits = run(ours, x, None, layer, torch.zeros_like(x), dn)[1:]

    def alone(x, _, layer):
        return x.view_as(x), norm_rows(x, layer)

    assert all(torch.equal(*pair) for pair in zip(run(alone, x, None, layer, dn * 0, dn)[1:], fork_bits, strict=True))
    plain = Norm2d if images else nn.LayerNorm
    quick = quick_norm(plain, images=images)(64, eps=EPS).to(dtype)
    quick.load_state_dict(layer.state_dict())
    monkeypatch.setattr(plain, "forward", None)

    def by_layer(x, _, layer):
        if not images:
            return x.view_as(x), quick(x)
        return x.view_as(x), quick(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)

    found = run(by_layer, x, None, quick, dn * 0, dn)[1:]
    assert all(torch.equal(*pair) for pair in zip(found, fork_bits, strict=True))


@inside
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("shape", "wide"), [((67, 48), True), ((21, 40), True), ((2, 3, 96), False)], ids=str)
def test_biases_in_the_sum_have_the_sums_of_gradients(shape, wide, dtype):
    """Nothing else changes, to the bit."""
    x, branch, layer, ds, dn = make(shape, dtype, wide=wide)
    before, behind = (torch.zeros(shape[-1], dtype=kind, requires_grad=True) for kind in (torch.float32, dtype))
    expect = run(ours, x, branch, layer, ds, dn)
    found = run(lambda *args: join(*args, before, behind), x, branch, layer, ds, dn, before, behind)
    assert all(torch.equal(a, b) for a, b in zip(found, expect, strict=False))
    right = exact(x, branch, layer, ds, dn, expect[0])[2]
    torch.testing.assert_close(found[-2].double(), right.flatten(0, -2).sum(0), rtol=1e-5, atol=1e-5)
    total = ds.double().flatten(0, -2).sum(0)
    torch.testing.assert_close(found[-1].double(), total, rtol=ROUNDING[dtype] * torch.finfo(dtype).eps, atol=1e-6)
    assert [gradient.dtype for gradient in found[-2:]] == [torch.float32, dtype]


@inside
def test_gradients_have_the_same_bits_every_time_and_any_layout():
    x, branch, layer, ds, dn = make((20, 5, 64), torch.float16)
    first = run(ours, x, branch, layer, ds, dn)
    assert all(torch.equal(a, b) for a, b in zip(first, run(ours, x, branch, layer, ds, dn), strict=True))
    turned = [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in (x, branch, ds, dn)]
    again = run(ours, turned[0], turned[1], layer, *turned[2:])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@inside
def test_what_the_kernels_do_not_take_is_left_to_torch():
    for shape, dtype in (((4, 7), torch.float16), ((4, 8), torch.float32), ((0, 8), torch.float16)):
        x, branch, layer, ds, dn = make(shape, dtype)
        found = run(ours, x, branch, layer, ds, dn)
        for value, right in zip(found, exact(x, branch, layer, ds, dn, found[0]), strict=True):
            torch.testing.assert_close(value.double(), right, rtol=1e-3, atol=1e-3)
