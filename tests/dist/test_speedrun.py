"""The speed run's recipe on two ranks, tiny; filters from the data: whose they are, when they are set, and when not."""

from __future__ import annotations

import json

import pytest
import torch
from harness import run_ranks
from safetensors.torch import load_file
from test_training import ranks_here, train
from torch.nn import functional as F
from toy import config, data, flat_weights, same_bits

from hyperbatch import export as exporting
from hyperbatch.config import SizePhase
from hyperbatch.data.loader import TrainLoader
from hyperbatch.engine import evaluate as evaluation
from hyperbatch.engine import loop
from hyperbatch.engine.ranks import Ranks
from hyperbatch.engine.run import build_run
from hyperbatch.engine.whiten import whiten
from hyperbatch.errors import InputError
from hyperbatch.models import create_from
from hyperbatch.models.initial import whitening_filters
from hyperbatch.recipes import find_recipe
from hyperbatch.schedule import steps

WHITENED = {
    "model": "toy:whitened",
    "whiten_samples": 100,
    "optimizer": "sgd",
    "lr": 0.02,
    "bias_lr_scale": 4.0,
    "head_lr_scale": 0.5,
    "whiten_bias_epochs": 2.0,
}


def recipe(**values):
    """`cifar10` as it is, but for what makes it small: 120 images in its own shape, for two CPU ranks."""
    # Other batches have another quarter of least certain images: here every image gets all views.
    small = {"dataset": "toy:pictures", "precision": "fp32", "device": "cpu", "tta_share": 1.0}
    small |= {"whiten_samples": 90, "epochs": 3.0, "warmup_epochs": 0.5, "eval_every_epochs": 1.0}
    small |= {"size_phases": (SizePhase(0, 24), SizePhase(1, 32))}
    return find_recipe("cifar10").config(24).override(**{**small, "whiten_bias_epochs": 1.0, **values})


def run_recipe(rank, values):
    return loop.run(recipe(**values), ranks_here()).to_dict()


def test_the_recipe_on_two_ranks(tmp_path, monkeypatch):
    record = run_ranks(2, run_recipe, {"out": str(tmp_path), "keep_checkpoints": 9}, timeout_s=120)[0]
    assert record["result"]["steps"] == 15
    assert record["result"]["top1"] > 0.3  # ten classes
    assert record["world_size"] == 2
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["samples"] for line in lines if line["event"] == "eval"] == [30, 30, 30]

    seen = []
    monkeypatch.setattr(
        exporting, "create_from", lambda *a, **options: (seen.append(create_from(*a, **options)), seen[-1])[1]
    )
    judged = evaluation.evaluate_checkpoint(tmp_path, device="cpu", trust_code=True)
    assert (judged["top1"], judged["samples"]) == (record["result"]["top1"], 30)
    assert seen[0].get_submodule("group1.0.norm").eps == 1e-12, "the config's model, not the name's"

    half = flat_weights(tmp_path / "checkpoints" / "step-00000005.pt")
    end = flat_weights(tmp_path)
    run = build_run(recipe(), Ranks(), torch.device("cpu"))
    images = [batch.images for batch in run.loader.plain(90)]
    run.close()
    assert images[0].shape[2:] == (24, 24), "as the first steps see them"
    expected = whitening_filters(images, (2, 2))
    torch.testing.assert_close(end["whiten.weight"].abs(), expected.abs(), rtol=1e-4, atol=1e-4)
    assert torch.equal(end["whiten.weight"], half["whiten.weight"])
    assert torch.equal(end["whiten.bias"], half["whiten.bias"]), "it is trained in the first epoch alone"
    assert half["whiten.bias"].abs().max() > 0
    for name, tensor in end.items():
        if name.endswith("norm.weight"):
            assert torch.all(tensor == 1), name
        elif name.endswith(("conv.weight", "norm.bias", "head.weight")) and "/" not in name:
            assert not torch.equal(tensor, half[name]), name
    exported = load_file(exporting.export(tmp_path))
    assert all(torch.equal(tensor, end[name]) for name, tensor in exported.items() if name in end)
    create_from(recipe().model, classes=10, in_channels=3).load_state_dict(exported)


def deep_recipe(**values):
    """`cifar10_96`, small, with a narrower network."""
    small = {"dataset": "toy:pictures", "precision": "fp32", "device": "cpu", "tta_share": 1.0, "whiten_samples": 90}
    small |= {
        "model": "toy:narrow_deep",
        "activation": None,
        "bn_momentum": 0.4,
        "epochs": 4.0,
        "lr": 4.0,
    }  # a small batch's
    small |= {"size_phases": (SizePhase(0, 24), SizePhase(2, 32)), "eval_every_epochs": 2.0}
    return find_recipe("cifar10_96").config(24).override(**{**small, **values})


def run_deep_recipe(rank, values):
    return loop.run(deep_recipe(**values), ranks_here()).to_dict()


def test_the_deep_recipe_on_two_ranks_is_the_same_continued(tmp_path):
    """Squares are cut out of the same images at the same places, whoever loads them and when."""
    values = {"out": str(tmp_path / "whole"), "keep_checkpoints": 9}
    record = run_ranks(2, run_deep_recipe, values, timeout_s=120)[0]
    assert record["result"]["steps"] == 20
    assert record["result"]["top1"] > 0.3  # ten classes
    assert record["config"]["data"]["cutout"] == 12
    run_ranks(2, run_deep_recipe, {"out": str(tmp_path / "parts"), "max_steps": 10}, timeout_s=120)
    run_ranks(2, run_deep_recipe, {"out": str(tmp_path / "parts"), "resume": True}, timeout_s=120)
    assert same_bits(flat_weights(tmp_path / "whole"), flat_weights(tmp_path / "parts"))
    run = build_run(deep_recipe(), Ranks(), torch.device("cpu"))
    (batch,) = run.loader.batches([next(steps(run.phases, len(run.train_set), 4.0))])
    run.close()
    assert batch.images.shape[2:] == (24, 24)
    assert ((batch.images == 0).all(1).flatten(1).sum(1) == 9 * 9).all(), "as large a share of smaller images"


