"""Run after run in one process on a GPU: the losses of runs alone, graphs captured once, no memory lost."""

from __future__ import annotations

import gc

import pytest
import torch
from test_graph_gpu import config, curve, train

from hyperbatch.config import BatchPhase
from hyperbatch.engine import cuda_graphs
from hyperbatch.engine.session import Session
from hyperbatch.errors import RunFailed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CASES = {
    "fp16": {},
    "fused": {"fused": "on", "model": "resnet20x4", "image_size": 32, "eval_size": 32, "eval_resize": 32},
    "lamb": {"optimizer": "lamb", "lr": 0.02},
    "rescaled momentum": {"momentum_rule": "rescaled"},
    "dropout": {"model": "test_graph_gpu:dropped"},
    "overflows": {"model": "test_graph_gpu:Loud"},
    "accumulation": {"accumulate": 4},
    "plain steps": {"graph": "off"},
}


@pytest.fixture
def captures(monkeypatch):
    found, capture = [], cuda_graphs.CudaGraphs.capture

    def spied(self, run):
        found.append(1)
        return capture(self, run)

    monkeypatch.setattr(cuda_graphs.CudaGraphs, "capture", spied)
    return found


def in_session(session, out, **values):
    return session.run(config(**values), out), curve(out)


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_a_run_in_a_session_equals_a_run_alone(tmp_path, captures, values):
    with Session() as session:
        session.run(config(**values, seed=5))
        first = len(captures)
        ours, our_lines = in_session(session, tmp_path / "warm", **values, seed=1, weight_decay=2e-3)
        assert len(captures) == first, "captured once"
    theirs, their_lines = train(tmp_path / "alone", **values, seed=1, weight_decay=2e-3)
    assert our_lines == their_lines
    assert ours.skipped_steps == theirs.skipped_steps
    assert ours.trust_ratios == theirs.trust_ratios


def test_a_diverged_run_leaves_no_trace(tmp_path, captures):
    values = {"optimizer": "sgd", "precision": "bf16"}
    with Session() as session:
        with pytest.raises(RunFailed, match="the loss became"):
            session.run(config(**values, lr=1e30, warmup_epochs=0.0))
        _, ours = in_session(session, tmp_path / "warm", **values, lr=0.05)
    _, theirs = train(tmp_path / "alone", **values, lr=0.05)
    assert ours == theirs


def test_memory_does_not_grow_from_run_to_run():
    """Of the same learner, and after others: what is let go is given back."""

    def allocated():
        gc.collect()
        return torch.cuda.memory_allocated()

    with Session() as session:
        for seed in range(2):
            session.run(config(seed=seed))
        before = allocated()
        for seed in range(2, 6):
            session.run(config(seed=seed))
        assert allocated() == before
        session.run(config(label_smoothing=0.2, batch_phases=(BatchPhase(0, 128),)))
        session.run(config())
        session.run(config(seed=1))
        assert allocated() <= before
