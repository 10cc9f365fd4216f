"""Traced models: the same tables as those written down by hand, and layers in their places."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn

from hyperbatch import make_plan, simulate
from hyperbatch.cli import main
from hyperbatch.engine.profile import profile
from hyperbatch.errors import InputError
from hyperbatch.plan.clusters import load_cluster
from hyperbatch.plan.inventory import layers, model_names, tensors, training_flops, usual_data
from hyperbatch.plan.planner import format_plan
from hyperbatch.tracing import trace, trace_model

NAMES = [
    name for name in model_names() if name not in ("resnet34", "resnet44", "resnet101", "resnet152")
]  # like others


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_is_the_table_that_was_written_by_hand(name):
    image_size, classes = usual_data(name)
    found = trace_model(name, classes=classes, image_size=image_size, in_channels=3)
    table = layers(name, classes=classes, image_size=image_size)
    assert list(found.order) == [spec.name for spec in tensors(name, classes=classes, image_size=image_size)]
    traced = [layer for layer in found.layers if layer.parameters or layer.macs]
    known = [layer for layer in table if layer.tensors or layer.macs]
    for layer, right in zip(traced, known, strict=True):
        assert (layer.kind, layer.macs, layer.outputs) == (right.kind, right.macs, right.activations), right.name
        if right.kind != "attention":  # which has no module of its own
            assert (layer.name, layer.inputs) == (right.name, right.inputs)
        shapes = {(spec.name, spec.shape, spec.kind) for spec in right.tensors}
        assert set(layer.parameters) == shapes
    kept, right = (sum(layer.saved for layer in rows) for rows in (found.layers, table))
    # The meta device has no fused attention: it keeps the matrix of weights.
    assert right <= kept <= (1.2 if name.startswith("vit") else 1.02) * right


class Block(nn.Module):
    """With a scale of its own, and torch's attention, whose last layer is never called as a module."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.norm = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Linear(width, width)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.scale * self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class PoolHead(nn.Module):
    """By its name a pool, which has nothing to do but what its parts do."""

    def __init__(self, width, classes):
        super().__init__()
        self.fc = nn.Linear(width, classes)

    def forward(self, x):
        return self.fc(x.mean(1))


class Network(nn.Module):
    def __init__(self, classes, *, needs_numbers=False):
        super().__init__()
        self.needs_numbers = needs_numbers
        self.positions = nn.Parameter(torch.zeros(1, 16, 8))
        self.patches = nn.Conv2d(3, 8, 8, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.unused = nn.Linear(3, 3)
        self.unused_pool = nn.MaxPool2d(2)
        self.head = PoolHead(8, classes)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        if self.needs_numbers and float(x.sum()) > 1e9:
            return self.head(0 * x)
        return self.head(x)


def network(classes=10):
    return Network(classes)


def picky(classes=10):
    return Network(classes, needs_numbers=True)


def broken(classes=10):
    return nn.Sequential(nn.Flatten(), nn.Linear(7, classes))


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setitem(sys.modules, "traced_networks", sys.modules[__name__])


def test_layers_stand_where_they_work():
    model = Network(10)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = trace(model, torch.zeros(2, 3, 32, 32))
    names = [layer.name for layer in found.layers if "blocks.1" not in layer.name]
    assert names == [
        *("unused", "patches", "", "blocks.0.norm", "blocks.0.attn", "blocks.0.attn.out_proj", "blocks.0"),
        *("blocks.0.mlp", "head.fc"),
    ]
    held = [parameter.name for layer in found.layers for parameter in layer.parameters]
    assert sorted(held) == sorted(found.order) == sorted(dict(model.named_parameters()))
    counts = {layer.name: (layer.kind, layer.macs) for layer in found.layers}
    assert counts["patches"] == ("conv", 16 * 8 * 3 * 64)
    # queries, keys, values and the last product; each token's products with 16 keys and 16 values
    assert counts["blocks.0.attn"] == ("linear", 16 * 8 * 8 * 4 + 2 * 16 * 16 * 8)
    assert counts["blocks.0.mlp"] == ("linear", 16 * 8 * 8)
    assert counts["head.fc"] == ("linear", 8 * 10)
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["network", "picky"])
def test_an_own_model_is_planned_and_simulated(name):
    """picky: not on the meta device."""
    model = f"traced_networks:{name}"
    plan = make_plan("cifar10_resnet", model=model, cluster="h200x8", gpus=8)
    held = [parameter for group in plan.step.plan.groups for parameter in group.parameters]
    assert sorted(held) == sorted(dict(Network(10).named_parameters())), "each once"
    assert plan.train_flags()[:2] == ["--model", model]
    assert f"cifar10_resnet with {model} on 8 GPUs" in format_plan(plan)
    point = simulate("cifar10_resnet", model=model, cluster="h200x8", gpus=[8]).points[0]
    assert point.step.plan.groups
    assert training_flops(model, classes=10, image_size=32) > 0


