"""Training from Python: callbacks in one process and in several, the record's rows, and resuming from the folder."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from toy import config, flat_weights, same_bits

import hyperbatch
from hyperbatch.callbacks import NO_HOOKS, Forward, Hooks, StepEvent, forwarded
from hyperbatch.config import SizePhase
from hyperbatch.errors import InputError, RunFailed
from hyperbatch.record import RunRecord

HERE = Path(__file__).parent


class Notes(hyperbatch.Callback):
    """Keeps all that it is told."""

    def __init__(self):
        self.events = []

    def on_start(self, event):
        self.events.append(("start", event))

    def on_step(self, event):
        self.events.append(("step", event))

    def on_eval(self, event):
        self.events.append(("eval", event))

    def on_checkpoint(self, event):
        self.events.append(("checkpoint", event))
        assert Path(event.path).exists()

    def on_end(self, record):
        self.events.append(("end", record))

    def of(self, kind):
        return [event for name, event in self.events if name == kind]


@pytest.fixture(autouse=True)
def toys_are_found(monkeypatch):
    """By the ranks, too, which are processes of their own."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]))


@pytest.mark.parametrize("nproc", [1, 2])
def test_callbacks_are_told_what_the_files_say(tmp_path, nproc):
    notes = Notes()
    out = tmp_path / "run"
    record = hyperbatch.train(config(out=str(out), nproc=nproc), callbacks=[notes])
    (start,) = notes.of("start")
    assert (start.folder, start.step) == (str(out), 0)
    assert start.config.schedule == config().schedule
    steps, evals = record.metrics("step"), record.metrics("eval")
    told = [asdict(event) for event in notes.of("step")]
    assert told == [{name: row[name] for name in told[0]} for row in steps]
    assert [(e.step, e.top1, e.scores["samples"]) for e in notes.of("eval")] == [
        (row["step"], row["top1"], row["samples"]) for row in evals
    ]
    saved = notes.of("checkpoint")
    assert [event.step for event in saved] == [row["step"] for row in evals]  # one with each evaluation
    assert saved[-1].epoch == 4.0
    assert sum(event.best for event in saved) >= 1
    assert [r.to_dict() for r in notes.of("end")] == [record.to_dict()]
    assert [name for name, _ in notes.events][:1] == ["start"]
    assert [name for name, _ in notes.events][-1:] == ["end"]


def test_rows_make_a_table(tmp_path):
    pandas = pytest.importorskip("pandas")
    record = hyperbatch.train(config(out=str(tmp_path / "run"), nproc=1))
    table = pandas.DataFrame(record.metrics("step"))
    assert list(table["step"]) == list(range(1, record.result.steps + 1))
    assert table["loss"].dtype == float
    assert {row["event"] for row in record.metrics()} == {"step", "eval"}
    assert RunRecord(recipe="", config={}, environment={}, world_size=1, grid="").metrics() == []


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_callback_that_raises_is_heard(tmp_path, nproc):
    class Fails(hyperbatch.Callback):
        def on_step(self, event):
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        hyperbatch.train(config(out=str(tmp_path / "run"), nproc=nproc, max_steps=3), callbacks=[Fails()])


def test_a_failed_run_has_an_end(tmp_path):
    notes = Notes()
    with pytest.raises(RunFailed):
        hyperbatch.train(config(out=str(tmp_path / "run"), nproc=1, lr=1e30, lars_eps=1e-9), callbacks=[notes])
    (record,) = notes.of("end")
    assert record.error


def test_what_nobody_listens_to_costs_nothing(tmp_path):
    class Ends:  # need not be a Callback
        def on_end(self, record): ...

    assert Hooks([hyperbatch.Callback.__new__(Notes)]).wanted == ["on_start", "on_step", "on_eval", "on_checkpoint"]
    hooks = Hooks([Ends()])
    assert not hooks.wanted
    assert hooks.wants("on_end")
    assert not any(NO_HOOKS.wants(name) for name in ("on_start", "on_step", "on_eval", "on_checkpoint", "on_end"))
    with forwarded(hooks, tmp_path):
        assert not list(tmp_path.iterdir()), "no file, no thread"
    with pytest.raises(InputError, match="callbacks: int has none of the methods on_start, on_step"):
        Hooks([3])
    with pytest.raises(InputError, match="callbacks: Callback has none"):
        Hooks([hyperbatch.Callback()])
    with pytest.raises(InputError, match=r"callbacks is .*; give a list of callbacks"):
        hyperbatch.train(hyperbatch.get_recipe("digits"), callbacks=Ends())


def test_the_name_of_a_recipe_is_no_config():
    with hyperbatch.Session() as session:
        for run in (hyperbatch.train, session.run):
            with pytest.raises(InputError, match="config is 'digits'; give a Config, as get_recipe"):
                run("digits")


def test_events_travel_between_processes_in_order(tmp_path):
    notes = Notes()
    events = [
        StepEvent(step=n, epoch=n / 7, time_s=0.1 * n, loss=1 / n, lr=0.1, global_batch=8, images_per_s=1e9 / n)
        for n in range(1, 2000)
    ]
    with forwarded(Hooks([notes]), tmp_path):
        sender = Forward(tmp_path / "events.jsonl")
        for event in events:
            sender.tell("on_step", event)
        sender.close()
    assert notes.of("step") == events


# Resuming


