"""Batch norm of a 1x1 convolution from the moments of its input, by Triton's interpreter, against float64 torch."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from hopper import before_the_wait, compile_launches
from interpreter import inside, outside, run_by_the_interpreter
from product_reference import check, column_sums, make, nans, new_norm, reference, statistics_errors, through_kernels
from torch import nn

if importlib.util.find_spec("triton"):
    from hyperbatch.kernels import norm as kernels
    from hyperbatch.kernels.norm import moments, product, tiles

SUMS = 1e-6  # a few hundred rows, added one by one
# fp16 alone: the interpreter knows no products of bf16.


@outside
def test_kernels_by_the_interpreter():
    run_by_the_interpreter(__file__)


@outside
@pytest.mark.parametrize("c", [16, 128, 256])
def test_kernels_compile_for_hopper(c, monkeypatch):
    """Without a GPU: what the interpreter lets pass, and the large products on its tensor cores, 16 bytes a thread."""
    pytest.importorskip("triton")
    kernel_names = [name for module in (moments, product) for name in vars(module) if name.endswith("_kernel")]
    compiled = compile_launches(monkeypatch, moments, product)
    monkeypatch.setattr(tiles, "overlaps", lambda: True)
    case, coef = make((4, 5, 7), c, 4 * c), torch.ones(4, c)
    counters = kernels.new_counters(case.y.device)
    _, taken = moments.normalise_with_moments(case.y, coef, counters)
    kept = product.product_statistics(taken, case.w, new_norm(case), counters)
    if c > moments.WIDEST:  # all that differs there: y, and y about its centre
        assert before_the_wait(compiled["_moments_kernel"]) == 0
        assert compiled["_moments_kernel"].count("st.global.v4.b32") == 2 * 2
        return
    grads = kernels.NormGradients(*(nans(3, 4 * c, like=case.y) for _ in range(3)))
    product.product_backward(case.g, case.y, case.w, kept, grads.bias, grads, torch.empty_like(case.w), counters)
    assert len(kernel_names) == 6
    assert set(kernel_names) == set(compiled)
    for name in ("_moments_kernel", "_add_moments_kernel", "_quadratic_kernel", "_input_gradient_kernel"):
        assert before_the_wait(compiled[name]) == 0, "the launch before may still write what it reads"
    for name in ("_moments_kernel", "_input_gradient_kernel") if c == 128 else ():
        assert "wgmma.mma_async" in compiled[name]
        assert "cp.async.cg.shared.global" in compiled[name]
        assert "st.global.v4.b32" in compiled[name]


@inside
@pytest.mark.parametrize(
    ("size", "c", "n"), [((2, 7, 9), 16, 64), ((3, 5, 7), 64, 64), ((1, 11, 13), 128, 32), ((1, 5, 5), 256, 16)]
)
def test_agrees_with_float64(size, c, n):
    case = make(size, c, n)
    check(case, through_kernels(case), sums=SUMS)


@inside
@pytest.mark.parametrize("far", [10.0, 200.0])
def test_channels_far_from_zero(far):
    """Rounding Q leaves its mark on y - mean alone, and the Gram matrix is taken about a centre."""
    case = make((2, 9, 10), 64, 32, far=far)
    check(case, through_kernels(case), sums=SUMS)


@inside
def test_all_channels_far_from_zero():
    """Uncentred sums of squares would keep no digit of a variance that is 1e-8 of the mean's square."""
    case = make((2, 9, 10), 16, 16)
    y = 1 + torch.randint(-2, 3, case.y.shape, generator=torch.Generator().manual_seed(0)) * 2.0**-10
    case = replace(case, y=y.half().to(memory_format=torch.channels_last))
    norm, counters = new_norm(case), kernels.new_counters(case.y.device)
    norm.eps = 0.0
    kept = product.product_statistics(case.y, case.w, norm, counters)
    z = case.y.double().permute(0, 2, 3, 1).reshape(-1, 16) @ case.w.double().T
    torch.testing.assert_close(kept.coef[1].double(), z.var(0, correction=0).rsqrt(), rtol=1e-5, atol=0)


