"""Identity convolutions pass images on; whitened patches have the identity as their covariance."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hyperbatch.errors import InputError
from hyperbatch.models import create_model
from hyperbatch.models.initial import WHITEN_EPS, dirac_, whitening_filters, whitening_layer


@pytest.mark.parametrize(("inputs", "outputs", "kernel"), [(3, 5, 3), (4, 4, 5), (6, 2, 3), (2, 3, (1, 3))])
def test_dirac_passes_the_first_channels_on(inputs, outputs, kernel):
    torch.manual_seed(0)
    conv = nn.Conv2d(inputs, outputs, kernel, padding="same", bias=False)
    before = conv.weight.detach().clone()
    dirac_(nn.Sequential(conv))
    x = torch.randn(2, inputs, 7, 7)
    same = min(inputs, outputs)
    assert torch.equal(conv(x)[:, :same], x[:, :same])
    assert torch.equal(conv.weight[same:], before[same:]), "further outputs keep what was drawn"
    assert conv.weight.requires_grad


@pytest.mark.parametrize(
    "conv", [nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(3, 4, 2), nn.Linear(3, 4)], ids=repr
)
def test_dirac_leaves_other_layers_alone(conv):
    before = conv.weight.detach().clone()
    dirac_(conv)
    assert torch.equal(conv.weight, before)
    frozen = nn.Conv2d(3, 4, 3)
    frozen.weight.requires_grad_(False)
    before = frozen.weight.clone()
    dirac_(frozen)
    assert torch.equal(frozen.weight, before)


@pytest.mark.parametrize("name", ["whitenet", "resnet8"])
def test_init_reaches_the_models_and_draws_nothing(name):
    torch.manual_seed(0)
    plain = dict(create_model(name, classes=10).named_parameters())
    torch.manual_seed(0)
    model = create_model(name, classes=10, init="dirac")
    identities = 0
    for key, param in model.named_parameters():
        if param.ndim == 4 and param.shape[-1] == 3:
            rows = min(param.shape[:2])
            assert torch.equal(param[:rows, :, 1, 1], torch.eye(*param.shape[:2])[:rows])
            assert torch.equal(param[rows:], plain[key][rows:])
            identities += 1
        else:
            assert torch.equal(param, plain[key])
    assert identities == {"whitenet": 6, "resnet8": 7}[name]


def natural(samples: int, channels: int = 3, side: int = 12) -> torch.Tensor:
    """Images whose neighbours resemble each other, with channels that do, too."""
    noise = torch.randn(samples, channels, side + 4, side + 4, generator=torch.Generator().manual_seed(1))
    smooth = F.avg_pool2d(noise, 5, stride=1) * 5
    return smooth + 0.7 * smooth.mean(1, keepdim=True) + 0.05 * noise[:, :, 2:-2, 2:-2]


@pytest.mark.parametrize(("channels", "kernel"), [(3, (2, 2)), (1, (3, 3)), (2, (1, 2))])
def test_whitened_patches_have_the_identity_as_covariance(channels, kernel):
    images = natural(200, channels).double()
    elements = channels * kernel[0] * kernel[1]
    filters = whitening_filters([images], kernel, eps=0.0)
    assert filters.shape == (2 * elements, channels, *kernel)
    assert torch.equal(filters[elements:], -filters[:elements])
    whitened = F.conv2d(images, filters[:elements]).permute(1, 0, 2, 3).flatten(1)
    covariance = whitened @ whitened.T / whitened.shape[1]
    torch.testing.assert_close(covariance, torch.eye(elements, dtype=torch.float64), rtol=0, atol=1e-9)


def test_filters_are_the_scaled_eigenvectors_of_the_moments_of_patches():
    """From the definition, with torch's own unfold; eps damps the directions in which the images hardly differ."""
    images = natural(50).double()
    filters = whitening_filters([images], (2, 2))
    patches = F.unfold(images, (2, 2)).transpose(0, 1).flatten(1)
    moments = patches @ patches.T / patches.shape[1]
    rows = filters[:12].flatten(1)
    values = torch.linalg.eigvalsh(moments)
    assert values[0] < WHITEN_EPS * 100, "or the data would not show what eps does"
    torch.testing.assert_close(rows @ moments @ rows.T, torch.diag(values / (values + WHITEN_EPS)), rtol=0, atol=1e-9)
    torch.testing.assert_close(rows.norm(dim=1), (values + WHITEN_EPS).rsqrt(), rtol=1e-9, atol=0)


def test_batches_layout_and_precision_do_not_matter():
    images = natural(64)
    whole = whitening_filters([images.double()], (2, 2))
    parts = whitening_filters(images.double().split(24), (2, 2))
    torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-9)
    other = whitening_filters([images.to(memory_format=torch.channels_last)], (2, 2))
    assert other.dtype == torch.float32
    torch.testing.assert_close(other.abs(), whole.float().abs(), rtol=0, atol=1e-3)  # the sign of a vector is free
    half = whitening_filters([images.half()], (2, 2))
    assert half.dtype == torch.float32
    assert torch.equal(half, whitening_filters([images.half().float()], (2, 2))), "16-bit images are widened first"


def test_constant_images_give_finite_filters():
    filters = whitening_filters([torch.zeros(2, 3, 8, 8)], (2, 2))
    assert torch.isfinite(filters).all()
    with pytest.raises(ValueError, match="at least one batch"):
        whitening_filters([], (2, 2))


def test_the_whitening_layer_is_the_first_convolution():
    model = create_model("whitenet", classes=10)
    name, layer = whitening_layer(model)
    assert name == "whiten"
    assert layer is model.get_submodule("whiten")
    with pytest.raises(InputError, match="conv1, the first convolution of ResNet, has 16 outputs, not 54") as caught:
        whitening_layer(create_model("resnet8"))
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="has no convolution"):
        whitening_layer(nn.Linear(2, 2))