def command(*words, cwd):
    line = [sys.executable, "-m", "hyperbatch", "train", *map(str, words)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    return subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_a_run_is_resumed_from_its_folder_alone_wherever_that_is(tmp_path):
    """Stopped in one folder, moved, and continued from another: the bits of a run that was never stopped."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    words = ("digits", "--device", "cpu", "--nproc", "1", "--epochs", "2", "--seed", "3", "--no-stop-at-target")
    whole = command(*words, "--out", "whole", cwd=here)
    assert whole.returncode in (0, 3), whole.stderr
    stopped = command(*words, "--max-steps", "12", "--out", "parts", cwd=here)
    assert stopped.returncode in (0, 3), stopped.stderr
    shutil.move(here / "parts", there / "moved")
    resumed = command("--resume", "--out", "moved", "--max-steps", "0", "--json", cwd=there)
    assert resumed.returncode in (0, 3), resumed.stderr
    record = json.loads(resumed.stdout)
    assert (record["config"]["run"]["seed"], record["config"]["schedule"]["epochs"]) == (3, 2.0)
    assert record["folder"] == "moved"
    assert same_bits(flat_weights(here / "whole"), flat_weights(there / "moved"))

    again = command("--resume", "--out", there / "moved", "--json", cwd=here)  # it is finished
    assert json.loads(again.stdout)["result"] == record["result"]
    said = f"nothing to do in {there / 'moved'}: it has completed its 2 epochs; use a larger --epochs to continue"
    assert said in again.stderr
    refused = command("cifar10", "--resume", "--out", there / "moved", cwd=here)
    assert refused.returncode == 2
    assert "is of recipe digits, not cifar10; leave the recipe out" in refused.stderr
    refused = command("--resume", "--out", there / "moved", "--lr", "0.123", cwd=here)
    assert refused.returncode == 2
    assert "the config differs from that of the saved run: lr" in refused.stderr


def test_a_run_becomes_longer_and_says_what_that_does(tmp_path):
    out = str(tmp_path / "run")
    sizes = (SizePhase(0, 6), SizePhase(1, 8))
    first = hyperbatch.train(config(out=out, nproc=1, model="toy:pooled", size_phases=sizes))
    longer = hyperbatch.load_config(out, out=out, resume=True, epochs=6.0)
    assert longer.data.size_phases == sizes  # what was trained at which size has happened
    record = hyperbatch.train(longer)
    assert (first.result.epochs, record.result.epochs) == (4.0, 6.0)
    assert [row["step"] for row in record.metrics("step")] == list(range(1, record.result.steps + 1))
    (note,) = [line for line in record.warnings if line.startswith("--epochs")]
    assert note == (
        "--epochs 4 -> 6: the schedule now runs to epoch 6, and at epoch 4 the learning rate goes from 0.0001 to "
        "0.04808; the result differs from a run started with 6 epochs"
    )
    assert hyperbatch.load_config(out).schedule.epochs == 6.0  # the next --resume goes on with them
    with pytest.raises(InputError, match="epochs 6 -> 5"):
        hyperbatch.train(longer.override(epochs=5.0))


def test_a_run_of_an_older_version_is_resumed_from_its_checkpoint(tmp_path):
    words = ("digits", "--device", "cpu", "--nproc", "1", "--epochs", "2", "--out", "run")
    assert command(*words, "--max-steps", "3", cwd=tmp_path).returncode in (0, 3)
    (tmp_path / "run" / "config.toml").unlink()
    done = command("--resume", "--out", "run", "--max-steps", "5", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["result"]["steps"] == 5


def test_paths_are_kept_so_that_they_are_found_from_anywhere(tmp_path, monkeypatch):
    from hyperbatch.recipes.files import located

    (tmp_path / "images").mkdir()
    monkeypatch.chdir(tmp_path)
    found = located(config(data="images", init_from="s3://bucket/weights.pt"))
    assert found.data.data == str(tmp_path / "images")
    assert found.model.init_from == "s3://bucket/weights.pt"


def test_a_run_that_is_over_says_what_would_let_it_go_on(tmp_path, capfd):
    def said(**values):
        hyperbatch.train(config(out=str(tmp_path / "run"), nproc=1, resume=True, **values))
        return next(line for line in capfd.readouterr().err.splitlines() if line.startswith("nothing to do"))

    values = {"lr": 1e-12, "eval_every_epochs": 0.5, "target_top1": 0.01}
    hyperbatch.train(config(out=str(tmp_path / "run"), nproc=1, **values))
    assert said(**values).endswith("it has reached its target; use --no-stop-at-target to continue")
    on = {**values, "stop_at_target": False}
    hyperbatch.train(config(out=str(tmp_path / "run"), nproc=1, resume=True, max_steps=12, **on))
    assert said(max_steps=12, **on).endswith("stopped by --max-steps 12; use a larger one, or 0 for none, to continue")
    hyperbatch.train(config(out=str(tmp_path / "run"), nproc=1, resume=True, patience_evals=3, **on))
    assert said(patience_evals=3, **on).endswith("early by --patience-evals 3; use a larger one to continue")


def test_a_recipe_of_ones_own_is_resumed_by_its_name(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import hyperbatch\n\ndef recipe():\n    return hyperbatch.get_recipe('digits', epochs=2.0, lr=0.3)\n"
    )
    words = ("mine:recipe", "--device", "cpu", "--nproc", "1", "--out", "run")
    assert command(*words, "--max-steps", "3", cwd=tmp_path).returncode in (0, 3)
    done = command(*words, "--resume", "--max-steps", "5", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["result"]["steps"] == 5, done.stderr
