"""Which parts of a model are compiled by themselves, found by looking at its modules."""

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from hyperbatch.models import create_model
from hyperbatch.models.regions import find_regions


class Block(nn.Module):
    """Two parts of one class, as many models of people's own have them."""

    def __init__(self, channels, width=None):
        super().__init__()
        self.first = unit(channels, width or channels)
        self.second = unit(width or channels, width or channels)

    def forward(self, x):
        return self.second(self.first(x))


class Stage(nn.Module):
    def __init__(self, channels, width, depth):
        super().__init__()
        self.down = nn.Conv2d(channels, width, 2, 2)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))

    def forward(self, x):
        return self.blocks(self.down(x))


def unit(channels, width):
    return nn.Sequential(nn.Conv2d(channels, width, 3), nn.BatchNorm2d(width), nn.ReLU())


def head(width):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def listed(depth):
    """Blocks in a list of lists, which cannot be called."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleList([Block(4), Block(8)]) for _ in range(depth))
    model.head = head(8)
    return model


MODELS = {
    "blocks in a row": (nn.Sequential(nn.Conv2d(3, 4, 3), Block(4), Block(4), Block(4), head(4)), "1 2 3", 1),
    "a first block of another shape": (nn.Sequential(Block(3, 4), Block(4), Block(4), head(4)), "0 1 2", 2),
    "blocks of stages": (
        nn.Sequential(Stage(3, 4, 2), Stage(4, 8, 3), head(8)),
        "0.blocks.0 0.blocks.1 1.blocks.0 1.blocks.1 1.blocks.2",
        2,
    ),
    "sequentials": (nn.Sequential(unit(3, 4), unit(4, 4), unit(4, 4), head(4)), "1 2", 1),
    "stacks of sequentials": (
        nn.Sequential(nn.Sequential(unit(4, 4), unit(4, 4)), nn.Sequential(unit(4, 4), unit(4, 4)), head(4)),
        "0.0 0.1 1.0 1.1",
        1,
    ),
    "lists of lists": (listed(3), "layers.0.0 layers.0.1 layers.1.0 layers.1.1 layers.2.0 layers.2.1", 2),
    "nothing repeats": (nn.Sequential(unit(3, 4), unit(4, 8), head(8)), "", 1),
    "little repeats": (
        nn.Sequential(*(nn.Conv2d(c, c + 1, 3) for c in range(3, 12)), unit(12, 12), unit(12, 12), head(12)),
        "",
        1,
    ),
    "no layers at all": (nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), "", 1),
}


@pytest.mark.parametrize("name", MODELS)
def test_repeated_blocks_are_found(name):
    model, names, kinds = MODELS[name]
    regions = find_regions(model)
    assert " ".join(region.name for region in regions) == names
    assert len({region.kind for region in regions}) == kinds
    for region in regions:
        assert region.module is model.get_submodule(region.name)


def test_blocks_that_differ_are_of_different_kinds():
    """In what decides about the code that is made for them: settings, and which of their parameters are trained."""
    model = nn.Sequential(*(Block(4) for _ in range(4)), head(4))
    model[1].first[1].eps = 1e-3
    model[2].second[0].weight.requires_grad_(False)
    assert [region.kind for region in find_regions(model)] == [0, 1, 2, 0]


def test_a_shared_block_is_one_region():
    block = Block(4)
    model = nn.Sequential(block, Block(4), nn.Sequential(block, nn.ReLU()), head(4))
    assert [region.name for region in find_regions(model)] == ["0", "1"]


def test_the_example_of_an_own_model_has_blocks_of_one_kind():
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "own_blocks.py"))
    model = example["network"](classes=10, in_channels=3, width=8, depth=4)
    assert [(region.name, region.kind) for region in find_regions(model)] == [(str(i), 0) for i in range(1, 5)]
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(("model", "regions", "kinds"), [("resnet50", 16, 8), ("resnet20", 9, 5), ("alexnet_bn", 1, 1)])
def test_blocks_of_the_built_in_models(model, regions, kinds):
    found = find_regions(create_model(model, classes=10))
    assert (len(found), len({region.kind for region in found})) == (regions, kinds)
