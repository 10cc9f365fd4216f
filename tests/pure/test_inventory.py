"""The tensor tables, against published figures and their own identities."""

from __future__ import annotations

import pytest

from hyperbatch.errors import InputError
from hyperbatch.plan.inventory import layers, model_names, tensors, training_flops


@pytest.mark.parametrize(
    ("model", "count", "parameters", "gmacs"),
    [
        ("resnet18", 62, 11_689_512, 1.814),
        ("resnet34", 110, 21_797_672, 3.664),
        ("resnet50", 161, 25_557_032, 4.089),
        ("resnet50d", 167, 25_576_264, 4.329),
        ("resnet101", 314, 44_549_160, 7.801),
        ("resnet152", 467, 60_192_808, 11.514),
    ],
)
def test_counts_are_torchvisions_and_timms(model: str, count: int, parameters: int, gmacs: float) -> None:
    specs = tensors(model)
    assert len(specs) == count
    assert len({spec.name for spec in specs}) == count
    assert sum(spec.numel for spec in specs) == parameters
    assert sum(layer.macs for layer in layers(model)) == pytest.approx(gmacs * 1e9, rel=2e-4)


def test_alexnet_is_torchvisions_with_norms_instead_of_conv_biases() -> None:
    plain = 61_100_840  # torchvision's alexnet
    conv_biases, norms = 64 + 192 + 384 + 256 + 256, 2 * (64 + 192 + 384 + 256 + 256)
    assert sum(spec.numel for spec in tensors("alexnet_bn")) == plain - conv_biases + norms
    extra = {spec.name for spec in tensors("alexnet_bn_pool5")} - {spec.name for spec in tensors("alexnet_bn")}
    assert extra == {"features.18.weight", "features.18.bias"}


def test_small_resnets_have_their_depth_in_weight_layers() -> None:
    for depth in (8, 20, 32, 44, 56):
        table = layers(f"resnet{depth}", classes=10, image_size=32)
        assert sum(layer.kind in ("conv", "linear") and "downsample" not in layer.name for layer in table) == depth


def test_backward_finishes_the_head_first_and_the_stem_last() -> None:
    names = [spec.name for spec in tensors("resnet50")]
    assert names[:4] == ["fc.bias", "fc.weight", "layer4.2.bn3.weight", "layer4.2.bn3.bias"]
    assert names[-3:] == ["bn1.weight", "bn1.bias", "conv1.weight"]
    shortcut, main = names.index("layer4.0.downsample.0.weight"), names.index("layer4.0.bn3.weight")
    assert shortcut < main, "the shortcut is recorded last in forward, so its backward runs first"


def test_dtype_policy() -> None:
    half = tensors("resnet50", dtype="float16")
    assert {spec.dtype for spec in half if spec.kind == "weight"} == {"float16"}
    assert {spec.dtype for spec in half if spec.kind != "weight"} == {"float32"}
    assert [spec.name for spec in half] == [spec.name for spec in tensors("resnet50")]
    assert {spec.dtype for spec in tensors("resnet50", dtype="float64")} == {"float64"}
    # Fujitsu: "about 216 KB" of fp32 norm and bias gradients, 51 MB of fp16 weights
    assert sum(s.nbytes for s in half if s.dtype == "float32") == pytest.approx(216e3, rel=0.01)
    assert sum(s.nbytes for s in half if s.dtype == "float16") == pytest.approx(51e6, rel=0.01)


def test_a_training_image_costs_24_gflop() -> None:
    assert training_flops("resnet50") == pytest.approx(24.3e9, rel=1e-3)


def test_whitenet_costs_what_its_layers_do() -> None:
    """airbench94's sizes, counted by hand; the whitening layer's filters need no gradient, nor do the images."""
    options = {"classes": 10, "image_size": 32}
    # (inputs, outputs, side): a group's first convolution runs before its pool
    convolutions = ((24, 64, 31), (64, 64, 15), (64, 256, 15), (256, 256, 7), (256, 256, 7), (256, 256, 3))
    macs = sum(9 * inputs * outputs * side**2 for inputs, outputs, side in convolutions) + 2560
    whiten = 12 * 24 * 31**2
    assert sum(layer.macs for layer in layers("whitenet", **options)) == macs + whiten
    assert training_flops("whitenet", **options) == 2 * (3 * macs + whiten)
    names = [spec.name for spec in tensors("whitenet", classes=10)]
    assert names[0] == "head.weight"
    assert names[-1] == "whiten.bias"
    assert not any(name.endswith("norm.weight") for name in names)


def test_a_vision_transformer_costs_what_its_layers_do() -> None:
    """Counted by hand: each of 196 tokens meets twelve matrices of a block's size, and all other tokens twice."""
    tokens, width, blocks = 14 * 14, 384, 12
    matrices = tokens * width * width * (3 + 1 + 4 + 4)
    macs = tokens * width * 3 * 16 * 16 + blocks * (matrices + 2 * tokens * tokens * width) + width * 1000
    assert sum(layer.macs for layer in layers("vit_s16")) == macs
    assert macs == pytest.approx(4.6e9, rel=0.01)  # what others give for ViT-S/16
    assert training_flops("vit_s16") == 2 * (3 * macs - tokens * width * 3 * 16 * 16)
    names = [spec.name for spec in tensors("vit_s16")]
    assert names[:3] == ["head.bias", "head.weight", "norm.weight"]
    assert names[-2:] == ["patch_embed.proj.weight", "patch_embed.proj.bias"]


def test_classes_channels_and_image_size_shape_the_tables() -> None:
    assert {s.name: s.shape for s in tensors("resnet20", classes=10, in_channels=1)}["fc.weight"] == (10, 64)
    assert {s.name: s.shape for s in tensors("resnet20", in_channels=1)}["conv1.weight"] == (16, 1, 3, 3)
    macs = [sum(layer.macs for layer in layers("resnet20", image_size=side)) for side in (8, 16)]
    head = 64 * 1000
    assert (macs[1] - head) == 4 * (macs[0] - head)
    with pytest.raises(InputError, match="image size too small"):
        layers("alexnet_bn", image_size=32)


def test_unknown_model_names_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'resnet50'"):
        layers("resnet_50")
    assert "resnet50" in model_names()
