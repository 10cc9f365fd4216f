"""Writes the output of a run: metric lines, trace, MLPerf log, progress bar, and the record at the end.

Steps are logged one stride later: the copy of their losses to the host is queued behind them, and the host reads the
losses once it has queued the next stride.
"""

from __future__ import annotations

import contextlib
import platform
from collections import deque
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from hyperbatch.callbacks import NO_HOOKS, CheckpointEvent, EvalEvent, Hooks, StartEvent, StepEvent
from hyperbatch.checkpoint import Checkpoint
from hyperbatch.config import Config
from hyperbatch.engine.clock import Clock
from hyperbatch.engine.console import Console
from hyperbatch.engine.ending import words_of
from hyperbatch.engine.evaluate import ClassScores, Score
from hyperbatch.engine.guard import LossGuard
from hyperbatch.engine.hardware import Gauges, environment
from hyperbatch.engine.outcome import record_of
from hyperbatch.engine.pending import Booked, Pending, over_ranks, shifted, to_host
from hyperbatch.engine.ranks import Ranks, gather
from hyperbatch.engine.rollback import Rollback
from hyperbatch.engine.run import Run
from hyperbatch.engine.steptimer import StepTimer
from hyperbatch.engine.stragglers import Stragglers
from hyperbatch.engine.tracing import Tracer
from hyperbatch.errors import Preempted, RunFailed
from hyperbatch.mllog import MlperfEvents
from hyperbatch.plan.types import StepTiming
from hyperbatch.recipes.files import RUN_CONFIG
from hyperbatch.record import RunRecord, RunWriter, Span, commit
from hyperbatch.schedule import EpochGrid, Step, Stride, total_steps

LOOK_STEPS = 100  # after this number of steps without a line, losses are checked nevertheless
LAYER_LINES = 48  # approximate number of lines per run in layers.jsonl: the columns of the report's heat map


