"""Steps captured in CUDA graphs against plain ones: whole runs, the same losses bit for bit with `--deterministic`."""

from __future__ import annotations

import functools
import json
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyperbatch import checkpoint
from hyperbatch.bench.step_runs import captured
from hyperbatch.comm import GridComm
from hyperbatch.config import BatchPhase, Config, SizePhase
from hyperbatch.engine import learner as learner_module
from hyperbatch.engine import loop
from hyperbatch.engine.ranks import Ranks
from hyperbatch.engine.run import build_run
from hyperbatch.engine.runner import StepRunner
from hyperbatch.errors import InputError, RunFailed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda", 0)


def config(**values):
    """Twelve steps of a small residual network on random images."""
    defaults = {
        "dataset": "synthetic",
        "model": "resnet8",
        "fused": "off",
        "train_samples": 512,
        "eval_samples": 64,
        "classes": 10,
        "image_size": 16,
        "eval_size": 16,
        "eval_resize": 16,
        "augment": "shift",
        "shift_pixels": 1,
        "epochs": 4.0,
        "max_steps": 12,
        "warmup_epochs": 1.0,
        "batch_phases": (BatchPhase(0, 64),),
        "lr": 0.5,
        "trust_coefficient": 0.02,
        "weight_decay": 1e-3,
        "eval_every_epochs": 1.0,
        "precision": "fp16",
        "device": "cuda",
        "deterministic": True,
    }
    return Config(recipe="toy").override(**{**defaults, **values})


def train(out, **values):
    return loop.run(config(out=str(out), **values), Ranks()), curve(out)


