"""Batch norm of a 1x1 convolution from the moments of its input, on a CUDA device: float64, the plain path, graphs."""

from __future__ import annotations

import pytest
import torch
from product_reference import (
    check,
    column_sums,
    error,
    make,
    nans,
    new_norm,
    plain,
    reference,
    statistics_errors,
    through_kernels,
)
from torch import nn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
if torch.cuda.is_available():
    from hyperbatch.kernels import norm as kernels
    from hyperbatch.kernels.norm.moments import normalise_with_moments
    from hyperbatch.kernels.norm.product import product_backward, product_statistics

# Tensor cores cut sums off instead of rounding them: some hundred steps of a program, each half a bit of 23.
SUMS = 4e-5
LAYERS = {"layer1": ((32, 56, 56), 64), "layer2": ((32, 28, 28), 128), "layer3": ((32, 14, 14), 256)}
LAYERS |= {"layer4": ((32, 7, 7), 512), "odd": ((3, 37, 41), 64), "narrow": ((3, 17, 23), 16)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("layer", LAYERS)
def test_agrees_with_float64(layer, dtype):
    size, c = LAYERS[layer]
    case = make(size, c, 4 * c, dtype, device="cuda", far=10.0 if layer == "odd" else 0.0, scale=0.01)
    check(case, through_kernels(case), sums=SUMS)


@pytest.mark.parametrize("layer", ["layer1", "layer2", "layer3"])
def test_no_worse_than_torch(layer):
    """torch rounds z and dz; here a w and Q are rounded instead."""
    size, c = LAYERS[layer]
    case = make(size, c, 4 * c, device="cuda", scale=0.01)
    exact, got, other = reference(case), through_kernels(case), plain(case)
    for name in ("rstd", "dy", "dw", "dweight"):
        ours, theirs = (error(getattr(result, name), getattr(exact, name)) for result in (got, other))
        print(f"{layer} {name}: {ours:.2e}, plain {theirs:.2e}")
        assert ours < 1.2 * theirs + SUMS


def test_moments_are_taken_while_y_is_made():
    for size, c in LAYERS.values():
        x = torch.randn(size[0], c, *size[1:], device="cuda").half().to(memory_format=torch.channels_last)
        norm, counters = nn.BatchNorm2d(c, device="cuda"), kernels.new_counters(x.device)
        with torch.no_grad():
            norm.bias.normal_()
            norm.weight[::3], norm.bias[::3] = 0.02, 2.0  # about a centre
        coef = kernels.statistics(x, norm, counters)
        y, moments = normalise_with_moments(x, coef, counters)
        assert torch.equal(y, kernels.normalise(x, coef))
        case = make(size, c, 4 * c, device="cuda", scale=0.01)
        case.y = y
        check(case, through_kernels(case, moments), sums=SUMS)


@pytest.mark.parametrize("made", [True, False], ids=["made", "there"])
@pytest.mark.parametrize("ratio", [0, 10, 200, 600])
@pytest.mark.parametrize("layer", LAYERS)
def test_statistics_wherever_the_means_are(layer, ratio, made):
    of_mean, of_variance = statistics_errors(*LAYERS[layer], ratio, made=made, device="cuda")
    print(f"{layer}, mean over deviation {ratio}: of the mean {of_mean:.1e}, of the variance {of_variance:.1e}")
    assert of_variance < 20 * SUMS
    assert of_mean < SUMS * max(ratio, 1)


def test_same_bits_every_time_and_in_a_graph():
    size, c = LAYERS["layer1"]
    case = make(size, c, 4 * c, device="cuda", scale=0.01)
    norm, counters = new_norm(case), kernels.new_counters(case.y.device)
    grads = kernels.NormGradients(*(nans(3, 4 * c, like=case.y) for _ in range(3)))
    dw, sum_g = nans(4 * c, c, like=case.y, dtype=torch.float16), column_sums(case.g)

    def step():
        kept = product_statistics(case.y, case.w, norm, counters)
        return kept.coef, product_backward(case.g, case.y, case.w, kept, sum_g, grads, dw, counters)

    first = [t.clone() for t in (*step(), dw)]
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, (*step(), dw)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        coef, dy = step()
    dw.fill_(float("nan"))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(first, (coef, dy, dw)))
