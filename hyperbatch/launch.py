"""Starts the ranks of a run: in this process, through torchrun's elastic agent, or under the user's launcher.

train(config)
  started by torchrun, srun or mpirun?   this process becomes the rank that the launcher assigned
  a single process requested?            check the input, then this process becomes the only rank
  otherwise                              check the input, then the elastic agent starts `engine.worker` N times
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hyperbatch.callbacks import Hooks, forwarded
from hyperbatch.config import Config
from hyperbatch.data.remote.store import is_address
from hyperbatch.data.source import DataCounts, check_data, has_data
from hyperbatch.engine.agent import check_nproc, count_gpus, default_nproc, start_ranks
from hyperbatch.engine.context import open_context
from hyperbatch.engine.folder import claimed, default_out, has_checkpoint, keep_config, resume_hint
from hyperbatch.engine.ranks import Ranks, Terminated, ended_by_sigterm, find_ranks
from hyperbatch.engine.scratch import scratch_folder
from hyperbatch.engine.worker import quiet_torch
from hyperbatch.errors import Damaged, InputError, Interrupted, Preempted, RunFailed, check_kind, notes_of
from hyperbatch.kernels import workers
from hyperbatch.plan import inventory
from hyperbatch.plan.files import check_names, load_groups
from hyperbatch.plan.types import RankGrid
from hyperbatch.recipes import published_data
from hyperbatch.record import RunRecord, note_failure
from hyperbatch.schedule import check_batches, resolve_phases
from hyperbatch.trackers import trackers_of
from hyperbatch.vocabulary import TIMM, is_foreign

OPENING_S = 0.5  # the first line is printed after this time at the latest, even if the data takes longer
PYTHONS_OWN = 1000  # bound for the objects that Python itself freezes at its start: 375 in 3.12, none in others


def train(config: Config, callbacks: Iterable[Any] = ()) -> RunRecord:
    """Trains a config and returns the record of the run.

    Raises InputError if the config or the data is invalid, and RunFailed if the run could not finish. Preempted, a
    subclass of RunFailed, means that the run was asked to stop and can be resumed.

    callbacks: objects whose methods are called during the run (see `Callback`). They are called in this process, or on
    rank 0 under a launcher such as torchrun.
    """
    check_kind("config", config, Config, "give a Config, as get_recipe(NAME) returns")
    check_kind("callbacks", callbacks, Iterable, "give a list of callbacks")
    ranks = find_ranks()
    with ended_by_sigterm():
        try:
            return _train(config, callbacks, ranks)
        except Terminated as error:  # outside of training; during training, engine/preempt.py takes a checkpoint
            # A launcher also sends SIGTERM when another rank has failed, and a restarted run would fail again.
            if ranks is not None or "TERM" not in (config.run.preempt_signals or "").split(","):
                raise
            raise Preempted("; ".join(("preempted by SIGTERM", *notes_of(error)))) from None


def _train(config: Config, callbacks: Iterable[Any], ranks: Ranks | None) -> RunRecord:
    hooks = Hooks([*callbacks, *trackers_of(config)] if ranks is None or ranks.rank == 0 else ())
    if config.run.resume != "no" and not config.run.out:
        raise InputError("--resume needs the folder of the run to continue; add --out DIR")
    if is_address(config.run.out):
        raise InputError(f"--out {config.run.out} is an address; give a folder of this machine, and copy the results")
    if not has_data(config.data):
        address = published_data(config)
        download = f", or download the published data set with --data {address}" if address else ""
        raise InputError(f"{config.recipe} needs --data: give a folder, an archive or an address{download}")
    record = _train_on_this_host(config, hooks) if ranks is None else _train_launched(config, ranks, hooks)
    if ranks is None or ranks.rank == 0:
        hooks.tell("on_end", record)
    return record


def _train_on_this_host(config: Config, hooks: Hooks) -> RunRecord:
    """Checks the input, claims the run's folder and starts the ranks."""
    nproc = config.run.nproc or default_nproc(config.run.device)
    check_nproc(nproc)
    named = Path(config.run.out or ".")  # --resume requires --out
    if config.run.resume == "yes" and named.is_dir() and not has_checkpoint(named):
        raise InputError(f"--resume: {named} holds no checkpoint; use --resume auto to start the run again")
    with _told_if_slow(opening(config, nproc)):
        counts = check_data(config.data)  # before torch is loaded: the most common mistake is reported at once
        check_input(config, nproc, counts)
    given, name = config, str(config.run.out or default_out(config))
    out, config = Path(name), config.override(out=name, nproc=nproc)
    with claimed(out, resume=config.run.resume):
        _say(opening(config, nproc, counts))
        if nproc > 1 or "torch" not in sys.modules:
            _say("loading torch ..." if nproc == 1 else f"starting {nproc} ranks, each of which loads torch ...")
        check_resume(config)
        if problem := keep_config(given, out):
            _say(f"warning: {problem}")
        # A process that is killed cannot restart itself, so restarts need a separate process.
        apart = nproc > 1 or config.run.max_restarts > 0
        with _end_told(hooks, out):
            return _train_elastic(config, nproc, hooks) if apart else _train_here(config, Ranks(), hooks)


