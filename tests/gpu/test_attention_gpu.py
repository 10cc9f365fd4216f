"""Attention in training on a GPU: gradients of queries whose logits are all far below 0, which cuDNN makes nan."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional as F

from hyperbatch.engine.kernel_choice import training_kernels
from hyperbatch.models.attention import attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

HALVES = [torch.float16, torch.bfloat16]
SHAPE = 4, 6, 64  # samples, heads, width


def far_below_zero(tokens, dtype):
    """(q, k, v, gradient of the output): all logits are about -120."""
    torch.manual_seed(0)
    q, k, v, dy = (torch.randn(*SHAPE[:2], tokens, SHAPE[2], device="cuda") for _ in range(4))
    q, k = 0.1 * q, 0.1 * k
    q[..., 0], k[..., 0] = 1.0, -120 * SHAPE[2] ** 0.5
    return [tensor.to(dtype) for tensor in (q, k, v, dy)]


def results(call, inputs, dy):
    """Output and gradients. Without the first element of those of queries: it is what is left of large summands."""
    leaves = [leaf.detach().requires_grad_() for leaf in inputs]
    y = call(*leaves)
    dq, dk, dv = torch.autograd.grad(y, leaves, dy.to(y.dtype))
    return y.detach(), dq[..., 1:], dk, dv


def check(call, tokens, dtype):
    *inputs, dy = far_below_zero(tokens, dtype)
    exact = results(F.scaled_dot_product_attention, [tensor.double() for tensor in inputs], dy)
    with training_kernels(deterministic=False):
        values = results(call, inputs, dy)
    for value, right in zip(values, exact, strict=True):
        assert torch.isfinite(value).all()
        assert float((value.double() - right).norm()) <= 0.02 * float(right.norm()) + 1e-3


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tokens", [1, 64, 100, 128, 192, 196])
@pytest.mark.parametrize("function", [attention, F.scaled_dot_product_attention], ids=["ours", "torch"])
def test_gradients_are_those_of_float64(function, tokens, dtype):
    check(function, tokens, dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tokens", [64, 196])
def test_compiled_gradients_are_those_of_float64(tokens, dtype):
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inductor's advice, which the engine does not show either
        check(torch.compile(attention, fullgraph=True, dynamic=False), tokens, dtype)
