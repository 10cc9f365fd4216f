"""Rank 0's output on stderr: on a terminal one line that is updated in place, elsewhere plain lines at intervals.

step 120/450  1:20 left  target 99 %: best 97.20 %  epoch 2.4  loss 1.234  12,345 images/s  rate 0.5  ━━━━━━━━━━━

The most important parts come first. The time left is the time until the last step. When a run will reach its target
cannot be predicted from the evaluations so far, so the line shows the target and the best evaluation instead.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task
from rich.text import Text

LINE_S = 10.0  # interval between two lines about steps if stderr is not a terminal
STAGE_S = 2.0  # without a terminal, a stage that takes less time is not printed
BAR_COLUMNS = 20

if TYPE_CHECKING:
    from hyperbatch.engine.evaluate import Score


class _Stderr(RichConsole):
    """Raises BrokenPipeError if nobody reads the output any more. rich would end the process without a message."""

    def on_broken_pipe(self) -> None:
        raise  # the error that is being handled


class Console:
    """Silent when not enabled (every rank but 0)."""

    def __init__(self, *, enabled: bool = True, out: RichConsole | None = None) -> None:
        """out: where to write; None: stderr."""
        self._enabled = enabled
        # In a notebook, rich would display each line as an output of its own, between the other lines on stderr.
        self._out = out or _Stderr(stderr=True, quiet=not enabled, highlight=False, emoji=False, force_jupyter=False)
        self._live = enabled and (self._out.is_terminal if out else sys.stderr.isatty())
        bar = [BarColumn(bar_width=BAR_COLUMNS)] if self._out.width >= 80 + BAR_COLUMNS else []
        self._bar = Progress(
            _Line(self._out), *bar, console=self._out, refresh_per_second=8, transient=True, disable=not self._live
        )
        self._setup: Progress | None = None  # shows the stage
        self._timer: threading.Timer | None = None
        self._stage, self._counted = "", ""
        self._stage_said_s: float | None = None  # when the stage's progress was last printed; None: not yet
        self._pace = Pace(0, 0)

    def stage(self, text: str) -> None:
        """Shows what the run does before its first step: on a terminal at once, elsewhere only if it takes long."""
        self._end_stage()
        if not self._enabled:
            return
        self._stage, self._counted, self._stage_said_s = text, "", None
        if self._live:
            self._setup = Progress(SpinnerColumn(), _Line(self._out), console=self._out, transient=True)
            self._setup.add_task("", parts=(f"{text} ...",))
            self._setup.start()
        else:
            self._say_later(STAGE_S, self._say_stage)

    def count(self, done: int, known: int) -> None:
        """Shows the stage's progress: "compiling kernels 12/40". Any thread may call this."""
        if not self._enabled:
            return
        self._counted = f" {done}/{known}"
        if self._setup is not None:
            self._setup.update(self._setup.task_ids[0], parts=(f"{self._stage}{self._counted} ...",))
        elif self._stage_said_s is not None and time.monotonic() >= self._stage_said_s + LINE_S:
            self._say_stage()

    def _say_stage(self) -> None:
        self._stage_said_s = time.monotonic()
        self.say(f"{self._stage}{self._counted} ...")

    def _say_later(self, seconds: float, say: Callable[[], None]) -> None:
        self._timer = threading.Timer(seconds, say)
        self._timer.daemon = True
        self._timer.start()

    def _end_stage(self) -> None:
        if self._setup is not None:
            self._setup.stop()
            self._setup = None
        self._end_timer()

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def start(
        self, total_steps: int, first_step: int = 0, *, target: float | None = None, best: float | None = None
    ) -> None:
        """target: accuracy to reach, or None. best: accuracy of the best evaluation so far, if the run was resumed."""
        self._end_stage()
        self._pace = Pace(total_steps, first_step, target=target, best=best)
        begins = (f"step {first_step:,}/{total_steps:,}", "running the first step ...")
        self._task = self._bar.add_task("", total=total_steps, completed=first_step, parts=begins)
        self._bar.start()
        if self._enabled and not self._live:  # the first step may take minutes, on a CPU or while kernels are compiled
            self._say_later(LINE_S, lambda: self.say("  ".join(begins)))

    def say(self, text: str) -> None:
        """Prints a line without wrapping it to the terminal's width."""
        self._out.print(text, soft_wrap=True, markup=False)

    def step(self, step: int, epoch: float, loss: float, rate: float, images_per_s: float) -> None:
        if not self._enabled:
            return
        self._end_timer()
        now_s = time.monotonic()
        if self._live:
            self._bar.update(
                self._task, completed=step, parts=self._pace.parts(step, epoch, loss, rate, images_per_s, now_s)
            )
        elif self._pace.line_is_due(now_s):
            self.say("  ".join(self._pace.parts(step, epoch, loss, rate, images_per_s, now_s)))

    def eval(self, step: int, epoch: float, score: Score, target: float | None) -> None:
        self._pace.evaluated(score.top1)
        mark = "  reached" if target is not None and score.top1 >= target else ""
        plain = "" if score.top1_plain is None else f" ({score.top1_plain:.2%} without test-time augmentation)"
        top5 = "" if score.top5 is None else f"  top-5 {score.top5:7.2%}"
        loss = "" if score.val_loss is None else f"  loss {score.val_loss:.4f}"
        self.say(f"epoch {epoch:6.2f}  step {step:6d}  top-1 {score.top1:7.2%}{plain}{top5}{loss}{mark}")

    def close(self) -> None:
        self._end_stage()
        self._bar.stop()


