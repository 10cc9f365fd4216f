"""Evaluation in a run: views, averaged weights, captured counting, several ranks, and what a run's files say."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file
from test_step_runner import Played
from test_training import train as train_and_load
from torch import nn
from toy import config, data, flat_weights, normed, same_bits

from hyperbatch import checkpoint
from hyperbatch.cli import main
from hyperbatch.data.batch import Batch
from hyperbatch.engine import loop, validation
from hyperbatch.engine.evaluate import ClassScores, Evaluator, Score, eval_limit, evaluate_checkpoint, even_batch
from hyperbatch.engine.ranks import Ranks
from hyperbatch.engine.run import build_run
from hyperbatch.export import export
from hyperbatch.models.tta import VIEWS, averaged_logits
from hyperbatch.report.summary import summary

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def train(world_size, out, **values):
    """The record of a run as plain values."""
    return train_and_load(world_size, out, **values)[0]


def evals(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: line.get(name) for name in ("step", "top1", "top1_plain", "top5", "val_loss")}
        for line in lines
        if line["event"] == "eval"
    ]


def checked(out, tta, *, averaged=True):
    """Right answers of a run's last weights by the direct formula, in one batch, with views and without."""
    source = data(None)[1]
    images = torch.from_numpy(source.images).permute(0, 3, 1, 2).double() / 255
    images = (images - torch.tensor(np.asarray(source.mean)).view(-1, 1, 1)) / torch.tensor(
        np.asarray(source.std)
    ).view(-1, 1, 1)
    model = normed(4, 1).double().eval()
    checkpoint.fill_model(model, checkpoint.load(out).weights(averaged=averaged), where="")
    with torch.no_grad():
        answers = [averaged_logits(model, images, VIEWS[name]).argmax(1) for name in (tta, "none")]
    return [(answer.numpy() == source.labels).mean() for answer in answers]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_tells_its_accuracy_with_views_and_without(tmp_path, world_size, capfd):
    """50 validation samples: with two ranks and batches of 24 there is padding. In fp64 every rank rounds alike."""
    values = {"model": "toy:normed", "precision": "fp64", "lr": 0.02, "epochs": 2.0, "tta": "mirror_shift"}
    record = train(world_size, tmp_path / "with", **values)
    assert [record["result"]["top1"], record["result"]["top1_plain"]] == checked(tmp_path / "with", "mirror_shift")
    assert record["result"]["top1"] != record["result"]["top1_plain"], "a case in which they differ"
    assert {name: evals(tmp_path / "with")[-1][name] for name in ("top1", "top1_plain")} == {
        name: record["result"][name] for name in ("top1", "top1_plain")
    }
    without = train(world_size, tmp_path / "without", **{**values, "tta": "none"})
    assert without["result"]["top1"] == record["result"]["top1_plain"]
    assert without["result"]["top1_plain"] is None
    assert "top1_plain" not in (tmp_path / "without" / "metrics.jsonl").read_text()
    assert same_bits(flat_weights(tmp_path / "with"), flat_weights(tmp_path / "without")), "evaluation leaves no trace"
    told = evaluate_checkpoint(tmp_path / "with", trust_code=True)
    assert (told["tta"], told["top1"], told["top1_plain"]) == (
        "mirror_shift",
        record["result"]["top1"],
        record["result"]["top1_plain"],
    )
    plain = evaluate_checkpoint(tmp_path / "with", tta="none", trust_code=True)
    assert plain["top1"] == record["result"]["top1_plain"]
    assert "top1_plain" not in plain


