"""The tensor tables equal the models: names, shapes, kinds, sizes and the order backward really takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hyperbatch.models import create_model
from hyperbatch.models import model_names as built_in
from hyperbatch.params import backward_order, undecayed
from hyperbatch.plan.inventory import layers, model_names, tensors

SMALL = {"resnet8", "resnet20", "resnet32", "resnet44", "resnet56"}
NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)


def on_meta(name: str, **options: int) -> nn.Module:
    with torch.device("meta"):
        return create_model(name, **options)


def test_every_built_in_model_has_a_table() -> None:
    assert set(model_names()) == set(built_in())


@pytest.mark.parametrize("name", model_names())
def test_names_shapes_and_kinds(name: str) -> None:
    model = on_meta(name, classes=10)
    of_norms = {
        f"{path}.{local}"
        for path, module in model.named_modules()
        if isinstance(module, NORMS)
        for local, _ in module.named_parameters(recurse=False)
    }

    def kind(parameter: str) -> str:
        if parameter in of_norms:
            return "norm"
        return "bias" if parameter.endswith("bias") else "weight"

    expected = {n: (tuple(p.shape), kind(n)) for n, p in model.named_parameters() if p.requires_grad}
    table = tensors(name, classes=10)
    assert {spec.name: (spec.shape, spec.kind) for spec in table} == expected
    assert {spec.name for spec in table if not spec.decayed} == undecayed(model) & expected.keys()


@pytest.mark.parametrize(
    ("name", "image_size"),
    [
        ("resnet50", 64),
        ("resnet50d", 70),
        ("resnet8", 16),
        ("alexnet_bn_pool5", 64),
        ("whitenet", 32),
        ("whitenet_deep", 16),
        ("vit_cifar", 16),
    ],
)
def test_order_and_activations(name: str, image_size: int) -> None:
    """The probe's order, and each table layer's output size, by watching one real step."""
    torch.manual_seed(0)
    model = create_model(name, classes=10)
    table = {layer.name: layer for layer in layers(name, classes=10, image_size=image_size)}
    seen: dict[str, int] = {}
    for path, module in model.named_modules():
        if path in table:
            module.register_forward_hook(lambda _m, _i, out, path=path: seen.__setitem__(path, out[0].numel()))
    images = torch.randn(2, 3, image_size, image_size)

    order = backward_order(model, lambda: model(images).sum().backward())

    assert order == [spec.name for spec in tensors(name, classes=10)]
    assert seen == {path: table[path].activations for path in seen}
    assert {layer.name for layer in table.values() if layer.tensors} <= set(seen)
