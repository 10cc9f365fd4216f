"""Transformers that drop, compiled with quick layers, on a GPU: repeated and captured runs, for each way of dropping.

What fails here says whether other code was compiled, a plain run does not repeat, or capture is to blame, and in which
step it was seen first.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from test_regions_gpu import same_bits, train

from hyperbatch.models import create_model
from hyperbatch.models.layers import DropPath
from hyperbatch.models.vit import Attention, VisionTransformer

SETTINGS = {
    "optimizer": "adamw",
    "lr": 1e-3,
    "image_size": 32,
    "eval_size": 32,
    "eval_resize": 32,
    "shift_pixels": 4,
    "steps_per_launch": 1,  # as of steps that draw; for those that do not, too
}


def transformer(classes, in_channels, **drops) -> VisionTransformer:
    model = create_model("vit_cifar", classes=classes, in_channels=in_channels, **drops)
    assert isinstance(model, VisionTransformer)
    return model


def nowhere(classes, in_channels):
    return transformer(classes, in_channels)


class Same(nn.Dropout):
    """Drops nothing, but is not known to."""

    def forward(self, input):
        return input


def nowhere_but_unknown(classes, in_channels):
    """Nothing is drawn, but inductor sums up the gradients of biases, as it does where a branch ends with dropout."""
    model = transformer(classes, in_channels)
    for module in model.modules():
        if isinstance(module, Attention):
            module.drop = Same()
    return model


def before_blocks(classes, in_channels):
    """By torch's own kernel, outside of compiled code."""
    model = transformer(classes, in_channels)
    model.drop = nn.Dropout(0.1)
    return model


def in_blocks(classes, in_channels):
    """By inductor's random numbers alone."""
    model = transformer(classes, in_channels, dropout=0.1)
    model.drop = nn.Dropout(0.0)
    return model


def branches(classes, in_channels):
    """One value for each sample; all blocks are of one kind."""
    model = transformer(classes, in_channels)
    for module in model.modules():
        if isinstance(module, DropPath):
            module.set_rate(0.2)
    return model


def growing_branches(classes, in_channels):
    """The first block drops nothing, and is of another kind."""
    return transformer(classes, in_channels, drop_path=0.2)


def everywhere(classes, in_channels):
    return transformer(classes, in_channels, dropout=0.1, drop_path=0.2)


def first_difference(lines, expected):
    pairs = zip(lines, expected, strict=True)
    return next((f"{found} in the place of {right}" for found, right in pairs if found != right), None)


@pytest.mark.parametrize(
    ("where", "kinds"),
    [
        ("nowhere", 1),
        ("nowhere_but_unknown", 1),
        ("before_blocks", 1),
        ("in_blocks", 1),
        ("branches", 1),
        ("growing_branches", 2),
        ("everywhere", 2),
    ],
)
def test_runs_that_are_repeated_and_captured_drop_the_same(tmp_path, where, kinds):
    values = {**SETTINGS, "model": f"test_quick_dropout_gpu:{where}"}
    plain, losses = train(tmp_path / "plain", graph="off", **values)
    again, repeated = train(tmp_path / "again", graph="off", **values)
    record, captured = train(tmp_path / "captured", graph="on", **values)
    for each in (plain, again, record):
        assert not each.warnings
        assert (each.compiled["regions"], each.compiled["kinds"], each.compiled["compilations"]) == (7, kinds, kinds)
    for each in (again, record):
        assert each.compiled["cache_misses"] == 0, "it runs other code than the first"
    assert record.environment["cuda_graph"]
    assert first_difference(repeated, losses) is None
    assert first_difference(captured, losses) is None
    same_bits(tmp_path / "plain", tmp_path / "again")
    same_bits(tmp_path / "plain", tmp_path / "captured")