def views_of_padded_batches(rank):
    """Rank 0 has 8 images, rank 1 has 3 and padding; a quarter of each batch is looked at again."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8)).double()
    images, labels = torch.randn(16, 3, 2, 2).double(), torch.arange(16) % 8
    mask = torch.arange(16) < 11
    mine = slice(8 * rank, 8 * rank + 8)
    score = Evaluator(model, CPU, group=dist.group.WORLD, tta="mirror", tta_share=0.25).evaluate(
        [Batch(images[mine], labels[mine], mask[mine])]
    )
    with torch.no_grad():
        first = model(images)
        both = averaged_logits(model, images, VIEWS["mirror"])
    highest, second = first.topk(2, dim=1).values.unbind(1)
    margin = torch.where(mask, highest - second, torch.inf)
    again = torch.cat([part.argsort()[:2] + 8 * i for i, part in enumerate(margin.split(8))])
    mixed = first.clone()
    mixed[again] = both[again]
    right = [((answers.argmax(1) == labels) & mask).sum().item() / 11 for answers in (mixed, first)]
    mixed = mixed[mask]
    five = (mixed.argsort(1, descending=True)[:, :5] == labels[mask, None]).any(1).sum().item() / 11
    loss = nn.functional.cross_entropy(mixed, labels[mask]).item()
    assert (score.top5, score.val_loss) == (five, pytest.approx(loss, rel=1e-12))
    return replace(score, top5=None, val_loss=None) == Score(top1=right[0], top1_plain=right[1], samples=11)


def counted_by_class(rank):
    """Eight samples a rank, the last three padding, and answers that are written down."""
    logits = torch.eye(7)[torch.tensor([0, 1, 1, 6, 2, 2, 0, 3, 4, 1, 1, 5, 6, 0, 0, 0])]
    labels, mask = torch.tensor([0, 1, 2, 6, 2, 2, 3, 3, 4, 2, 2, 5, 6, 0, 0, 0]), torch.arange(16) < 13
    logits[5] = torch.tensor([9.0, 1, -9, 2, 3, 4, 5])  # of class 2: it is the last of seven
    logits[7] = torch.nan
    mine = slice(8 * rank, 8 * rank + 8)
    evaluator = Evaluator(nn.Identity(), CPU, group=dist.group.WORLD, classes=7)
    for _ in range(2):  # an evaluation begins with nothing counted
        score = evaluator.evaluate([Batch(logits[mine], labels[mine], mask[mine])])
    return score.to_dict(), ClassScores.of(evaluator.answers()).to_dict()


def test_answers_are_counted_by_class_and_the_most_frequent_confusions_named():
    one, other = run_ranks(2, counted_by_class)
    assert one[1] == other[1]
    score, by_class = one
    assert by_class["samples"] == (1, 1, 5, 2, 1, 1, 2)
    assert sum(by_class["right"]) == round(13 * score["top1"])
    assert by_class["confusions"][0] == (2, 1, 3)
    assert (2, 0, 1) in by_class["confusions"]
    assert (3, 0, 2) in by_class["confusions"]
    # Wrong among five: the last of seven, and a nan. In all others at most one logit is larger than the label's.
    assert score["top5"] == 11 / 13
    assert np.isnan(score["val_loss"])


def test_of_equal_logits_five_are_the_top_five():
    """An untrained head of zeros has no top-5 accuracy of 100 %."""
    batch = Batch(torch.zeros(10, 10), torch.arange(10), torch.ones(10, dtype=torch.bool))
    score = Evaluator(nn.Identity(), CPU).evaluate([batch])
    assert (score.top1, score.top5) == (0.1, 0.5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_tells_loss_and_answers_by_class(tmp_path, world_size, capsys):
    train(world_size, tmp_path, model="toy:normed", precision="fp64", lr=0.02, epochs=1.0)
    record = json.loads((tmp_path / "record.json").read_text())
    result, by_class = record["result"], record["by_class"]
    assert result["top5"] is None, "of four classes"
    source = data(None)[1]
    images = torch.from_numpy(source.images).permute(0, 3, 1, 2).double() / 255
    images = (images - source.mean[0]) / source.std[0]
    model = normed(4, 1).double().eval()
    checkpoint.fill_model(model, checkpoint.load(tmp_path).weights(), where="")
    with torch.no_grad():
        logits = model(images)
    labels = torch.from_numpy(source.labels)
    assert result["val_loss"] == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=1e-9)
    answers = torch.zeros(4, 4, dtype=torch.int64)
    for label, answer in zip(labels, logits.argmax(1), strict=True):
        answers[label, answer] += 1
    assert (by_class["samples"], by_class["right"]) == ([13, 13, 12, 12], answers.diagonal().tolist())
    assert sum(count for *_, count in by_class["confusions"]) == 50 - sum(by_class["right"])
    told = evaluate_checkpoint(tmp_path, trust_code=True)
    assert told["val_loss"] == pytest.approx(result["val_loss"], rel=1e-9)
    assert json.loads(json.dumps(told["by_class"])) == by_class
    assert main(["eval", str(tmp_path), "--device", "cpu", "--trust-code"]) == 0
    text = capsys.readouterr().out
    assert f"  loss {told['val_loss']:.4f}" in text
    label, answer, count = by_class["confusions"][0]
    assert f"  {'abcd'[label]} taken for {'abcd'[answer]}: {count} of {by_class['samples'][label]}" in text


def test_shares_are_taken_per_batch_and_padding_never_counts():
    assert run_ranks(2, views_of_padded_batches) == [True, True]


def played_evaluation(monkeypatch):
    """Evaluation is captured, in play; training is not."""
    backend = Played()

    def build(*args, **options):
        run = build_run(*args, **options)
        run.validation.backend = backend
        return run

    prepare = validation.Validation.prepare
    monkeypatch.setattr(validation.Validation, "prepare", lambda self, capture: prepare(self, capture=True))
    monkeypatch.setattr(loop, "build_run", build)
    return backend


@pytest.mark.parametrize(
    "values", [{}, {"tta": "mirror_shift", "tta_share": 0.25}, {"averaging": "ema", "averaging_decay": 0.9}]
)
def test_captured_evaluation_counts_the_same(tmp_path, monkeypatch, values):
    values = {"model": "toy:normed", "eval_batch_per_rank": 16, **values}
    plain = train(1, tmp_path / "plain", **values)
    backend = played_evaluation(monkeypatch)
    captured = train(1, tmp_path / "captured", **values)
    assert backend.captured == 1
    assert backend.replayed == 1 + 4 * len(evals(tmp_path / "captured")), "50 samples in batches of 16"
    assert evals(tmp_path / "captured") == evals(tmp_path / "plain")
    assert captured["warnings"] == plain["warnings"] == []
    assert same_bits(flat_weights(tmp_path / "captured"), flat_weights(tmp_path / "plain"))


@pytest.mark.parametrize("how", ["waits", "capture"])
def test_evaluation_that_cannot_be_captured_runs_plain_and_says_why(tmp_path, monkeypatch, how):
    train(1, tmp_path / "plain", max_steps=12)
    backend = played_evaluation(monkeypatch)
    backend.waits, backend.fail = how == "waits", torch.OutOfMemoryError("no room") if how == "capture" else None
    record = train(1, tmp_path / "captured", max_steps=12)
    reason = "called a synchronizing CUDA operation" if how == "waits" else "no room"
    assert record["warnings"][0].startswith(f"evaluation runs without a CUDA graph: {reason} (in ")
    assert evals(tmp_path / "captured") == evals(tmp_path / "plain")


def test_a_prepared_validation_follows_weights_that_are_reset_in_place():
    """What a second run in the same process does: same tensors, same graph, other values."""
    run = build_run(config(model="toy:normed", tta="mirror"), Ranks(), CPU)
    run.validation.backend = Played()
    assert run.validation.prepare(capture=True) is None
    first = run.validation.evaluate()
    assert first.samples == 50
    weights = {name: tensor.clone() for name, tensor in run.learner.model.state_dict().items()}
    with torch.no_grad():
        for tensor in run.learner.arena.flat_weights():
            tensor.mul_(-1)
        run.learner.model[1].running_mean.fill_(0.3)
    assert run.validation.prepare(capture=True) is None
    second = run.validation.evaluate()
    assert run.validation.backend.captured == 1
    assert second != first
    run.learner.model.load_state_dict(weights)
    assert run.validation.evaluate() == first
    assert run.learner.model.training
    run.close()


def test_batches_are_kept_only_of_small_sets_in_memory(monkeypatch):
    asked = []
    real = validation.eval_batches
    monkeypatch.setattr(
        validation, "eval_batches", lambda *args, **options: asked.append(options) or real(*args, **options)
    )
    run = build_run(config(), Ranks(), CPU)
    run.validation.prepare(capture=False)
    scores = [run.validation.evaluate() for _ in range(2)]
    assert len(asked) == 1
    run.close()
    monkeypatch.setattr(validation, "KEPT_BYTES", 50 * 64 * 4 - 1)
    run = build_run(config(), Ranks(), CPU)
    run.validation.prepare(capture=False)
    assert [run.validation.evaluate() for _ in range(2)] == scores
    assert len(asked) == 3
    run.close()


def test_batches_are_even():
    assert even_batch(10_000, 1, 3_000) == 2_500
    assert even_batch(10_000, 8, 3_000) == 1_250
    assert even_batch(50, 2, 24) == 13
    assert even_batch(1, 4, 24) == 1
    assert even_batch(7, 1, 7) == 7
    assert eval_limit(512, 32, torch.device("cuda")) == 2_500
    assert eval_limit(512, 224, torch.device("cuda")) == 512
    assert eval_limit(512, 32, CPU) == 512


AVERAGES = {
    "ema": {"averaging": "ema", "averaging_decay": 0.8, "averaging_every_steps": 2},
    "lookahead": {"averaging": "lookahead", "averaging_decay": 0.7, "averaging_every_steps": 3, "averaging_power": 3.0},
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("values", AVERAGES.values(), ids=AVERAGES)
def test_a_resumed_run_has_the_same_average(tmp_path, values, world_size):
    values = {"model": "toy:normed", **values}
    whole = train(world_size, tmp_path / "whole", **values)
    train(world_size, tmp_path / "parts", max_steps=7, final_eval=False, **values)
    train(world_size, tmp_path / "parts", resume=True, **values)
    assert same_bits(flat_weights(tmp_path / "whole"), flat_weights(tmp_path / "parts"))
    one, other = (checkpoint.load(tmp_path / name) for name in ("whole", "parts"))
    assert same_bits(one.average, other.average)
    assert same_bits(one.average_norm, other.average_norm)
    assert one.average_norm["1.running_mean"].shape == (world_size, 8)
    assert evals(tmp_path / "whole") == evals(tmp_path / "parts")
    assert whole["result"]["steps"] == one.progress.step


def test_the_average_is_what_is_evaluated_and_exported(tmp_path):
    values = {"model": "toy:normed", "precision": "fp64", "epochs": 2.0, "lr": 0.05}
    record = train(1, tmp_path, averaging="ema", averaging_decay=0.9, **values)
    saved = checkpoint.load(tmp_path)
    assert not torch.equal(saved.average["0.weight"], saved.model["0.weight"])
    assert (
        record["result"]["top1"]
        == checked(tmp_path, "none")[0]
        == evaluate_checkpoint(tmp_path, trust_code=True)["top1"]
    )
    trained = evaluate_checkpoint(tmp_path, averaged=False, trust_code=True)
    assert (trained["top1"], trained["weights"]) == (checked(tmp_path, "none", averaged=False)[0], "trained")
    for averaged in (True, False):
        file = export(tmp_path, tmp_path / "weights.safetensors", averaged=averaged)
        table = load_file(file)
        assert torch.equal(table["0.weight"], (saved.average if averaged else saved.model)["0.weight"])
        norm = (saved.average_norm if averaged else saved.norm)["1.running_var"][0]
        assert torch.equal(table["1.running_var"], norm)


def test_the_commands_say_what_they_evaluate_and_export(tmp_path, capsys):
    train(1, tmp_path, averaging="ema", averaging_decay=0.9, epochs=1.0, tta="mirror")
    weights = tmp_path / "weights.safetensors"
    assert main(["eval", str(tmp_path), "--device", "cpu", "--trust-code"]) == 0
    told = capsys.readouterr().out
    assert "averaged weights)" in told
    assert "without test-time augmentation (mirror)" in told
    assert (
        main(
            [
                "eval",
                str(tmp_path),
                "--device",
                "cpu",
                "--trust-code",
                "--weights",
                "trained",
                "--tta",
                "none",
                "--json",
            ]
        )
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert (told["weights"], told["tta"]) == ("trained", "none")
    assert "top1_plain" not in told
    for which in ("averaged", "trained"):
        assert main(["export", str(tmp_path), "--output", str(weights), "--weights", which]) == 0
        with safe_open(weights, "pt") as file:
            assert file.metadata()["weights"] == which


def test_the_runs_time_counts_what_is_done_with_training_data_first(tmp_path, monkeypatch):
    accounts, built = [], []

    def build(*args, **options):
        built.append(build_run(*args, **options))
        return built[-1]

    monkeypatch.setattr(loop, "build_run", build)
    monkeypatch.setattr(loop, "begin", lambda run: accounts.append(("begin", run.clock.account)))
    monkeypatch.setattr(
        validation.Validation, "prepare", lambda self, capture: accounts.append(("prepare", built[-1].clock.account))
    )
    train(1, tmp_path, max_steps=3)
    assert accounts == [("prepare", "init"), ("begin", "train")]
    train(1, tmp_path, resume=True, max_steps=5)
    assert accounts[2:] == [("prepare", "init")], "a resumed run has begun before"


def test_training_itself_does_not_see_the_ema(tmp_path):
    train(1, tmp_path / "plain", model="toy:normed")
    train(1, tmp_path / "ema", model="toy:normed", averaging="ema", averaging_decay=0.9)
    assert same_bits(flat_weights(tmp_path / "plain"), flat_weights(tmp_path / "ema"))


def test_lookahead_ends_with_the_slow_weights(tmp_path):
    train(1, tmp_path / "ahead", model="toy:normed", precision="bf16", **AVERAGES["lookahead"])
    saved = checkpoint.load(tmp_path / "ahead")
    assert all(torch.equal(saved.average[name], weight) for name, weight in saved.model.items())
    assert all(torch.equal(value, saved.norm[name]) for name, value in saved.average_norm.items())
    assert saved.which() == "trained"
    train(1, tmp_path / "plain", model="toy:normed", precision="bf16")
    assert not same_bits(saved.model, checkpoint.load(tmp_path / "plain").model)


def test_lookahead_follows_the_rule_step_by_step(tmp_path, monkeypatch):
    """A second run of plain steps whose weights are set by hand."""
    values = {"precision": "fp64", "epochs": 1.0, **AVERAGES["lookahead"], "averaging_every_steps": 4}
    slow, first = {}, loop.begin

    def by_hand(run, step):
        named = dict(run.learner.model.named_parameters())
        number = step.index + 1
        if number % 4 == 0 and number < 10:
            decay = 0.7 * (number / 10) ** 3
            for name, param in named.items():
                slow[name] = decay * slow[name] + (1 - decay) * param.detach()
                param.data.copy_(slow[name])
        if number == 10:
            for name, param in named.items():
                param.data.copy_(slow[name])

    def begin(run):
        slow.update({name: param.detach().clone() for name, param in run.learner.model.named_parameters()})
        first(run)

    train(1, tmp_path / "ours", **values)
    monkeypatch.setattr(loop, "average_weights", by_hand)
    monkeypatch.setattr(loop, "begin", begin)
    train(1, tmp_path / "hand", **values)
    ours, hand = (checkpoint.load(tmp_path / name).model for name in ("ours", "hand"))
    assert slow
    for name, weight in ours.items():
        torch.testing.assert_close(weight, hand[name], rtol=1e-12, atol=1e-12)


def test_the_summary_says_where_the_time_went_and_what_the_accuracy_is(tmp_path):
    record = loop.run(config(out=str(tmp_path), tta="mirror", epochs=1.0), Ranks())
    result = record.result
    assert (result.setup_s, result.train_s, result.eval_s) == tuple(
        record.clock[n] for n in ("init_s", "train_s", "eval_s")
    )
    assert result.eval_s < result.run_s <= result.train_s + result.eval_s + record.clock["capture_s"]
    text = summary(record)
    assert "without test-time augmentation)" in text
    assert "  time      set-up " in text
    assert ", training " in text
    assert ", evaluation " in text
