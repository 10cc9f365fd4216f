"""The training loop, in the order in which data flows: batch, forward, backward, exchange, update, log, evaluate."""

from __future__ import annotations

import contextlib
import itertools
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyperbatch import checkpoint
from hyperbatch.config import Config
from hyperbatch.data.loader import Batch, eval_batches
from hyperbatch.engine.clock import Clock
from hyperbatch.engine.ending import Ending
from hyperbatch.engine.evaluate import evaluate
from hyperbatch.engine.folder import claimed, default_out
from hyperbatch.engine.graph import StepRunner
from hyperbatch.engine.job import Job, build_job
from hyperbatch.engine.journal import Journal
from hyperbatch.engine.ranks import Ranks, join, share, together
from hyperbatch.engine.step import pieces
from hyperbatch.engine.steptimer import StepTimer
from hyperbatch.optim.build import set_rate
from hyperbatch.record import RunRecord
from hyperbatch.schedule import EpochGrid, Step, learning_rate, position_of, steps, weight_decay_scale


def run(config: Config, ranks: Ranks, *, report: Callable[[dict[str, Any]], None] | None = None) -> RunRecord:
    """Trains as one of `ranks`; every rank returns the record, rank 0 has written the folder.

    report: where a rank of several leaves its words when it fails (engine/ending.py).
    """
    clock = Clock()
    # They are left from the last to the first: a failure is told before anything is given up that could block.
    with (
        Ending(ranks, report) as ending,
        kernel_choice(config.run.deterministic),
        join(ranks, config.run.device, config.run.timeout_s) as device,
        contextlib.ExitStack() as held,
        ending.told(),
    ):
        out = settle_folder(config, ranks, held)
        saved = find_checkpoint(config, ranks, out) if config.run.resume else None
        if saved is not None and is_over(config, saved) and (out / "record.json").exists():
            record = RunRecord.load(out)
            if not record.error:
                return record
        resume_from = None if saved is None else saved["progress"]["step"] + 1
        with Journal(config, ranks, out, clock, resume_from_step=resume_from) as journal, ending.told():
            ending.record = journal.fail
            job = build_job(config, ranks, device, saved, clock)
            held.callback(job.close)
            runner = StepRunner(job)
            held.callback(runner.close)  # NCCL waits for graphs that hold its collectives
            # NCCL waits long for a dead rank, and inside a graph for ever; gloo raises at once.
            if runner.captures or device.type == "cuda":
                ending.watch(config.run.timeout_s)
            return train_job(job, runner, journal, clock)


@contextlib.contextmanager
def kernel_choice(deterministic: bool) -> Iterator[None]:
    """The fastest kernels, or those that give the same bits each time; the caller's settings come back afterwards."""
    before = torch.backends.cudnn.benchmark, torch.get_deterministic_debug_mode()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once, at its first use
    torch.backends.cudnn.benchmark = not deterministic
    _be_deterministic(2 if deterministic else 0)
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before[0]
        _be_deterministic(before[1])


def _be_deterministic(mode: int) -> None:
    """0: no, 1: warn, 2: yes. Only where something changes: torch tells torch.compile, and loads that for seconds."""
    if mode != torch.get_deterministic_debug_mode():
        torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)


def settle_folder(config: Config, ranks: Ranks, held: contextlib.ExitStack) -> Path:
    """The run's folder, made by rank 0 and held until `held` ends; a parent command has done so already."""
    out = config.run.out
    with together(ranks):
        if ranks.rank == 0 and ranks.launcher != "none":
            out = out or str(default_out(config))
            held.enter_context(claimed(Path(out), resume=config.run.resume))
    return Path(share(out, ranks) or default_out(config))


def find_checkpoint(config: Config, ranks: Ranks, out: Path) -> dict[str, Any]:
    """The newest readable checkpoint, chosen and checked by rank 0: ranks must not go on from different steps."""
    saved: dict[str, Any] = {}
    with together(ranks):
        if ranks.rank == 0:
            saved = checkpoint.load(out)
            checkpoint.check_same_run(saved["config"], config)
    path, skipped = share((saved.get("path"), saved.get("skipped")), ranks)
    with together(ranks):
        if ranks.rank != 0:
            saved = checkpoint.load(Path(path)) | {"skipped": skipped}
    return saved


def is_over(config: Config, saved: dict[str, Any]) -> bool:
    """Whether a resumed run has nothing left to do."""
    progress = saved["progress"]
    reached = progress["time_to_target_s"] is not None and config.run.stop_at_target
    stopped = 0 < config.run.max_steps <= progress["step"]
    return reached or stopped or progress["position"] >= position_of(config.schedule.epochs, saved["train_samples"])


