"""The speed-run networks against a forward of plain functions, and their frozen parameters in arena and optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hyperbatch import vocabulary
from hyperbatch.arena import Arena
from hyperbatch.config import ModelConfig, OptimConfig
from hyperbatch.errors import InputError
from hyperbatch.models import create_from, create_model
from hyperbatch.models.norm import BatchNorm2d
from hyperbatch.models.whitenet import ACTIVATIONS, ConvUnit
from hyperbatch.optim.build import build_optimizer
from hyperbatch.params import backward_order


def reference(state: dict[str, Tensor], x: Tensor, depth: int, act, eps: float) -> Tensor:
    """The published network in training mode, written down once more from its description."""

    def norm(x: Tensor, shift: Tensor) -> Tensor:
        mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), correction=0, keepdim=True)
        return (x - mean) / (var + eps).sqrt() + shift.view(1, -1, 1, 1)

    x = act(F.conv2d(x, state["whiten.weight"], state["whiten.bias"]))
    for group in ("group1", "group2", "group3"):
        x = F.conv2d(x, state[f"{group}.0.conv.weight"], padding=1)
        x = first = act(norm(F.max_pool2d(x, 2), state[f"{group}.0.norm.bias"]))
        x = act(norm(F.conv2d(x, state[f"{group}.1.conv.weight"], padding=1), state[f"{group}.1.norm.bias"]))
        if depth == 3:
            x = norm(F.conv2d(x, state[f"{group}.2.conv.weight"], padding=1), state[f"{group}.2.norm.bias"])
            x = act(x + first)
    assert x.shape[2:] == (3, 3)
    return F.max_pool2d(x, 3).flatten(1) @ state["head.weight"].T / 9


@pytest.mark.parametrize("activation", ["gelu", "silu"])
@pytest.mark.parametrize(("name", "depth"), [("whitenet", 2), ("whitenet_deep", 3)])
def test_forward_and_gradients_are_those_of_plain_functions(name, depth, activation):
    torch.manual_seed(0)
    model = create_model(name, classes=10, activation=activation, bn_eps=1e-12).double()
    for param in model.parameters():
        if param.ndim == 1 and param.requires_grad:
            torch.nn.init.normal_(param)  # shifts of 0 would hide that they are used
    x, weights = torch.randn(4, 3, 32, 32, dtype=torch.float64), torch.randn(4, 10, dtype=torch.float64)
    state = {key: p.detach().clone().requires_grad_(p.requires_grad) for key, p in model.named_parameters()}
    expected = reference(state, x, depth, F.gelu if activation == "gelu" else F.silu, 1e-12)
    logits = model(x)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    for key, param in model.named_parameters():
        if param.requires_grad:
            torch.testing.assert_close(param.grad, state[key].grad, rtol=1e-7, atol=1e-9, msg=key)
        else:
            assert param.grad is None


@pytest.mark.parametrize(
    ("name", "convolutions", "norms", "last"),
    [
        ("whitenet", [(24, 64), (64, 64), (64, 256), (256, 256), (256, 256), (256, 256)], 1152, 256),
        (
            "whitenet_deep",
            [(24, 128), *[(128, 128)] * 2, (128, 384), *[(384, 384)] * 2, (384, 512), *[(512, 512)] * 2],
            3072,
            512,
        ),
    ],
)
def test_sizes(name, convolutions, norms, last):
    model = create_model(name, classes=10)
    weights = sum(9 * inputs * outputs for inputs, outputs in convolutions) + 10 * last
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert trained == weights + norms + 24  # the shifts, and the bias of the whitening layer
    assert frozen == 24 * 12 + norms  # the whitening filters and the scales
    if name == "whitenet":
        assert trained + frozen == 1_972_792  # what airbench94 counts: 1.97 M


def test_the_norms_are_the_configs_and_their_scale_is_fixed():
    model = create_model("whitenet", classes=10, bn_momentum=0.4, bn_eps=1e-12)
    norms = [module for module in model.modules() if isinstance(module, BatchNorm2d)]
    assert len(norms) == 6
    for norm in norms:
        assert (norm.momentum, norm.eps) == (0.4, 1e-12)
        assert not norm.weight.requires_grad
        assert norm.bias.requires_grad
        assert torch.all(norm.weight == 1)


def test_every_model_option_of_a_config_reaches_the_model():
    config = ModelConfig(model="whitenet", bn_momentum=0.4, bn_eps=1e-3, activation="silu", init="dirac")
    model = create_from(config, classes=6, in_channels=1)
    unit = model.get_submodule("group2.1")
    assert isinstance(unit, ConvUnit)
    assert (unit.norm.momentum, unit.norm.eps, type(unit.act)) == (0.4, 1e-3, torch.nn.SiLU)
    assert torch.equal(unit.conv.weight[:, :, 1, 1], torch.eye(256))
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 6)
    resnet = create_from(ModelConfig(model="resnet8", zero_init_last_gamma=True), classes=6, in_channels=1)
    assert not resnet.get_parameter("layer1.0.bn2.weight").any()


def test_bn_eps_reaches_other_models():
    norms = [m for m in create_model("resnet8", bn_eps=1e-3).modules() if isinstance(m, BatchNorm2d)]
    assert {norm.eps for norm in norms} == {1e-3}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("whitenet", {"zero_init_last_gamma": True}, "no trained norm scales; leave it off"),
        ("resnet8", {"activation": "gelu"}, "--activation gelu: resnet8 has a fixed activation; leave it out"),
    ],
)
def test_options_that_do_not_apply(name, options, message):
    with pytest.raises(InputError, match=message):
        create_model(name, **options)


def test_every_activation_of_the_config_is_there():
    assert set(ACTIVATIONS) == set(vocabulary.ACTIVATIONS)


def test_other_sizes_and_channels():
    model = create_model("whitenet", classes=7, in_channels=1)
    assert model(torch.randn(2, 1, 48, 40)).shape == (2, 7)
    assert tuple(model.get_parameter("whiten.weight").shape) == (8, 1, 2, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_step_in_the_arena_trains_all_but_the_frozen(dtype):
    """In 16 bit the whitening filters follow the weights, outside the arena; scales, shifts and biases stay fp32."""
    torch.manual_seed(0)
    model = create_model("whitenet", classes=10).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    images = torch.randn(4, 3, 32, 32).to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    order = backward_order(model, lambda: model(images).sum().backward())
    arena = Arena(model, order, dtype=dtype)
    precision = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}[dtype]
    optimizer = build_optimizer(OptimConfig(optimizer="sgd", precision=precision), model, arena, lr=0.1)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    seen = []
    model.get_submodule("group3").register_forward_hook(lambda _m, _i, out: seen.append(out))
    logits = model(images.to(dtype))
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(logits.double(), plain(images).double(), rtol=0, atol=0.05)
    assert seen[0].dtype == dtype
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    logits.square().sum().backward()
    optimizer.step()
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    assert frozen == {"whiten.weight", *(f"group{i}.{j}.norm.weight" for i in (1, 2, 3) for j in (0, 1))}
    assert {slot.name for slot in arena.slots} == set(before) - frozen
    for name, param in model.named_parameters():
        kept = dtype == torch.float64 or param.ndim > 1
        assert param.dtype == (dtype if kept else torch.float32), name
        assert torch.equal(param, before[name]) == (name in frozen), name