@inside
@pytest.mark.parametrize("made", [True, False], ids=["made", "there"])
@pytest.mark.parametrize("ratio", [0, 10, 200, 600])
@pytest.mark.parametrize("c", [16, 64, 256])
def test_statistics_wherever_the_means_are(c, ratio, made):
    """Uncentred, a Gram matrix loses the square of the ratio in digits: a quarter of the variance at 600."""
    of_mean, of_variance = statistics_errors((2, 9, 10), c, ratio, made=made)
    assert of_variance < 20 * SUMS
    assert of_mean < SUMS * max(ratio, 1)  # the mean itself is fp32


@inside
@pytest.mark.parametrize("c", [16, 256])
def test_moments_are_taken_while_y_is_made(c):
    case = make((2, 5, 7), c, 16)
    random = torch.Generator().manual_seed(3)
    x = torch.randn(2, c, 5, 7, generator=random).half().to(memory_format=torch.channels_last)
    norm, counters = nn.BatchNorm2d(c), kernels.new_counters(x.device)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5, generator=random)
        norm.bias.normal_(generator=random)
        norm.weight[::3] = 0.02
        norm.bias[::3] = 2.0  # about a centre
        norm.bias[1::3] = -8.0  # all 0
    coef = kernels.statistics(x, norm, counters)
    y, taken = moments.normalise_with_moments(x, coef, counters)
    assert torch.equal(y, kernels.normalise(x, coef))
    case = replace(case, y=y)
    check(case, through_kernels(case, taken), sums=SUMS)


@inside
@pytest.mark.parametrize(("scale", "gamma"), [(2.0**-10, 1.0), (1.0, 2.0**-14), (2.0**2, 2.0**4)])
def test_gradients_of_any_size(scale, gamma):
    """a w and Q are scaled: dy is as exact as fp16 can hold it, also where they would be subnormal or too large."""
    case = make((2, 6, 7), 16, 64, scale=scale, gamma=gamma)
    check(case, through_kernels(case), sums=SUMS)


@inside
def test_a_start_from_zero_gives_zero():
    case = make((2, 3, 5), 16, 32, gamma=0.0)
    got = through_kernels(case)
    assert not got.dy.any()
    assert not got.dw.any()
    assert got.dweight.all()


@inside
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_overflowed_gradients_are_seen(value):
    """A loss scaler looks for them."""
    case = make((2, 3, 5), 16, 32)
    case.g[1, 7, 2, 3] = value
    got = through_kernels(case)
    assert not got.dw[7].isfinite().any()
    assert not got.dy[1, :, 2, 3].isfinite().any()


@inside
def test_nothing_unwritten_is_read(monkeypatch):
    def poisoned(make_tensor):
        return lambda *a, **k: make_tensor(*a, **k).fill_(float("nan"))

    case = make((1, 9, 13), 64, 32)
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    got = through_kernels(case)
    monkeypatch.undo()
    check(case, got, sums=SUMS)


@inside
def test_local_statistics_are_mean_and_variance_alone():
    case = make((2, 3, 5), 16, 32)
    norm, counters = new_norm(case), kernels.new_counters(case.y.device)
    kept = product.product_statistics(case.y, case.w[:, :, None, None], norm, counters, local=True)
    exact = reference(case)
    torch.testing.assert_close(kept.coef[0].double(), exact.mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(kept.coef[1].double(), exact.rstd**-2 - norm.eps, rtol=1e-5, atol=0)
    torch.testing.assert_close(norm.running_var, new_norm(case).running_var, rtol=0, atol=0)
    grads = kernels.NormGradients(*(nans(3, 32, like=case.y) for _ in range(3)), local=True)
    dw = nans(32, 16, like=case.y, dtype=torch.float16)
    with pytest.raises(ValueError, match="no group of ranks"):
        product.product_backward(case.g, case.y, case.w, kept, column_sums(case.g), grads, dw, counters)


@inside
@pytest.mark.parametrize(("c", "n"), [(48, 64), (8, 64), (16, 24)])
def test_other_widths_are_refused(c, n):
    case = make((1, 2, 2), c, n)
    with pytest.raises(ValueError, match="16, 32, 64"):
        product.product_statistics(case.y, case.w, new_norm(case), kernels.new_counters(case.y.device))
