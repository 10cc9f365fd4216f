"""The training loop, in the order in which data flows: batch, forward, backward, exchange, update, log, evaluate."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hyperbatch.callbacks import NO_HOOKS, Hooks
from hyperbatch.config import Config
from hyperbatch.data.batch import Batch
from hyperbatch.engine import snapshot
from hyperbatch.engine.clock import Clock
from hyperbatch.engine.compiled import CompiledRegions
from hyperbatch.engine.console import Console
from hyperbatch.engine.ending import Ending
from hyperbatch.engine.folder import claim_folder, keep_config
from hyperbatch.engine.guard import Guard, LossGuard
from hyperbatch.engine.journal import Journal
from hyperbatch.engine.kernel_choice import training_kernels
from hyperbatch.engine.learner import Learner
from hyperbatch.engine.place import collective_of, place_of
from hyperbatch.engine.preempt import Preemption
from hyperbatch.engine.ranks import Ranks, errors_shared, join, share
from hyperbatch.engine.rollback import may_roll_back, roll_back
from hyperbatch.engine.run import Run, at_precision, build_run, check_equal_config
from hyperbatch.engine.runner import StepRunner
from hyperbatch.engine.saver import Saver
from hyperbatch.engine.step import MicroStep
from hyperbatch.engine.steptimer import StepTimer
from hyperbatch.engine.whiten import rehearse, whiten
from hyperbatch.errors import Diverged
from hyperbatch.kernels import workers
from hyperbatch.kernels.compile import prepare_triton
from hyperbatch.optim.averaging import new_share_at
from hyperbatch.record import RunRecord
from hyperbatch.schedule import (
    EpochGrid,
    Step,
    Stride,
    learning_rate,
    position_of,
    steps,
    strides,
    weight_decay_scale,
)

STRIDES_AHEAD = 500  # number of strides that are captured before the run's time starts: all of a short run


def run(
    config: Config,
    ranks: Ranks,
    *,
    report: Callable[[dict[str, Any]], None] | None = None,
    parent_file: Path | None = None,
    hooks: Hooks = NO_HOOKS,
    keeps_config: bool = False,
) -> RunRecord:
    """Trains as one of `ranks`. Every rank returns the record, and rank 0 writes the run's folder. If the run was
    preempted, the `error` of its record says so.

    report: receives the reason when one rank of several fails (engine/ending.py). parent_file: appears when the command
    that started this rank was preempted (engine/preempt.py). hooks: called by rank 0. keeps_config: whether rank 0
    writes the config to the folder, for --resume; if not, the command that started this rank has written it.
    """
    clock = Clock()
    preemption = Preemption(config.run.preempt_signals, ranks, timeout_s=config.run.timeout_s, parent_file=parent_file)
    # These contexts are exited from the last to the first, so that a failure is reported before anything that could
    # block is closed.
    with (
        preemption,
        Ending(ranks, report) as ending,
        training_kernels(deterministic=config.run.deterministic),
        join(ranks, config.run.device, config.run.timeout_s) as device,
        contextlib.ExitStack() as held,
        ending.told(),
    ):
        ending.watch(config.run.timeout_s, raises=device.type == "cpu")
        if device.type == "cuda":
            prepare_triton()
        check_equal_config(config, ranks, device)
        out = claim_folder(config, ranks, held)
        saved, told = snapshot.find_start(config, ranks, out)
        if (
            saved is not None
            and snapshot.is_over(config, saved)
            and (record := finished_record(out, ranks)) is not None
        ):
            how = snapshot.how_to_go_on(config, saved)
            Console(enabled=ranks.rank == 0).say(f"nothing to do in {out}: {how}")
            return record
        if keeps_config and ranks.rank == 0 and (problem := keep_config(config, out)):
            told += (problem,)
        config = at_precision(config, device, ranks, saved)
        resume_from = None if saved is None else saved.progress.step + 1
        with Journal(config, ranks, out, clock, resume_from_step=resume_from, hooks=hooks) as journal, ending.told():
            ending.record, ending.step = journal.fail_with, lambda: journal.step
            ending.place, ending.collective = lambda: place_of(clock, journal.run), lambda: collective_of(clock)
            run = build_run(config, ranks, device, clock=clock, saved=saved, stage=journal.console.stage)
            held.callback(run.close)
            run.warnings += told
            if saved is not None:
                snapshot.restore(run, saved)
                saved = None  # frees memory as large as the weights and the optimizer's state
            runner = StepRunner(run.learner, micro_step, config, ranks, run.warnings)
            held.callback(runner.close)  # NCCL waits for graphs that contain its collectives
            saver = held.enter_context(Saver(run, out, warn=journal.warn, written=journal.checkpoint))
            ending.preemption, preemption.on_stop = preemption, ending.disarm
            with preemption.watched(ending.store):
                return train(run, runner, journal, saver, preemption)


def finished_record(out: Path, ranks: Ranks) -> RunRecord | None:
    """Returns the record of a run that has ended, as rank 0 finds it, or None. Other hosts may not see the folder."""
    record = None
    with errors_shared(ranks):
        if ranks.rank == 0 and (out / "record.json").exists():
            record = RunRecord.load(out)
    record = share(record, ranks)
    return None if record is None or record.error else record


def train(
    run: Run, runner: StepRunner, journal: Journal, saver: Saver, preemption: Preemption | None = None
) -> RunRecord:
    """Trains from the run's position to its end. It stops early if the run is preempted, and rolls the run back to a
    checkpoint if the loss is not finite or has jumped."""
    config, clock = run.config, run.clock
    evals = EpochGrid(config.run.eval_every_epochs, config.run.eval_offset_epochs, len(run.train_set))
    # The run's time starts with the first training sample; kernels are compiled before that. Evaluation is captured
    # first, so that training, which needs more memory, reuses its memory.
    stage = journal.console.stage
    compiled = run.learner.compiled
    stage(compiled.stage if isinstance(compiled, CompiledRegions) else "compiling kernels")
    runner.compile(shapes_ahead(run), other_trials=run.validation.rehearse, count=journal.console.count)
    workers.stop()
    stage("preparing evaluation")
    reason = run.validation.prepare(capture=runner.captures)
    if reason is not None:
        run.warnings.append(f"evaluation runs without a CUDA graph: {reason}")

    def left() -> tuple[Iterator[Stride], Iterator[Batch]]:
        todo, ahead = itertools.tee(
            prepared_strides(
                run, runner, lambda step: evals.crossed(step) or saver.planned(step) or averages(run, step), stage
            )
        )
        return todo, run.loader.batches(ahead, passed_over=run.progress.passed_over)

    todo, batches = left()
    rehearse(run)
    losses = LossGuard(run, micro_step, lambda: next(batches, None), may_go_back=lambda: may_roll_back(run, saver))
    journal.start(run, evals, losses)
    clock.switch("train")
    if run.progress.step == 0:
        begin(run)
    while True:
        try:
            preempted = train_strides(run, runner, journal, saver, evals, todo, batches, preemption)
            break
        except Diverged as fault:
            with clock.booked("pause"):
                journal.went_back(run, roll_back(run, saver, fault, journal.out))
                todo, batches = left()
    with clock.booked("pause"):
        saver.wait()
    return journal.finish(run, error=preempted)


def train_strides(
    run: Run,
    runner: StepRunner,
    journal: Journal,
    saver: Saver,
    evals: EpochGrid,
    todo: Iterator[Stride],
    batches: Iterator[Batch],
    preemption: Preemption | None,
) -> str:
    """Trains the strides of `todo`. Returns which signal preempted the run and when; "" if the run has ended."""
    config, clock, progress = run.config, run.clock, run.progress
    end = position_of(config.schedule.epochs, len(run.train_set))
    timer, guard = run.timer, Guard(run)
    timer.alone = runner.alone
    for stride in todo:
        if preemption is not None and not preemption.may_begin(stride[-1].index + 1):
            if progress.step:
                save(run, journal, guard, saver)
            return f"preempted by {preemption.reason} after step {progress.step}"
        if not runner.is_ready(stride):
            journal.flush()  # waits for the previous stride, whose time counts as training
            with clock.booked("capture"):
                runner.prepare(stride)
        rates = [learning_rate(config.schedule, step.epoch) for step in stride]
        settings = [(rate, *other_rates(config, step)) for rate, step in zip(rates, stride, strict=True)]

        timer.start(len(stride))
        losses = train_stride(runner, stride, batches, timer, settings)
        step = stride[-1]  # only a stride's last step may be followed by anything but the next step
        average_weights(run, step)
        progress.step, progress.position = step.index + 1, step.position + step.phase.global_batch
        journal.stride(run, stride, losses, rates, timer)
        guard.after(stride)

        stopped = progress.position >= end or progress.step == config.run.max_steps
        if evals.crossed(step) or (stopped and config.run.final_eval):
            journal.flush()
            guard.check()
            stopped = evaluate_run(run, journal) or stopped
        if stopped or saver.due(step):
            save(run, journal, guard, saver)
        if stopped:
            break
    return ""


def save(run: Run, journal: Journal, guard: Guard, saver: Saver) -> None:
    """Checks every loss so far and that weights are finite and equal on all ranks, and takes a checkpoint."""
    journal.flush()
    run.learner.sync.check()
    guard.check()
    with run.clock.booked("pause"), journal.tracer.span("checkpoint", step=run.progress.step):
        saver.save()


def begin(run: Run) -> None:
    """Prepares a new run with training data before its first step. This counts towards the run's time."""
    whiten(run)
    if run.learner.average is not None:
        run.learner.average.reset()


