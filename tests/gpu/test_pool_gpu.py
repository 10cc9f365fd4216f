"""Batch norm + ReLU + max-pool, means of 2x2 pixels, blurs and the loss on a CUDA device, at sizes of 224-px images."""

from __future__ import annotations

import pytest
import torch
from average_reference import check as check_means
from average_reference import make as make_pixels
from blur_reference import check as check_blur
from pool_reference import ALEXNET, RESNET, check, make, reference, through_kernels
from torch.nn import functional as F

from hyperbatch.engine.kernel_choice import training_kernels
from hyperbatch.models import smoothed_cross_entropy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STEMS = {
    "resnet": ((4, 64, 112, 112), RESNET),
    "alexnet1": ((4, 64, 55, 55), ALEXNET),
    "alexnet2": ((4, 192, 27, 27), ALEXNET),
    "alexnet5": ((4, 256, 13, 13), ALEXNET),
    "odd": ((1, 24, 75, 101), RESNET),
    "before a blur": ((4, 64, 112, 112), {"kernel": 3, "stride": 1, "padding": 1}),
}


@pytest.mark.parametrize("stem", STEMS)
def test_agrees_with_float64(stem):
    size, window = STEMS[stem]
    check(*make(*size, device="cuda"), window)


def test_bf16():
    size, window = STEMS["resnet"]
    check(*make(*size, torch.bfloat16, "cuda"), window)


@pytest.mark.parametrize("window", [RESNET, ALEXNET], ids=["resnet", "alexnet"])
def test_ties_go_to_the_first(window):
    _, weight, bias = make(2, 64, 56, 57, device="cuda")
    x = torch.randint(-2, 3, (2, 64, 56, 57), generator=torch.Generator().manual_seed(4)).half().cuda()
    check(x.to(memory_format=torch.channels_last), weight, bias, window)


def test_same_bits_every_time():
    x, weight, bias = make(16, 64, 112, 112, device="cuda")
    _, _, coef, _ = reference(x, weight, bias, RESNET)
    dpooled = torch.randn(16, 64, 56, 56, device="cuda").half().to(memory_format=torch.channels_last)
    runs = [through_kernels(x, coef, RESNET, dpooled) for _ in range(3)]
    for pooled, peaks, dx, grads in runs[1:]:
        first = runs[0]
        assert torch.equal(pooled, first[0])
        assert torch.equal(peaks.tap, first[1].tap)
        assert torch.equal(dx, first[2])
        assert torch.equal(grads.weight, first[3].weight)
        assert torch.equal(grads.back, first[3].back)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [(8, 256, 56, 56), (4, 512, 28, 28), (7, 1024, 13, 7), (256, 256, 56, 57)], ids=str)
def test_means_agree_with_float64(size, dtype):
    check_means(make_pixels(*size, dtype, "cuda"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(8, 256, 56, 56), (4, 64, 112, 112), (7, 1024, 13, 7), (256, 128, 56, 57)], ids=str)
def test_blurs_agree_with_float64(size, stride, dtype):
    check_blur(make_pixels(*size, dtype, "cuda"), stride)


@pytest.mark.parametrize("options", [{"padding": 1}, {"padding": 1, "count_include_pad": False}, {}], ids=str)
def test_gradients_of_torchs_pool_are_right_in_training(options):
    torch.manual_seed(0)
    x = torch.randn(8, 64, 28, 29, dtype=torch.float64, requires_grad=True)
    y = F.avg_pool2d(x, 3, 2, **options)
    dy = torch.randn(y.shape, dtype=torch.float64)
    on_gpu = x.detach().cuda().to(memory_format=torch.channels_last).requires_grad_()
    with training_kernels(deterministic=False):
        (gradient,) = torch.autograd.grad(F.avg_pool2d(on_gpu, 3, 2, **options), on_gpu, dy.cuda())
    torch.testing.assert_close(gradient.cpu(), torch.autograd.grad(y, x, dy)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_loss_agrees_with_float64(dtype):
    torch.manual_seed(0)
    logits = (torch.randn(256, 1000, device="cuda") * 3).to(dtype).requires_grad_()
    labels = torch.randint(1000, (256,), device="cuda")
    scale = 2.0**16
    loss = smoothed_cross_entropy(logits, labels, 0.1)
    (gradient,) = torch.autograd.grad(loss * scale, logits)
    wide = logits.detach().double().requires_grad_()
    expect = F.cross_entropy(wide, labels, label_smoothing=0.1)
    (expect_gradient,) = torch.autograd.grad(expect * scale, wide)
    assert loss.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(loss.double(), expect, rtol=1e-6, atol=2e-6)
    # fp32 arithmetic, then one rounding to the dtype; p - q cancels where p is close to q.
    rtol = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(gradient.double(), expect_gradient, rtol=rtol, atol=1e-4)


def test_loss_never_waits_and_is_captured_in_a_graph():
    torch.manual_seed(0)
    logits = torch.randn(42, 1000, device="cuda", requires_grad=True)
    labels = torch.randint(1000, (42,), device="cuda")
    scale = torch.tensor(128.0, device="cuda")

    def step():
        loss = smoothed_cross_entropy(logits, labels, 0.1)
        return loss.detach(), torch.autograd.grad(loss * scale, logits)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        logits.copy_(torch.randn_like(logits))
        labels.copy_(torch.randint_like(labels, 1000))
        scale.fill_(1024.0)
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)
