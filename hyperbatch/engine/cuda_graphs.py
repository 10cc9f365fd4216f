"""Captures micro-steps, or whole strides of steps, in CUDA graphs: one launch instead of thousands.

    capture   run the micro-steps once on inputs with fixed addresses; their launches become a graph
    replay    batch -> copy into the graph's inputs -> launch the graph

There is one graph per image size and launch; a launch contains the number of samples, the share of the step and the
position of each of its micro-steps. A launch of a single micro-step has two graphs, which are replayed in turn: each
replay overwrites the time marks of its graph, and the journal reads the marks of one graph while the other runs. A
launch of a whole stride has one graph without marks: batches are copied to its inputs, and rates to its table, on the
stream on which it runs. All graphs share one memory pool; tensors that outlive a replay (inputs, losses, gradients,
state) are outside it.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hyperbatch.data.batch import Batch
from hyperbatch.engine.learner import GraphMemory, Learner
from hyperbatch.engine.step import Inputs, Launch, Work, blank_batch, inputs_of, run_launch
from hyperbatch.engine.steptimer import Ends, NoMarks, StepTimer
from hyperbatch.errors import first_line
from hyperbatch.kernels.memsets import replace_memsets
from hyperbatch.optim.rates import RateTable

TURNS = 2
ALIGN_BYTES = 256
StrideShape = tuple[tuple[Launch, ...], int]  # the stride's launches, image size
Replay = Callable[[], None]


class Backend(Protocol):
    """Captures functions. Tests use a backend for CPUs that runs the function again on replay."""

    def on_capture_stream(self) -> contextlib.AbstractContextManager[None]:
        """The stream on which warm-up and capture run."""
        ...

    def no_synchronisation(self) -> contextlib.AbstractContextManager[None]:
        """Raises if code inside waits for the device."""
        ...

    def capture(self, run: Replay) -> Replay: ...

    def release(self) -> None:
        """Frees all graphs and their memory."""
        ...

    def close(self) -> None:
        """Frees all graphs, even if there are other references to them, without waiting for the device."""
        ...


class Captured(NamedTuple):
    replay: Replay
    ends: Ends  # the graph's time marks


class StaticInputs(NamedTuple):
    written: Inputs  # the tensors that a launch's batch is copied into: one pair, or one for each micro-step
    read: Inputs  # the tensors that the micro-steps read


def static_inputs(learner: Learner, launch: Launch, image_size: int) -> StaticInputs:
    """Allocates the inputs of a launch: a slice of one tensor for each micro-step, so that one copy fills them all.

    If the slices were not aligned like separate allocations, each micro-step gets its own tensor, because the alignment
    decides which kernels can run.
    """
    whole = blank_batch(learner, sum(part.samples for part in launch), image_size)
    sample_bytes = whole[0].stride(0) * whole[0].itemsize
    if len(launch) == 1 or all(part.samples * sample_bytes % ALIGN_BYTES == 0 for part in launch):
        return StaticInputs([whole], inputs_of(Batch(*whole), launch))
    own = [blank_batch(learner, part.samples, image_size) for part in launch]
    return StaticInputs(own, own)


class CapturedSteps:
    """The graphs of a learner's launches, and the tensors that they read."""

    def __init__(self, backend: Backend, learner: Learner, work: Work, rates: RateTable, losses: Tensor) -> None:
        self.backend = backend
        self.shapes: set[StrideShape] = set()  # shapes of the captured strides
        self.graphs: dict[tuple[Launch, int, int], Captured] = {}  # by launch, image size and turn
        # By samples of each micro-step and image size. Launches run one after the other, so they share the inputs.
        self._inputs: dict[tuple[tuple[int, ...], int], StaticInputs] = {}
        self._learner, self._work, self._rates, self._losses = learner, work, rates, losses
        self._turn = 0

    def capture(self, shape: StrideShape) -> None:
        """Captures the launches of a stride. Raises NotCaptured or NoRoom with the reason if that is not possible."""
        launches, image_size = shape
        learner = self._learner
        try:
            for turn in range(TURNS):
                for launch in dict.fromkeys(launches):
                    if turn and len(launch) > 1:
                        continue
                    inputs = self._inputs_of(launch, image_size).read
                    marks = (NoMarks if len(launch) > 1 else StepTimer)(learner.device)
                    run = partial(run_launch, self._work, learner, launch, inputs, self._rates, self._losses, marks)
                    self.graphs[launch, image_size, turn] = Captured(self.backend.capture(run), marks.ends)
        except RuntimeError as error:
            learner.sync.forget()
            no_room = isinstance(first_cause(error), torch.OutOfMemoryError)
            raise (NoRoom if no_room else NotCaptured)(error) from error
        self.shapes.add(shape)

    def replay(self, launch: Launch, batch: Batch, timer: StepTimer) -> None:
        """Copies a batch to the inputs of a captured launch, and replays the launch."""
        image_size = batch.images.shape[-1]
        written = self._inputs_of(launch, image_size).written
        parts = [(batch.images, batch.labels)] if len(written) == 1 else inputs_of(batch, launch)
        for own, part in zip(written, parts, strict=True):
            own[0].copy_(part[0], non_blocking=True)
            own[1].copy_(part[1], non_blocking=True)
        self.replay_again(launch, image_size, timer)

    def replay_again(self, launch: Launch, image_size: int, timer: StepTimer) -> None:
        """Replays a launch on the current contents of its inputs."""
        part = launch[0]
        if len(launch) > 1:
            self.graphs[launch, image_size, 0].replay()
            timer.mark("stride")
            return
        if part.first:
            self._turn = (self._turn + 1) % TURNS
        captured = self.graphs[launch, image_size, self._turn]
        captured.replay()
        if part.first or part.last:
            timer.replayed(captured.ends)
        else:
            timer.mark("micro_step")  # the graph's marks are overwritten before they could be read

    def _inputs_of(self, launch: Launch, image_size: int) -> StaticInputs:
        key = tuple(part.samples for part in launch), image_size
        if key not in self._inputs:
            self._inputs[key] = static_inputs(self._learner, launch, image_size)
        return self._inputs[key]

    def drop(self) -> None:
        """Frees the memory of all graphs. New ones can be captured afterwards."""
        self._forget()
        self.backend.release()

    def close(self) -> None:
        self._forget()
        self.backend.close()

    def _forget(self) -> None:
        self.graphs.clear()
        self._inputs.clear()
        self.shapes.clear()


