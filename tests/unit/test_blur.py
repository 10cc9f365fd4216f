"""Blurred down-sampling against its definition: a depthwise convolution with a fixed filter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hyperbatch.config import ModelConfig
from hyperbatch.errors import InputError
from hyperbatch.models import create_model
from hyperbatch.models.blur import BlurConv2d, BlurMaxPool2d, blur
from hyperbatch.models.build import create_from

SIZES = [(1, 1), (2, 3), (8, 8), (9, 6)]


def reference(x: Tensor, stride: int = 1) -> Tensor:
    line = torch.tensor([1.0, 2.0, 1.0], dtype=x.dtype) / 4
    filters = torch.outer(line, line).expand(x.shape[1], 1, 3, 3)
    return F.conv2d(x, filters, stride=stride, padding=1, groups=x.shape[1])


def images(size: tuple[int, int], channels: int = 4) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, channels, *size, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_the_blur_is_a_depthwise_convolution(size, stride):
    x = images(size)
    got, want = blur(x, stride), reference(x, stride)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(want)
    (dx,), (expected,) = (torch.autograd.grad((out * weights).sum(), x) for out in (got, want))
    torch.testing.assert_close(dx, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_a_strided_convolution_sees_blurred_pixels(size, kernel):
    conv = BlurConv2d(4, 6, kernel, stride=2, padding=kernel // 2, bias=False).double()
    x = images(size)
    want = F.conv2d(reference(x), conv.weight, stride=2, padding=kernel // 2)
    got = conv(x)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    inputs, weights = (x, conv.weight), torch.randn_like(want)
    for d, expected in zip(*(torch.autograd.grad((out * weights).sum(), inputs) for out in (got, want)), strict=True):
        torch.testing.assert_close(d, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_maxima_are_blurred_before_some_are_dropped(size):
    x = images(size)
    want = reference(F.max_pool2d(x, 3, stride=1, padding=1), 2)
    torch.testing.assert_close(BlurMaxPool2d(3, stride=2, padding=1)(x), want, rtol=1e-12, atol=1e-12)


def test_a_shift_by_a_pixel_changes_a_blurred_pool_less():
    torch.manual_seed(0)
    x = torch.randn(4, 8, 33, 33)

    def change(pool: nn.Module) -> float:
        here, there = pool(x[..., :-1, :-1]), pool(x[..., 1:, 1:])
        return float((here - there)[..., 1:-1, 1:-1].norm() / here.norm())

    assert change(BlurMaxPool2d(3, stride=2, padding=1)) < 0.6 * change(nn.MaxPool2d(3, stride=2, padding=1))


@pytest.mark.parametrize(
    ("name", "blurred"),
    [
        ("resnet50", {"maxpool", *(f"layer{k}.0.{conv}" for k in (2, 3, 4) for conv in ("conv2", "downsample.0"))}),
        ("resnet20", {f"layer{k}.0.{conv}" for k in (2, 3) for conv in ("conv1", "downsample.0")}),
    ],
)
def test_every_stride_but_the_first_is_blurred(name, blurred):
    torch.manual_seed(0)
    plain = create_model(name, classes=5)
    torch.manual_seed(0)
    model = create_from(ModelConfig(model=name, blurpool=True), classes=5, in_channels=3)
    found = {path for path, module in model.named_modules() if isinstance(module, BlurConv2d | BlurMaxPool2d)}
    assert found == blurred
    strided = {path for path, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.stride != (1, 1)}
    assert strided - found == ({"conv1"} if name == "resnet50" else set())
    state, own = plain.state_dict(), model.state_dict()
    assert list(state) == list(own)
    assert all(torch.equal(state[key], own[key]) for key in state), "the same draw of weights"
    x = torch.randn(2, 3, 64, 64)
    assert plain(x).shape == model(x).shape


@pytest.mark.parametrize("name", ["alexnet_bn", "whitenet", "timm/resnet50", "test_blur:images"])
def test_other_models_have_none(name):
    with pytest.raises(InputError, match=f"--blurpool: only the built-in ResNets have it, not {name}; leave it off"):
        create_model(name, blurpool=True)
