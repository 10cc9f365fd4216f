"""Trains several runs in one process. A run reuses what the previous one has set up.

    data sets, and their images on the device     kept while runs read the same data
    model, arena, optimizer, kernels, graphs      kept while runs differ only in the fields of `READ_ANEW`

Every run starts from newly drawn weights and from the state that the learner was built with: `preserved_state`, which
restores the state after warm-up steps, also restores it after whole runs. A run therefore gives the same bits here and
in its own process. A session has one rank; several ranks need separate processes (hyperbatch/launch.py).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hyperbatch.config import Config, DataConfig, fields, format_value
from hyperbatch.data.source import Source, open_data
from hyperbatch.engine.clock import Clock
from hyperbatch.engine.journal import Journal
from hyperbatch.engine.kernel_choice import training_kernels
from hyperbatch.engine.learner import Learner, frozen, initial_model
from hyperbatch.engine.loop import micro_step, train
from hyperbatch.engine.ranks import Ranks, join
from hyperbatch.engine.run import Run, at_precision, build_run, next_run
from hyperbatch.engine.runner import StepRunner
from hyperbatch.engine.saver import Saver
from hyperbatch.engine.warmup import preserved_state
from hyperbatch.errors import InputError, RunFailed, check_kind
from hyperbatch.optim.build import build_optimizer
from hyperbatch.record import RunRecord

# Fields that the host reads anew for each run or step, and that no captured step contains. If any other field changes,
# the learner is built again.
READ_ANEW = frozenset(
    (
        *("epochs", "batch_phases", "lr", "lr_batch", "lr_scaling", "warmup", "warmup_epochs", "warmup_lr", "decay"),
        *("decay_epochs", "decay_power", "end_lr", "milestones", "decay_factor", "weight_decay"),
        *("seed", "target_top1", "stop_at_target", "eval_every_epochs", "eval_offset_epochs", "max_steps"),
        *("checkpoint_every_epochs", "checkpoint_every_steps", "checkpoint_every_minutes", "keep_checkpoints"),
        *("keep_best", "log_every_steps", "timeout_s", "out", "patience_evals", "final_eval", "max_skipped_steps"),
        *("compare_every_steps", "max_rollbacks", "spike_factor"),
    )
)


@dataclass(kw_only=True, slots=True)
class _Warm:
    """The objects of the last run that the next one may reuse."""

    key: tuple[str, ...]
    run: Run
    runner: StepRunner
    warnings: list[str]  # those of the current run, followed by those of the runner about its steps
    own: int  # the number of warnings of the current run

    def close(self) -> None:
        self.runner.close()
        self.run.close()


class Session:
    """Trains many configs in this process. A run reuses the data, model and graphs of the previous run where it can.

    Call `run(config)` for each config. A session is a context manager; without `with`, call `close` at the end.
    """

    def __init__(self, *, runner: type[StepRunner] = StepRunner) -> None:
        """runner: the class that runs the steps; tests pass one for CPUs that imitates captures."""
        self._make_runner = runner
        self.failure: RunRecord | None = None  # the record of the last run if it failed
        self._data: tuple[tuple[str, ...], tuple[Source, Source]] | None = None
        self._warm: _Warm | None = None

    def run(self, config: Config, out: str | os.PathLike[str] | None = None) -> RunRecord:
        """Trains a config, and raises RunFailed if the run fails. out: the folder of the run; with None, no files are
        written.

        After any other error nothing is reused by later runs, because the state is unknown.
        """
        check_kind("config", config, Config, "give a Config, as get_recipe(NAME) returns")
        check_plain(config)
        clock, ranks = Clock(), Ranks()
        self.failure = None
        folder = None if out is None else Path(out)
        with (
            training_kernels(deterministic=config.run.deterministic),
            join(ranks, config.run.device, config.run.timeout_s) as device,
            Journal(config, ranks, folder, clock, resume_from_step=None, quiet=True) as journal,
        ):
            config = at_precision(config, device, ranks)
            try:
                warm = self._warmed(config, ranks, device, clock)
                run = warm.run
                with preserved_state(run.learner):
                    start_anew(run.learner, config, ranks, classes=run.train_set.classes)
                    try:
                        with Saver(run, folder, warn=journal.warn) as saver:
                            return train(run, warm.runner, journal, saver)
                    finally:
                        run.loader.close()
            except BaseException as error:
                journal.fail(str(error) or type(error).__name__)
                self.failure = journal.failure
                if not isinstance(error, RunFailed):
                    self._drop_warm()
                raise

    def _warmed(self, config: Config, ranks: Ranks, device: torch.device, clock: Clock) -> _Warm:
        """Returns the run and the runner of its steps: newly built, or reused from the previous run."""
        key = (str(device), *key_of(config))
        data = self._opened(config.data)
        if self._warm is not None and self._warm.key != key:
            self._drop_warm()
        warm = self._warm
        if warm is None:
            run = build_run(config, ranks, device, clock=clock, data=data)
            runner = self._make_runner(run.learner, micro_step, config, ranks, run.warnings)
            self._warm = _Warm(key=key, run=run, runner=runner, warnings=run.warnings, own=len(run.warnings))
            return self._warm
        before, warm.run = warm.run.config, next_run(warm.run, config, clock)
        warm.runner.follow(config)
        if config.optim.weight_decay != before.optim.weight_decay:
            set_weight_decay(warm.run.learner, config)
        # The runner keeps appending to the list that it was built with, and its earlier warnings apply to this run,
        # too.
        warm.warnings[: warm.own], warm.own = warm.run.warnings, len(warm.run.warnings)
        warm.run.warnings = warm.warnings
        return warm

    def _opened(self, config: DataConfig) -> tuple[Source, Source]:
        key = data_key(config)
        if self._data is None or self._data[0] != key:
            self._drop_warm()
            self._data = None  # freed before the next data is read, because both may be large
            self._data = key, open_data(config)
        return self._data[1]

    def _drop_warm(self) -> None:
        """Frees the memory of the last learner and its graphs."""
        if self._warm is None:
            return
        self._warm.close()
        self._warm = None
        gc.collect()  # hooks and graphs refer to each other
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def close(self) -> None:
        self._drop_warm()
        self._data = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_plain(config: Config) -> None:
    """Raises InputError if the config asks for something that only `train` can do."""
    run = config.run
    asked = {
        f"nproc={run.nproc}": run.nproc > 1,
        f"resume={run.resume!r}": run.resume != "no",
        f"max_restarts={run.max_restarts}": run.max_restarts > 0,
        f"tracker={run.tracker!r}": run.tracker is not None,
    }
    odd = next((text for text, is_asked in asked.items() if is_asked), None)
    if odd is not None:
        raise InputError(f"{odd}: a session trains new runs in this process, without trackers; use hyperbatch.train")


def key_of(config: Config) -> tuple[str, ...]:
    """Returns the values that a learner and its captured steps depend on."""
    texts = [f"{spec.name} {format_value(spec.of(config))}" for spec in fields() if spec.name not in READ_ANEW]
    return (*texts, f"decays {config.optim.weight_decay > 0}")


def data_key(config: DataConfig) -> tuple[str, ...]:
    """Returns the values that `open_data` depends on. A data set of the user's own receives the whole section."""
    if config.dataset in ("images", "cifar10", "cifar100", "digits"):
        return config.dataset, str(config.data)
    return (repr(config),)


def start_anew(learner: Learner, config: Config, ranks: Ranks, *, classes: Sequence[str]) -> None:
    """Gives the learner the weights and statistics with which a new run of this config begins.

    The rest of the learner must be in the state in which it was built (`preserved_state`). Values are written in place,
    because captured steps and tables of kernels contain their addresses.
    """
    fresh = initial_model(config, ranks, classes=len(classes), in_channels=learner.in_channels, class_names=classes)
    weights, buffers = dict(fresh.named_parameters()), dict(fresh.named_buffers())
    with torch.no_grad():
        for name, buffer in learner.model.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
        for name, param in frozen(learner.model):
            param.copy_(weights[name])
            if name in learner.arena.frozen_in_full:
                learner.arena.frozen_in_full[name] = weights[name].detach()
    learner.arena.load_masters(weights)


def set_weight_decay(learner: Learner, config: Config) -> None:
    """Sets the base weight decay of each group to that of an optimizer of this config. `set_rate` then writes it to
    where steps read it."""
    fresh = build_optimizer(config.optim, learner.model, learner.arena, lr=config.schedule.lr)
    for group, new in zip(learner.optimizer.param_groups, fresh.param_groups, strict=True):
        group["base_weight_decay"] = new["base_weight_decay"]
