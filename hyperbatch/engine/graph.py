"""Whole steps as CUDA graphs: one launch in the place of thousands.

    before the run:      every shape ahead is warmed up (nothing is kept), since choosing and compiling kernels is slow
    a shape's first step:  its micro-steps are captured
    every step:          batch -> copy into the graph's input -> replay -> loss, already updated weights

Graphs are kept per shape of a micro-step, number of micro-steps, place among them, and turn. Two turns take alternate
steps: a graph's time marks are written anew at each replay, and the journal reads them while the next step runs. All
graphs share one pool of memory; what outlives a replay (inputs, loss, gradients, state) lies outside it.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hyperbatch.comm import Heartbeat
from hyperbatch.comm.sync import CHECKED_STEPS
from hyperbatch.data.augment import size_at
from hyperbatch.data.batch import Batch
from hyperbatch.engine.job import Job
from hyperbatch.engine.step import Piece, micro_step, pieces
from hyperbatch.engine.steptimer import Ends, StepTimer
from hyperbatch.engine.warmup import compile_kernels, put_back
from hyperbatch.errors import InputError
from hyperbatch.kernels.memsets import replace_memsets
from hyperbatch.schedule import Step

TURNS = 2
Shape = tuple[int, ...]  # of a micro-step's images
Replay = Callable[[], None]


class Backend(Protocol):
    """What captures. Tests have one for CPUs that runs the function again on replay."""

    def beside(self) -> contextlib.AbstractContextManager[None]:
        """Where warm-up and capture run."""
        ...

    def checked(self) -> contextlib.AbstractContextManager[None]:
        """Raises where something inside waits for the device."""
        ...

    def capture(self, run: Replay) -> Replay: ...

    def release(self) -> None:
        """Gives memory back after the graphs have gone."""
        ...


class Captured(NamedTuple):
    replay: Replay
    ends: Ends  # its time marks


class StepRunner:
    """Runs the micro-steps of a job: replayed where they can be captured, plain elsewhere."""

    def __init__(self, job: Job, *, backend: Backend | None = None, warm: bool | None = None) -> None:
        """warm: run shapes without a trace before they count; None: on GPUs."""
        self._job = job
        self._warm = job.device.type == "cuda" if warm is None else warm
        self._backend = backend
        if backend is None and job.graph:
            self._backend = CudaGraphs(job.device)
        dtype = torch.promote_types(job.dtype, torch.float32)
        self.total = torch.zeros((), dtype=dtype, device=job.device)  # this step's loss
        self._warmed: set[tuple[Shape, int]] = set()
        self._known: set[tuple[Shape, int]] = set()  # captured
        self._inputs: dict[Shape, tuple[Tensor, Tensor]] = {}
        self._graphs: dict[tuple[Shape, Piece, int], Captured] = {}
        self._turn = 0
        self._heartbeat: Heartbeat | None = None

    @property
    def captures(self) -> bool:
        return self._backend is not None

    def knows(self, step: Step) -> bool:
        """Whether the step can run at once."""
        return not self.captures or self._key(step) in self._known

    def warm_up(self, steps: Iterable[Step]) -> None:
        """Runs steps of these shapes without a trace: kernels are chosen and compiled, communicators opened."""
        for step in steps:
            if self._warm and self._key(step) not in self._warmed:
                self._attempt(self._warm_up, *self._key(step))
                self._warmed.add(self._key(step))

    def prepare(self, step: Step) -> None:
        """Captures the step's shape. A capture that fails leaves the run plain, with a warning."""
        self.warm_up([step])
        fits = False
        with contextlib.suppress(torch.OutOfMemoryError) if self._graphs else contextlib.nullcontext():
            self._attempt(self._capture, *self._key(step))
            fits = True
        if not fits:
            # Other shapes' graphs hold the memory that this one needs: they are captured anew if they come again.
            self._drop()
            self._attempt(self._capture, *self._key(step))
        self._known.add(self._key(step))
        if self._graphs:
            self._job.graph = self._job.arena.pinned = True
            self._watch()

    def run(self, piece: Piece, batch: Batch, timer: StepTimer) -> None:
        """One micro-step whose batch is there."""
        if not self.captures:
            micro_step(self._job, piece, batch.images, batch.labels, self.total, timer)
            return
        shape = tuple(batch.images.shape)
        if piece.first:
            self._turn = (self._turn + 1) % TURNS
        images, labels = self._inputs[shape]
        images.copy_(batch.images, non_blocking=True)
        labels.copy_(batch.labels, non_blocking=True)
        captured = self._graphs[shape, piece, self._turn]
        captured.replay()
        if piece.first or piece.last:
            timer.replayed(captured.ends)
        else:
            timer.mark("micro_step")  # its own marks are written again before they are read

    def leave(self) -> None:
        """This rank ends in peace. One that fails is missed by the others: they may wait for it inside a graph."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None

    # --- a new shape --------------------------------------------------------------------------------------------

    def _key(self, step: Step) -> tuple[Shape, int]:
        size = size_at(self._job.config.data, step.epoch)
        return (step.phase.batch_per_rank, self._job.train_set.channels, size, size), step.phase.accumulation

    def _attempt(self, work: Callable[[Shape, int], None], shape: Shape, parts: int) -> None:
        """Warms up or captures, unless there is nothing to capture with; goes on plain if it cannot be done."""
        reason = None
        try:
            with self._backend.beside() if self._backend is not None else contextlib.nullcontext():
                work(shape, parts)
        except NotCaptured as error:
            reason = str(error)
        if self.captures and (reason := self._agreed(reason)):
            self._fall_back(reason)

    def _warm_up(self, shape: Shape, parts: int) -> None:
        timer, (images, labels) = StepTimer(self._job.device), self._blank(shape)

        def step() -> None:
            for piece in pieces(min(parts, 2)):  # those between the first and the last run nothing else
                micro_step(self._job, piece, images, labels, self.total, timer)

        with put_back(self._job):
            compile_kernels(self._job, images, labels, self.total)
            # Ranks compare on the host in the first steps which parameters they used.
            for _ in range(1 if self._backend is None else CHECKED_STEPS):
                step()
            # Once: other shapes run the same code, and later the loader's threads wait for the device as they may.
            if self._backend is not None and not self._warmed:
                try:
                    with self._backend.checked():
                        step()
                except RuntimeError as error:
                    raise NotCaptured(error) from error

    def _capture(self, shape: Shape, parts: int) -> None:
        job, backend = self._job, self._backend
        if backend is None:
            return
        if shape not in self._inputs:
            self._inputs[shape] = self._blank(shape)
        images, labels = self._inputs[shape]
        try:
            for turn in range(TURNS):
                for piece in dict.fromkeys(pieces(parts)):
                    marks = StepTimer(job.device)
                    replay = backend.capture(partial(micro_step, job, piece, images, labels, self.total, marks))
                    self._graphs[shape, piece, turn] = Captured(replay, marks.ends)
        except RuntimeError as error:
            if isinstance(first_cause(error), torch.OutOfMemoryError):
                raise first_cause(error) from None
            raise NotCaptured(error) from error
        finally:
            job.sync.forget()

    def _blank(self, shape: Shape) -> tuple[Tensor, Tensor]:
        """Images and labels laid out as the loader's: channels last.

        Fused kernels want a fourth channel of zeros: it is there once, and each copy of a batch goes beside it.
        """
        count, channels, height, width = shape
        pads = self._job.fused and channels == 3
        stored = torch.zeros(count, height, width, channels + pads, dtype=self._job.dtype, device=self._job.device)
        whole = stored.permute(0, 3, 1, 2)
        images = whole[:, :channels]
        if pads:
            images.padded = whole  # type: ignore[attr-defined]  # what kernels.conv.padded looks for
        return images, torch.zeros(count, dtype=torch.int64, device=self._job.device)

    def _agreed(self, reason: str | None) -> str | None:
        """The reason of the first rank that has one: all replay, or none does."""
        if self._job.ranks.world_size == 1:
            return reason
        reasons: list[str | None] = [None] * self._job.ranks.world_size
        dist.all_gather_object(reasons, reason)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text), None)

    def _fall_back(self, reason: str) -> None:
        if self._job.config.run.graph == "on":
            raise InputError(f"--graph on: the step cannot be captured: {reason}; repair it or use --graph auto")
        self._drop()
        self._backend = None
        self._job.graph = self._job.arena.pinned = False
        self._job.arena.zero_grad()
        self._job.warnings.append(f"steps run without a CUDA graph: {reason}")

    def _drop(self) -> None:
        self._graphs.clear()
        self._inputs.clear()
        self._known.clear()
        if self._backend is not None:
            self._backend.release()

    def _watch(self) -> None:
        """Captured collectives have no watchdog: waiting for a dead rank inside a graph would never end."""
        job = self._job
        if self._heartbeat is None and job.comm.world is not None:
            # Its own connection: others block on theirs.
            store = dist.distributed_c10d._get_default_store().clone()  # pyright: ignore[reportAttributeAccessIssue]
            timeout_s = job.config.run.timeout_s
            self._heartbeat = Heartbeat(store, job.ranks.rank, job.ranks.world_size, timeout_s=timeout_s).start()


class NotCaptured(Exception):
    """Says in one line what kept a step from being captured, and where it stands."""

    def __init__(self, error: BaseException) -> None:
        error = first_cause(error)
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
        super().__init__(
            f"{line} (in {frames[-1].name}, {frames[-1].filename}:{frames[-1].lineno})" if frames else line
        )


def first_cause(error: BaseException) -> BaseException:
    """Ending a broken capture fails, too: what broke it is the first of the chain."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def forget_workspaces() -> None:
    """cuBLAS takes new workspaces from here on, in the whole process: for a graph that is captured next, from its pool.

    One that was there before could be freed under the graph: torch.compile, other captures and, in newer versions of
    torch, graphs that end clear them. Graphs of one pool share such memory and must not run at once.
    """
    torch._C._cuda_clearCublasWorkspaces()


@contextlib.contextmanager
def _no_word_of_empty_graphs() -> Iterator[None]:
    """A capture that breaks before its first kernel has a better reason to give."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        yield


class CudaGraphs:
    """The backend of GPUs: one stream to capture on, one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            here.wait_stream(self._stream)

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        # A capture that breaks is harder to clean up after than a step that stops.
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode")
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def capture(self, run: Replay) -> Replay:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        forget_workspaces()
        try:
            # The loader's threads use the device meanwhile, on streams of their own: only this thread is watched.
            with (
                _no_word_of_empty_graphs(),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                run()
        except BaseException:
            self._clean_up()
            raise
        replace_memsets(graph)
        graph.instantiate()
        return graph.replay

    def _clean_up(self) -> None:
        """A broken capture leaves allocator (torch before 2.12) and generator believing that it still goes on."""
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        generator = torch.cuda.default_generators[self._device.index]
        fresh = torch.Generator(self._device).manual_seed(generator.initial_seed())
        generator.graphsafe_set_state(fresh.graphsafe_get_state())

    def release(self) -> None:
        torch.cuda.synchronize(self._device)  # a replay may still run in the memory that goes
        forget_workspaces()
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()
