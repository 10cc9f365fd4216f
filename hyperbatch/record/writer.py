"""Appends to a run's folder during the run."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from hyperbatch.record.board import Tensorboard
from hyperbatch.record.lines import Lines, drop_lines
from hyperbatch.record.text import strict_json
from hyperbatch.record.trace import Span, TraceFile, spans_per_rank


class RunWriter:
    """Appends to a run's folder. Only rank 0 has one.

    metrics.jsonl, mllog.txt    one write per line: a killed run loses at most the line that is being written
    layers.jsonl                the same, for some steps: the trust ratio of each layer
    trace.json                  valid JSON after every flush, at most a second behind
    tensorboard/                if the package is installed; flushed every two seconds; `warnings` says if it cannot be
                                written
    """

    def __init__(
        self,
        folder: Path,
        *,
        resume_from_step: int | None = None,
        tensorboard: bool = True,
        world_size: int = 1,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        """resume_from_step: drop metric lines of steps at or after it, which the resumed run will write again. It
        counts like the steps of `step` and `eval`: a run that counts its steps from 1 and continues after N of them
        passes N + 1. world_size: number of ranks that share the space in trace.json. warn: called at once when a file
        cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._warn, self._told = folder, warn, False
        self.warnings: list[str] = []
        fresh = resume_from_step is None
        if fresh:
            # Otherwise the files of an earlier run would be taken for those of this run.
            for old in [folder / "record.json", folder / "report.html", *(folder / "tensorboard").glob("events.out.*")]:
                old.unlink(missing_ok=True)
        else:
            self._drop(resume_from_step)
        self._metrics, self._layers, self._mllog = (
            self._lines(name, go_on=not fresh) for name in ("metrics.jsonl", "layers.jsonl", "mllog.txt")
        )
        self._trace = TraceFile(folder / "trace.json", go_on=not fresh, limit=spans_per_rank(world_size))
        self._trace.process("rank 0" if fresh else f"rank 0, resumed at step {resume_from_step}")
        wanted = tensorboard and importlib.util.find_spec("tensorboard") is not None  # an extra of the package
        self._board = Tensorboard(folder / "tensorboard", resume_from_step, self.warnings) if wanted else None

    @property
    def is_gone(self) -> bool:
        """Whether the folder was deleted or moved, so that the files written before are no longer in it."""
        return not (self.folder / self._metrics.name).exists()

    def go_back(self, step: int) -> None:
        """Drops metric lines of steps at or after this one, which the run will write again."""
        self._end(self._metrics, self._layers)
        self._drop(step)
        self._metrics, self._layers = (self._lines(name, go_on=True) for name in ("metrics.jsonl", "layers.jsonl"))
        self._trace.process(f"rank 0, back at step {step}")
        if self._board:
            self._board.close()
            self._board = Tensorboard(self.folder / "tensorboard", step, self.warnings)

    def _lines(self, name: str, *, go_on: bool) -> Lines:
        return Lines(self.folder / name, go_on=go_on, warn=self._tell_once)

    def _end(self, *files: Lines) -> None:
        for lines in files:
            lines.close()
            if lines.lost:
                self.warnings.append(f"{lines.lost} lines could not be written to {lines.name}: {lines.reason}")

    def _tell_once(self, reason: str) -> None:
        """Warns once for all files, because a full disk affects all of them."""
        if not self._told:
            self._told = True
            self._warn(f"{self.folder} cannot be written: {reason}; the run continues without these lines of metrics")

    def _drop(self, step: int) -> None:
        for line in drop_lines(self.folder, step):
            self.warnings.append(line)
            self._warn(line)

    def step(
        self,
        *,
        step: int,
        epoch: float,
        time_s: float,
        loss: float,
        lr: float,
        global_batch: int,
        images_per_s: float,
        **extra: Any,
    ) -> None:
        scalars = {"loss": loss, "lr": lr, "global_batch": global_batch, "images_per_s": images_per_s}
        line = {"event": "step", "step": step, "epoch": epoch, "time_s": time_s, **scalars, **extra}
        self._metrics.add(strict_json(line))
        if self._board:
            self._board.add("train", step, scalars)

    def eval(self, *, step: int, epoch: float, time_s: float, top1: float, samples: int, **extra: Any) -> None:
        line = {"event": "eval", "step": step, "epoch": epoch, "time_s": time_s, "top1": top1, "samples": samples}
        self._metrics.add(strict_json({**line, **extra}))
        if self._board:
            scalars = {name: extra[name] for name in ("top5", "val_loss") if name in extra}
            self._board.add("eval", step, {"top1": top1, **scalars}, always=True)

    def layers(self, *, step: int, epoch: float, time_s: float, trust_ratios: Mapping[str, float]) -> None:
        """Writes one line of layers.jsonl."""
        ratios = {name: float(f"{ratio:.4g}") for name, ratio in trust_ratios.items()}
        line = {"event": "layers", "step": step, "epoch": epoch, "time_s": time_s, "trust_ratios": ratios}
        self._layers.add(strict_json(line))

    def mlperf(self, key: str, value: Any = None, *, kind: str = "POINT_IN_TIME", **metadata: Any) -> None:
        """Writes one line of mllog.txt (MLPerf's key, value and metadata such as epoch_num)."""
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals["__name__"] in (__name__, "hyperbatch.mllog"):
            frame = frame.f_back
        place = {"file": "/".join(Path(frame.f_code.co_filename).parts[-3:]), "lineno": frame.f_lineno}
        line = {
            "namespace": "",
            "time_ms": time.time_ns() // 1_000_000,
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": {**place, **metadata},
        }
        self._mllog.add(f":::MLLOG {strict_json(line)}")

    def spans(self, spans: Iterable[Span], rank: int = 0) -> None:
        """Writes spans of a rank to trace.json. Ranks other than 0 must come last, because later spans are drawn in
        their process. `warnings` says if there were too many to keep."""
        if rank:
            self._trace.process(f"rank {rank}")
            self._trace.limit = spans_per_rank(1)  # a rank may use the space that earlier ranks have left
        for span in spans:
            self._trace.span(span)

    def close(self) -> None:
        """Writes what is pending; afterwards `warnings` is complete. A second call does nothing."""
        if self._metrics.closed:
            return
        self._trace.close()
        self._end(self._metrics, self._layers, self._mllog)
        if self._trace.dropped:
            kept, dropped = self._trace.limit, self._trace.dropped
            self.warnings.append(f"trace.json keeps the first {kept:,} spans that fit; {dropped:,} were left out")
        if self._board:
            self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
