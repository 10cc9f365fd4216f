"""Binary cross entropy of every class: torch's, timm's, and one kernel by Triton's interpreter against float64."""

from __future__ import annotations

import math

import pytest
import torch
from hopper import compile_launches
from interpreter import inside, outside, run_by_the_interpreter
from torch.nn import functional as F

from hyperbatch.config import Config
from hyperbatch.errors import InputError
from hyperbatch.models import Loss, binary_cross_entropy, mixed_cross_entropy, smoothed_cross_entropy


@outside
def test_kernels_by_the_interpreter():
    run_by_the_interpreter(__file__)


def make(rows, classes, dtype=torch.float32, *, mixed=False, spread=3.0):
    generator = torch.Generator().manual_seed(rows * classes)
    logits = (torch.randn(rows, classes, generator=generator) * spread).to(dtype).requires_grad_()
    labels = torch.randint(classes, (rows,), generator=generator)
    if not mixed:
        return logits, labels
    shares = torch.rand(rows, generator=generator)
    return logits, torch.stack([labels.float(), labels.roll(1).float(), shares], dim=1)


def by_definition(logits, labels, smoothing, threshold):
    """Question by question, in float64."""
    logits, total = logits.double(), 0.0
    rows, classes = logits.shape
    for row, label in zip(logits, labels.tolist(), strict=True):
        shares = [0.0] * classes
        first, second, share = label if isinstance(label, list) else (label, label, 1.0)
        shares[int(first)] += share
        shares[int(second)] += 1 - share
        for logit, share in zip(row, shares, strict=True):
            q = float(share > threshold) if threshold else share
            q = q * (1 - smoothing) + smoothing / classes
            total = total - q * F.logsigmoid(logit) - (1 - q) * F.logsigmoid(-logit)
    return total / (rows * classes)


CASES = [(smoothing, threshold) for smoothing in (0.0, 0.1) for threshold in (0.0, 0.2)]


@outside
@pytest.mark.parametrize("mixed", [False, True], ids=["labels", "mixed"])
@pytest.mark.parametrize(("smoothing", "threshold"), CASES)
def test_equals_its_definition(smoothing, threshold, mixed):
    logits, labels = make(7, 5, torch.float64, mixed=mixed)
    loss = binary_cross_entropy(logits, labels, smoothing, threshold)
    expect = by_definition(logits, labels, smoothing, threshold)
    torch.testing.assert_close(loss, expect, rtol=1e-7 if mixed else 1e-12, atol=0)  # shares are fp32
    ours, theirs = (torch.autograd.grad(value, logits)[0] for value in (loss, expect))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-12)


@outside
def test_a_class_above_the_threshold_is_there_and_a_faint_one_is_not():
    logits = torch.tensor([[2.0, -1.0, 0.5]])
    label = lambda share: torch.tensor([[0.0, 1.0, share]])  # noqa: E731
    both = F.binary_cross_entropy_with_logits(logits, torch.tensor([[1.0, 1.0, 0.0]]))
    one = F.binary_cross_entropy_with_logits(logits, torch.tensor([[1.0, 0.0, 0.0]]))
    assert torch.equal(binary_cross_entropy(logits, label(0.7), 0.0, 0.2), both)
    assert torch.equal(binary_cross_entropy(logits, label(0.85), 0.0, 0.2), one)
    # A pair of one class is wholly of it.
    same = torch.tensor([[0.0, 0.0, 0.1]])
    torch.testing.assert_close(binary_cross_entropy(logits, same, 0.0), one)


@outside
def test_a_runs_loss_is_the_one_it_names():
    logits, labels = make(6, 4)
    _, mixed = make(6, 4, mixed=True)
    assert torch.equal(Loss(smoothing=0.1)(logits, labels), smoothed_cross_entropy(logits, labels, 0.1))
    assert torch.equal(Loss(smoothing=0.1)(logits, mixed), mixed_cross_entropy(logits, mixed, 0.1))
    found = Loss(name="bce", smoothing=0.1, threshold=0.2)(logits, mixed)
    assert torch.equal(found, binary_cross_entropy(logits, mixed, 0.1, 0.2))
    with pytest.raises(InputError, match=r"--bce-threshold 0.2: needs --loss bce"):
        Config().override(bce_threshold=0.2)
    with pytest.raises(InputError, match="--loss: 'mse' is not one of cross_entropy, bce"):
        Config().override(loss="mse")


