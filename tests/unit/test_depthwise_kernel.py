"""Depthwise convolutions in kernels, by Triton's interpreter, against float64 torch."""

from __future__ import annotations

import pytest
import torch
from depthwise_reference import check, make, through_kernels
from interpreter import inside, outside, run_by_the_interpreter


@outside
def test_kernels_by_the_interpreter():
    run_by_the_interpreter(__file__)


# n, c, h, w, side
CASES = [
    (1, 24, 7, 7, 7),  # fewer channels than a block has
    (1, 40, 3, 9, 5),  # a block and a quarter, fewer rows than taps, columns that fill no group
    (2, 5, 13, 9, 3),  # in two strips
    (3, 64, 1, 1, 3),
]


@inside
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_float64(case):
    check(*make(*case))


@inside
def test_bf16_and_a_thread_that_holds_no_taps():
    from hyperbatch.kernels import depthwise

    wide = depthwise.Setting(7, 4)
    assert not wide.holds(7)
    check(*make(1, 32, 2, 9, 7, dtype=torch.bfloat16), wide)


@inside
def test_more_tiles_than_programs_add_up_to_the_same(monkeypatch):
    """One program for all, or one for each tile."""
    from hyperbatch.kernels import depthwise

    x, dz, weight, _ = make(9, 32, 3, 4, 3)
    few = depthwise.weight_gradient(dz, x, weight, depthwise.Setting(2, 1))
    monkeypatch.setattr(depthwise, "processors", lambda: 64)
    many = depthwise.weight_gradient(dz, x, weight, depthwise.Setting(2, 1))
    for a, b in zip(few, many, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=torch.finfo(a.dtype).eps, atol=1e-5)


@inside
def test_weights_may_lie_in_memory_in_any_order():
    x, dz, weight, bias = make(1, 24, 2, 5, 3)
    laid = weight.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)  # taps first
    assert torch.equal(laid, weight)
    assert laid.stride() != weight.stride()
    got, expect = (through_kernels(x, dz, each, bias) for each in (laid, weight))
    assert got[2].stride() == laid.stride()
    assert all(torch.equal(a, b) for a, b in zip(got, expect, strict=True))


@outside
def test_convolution_compiles_for_hopper_without_spills_and_shuffles(monkeypatch):
    """Without a GPU. All that a row needs stays in registers, threads exchange nothing, and no pixel is loaded twice
    by a thread: its columns and three on each side, in the first row and in the loop."""
    pytest.importorskip("triton")
    from hopper import compile_launches, spilled_bytes

    from hyperbatch.kernels import depthwise

    compiled = compile_launches(monkeypatch, depthwise)
    x, _, weight, bias = make(1, 192, 8, 8, 7)
    depthwise.convolve(x, weight, bias, depthwise.SETTINGS[-1])
    ptx = compiled["_conv_kernel"]
    assert spilled_bytes(ptx) == 0
    assert ".shared" not in ptx
    assert ptx.count("ld.global.b32") == 2 * (3 + depthwise.SETTINGS[-1].columns + 3)


@outside
def test_weight_gradient_compiles_for_hopper_without_spills(monkeypatch):
    pytest.importorskip("triton")
    from hopper import compile_launches, spilled_bytes

    from hyperbatch.kernels import depthwise

    compiled = compile_launches(monkeypatch, depthwise)
    x, dz, weight, bias = make(1, 96, 8, 8, 3)
    depthwise.weight_gradient(dz, x, weight)
    assert spilled_bytes(compiled["_weight_kernel"]) == 0
    assert "_finish_kernel" in compiled
    depthwise._taps_kernel[(1,)](weight, None, bias, 9, 3, 1, C=96, K=3, FLIP=True, BC=32)  # without a bias
    assert "_taps_kernel" in compiled
