"""Which parameters count as weights, and what groups they fall into."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hyperbatch.errors import InputError
from hyperbatch.models import create_model
from hyperbatch.optim import param_groups
from hyperbatch.params import kind_of, layer_depths, owners, repeated_blocks, undecayed


class ScaleNorm(nn.Module):
    """Somebody's own norm layer, unknown to torch."""

    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.ones(4))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.downsample = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.own = ScaleNorm()
        self.norm_head = nn.Linear(4, 4)  # a name alone makes no norm layer
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.norm_head.weight
        self.frozen = nn.Linear(4, 2)
        self.frozen.requires_grad_(False)


def kinds(model):
    return {name: kind_of(module, module.get_parameter(local)) for name, (module, local) in owners(model).items()}


def test_the_owner_type_decides_and_names_do_not():
    assert kinds(Model()) == {
        "conv.weight": "weight",
        "conv.bias": "bias",
        "downsample.0.weight": "weight",
        "downsample.1.weight": "norm",
        "downsample.1.bias": "norm",
        "own.g": "norm",
        "norm_head.weight": "weight",
        "norm_head.bias": "bias",
        "frozen.weight": "weight",
        "frozen.bias": "bias",
    }


def test_groups_leave_out_frozen_and_count_tied_once():
    model = Model()
    groups = param_groups(model, 1e-4)
    names = [[name for name, _ in group["params"]] for group in groups]
    assert names == [
        ["conv.weight", "downsample.0.weight", "norm_head.weight"],
        ["conv.bias", "downsample.1.weight", "downsample.1.bias", "own.g", "norm_head.bias"],
    ]
    assert [(group["weight_decay"], group["adapt"]) for group in groups] == [(1e-4, True), (0.0, False)]
    torch.optim.SGD(param_groups(nn.Linear(2, 2), 0.0), lr=0.1)  # any torch optimizer takes named groups


def test_decay_and_trust_on_norms_are_one_flag_each():
    _, rest = param_groups(Model(), 1e-4, decay_norm_bias=True)
    assert (rest["weight_decay"], rest["adapt"]) == (1e-4, False)
    _, rest = param_groups(Model(), 1e-4, adapt_norm_bias=True)
    assert (rest["weight_decay"], rest["adapt"]) == (0.0, True)


def test_no_empty_groups():
    assert len(param_groups(nn.Linear(2, 2, bias=False), 0.0)) == 1


# What is not decayed


class Block(nn.Module):
    """A transformer's, with the layers and names of timm's. Attention and MLP are of repeated types as well."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.proj = nn.Linear(4, 12), nn.Linear(4, 4)

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)

    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(4), self.Attention(), nn.RMSNorm(4), self.Mlp()
        self.gamma = nn.Parameter(torch.ones(4))


class Vit(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 4))
        self.patch_embed = nn.Sequential(nn.Conv2d(3, 4, 2, 2))
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 1)  # its weight is of shape (1, 4)


def test_position_embeddings_and_tokens_are_not_decayed():
    model = Vit(2)
    model.places = nn.Embedding(7, 4)
    decayed = {name for name, _ in model.named_parameters()} - undecayed(model)
    layers = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert decayed == {
        "patch_embed.0.weight",
        *(f"blocks.{i}.{layer}.weight" for i in range(2) for layer in layers),
        "head.weight",
    }
    weights, rest = param_groups(model, 0.05)
    assert {name for name, _ in weights["params"]} == decayed
    assert (rest["weight_decay"], rest["adapt"]) == (0.0, False)
    assert len(weights["params"]) + len(rest["params"]) == len(list(model.parameters()))


class LayerNorm2d(nn.Module):
    """A norm over channels as other libraries have it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 1, 1))
        self.bias = nn.Parameter(torch.zeros(1, 4, 1, 1))


