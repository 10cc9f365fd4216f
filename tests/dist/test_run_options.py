"""Options of a run that no recipe sets: what each of them changes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toy import config

import hyperbatch
from hyperbatch import checkpoint, get_recipe
from hyperbatch.checkpoint import Progress
from hyperbatch.cli import main
from hyperbatch.config import BatchPhase
from hyperbatch.engine.loop import run
from hyperbatch.engine.ranks import Ranks
from hyperbatch.engine.run import at_precision, notes
from hyperbatch.errors import InputError


def train(out, **values):
    torch.set_num_threads(1)
    return run(config(out=str(out), **values), Ranks())


def test_a_run_goes_on_past_its_target_when_it_is_told_to(tmp_path):
    values = {"target_top1": 0.01, "eval_every_epochs": 0.5, "max_steps": 12}  # reached at the first evaluation
    stopped, gone_on = (train(tmp_path / str(stop), stop_at_target=stop, **values).result for stop in (True, False))
    assert stopped.reached
    assert gone_on.reached
    assert stopped.steps < gone_on.steps == 12


def test_metric_lines_and_checkpoints_are_as_many_as_asked_for(tmp_path):
    train(tmp_path, max_steps=8, log_every_steps=3, checkpoint_every_epochs=0.2, keep_checkpoints=1)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "step"] == [1, 4, 7]
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000008.pt"]


def test_no_checkpoint_is_saved_when_none_is_to_be_kept(tmp_path):
    record = train(tmp_path, max_steps=8, keep_checkpoints=0)
    assert record.result.steps == 8
    assert not (tmp_path / "checkpoints").exists()


def test_a_run_of_a_few_steps_is_evaluated_at_its_end(tmp_path):
    record = train(tmp_path / "with", max_steps=3)
    assert [row["step"] for row in record.metrics("eval")] == [3]
    assert record.result.top1 is not None
    record = train(tmp_path / "without", max_steps=3, final_eval=False)
    assert record.metrics("eval") == []
    assert record.result.top1 is None


def test_a_run_that_gets_no_better_stops_early_and_goes_on_with_more_patience(tmp_path, capsys):
    values = {"lr": 1e-12, "eval_every_epochs": 0.5}  # its weights hardly move: every evaluation says the same
    record = train(tmp_path, patience_evals=2, **values)
    assert [row["step"] for row in record.metrics("eval")] == [5, 10, 15]
    note = "stopped early: the last 2 evaluations did not improve the accuracy"
    assert note in record.warnings
    assert f"note: {note}" in capsys.readouterr().err
    again = train(tmp_path, patience_evals=2, resume=True, **values)
    assert again.result.steps == 15, "it is over"
    longer = train(tmp_path, patience_evals=4, resume=True, **values)
    assert [row["step"] for row in longer.metrics("eval")] == [5, 10, 15, 20, 23]  # 48 a step from epoch 2 on
    patient = train(tmp_path / "patient", **values)
    assert patient.result.epochs >= 4.0


def test_patience_counts_from_the_best_evaluation():
    progress = Progress()
    stale = []
    for top1 in (0.5, 0.4, 0.6, 0.6, 0.7, 0.1):
        progress.note_eval(top1)
        stale.append(progress.stale_evals)
    assert stale == [0, 1, 0, 1, 0, 1]
    assert progress.highest_top1 == 0.7
    assert progress.is_stale(1)
    assert not progress.is_stale(2)
    assert not progress.is_stale(0)


def test_a_batch_larger_than_the_data_set_is_told(tmp_path):
    record = train(tmp_path, batch_phases=(BatchPhase(0, 480),), epochs=4.0, max_steps=1)
    (note,) = [line for line in record.warnings if "larger than the training set" in line]
    assert note.startswith("the global batch of 480 is larger than the training set of 240 images")


def test_the_precision_is_chosen_by_the_device_and_kept_by_a_resume(tmp_path, monkeypatch):
    monkeypatch.setattr("hyperbatch.engine.run.cpu_has_bf16", lambda: False)
    record = train(tmp_path, precision="auto", max_steps=2)
    assert record.config["optim"]["precision"] == "fp32"
    monkeypatch.setattr("hyperbatch.engine.run.cpu_has_bf16", lambda: True)
    again = train(tmp_path, precision="auto", max_steps=4, resume=True)
    assert (again.result.steps, again.config["optim"]["precision"]) == (4, "fp32")
    with pytest.raises(InputError, match="precision fp32 -> bf16"):
        train(tmp_path, precision="bf16", resume=True)


@pytest.mark.parametrize(
    ("kind", "capability", "precision"),
    [
        ("cpu", "fma avx512f", "fp32"),
        ("cpu", "fma avx512f avx512_bf16", "bf16"),
        ("cpu", "amx_bf16", "bf16"),
        ("cuda", (9, 0), "bf16"),
        ("cuda", (8, 0), "bf16"),
        ("cuda", (7, 0), "fp16"),
    ],
)
def test_the_precision_of_every_device(monkeypatch, kind, capability, precision):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(Path, "read_text", lambda self: f"processor : 0\nflags : {capability}\nbugs :\n")
    device = torch.device(kind)
    assert at_precision(config(precision="auto"), device, Ranks()).optim.precision == precision
    in_16_bits = at_precision(config(precision="fp16_on_gpu"), device, Ranks()).optim.precision
    assert in_16_bits == ("fp16" if kind == "cuda" else precision)
    assert at_precision(config(precision="fp64"), device, Ranks()).optim.precision == "fp64"


@pytest.mark.parametrize(
    ("found", "precision"),
    [(["bf16", "bf16"], "bf16"), (["bf16", "fp16"], "fp16"), (["fp32", "bf16"], "fp32"), (["bf16", "fp32"], "fp32")],
)
def test_ranks_on_different_devices_train_in_one_precision(monkeypatch, found, precision):
    monkeypatch.setattr("hyperbatch.engine.run.gather", lambda value, ranks: found)
    assert at_precision(config(precision="auto"), torch.device("cpu"), Ranks()).optim.precision == precision


@pytest.mark.parametrize(("has_bf16", "noted"), [(True, ["fp16"]), (False, ["fp16", "bf16"])])
def test_a_precision_that_is_slow_on_the_cpu_is_noted(monkeypatch, has_bf16, noted):
    monkeypatch.setattr("hyperbatch.engine.run.cpu_has_bf16", lambda: has_bf16)
    fast = "bf16" if has_bf16 else "fp32"
    for precision in ("fp32", "bf16", "fp16"):
        told = notes(config(precision=precision), torch.device("cpu"), 1433)
        wanted = f"many times slower than {fast} on this CPU; use --precision {fast} here"
        assert any(wanted in note for note in told) == (precision in noted)


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("there", [False, True])
def test_input_that_is_refused_leaves_nothing_behind(tmp_path, monkeypatch, nproc, there):
    """A model that cannot be built is found once the run has its folder."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "new" / "run"
    if there:
        out.mkdir(parents=True)
    refused = get_recipe("digits", model="nowhere:network", nproc=nproc, device="cpu")
    with pytest.raises(InputError, match="No module named 'nowhere'"):
        hyperbatch.train(refused.override(out=str(out)))
    assert out.exists() == there
    assert not there or not list(out.iterdir())
    if nproc == 1:
        with pytest.raises(InputError, match="No module named 'nowhere'"):
            hyperbatch.train(refused)
        assert not (tmp_path / "runs").exists()
        (out / "mine").mkdir(parents=True)
        with pytest.raises(InputError, match="No module named 'nowhere'"):
            hyperbatch.train(refused.override(out=str(out)))
        assert (out / "mine").exists(), "what was there stays"


def exported(folder, weights, output):
    assert main(["export", str(folder), "--weights", weights, "--output", str(output)]) == 0
    return load_file(output)


def test_ema_is_fp32_evaluated_exported_and_exact_on_resume(tmp_path):
    values = {"precision": "bf16", "averaging": "ema", "averaging_decay": 0.8, "model": "toy:normed"}
    train(tmp_path / "whole", **values)
    train(tmp_path / "parts", max_steps=13, **values)
    train(tmp_path / "parts", resume=True, **values)
    whole, parts = (checkpoint.load(tmp_path / name) for name in ("whole", "parts"))
    assert whole.average
    assert all(tensor.dtype == torch.float32 for tensor in whole.average.values())
    assert all(torch.equal(tensor, parts.average[name]) for name, tensor in whole.average.items())
    averaged, trained = (
        exported(tmp_path / "parts", which, tmp_path / f"{which}.safetensors") for which in ("averaged", "trained")
    )
    name = "0.weight"
    assert torch.equal(averaged[name], whole.average[name])
    assert torch.equal(trained[name], whole.model[name])
    assert not torch.equal(averaged[name], trained[name])
