"""Builds the record of a run from the state at its end."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hyperbatch.config import Config
from hyperbatch.engine.clock import Clock
from hyperbatch.engine.evaluate import ClassScores
from hyperbatch.engine.run import Run
from hyperbatch.engine.stragglers import Stragglers
from hyperbatch.optim.build import group_summary
from hyperbatch.plan.types import StepTiming
from hyperbatch.record import Result, RunRecord
from hyperbatch.schedule import total_steps


def record_of(
    run: Run,
    config: Config,
    clock: Clock,
    *,
    environment: dict[str, Any],
    warnings: list[str],
    timings: list[StepTiming],
    stragglers: Stragglers | None,
    by_class: ClassScores | None,
    ranks: Sequence[dict[str, Any]],
    folder: str,
    error: str,
) -> RunRecord:
    """timings: those of the latest steps. ranks: what each rank has reported about its device. error: why the run ended
    early, or ""."""
    progress, seconds, samples = run.progress, clock.state_dict(), len(run.train_set)
    firsts = [total_steps(run.phases[:i], samples, p.from_position / samples) for i, p in enumerate(run.phases)]
    return RunRecord(
        recipe=config.recipe,
        config=config.to_dict(),
        environment=environment,
        world_size=run.ranks.world_size,
        grid=str(run.learner.comm.grid),
        result=Result(
            reached=run.reached,
            target_top1=config.run.target_top1,
            top1=progress.top1,
            top1_plain=progress.top1_plain,
            top5=progress.top5,
            val_loss=progress.val_loss,
            time_to_target_s=progress.time_to_target_s,
            setup_s=seconds["init_s"],
            train_s=seconds["train_s"],
            eval_s=seconds["eval_s"],
            run_s=progress.evaluated_s,
            images_per_s=progress.position / seconds["train_s"] if seconds["train_s"] else 0.0,
            epochs=run.epoch,
            steps=progress.step,
        ),
        warnings=warnings,
        plan=run.learner.sync.plan.to_dict(),
        optimizer_groups=group_summary(config.optim, run.learner.model).to_dict(),
        phases=[
            asdict(phase) | {"first_step": first}
            for phase, first in zip(run.phases, firsts, strict=True)
            if first < progress.step
        ],
        # After a failure the device may be gone, so values that would have to be read from it are omitted.
        trust_ratios={} if error else run.learner.optimizer.trust_ratios(),
        compiled=run.learner.compilation.to_dict(),
        clock=seconds | {"data_wait_s": run.data_wait_s},
        skipped_steps=0 if error else run.learner.scaler.state_dict()["skipped"],
        classes=list(run.train_set.classes),
        by_class={} if by_class is None else by_class.to_dict(),
        data=run.loader.report().to_dict()
        | {"decoder": run.loader.decoder, "cpu_decode_share": run.loader.cpu_decode_share}
        | {"train_samples": samples, "eval_samples": len(run.eval_set), "classes": len(run.train_set.classes)},
        timing=typical(timings).to_dict() if timings else {},
        stragglers=[slow.to_dict() for slow in stragglers.found()] if stragglers else [],
        ranks=about_ranks(ranks, stragglers),
        rollbacks=progress.rollbacks,
        folder=folder,
        error=error,
    )


def about_ranks(told: Sequence[dict[str, Any]], stragglers: Stragglers | None) -> list[dict[str, Any]]:
    """Returns for each rank what it reported at the end, and the mean times of its steps."""
    means = stragglers.means() if stragglers else []
    return [
        {"rank": rank, **about, **seconds}
        for rank, (about, seconds) in enumerate(itertools.zip_longest(told, means, fillvalue={}))
    ]


def typical(timings: list[StepTiming]) -> StepTiming:
    """Returns the timing of median length among the later half of the steps, so that a slow start does not count."""
    late = timings[len(timings) // 2 :]
    middle = statistics.median_low([t.step_s for t in late])
    return next(t for t in late if t.step_s == middle)