def test_a_scale_for_each_channel_is_no_weight_whatever_its_shape():
    scaled = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1))
    one_input = (nn.Linear(1, 4), nn.Conv2d(1, 4, 1), nn.LSTM(1, 1, bias=False))
    model = nn.Sequential(LayerNorm2d(), scaled, *one_input, nn.EmbeddingBag(5, 4))
    model.layer_scale = nn.Parameter(torch.ones(4, 1, 1))  # as in torchvision's ConvNeXt
    decayed = {name for name, _ in model.named_parameters()} - undecayed(model)
    lstm = {"4.weight_ih_l0", "4.weight_hh_l0"}
    assert decayed == {"1.parametrizations.weight.original1", "2.weight", "3.weight", *lstm}


def test_a_lazy_layer_is_no_bias():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(InputError, match=r"0\.weight has no shape yet"):
        param_groups(model, 0.1)
    model(torch.ones(1, 2))
    assert [name for name, _ in param_groups(model, 0.1)[0]["params"]] == ["0.weight"]


def test_a_model_says_itself_what_is_not_decayed():
    class Listed(Vit):
        def no_weight_decay(self):
            return {
                "blocks.0.mlp",
                "blocks.*.attn.proj.weight",
                "dist_token",
            }  # a layer, a pattern, one that is missing

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Listed(2)

    listed = {"blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight", *(f"blocks.{i}.attn.proj.weight" for i in (0, 1))}
    assert undecayed(Listed(2)) - undecayed(Vit(2)) == listed
    assert undecayed(Wrapped()) == {f"body.{name}" for name in undecayed(Listed(2))}


# How deep a parameter lies


def test_depths_of_a_transformer_are_those_of_beit():
    depths = layer_depths(Vit())
    assert {name.partition(".")[0] for name, depth in depths.items() if depth == 0} == {
        "cls_token",
        "pos_embed",
        "patch_embed",
    }
    for name, depth in depths.items():
        if name.startswith("blocks."):
            assert depth == int(name.split(".")[1]) + 1, name
    assert {name: depth for name, depth in depths.items() if name.startswith(("norm", "head"))} == dict.fromkeys(
        ("norm.weight", "norm.bias", "head.weight", "head.bias"), 4
    )


@pytest.mark.parametrize(
    ("name", "blocks", "stem"),
    [("resnet50", 16, {"conv1", "bn1"}), ("resnet18", 8, {"conv1", "bn1"}), ("resnet8", 3, {"conv1", "bn1"})],
)
def test_depths_of_residual_networks(name, blocks, stem):
    with torch.device("meta"):
        model = create_model(name)
    depths = layer_depths(model)
    assert {name.partition(".")[0] for name, depth in depths.items() if depth == 0} == stem
    assert max(depths.values()) == depths["fc.weight"] == depths["fc.bias"] == blocks + 1
    assert len(set(depths.values())) == blocks + 2
    in_order = [depth for name, depth in depths.items()]
    assert in_order == sorted(in_order), "a ResNet defines its layers in the order in which it runs them"