class Journal:
    """Every rank has one, since the logged loss is a mean over ranks; only rank 0's writes.

    As a context manager it leaves a readable folder even if the run fails.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        out: Path | None,
        clock: Clock,
        *,
        resume_from_step: int | None,
        quiet: bool = False,
        hooks: Hooks = NO_HOOKS,
    ) -> None:
        """out: the run's folder; None: nothing is written. quiet: nothing is printed, either. hooks: used on rank 0
        only."""
        self.config, self.out, self.clock = config, out, clock
        self._rank = ranks.rank
        chief = ranks.rank == 0
        self._hooks = hooks if chief else NO_HOOKS
        self._written: deque[tuple[CheckpointEvent, Span]] = deque()  # not reported to the hooks yet
        self._words: dict[str, Any] = {}  # describe the failure that ended the run (engine/ending.py)
        self.console = Console(enabled=chief and not quiet)
        self.writer = self.mlperf = None
        if chief and out is not None:
            self.writer = RunWriter(
                out,
                resume_from_step=resume_from_step,
                world_size=ranks.world_size,
                warn=lambda line: self.console.say(f"warning: {line}"),
            )
            self.mlperf = MlperfEvents(self.writer, config, platform=platform.node())
            self.mlperf.init_start()
        self._code = {
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "commit": None if self.writer is None else commit(),
        }
        self.run: Run | None = None
        self.failure: RunRecord | None = None  # the record of a failed run
        self._booked: list[Booked] = []  # steps whose loss has not been checked
        self._losses: list[Tensor] = []  # the losses of these steps on this rank, still on the device
        self._pending: Pending | None = None
        self._unreadable: dict[str, None] = {}  # lines about this rank's unreadable validation images, without repeats
        self._stragglers: Stragglers | None = None
        self._timings: deque[StepTiming] = deque(maxlen=256)
        self._steps_per_launch = 1  # of the longest stride
        self._gauges: Gauges | None = None
        self._adapted: set[str] = set()  # layers whose trust ratios are written
        self._layers_every_steps = 1
        self.tracer = Tracer(self.writer, ranks, enabled=out is not None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self.console.close()
        if error is not None:
            self._words = self._words or words_of(error, self._rank, self.step)
            self.fail("interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__)
        elif self.writer is not None:
            self.writer.close()

    @property
    def step(self) -> int | None:
        """The run's current step, counted from 1; None before training."""
        return None if self.run is None else self.run.progress.step + 1

    def fail_with(self, words: dict[str, Any]) -> None:
        """Writes a record with the words of the rank that failed (engine/ending.py). The first words are kept."""
        self._words = self._words or words
        self.fail(words["message"])

    def fail(self, reason: str) -> None:
        """Writes a record with the reason of the failure. This uses neither the device nor other ranks, which may be
        gone, so the record lists only this rank's bad samples."""
        if self.writer is not None:
            self.writer.close()
        if self.run is not None:
            self.failure = self._record(self.run, bad_samples=self._bad_samples(self.run), error=reason)
            self.failure.failure = self._words
            if self.writer is not None:
                with contextlib.suppress(OSError):  # the error is reported to the user in any case
                    self.failure.save(self.writer.folder)

    def start(self, run: Run, evals: EpochGrid, guard: LossGuard) -> None:
        """Must be called right before the run's time begins. guard: checks all losses."""
        self.run, self._evals, self._guard, self._stragglers = run, evals, guard, Stragglers(run.ranks)
        self._gauges = Gauges(run.learner.device) if self.out is not None else None
        self._adapted = run.learner.optimizer.adapted_names() if self.writer is not None else set()
        samples, epochs = len(run.train_set), self.config.schedule.epochs
        steps = total_steps(run.phases, samples, epochs)
        steps = min(steps, self.config.run.max_steps or steps)
        self._layers_every_steps = max(1, steps // LAYER_LINES)
        self._last_s, self._last_position = self.clock.train_s, run.progress.position
        for note in run.warnings:
            self.console.say(f"note: {note}")
        self.console.start(steps, run.progress.step, target=self.config.run.target_top1, best=run.progress.best_top1)
        if self._hooks.wants("on_start"):
            event = StartEvent(config=self.config, folder=str(self.out or ""), step=run.progress.step)
            self._hooks.tell("on_start", event)
        if self.mlperf is not None:
            self.mlperf.run_start(
                train_samples=samples,
                eval_samples=len(run.eval_set),
                world_size=run.ranks.world_size,
                batch_per_rank=run.phases[0].batch_per_rank,
                accumulation=run.phases[0].accumulation,
            )
            self.mlperf.block_start(run.epoch, min(epochs, evals.next_epoch(run.epoch)))
        # The trace of a resumed run continues after all time spent so far, which includes pauses.
        before_s = sum(seconds for account, seconds in self.clock.seconds.items() if account != "init")
        self.tracer.start(before_s)

    def stride(self, run: Run, stride: Stride, losses: Tensor, rates: Sequence[float], timer: StepTimer) -> None:
        """Takes note of a stride that was just launched, and writes the previous one."""
        self._write()
        self._tell_checkpoints()
        self._booked += map(Booked, stride, rates)
        self._losses.append(losses)
        self._steps_per_launch = max(self._steps_per_launch, len(stride))
        if len(self._booked) < LOOK_STEPS and not any(self._has_line(step) for step in stride):
            return
        booked, losses, own = self._take(run)
        # On a GPU, reading the times of groups waits for the device, so they are sampled at a few steps only.
        sampled = run.learner.device.type == "cpu" or any(step.index % 100 == 50 for step in stride)
        groups, phases = (run.learner.sync.timings(), run.learner.sync.phases()) if sampled else ((), ())
        layers, arrived = None, None
        if self._adapted and any((step.index + 1) % self._layers_every_steps == 0 for step in stride):
            stats = run.learner.optimizer.layer_stats()  # empty if every step so far was skipped
            names = [name for part in stats for name in part.names]
            layers = (names, to_host(torch.cat([part.trust for part in stats]))) if names else None
        losses = to_host(losses)
        if run.learner.device.type == "cuda":
            arrived = torch.cuda.Event()
            arrived.record()
        if self._gauges is not None:
            self._gauges.look()
        end_s, trained_s, traced_s = self.clock.run_s, self.clock.train_s, self.tracer.now_s
        marks = timer.marks()
        self._pending = Pending(booked, losses, own, arrived, end_s, trained_s, traced_s, marks, groups, phases, layers)

    def flush(self) -> None:
        """Writes what is pending, and checks the loss of every step so far, including steps without a line."""
        self._write()
        self._tell_checkpoints()
        if self._booked and self.run is not None:
            booked, losses, own = self._take(self.run)
            self._check(booked, losses.tolist(), own)  # synchronises: what follows builds on these steps
        if self._stragglers is not None:
            for slow in self._stragglers.look():
                self.console.say(f"note: {slow.message}")

    def _take(self, run: Run) -> tuple[list[Booked], Tensor, Tensor]:
        """Returns the steps that are not checked yet; their losses as means over ranks, followed by the current number
        of steps skipped in a row; and the losses of this rank."""
        booked, self._booked = self._booked, []
        own = torch.cat(self._losses)
        self._losses.clear()
        return booked, over_ranks(run, own), own

    def _check(self, booked: list[Booked], values: list[float], own: Tensor) -> list[float]:
        """Checks the losses and returns them."""
        *losses, skipped = values
        for place, ((step, rate), loss) in enumerate(zip(booked, losses, strict=True)):
            self._guard.check_loss(loss, lambda at=place: own[at].item(), step.index + 1, step.epoch, rate)
        self._guard.check_skipped(int(skipped), booked[-1].step.index + 1)
        return losses

    def _write(self) -> None:
        if self._pending is None or self.run is None or self._stragglers is None:
            return
        booked, losses, own, arrived, end_s, trained_s, traced_s, marks, groups, phases, layers = self._pending
        self._pending = None
        if arrived is not None:
            arrived.synchronize()  # waits for that stride only; the next one, queued behind it, keeps the device busy
        values = self._check(booked, losses.tolist(), own)
        last = booked[-1].step
        position = last.position + last.phase.global_batch
        elapsed_s = max(trained_s - self._last_s, 1e-9)
        images_per_s = (position - self._last_position) / elapsed_s
        self._last_s, self._last_position = trained_s, position
        # The times of GradSync count from its last begin(), which follows the last forward.
        forward_end = max((end for name, _, end in marks.spans() if name == "forward"), default=0.0)
        timing = marks.timing(tuple(shifted(group, forward_end - marks.last_step_s()) for group in groups))
        groups = tuple(shifted(group, forward_end) for group in groups)
        self._timings.append(timing)
        self._stragglers.add(timing)
        for place, ((step, rate), loss) in enumerate(zip(booked, values, strict=True)):
            if not self._has_line(step):
                continue
            epoch = (step.position + step.phase.global_batch) / len(self.run.train_set)
            line: dict[str, Any] = {
                "step": step.index + 1,
                "epoch": epoch,
                # Steps that were launched together share the time evenly.
                "time_s": end_s - (len(booked) - 1 - place) / len(booked) * elapsed_s,
                "loss": loss,
                "lr": rate,
                "global_batch": step.phase.global_batch,
                "images_per_s": images_per_s,
            }
            if self.writer is not None:
                self.writer.step(**line, exposed_comm_s=timing.exposed_comm_s, data_wait_s=timing.data_wait_s)
            if self._hooks.wants("on_step"):
                self._hooks.tell("on_step", StepEvent(**line))
            self.console.step(step.index + 1, epoch, loss, rate, images_per_s)
        if layers is not None and self.writer is not None:
            known = zip(layers[0], layers[1].tolist(), strict=True)
            trust_ratios = {name: ratio for name, ratio in known if name in self._adapted}
            epoch = position / len(self.run.train_set)
            self.writer.layers(step=last.index + 1, epoch=epoch, time_s=end_s, trust_ratios=trust_ratios)
        self.tracer.step(marks, groups, phases, end_s=traced_s, step=last.index + 1)

    def _has_line(self, step: Step) -> bool:
        return step.index % self.config.run.log_every_steps == 0

    def note(self, line: str) -> None:
        """Prints a note and keeps it for the record."""
        self.console.say(f"note: {line}")
        if self.run is not None:
            self.run.warnings.append(line)

    def warn(self, line: str) -> None:
        """Prints a warning and keeps it for the record. Any thread may call this."""
        self.console.say(f"warning: {line}")
        if self.run is not None:
            self.run.warnings.append(line)

    def went_back(self, run: Run, rollback: Rollback) -> None:
        """Must be called after a rollback. Removes what was written about the undone steps."""
        self._booked.clear()
        self._losses.clear()
        self._pending = None
        self._last_s, self._last_position = self.clock.train_s, run.progress.position
        self.console.say(f"note: {rollback.message}")
        if self.writer is not None:
            self.writer.go_back(rollback.to_step + 1)

    def eval_start(self, run: Run) -> None:
        if self.mlperf is not None:
            self.mlperf.eval_start(run.epoch)

    def eval(self, run: Run, score: Score) -> None:
        step, epoch, now = run.progress.step, run.epoch, run.progress.evaluated_s
        self._last_s = self.clock.train_s  # the wait for the last step before the evaluation belongs to that step
        if self.writer is not None and self.mlperf is not None:
            self.writer.eval(step=step, epoch=epoch, time_s=now, **score.to_dict())
            self.mlperf.eval_stop(epoch, score.top1)
            until = min(self.config.schedule.epochs, self._evals.next_epoch(epoch))
            if until > epoch and not (self.config.run.stop_at_target and run.reached):
                self.mlperf.block_start(epoch, until)
        if self._hooks.wants("on_eval"):
            self._hooks.tell("on_eval", EvalEvent(step=step, epoch=epoch, time_s=now, scores=score.to_dict()))
        self.console.eval(step, epoch, score, self.config.run.target_top1)

    def checkpoint(self, saved: Checkpoint, path: Path, seconds: float) -> None:
        """Takes note of a checkpoint that was written to the disk, and of the seconds that this took. The writing
        thread calls it; the main thread then informs the callbacks and the trace."""
        progress = saved.progress
        best = progress.best_step == progress.step
        epoch = progress.position / saved.train_samples
        event = CheckpointEvent(step=progress.step, epoch=epoch, path=str(path), best=best)
        span = Span("write", self.tracer.now_s - seconds, seconds, "checkpoint file", {"step": progress.step})
        self._written.append((event, span))

    def _tell_checkpoints(self) -> None:
        while self._written:
            event, span = self._written.popleft()
            self.tracer.add(span)
            if self._hooks.wants("on_checkpoint"):
                self._hooks.tell("on_checkpoint", event)

    def unreadable(self, lines: list[str]) -> None:
        """Takes note of validation images that this rank could not read."""
        self._unreadable.update(dict.fromkeys(lines))

    def finish(self, run: Run, *, error: str = "") -> RunRecord:
        """Writes what is pending and the record. error: why the run ended early, if it did.

        If the record cannot be written, the run fails, because its folder would not show that it has ended. It also
        fails if its folder was deleted or moved meanwhile, because the record would be the only file there.
        """
        self.flush()
        self.clock.switch("pause")
        if self.mlperf is not None:
            self.mlperf.run_stop(run.reached)
        self.tracer.finish()
        if self.writer is not None:
            self.writer.close()
        by_class = run.validation.by_class()
        bad_samples = of_all_ranks(self._bad_samples(run), run.ranks)
        if bad_samples and run.ranks.rank == 0:
            what = "1 image" if len(bad_samples) == 1 else f"{len(bad_samples):,} images"
            self.console.say(f"warning: {what} could not be read, the first: {bad_samples[0]}; the report lists all")
        ranks = gather(self._gauges.to_dict() if self._gauges is not None else {}, run.ranks)
        record = self._record(run, bad_samples=bad_samples, by_class=by_class, ranks=ranks, error=error)
        if self.writer is not None:
            folder, line = self.writer.folder, ""
            if self.writer.is_gone:
                line = (
                    f"{folder} was deleted or moved during the run: {RUN_CONFIG} and metrics.jsonl are no longer there"
                )
            try:
                record.save(folder)
            except OSError as problem:
                line = f"{folder / 'record.json'} could not be written: {problem.strerror or problem}"
            if line:
                raise Preempted(f"{error}, but {line}") if error else RunFailed(line)
        return record

    def _bad_samples(self, run: Run) -> list[str]:
        return [*run.loader.bad_samples, *self._unreadable]

    def _record(
        self,
        run: Run,
        *,
        bad_samples: list[str],
        by_class: ClassScores | None = None,
        ranks: Sequence[dict[str, Any]] = (),
        error: str = "",
    ) -> RunRecord:
        return record_of(
            run,
            self.config,
            self.clock,
            environment=self._code | environment(run) | {"steps_per_launch": self._steps_per_launch},
            warnings=[*run.warnings, *bad_samples, *(self.writer.warnings if self.writer else [])],
            timings=list(self._timings),
            stragglers=self._stragglers,
            by_class=by_class,
            ranks=ranks,
            folder=str(self.out or ""),
            error=error,
        )


def of_all_ranks(lines: list[str], ranks: Ranks) -> list[str]:
    """Returns the lines of all ranks without repeats: two ranks may have read the same sample."""
    return list(dict.fromkeys(line for part in gather(lines, ranks) for line in part))
