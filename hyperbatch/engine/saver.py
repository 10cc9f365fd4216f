"""Decides when checkpoints are taken, and writes them in a thread while training continues.

    step n: tensors -> host memory (the run waits)     thread: checksums, file, fsync, old ones deleted
    step n + 1, n + 2, ...                             (the run does not wait)

At most one write is in progress: a checkpoint that becomes due meanwhile waits for it, since it needs the same memory.
If a file cannot be written, there is a warning and the run continues; earlier checkpoints stay.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

from hyperbatch import checkpoint, durable
from hyperbatch.checkpoint import Checkpoint
from hyperbatch.data.identity import sample_list
from hyperbatch.engine.ranks import Ranks, share
from hyperbatch.engine.run import Run
from hyperbatch.engine.snapshot import HostMemory, owned, snapshot, tensors_of
from hyperbatch.schedule import EpochGrid, Step


class Saver:
    """A run's checkpoints. Every rank has a saver and calls its methods; only rank 0's writes.

        with Saver(run, out, warn=print) as saver:
            ...
            if saver.due(step):
                saver.save()
        saver.wait_on_all_ranks()    # True: the newest checkpoint is on the disk

    Leaving the context waits for the current write, also after an error.
    """

    def __init__(
        self,
        run: Run,
        out: Path | None,
        *,
        warn: Callable[[str], None],
        written: Callable[[Checkpoint, Path, float], None] | None = None,
    ) -> None:
        """out: the run's folder. If it is None, or the run keeps no checkpoints, `save` does nothing. warn and written
        are called by the thread; written receives each checkpoint that was written, its path, and the seconds that this
        took."""
        config = run.config.run
        self._run, self._warn, self._tell = run, warn, written
        self._folder = out / "checkpoints" if out is not None and config.keep_checkpoints else None
        every = config.checkpoint_every_epochs
        offset = config.eval_offset_epochs if every is None else 0.0
        self._epochs = EpochGrid(config.eval_every_epochs if every is None else every, offset, len(run.train_set))
        every_s = 0.0 if self._folder is None else 60 * config.checkpoint_every_minutes
        self._deadline = Deadline(every_s, run.ranks, step=run.progress.step)
        self._memory: HostMemory | None = None
        self.taken = self._folder is not None and run.progress.step > 0  # whether there should be one by now
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hyperbatch-checkpoint")
        self._write: Future[bool] | None = None  # the write of the last checkpoint
        if self._folder is not None and run.ranks.rank == 0:
            durable.remove_partials(self._folder)
            # This is done here and not at the first checkpoint, because pinning memory, or its first use, takes longer
            # than a copy, and because the samples of each set are hashed once.
            self._memory = HostMemory(tensors_of(run.learner))
            self._memory.copy()
            for source in (run.train_set, run.eval_set):
                sample_list(source)

    def planned(self, step: Step) -> bool:
        """Whether a checkpoint is due after this step by the number of epochs or steps, which is known beforehand."""
        every = self._run.config.run.checkpoint_every_steps
        return self._epochs.crossed(step) or bool(every and (step.index + 1) % every == 0)

    def due(self, step: Step) -> bool:
        """Whether a checkpoint is due after this step; the answer is the same on every rank. Must be called after each
        stride, because it also checks the minutes."""
        return self.planned(step) or self._deadline.passed(step.index + 1)

    def save(self) -> None:
        """Takes a checkpoint. When it returns, training may continue; `wait` returns when the file is written."""
        if self._folder is None:
            return
        self._run.progress.note_best()
        self.taken = True
        self._deadline.restart(self._run.progress.step)
        self.wait()  # the previous write still reads the memory
        saved = snapshot(self._run, self._memory)
        if saved is not None:
            self._write = self._thread.submit(self._written, self._folder, saved)

    def wait(self) -> bool:
        """Waits for the current write. Returns whether the last checkpoint is on the disk; False after a warning. On
        ranks other than 0 it returns True at once. Raises an error in our own code of the thread."""
        return self._write is None or self._write.result()

    def wait_on_all_ranks(self) -> bool:
        """Like `wait`, but every rank waits for rank 0's write and gets its result: for ranks that end next."""
        return share(self.wait(), self._run.ranks)

    def went_back(self) -> None:
        """Must be called after the run was rolled back to an earlier checkpoint."""
        self._deadline.restart(self._run.progress.step)

    def _written(self, folder: Path, saved: Checkpoint) -> bool:
        """Writes the checkpoint; runs in the thread."""
        config, start_s = self._run.config.run, time.perf_counter()
        try:
            path = checkpoint.save(folder, owned(saved), keep=config.keep_checkpoints, keep_best=config.keep_best)
        except OSError as error:
            step, reason = saved.progress.step, error.strerror or error
            self._warn(f"the checkpoint of step {step} could not be written: {reason}; the run continues without it")
            return False
        if self._tell is not None:
            self._tell(saved, path, time.perf_counter() - start_s)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()


class Deadline:
    """Lets all ranks take a checkpoint at the same step, `every_s` seconds after the last one by rank 0's clock.

    Ranks exchange a message when, at the current pace, half of the remaining time has passed, then half of the rest,
    and so on: a few small messages for each checkpoint, and none in the steps between. If steps become slower
    meanwhile, the checkpoint is late by this delay at most.
    """

    CLOSE = 0.02  # the share of `every_s` by which a checkpoint may be early

    def __init__(self, every_s: float, ranks: Ranks, *, step: int, now: Callable[[], float] = time.monotonic) -> None:
        """every_s: 0 means never. Time counts from the end of the first stride, since set-up is long."""
        self._every_s, self._ranks, self._now = every_s, ranks, now
        self._began = False
        self.restart(step)

    def restart(self, step: int) -> None:
        """Must be called after a checkpoint. step: the number of steps so far."""
        self._step, self._since = step, self._now()
        self._meeting = step + 1  # the number of steps after which ranks exchange the next message

    def passed(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` steps. Every rank must call it after each stride; few of the calls
        exchange a message."""
        if not self._every_s or step < self._meeting:
            return False
        if not self._began:
            self._began = True
            self.restart(step)
            return False
        gone_s = self._now() - self._since
        left_s, step_s = self._every_s - gone_s, gone_s / (step - self._step)
        # If less than a step's time is left, the checkpoint is taken now, because it would be late after another step.
        reached = left_s <= max(self.CLOSE * self._every_s, step_s)
        steps = max(1, int(left_s / 2 / max(step_s, 1e-9)))
        reached, self._meeting = share((reached, step + steps), self._ranks)
        return reached