def _train_launched(config: Config, ranks: Ranks, hooks: Hooks) -> RunRecord:
    """Trains as one of the ranks that a launcher has started."""
    if config.run.max_restarts:
        raise InputError(
            f"--max-restarts {config.run.max_restarts}: only {ranks.launcher} can restart these ranks; use its "
            f"own option (torchrun --max-restarts, sbatch --requeue) and --resume auto"
        )
    quiet_torch()
    if ranks.rank == 0:
        _say(opening(config, ranks.world_size))
    return _train_here(config, ranks, hooks, keeps_config=True)


def opening(config: Config, world_size: int, counts: DataCounts | None = None) -> str:
    """Returns the first line of a run: its model, data, ranks, device and folder. counts: those of the data, if
    known."""
    data = config.data.data or config.data.dataset
    if counts is not None:
        data = f"{data} ({counts.train_samples:,} training images, {counts.classes:,} classes)"
    on_cpu = config.run.device == "cpu" or (config.run.device == "auto" and not count_gpus())
    device = "the CPU" if on_cpu else "GPUs" if world_size > 1 else "a GPU"
    ranks = "1 rank" if world_size == 1 else f"{world_size:,} ranks"
    folder = f", in {config.run.out}" if config.run.out else ""
    return f"{config.recipe}: {config.model.model} on {data}, {ranks} on {device}{folder}"