@outside
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_logits_are_widened_first(dtype):
    logits, labels = make(6, 9, dtype)
    loss = binary_cross_entropy(logits, labels, 0.1)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, binary_cross_entropy(logits.detach().float(), labels, 0.1), rtol=0, atol=0)


def both(logits, labels, smoothing, threshold, scale=1.0):
    """((loss, gradient) of ours, with nan wherever nothing is written, and of torch in float64)."""
    torch.use_deterministic_algorithms(True)
    try:
        loss = binary_cross_entropy(logits, labels, smoothing, threshold)
        (gradient,) = torch.autograd.grad(loss * scale, logits)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "BinaryCrossEntropy" in type(loss.grad_fn).__name__  # not torch against itself
    wide = logits.detach().double().requires_grad_()
    expect = binary_cross_entropy(wide, labels, smoothing, threshold)
    assert "BinaryCrossEntropyWithLogits" in type(expect.grad_fn).__name__ or expect.dtype == torch.float64
    return (loss.detach(), gradient), (expect.detach(), torch.autograd.grad(expect * scale, wide)[0])


@inside
@pytest.mark.parametrize("mixed", [False, True], ids=["labels", "mixed"])
@pytest.mark.parametrize(("smoothing", "threshold"), CASES)
@pytest.mark.parametrize("size", [(1, 1), (1, 10), (7, 13), (3, 1000), (5, 1025)], ids=str)
def test_agrees_with_float64(size, smoothing, threshold, mixed):
    (loss, gradient), (expect, expect_gradient) = both(*make(*size, mixed=mixed), smoothing, threshold)
    assert loss.dtype == gradient.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expect, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient.double(), expect_gradient, rtol=1e-5, atol=1e-7 / size[1])


@inside
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_logits_and_a_loss_scale(dtype):
    (loss, gradient), (expect, expect_gradient) = both(*make(6, 1000, dtype), 0.0, 0.0, scale=2.0**16)
    assert loss.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(loss.double(), expect, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient.double(), expect_gradient, rtol=torch.finfo(dtype).eps, atol=1e-6)


@inside
def test_large_and_infinite_logits():
    logits = torch.tensor([[1e30, -1e30, 0.0], [3.0, float("-inf"), 1.0]], requires_grad=True)
    loss = binary_cross_entropy(logits, torch.tensor([0, 2]), 0.0)
    log2, last = math.log(2), math.log1p(math.exp(-1))
    assert loss.item() == pytest.approx((log2 + 3 + math.log1p(math.exp(-3)) + last) / 6, rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, logits)
    expect = [[0, 0, 0.5], [1 / (1 + math.exp(-3)), 0, 1 / (1 + math.exp(-1)) - 1]]
    torch.testing.assert_close(gradient, torch.tensor(expect) / 6)


@inside
def test_labels_that_name_no_class_make_nan():
    for bad in (-1, 5, 2**40):
        logits, _ = make(3, 5)
        loss = binary_cross_entropy(logits, torch.tensor([0, bad, 4]), 0.1)
        assert loss.isnan()
        (gradient,) = torch.autograd.grad(loss, logits)
        assert gradient.isnan().any(1).tolist() == [False, True, False]


@outside
def test_the_kernel_compiles_for_hopper(monkeypatch):
    pytest.importorskip("triton")
    from hyperbatch.kernels import loss

    compiled = compile_launches(monkeypatch, loss)
    logits, labels = make(6, 1000, torch.float16, mixed=True)
    loss.BinaryCrossEntropy.apply(logits, labels, 0.1, 0.2)
    assert "ld.global" in compiled["_binary_loss_kernel"]