class Pace:
    """Estimates the time left from the speed so far, and keeps the best accuracy."""

    def __init__(
        self,
        total_steps: int,
        first_step: int,
        *,
        target: float | None = None,
        best: float | None = None,
        now_s: float | None = None,
    ) -> None:
        self._total, self._first = total_steps, first_step
        self._target, self._best = target, best
        self._start_s = self._said_s = time.monotonic() if now_s is None else now_s

    def left_s(self, step: int, now_s: float) -> float | None:
        """Returns the seconds left, evaluations included, at the speed so far; None before the first step."""
        done = step - self._first
        return None if done <= 0 else (self._total - step) * (now_s - self._start_s) / done

    def evaluated(self, top1: float) -> None:
        self._best = top1 if self._best is None else max(self._best, top1)

    def to_target(self) -> str:
        """ "target 99 %: best 97.20 %", or "" without a target."""
        if self._target is None:
            return ""
        best = "" if self._best is None else f": best {100 * self._best:.2f} %"
        return f"target {100 * self._target:.4g} %{best}"

    def line_is_due(self, now_s: float) -> bool:
        if now_s < self._said_s + LINE_S:
            return False
        self._said_s = now_s
        return True

    def parts(
        self, step: int, epoch: float, loss: float, rate: float, images_per_s: float, now_s: float
    ) -> tuple[str, ...]:
        """Returns the parts of the progress line, the most important first."""
        left_s = self.left_s(step, now_s)
        return (
            f"step {step:,}/{self._total:,}",
            *([] if left_s is None else [f"{format_duration(left_s)} left"]),
            *filter(None, [self.to_target()]),
            f"epoch {epoch:.1f}",
            f"loss {loss:.3f}",
            f"{images_per_s:,.0f} images/s",
            f"rate {rate:.3g}",
        )


class _Line(ProgressColumn):
    """Shows as many of a task's parts as fit into the terminal."""

    max_refresh = 0.1

    def __init__(self, out: RichConsole) -> None:
        super().__init__()
        self._out = out

    def render(self, task: Task) -> Text:
        room = self._out.width - 4 - (BAR_COLUMNS if self._out.width >= 80 + BAR_COLUMNS else 0)
        return Text(fitted(task.fields["parts"], room), no_wrap=True, overflow="ellipsis")


def fitted(parts: tuple[str, ...], columns: int) -> str:
    """Joins as many of the parts as fit into `columns`. The first part is always included."""
    line = parts[0]
    for part in parts[1:]:
        if len(line) + 2 + len(part) > columns:
            break
        line += f"  {part}"
    return line


def format_duration(seconds: float) -> str:
    """Returns for example "0:42", "1:20" or "2:03:04"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
