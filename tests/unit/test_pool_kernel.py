"""Batch norm + ReLU + max-pool, means of 2x2 pixels and the blur in kernels, by the interpreter, against float64."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from interpreter import inside, outside, run_by_the_interpreter
from pool_reference import ALEXNET, RESNET, check, make, reference, through_kernels

if importlib.util.find_spec("triton"):
    from average_reference import check as check_means
    from average_reference import make as make_pixels
    from blur_reference import check as check_blur
    from hopper import compile_launches, spilled_bytes


@outside
def test_kernels_by_the_interpreter():
    run_by_the_interpreter(__file__)


@outside
@pytest.mark.parametrize("name", ["_pool_kernel", "_pool_apply_kernel"])
def test_kernels_compile_for_hopper_with_wide_accesses_and_no_shuffles(name):
    """Without a GPU: 16 bytes of x a thread, 8 of taps, dealt out alike, so that nothing goes through shared memory."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hyperbatch.kernels.norm import pool

    kernel = getattr(pool, name).fn
    constants = {"KERNEL": 3, "STRIDE": 2, "PADDING": 1, "BI": pool.ELEMENTS // (64 * pool.ACROSS), "BJ": pool.ACROSS}
    constants["BC"] = 64
    types = dict.fromkeys(("x", "dx", "pooled", "dpooled", "peak"), "*fp16")
    types |= {"coef": "*fp32", "back": "*fp32", "tap": "*u8"}
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if n == "C" or n in types}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": pool.WARPS})
    assert "ld.global.v4.b32" in compiled.asm["ptx"]
    assert "st.global.v4.b32" in compiled.asm["ptx"]
    assert "convert_layout" not in compiled.asm["ttgir"]


@outside
def test_means_compile_for_hopper_with_wide_accesses(monkeypatch):
    """Without a GPU: four loads of 16 bytes and one store for each thread."""
    pytest.importorskip("triton")
    from hyperbatch.kernels import average

    compiled = compile_launches(monkeypatch, average)
    average.average(make_pixels(2, 256, 8, 8, torch.float16))
    ptx = compiled["_average_kernel"]
    assert ptx.count("ld.global") == ptx.count("ld.global.v4.b32") == 4
    assert ptx.count("st.global") == ptx.count("st.global.v4.b32") == 1
    assert spilled_bytes(ptx) == 0


@outside
@pytest.mark.parametrize("stride", [1, 2])
def test_blurs_compile_for_hopper_with_wide_accesses(monkeypatch, stride):
    """Without a GPU: nine loads of 16 bytes, four for the gradient of a stride, and one store for each thread."""
    pytest.importorskip("triton")
    from hyperbatch.kernels import blur

    compiled = compile_launches(monkeypatch, blur)
    y = blur.blur(make_pixels(2, 256, 8, 8, torch.float16), stride)
    blur.blur_gradient(y, 8, 8, stride)
    for name, loads in (("_blur_kernel", 9), *((("_spread_kernel", 4),) if stride == 2 else ())):
        ptx = compiled.pop(name)
        assert ptx.count("ld.global") == ptx.count("ld.global.v4.b32") == loads
        assert ptx.count("st.global") == ptx.count("st.global.v4.b32") == 1
        assert spilled_bytes(ptx) == 0
    assert not compiled


@outside
def test_a_pool_before_a_blur_compiles_for_hopper_without_spilling(monkeypatch):
    """Without a GPU: with a stride of 1, nine windows lie over each pixel."""
    pytest.importorskip("triton")
    from hyperbatch.kernels.norm import pool

    compiled = compile_launches(monkeypatch, pool)
    x, coef = make_pixels(2, 64, 16, 16, torch.float16), torch.empty(4, 64)
    window = {"kernel": 3, "stride": 1, "padding": 1}
    pooled, peaks = pool.normalise_pool(x, coef, **window)
    pool.apply_pool_gradient(pooled, peaks, x, coef[:3], **window)
    assert [spilled_bytes(compiled[name]) for name in ("_pool_kernel", "_pool_apply_kernel")] == [0, 0]


CASES = [
    ((2, 16, 8, 8), RESNET),
    ((1, 8, 7, 9), RESNET),
    ((2, 6, 5, 4), ALEXNET),
    ((1, 64, 3, 40), RESNET),  # more than one tile across
    ((1, 128, 4, 19), ALEXNET),  # and two blocks of columns
    ((2, 3, 3, 3), ALEXNET),  # one window
]


