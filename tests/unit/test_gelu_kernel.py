"""GELU with its bias in kernels, by Triton's interpreter, against float64 torch.

The interpreter is chosen by an environment variable at import, so this file runs itself once more in a process that
has it; there the tests below do the work.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hopper import compile_launches, spilled_bytes
from torch.nn import functional as F

from hyperbatch.models.gelu import bias_gelu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process with Triton's interpreter")
HALVES = [torch.float16, torch.bfloat16]
ROUNDING = {torch.float16: 0.51, torch.bfloat16: 1.01}  # units in the last place; the interpreter cuts bf16 off


@pytest.mark.skipif(INTERPRETED, reason="starts the other process")
def test_kernels_by_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("tanh", [False, True])
def test_kernels_compile_for_hopper_with_wide_accesses(monkeypatch, tanh):
    pytest.importorskip("triton")
    from hyperbatch.kernels import gelu

    monkeypatch.setattr(gelu, "processors", lambda: 132)
    compiled = compile_launches(monkeypatch, gelu)
    z, bias = torch.empty(4096, 1536, dtype=torch.float16), torch.empty(1536)
    gelu.forward(z, bias, tanh)
    gelu.backward(z, z, bias, tanh)
    assert len(compiled) == 3
    for name in ("_gelu_kernel", "_gelu_gradient_kernel"):
        ptx = compiled[name]
        assert "st.global.v4.b32" in ptx
        assert "ld.global.v4.b32" in ptx or "cp.async.cg.shared.global" in ptx  # in stages: through shared memory
        assert "div.full" not in ptx  # a reciprocal square root is one instruction
        assert ptx.count("ex2.approx") == ptx.count("rsqrt.approx") > 0
        assert spilled_bytes(ptx) == 0


def exact(z, bias, dy, tanh):
    """(y, dz, the bias's gradient) in float64."""
    z, bias = z.detach().double().requires_grad_(), bias.detach().double().requires_grad_()
    y = F.gelu(z + bias, approximate="tanh" if tanh else "none")
    return y.detach(), *torch.autograd.grad(y, (z, bias), dy.double())


def torchs(z, bias, dy, tanh):
    """The same by torch's own 16-bit path: the product adds the bias in 16 bits."""
    h = (z.detach().float() + bias.detach().to(z.dtype).float()).to(z.dtype).requires_grad_()
    y = F.gelu(h, approximate="tanh" if tanh else "none")
    (dh,) = torch.autograd.grad(y, h, dy)
    return y.detach(), dh, dh.flatten(0, -2).sum(0)


def ours(z, bias, dy, tanh):
    z, bias = z.detach().requires_grad_(), bias.detach().requires_grad_()
    y = bias_gelu(z, bias, tanh)
    return y.detach(), *torch.autograd.grad(y, (z, bias), dy)


def make(shape, dtype, seed=0, spread=2.0):
    generator = torch.Generator().manual_seed(seed)
    z = (torch.randn(shape, generator=generator) * spread).to(dtype)
    bias = torch.randn(shape[-1], generator=generator) / 2
    return z, bias, torch.randn(shape, generator=generator).to(dtype)


def error(found, expect):
    return float((found.double() - expect).norm() / expect.norm())


@inside
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(1, 8), (67, 48), (2, 300, 128)], ids=str)
def test_no_further_from_float64_than_torch(shape, dtype, tanh):
    z, bias, dy = make(shape, dtype)
    found, expect = ours(z, bias, dy, tanh), exact(z, bias, dy, tanh)
    assert [value.dtype for value in found] == [dtype, dtype, torch.float32]
    for value, right in zip(found[:2], expect[:2], strict=True):
        torch.testing.assert_close(value.double(), right, rtol=ROUNDING[dtype] * torch.finfo(dtype).eps, atol=2e-6)
    torch.testing.assert_close(found[2].double(), expect[2], rtol=1e-4, atol=1e-4)  # sums of what is not yet rounded
    if dtype == torch.float16:
        for value, theirs, right in zip(found, torchs(z, bias, dy, tanh), expect, strict=True):
            assert error(value, right) <= error(theirs, right)


@inside
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of numbers that run over
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_of_16_bits(dtype, tanh):
    """Small ones, large ones, infinities and no numbers, as in torch."""
    z = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(-1, 64)
    zero, one = torch.zeros(64), torch.ones_like(z)
    y, dz, _ = ours(z, zero, one, tanh)
    right, slope, _ = exact(z, zero, one, tanh)
    finite = torch.isfinite(z) & (z.abs() < 1e18)
    rtol = (ROUNDING[dtype] + 0.04) * torch.finfo(dtype).eps  # 4e-6 of the distribution
    torch.testing.assert_close(y[finite].double(), right[finite], rtol=rtol, atol=3.1e-8)  # half a step near 0
    torch.testing.assert_close(dz[finite].double(), slope[finite], rtol=rtol, atol=1e-6)  # where it crosses 0
    odd = ~torch.isfinite(z)
    torch.testing.assert_close(y[odd].double(), right[odd], equal_nan=True)


@inside
def test_gradients_have_the_same_bits_every_time():
    z, bias, dy = make((300, 64), torch.float16)
    first, second = ours(z, bias, dy, False), ours(z, bias, dy, False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@inside
def test_strided_gradients_and_what_is_left_to_torch():
    z, bias, _ = make((6, 10, 16), torch.float16)
    dy = torch.randn(10, 6, 16).half().transpose(0, 1)
    for value, right in zip(ours(z, bias, dy, False), exact(z, bias, dy, False), strict=True):
        torch.testing.assert_close(value.double(), right, rtol=1e-3, atol=1e-4)
    for shape, dtype in (((4, 7), torch.float16), ((4, 8), torch.float32), ((0, 8), torch.float16)):
        z, bias, dy = make(shape, dtype)
        for value, right in zip(ours(z, bias, dy, False), exact(z, bias, dy, False), strict=True):
            torch.testing.assert_close(value.double(), right, rtol=1e-3, atol=1e-5)
