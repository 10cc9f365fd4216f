"""Rolls a run back to its newest checkpoint if its loss has become nan or has jumped; it continues with other samples.

    stream     ... [ checkpoint ) a b c d e f | g h i ...       f: where the fault was found
    trained    ...              x a b c d e f
    then       ...              x g h i ...                     a to f are skipped, the steps are repeated

Steps and rates go back, so the run makes as many updates as planned; only the sample stream does not go back. All ranks
see the same losses, so they roll back at the same step. Checkpoints keep the list of rollbacks in `Progress`.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hyperbatch.checkpoint import Checkpoint
from hyperbatch.engine import snapshot
from hyperbatch.engine.run import Run
from hyperbatch.engine.saver import Saver
from hyperbatch.errors import Diverged, InputError, RunFailed


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollback:
    """The steps of a rollback, the number of skipped samples, and the reason."""

    step: int  # the run's last step before the rollback
    to_step: int
    passed_over: int  # number of samples that are skipped: those of the steps in between
    reason: str

    @property
    def message(self) -> str:
        return (
            f"rolled back from step {self.step} to the checkpoint of step {self.to_step}, and {self.passed_over:,} "
            f"samples were skipped: {self.reason}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "message": self.message}


def may_roll_back(run: Run, saver: Saver) -> bool:
    """Whether the run can be rolled back. The answer is the same on every rank."""
    return saver.taken and len(run.progress.rollbacks) < run.config.run.max_rollbacks


def roll_back(run: Run, saver: Saver, fault: Diverged, out: Path | None) -> Rollback:
    """Rolls the run back, or raises the fault if it cannot. Every rank must call it."""
    left, done = run.progress, len(run.progress.rollbacks)
    if out is None or not may_roll_back(run, saver):
        if done:
            failed = RunFailed(f"{fault}; the run was rolled back {done} times before (--max-rollbacks)")
            failed.words = fault.words
            raise failed from fault
        raise fault
    run.loader.close()
    run.learner.sync.check()  # no exchange between ranks is in progress afterwards
    saver.wait_on_all_ranks()
    saved = _checkpoint(run, fault, out)
    snapshot.put_back(run, saved)
    saver.went_back()
    passed_over = left.position - saved.progress.position
    rollback = Rollback(step=left.step, to_step=saved.progress.step, passed_over=passed_over, reason=str(fault))
    run.progress.passed_over = left.passed_over + passed_over
    run.progress.rollbacks = [*left.rollbacks, rollback.to_dict()]
    return rollback


def _checkpoint(run: Run, fault: Diverged, out: Path) -> Checkpoint:
    """Returns the newest checkpoint. If the run was already rolled back to it, returns the previous one if there is
    one, because the newest may contain a fault that shows only in later steps."""
    try:
        saved = snapshot.find_checkpoint(run.config, run.ranks, out)
    except InputError as error:  # for example, it could not be written
        raise fault from error
    if any(rollback["to_step"] == saved.progress.step for rollback in run.progress.rollbacks):
        with contextlib.suppress(InputError):  # raised on every rank
            return snapshot.find_checkpoint(run.config, run.ranks, out, before_step=saved.progress.step)
    return saved
