"""Checkpoints of a GPU run: copied to pinned memory buffer by buffer, while captured steps stay what they are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))

from toy import config, flat_weights, same_bits

from hyperbatch import checkpoint
from hyperbatch.arena import Arena
from hyperbatch.engine.loop import run
from hyperbatch.engine.ranks import Ranks
from hyperbatch.engine.snapshot import HostMemory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_an_arena_is_copied_to_pinned_memory_at_the_moment_of_the_call():
    model = nn.Sequential(nn.Conv2d(64, 256, 3), nn.Linear(2048, 2048)).cuda().to(memory_format=torch.channels_last)
    arena = Arena(model, [name for name, _ in model.named_parameters()][::-1], dtype=torch.float16)
    wanted = {name: tensor.clone() for name, tensor in arena.named_masters().items()}
    memory = HostMemory({"model": arena.named_masters()})
    for _ in range(20):
        found = memory.copy()["model"]
        arena.masters.add_(1)  # right behind the copy, as the next step does
        assert all(tensor.is_pinned() for tensor in found.values())
        assert all(torch.equal(found[name], tensor.cpu()) for name, tensor in wanted.items())
        wanted = {name: tensor + 1 for name, tensor in wanted.items()}


@pytest.mark.parametrize("graph", ["on", "off"])
def test_checkpoints_change_nothing_in_a_run_and_each_is_the_run_at_its_step(tmp_path, graph):
    values = {"device": "cuda", "graph": graph, "model": "toy:normed", "precision": "fp16", "deterministic": True}
    run(config(out=str(tmp_path / "few"), max_steps=12, **values), Ranks())
    every = {"checkpoint_every_steps": 1, "keep_checkpoints": 99}
    run(config(out=str(tmp_path / "many"), max_steps=12, **every, **values), Ranks())
    assert same_bits(flat_weights(tmp_path / "few"), flat_weights(tmp_path / "many"))
    run(config(out=str(tmp_path / "five"), max_steps=5, **values), Ranks())
    at_5 = checkpoint.load(tmp_path / "many" / "checkpoints" / "step-00000005.pt")
    assert same_bits(at_5.model, checkpoint.load(tmp_path / "five").model)
