"""GELU and the gradient of a bias before it in kernels, by Triton's interpreter, against float64 torch."""

from __future__ import annotations

import pytest
import torch
from hopper import compile_launches, spilled_bytes
from interpreter import inside, outside, run_by_the_interpreter
from torch.nn import functional as F

from hyperbatch.arena import Arena
from hyperbatch.models import create_model, heads, lone_norm, residual
from hyperbatch.models import gelu as model_gelu
from hyperbatch.models.gelu import gelu
from hyperbatch.models.quick import compile_quick, quicken
from hyperbatch.params import backward_order

HALVES = [torch.float16, torch.bfloat16]
ROUNDING = {torch.float16: 0.51, torch.bfloat16: 1.01}  # units in the last place; the interpreter cuts bf16 off


@outside
def test_kernels_by_the_interpreter():
    run_by_the_interpreter(__file__)


@outside
@pytest.mark.parametrize("tanh", [False, True])
def test_kernels_compile_for_hopper_with_wide_accesses(monkeypatch, tanh):
    pytest.importorskip("triton")
    from hyperbatch.kernels import gelu as kernels

    monkeypatch.setattr(kernels, "processors", lambda: 132)
    compiled = compile_launches(monkeypatch, kernels)
    h = torch.empty(4096, 1536, dtype=torch.float16)
    kernels.forward(h, tanh)
    kernels.backward(h, h, tanh)
    assert len(compiled) == 3
    for name in ("_gelu_kernel", "_gelu_gradient_kernel"):
        ptx = compiled[name]
        assert "st.global.v4.b32" in ptx
        assert "ld.global.v4.b32" in ptx or "cp.async.cg.shared.global" in ptx  # in stages: through shared memory
        assert "div.full" not in ptx  # a reciprocal square root is one instruction
        assert ptx.count("ex2.approx") == ptx.count("rsqrt.approx") > 0
        assert spilled_bytes(ptx) == 0


def run(function, h, dy):
    """(y, dh, gradient of a bias that was added to h)."""
    wide = torch.promote_types(h.dtype, torch.float32)
    h, bias = h.detach().requires_grad_(), torch.zeros(h.shape[-1], dtype=wide, requires_grad=True)
    y = function(h, bias)
    return y.detach(), *torch.autograd.grad(y, (h, bias), dy.to(y.dtype))


def exact(h, dy, tanh):
    """In float64."""
    return run(lambda h, bias: F.gelu(h + bias, approximate="tanh" if tanh else "none"), h.double(), dy)


def torchs(h, dy, tanh):
    """By torch's own 16-bit path."""
    h = h.detach().requires_grad_()
    y = F.gelu(h, approximate="tanh" if tanh else "none")
    (dh,) = torch.autograd.grad(y, h, dy)
    return y.detach(), dh, dh.flatten(0, -2).sum(0)


def ours(h, dy, tanh):
    return run(lambda h, bias: gelu(h, bias, tanh), h, dy)


def make(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    return tuple((torch.randn(shape, generator=generator) * spread).to(dtype) for spread in (2, 1))


def error(found, expect):
    return float((found.double() - expect).norm() / expect.norm())


@inside
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(1, 8), (67, 48), (2, 300, 128)], ids=str)
def test_no_further_from_float64_than_torch(shape, dtype, tanh):
    h, dy = make(shape, dtype)
    found, expect = ours(h, dy, tanh), exact(h, dy, tanh)
    assert [value.dtype for value in found] == [dtype, dtype, torch.float32]
    for value, right in zip(found[:2], expect[:2], strict=True):
        torch.testing.assert_close(value.double(), right, rtol=ROUNDING[dtype] * torch.finfo(dtype).eps, atol=2e-6)
    torch.testing.assert_close(found[2].double(), expect[2], rtol=1e-4, atol=1e-4)  # sums of what is not yet rounded
    if dtype == torch.float16:
        for value, theirs, right in zip(found, torchs(h, dy, tanh), expect, strict=True):
            assert error(value, right) <= 1.001 * error(theirs, right)  # some are rounded up for down


@inside
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of numbers that run over
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_of_16_bits(dtype, tanh):
    """Small ones, large ones, infinities and no numbers, as in torch."""
    h = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(-1, 64)
    y, dh, _ = ours(h, torch.ones_like(h), tanh)
    right, slope, _ = exact(h, torch.ones_like(h), tanh)
    finite = torch.isfinite(h) & (h.abs() < 1e18)
    rtol = (ROUNDING[dtype] + 0.04) * torch.finfo(dtype).eps  # 4e-6 of the distribution
    torch.testing.assert_close(y[finite].double(), right[finite], rtol=rtol, atol=3.1e-8)  # half a step near 0
    torch.testing.assert_close(dh[finite].double(), slope[finite], rtol=rtol, atol=1e-6)  # where it crosses 0
    odd = ~torch.isfinite(h)
    torch.testing.assert_close(y[odd].double(), right[odd], equal_nan=True)


@inside
def test_gradients_have_the_same_bits_every_time():
    h, dy = make((300, 64), torch.float16)
    first, second = ours(h, dy, False), ours(h, dy, False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@inside
def test_strided_gradients_and_what_is_left_to_torch():
    h, _ = make((6, 10, 16), torch.float16)
    dy = torch.randn(10, 6, 16).half().transpose(0, 1)
    for value, right in zip(ours(h, dy, False), exact(h, dy, False), strict=True):
        torch.testing.assert_close(value.double(), right, rtol=1e-3, atol=1e-4)
    for shape, dtype in (((4, 7), torch.float16), ((4, 8), torch.float32), ((0, 8), torch.float16)):
        h, dy = make(shape, dtype)
        for value, right in zip(ours(h, dy, False), exact(h, dy, False), strict=True):
            torch.testing.assert_close(value.double(), right, rtol=1e-3, atol=1e-5)


@outside
def test_every_variant_that_a_model_launches_is_compiled_ahead(monkeypatch):
    """What is launched ahead on a few rows, and then by a step, has the same types, constants and options."""
    pytest.importorskip("triton")
    from hyperbatch.kernels import add_norm, stack
    from hyperbatch.kernels import gelu as kernels

    launched = set()

    class Noted:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return self

        def __call__(self, *args, **options):
            types = tuple(arg.dtype if isinstance(arg, torch.Tensor) else type(arg) for arg in args)
            launched.add((self.name, types, tuple(sorted(options.items()))))

    for module in (kernels, add_norm, stack):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Noted(name))
    for module, name in (
        (model_gelu, "by_kernels"),
        (heads, "by_kernels"),
        (residual, "by_kernels"),
        (lone_norm, "by_kernels"),
    ):
        monkeypatch.setattr(module, name, lambda x: True)
    model = create_model("vit_cifar", classes=10)
    model.blocks = model.blocks[:2]
    images = torch.randn(2, 3, 16, 16)
    order = backward_order(model, lambda: model(images).sum().backward())
    arena = Arena(model, order, dtype=torch.float16)
    quicken(model)
    compile_quick(model, arena.dtype)
    ahead, launched = launched, set()
    # GELU and its gradient; norms with a sum and without; gradients of a norm with biases, with what passes by, and of
    # one alone; heads; sums of these
    assert len(ahead) == 9
    model(images.half()).sum().backward()
    assert launched == ahead