class Stage(nn.Module):
    """ConvNeXt's: a convolution that halves the image, then blocks."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv_dw, self.norm, self.mlp = nn.Conv2d(4, 4, 7, groups=4), nn.LayerNorm(4), nn.Linear(4, 4)

    def __init__(self, blocks, downsample=True):
        super().__init__()
        self.downsample = nn.Sequential(nn.LayerNorm(4), nn.Conv2d(4, 4, 2, 2)) if downsample else nn.Identity()
        self.blocks = nn.Sequential(*(self.Block() for _ in range(blocks)))


def test_stages_are_no_blocks_and_what_is_between_goes_with_the_next_block():
    model = nn.ModuleDict(
        {
            "stem": nn.Conv2d(3, 4, 4, 4),
            "stages": nn.Sequential(Stage(2, downsample=False), Stage(1), Stage(3)),
            "head": nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 10)),
        }
    )
    assert repeated_blocks(model) == [f"stages.{i}.blocks.{j}" for i, n in enumerate((2, 1, 3)) for j in range(n)]
    depths = layer_depths(model)
    assert [depths[name] for name in ("stem.weight", "stages.1.downsample.1.weight", "stages.1.blocks.0.mlp.bias")] == [
        0,
        3,
        3,
    ]
    assert depths["stages.2.downsample.0.weight"] == depths["stages.2.blocks.0.norm.weight"] == 4
    assert depths["head.0.weight"] == depths["head.1.weight"] == 7


def test_without_repeated_blocks_every_weight_begins_a_layer():
    layers = (nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 2, 3, bias=False), nn.Linear(2, 3))
    assert layer_depths(nn.Sequential(*layers)) == {
        "0.weight": 0,
        "0.bias": 0,
        "1.weight": 0,
        "1.bias": 0,
        "3.weight": 1,
        "4.weight": 2,
        "4.bias": 2,
    }
    two_heads = nn.ModuleDict({f"conv{i}": nn.Conv2d(1, 1, 1) for i in range(8)})
    two_heads.update({f"head{i}": Block.Mlp() for i in range(2)})
    assert repeated_blocks(two_heads) == [], "two heads of one type are not what the model is made of"
    assert set(layer_depths(two_heads).values()) == set(range(12))


def test_the_head_has_the_whole_rate_wherever_it_is_defined():
    model = nn.ModuleDict({"blocks": nn.Sequential(*(Block() for _ in range(3)))})
    assert layer_depths(model)["blocks.2.mlp.fc2.weight"] == 3, "the last linear layer of a block is no head"
    depths = layer_depths(
        nn.ModuleDict({"conv1": nn.Conv2d(1, 1, 1), "fc": nn.Linear(1, 1), "conv2": nn.Conv2d(1, 1, 1)})
    )
    assert (depths["conv1.weight"], depths["fc.weight"], depths["conv2.weight"]) == (0, 2, 2)


def test_groups_for_ones_own_loop_have_rates_by_depth():
    model = Vit(2)
    groups = param_groups(model, 0.05, layer_decay=0.5, lr=0.8)
    rates = {name: (group["lr"], group["weight_decay"]) for group in groups for name, _ in group["params"]}
    assert rates["pos_embed"] == (0.1, 0.0)
    assert rates["patch_embed.0.weight"] == (0.1, 0.05)
    assert rates["blocks.0.mlp.fc1.weight"] == (0.2, 0.05)
    assert rates["blocks.1.norm1.bias"] == (0.4, 0.0)
    assert rates["head.weight"] == (0.8, 0.05)
    assert sorted({group["lr_scale"] for group in groups}) == [0.125, 0.25, 0.5, 1.0]
    optimizer = torch.optim.AdamW(groups, lr=0.8)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)
    assert {group["lr"] for group in optimizer.param_groups} == {lr * 0.1 for lr in (0.1, 0.2, 0.4, 0.8)}
    assert schedule.get_last_lr()
    with pytest.raises(ValueError, match="to param_groups as lr"):
        param_groups(model, 0.05, layer_decay=0.5)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "convnext_atto", "resnet18"])
def test_groups_are_timms(name):
    """Only the norm behind a ViT's blocks goes with the head here, as in BEiT, and with the last block there."""
    timm = pytest.importorskip("timm")
    pytest.importorskip("timm.optim")  # timm itself imports it only for some of its parts
    with torch.device("meta"):
        model = timm.create_model(name)
    listed = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    theirs = timm.optim.param_groups_layer_decay(model, 0.05, no_weight_decay_list=listed, layer_decay=0.5)
    names = {param: name for name, param in model.named_parameters()}
    expected = {names[p]: (group["lr_scale"], group["weight_decay"]) for group in theirs for p in group["params"]}
    ours = {
        name: (group["lr_scale"], group["weight_decay"])
        for group in param_groups(model, 0.05, layer_decay=0.5, lr=1.0)
        for name, _ in group["params"]
    }
    assert {name for name in expected if ours[name] != expected[name]} <= {"norm.weight", "norm.bias"}
