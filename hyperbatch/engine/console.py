"""Rank 0's voice: a progress bar on a terminal, a line per evaluation elsewhere. All of it on stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from hyperbatch.engine.evaluate import Score


class Console:
    """Silent when not enabled (every rank but 0)."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._out = RichConsole(stderr=True, quiet=not enabled, highlight=False)
        self._live = enabled and sys.stderr.isatty()
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._out,
            refresh_per_second=8,
            disable=not self._live,
        )

    def start(self, total_steps: int, first_step: int = 0) -> None:
        self._task = self._bar.add_task("", total=total_steps, completed=first_step)
        self._bar.start()

    def say(self, text: str) -> None:
        self._out.print(text)

    def step(self, step: int, epoch: float, loss: float, rate: float, images_per_s: float) -> None:
        if self._live:
            text = f"epoch {epoch:.1f}  loss {loss:.3f}  rate {rate:.3g}  {images_per_s:,.0f} img/s"
            self._bar.update(self._task, completed=step, description=text)

    def eval(self, step: int, epoch: float, score: Score, target: float | None) -> None:
        mark = "  reached" if target is not None and score.top1 >= target else ""
        plain = "" if score.top1_plain is None else f" ({score.top1_plain:.2%} without test-time augmentation)"
        top5 = "" if score.top5 is None else f"  top-5 {score.top5:7.2%}"
        loss = "" if score.val_loss is None else f"  loss {score.val_loss:.4f}"
        self.say(f"epoch {epoch:6.2f}  step {step:6d}  top-1 {score.top1:7.2%}{plain}{top5}{loss}{mark}")

    def close(self) -> None:
        self._bar.stop()