def train_job(job: Job, runner: StepRunner, journal: Journal, clock: Clock) -> RunRecord:
    config, progress, samples = job.config, job.progress, len(job.train_set)
    timer = StepTimer(job.device)
    todo, ahead = itertools.tee(steps_left(job))
    batches = job.loader.batches(ahead)
    end = position_of(config.schedule.epochs, samples)
    evals = EpochGrid(config.run.eval_every_epochs, config.run.eval_offset_epochs, samples)
    every = config.run.checkpoint_every_epochs
    saves = evals if every is None else EpochGrid(every, 0.0, samples)
    # The run's time starts with the first training sample: by then its kernels are there.
    runner.warm_up(stages(job))
    for first in itertools.islice(steps_left(job), 1):
        if not runner.knows(first):
            runner.prepare(first)
    clock.switch("train")
    journal.start(job, evals)

    for step in todo:
        if not runner.knows(step):
            journal.flush()  # waits for the step before: it is training, and what follows is not
            with clock.booked("capture"):
                runner.prepare(step)
        rate = learning_rate(config.schedule, step.epoch)
        decay = weight_decay_scale(config.schedule, step.epoch)
        set_rate(job.optimizer, rate, decay if config.optim.decoupled_weight_decay else 1.0)
        # Dropout and the like depend on (seed, step, rank) only, so a resumed run draws what an unbroken one would.
        torch.manual_seed(zlib.crc32(f"{config.run.seed} {step.index} {job.ranks.rank}".encode()))

        timer.start()
        loss = train_step(runner, step, batches, timer)
        progress.step, progress.position = step.index + 1, step.position + step.phase.global_batch
        journal.step(job, step, loss, rate, timer)

        finished = progress.position >= end
        if finished or evals.crossed(step):
            journal.flush()
            finished = (evaluate_job(job, clock, journal) and config.run.stop_at_target) or finished
        stopped = finished or progress.step == config.run.max_steps
        if stopped or saves.crossed(step):
            # A checkpoint must hold neither a loss that nobody has looked at nor weights that only some ranks updated.
            journal.flush()
            job.sync.check()
            with clock.booked("pause"):
                job.save(journal.out, clock)
        if stopped:
            break
    return journal.finish(job)


def steps_left(job: Job) -> Iterator[Step]:
    """From where the run stands to its end."""
    samples, progress, limit = len(job.train_set), job.progress, job.config.run.max_steps
    left = steps(job.phases, samples, job.config.schedule.epochs, index=progress.step, position=progress.position)
    return itertools.islice(left, max(0, limit - progress.step)) if limit else left


def stages(job: Job) -> Iterator[Step]:
    """A step of each batch phase and image size that lies ahead."""
    samples, epochs, here = len(job.train_set), job.config.schedule.epochs, job.progress.position
    end = position_of(epochs, samples)
    if job.config.run.max_steps:
        left = job.config.run.max_steps - job.progress.step
        end = min(end, here + left * max(phase.global_batch for phase in job.phases))
    starts = {here, *(phase.from_position for phase in job.phases)}
    starts |= {position_of(phase.from_epoch, samples) for phase in job.config.data.size_phases}
    for position in sorted(starts):
        if here <= position < end:
            yield next(steps(job.phases, samples, epochs, position=position))


def train_step(runner: StepRunner, step: Step, batches: Iterator[Batch], timer: StepTimer) -> Tensor:
    """One optimizer step of one or more micro-steps; returns this rank's mean loss, still on the device."""
    for piece in pieces(step.phase.micro_batches):
        batch = next(batches)
        timer.mark("data_wait")
        runner.run(piece, batch, timer)
    return runner.total.clone()  # the next step writes there


def evaluate_job(job: Job, clock: Clock, journal: Journal) -> bool:
    """Evaluates, books the result, and says whether the target is reached."""
    bad_samples: list[str] = []
    batches = eval_batches(
        job.eval_set,
        job.config.data,
        batch_per_rank=job.config.run.eval_batch_per_rank or job.phases[0].batch_per_rank,
        rank=job.ranks.rank,
        world_size=job.ranks.world_size,
        device=job.device,
        dtype=job.dtype,
        ranks_per_host=job.ranks.local_size,
        bad_samples=bad_samples,
    )
    journal.eval_start(job)
    with clock.booked("eval"):
        top1, samples = evaluate(job.model, batches, job.comm.world)
    journal.unreadable(bad_samples)
    target = job.config.run.target_top1
    reached = target is not None and top1 >= target
    job.progress.top1 = top1
    if reached and job.progress.time_to_target_s is None:
        job.progress.time_to_target_s = clock.run_s
    journal.eval(job, top1, samples)
    return reached