def test_an_own_model_is_profiled_and_planned_with_the_profile(tmp_path):
    """It holds layers that are never called as modules, and parameters in modules that hold others."""
    model, machine = "traced_networks:network", tmp_path / "here.toml"
    measured = profile(model, device="cpu", output=machine, batches=[2], image_size=32, rounds=1)
    rows = {row.layer: row for row in measured.layers}
    assert rows["patches"].forward_s > 0
    assert rows[""].forward_s == rows["blocks.0"].forward_s == rows["unused"].forward_s == 0
    assert sum(row.backward_s for row in measured.layers) > 0
    plan = make_plan("cifar10_resnet", model=model, cluster=str(machine), gpus=2)
    assert plan.step.timing.step_s > 0


def test_a_file_that_names_a_model_runs_none_of_its_code(tmp_path):
    """Neither a machine file nor a checkpoint's config: only what the user asks for is built."""
    machine = tmp_path / "here.toml"
    profile("traced_networks:network", device="cpu", output=machine, batches=[2], image_size=32, rounds=1)
    machine.write_text(machine.read_text().replace("traced_networks:network", "no_such_module:network"))
    assert load_cluster(machine).device.measured == ()
    assert make_plan("cifar10_resnet", cluster=str(machine), gpus=2).step.timing.step_s > 0
    with pytest.raises(InputError, match="no tensor table of model 'no_such_module:network'"):
        layers("no_such_module:network")


def test_a_model_without_a_recipe_is_planned_with_the_defaults():
    plan = make_plan("resnet34", cluster="h200x8", gpus=4)
    assert (plan.phase.global_batch, plan.phase.batch_per_rank) == (1024, 256)
    assert format_plan(plan).splitlines()[-2].startswith("train with it: hyperbatch train RECIPE --model resnet34 ")
    assert "--global-batch 1024" in format_plan(plan)
    assert plan.notes == (
        "resnet34 is a model and not a recipe: the defaults of `train` and 256 images a rank are assumed",
    )


def for_gpus_only(classes=10):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3 * 8 * 8, classes)

        def forward(self, images):
            raise RuntimeError("no kernel image for the CPU")

    return Network()


@pytest.mark.parametrize("name", ["network", "for_gpus_only"])
def test_a_dry_run_of_an_own_model(capsys, name):
    """One that cannot be traced here is shown without its memory."""
    model = f"traced_networks:{name}"
    flags = ["--image-size", "32", "--global-batch", "64", "--world-size", "2", "--dry-run", "--json"]
    assert main(["train", "cifar10_resnet", "--model", model, *flags]) == 0
    values = json.loads(capsys.readouterr().out)
    assert bool(values["memory_bytes_per_rank"]) is (name == "network")


def test_a_model_that_does_not_take_the_images(capsys):
    words = r"model 'traced_networks:broken' raised RuntimeError: mat1 and mat2 .*; it must take images of 224 px"
    with pytest.raises(InputError, match=words):
        make_plan("resnet50", model="traced_networks:broken", gpus=8)
    assert main(["plan", "timm/no_such_model"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
