"""Gradients of queries, keys and values side by side, with their column sums, by Triton's interpreter.

test_add_norm_kernel.py starts the process with the interpreter.
"""

from __future__ import annotations

import pytest
import torch
from hopper import compile_launches, registers, spilled_bytes
from interpreter import inside, outside

from hyperbatch.models.heads import stack_heads


@outside
def test_the_kernel_compiles_for_hopper_with_wide_accesses(monkeypatch):
    pytest.importorskip("triton")
    from hyperbatch.kernels import gelu, stack

    monkeypatch.setattr(stack, "processors", lambda: 132)
    compiled = compile_launches(monkeypatch, stack, gelu)
    x = torch.empty(4096, 384, dtype=torch.float16)
    stack.stack(x, x, x)
    assert set(compiled) == {"_stack_kernel", "_sum_kernel"}
    ptx = compiled["_stack_kernel"]
    assert "st.global.v4.b32" in ptx
    assert "cp.async.cg.shared.global" in ptx
    assert spilled_bytes(ptx) == 0
    assert registers(ptx) <= 128  # of 128 threads: four programs run on a processor


def make(shape, dtype):
    """Each as torch's attention leaves it: the heads of a token side by side."""
    samples, heads, tokens, width = shape
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(samples, tokens, heads, width, generator=generator).to(dtype).transpose(1, 2) for _ in range(3)]


@inside
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (3, 3, 23, 16), (2, 6, 5, 64), (2, 5, 7, 8)], ids=str)
def test_stacked_and_summed_as_by_torch(shape, dtype, monkeypatch):
    from hyperbatch.kernels import stack

    launched = []
    kernel = stack.stack
    monkeypatch.setattr(
        stack, "stack", lambda *parts: launched.append([part.data_ptr() for part in parts]) or kernel(*parts)
    )
    gradients = make(shape, dtype)
    stacked, total = stack_heads(*gradients)
    expect = torch.stack(gradients).permute(1, 3, 0, 2, 4).flatten(2)
    assert launched == [[gradient.data_ptr() for gradient in gradients]]  # as they lie
    assert torch.equal(stacked, expect)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), expect.double().sum((0, 1)), rtol=1e-5, atol=1e-5)
    again, same = stack_heads(*(gradient.contiguous() for gradient in gradients))
    assert torch.equal(again, stacked)
    assert torch.equal(same, total)


@inside
def test_what_the_kernel_does_not_take_is_left_to_torch():
    for shape, dtype in (((2, 1, 3, 7), torch.float16), ((2, 2, 3, 8), torch.float32), ((0, 1, 3, 8), torch.float16)):
        gradients = make(shape, dtype)
        stacked, total = stack_heads(*gradients)
        expect = torch.stack(gradients).permute(1, 3, 0, 2, 4).flatten(2)
        assert torch.equal(stacked, expect)
        torch.testing.assert_close(total, expect.float().sum((0, 1)))
