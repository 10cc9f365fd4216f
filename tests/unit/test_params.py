"""Which parameters count as weights, and what groups they fall into."""

from __future__ import annotations

import torch
from torch import nn

from hyperbatch.optim import param_groups
from hyperbatch.params import kind_of, owners


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
    return {
        name: kind_of(module, local, module.get_parameter(local)) for name, (module, local) in owners(model).items()
    }


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
