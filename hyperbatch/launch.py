"""From one call to running ranks: in this process, through torchrun's elastic agent, or under somebody's launcher.

train(config)
  started by torchrun, srun or mpirun?   be the rank it says
  one process asked for?                 be the only rank
  else                                   check the input, then let the elastic agent start `engine.worker` N times
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from hyperbatch.config import Config
from hyperbatch.data.source import DataCounts, check_data
from hyperbatch.engine.agent import check_nproc, default_nproc, start_ranks
from hyperbatch.engine.folder import claimed, default_out, has_checkpoint, resume_hint
from hyperbatch.engine.ranks import Ranks, ended_by_sigterm, find_ranks
from hyperbatch.errors import InputError, Interrupted, Preempted, RunFailed
from hyperbatch.plan import inventory
from hyperbatch.plan.types import RankGrid
from hyperbatch.record import RunRecord, note_failure
from hyperbatch.schedule import resolve_phases


def train(config: Config) -> RunRecord:
    """Trains and returns the record. InputError for wrong input, RunFailed when a run that began could not end;
    Preempted, which is one, when it was asked to make room and can go on."""
    ranks = find_ranks()
    if config.run.resume != "no" and not config.run.out:
        raise InputError("--resume needs the folder of the run to continue: give it with --out")
    if ranks is None:
        counts = check_data(config.data)  # before torch is loaded: the commonest mistake is answered at once
        nproc = config.run.nproc or default_nproc(config.run.device)
        check_nproc(nproc)
        check_input(config, nproc, counts)
        made = config.run.out is None
        config = config.override(out=str(config.run.out or default_out(config)), nproc=nproc)
        with claimed(Path(config.run.out or "."), resume=config.run.resume, made=made):
            check_resume(config)
            # A process that is killed cannot start itself again.
            apart = nproc > 1 or config.run.max_restarts > 0
            return _train_elastic(config, nproc) if apart else _train_here(config, Ranks())
    if config.run.max_restarts:
        raise InputError(
            f"--max-restarts {config.run.max_restarts}: only {ranks.launcher} can start these ranks again; use its own "
            f"option (torchrun --max-restarts, sbatch --requeue) and --resume auto"
        )
    return _train_here(config, ranks)


def _train_here(config: Config, ranks: Ranks) -> RunRecord:
    from hyperbatch.engine.loop import run

    with ended_by_sigterm():
        try:
            record = run(config, ranks)
        except RunFailed as error:
            if config.run.out is None:
                raise
            raise RunFailed(f"{error}; {resume_hint(Path(config.run.out))}") from error
    _check_preempted(record)
    if ranks.rank == 0:
        finish(record)
    return record


def finish(record: RunRecord) -> None:
    """What is drawn once the run is over; a report that fails must not turn a good run into a failed one."""
    from hyperbatch.report import write_report

    folder = Path(record.folder)
    try:
        write_report([folder])
    except Exception as error:
        record.warnings.append(f"report.html could not be written: {error}")
        record.save(folder)


def check_input(config: Config, world_size: int, counts: DataCounts) -> None:
    """Every other mistake that can be seen before a worker starts, so that it is told once and at once.

    counts: what `check_data` found.
    """
    if config.comm.grid is not None:
        RankGrid.parse(config.comm.grid).check_world(world_size)
    resolve_phases(config.schedule.batch_phases, counts.train_samples, world_size, accumulate=config.run.accumulate)
    model = config.model.model
    if model in inventory.model_names():  # too small an image is refused
        inventory.layers(model, classes=counts.classes, image_size=config.data.image_size, in_channels=counts.channels)
    if config.model.init_from is not None and not Path(config.model.init_from).exists():
        raise InputError(f"--init-from {config.model.init_from}: no such file")


def check_resume(config: Config) -> None:
    """That the run to continue is this one."""
    out = Path(config.run.out or ".")
    if config.run.resume == "yes" or (config.run.resume == "auto" and has_checkpoint(out)):
        from hyperbatch import checkpoint

        checkpoint.check_same_run(checkpoint.load(out).config, config)


def _train_elastic(config: Config, nproc: int) -> RunRecord:
    """Starts the ranks, and starts them again after a fault as often as the config allows."""
    out, faults, most = Path(config.run.out or "."), [], config.run.max_restarts
    while True:
        try:
            _start(config, nproc)
            break
        except Interrupted:
            raise
        except RunFailed as error:
            if len(faults) == most:
                raise
            faults.append(error.words.get("message", str(error)))  # without what the user could do
            print(f"hyperbatch: {faults[-1]}; restart {len(faults)} of {most}", file=sys.stderr, flush=True)
            config = config.override(resume="auto")
    record = RunRecord.load(out)
    _check_preempted(record)
    record.warnings += [f"the ranks were started again: {fault}" for fault in faults]
    record.save(out)
    finish(record)
    return record


def _start(config: Config, nproc: int) -> None:
    """Runs the ranks to their end; a failure is left in the run's folder."""
    from hyperbatch.engine.preempt import signals_of

    out = Path(config.run.out or ".")
    with tempfile.TemporaryDirectory(prefix="hyperbatch-") as scratch:
        config_path = Path(scratch) / "config.json"
        config_path.write_text(json.dumps(config.to_dict()))
        try:
            start_ranks(
                nproc,
                "hyperbatch.engine.worker",
                config_path,
                hint=lambda: resume_hint(out),
                preempt_signals=signals_of(config.run.preempt_signals),
            )
        except RunFailed as error:
            if error.words:
                note_failure(out, error.words, config, nproc)
            raise


def _check_preempted(record: RunRecord) -> None:
    """The record of a run that ended without a failure and yet early."""
    if record.error:
        raise Preempted(f"{record.error}; {resume_hint(Path(record.folder))}")
