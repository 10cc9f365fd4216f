"""What a run writes while it runs: record.json, metrics.jsonl, layers.jsonl, mllog.txt, trace.json, tensorboard/.

`RunRecord` is the run's summary and the contract with the report; `RunWriter` appends to the folder as the run goes,
so that a run killed at any moment leaves files that can be read. No torch here: a report can be drawn on any machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.util
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from hyperbatch.errors import InputError

if TYPE_CHECKING:
    from hyperbatch.config import Config
    from hyperbatch.plan.types import GroupTiming, StepTiming

SCHEMA = 1
MAX_SPANS = 100_000  # about 12 MB of trace.json: what Perfetto opens without a pause
TENSORBOARD_INTERVAL_S = 0.05  # a point costs 50 us (the CRC is Python); no eye needs more than 20 a second


@dataclass(kw_only=True, slots=True)
class Result:
    """How the run ended. `time_to_target_s` counts evaluation, as MLPerf does; `train_s` is training alone.

    The run's time is that from the first touch of training data to the end of an evaluation, pauses left out.
    """

    reached: bool = False
    target_top1: float | None = None
    top1: float | None = None
    top1_plain: float | None = None  # without test-time augmentation; None: there was none
    top5: float | None = None  # None: there are no more than five classes
    val_loss: float | None = None  # cross entropy on the validation set, without label smoothing
    time_to_target_s: float | None = None
    run_s: float = 0.0  # the run's time at the end of the last evaluation
    setup_s: float = 0.0
    train_s: float = 0.0
    eval_s: float = 0.0
    images_per_s: float = 0.0
    epochs: float = 0.0
    steps: int = 0


@dataclass(kw_only=True, slots=True)
class RunRecord:
    """One run. The first block is fixed by the design; the second is what this version adds."""

    recipe: str
    config: dict[str, Any]
    environment: dict[str, Any]
    world_size: int
    grid: str
    result: Result = field(default_factory=Result)
    warnings: list[str] = field(default_factory=list)
    schema: int = SCHEMA

    plan: dict[str, Any] = field(default_factory=dict)  # GroupPlan.to_dict()
    phases: list[dict[str, Any]] = field(default_factory=list)  # resolved batch phases, with the step each began at
    optimizer_groups: dict[str, Any] = field(default_factory=dict)  # GroupSummary.to_dict(): decay and rate factors
    trust_ratios: dict[str, float] = field(default_factory=dict)  # parameter -> ratio at the last logged step
    compiled: dict[str, Any] = field(default_factory=dict)  # what became of --compile: engine.compiled.Compilation
    clock: dict[str, float] = field(default_factory=dict)  # init_s, train_s, capture_s, eval_s, pause_s, data_wait_s
    skipped_steps: int = 0  # updates skipped because a gradient was inf or nan
    classes: list[str] = field(default_factory=list)  # names, in the order of the model's answers
    by_class: dict[str, Any] = field(default_factory=dict)  # the last evaluation: samples, right, confusions
    # rank 0's loader (wait_fraction, bottleneck, busy seconds), and the data's own train_samples, eval_samples, classes
    data: dict[str, Any] = field(default_factory=dict)
    timing: dict[str, Any] = field(default_factory=dict)  # StepTiming.to_dict() of a typical step
    stragglers: list[dict[str, Any]] = field(default_factory=list)  # rank, host, phase, lost_s, share, message
    # of each rank: rank, host, device, memory, clock and utilisation as far as known, and the means of its steps
    ranks: list[dict[str, Any]] = field(default_factory=list)
    rollbacks: list[dict[str, Any]] = field(default_factory=list)  # step, to_step, passed_over, reason, message
    folder: str = ""
    error: str = ""  # why the run ended early, in one line; empty when it did not
    failure: dict[str, Any] = field(default_factory=dict)  # the first cause: rank, host, step, time, message, traceback

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def metrics(self, event: str | None = None) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl as they are, e.g. for `pandas.DataFrame(record.metrics("eval"))`.

        event: "step" or "eval"; None: all, in the order in which they happened.
        """
        rows = read_metrics(Path(self.folder)) if self.folder else []
        return [row for row in rows if event in (None, row["event"])]

    def save(self, folder: Path) -> None:
        """Writes record.json in one atomic move, so a reader never sees half of it."""
        partial = folder / "record.json.partial"
        partial.write_text(strict_json(self.to_dict(), indent=1) + "\n")
        os.replace(partial, folder / "record.json")

    @classmethod
    def load(cls, folder: Path) -> Self:
        path = folder / "record.json"
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError:
            raise InputError(f"{folder} is not a run folder: it has no record.json") from None
        except ValueError as error:
            raise InputError(f"{path} is not valid JSON ({error}); the run that wrote it was damaged") from None
        if not isinstance(values, dict) or values.get("schema") != SCHEMA:
            schema = values.get("schema") if isinstance(values, dict) else None
            raise InputError(f"{path}: schema {schema} is not {SCHEMA}; use the version that wrote it")
        try:
            result = Result(**_checked(Result, values["result"]))
            return cls(**{**_checked(cls, values), "result": result, "folder": str(folder)})  # it may have been moved
        except (KeyError, TypeError) as error:
            raise InputError(f"{path} lacks a field of a run's record, or has a wrong one ({error})") from None


