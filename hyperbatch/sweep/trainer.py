"""Turns planned runs into rows: runs with one process share a lasting session, others start ranks of their own."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperbatch.config import Config
from hyperbatch.engine.agent import default_nproc
from hyperbatch.errors import InputError, Interrupted, RunFailed, first_line
from hyperbatch.launch import train
from hyperbatch.record import RunRecord, commit
from hyperbatch.sweep.plan import PlannedRun
from hyperbatch.sweep.rows import Row

if TYPE_CHECKING:
    from hyperbatch.engine.session import Session


OF_ONE_RUN = ("host", "date")  # fields of a record's environment that differ between runs


def ranks_of(config: Config) -> int:
    """The number of processes of a run: one, unless the plan sets nproc."""
    return config.run.nproc or default_nproc(config.run.device)


class Trainer:
    """Call `row_of` for one run after another, and `close` at the end."""

    def __init__(self, folder: Path | None) -> None:
        """folder: where runs keep their files; None if they are not kept."""
        self._folder = folder
        self._session: Session | None = None
        self._commit = commit()
        self.environment: dict[str, Any] | None = None  # that of the last run
        self._suspect = False  # whether the device may be lost

    def row_of(self, run: PlannedRun) -> Row:
        start_s, record, error = time.perf_counter(), None, None
        out = None if self._folder is None else self._folder / "runs" / str(run.number)
        try:
            record = self._train(run.config, out)
        except Interrupted:
            raise KeyboardInterrupt from None  # no row: the run did not fail
        except (RunFailed, InputError) as failure:
            record, error = self._failure, str(failure)
        except Exception as failure:
            record = self._failure
            error = f"{type(failure).__name__}: {(str(failure).strip() or 'no reason given').splitlines()[0]}"
            self._suspect = True
        wall_s = time.perf_counter() - start_s
        about: dict[str, Any] = {}
        if record is not None:
            about = described(record)
            same = {name: value for name, value in record.environment.items() if name not in OF_ONE_RUN}
            self.environment = same | {"commit": self._commit}
        return Row(
            run=run.number,
            arm=run.point.arm,
            conditions=run.point.conditions,
            search=run.point.search,
            overrides=run.point.overrides,
            seed=run.seed,
            confirms=run.confirms,
            digest=run.digest,
            recipe=run.recipe,
            wall_s=wall_s,
            error=error,
            commit=self._commit,
            time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            command=run.command,
            **about,
        )

    @property
    def _failure(self) -> RunRecord | None:
        return None if self._session is None else self._session.failure

    def _train(self, config: Config, out: Path | None) -> RunRecord:
        if ranks_of(config) > 1 or config.run.max_restarts or config.run.tracker is not None:  # sessions lack these
            self.close()  # frees the session's memory for the ranks
            return self._train_apart(config, out)
        from hyperbatch.engine.session import Session

        self._session = self._session or Session()
        return self._session.run(config if out is None else config.override(keep_checkpoints=0), out)

    def _train_apart(self, config: Config, out: Path | None) -> RunRecord:
        with tempfile.TemporaryDirectory(prefix="hyperbatch-") as scratch:
            return train(config.override(out=str(out or Path(scratch) / "run"), keep_checkpoints=0))

    def check_device(self) -> None:
        """Checks the GPU after an unexpected error: if this process has lost it, all further runs would fail."""
        if self._suspect:
            import torch

            try:
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()
            except RuntimeError as error:
                raise RunFailed(
                    f"the GPU no longer works in this process ({first_line(error)}); start it again"
                ) from None
            self._suspect = False

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


def described(record: RunRecord) -> dict[str, Any]:
    """The fields of a row that come from a run's record."""
    clock = record.clock
    return {
        "result": asdict(record.result),
        "setup_s": clock["init_s"] + clock["capture_s"],
        "eval_s": clock["eval_s"],
        "warnings": list(record.warnings),
        "device": record.environment["device"],
        "torch": record.environment["torch"],
    }
