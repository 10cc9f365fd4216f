"""Trackers: what is sent, by packages that stand in for the real ones; and the real ones, offline, where they are."""

import json
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
from toy import config

import hyperbatch
from hyperbatch import trackers
from hyperbatch.config import fields
from hyperbatch.errors import InputError, RunFailed

VALUES = {"nproc": 1, "epochs": 2.0, "max_steps": 12}


class Services:
    """What the stand-ins were told."""

    def __init__(self):
        self.begun, self.points, self.params, self.ended = [], [], {}, []


@pytest.fixture
def services(monkeypatch):
    told = Services()
    monkeypatch.setattr(trackers, "INTERVAL_S", 0.0)
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: name in ("wandb", "mlflow") or None)

    class Run:
        def __init__(self, **arguments):
            told.begun.append(arguments)
            told.params = arguments["config"]
            self.id = arguments["id"] or "run-1"
            self.summary = {}

        def log(self, values, step):
            told.points.append((step, values))

        def finish(self, exit_code):
            told.ended.append((exit_code, self.summary))

    wandb = types.ModuleType("wandb")
    wandb.init = Run
    monkeypatch.setitem(sys.modules, "wandb", wandb)

    class Client:
        def get_experiment_by_name(self, name):
            return None

        def create_experiment(self, name):
            return f"experiment {name}"

        def create_run(self, experiment, run_name):
            told.begun.append({"experiment": experiment, "name": run_name, "id": None})
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="run-1"))

        def update_run(self, id, status):
            told.begun.append({"id": id, "status": status})

        def log_batch(self, id, metrics=(), params=()):
            assert len(params) <= 100
            told.params |= dict(params)
            for key, value, _, step in metrics:
                told.points.append((step, {key: value}))

        def set_terminated(self, id, status):
            told.ended.append(status)

    mlflow, entities, tracking = (types.ModuleType(name) for name in ("mlflow", "mlflow.entities", "mlflow.tracking"))
    entities.Metric = lambda *values: values
    entities.Param = lambda *values: values
    tracking.MlflowClient = Client
    for module in (mlflow, entities, tracking):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return told


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_curves_config_and_end_reach_the_service(tmp_path, services, name):
    out = tmp_path / "my run"
    record = hyperbatch.train(config(out=str(out), tracker=name, **VALUES))
    assert services.begun[0]["name"] == "my run"
    assert set(services.params) == {"recipe", *(spec.name for spec in fields())}
    assert services.params["lr"] == "0.3"
    curves = Counter(key for _, values in services.points for key in values)
    assert curves["train/loss"] == curves["train/lr"] == record.result.steps == 12
    assert curves["eval/top1"] == len(record.metrics("eval")) == 2
    losses = [values["train/loss"] for _, values in services.points if "train/loss" in values]
    assert losses == [row["loss"] for row in record.metrics("step")]
    assert [step for step, _ in services.points] == sorted(step for step, _ in services.points)
    (end,) = services.ended
    assert end == "FINISHED" if name == "mlflow" else end[0] == 0
    if name == "wandb":
        assert end[1]["top1"] == record.result.top1


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_resumed_run_goes_on_with_its_curves(tmp_path, services, name):
    values = {**VALUES, "out": str(tmp_path / "run"), "tracker": name}
    hyperbatch.train(config(**{**values, "max_steps": 5}))
    assert json.loads((tmp_path / "run" / "tracker.json").read_text()) == {name: "run-1"}
    hyperbatch.train(config(**values, resume=True))
    assert [begun["id"] for begun in services.begun] == [None, "run-1"]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_failed_run_is_told_as_failed(tmp_path, services, name):
    with pytest.raises(RunFailed):
        hyperbatch.train(config(out=str(tmp_path / "run"), tracker=name, nproc=1, lr=1e30, lars_eps=1e-9))
    assert services.ended[0] == "FAILED" if name == "mlflow" else services.ended[0][0] == 1


@pytest.mark.parametrize("what", ["begin", "add", "end"])
def test_a_service_that_fails_costs_no_run(tmp_path, services, monkeypatch, capsys, what):
    def fails(*_):
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr(trackers.Wandb, what, fails)
    record = hyperbatch.train(config(out=str(tmp_path / "run"), tracker="wandb", **VALUES))
    assert record.result.steps == 12
    said = "hyperbatch: wandb failed, and the run continues without it: no route to host\n"
    assert capsys.readouterr().err.count(said) == 1


def test_points_are_at_most_one_a_second(monkeypatch):
    from hyperbatch.callbacks import StepEvent

    now, points = [100.0], []
    monkeypatch.setattr(trackers.time, "monotonic", lambda: now[0])
    tracker = trackers.Wandb()
    monkeypatch.setattr(tracker, "add", lambda values, step: points.append(step))
    for step in range(1, 41):
        now[0] = 100.0 + step / 10
        tracker.on_step(StepEvent(step=step, epoch=0, time_s=0, loss=1, lr=1, global_batch=1, images_per_s=1))
    assert points == [1, 11, 21, 31]


def test_a_package_that_is_missing_is_told_before_anything_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    for name in ("wandb", "mlflow", "tensorboard"):
        with pytest.raises(InputError, match=f"--tracker {name}: {name} is not installed; pip install 'hyperbatch"):
            hyperbatch.train(config(out=str(tmp_path / "run"), tracker=name, **VALUES))
    assert not (tmp_path / "run").exists()


def test_no_tracker_loads_no_package(tmp_path):
    hyperbatch.train(config(out=str(tmp_path / "run"), **VALUES))
    assert not {"wandb", "mlflow"} & set(sys.modules)


# The real packages


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    hyperbatch.train(config(out=str(tmp_path / "run"), tracker="tensorboard", **VALUES))
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.*"))


@pytest.mark.filterwarnings("default")
def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    hyperbatch.train(config(out=str(tmp_path / "run"), tracker="wandb", **VALUES))
    assert list((tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb"))


@pytest.mark.filterwarnings("default")
def test_mlflow_in_a_folder(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setattr(trackers, "INTERVAL_S", 0.0)
    record = hyperbatch.train(config(out=str(tmp_path / "run"), tracker="mlflow", **VALUES))
    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("hyperbatch").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["lr"] == "0.3"
    assert len(client.get_metric_history(run.info.run_id, "train/loss")) == record.result.steps
    assert Path(record.folder, "tracker.json").exists()