def average_weights(run: Run, step: Step) -> None:
    """Adds the weights to their average if the config says so for this step."""
    new_share = share_of_weights(run, step)
    if run.learner.average is not None and new_share is not None:
        run.learner.average.set_share(new_share)
        run.learner.average.update()


def averages(run: Run, step: Step) -> bool:
    """Whether this step updates the average of the weights."""
    return share_of_weights(run, step) is not None


def share_of_weights(run: Run, step: Step) -> float | None:
    """Returns the share of this step's weights in the new average; None if the step does not update the average."""
    done = (step.position + step.phase.global_batch) / position_of(run.config.schedule.epochs, len(run.train_set))
    return new_share_at(run.config.optim, step=step.index + 1, done=min(1.0, done))


def train_stride(
    runner: StepRunner,
    stride: Stride,
    batches: Iterator[Batch],
    timer: StepTimer,
    rates: Sequence[tuple[float, ...]] | None = None,
) -> Tensor:
    """Runs the optimizer steps of a stride. Returns this rank's mean loss of each step, still on the device.

    rates: those of each step, as for `RateTable.write`; None leaves the rates unchanged.
    """
    for place, launch in enumerate(runner.launches(stride)):
        batch = next(batches)
        timer.mark("data_wait")
        if rates is not None and place == 0:
            # The rates are not written earlier: their copy to the device waits for the previous step, and the loader's
            # copies, for which the host has just waited, might be queued behind it.
            runner.rates.write(rates)
        runner.run(stride, launch, batch, timer)  # calls `micro_step` for each part, or replays its graph
    return runner.losses[: len(stride)].clone()  # a copy, because the next stride overwrites them