@inside
@pytest.mark.parametrize(("size", "window"), CASES, ids=str)
def test_agrees_with_float64(size, window):
    check(*make(*size), window)


@inside
@pytest.mark.parametrize("window", [(2, 2, 0), (3, 1, 1), (5, 2, 2), (2, 3, 0)], ids=str)
def test_other_windows(window):
    check(*make(1, 4, 8, 7), dict(zip(("kernel", "stride", "padding"), window, strict=True)))


@inside
def test_bf16():
    check(*make(1, 16, 5, 8, torch.bfloat16), RESNET)


@inside
def test_ties_go_to_the_first():
    """Five values in all: nearly every window holds its maximum (or minimum, for negative weights) several times."""
    _, weight, bias = make(1, 16, 11, 9)
    x = torch.randint(-2, 3, (1, 16, 11, 9), generator=torch.Generator().manual_seed(4)).half()
    check(x.to(memory_format=torch.channels_last), weight, bias, RESNET)


@inside
def test_windows_that_the_relu_cut_off_pass_nothing_on():
    """One channel negative everywhere, one positive everywhere, the others in between."""
    x, weight, bias = make(1, 4, 9, 9)
    bias[0], bias[1] = -50.0, 50.0
    check(x, weight, bias, RESNET)
    expect, tap, *_ = reference(x, weight, bias, RESNET)
    assert (tap[:, 0] == 255).all()
    assert not expect[:, 0].any()
    assert (tap[:, 1] < 9).all()


@inside
def test_different_values_that_round_to_the_same_are_told_apart():
    """A scale so small that 16 bits of y hide the order of x: exact arithmetic still knows the larger one."""
    x = torch.tensor([1.0, 1.5, 1.25]).half().view(1, 1, 1, 3).expand(1, 8, 3, 3)
    x = x.contiguous(memory_format=torch.channels_last)
    check(x, torch.full((8,), 1e-4), torch.full((8,), 100.0), ALEXNET)


@inside
def test_nan_goes_through():
    x, weight, bias = make(1, 4, 4, 4)
    _, _, coef, _ = reference(x, weight, bias, RESNET)
    coef[2:, 1] = float("nan")  # what statistics make of an overflow
    pooled, *_ = through_kernels(x, coef, RESNET, torch.zeros(1, 4, 2, 2).half())
    assert pooled[:, 1].isnan().all()
    assert not pooled[:, [0, 2, 3]].isnan().any()


@inside
def test_local_sums_leave_the_rest_to_who_adds_up_the_ranks():
    x, weight, bias = make(2, 8, 6, 6)
    dpooled = torch.ones(2, 8, 3, 3).half().to(memory_format=torch.channels_last)
    _, _, coef, (_, dweight, dbias) = reference(x, weight, bias, RESNET, dpooled)
    *_, grads = through_kernels(x, coef, RESNET, dpooled, local=True)
    torch.testing.assert_close(grads.weight.double(), dweight, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(grads.bias.double(), dbias, rtol=1e-5, atol=1e-4)
    assert grads.back.isnan().all()


SIZES = [(2, 16, 8, 8), (1, 8, 7, 9), (3, 24, 5, 4), (1, 192, 4, 3), (2, 8, 1, 1), (1, 8, 1, 6), (2, 64, 33, 31)]


@inside
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_means_agree_with_float64(size):
    check_means(make_pixels(*size))


@inside
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("pixels", [(6, 8), (7, 5)], ids=str)
def test_means_of_16_bits_are_one_rounding_away(dtype, pixels):
    check_means(make_pixels(2, 24, *pixels, dtype))


@inside
def test_sums_of_pixels_may_be_larger_than_fp16_holds():
    check_means(torch.full_like(make_pixels(1, 8, 3, 4, torch.float16), 60000.0))


@inside
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_blurs_agree_with_float64(size, stride):
    check_blur(make_pixels(*size), stride)


@inside
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("stride", [1, 2])
def test_blurs_of_16_bits_are_one_rounding_away(dtype, stride):
    check_blur(make_pixels(2, 24, 7, 6, dtype), stride)
