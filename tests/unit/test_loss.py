"""Label-smoothed cross entropy against its definition and torch's own."""

import pytest
import torch
from torch.nn import functional as F

from hyperbatch.models import smoothed_cross_entropy


def by_definition(logits, labels, smoothing):
    classes = logits.shape[1]
    target = torch.full_like(logits, smoothing / classes)
    target[torch.arange(len(labels)), labels] += 1 - smoothing
    return -(target * logits.log_softmax(1)).sum(1).mean()


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_its_definition_and_torchs(smoothing, dtype):
    torch.manual_seed(0)
    logits = torch.randn(9, 13, dtype=dtype, requires_grad=True)
    labels = torch.randint(13, (9,))
    loss = smoothed_cross_entropy(logits, labels, smoothing)
    assert loss.dtype == dtype
    torch.testing.assert_close(loss, by_definition(logits, labels, smoothing))
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels, label_smoothing=smoothing))
    (gradient,) = torch.autograd.grad(loss, logits)
    (expect,) = torch.autograd.grad(by_definition(logits, labels, smoothing), logits)
    torch.testing.assert_close(gradient, expect)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_logits_are_widened_first(dtype):
    torch.manual_seed(0)
    logits = (10 * torch.randn(9, 13)).to(dtype).requires_grad_()
    labels = torch.randint(13, (9,))
    loss = smoothed_cross_entropy(logits, labels, 0.1)
    assert loss.dtype == torch.float32
    # exactly fp32's value of the rounded logits: only the input was rounded
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), labels, label_smoothing=0.1), rtol=0, atol=0)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.dtype == dtype


def test_smoothing_keeps_a_certain_prediction_from_being_free():
    logits, labels = torch.tensor([[100.0, 0.0]]), torch.tensor([0])
    assert smoothed_cross_entropy(logits, labels, 0.0).item() == pytest.approx(0)
    assert smoothed_cross_entropy(logits, labels, 0.1).item() == pytest.approx(0.05 * 100)