def micro_step(
    learner: Learner, part: MicroStep, images: Tensor, labels: Tensor, total: Tensor, timer: StepTimer
) -> None:
    """Forward, backward, exchange and update: everything between a ready batch and the updated weights.

    `total` becomes this rank's mean loss over the step's micro-steps so far. Nothing here reads a value from the
    device, so the same code runs as plain code or is captured in a CUDA graph.
    """
    if part.first:
        learner.arena.zero_grad()
    loss = learner.loss(learner.model(images), labels)
    if part.samples < part.samples_per_step:
        # The mean over this micro-step's samples is weighted by its share of the step's samples.
        loss = loss / (part.samples_per_step / part.samples)
    timer.mark("forward")
    learner.sync.begin(last_micro_step=part.last)
    learner.scaler.backward(loss)  # gradient groups are sent as they become ready
    total.copy_(loss.detach()) if part.first else total.add_(loss.detach())
    timer.mark("backward")
    if not part.last:
        learner.arena.collect()  # copies gradients to the arena, where the next micro-step's graph adds to them
        return
    learner.sync.finish()
    timer.mark("exposed_comm")
    if learner.clip is not None:
        learner.clip.measure()
    learner.update.step()
    learner.scaler.update()
    # Anything else that must happen after every update belongs here, so that it is part of every step of a stride.
    timer.mark("update")


