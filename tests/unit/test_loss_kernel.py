"""Label-smoothed cross entropy in one kernel, by Triton's interpreter, against float64 torch."""

from __future__ import annotations

import pytest
import torch
from interpreter import inside, outside, run_by_the_interpreter
from torch.nn import functional as F

from hyperbatch.models import smoothed_cross_entropy


@outside
def test_kernels_by_the_interpreter():
    run_by_the_interpreter(__file__)


def make(rows, classes, dtype=torch.float32, spread=3.0):
    generator = torch.Generator().manual_seed(rows * classes)
    logits = (torch.randn(rows, classes, generator=generator) * spread).to(dtype).requires_grad_()
    return logits, torch.randint(classes, (rows,), generator=generator)


def both(logits, labels, smoothing, scale=1.0):
    """((loss, gradient) of ours, with nan wherever nothing is written, and of torch in float64)."""
    torch.use_deterministic_algorithms(True)
    try:
        loss = smoothed_cross_entropy(logits, labels, smoothing)
        (gradient,) = torch.autograd.grad(loss * scale, logits)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "SmoothedCrossEntropy" in type(loss.grad_fn).__name__  # not torch against itself
    wide = logits.detach().double().requires_grad_()
    expect = F.cross_entropy(wide, labels, label_smoothing=smoothing)
    return (loss.detach(), gradient), (expect.detach(), torch.autograd.grad(expect * scale, wide)[0])


@inside
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("size", [(1, 1), (1, 10), (7, 13), (5, 1000), (64, 2), (3, 1025)], ids=str)
def test_agrees_with_float64(size, smoothing):
    (loss, gradient), (expect, expect_gradient) = both(*make(*size), smoothing)
    assert loss.dtype == gradient.dtype == torch.float32
    # fp32 arithmetic on logits below about 12: a few units in the last place of those.
    torch.testing.assert_close(loss.double(), expect, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(gradient.double(), expect_gradient, rtol=1e-5, atol=1e-7)


@inside
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_logits_give_an_fp32_loss_and_a_16_bit_gradient(dtype):
    (loss, gradient), (expect, expect_gradient) = both(*make(6, 37, dtype), 0.1)
    assert loss.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(loss.double(), expect, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(gradient.double(), expect_gradient, rtol=torch.finfo(dtype).eps, atol=1e-7)


@inside
def test_loss_scale_lifts_what_16_bits_would_lose():
    """1000 classes, smoothed: most gradients are near 1e-4 / rows, below fp16's numbers until they are scaled."""
    (_, gradient), (_, expect) = both(*make(8, 1000, torch.float16, spread=0.01), 0.1, scale=2.0**16)
    torch.testing.assert_close(gradient.double(), expect, rtol=2.0**-11, atol=1e-4)
    (_, gradient), (_, expect) = both(*make(4, 1000, torch.float16, spread=1e4), 0.1, scale=2.0**16)
    torch.testing.assert_close(gradient.double(), expect, rtol=2.0**-11, atol=1e-4)


@inside
def test_large_and_infinite_logits():
    logits = torch.tensor([[1e30, -1e30, 0.0], [3.0, float("-inf"), 1.0]], requires_grad=True)
    (loss, gradient), (expect, expect_gradient) = both(logits, torch.tensor([0, 2]), 0.0)
    torch.testing.assert_close(loss.double(), expect)
    torch.testing.assert_close(gradient.double(), expect_gradient)
    bad = torch.tensor([[1.0, float("nan")]], requires_grad=True)
    assert both(bad, torch.tensor([0]), 0.1)[0][0].isnan()


@inside
def test_strided_logits_and_no_gradient():
    logits, labels = make(6, 40)
    wide = logits.detach()
    for view in (wide[:, :20], wide[:, ::2], wide.T[:6, :].contiguous().T[:, :6]):
        loss = smoothed_cross_entropy(view, labels[: len(view)] % 6, 0.1)
        assert not loss.requires_grad
        expect = F.cross_entropy(view.double(), labels[: len(view)] % 6, label_smoothing=0.1)
        torch.testing.assert_close(loss.double(), expect, rtol=1e-6, atol=2e-6)


@inside
def test_labels_that_name_no_class_make_nan_and_read_nothing():
    for bad in (-100, -1, 5, 2**40):
        logits, _ = make(3, 5)
        loss = smoothed_cross_entropy(logits, torch.tensor([0, bad, 4]), 0.1)
        assert loss.isnan()
        (gradient,) = torch.autograd.grad(loss, logits)
        assert gradient.isnan().any(1).tolist() == [False, True, False]


@inside
def test_what_the_kernel_does_not_do_is_left_to_torch():
    wide = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    probabilities = torch.rand(3, 5).softmax(1)
    images = torch.randn(2, 5, 3)
    for logits, labels in (
        (wide, torch.tensor([0, 1, 2])),
        (wide.float(), probabilities),
        (images, torch.zeros(2, 3, dtype=torch.long)),
    ):
        loss = smoothed_cross_entropy(logits, labels, 0.1)
        torch.testing.assert_close(loss, F.cross_entropy(logits, labels, label_smoothing=0.1), rtol=0, atol=0)