def curve(out):
    """(step, loss, accuracy) of each line that a run has written."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row.get("loss"), row.get("top1")) for row in rows]


def losses_of(rows):
    return [loss for _, loss, _ in rows if loss is not None]


def dropped(classes, in_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(16 * 256, classes),
    )


class Loud(nn.Module):
    """Its gradients overflow fp16 until the loss scale has come down."""

    def __init__(self, classes, in_channels):
        super().__init__()
        self.body = dropped(classes, in_channels)

    def forward(self, x):
        return self.body(x) * 100


class Asking(nn.Module):
    """Reads a number from the device in every forward."""

    def __init__(self, classes, in_channels):
        super().__init__()
        self.body = dropped(classes, in_channels)

    def forward(self, x):
        return self.body(x) * (1.0 if x.abs().max().item() >= 0 else 2.0)


class Waiting(Asking):
    """Waits in a way that only a capture notices."""

    def forward(self, x):
        torch.cuda.synchronize()
        return self.body(x)


class WaitingInEvaluation(Asking):
    def forward(self, x):
        if not self.training:
            torch.cuda.synchronize()
        return self.body(x)


class Centred(nn.Module):
    """Takes a running mean off its images, and keeps it in a new tensor at each step."""

    def __init__(self, classes, in_channels):
        super().__init__()
        self.body = dropped(classes, in_channels)
        self.register_buffer("mean", torch.ones(in_channels, 16, 16))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().float().mean(0)
        return self.body(x - self.mean.to(x.dtype))


class Picky(Asking):
    """Fails once, while the larger batch is captured."""

    error = None

    def forward(self, x):
        if torch.cuda.is_current_stream_capturing() and len(x) == 128 and Picky.error is not None:
            error, Picky.error = Picky.error, None
            raise error
        return self.body(x)


CASES = {
    "fp16": {},
    "fp32 resnet20": {"model": "resnet20", "precision": "fp32", "image_size": 32, "eval_size": 32},
    "bf16 resnet50": {"model": "resnet50", "precision": "bf16", "image_size": 64, "eval_size": 64, "max_steps": 10},
    "bf16 resnet50d": {"model": "resnet50d", "precision": "bf16", "image_size": 64, "eval_size": 64, "max_steps": 10},
    "accumulation": {"accumulate": 4},
    "unequal micro-steps": {"accumulate": 5},
    "mixed images": {"mixup": 0.2, "cutmix": 1.0, "auto_augment": "trivial"},
    "binary cross entropy": {"mixup": 0.1, "cutmix": 1.0, "loss": "bce", "bce_threshold": 0.2, "label_smoothing": 0.05},
    "clipped gradients": {"optimizer": "adamw", "lr": 1e-3, "clip_norm": 0.1},
    "a batch change": {"batch_phases": (BatchPhase(0, 64), BatchPhase(0.5, 128))},
    "resizing": {"size_phases": (SizePhase(0, 16), SizePhase(0.5, 24), SizePhase(1, 16))},
    "blurred strides": {"model": "resnet18", "blurpool": True, "image_size": 64, "eval_size": 64, "max_steps": 10},
    "dropout": {"model": "test_graph_gpu:dropped"},
    "skipped steps": {"model": "test_graph_gpu:Loud", "lr": 0.05},
    "rescaled momentum": {"momentum_rule": "rescaled"},
    "decoupled decay": {"decoupled_weight_decay": True, "weight_decay": 1e-2},
    "lars in fp16": {"lars_precision": "fp16"},
    "lamb": {"optimizer": "lamb", "lr": 0.01},
    "sgd": {"optimizer": "sgd", "lr": 0.05},
    "vit": {
        "model": "vit_cifar",
        "precision": "bf16",
        "optimizer": "adamw",
        "lr": 1e-3,
        "image_size": 32,
        "eval_size": 32,
        "max_steps": 10,
    },
    "whitening and rates per group": {
        "model": "whitenet",
        "init": "dirac",
        "whiten_samples": 500,
        "image_size": 32,
        "eval_size": 32,
        "optimizer": "sgd",
        "lr": 0.05,
        "nesterov": True,
        "bias_lr_scale": 8.0,
        "head_lr_scale": 0.5,
        "whiten_bias_epochs": 1.0,
    },
}


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_captured_runs_give_the_bits_of_plain_ones(tmp_path, values):
    plain, plain_losses = train(tmp_path / "plain", graph="off", **values)
    record, losses = train(tmp_path / "captured", graph="on", **values)
    assert losses == plain_losses
    assert record.environment["cuda_graph"]
    assert not plain.environment["cuda_graph"]
    assert record.skipped_steps == plain.skipped_steps
    # LAMB counts its steps in fp32 on the device, on the host in fp64.
    assert record.trust_ratios == pytest.approx(plain.trust_ratios, rel=1e-6 if "optimizer" in values else 0, abs=0)
    assert bool(record.skipped_steps) == (values.get("model") == "test_graph_gpu:Loud")
    timing = record.timing
    parts = [timing[f"{name}_s"] for name in ("data_wait", "forward", "backward", "exposed_comm", "update")]
    assert all(seconds > 0 for seconds in (timing["forward_s"], timing["backward_s"], timing["update_s"])), timing
    assert sum(parts) == pytest.approx(timing["step_s"], rel=1e-3), "events of one step, not of two"


class Shrill(nn.Module):
    """As Loud, but nothing is drawn at random."""

    def __init__(self, classes, in_channels):
        super().__init__()
        self.body = dropped(classes, in_channels)
        self.body[3] = nn.Identity()

    def forward(self, x):
        return self.body(x) * 100


STRIDES = {name: values for name, values in CASES.items() if name not in ("dropout", "skipped steps")}
STRIDES |= {
    "skipped steps": {"model": "test_graph_gpu:Shrill", "lr": 0.05},
    "few lines": {"log_every_steps": 5, "checkpoint_every_epochs": 0.7},
}


@pytest.mark.parametrize("values", STRIDES.values(), ids=STRIDES)
def test_strides_give_the_bits_of_single_steps(tmp_path, values):
    """Twelve steps in threes, where so many follow each other: a graph of three steps against three graphs of one."""
    single, lines = train(tmp_path / "single", graph="on", steps_per_launch=1, **values)
    record, stride_lines = train(tmp_path / "strides", graph="on", steps_per_launch=3, **values)
    assert stride_lines == lines
    assert single.environment["steps_per_launch"] == 1
    assert record.environment["steps_per_launch"] == 3
    assert record.skipped_steps == single.skipped_steps
    assert bool(record.skipped_steps) == (values.get("model") == "test_graph_gpu:Shrill")
    assert record.trust_ratios == single.trust_ratios
    a, b = (checkpoint.load(tmp_path / name) for name in ("single", "strides"))
    for left, right in ((a.model, b.model), (a.norm, b.norm), (a.optimizer, b.optimizer)):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)
    timing = record.timing
    parts = [timing[f"{name}_s"] for name in ("data_wait", "forward", "backward", "exposed_comm", "update")]
    assert sum(parts) == pytest.approx(timing["step_s"], rel=1e-3)


def test_short_steps_are_launched_together(tmp_path):
    """By our own choice: an epoch of 8 steps of about a millisecond. Steps with dropout are launched one by one."""
    record, lines = train(tmp_path / "auto")
    assert record.environment["steps_per_launch"] > 1
    _, single = train(tmp_path / "single", steps_per_launch=1)
    assert lines == single
    record, _ = train(tmp_path / "dropout", model="test_graph_gpu:dropped", steps_per_launch=4)
    assert record.environment["steps_per_launch"] == 1


def test_a_run_stops_and_goes_on_with_other_strides(tmp_path):
    _, whole = train(tmp_path / "whole", steps_per_launch=1)
    train(tmp_path / "parts", max_steps=5, steps_per_launch=2)
    _, parts = train(tmp_path / "parts", resume=True, steps_per_launch=3)
    assert [line for line in parts if line[1] is not None] == [line for line in whole if line[1] is not None]


def test_fused_strides_train_as_single_steps(tmp_path):
    pytest.importorskip("hyperbatch.models.fused")
    values = {"model": "resnet50", "image_size": 64, "eval_size": 64, "fused": "on", "max_steps": 8}
    _, single = train(tmp_path / "single", graph="on", steps_per_launch=1, **values)
    record, strides = train(tmp_path / "strides", graph="on", steps_per_launch=4, **values)
    assert record.environment["steps_per_launch"] == 4
    for (_, a, _), (_, b, _) in zip(single, strides, strict=True):
        if a is not None:
            assert a == pytest.approx(b, rel=0.02)


def test_warm_up_leaves_no_trace(tmp_path, monkeypatch):
    values = {"model": "test_graph_gpu:dropped", "graph": "off", "max_steps": 6, "momentum_rule": "rescaled"}
    _, warmed = train(tmp_path / "warmed", **values)
    monkeypatch.setattr(loop, "StepRunner", functools.partial(StepRunner, warm=False))
    _, cold = train(tmp_path / "cold", **values)
    assert warmed == cold


def test_stop_and_resume_equals_no_stop(tmp_path):
    values = {"model": "test_graph_gpu:dropped", "momentum_rule": "rescaled"}
    _, whole = train(tmp_path / "whole", **values)
    train(tmp_path / "parts", **{**values, "max_steps": 5})
    _, parts = train(tmp_path / "parts", resume=True, **values)
    assert [line for line in parts if line[1] is not None] == [line for line in whole if line[1] is not None]


def test_fastest_kernels_train_within_rounding(tmp_path):
    """Without --deterministic cuDNN may choose other kernels for each run."""
    _, plain = train(tmp_path / "plain", graph="off", deterministic=False)
    _, captured = train(tmp_path / "captured", graph="on", deterministic=False)
    assert losses_of(plain) == pytest.approx(losses_of(captured), rel=0.02)


def test_steps_are_captured_where_evaluation_cannot_be(tmp_path):
    record, losses = train(tmp_path / "captured", model="test_graph_gpu:WaitingInEvaluation", graph="on")
    (warning,) = (line for line in record.warnings if "CUDA graph" in line)
    assert warning.startswith("evaluation runs without a CUDA graph")
    assert record.environment["cuda_graph"]
    _, plain = train(tmp_path / "plain", model="test_graph_gpu:WaitingInEvaluation", graph="off")
    assert losses == plain


@pytest.mark.parametrize(("model", "reason"), [("Asking", "synchronizing"), ("Waiting", "captur")])
def test_a_model_that_waits_runs_plain_and_is_named(tmp_path, model, reason):
    values = {"model": f"test_graph_gpu:{model}"}
    record, losses = train(tmp_path / "auto", **values)
    warnings = [line for line in record.warnings if "CUDA graph" in line]
    assert [line.partition(" run")[0] for line in warnings] == ["evaluation", "steps"]
    for warning in warnings:
        assert reason in warning
        assert "forward, " in warning
        assert "test_graph_gpu.py:" in warning
    _, plain = train(tmp_path / "plain", graph="off", **values)
    assert losses == plain
    with pytest.raises(InputError, match="--graph on: the step cannot be captured"):
        train(tmp_path / "on", graph="on", **values)
    # The broken captures have left nothing behind: dropout and capture work.
    record, _ = train(tmp_path / "next", model="test_graph_gpu:dropped", graph="on")
    assert record.environment["cuda_graph"]


def test_a_model_that_replaces_a_buffer_runs_plain_and_is_evaluated_with_its_newest_value(tmp_path):
    """In the graph of its evaluation, too, which was captured before the first step."""
    record, lines = train(tmp_path / "auto", model="test_graph_gpu:Centred")
    (warning,) = (line for line in record.warnings if "CUDA graph" in line)
    assert warning.startswith("steps run without a CUDA graph: its forward replaces the buffer mean")
    _, plain = train(tmp_path / "plain", model="test_graph_gpu:Centred", graph="off")
    assert lines == plain


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("not in a graph")])
def test_a_capture_that_fails_in_mid_run_changes_nothing(tmp_path, error):
    """The other graphs make room, or the run goes on plain."""
    values = {"model": "test_graph_gpu:Picky", "batch_phases": (BatchPhase(0, 64), BatchPhase(0.5, 128))}
    _, plain = train(tmp_path / "plain", graph="off", **values)
    Picky.error = error
    record, losses = train(tmp_path / "auto", **values)
    assert Picky.error is None
    assert losses == plain
    assert record.environment["cuda_graph"] == isinstance(error, torch.OutOfMemoryError)
    assert any("not in a graph" in line for line in record.warnings) != record.environment["cuda_graph"]


def test_graphs_share_their_memory():
    values = {"model": "resnet20", "image_size": 32, "batch_phases": (BatchPhase(0, 512), BatchPhase(1, 256))}
    run = build_run(config(train_samples=1024, **values), Ranks(), CUDA)
    runner = StepRunner(run.learner, loop.micro_step, run.config, run.ranks, run.warnings)
    large, *_, small = loop.steps_left(run)
    reserved = []
    for step in (large, small):
        runner.prepare((step,))
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    run.close()
    graphs = runner._captured.graphs.values()
    assert len(graphs) == 4
    assert len({captured.replay.__self__.pool() for captured in graphs}) == 1
    assert reserved[1] < 1.15 * reserved[0], reserved


@pytest.fixture
def own_group(tmp_path, monkeypatch):
    """One rank that talks to itself through NCCL."""
    monkeypatch.setattr(learner_module, "GridComm", functools.partial(GridComm, alone=True))
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, device_id=CUDA)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_collectives_are_captured(tmp_path, monkeypatch, own_group):
    _, plain = train(tmp_path / "plain", graph="off")
    record, captured = train(tmp_path / "captured", graph="on")
    monkeypatch.setattr(learner_module, "GridComm", GridComm)
    _, alone = train(tmp_path / "alone", graph="on")
    assert record.environment["cuda_graph"]
    assert captured == plain == alone


def test_a_captured_run_that_fails_lets_the_process_group_go(tmp_path, own_group):
    """NCCL waits for graphs that hold its collectives, and the traceback holds the frames that held the graphs."""
    values = {"optimizer": "sgd", "lr": 1e30, "warmup_epochs": 0.0, "precision": "bf16"}
    with pytest.raises(RunFailed, match="the loss became") as failed:
        train(tmp_path, graph="on", **values)
    destroyed = threading.Thread(target=dist.destroy_process_group, daemon=True)
    destroyed.start()
    destroyed.join(60)
    assert not destroyed.is_alive()
    assert failed.value.__traceback__ is not None


def test_fused_kernels_are_captured(tmp_path):
    """The fused path is another rounding of the same network, captured or not."""
    pytest.importorskip("hyperbatch.models.fused")
    values = {"model": "resnet50", "image_size": 64, "eval_size": 64, "fused": "on", "max_steps": 8}
    _, plain = train(tmp_path / "plain", graph="off", **values)
    record, captured = train(tmp_path / "captured", graph="on", **values)
    assert record.environment["fused_kernels"]
    assert losses_of(plain) == pytest.approx(losses_of(captured), rel=0.02)


def test_a_captured_peer_of_the_bench_keeps_what_its_graph_reads():
    """Freed and given back to the driver, its images would be an illegal address."""
    images, total = torch.ones(1 << 24, device=CUDA), torch.zeros((), device=CUDA)
    run = captured(functools.partial(torch.sum, images, dim=0, out=total))
    del images
    torch.cuda.empty_cache()
    run()
    assert total.item() == 1 << 24
