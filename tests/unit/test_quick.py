"""Layers that are replaced by quicker ones: the same numbers, names and blocks as before."""

import copy

import pytest
import torch
from torch import nn

from hyperbatch.models import create_model
from hyperbatch.models.layers import Conv2d, adopt
from hyperbatch.models.quick import PatchConv2d, quicken
from hyperbatch.models.regions import find_regions


def results(model, images):
    """Logits, the gradient of the images, and all of the parameters', for a loss that weighs every value anew."""
    model.zero_grad()
    images = images.clone(memory_format=torch.preserve_format).requires_grad_()
    out = model(images)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    (out * weights).sum().backward()
    return {"out": out.detach(), "images": images.grad, **{n: p.grad for n, p in model.named_parameters()}}


def check_same(model, images, **tolerances):
    """The model that was quickened, after it was seen to compute what it did before."""
    plain = copy.deepcopy(model)
    quicken(model)
    ours, expect = results(model, images), results(plain, images)
    assert ours.keys() == expect.keys()
    for name, value in expect.items():
        torch.testing.assert_close(ours[name], value, **tolerances, msg=lambda text, name=name: f"{name}: {text}")
    return model


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("kernel", "channels", "size", "bias"),
    [(4, 3, (8, 12), True), ((2, 3), 5, (6, 9), False), (2, 1, (2, 2), True), ((1, 2), 4, (3, 4), True)],
)
def test_patches_and_a_product_are_the_convolution(kernel, channels, size, bias, dtype, memory_format):
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, 7, kernel, kernel, bias=bias).to(dtype).to(memory_format=memory_format)
    images = torch.randn(3, channels, *size, dtype=dtype).contiguous(memory_format=memory_format)
    wide = 1e-13 if dtype == torch.float64 else 2e-5
    assert type(check_same(conv, images, rtol=wide, atol=wide)) is PatchConv2d
    # The first channels of a wider image, as the loader may have them.
    padded = torch.randn(3, channels + 1, *size, dtype=dtype).contiguous(memory_format=memory_format)
    plain = nn.functional.conv2d(padded[:, :channels], conv.weight, conv.bias, conv.stride)
    torch.testing.assert_close(conv(padded[:, :channels]), plain, rtol=wide, atol=wide)


def test_pixels_beyond_the_last_patch_are_left_out_as_by_torch():
    conv = nn.Conv2d(3, 4, 4, 4)
    images = torch.randn(2, 3, 10, 9)
    expect, single = conv(images), conv(images[0])
    quicken(conv)
    assert torch.equal(conv(images), expect)
    assert torch.equal(conv(images[0]), single)
    assert expect.shape == (2, 4, 2, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_patches_of_16_bits_with_a_bias_of_32(dtype):
    torch.manual_seed(0)
    conv = quicken(Conv2d(3, 8, 4, 4)).to(memory_format=torch.channels_last)
    conv.weight.data = conv.weight.data.to(dtype)
    images = torch.randn(2, 3, 8, 8).to(dtype)
    out = conv(images)
    assert out.dtype == dtype
    assert out.is_contiguous(memory_format=torch.channels_last)
    expect = nn.functional.conv2d(images.double(), conv.weight.double(), conv.bias.double(), 4)
    torch.testing.assert_close(out.double(), expect, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
    out.sum().backward()
    assert conv.weight.grad.dtype == dtype
    assert conv.weight.grad.stride() == conv.weight.stride()  # moved to the arena as it lies
    assert conv.bias.grad.dtype == torch.float32


class Own(nn.Conv2d):
    pass


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 1),
        nn.Conv2d(4, 4, 3, 2),
        nn.Conv2d(4, 4, 2, 2, padding=1),
        nn.Conv2d(4, 4, 2, 2, dilation=2),
        nn.Conv2d(4, 4, 2, 2, groups=2),
        Own(4, 4, 2, 2),
        nn.ConvTranspose2d(4, 4, 2, 2),
    ],
    ids=["1x1", "overlapping", "padded", "dilated", "grouped", "another class", "transposed"],
)
def test_other_layers_stay_as_they_are(layer):
    before = type(layer)
    assert type(quicken(layer)) is before


@pytest.mark.parametrize("name", ["vit_cifar", "vit_s16"])
def test_a_transformer_keeps_its_blocks_parameters_and_state(name):
    model = create_model(name, classes=10, drop_path=0.1)
    parameters, state = dict(model.named_parameters()), list(model.state_dict())
    regions = [(region.name, region.kind) for region in find_regions(model)]
    quicken(model)
    assert type(model.patch_embed.proj) is PatchConv2d
    assert all(parameters[name] is param for name, param in model.named_parameters())
    assert list(model.state_dict()) == state
    assert [(region.name, region.kind) for region in find_regions(model)] == regions
    model.load_state_dict(create_model(name, classes=10).state_dict())


def test_a_transformer_computes_what_it_did():
    torch.manual_seed(0)
    model = create_model("vit_cifar", classes=10).double()
    nn.init.normal_(model.head.weight)
    model.blocks = model.blocks[:2]
    check_same(model, torch.randn(2, 3, 16, 16, dtype=torch.float64), rtol=1e-10, atol=1e-12)


def test_convolutions_of_others_are_replaced_once_they_are_ours():
    model = quicken(adopt(nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.GELU(), nn.Conv2d(4, 8, 2, 2))))
    assert [type(layer) for layer in model] == [PatchConv2d, nn.GELU, PatchConv2d]
    assert all(layer.takes_fp32_parameters for layer in (model[0], model[2]))
    quicken(model)  # again: nothing changes
    assert type(model[0]) is PatchConv2d