def build_and_whiten(rank, values):
    """The first layer's weights, and what the arena keeps of them."""
    run = build_run(config(**values), ranks_here(), torch.device("cpu"))
    layer = run.learner.model.get_submodule("0")
    before = layer.weight.detach().clone()
    if rank > 0:
        layer.weight.data.mul_(2)  # whatever it holds, rank 0's filters count
    whiten(run)
    run.close()
    return before, layer.weight.detach().clone(), run.learner.arena.named_masters().get("0.weight")


@pytest.mark.parametrize("model", ["toy:whitened", "toy:whitened_and_trained"])
def test_every_rank_has_filters_that_whiten_the_normalised_images(model):
    train_set, _ = data(None)
    pixels = torch.from_numpy(train_set.images[:100]).permute(0, 3, 1, 2).double() / 255
    images = (pixels - train_set.mean[0]) / train_set.std[0]
    results = run_ranks(2, build_and_whiten, {"model": model, "whiten_samples": 100, "precision": "bf16"})
    for before, weight, master in results:
        assert weight.dtype == torch.bfloat16
        assert not torch.equal(before, weight)
        assert torch.equal(weight, results[0][1])
        assert (master is None) == (model == "toy:whitened"), "frozen weights lie outside the arena"
        if master is not None:
            assert torch.equal(master.bfloat16(), weight), "a step would otherwise bring the old filters back"
        out = F.conv2d(images, weight[:4].double()).permute(1, 0, 2, 3).flatten(1)
        covariance = out @ out.T / out.shape[1]
        # Filters of 8 bits; eps takes a thousandth.
        torch.testing.assert_close(covariance, torch.eye(4, dtype=torch.float64), rtol=0, atol=0.03)


def frozen_of_rank(rank):
    run = build_run(config(model="toy:apart"), ranks_here(), torch.device("cpu"))
    run.close()
    return [param.detach().clone() for param in run.learner.model.parameters() if not param.requires_grad]


def test_frozen_parameters_are_rank_0s():
    first, second = run_ranks(2, frozen_of_rank)
    assert len(first) == 2
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.all(first[1] == 1), "the scale of rank 0"


def test_more_samples_than_there_are_take_all_in_several_batches(monkeypatch):
    monkeypatch.setattr("hyperbatch.data.loader._PLAIN_PIXELS", 64 * 100)
    run = build_run(config(), Ranks(), torch.device("cpu"))
    batches = [batch.images for batch in run.loader.plain(1000)]
    run.close()
    assert [len(images) for images in batches] == [100, 100, 40]
    train_set = run.train_set
    expected = (train_set.images / 255 - train_set.mean[0]) / train_set.std[0]  # type: ignore[attr-defined]
    torch.testing.assert_close(torch.cat(batches)[:, 0].double(), torch.from_numpy(expected[..., 0]), atol=1e-5, rtol=0)


def test_a_second_run_in_the_process_is_the_same(tmp_path):
    _, first = train(1, tmp_path / "a", **WHITENED)
    _, second = train(1, tmp_path / "b", **WHITENED)
    assert same_bits(first, second)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_continued_run_keeps_its_filters(tmp_path, monkeypatch, precision):
    values = {**WHITENED, "precision": precision}
    _, whole = train(1, tmp_path / "whole", **values)
    _, begun = train(1, tmp_path / "parts", max_steps=7, **values)

    def plain(*_):
        raise AssertionError("the images were asked for again")

    monkeypatch.setattr(TrainLoader, "plain", plain)
    _, resumed = train(1, tmp_path / "parts", resume=True, **values)
    assert same_bits(whole, resumed)
    # So does one that starts from the weights in a file, whatever its precision.
    _, other = train(1, tmp_path / "other", init_from=str(tmp_path / "parts"), max_steps=1, **values)
    assert torch.equal(other["0.weight"], begun["0.weight"])


def test_sharded_groups_take_their_own_rates(tmp_path):
    values = {**WHITENED, "precision": "fp64", "max_steps": 12}
    _, plain = train(2, tmp_path / "plain", **values)
    _, sharded = train(2, tmp_path / "sharded", sharded_update=True, **values)
    assert plain.keys() == sharded.keys()
    for name, tensor in plain.items():
        assert (tensor - sharded[name]).abs().max() <= 1e-11 * tensor.abs().max() + 1e-14, name


def test_filters_are_set_on_the_runs_clock(tmp_path, monkeypatch):
    accounts = []

    def watched(run):
        accounts.append((run.clock.account, run.progress.step))
        whiten(run)

    monkeypatch.setattr(loop, "whiten", watched)
    train(1, tmp_path, max_steps=1, **WHITENED)
    assert accounts == [("train", 0)]


def test_a_model_without_a_whitening_layer_is_refused(tmp_path):
    with pytest.raises(InputError, match="0, the first convolution of Sequential, has 8 outputs, not 18"):
        train(1, tmp_path, model="toy:plain", whiten_samples=10)