@contextlib.contextmanager
def _told_if_slow(line: str) -> Iterator[None]:
    """A context that prints the line if its body takes long, so that the screen does not stay empty."""
    timer = threading.Timer(OPENING_S, _say, (f"{line}; reading the data ...",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _end_told(hooks: Hooks, out: Path) -> Iterator[None]:
    """A context that calls `on_end` for a run that fails, too, if its folder contains a record."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            error.add_note(resume_hint(out))
        if hooks.wants("on_end") and (out / "record.json").exists():
            hooks.tell("on_end", RunRecord.load(out))
        raise


def _train_here(config: Config, ranks: Ranks, hooks: Hooks, *, keeps_config: bool = False) -> RunRecord:
    with contextlib.ExitStack() as held:
        if ranks.world_size == 1 and config.run.device != "cpu" and count_gpus():
            open_context()
            workers.start()  # they load torch in parallel with this process, which needs them a second later
            held.callback(workers.stop)
        return _train_as(config, ranks, hooks, keeps_config)


@contextlib.contextmanager
def _torch_loaded() -> Iterator[None]:
    """A context that loads torch, and excludes all objects that exist before the run from garbage collection.

    Importing torch creates 200,000 permanent objects, and a collection, during the import or later in a step, takes
    0.2 s. They are excluded until the context ends. If torch is already loaded, this does nothing.
    """
    if not gc.isenabled() or "torch" in sys.modules:
        yield
        return
    others = gc.get_freeze_count() > PYTHONS_OWN  # the caller has frozen objects, which must stay frozen
    gc.collect()  # otherwise garbage of the caller would be kept, too
    gc.disable()
    try:
        import hyperbatch.engine.loop  # noqa: F401

        gc.freeze()
    finally:
        gc.enable()
    try:
        yield
    finally:
        if not others:
            gc.unfreeze()


def _train_as(config: Config, ranks: Ranks, hooks: Hooks, keeps_config: bool) -> RunRecord:
    with _torch_loaded():
        from hyperbatch.engine.loop import run

        try:
            record = run(config, ranks, hooks=hooks, keeps_config=keeps_config)
        except RunFailed as error:
            if config.run.out is None:
                raise
            error.args = (f"{error}; {resume_hint(Path(config.run.out))}",)
            raise
    _check_preempted(record)
    if ranks.rank == 0:
        finish(record)
    return record


def finish(record: RunRecord) -> None:
    """Writes the report after the run. An error in the report becomes a warning, because the run itself has
    succeeded."""
    from hyperbatch.report import write_report

    folder = Path(record.folder)
    try:
        write_report([folder])
    except Exception as error:
        record.warnings.append(f"report.html could not be written: {error}")
        with _told_if_full():
            record.save(folder)


@contextlib.contextmanager
def _told_if_full() -> Iterator[None]:
    """A context for additions to record.json. An OSError becomes a warning, because it must neither fail the run nor
    hide the run's own error."""
    try:
        yield
    except OSError as error:
        _say(f"warning: record.json could not be written: {error.strerror or error}")


def check_input(config: Config, world_size: int, counts: DataCounts) -> None:
    """Raises InputError for every other mistake that can be detected before ranks start, so that it is reported at once
    and only once.

    counts: the result of `check_data`.
    """
    if counts.classes < 2:
        where = config.data.data or config.data.dataset
        raise InputError(f"{where} has only one class; use at least two, with one folder per class")
    if config.comm.grid is not None:
        RankGrid.parse(config.comm.grid).check_world(world_size)
    check_batches(config.schedule.batch_phases, counts.train_samples, config.schedule.epochs)
    resolve_phases(config.schedule.batch_phases, counts.train_samples, world_size, accumulate=config.run.accumulate)
    model = config.model.model
    if not is_foreign(model):  # raises for an unknown model, or if the image is too small
        inventory.layers(model, classes=counts.classes, image_size=config.data.image_size, in_channels=counts.channels)
    if config.comm.plan is not None and config.run.resume == "no":
        path = Path(config.comm.plan)
        groups = load_groups(path)
        if model in inventory.model_names() and not config.optim.layer_rates:  # others are checked once they are built
            size, channels = config.data.image_size, counts.channels
            table = inventory.tensors(model, classes=counts.classes, image_size=size, in_channels=channels)
            check_names(groups, (spec.name for spec in table), path, model)
    start = config.model.init_from if config.run.resume == "no" else None
    if start not in (None, TIMM) and not Path(start).exists():
        raise InputError(f"--init-from {start}: no such file")


def check_resume(config: Config) -> None:
    """Raises InputError if the config does not match the run that it continues."""
    out = Path(config.run.out or ".")
    if config.run.resume == "yes" or (config.run.resume == "auto" and has_checkpoint(out)):
        from hyperbatch import checkpoint

        try:
            saved = checkpoint.load(out)
        except Damaged:
            if config.run.resume == "yes":
                raise
            return  # rank 0 reports it and starts from the beginning (engine/snapshot.py)
        checkpoint.check_same_run(saved.config, config)


def _train_elastic(config: Config, nproc: int, hooks: Hooks) -> RunRecord:
    """Starts the ranks, and restarts them after a failure as often as the config allows."""
    out, faults, most = Path(config.run.out or "."), [], config.run.max_restarts
    while True:
        try:
            _start(config, nproc, hooks)
            break
        except Interrupted:
            raise
        except RunFailed as error:
            if len(faults) == most:
                raise
            faults.append(error.words.get("message", str(error)))  # without the advice for the user
            print(f"hyperbatch: {faults[-1]}; restart {len(faults)} of {most}", file=sys.stderr, flush=True)
            config = config.override(resume="auto")
    if not (out / "record.json").exists():  # without an error, this happens only if the ranks were preempted
        raise Preempted(f"preempted before the run had a record; {resume_hint(out)}")
    record = RunRecord.load(out)
    _check_preempted(record)
    record.warnings += [f"the ranks were restarted: {fault}" for fault in faults]
    with _told_if_full():
        record.save(out)
    finish(record)
    return record


def _start(config: Config, nproc: int, hooks: Hooks) -> None:
    """Runs the ranks until they end. A failure is noted in the run's folder."""
    from hyperbatch.engine.preempt import signals_of

    out = Path(config.run.out or ".")
    with scratch_folder() as scratch:
        config_path = scratch / "config.json"
        config_path.write_text(json.dumps(config.to_dict()))
        try:
            with forwarded(hooks, scratch):
                start_ranks(
                    nproc,
                    "hyperbatch.engine.worker",
                    config_path,
                    hint=lambda: resume_hint(out),
                    preempt_signals=signals_of(config.run.preempt_signals),
                )
        except RunFailed as error:
            if error.words:
                with _told_if_full():
                    note_failure(out, error.words, config, nproc)
            raise


def _check_preempted(record: RunRecord) -> None:
    """Raises Preempted if the record says that the run ended early."""
    if record.error:
        raise Preempted(f"{record.error}; {resume_hint(Path(record.folder))}")
