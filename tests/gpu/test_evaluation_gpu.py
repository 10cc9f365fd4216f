"""Evaluation as a CUDA graph, and averaged weights beside captured steps, against plain code."""

from __future__ import annotations

import json
import math

import pytest
import torch
from test_graph_gpu import config
from torch import nn

from hyperbatch import checkpoint
from hyperbatch.arena import Arena
from hyperbatch.config import Config
from hyperbatch.data.batch import Batch
from hyperbatch.engine import loop
from hyperbatch.engine.cuda_graphs import CudaGraphs
from hyperbatch.engine.evaluate import Evaluator
from hyperbatch.engine.ranks import Ranks
from hyperbatch.engine.run import build_run
from hyperbatch.models import create_model
from hyperbatch.models.tta import VIEWS, averaged_logits, least_certain, plain_and_averaged
from hyperbatch.optim import LARS
from hyperbatch.optim.averaging import WeightAverage

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda", 0)


def batches(count, dtype=torch.float16, size=64, seed=0):
    generator = torch.Generator(CUDA).manual_seed(seed)
    for number in range(count):
        pixels = torch.randn(size, 16, 16, 3, generator=generator, device=CUDA).to(dtype)
        labels = torch.randint(10, (size,), generator=generator, device=CUDA)
        mask = torch.arange(size, device=CUDA) < (size if number < count - 1 else size - 7)
        yield Batch(pixels.permute(0, 3, 1, 2), labels, mask)


def network(dtype):
    """A residual network with statistics that are not those of a new one, and its arena."""
    torch.manual_seed(4)
    model = create_model("resnet8", classes=10, in_channels=3).to(CUDA).to(memory_format=torch.channels_last)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model, Arena(model, [name for name, _ in model.named_parameters()], dtype=dtype)


@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize("tta", VIEWS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_graph_counts_what_plain_code_counts(tta, share, deterministic, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model, _ = network(torch.float16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.use_deterministic_algorithms(deterministic)
    try:
        plain = Evaluator(model, CUDA, tta=tta, tta_share=share, classes=10)
        captured = Evaluator(model, CUDA, tta=tta, tta_share=share, classes=10)
        backend = CudaGraphs(CUDA)
        assert captured.prepare(next(batches(2)), backend) is None
        assert captured.evaluate(batches(5)) == plain.evaluate(batches(5))
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()), "no trace"
        with torch.no_grad():  # as a second run finds it: other weights and statistics in the same places
            for tensor in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
                tensor.mul_(1.5).add_(0.01)
        score = captured.evaluate(batches(5, seed=1))
        assert score == plain.evaluate(batches(5, seed=1))
        assert score.samples == 5 * 64 - 7
        answers = captured.answers()
        assert torch.equal(answers, plain.answers())
        assert (answers.sum(), answers.trace()) == (score.samples, round(score.top1 * score.samples))
        backend.close()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("share", [1.0, 0.25, 0.1])
def test_views_equal_the_reference_on_the_device(share):
    """In fp32 without tensor cores: the sums of two batch shapes differ by rounding alone."""
    model, batch = network(torch.float32)[0].eval(), next(batches(1, torch.float32))
    with torch.no_grad():
        plain, averaged = plain_and_averaged(model, batch.images, VIEWS["mirror_shift"], share, batch.mask)
        expected = model(batch.images)
        again = least_certain(plain, math.ceil(share * len(expected)), batch.mask)
        expected[again] = averaged_logits(model, batch.images, VIEWS["mirror_shift"])[again]
    torch.testing.assert_close(averaged, expected, rtol=1e-3, atol=1e-3)


def train(out, **values):
    record = loop.run(config(out=str(out), **values), Ranks())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return record, [(line["step"], line.get("loss"), line.get("top1"), line.get("top1_plain")) for line in lines]


CASES = {
    "views": {"tta": "mirror_shift", "tta_share": 0.25},
    "ema": {"averaging": "ema", "averaging_decay": 0.8},
    "lookahead": {"averaging": "lookahead", "averaging_decay": 0.7, "averaging_every_steps": 3, "averaging_power": 3.0},
    "lookahead of SGD": {"averaging": "lookahead", "averaging_every_steps": 2, "optimizer": "sgd", "lr": 0.05},
}


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_captured_runs_give_the_bits_of_plain_ones(tmp_path, values, precision):
    """LARS carries norms of the weights from step to step inside a graph: lookahead must tell it of its own."""
    values = {"max_steps": 0, "epochs": 2.0, "precision": precision, **values}
    plain, expected = train(tmp_path / "plain", graph="off", **values)
    captured, found = train(tmp_path / "captured", graph="on", **values)
    assert found == expected
    assert captured.environment["cuda_graph"]
    assert not any("CUDA graph" in line for line in captured.warnings)
    one, other = (checkpoint.load(tmp_path / name) for name in ("plain", "captured"))
    for left, right in ((one.model, other.model), (one.average, other.average), (one.average_norm, other.average_norm)):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)
    assert plain.result.top1 == captured.result.top1


@pytest.mark.parametrize("kind", ["ema", "lookahead"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_update_of_the_average_can_be_captured(kind, dtype):
    """What several steps in one graph need: the share is read from the device at each replay."""

    def build():
        model, arena = network(dtype)
        optimizer = LARS(model.parameters(), lr=0.1, arena=arena, capturable=True)
        settings = Config().override(averaging=kind).optim
        return model, arena, WeightAverage(settings, model, arena, optimizer)

    results = []
    for capture in (False, True):
        model, arena, average = build()
        backend = CudaGraphs(CUDA)
        with backend.on_capture_stream():
            average.set_share(0.0)
            average.update()
            update = backend.capture(average.update) if capture else average.update
        for number, share in enumerate((1.0, 0.25, 0.0)):
            for tensor in (*arena.flat_weights(), *(b for b in model.buffers() if b.is_floating_point())):
                tensor.add_(0.1 * (number + 1))
            average.set_share(share)
            update()
        results.append([t.clone() for t in (*average.tensors(), *arena.flat_weights(), *model.buffers())])
        backend.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_evaluation_of_a_run_is_captured_before_its_time_starts():
    run = build_run(config(tta="mirror_shift", tta_share=0.25, eval_samples=10_000), Ranks(), CUDA)
    assert run.validation.prepare(capture=True) is None
    first = run.validation.evaluate()
    assert first.samples == 10_000
    assert run.validation.evaluate() == first
    run.close()
