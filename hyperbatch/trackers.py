"""Curves and config for wandb, MLflow or TensorBoard: callbacks that `--tracker` adds. Each needs its own package.

    train/loss, train/lr, train/images_per_s, train/epoch    at most once a second, in which a run may take many steps
    eval/top1, ...                                           all scores, at every evaluation

The packages are loaded when a run begins. If a service fails, there is a warning and the run continues without curves.
A resumed run continues the same curves: its folder contains their id in tracker.json.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hyperbatch.callbacks import Callback, EvalEvent, StartEvent, StepEvent
from hyperbatch.config import Config, fields, format_value
from hyperbatch.errors import InputError, first_line
from hyperbatch.record import RunRecord

PROJECT = "hyperbatch"
INTERVAL_S = 1.0  # least time between two points of a training curve
MOST_PARAMS = 100  # most parameters that MLflow accepts at once
ID_FILE = "tracker.json"


def trackers_of(config: Config) -> list[Callback]:
    """Returns the callbacks of the config's tracker. Raises InputError if its package is not installed."""
    name = config.run.tracker
    if name is None:
        return []
    if importlib.util.find_spec(name) is None:
        raise InputError(f"--tracker {name}: {name} is not installed; pip install 'hyperbatch[{name}]'")
    # TensorBoard needs no callback: every run writes its curves to its folder if the package is installed.
    return [TRACKERS[name]()] if name in TRACKERS else []


class Tracker(Callback):
    """The base class of trackers. A subclass implements `begin`, `add` and `end`."""

    name = ""

    def __init__(self) -> None:
        self._broken = False
        self._next_s = 0.0

    def begin(self, folder: Path, id: str | None, settings: dict[str, str]) -> str:
        """Starts a run of the service, or continues the one with this id. Returns its id."""
        raise NotImplementedError

    def add(self, values: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def end(self, record: RunRecord) -> None:
        raise NotImplementedError

    def on_start(self, event: StartEvent) -> None:
        self._tried(self._begin, event)

    def on_step(self, event: StepEvent) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + INTERVAL_S
            names = ("loss", "lr", "images_per_s", "epoch")
            self._tried(self.add, {f"train/{name}": getattr(event, name) for name in names}, event.step)

    def on_eval(self, event: EvalEvent) -> None:
        numbers = {name: value for name, value in event.scores.items() if isinstance(value, int | float)}
        self._tried(self.add, {f"eval/{name}": value for name, value in numbers.items()}, event.step)

    def on_end(self, record: RunRecord) -> None:
        self._tried(self.end, record)

    def _begin(self, event: StartEvent) -> None:
        folder = Path(event.folder)
        ids = _ids(folder) if event.step else {}
        ids[self.name] = self.begin(folder, ids.get(self.name), settings_of(event.config))
        (folder / ID_FILE).write_text(json.dumps(ids))

    def _tried(self, call: Callable[..., None], *arguments: Any) -> None:
        """Calls a function of the service. After the first failure, further calls do nothing."""
        if self._broken:
            return
        try:
            call(*arguments)
        except Exception as error:
            self._broken = True
            reason = first_line(error)
            print(f"hyperbatch: {self.name} failed, and the run continues without it: {reason}", file=sys.stderr)


class Wandb(Tracker):
    """Weights & Biases. WANDB_MODE=offline keeps everything in the run's folder, for `wandb sync`. WANDB_PROJECT sets a
    different project."""

    name = "wandb"

    def begin(self, folder: Path, id: str | None, settings: dict[str, str]) -> str:
        import wandb  # pyright: ignore[reportMissingImports]

        project = os.environ.get("WANDB_PROJECT") or PROJECT
        self._run: Any = wandb.init(
            project=project, name=folder.name, dir=str(folder), id=id, resume="allow", config=settings
        )
        return self._run.id

    def add(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def end(self, record: RunRecord) -> None:
        self._run.summary.update(_numbers(record))
        self._run.finish(exit_code=1 if record.error else 0)


class Mlflow(Tracker):
    """MLflow, at MLFLOW_TRACKING_URI, or in a folder next to the runs if that is not set. MLFLOW_EXPERIMENT_NAME sets a
    different experiment."""

    name = "mlflow"

    def begin(self, folder: Path, id: str | None, settings: dict[str, str]) -> str:
        # The client is used because mlflow's own functions keep the current run per thread, and callbacks are called
        # from several threads.
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._client, self._metric = MlflowClient(), Metric
        if id is not None:
            self._client.update_run(id, status="RUNNING")
            self._id = id
            return id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        self._id = self._client.create_run(experiment, run_name=folder.name).info.run_id
        params = [Param(key, value) for key, value in settings.items()]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + MOST_PARAMS])
        return self._id

    def add(self, values: Mapping[str, float], step: int) -> None:
        now_ms = time.time_ns() // 1_000_000
        points = [self._metric(key, float(value), now_ms, step) for key, value in values.items()]
        self._client.log_batch(self._id, metrics=points)

    def end(self, record: RunRecord) -> None:
        self.add({f"result/{name}": value for name, value in _numbers(record).items()}, record.result.steps)
        self._client.set_terminated(self._id, "FAILED" if record.error else "FINISHED")


TRACKERS = {"wandb": Wandb, "mlflow": Mlflow}


def settings_of(config: Config) -> dict[str, str]:
    """Returns the config as a flat table, with values in the form of the command line."""
    return {"recipe": config.recipe} | {spec.name: format_value(spec.of(config)) for spec in fields()}


def _numbers(record: RunRecord) -> dict[str, float]:
    result = record.to_dict()["result"]
    return {name: value for name, value in result.items() if isinstance(value, int | float)}


def _ids(folder: Path) -> dict[str, str]:
    try:
        return json.loads((folder / ID_FILE).read_text())
    except (OSError, ValueError):
        return {}