def evaluate_run(run: Run, journal: Journal) -> bool:
    """Evaluates and records the result. Returns whether the run ends: because it has reached its target, or because it
    has not improved for `patience_evals` evaluations."""
    journal.eval_start(run)
    with run.clock.booked("eval"), journal.tracer.span("evaluation", step=run.progress.step):
        score = run.validation.evaluate()
    run.progress.evaluated_s, run.progress.evaluated_step = run.clock.run_s, run.progress.step
    journal.unreadable(run.validation.bad_samples)
    target = run.config.run.target_top1
    reached = target is not None and score.top1 >= target
    run.progress.top1, run.progress.top1_plain = score.top1, score.top1_plain
    run.progress.top5, run.progress.val_loss = score.top5, score.val_loss
    if reached and run.progress.time_to_target_s is None:
        run.progress.time_to_target_s = run.progress.evaluated_s
    run.progress.note_eval(score.top1)
    journal.eval(run, score)
    if impatient := run.progress.is_stale(run.config.run.patience_evals):
        journal.note(f"stopped early: the last {run.progress.stale_evals} evaluations did not improve the accuracy")
    return impatient or (reached and run.config.run.stop_at_target)


def other_rates(config: Config, step: Step) -> tuple[float, float]:
    """Returns the scale of the weight decay, which has its own schedule if it is decoupled, and the learning rate of
    parameters that are trained in the first epochs only."""
    decay = weight_decay_scale(config.schedule, step.epoch) if config.optim.decoupled_weight_decay else 1.0
    return decay, learning_rate(config.schedule, step.epoch, ends_epoch=config.optim.whiten_bias_epochs or None)


def prepared_strides(
    run: Run, runner: StepRunner, ends: Callable[[Step], bool], stage: Callable[[str], None]
) -> Iterator[Stride]:
    """Warms up, captures the next STRIDES_AHEAD strides, and returns all remaining strides of the run. ends: as for
    `schedule.strides`."""
    stage("warming up")
    runner.warm_up(shapes_ahead(run))
    block = []  # the steps before the first break
    for step in itertools.islice(steps_left(run), STRIDES_AHEAD):
        block.append(step)
        if ends(step):
            break
    if block:
        runner.choose_length(block)

    def left() -> Iterator[Stride]:
        return strides(steps_left(run), length=runner.length, shape=runner.shape, ends=ends)

    near = list(itertools.islice(left(), STRIDES_AHEAD))
    for place, stride in enumerate(near + near[:1]):  # the first again: later captures may have freed its graphs
        if not runner.is_ready(stride):
            stage(f"preparing launch {place + 1} of {len(near)}")
            runner.prepare(stride)
    run.loader.rehearse({(runner.shape(stride[0]), len(stride)): stride for stride in near}.values())
    return left()


def steps_left(run: Run) -> Iterator[Step]:
    """Yields the steps from the run's position to its end."""
    samples, progress, limit = len(run.train_set), run.progress, run.config.run.max_steps
    left = steps(run.phases, samples, run.config.schedule.epochs, index=progress.step, position=progress.position)
    return itertools.islice(left, max(0, limit - progress.step)) if limit else left


def shapes_ahead(run: Run) -> Iterator[Step]:
    """Yields one step of each batch phase and image size that lies ahead."""
    samples, epochs, here = len(run.train_set), run.config.schedule.epochs, run.progress.position
    end = position_of(epochs, samples)
    if run.config.run.max_steps:
        left = run.config.run.max_steps - run.progress.step
        end = min(end, here + left * max(phase.global_batch for phase in run.phases))
    starts = {here, *(phase.from_position for phase in run.phases)}
    starts |= {position_of(phase.from_epoch, samples) for phase in run.config.data.size_phases}
    for position in sorted(starts):
        if here <= position < end:
            yield next(steps(run.phases, samples, epochs, position=position))
