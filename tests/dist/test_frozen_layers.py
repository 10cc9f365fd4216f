"""Runs that start from others' weights with frozen layers: what moves, what a resumed run and several ranks give."""

from __future__ import annotations

import pytest
import torch
from test_training import train
from toy import flat_weights, same_bits

from hyperbatch import checkpoint
from hyperbatch.config import LayerRate

HEAD_ONLY = (LayerRate("*", 0.0), LayerRate("head", 1.0))


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    out = tmp_path_factory.mktemp("base")
    train(1, out, model="toy:normed", max_steps=8)
    return out


CASES = {
    "lars": {},
    "muon": {"optimizer": "muon", "lr": 0.02},
    "fp16": {"precision": "fp16"},
    "bf16, sharded": {"precision": "bf16", "sharded_update": True},
    "ema": {"averaging": "ema", "averaging_decay": 0.5},
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_frozen_layers_and_their_statistics_stay_as_they_were(tmp_path, base, values, world_size):
    values = {"model": "toy:normed", "init_from": str(base), "layer_rates": HEAD_ONLY, "epochs": 2.0, **values}
    record, _ = train(world_size, tmp_path, **values)
    before, after = (checkpoint.load(folder).weights() for folder in (base, tmp_path))
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) == (not name.startswith("5.")), name
    assert sum(len(group["parameters"]) for group in record["plan"]["groups"]) == 2
    assert record["result"]["top1"] > 0.5


def test_a_smaller_rate_is_a_smaller_step(tmp_path, base):
    values = {"model": "toy:normed", "init_from": str(base), "optimizer": "sgd", "lr": 0.01, "warmup_epochs": 0.0}
    moved = {}
    for name, rates in (("plain", ()), ("slow", (LayerRate("0", 0.25),))):
        train(1, tmp_path / name, max_steps=1, weight_decay=0.0, layer_rates=rates, **values)
        before, after = (checkpoint.load(folder).model for folder in (base, tmp_path / name))
        moved[name] = {key: after[key] - before[key] for key in after}
    torch.testing.assert_close(moved["slow"]["0.weight"], 0.25 * moved["plain"]["0.weight"], rtol=1e-3, atol=1e-7)
    assert torch.equal(moved["slow"]["5.weight"], moved["plain"]["5.weight"])


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_run_with_frozen_layers_gives_the_same_bits(tmp_path, base, world_size):
    rates = (LayerRate("0", 0.0), LayerRate("1", 0.0), LayerRate("head", 0.5))
    values = {"model": "toy:normed", "init_from": str(base), "layer_rates": rates, "precision": "bf16", "epochs": 2.0}
    train(world_size, tmp_path / "whole", **values)
    train(world_size, tmp_path / "parts", max_steps=6, **values)
    train(world_size, tmp_path / "parts", resume=True, **values)
    assert same_bits(flat_weights(tmp_path / "whole"), flat_weights(tmp_path / "parts"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_with_layer_decay_resumes_and_its_record_tells_the_rates(tmp_path, base, world_size):
    values = {"model": "toy:normed", "init_from": str(base), "layer_decay": 0.5, "optimizer": "adamw", "lr": 0.01}
    record, _ = train(world_size, tmp_path / "whole", epochs=2.0, **values)
    train(world_size, tmp_path / "parts", epochs=2.0, max_steps=6, **values)
    train(world_size, tmp_path / "parts", epochs=2.0, resume=True, **values)
    assert same_bits(flat_weights(tmp_path / "whole"), flat_weights(tmp_path / "parts"))
    groups = record["optimizer_groups"]
    assert [(row["factor"], row["first"]) for row in groups["factors"]] == [(0.5, "0.weight"), (1.0, "5.weight")]
    assert groups["decayed"]["tensors"] + groups["undecayed"]["tensors"] == sum(
        row["count"]["tensors"] for row in groups["factors"]
    )


def test_a_new_head_is_said_once_and_its_run_goes_on_without_the_file(tmp_path, base):
    values = {"model": "toy:normed", "dataset": "toy:renamed", "init_from": str(base)}
    record, _ = train(2, tmp_path, max_steps=3, **values)
    line = f"the head (5) is initialised anew: {base} was trained for 4 other classes"
    assert record["warnings"] == [line]
    assert record["classes"] == ["e", "f", "g", "h"]
    record, _ = train(2, tmp_path, max_steps=5, resume=True, **{**values, "init_from": "gone"})
    assert record["warnings"] == []
