"""The event sequence of mllog.txt for MLPerf's compliance checker. No package of MLPerf is needed at run time."""

from __future__ import annotations

import math
from typing import Any

from hyperbatch.config import Config
from hyperbatch.record import RunWriter
from hyperbatch.schedule.batch import resolve_phases, total_steps
from hyperbatch.schedule.rate import peak


class MlperfEvents:
    """Writes the events of a training run to mllog.txt in the order that MLPerf's compliance checker requires.

    init_start -> run_start -> (block_start -> eval_start -> eval_stop)* -> run_stop

    The log of a resumed run contains both attempts, and the checker rejects it: MLPerf times uninterrupted runs.
    """

    def __init__(
        self,
        writer: RunWriter,
        config: Config,
        *,
        org: str = "hyperbatch",
        platform: str = "unknown",
        division: str = "open",
        status: str = "research",
    ) -> None:
        self._log, self._config, self._block = writer.mlperf, config, 0.0
        model = config.model.model
        self._submission = {
            "submission_benchmark": "resnet" if "resnet" in model else model,
            "submission_org": org,
            "submission_division": division,
            "submission_status": status,
            "submission_platform": platform,
        }

    def init_start(self) -> None:
        for key, value in self._submission.items():
            self._log(key, value)
        self._log("cache_clear", False)  # MLPerf requires that the system's file cache is dropped; we do not do it
        self._start("init_start")

    def run_start(
        self, *, train_samples: int, eval_samples: int, world_size: int, batch_per_rank: int, accumulation: int
    ) -> None:
        """Writes the settings of the run, and starts MLPerf's clock."""
        config, schedule, optim = self._config, self._config.schedule, self._config.optim
        phases = resolve_phases(schedule.batch_phases, train_samples, 1)
        decay_end = min(schedule.epochs, schedule.warmup_epochs + (schedule.decay_epochs or math.inf))
        warmup_steps = total_steps(phases, train_samples, schedule.warmup_epochs)
        rule = optim.optimizer
        settings = {
            "seed": config.run.seed,
            "global_batch_size": config.global_batch,
            "gradient_accumulation_steps": accumulation,
            "train_samples": train_samples,
            "eval_samples": eval_samples,
            "model_bn_span": batch_per_rank * config.model.bn_group_ranks,
            "opt_name": rule,
            f"{rule}_opt_base_learning_rate": peak(schedule),
            f"{rule}_opt_end_learning_rate": schedule.end_lr,
            f"{rule}_opt_learning_rate_decay_poly_power": schedule.decay_power,
            f"{rule}_opt_learning_rate_decay_steps": total_steps(phases, train_samples, decay_end) - warmup_steps,
            "lars_opt_learning_rate_warmup_epochs" if rule == "lars" else "opt_learning_rate_warmup_epochs": (
                schedule.warmup_epochs
            ),
            f"{rule}_opt_momentum": optim.momentum,
            f"{rule}_opt_weight_decay": optim.weight_decay,
            **({"lars_epsilon": optim.lars_eps} if rule == "lars" else {}),
            "number_of_ranks": world_size,
        }
        for key, value in settings.items():
            self._log(key, value)
        self._stop("init_stop")
        self._start("run_start")

    def block_start(self, epoch: float, until_epoch: float) -> None:
        """Starts a block, which is the training between two evaluations. MLPerf counts its first epoch from 1."""
        self._block = _number(epoch) + 1
        self._start("block_start", first_epoch_num=self._block, epoch_count=_number(until_epoch - epoch))

    def eval_start(self, epoch: float) -> None:
        """Ends the block and starts an evaluation. epoch: epochs done."""
        self._stop("block_stop", first_epoch_num=self._block)
        self._start("eval_start", epoch_num=_number(epoch))

    def eval_stop(self, epoch: float, top1: float) -> None:
        self._log("eval_accuracy", top1, epoch_num=_number(epoch))
        self._stop("eval_stop", epoch_num=_number(epoch))

    def run_stop(self, reached: bool) -> None:
        self._stop("run_stop", status="success" if reached else "aborted")

    def _start(self, key: str, **metadata: Any) -> None:
        self._log(key, kind="INTERVAL_START", **metadata)

    def _stop(self, key: str, **metadata: Any) -> None:
        self._log(key, kind="INTERVAL_END", **metadata)


def _number(value: float) -> int | float:
    """Returns whole epochs as integers, as MLPerf writes them, or a fraction if a run evaluates within an epoch."""
    return round(value) if abs(value - round(value)) < 1e-6 else round(value, 4)
