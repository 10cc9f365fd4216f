"""Detects silent faults: a flipped bit of a weight on one rank, or values or gradients that are not finite.

    ranks hold the same weights and optimizer state, so their checksums are equal: one small all-gather compares them
    before an evaluation or a checkpoint    the host waits for the result, so no damaged state is kept
    every K steps, on request               the result is read at the next comparison, without waiting

With a sharded update, masters and momentum are current only in each rank's own shard, so only weights are compared.
"""

from __future__ import annotations

import math
import socket
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hyperbatch.arena import Arena, Slot
from hyperbatch.comm.place import MAX_NAMED, named
from hyperbatch.comm.weights import Rows, extremes, gather_rows, word_sum
from hyperbatch.config import Config
from hyperbatch.data.batch import Batch
from hyperbatch.engine.ranks import gather
from hyperbatch.engine.run import Run
from hyperbatch.engine.step import MicroStep, Work
from hyperbatch.engine.steptimer import StepTimer
from hyperbatch.errors import Diverged, RunFailed
from hyperbatch.models.norm import persistent_buffers
from hyperbatch.schedule import Stride

SPIKE_STEPS = 64  # a loss is compared with the median over this number of steps
LEAST_STEPS = 16  # with fewer steps there is no reliable median


class _Flat(NamedTuple):
    """All values of one role and one dtype, in the arena's layout."""

    role: str
    dtype: torch.dtype  # of the working weights
    values: Tensor
    same: bool  # whether every rank has the same values


class Guard:
    """Call `after` after each stride, and `check` before each evaluation and checkpoint."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._every_steps = run.config.run.compare_every_steps
        self._pending: tuple[int, Rows] | None = None  # the comparison under way: its step and its result
        self._equal_at = self._checked_at = run.progress.step  # ranks start from the same weights

    def after(self, stride: Stride) -> None:
        """If a comparison is due, raises what the previous one has found, and starts a new one in the background."""
        every = self._every_steps
        if every and self._run.ranks.world_size > 1 and any((step.index + 1) % every == 0 for step in stride):
            self._read()
            self._start()

    def check(self) -> None:
        """Raises RunFailed on every rank if ranks have drifted apart, or if values on any of them are not finite."""
        if self._checked_at != self._run.progress.step or self._pending is not None:
            self._read()
            self._start()
            self._read()
            self._checked_at = self._run.progress.step

    def _start(self) -> None:
        learner, flats = self._run.learner, list(self._flats())
        with torch.no_grad():
            sums = [word_sum(flat.values) for flat in flats if flat.same and self._every_steps != 0]
            bounds = extremes([*(flat.values for flat in flats), *self._statistics().values()])
            finite = torch.isfinite(bounds).all().to(torch.int64)
            self._pending = self._run.progress.step, gather_rows(torch.stack([*sums, finite]), learner.comm)

    def _read(self) -> None:
        if self._pending is None:
            return
        (step, rows), self._pending = self._pending, None
        values = rows.read()
        if not all(row[-1] for row in values):
            raise self._not_finite(step)
        if len({tuple(row) for row in values}) > 1:
            raise self._drifted(step, [tuple(row) for row in values])
        self._equal_at = step

    def _flats(self) -> Iterator[_Flat]:
        learner = self._run.learner
        arena, whole = learner.arena, not learner.sync.sharded
        for dtype, values in arena.weights.items():
            yield _Flat("weight", dtype, values, same=True)
            if dtype == arena.dtype and arena.masters is not None:
                yield _Flat("master weight", dtype, arena.masters, same=whole)
            first = next(slot for slot in arena.slots if slot.dtype == dtype)
            for name, view in learner.optimizer.init_state(first.param).items():
                if name != "master":
                    flat = view.as_strided((values.numel(),), (1,), 0)
                    yield _Flat(name.replace("_", " "), dtype, flat, same=whole)

    def _statistics(self) -> dict[str, Tensor]:
        """The model's buffers that a checkpoint keeps. Others, such as masks, may be infinite."""
        kept = persistent_buffers(self._run.learner.model)
        return {name: buffer for name, buffer in kept.items() if buffer.is_floating_point()}

    # --- after a fault was found; called on every rank alike --------------------------------------------------------

    def _drifted(self, step: int, rows: list[tuple[int, ...]]) -> RunFailed:
        """Returns an error that names the first parameter that differs, and the ranks outside the largest set of equal
        ranks, if one set is the largest."""
        run, arena = self._run, self._run.learner.arena
        names, sums = [], []
        for flat in self._flats():
            for slot in _slots(arena, flat.dtype):
                if flat.same:
                    names.append(f"the {flat.role} of {slot.name}")
                    sums.append(word_sum(flat.values[slot.offset : slot.end]))
        found = gather((socket.gethostname(), torch.stack(sums).tolist()), run.ranks)
        (row, most), *others = Counter(rows).most_common()
        usual = rows.index(row)
        odd = [rank for rank in range(len(rows)) if rows[rank] != row]
        pairs = zip(names, found[usual][1], found[odd[0]][1], strict=True)
        place = next((name for name, mine, theirs in pairs if mine != theirs), "a value that has changed again since")
        when = f"after step {step}; after step {self._equal_at} all ranks agreed"
        advice = (
            "check the memory, GPU and software there, or use --compare-every-steps 0 if the ranks run on different "
            "processors, which may round differently"
        )
        if most > others[0][1]:
            who = f"rank {odd[0]} (host {found[odd[0]][0]}) has"
            if len(odd) > 1:
                who = f"ranks {named(odd)} (hosts {', '.join(found[rank][0] for rank in odd[:MAX_NAMED])}) have"
            line = f"{who} drifted from the other {most} ranks: {place} differs {when}; {advice}"
        else:
            line = (
                f"ranks {usual} (host {found[usual][0]}) and {odd[0]} (host {found[odd[0]][0]}) have drifted apart: "
                f"{place} differs {when}; {advice}"
            )
        return _failed(line, odd[0], found[odd[0]][0], step)

    def _not_finite(self, step: int) -> RunFailed:
        mine = self._first_not_finite()
        found = gather((socket.gethostname(), mine), self._run.ranks)
        rank, (host, place) = next(
            ((rank, item) for rank, item in enumerate(found) if item[1]), (0, (found[0][0], "a value"))
        )
        who = f"rank {rank} (host {host}): " if self._run.ranks.world_size > 1 else ""
        advice = _gentler(self._run.config)
        line = f"{who}{place} was inf or nan after step {step}, so this step was not saved; {advice}"
        return _failed(line, rank, host, step, Diverged)

    def _first_not_finite(self) -> str:
        for flat in self._flats():
            for slot in _slots(self._run.learner.arena, flat.dtype):
                if not torch.isfinite(flat.values[slot.offset : slot.end]).all():
                    return f"the {flat.role} of {slot.name}"
        for name, buffer in self._statistics().items():
            if not torch.isfinite(buffer).all():
                return f"the buffer {name}"
        return ""