class NotCaptured(Exception):
    """A step could not be captured. The message states in one line why, and where in the code."""

    def __init__(self, error: BaseException) -> None:
        error = first_cause(error)
        line = first_line(error)
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
        super().__init__(
            f"{line} (in {frames[-1].name}, {frames[-1].filename}:{frames[-1].lineno})" if frames else line
        )


class NoRoom(NotCaptured):
    """A step could not be captured for lack of memory."""


def first_cause(error: BaseException) -> BaseException:
    """The first error of a chain. Ending a failed capture raises another error, and the first one is the cause."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def forget_workspaces() -> None:
    """Makes cuBLAS allocate new workspaces in the whole process; a graph that is captured next gets them from its pool.

    An older workspace could be freed while the graph still uses it: torch.compile, other captures and, in newer
    versions of torch, graphs that end clear all workspaces. Graphs of one pool share them and must not run at once.
    """
    torch._C._cuda_clearCublasWorkspaces()


@contextlib.contextmanager
def _empty_graphs_ignored() -> Iterator[None]:
    """Ignores torch's warning about an empty graph: a capture that fails before its first kernel raises an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        yield


class CudaGraphs:
    """The backend of GPUs: one stream to capture on, one pool of memory."""

    def __init__(self, device: torch.device, memory: GraphMemory | None = None) -> None:
        """memory: shared with other graphs of this learner that never run at the same time; None: its own."""
        self._device, self._shared = device, memory is not None
        self._memory = memory or GraphMemory(device)
        self._graphs: list[torch.cuda.CUDAGraph] = []

    @contextlib.contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        here, stream = torch.cuda.current_stream(self._device), self._memory.stream
        stream.wait_stream(here)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            here.wait_stream(stream)

    @contextlib.contextmanager
    def no_synchronisation(self) -> Iterator[None]:
        # Synchronisation is detected here, in a plain step, because a failed capture is harder to clean up.
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode")
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def capture(self, run: Replay) -> Replay:
        graph, memory = torch.cuda.CUDAGraph(keep_graph=True), self._memory
        self._graphs.append(graph)
        forget_workspaces()
        try:
            # The loader's threads use the device meanwhile, on their own streams, so only this thread is restricted.
            with (
                _empty_graphs_ignored(),
                torch.cuda.graph(graph, pool=memory.pool, stream=memory.stream, capture_error_mode="thread_local"),
            ):
                run()
        except BaseException:
            self._clean_up()
            raise
        replace_memsets(graph)
        graph.instantiate()
        return graph.replay

    def _clean_up(self) -> None:
        """Resets the allocator (torch before 2.12) and the generator, which a failed capture leaves in capture mode."""
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._device.index, self._memory.pool)
        self._memory.renew()  # for later captures, also those of others that share the memory
        generator = torch.cuda.default_generators[self._device.index]
        fresh = torch.Generator(self._device).manual_seed(generator.initial_seed())
        generator.graphsafe_set_state(fresh.graphsafe_get_state())

    def release(self) -> None:
        torch.cuda.synchronize(self._device)  # synchronises: a replay may still use the memory that is freed
        self.close()
        forget_workspaces()
        if not self._shared:  # a shared pool is kept alive by other graphs, and later captures reuse its free memory
            self._memory.renew()
        torch.cuda.empty_cache()

    def close(self) -> None:
        # The frames of a traceback may hold on to a graph, so that dropping it would not destroy it.
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