def note_failure(folder: Path, words: Mapping[str, Any], config: Config, world_size: int) -> None:
    """Leaves what the parent command knows of a failed run: how each rank ended, and what they said.

    What rank 0 wrote as it went down may only say that it lost another rank; and it wrote nothing if it was killed, or
    if the run had not begun. The record of a run that was over stays as it is.
    """
    record = RunRecord(recipe=config.recipe, config=config.to_dict(), environment={}, world_size=world_size, grid="")
    if (folder / "record.json").exists():
        try:
            record = RunRecord.load(folder)
        except InputError:
            return
        if not record.error:
            return
    step = record.result.steps + 1 if words.get("step") is None and record.result.steps else words.get("step")
    record.error, record.failure, record.folder = words["message"], {**words, "step": step}, str(folder)
    record.save(folder)


def _known(cls: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values this version knows: a newer one may have written more."""
    names = {f.name for f in dataclasses.fields(cls)}
    return {name: value for name, value in values.items() if name in names}


def _checked(cls: Any, values: Any) -> dict[str, Any]:
    """`_known` values. A TypeError names the first that is not what its field says: anybody may write a file."""
    kinds = {"str": str, "int": int, "float": (int, float), "bool": bool, "dict": dict, "list": list, "Result": dict}
    if not isinstance(values, dict):
        raise TypeError(f"a {type(values).__name__} is no {cls.__name__}")
    known = _known(cls, values)
    for spec in dataclasses.fields(cls):
        name = str(spec.type).removesuffix(" | None").partition("[")[0]
        may_be_none = name == "float" or spec.type.endswith("| None")  # a number that is not finite is none in JSON
        value = known.get(spec.name)
        if spec.name in known and not isinstance(value, kinds[name]) and not (value is None and may_be_none):
            raise TypeError(f"{spec.name} is a {type(value).__name__}")
    return known


def read_metrics(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are whole; a torn last line and foreign lines are left out."""
    try:
        text = (folder / name).read_text(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in map(parse_metric_line, text.splitlines()) if line is not None]


def _drop_lines(folder: Path, step: int) -> None:
    """Of metrics.jsonl and layers.jsonl, those at or after the step."""
    for name in ("metrics.jsonl", "layers.jsonl"):
        kept = [line for line in read_metrics(folder, name) if line["step"] < step]
        _replace(folder / name, "".join(strict_json(line) + "\n" for line in kept))


def parse_metric_line(text: str) -> dict[str, Any] | None:
    """One line of metrics.jsonl or layers.jsonl, or None when it is not whole."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) and "event" in line else None


class Span(NamedTuple):
    """A stretch of time in trace.json; seconds since training began, pauses included."""

    name: str
    start_s: float
    duration_s: float
    track: str
    args: Mapping[str, Any]


def spans_per_rank(world_size: int) -> int:
    return MAX_SPANS // world_size


class RunWriter:
    """Appends to a run's folder. Made on rank 0 only; the others have none.

    metrics.jsonl, mllog.txt    one write per line: a killed run loses nothing but a line being written
    layers.jsonl                the same, of some steps: the trust ratio of each layer
    trace.json                  valid JSON after every flush, at most a second behind
    tensorboard/                where the package is installed; flushed every two seconds; `warnings` says so when it
                                cannot be written
    """

    def __init__(
        self, folder: Path, *, resume_from_step: int | None = None, tensorboard: bool = True, world_size: int = 1
    ) -> None:
        """resume_from_step: drop metric lines of steps at or after it, which the resumed run will write again.
        world_size: ranks that share the room in trace.json.

        It is in the numbers that `step` and `eval` are given: a run that counts its steps from 1 and goes on after N
        of them passes N + 1.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.warnings: list[str] = []
        fresh = resume_from_step is None
        if fresh:
            # What an earlier run left here would be taken for this one's.
            for old in [folder / "record.json", folder / "report.html", *(folder / "tensorboard").glob("events.out.*")]:
                old.unlink(missing_ok=True)
        else:
            _drop_lines(folder, resume_from_step)
        self._metrics = _Lines(folder / "metrics.jsonl", go_on=not fresh)
        self._layers = _Lines(folder / "layers.jsonl", go_on=not fresh)
        self._mllog = _Lines(folder / "mllog.txt", go_on=not fresh)
        self._trace = TraceFile(folder / "trace.json", go_on=not fresh, limit=spans_per_rank(world_size))
        self._trace.process("rank 0" if fresh else f"rank 0, resumed at step {resume_from_step}")
        wanted = tensorboard and importlib.util.find_spec("tensorboard") is not None  # an extra of the package
        self._board = _Tensorboard(folder / "tensorboard", resume_from_step, self.warnings) if wanted else None

    def go_back(self, step: int) -> None:
        """Drops metric lines of steps at or after this one, which the run will write again."""
        self._metrics.close()
        self._layers.close()
        _drop_lines(self.folder, step)
        self._metrics = _Lines(self.folder / "metrics.jsonl", go_on=True)
        self._layers = _Lines(self.folder / "layers.jsonl", go_on=True)
        self._trace.process(f"rank 0, back at step {step}")
        if self._board:
            self._board.close()
            self._board = _Tensorboard(self.folder / "tensorboard", step, self.warnings)

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
        """One line of layers.jsonl."""
        ratios = {name: float(f"{ratio:.4g}") for name, ratio in trust_ratios.items()}
        line = {"event": "layers", "step": step, "epoch": epoch, "time_s": time_s, "trust_ratios": ratios}
        self._layers.add(strict_json(line))

    def mlperf(self, key: str, value: Any = None, *, kind: str = "POINT_IN_TIME", **metadata: Any) -> None:
        """One line of mllog.txt (MLPerf's key, value and metadata such as epoch_num)."""
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

    def span(self, name: str, start_s: float, duration_s: float, *, track: str = "engine", **args: Any) -> None:
        """One span of rank 0 in trace.json. `warnings` says when there were too many to keep."""
        self._trace.span(Span(name, start_s, duration_s, track, args))

    def spans(self, spans: Iterable[Span], rank: int = 0) -> None:
        """Spans of a rank in trace.json. Other ranks come last: what follows is drawn below them."""
        if rank:
            self._trace.process(f"rank {rank}")
            self._trace.limit = MAX_SPANS
        for span in spans:
            self._trace.span(span)

    def close(self) -> None:
        """Writes what is pending; `warnings` is complete after it. Closing twice does nothing."""
        if self._metrics.closed:
            return
        self._trace.close()
        for lines in (self._metrics, self._layers, self._mllog):
            lines.close()
            if lines.lost:
                self.warnings.append(f"{lines.lost} lines could not be written to {lines.name}: {lines.reason}")
        if self._trace.dropped:
            kept, dropped = self._trace.limit, self._trace.dropped
            self.warnings.append(f"trace.json keeps the first {kept:,} spans that fit; {dropped:,} were left out")
        if self._board:
            self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Lines:
    """Lines that are appended to a file, one write each. One that cannot be written, for a full disk, say, is left out
    whole: it is not worth a run."""

    def __init__(self, path: Path, *, go_on: bool) -> None:
        """go_on: keep what is there."""
        self.name, self.lost, self.reason = path.name, 0, ""
        self._file = open(path, "ab" if go_on else "wb", buffering=0)  # noqa: SIM115
        self._end = self._file.seek(0, os.SEEK_END)

    def add(self, line: str) -> None:
        data = line.encode() + b"\n"
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._end += len(data)
        except OSError as error:
            self.lost, self.reason = self.lost + 1, error.strerror or str(error)
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)

    def close(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed


class TraceFile:
    """A trace that opens in Perfetto: spans on tracks, tracks in processes. Chrome's trace format.

    It grows at its end: each flush writes over the closing brackets, so the file is JSON all the time. The first
    `limit` spans are kept; `dropped` counts the rest.
    """

    TAIL = b"\n]}\n"

    def __init__(self, path: Path, *, go_on: bool = False, limit: int = MAX_SPANS) -> None:
        """go_on: keep what an earlier attempt wrote there. Call `process` before the first span."""
        self.limit, self.dropped = limit, 0
        self._pending: list[bytes] = []
        self._spans = self._process = 0
        old = path.read_bytes() if go_on and path.exists() else b""
        if old.endswith(self.TAIL):
            self._spans = old.count(b'"ph":"X"')
            self._process = old.count(b'"process_name"')
            self._file = open(path, "r+b", buffering=0)  # noqa: SIM115
            self._end = len(old) - len(self.TAIL)
        else:
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115
            self._end = self._file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')

    def process(self, name: str) -> None:
        """The spans that follow are drawn in a process of their own, below the ones before."""
        self.flush()
        self._tracks: dict[str, int] = {}
        self._process += 1
        self._put((b",\n" if self._process > 1 else b"") + self._meta("process_name", name))

    def span(self, span: Span) -> None:
        if self._spans >= self.limit:
            self.dropped += 1
            return
        self._spans += 1
        name, start_s, duration_s, track, args = span
        if track not in self._tracks:
            self._tracks[track] = len(self._tracks)
            self._pending.append(self._meta("thread_name", track, self._tracks[track]))
        event = {
            "name": name,
            "ph": "X",
            "ts": round(start_s * 1e6, 1),
            "dur": round(duration_s * 1e6, 1),
            "pid": self._process,
            "tid": self._tracks[track],
        }
        self._pending.append(strict_json({**event, "args": args} if args else event).encode())
        if len(self._pending) >= 512 or time.monotonic() >= self._flush_at:
            self.flush()

    def flush(self) -> None:
        if self._pending:
            try:
                self._put(b"".join(b",\n" + event for event in self._pending))
            except OSError:  # a full disk is not worth a run
                self.dropped += len(self._pending)
            self._pending.clear()
        self._flush_at = time.monotonic() + 1

    def close(self) -> None:
        if self.dropped:
            self._pending.append(self._meta("process_labels", f"{self.dropped} later spans left out"))
        self.flush()
        self._file.close()

    def _meta(self, kind: str, text: str, thread: int = 0) -> bytes:
        args = {"labels" if kind == "process_labels" else "name": text}
        return strict_json({"name": kind, "ph": "M", "pid": self._process, "tid": thread, "args": args}).encode()

    def _put(self, events: bytes) -> None:
        self._file.seek(self._end)
        if self._file.write(events + self.TAIL) != len(events) + len(self.TAIL):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end += len(events)


def group_spans(groups: Sequence[GroupTiming], start_s: float = 0.0) -> list[Span]:
    """The exchange of a step that began at `start_s`."""
    return [
        Span(
            f"group {group.index}",
            start_s + group.start_s,
            group.end_s - group.start_s,
            "exchange",
            {"algorithm": group.algorithm, "bytes": group.bytes},
        )
        for group in groups
    ]


def write_trace(path: str | Path, steps: Mapping[str, StepTiming]) -> None:
    """Predicted or measured steps below each other in one trace; the keys are their titles."""
    try:
        trace = TraceFile(Path(path))
        for title, timing in steps.items():
            trace.process(title)
            for part, start_s, end_s in timing.parts():
                trace.span(Span(part.replace("_", " "), start_s, end_s - start_s, "compute", {}))
            for span in group_spans(timing.groups):
                trace.span(span)
        trace.close()
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None


class _Tensorboard:
    """Scalar curves in an event file, through tensorboard's own record format; needs neither torch nor tensorflow.

    Importing tensorboard takes 0.2 s, so a thread does it while the run sets itself up; points wait until it is there.
    """

    def __init__(self, folder: Path, resume_from_step: int | None, warnings: list[str]) -> None:
        self._folder, self._resume_from_step, self._warnings = folder, resume_from_step, warnings
        self._waiting: list[tuple[float, int, dict[str, float]]] = []
        self._next_point = self._flush_at = 0.0
        self._write: Callable[[bytes], None] | None = None
        self._failed: Exception | None = None
        self._loader = threading.Thread(target=self._load, name="tensorboard import", daemon=True)
        self._loader.start()

    def _load(self) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
            from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
            from tensorboard.summary.writer.record_writer import RecordWriter
        except Exception as error:  # a broken installation fails in many ways, and curves must not stop a run
            self._failed = error
            return
        self._event, self._summary, self._records = Event, Summary, RecordWriter

    def add(self, prefix: str, step: int, scalars: Mapping[str, float], *, always: bool = False) -> None:
        now = time.monotonic()
        if self._failed or (now < self._next_point and not always):
            return
        self._next_point = now + TENSORBOARD_INTERVAL_S
        self._waiting.append((time.time(), step, {f"{prefix}/{name}": value for name, value in scalars.items()}))
        if not self._loader.is_alive():
            self._drain()
            if now >= self._flush_at and self._write:
                self._file.flush()
                self._flush_at = now + 2

    def _drain(self) -> None:
        try:
            if self._failed:
                raise self._failed
            if self._write is None:
                self._open()
            for wall_time, step, scalars in self._waiting:
                values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
                self._put(wall_time=wall_time, step=step, summary=self._summary(value=values))
        except Exception as error:  # a full disk or a foreign tensorboard: the other files still tell the story
            self._failed = error
            warning = f"tensorboard/ is missing or ends early: {error}"
            if warning not in self._warnings:
                self._warnings.append(warning)
        self._waiting.clear()

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = open(self._folder / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}", "wb")  # noqa: SIM115
        self._write = self._records(self._file).write
        self._put(wall_time=time.time(), file_version="brain.Event:2")
        if self._resume_from_step is not None:
            # A session start makes tensorboard forget what an earlier attempt wrote for this step and later ones.
            self._put(wall_time=time.time(), step=self._resume_from_step, session_log={"status": 1})

    def _put(self, **fields: Any) -> None:
        assert self._write is not None
        self._write(self._event(**fields).SerializeToString())

    def close(self) -> None:
        self._loader.join()
        self._drain()
        if self._write:
            self._file.close()


def commit() -> str | None:
    """Of the checkout this runs from, "-dirty" when tracked files differ from it; null outside a checkout."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():  # an installed package may lie inside a checkout of something else
        return None
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def strict_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON: NaN and infinities, which other readers refuse, become null."""
    try:
        return json.dumps(
            value, allow_nan=False, default=_scalar, indent=indent, separators=None if indent else (",", ":")
        )
    except ValueError:
        return json.dumps(_finite(value), default=_scalar, indent=indent, separators=None if indent else (",", ":"))


def _scalar(value: Any) -> Any:
    """What numpy's and torch's scalars stand for, or the text of anything else."""
    return value.item() if hasattr(value, "item") else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    value = _scalar(value) if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