def _slots(arena: Arena, dtype: torch.dtype) -> list[Slot]:
    return [slot for slot in arena.slots if slot.dtype == dtype]


def _gentler(config: Config) -> str:
    """Returns advice for values that are not finite."""
    ways = ["lower --lr", "lengthen --warmup-epochs"]
    if config.optim.precision == "fp16":
        ways.append("use --precision bf16")
    return f"{', '.join(ways[:-1])} or {ways[-1]}"


def _failed(line: str, rank: int, host: str, step: int, kind: type[RunFailed] = RunFailed) -> RunFailed:
    failed = kind(line)
    failed.words = {"rank": rank, "host": host, "step": step}
    return failed


class LossGuard:
    """Checks the losses and skipped steps that the journal reads, which are the same on every rank."""

    def __init__(
        self,
        run: Run,
        work: Work,
        next_batch: Callable[[], Batch | None],
        *,
        may_go_back: Callable[[], bool] = lambda: False,
    ) -> None:
        """work: the code of a micro-step. next_batch: returns this rank's next batch, which is then not trained on.
        may_go_back: returns whether the run can be rolled back; the answer is the same on every rank."""
        self._run, self._work, self._next_batch, self._may_go_back = run, work, next_batch, may_go_back
        self._spikes = SpikeWatch(run.config.run.spike_factor, classes=len(run.train_set.classes))

    def check_loss(self, loss: float, own: Callable[[], float], step: int, epoch: float, rate: float) -> None:
        """Raises Diverged if the loss is not finite, or if it has jumped and the run can be rolled back. loss: the mean
        over ranks; own: returns the loss of this rank."""
        if math.isfinite(loss):
            usual = self._spikes.usual(loss)
            if usual is not None and self._may_go_back():
                raise _failed(
                    f"the loss jumped to {loss:.4g} at step {step} (epoch {epoch:.2f}, learning rate {rate:.4g}); "
                    f"the median of the steps before it was {usual:.4g}",
                    0,
                    socket.gethostname(),
                    step,
                    Diverged,
                )
            self._spikes.add(loss)
            return
        found = gather((socket.gethostname(), math.isfinite(own())), self._run.ranks)
        bad = [(rank, host) for rank, (host, finite) in enumerate(found) if not finite]
        where = ""
        if 0 < len(bad) < len(found):
            where = f" on rank {bad[0][0]} (host {bad[0][1]})" if len(bad) == 1 else f" on {len(bad)} ranks"
        line = (
            f"the loss became {loss} at step {step} (epoch {epoch:.2f}, learning rate {rate:.4g}){where}; "
            f"{_gentler(self._run.config)}"
        )
        raise _failed(line, *(bad or [(0, found[0][0])])[0], step, Diverged)

    def check_skipped(self, in_a_row: int, step: int) -> None:
        """Raises RunFailed if too many updates in a row were skipped because gradients were not finite."""
        limit = self._run.config.run.max_skipped_steps
        if not limit or in_a_row < limit:
            return
        layer = first_overflow(self._run.learner.arena)  # in the mean over ranks
        found = gather((socket.gethostname(), self._own_overflow()), self._run.ranks)
        rank, (host, own) = next(((rank, item) for rank, item in enumerate(found) if item[1]), (0, (found[0][0], "")))
        culprits = sum(bool(item[1]) for item in found)
        if not own:
            where = f"first in {layer}" if layer else "in an unknown layer"
        elif culprits == 1 < len(found):
            where = f"on rank {rank} (host {host}), first in {own}"
        else:
            where = f"first in {own}" + (f", on {culprits} ranks" if len(found) > 1 else "")
        line = (
            f"{in_a_row} steps in a row, up to step {step}, were skipped because gradients were inf or nan "
            f"{where}; check the data and the model there, {_gentler(self._run.config)}, or allow more with "
            f"--max-skipped-steps"
        )
        raise _failed(line, rank, host, step)

    def _own_overflow(self) -> str:
        """Runs a backward pass without an exchange and returns the first layer whose gradients on this rank are not
        finite."""
        batch, learner = self._next_batch(), self._run.learner
        if batch is None:
            return ""
        samples = min(len(batch.labels), self._run.phases[-1].micro_batches[0])
        part = MicroStep(samples, 2 * samples, first=True, last=False)
        total = torch.zeros((), dtype=torch.promote_types(learner.dtype, torch.float32), device=learner.device)
        timer = StepTimer(learner.device)
        try:
            self._work(learner, part, batch.images[:samples], batch.labels[:samples], total, timer)
        except torch.OutOfMemoryError:  # graphs occupy the memory; the caller then uses the mean over ranks
            return ""
        return first_overflow(learner.arena)


class SpikeWatch:
    """Detects a jump of the loss: it exceeds `factor` times the median of the last losses and that of a random guess.

    Either alone occurs in healthy runs: late losses are small and vary, and early ones exceed that of a random guess.
    """

    def __init__(self, factor: float, *, classes: int) -> None:
        """factor: 0 disables the check."""
        self._factor, self._guess = factor, math.log(classes)
        self._recent: deque[float] = deque(maxlen=SPIKE_STEPS)

    def usual(self, loss: float) -> float | None:
        """Returns the median from which the loss has jumped; None if it has not jumped."""
        if not self._factor or loss <= self._guess or len(self._recent) < LEAST_STEPS:
            return None
        usual = statistics.median(self._recent)
        return usual if loss > self._factor * usual else None

    def add(self, loss: float) -> None:
        self._recent.append(loss)


def first_overflow(arena: Arena) -> str:
    """Returns the first layer, in backward order, whose gradient in the arena is not finite; "" if all are finite."""
    bad = (slot.name for slot in arena.slots if not torch.isfinite(arena.grad_view(slot.name)).all())
    return next(bad, "")
