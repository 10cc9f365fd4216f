"""Runs the steps of a learner: as plain code, or as replays of CUDA graphs (engine/cuda_graphs.py).

before the run:          every shape ahead is warmed up, since choosing and compiling kernels is slow;
                         a step is measured, and several short steps are launched together, as a stride
a shape's first stride:  it is captured, if steps are captured
every stride:            batch -> micro-steps -> losses, updated weights
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from hyperbatch.config import Config
from hyperbatch.data.augment import size_at
from hyperbatch.data.batch import Batch
from hyperbatch.engine.compiled import CompiledRegions
from hyperbatch.engine.cuda_graphs import (
    TURNS,
    Backend,
    CapturedSteps,
    CudaGraphs,
    NoRoom,
    NotCaptured,
    StrideShape,
)
from hyperbatch.engine.learner import Learner
from hyperbatch.engine.ranks import Ranks, gather, share
from hyperbatch.engine.step import Launch, MicroStep, Work, blank_batch, inputs_of, launches, micro_steps, run_launch
from hyperbatch.engine.steptimer import StepTimer
from hyperbatch.engine.warmup import compile_kernels, compile_layers, compile_regions, preserved_state
from hyperbatch.errors import InputError
from hyperbatch.models.norm import persistent_buffers
from hyperbatch.optim.rates import RateTable
from hyperbatch.plan.types import StepTiming
from hyperbatch.schedule import Step, Stride
from hyperbatch.stopwatch import wait

LAUNCH_S = 0.025  # longest duration of a launch's steps: the host needs a millisecond per launch, and sometimes ten
MAX_STEPS = 16  # most steps in a launch, by default: capturing a step takes as long as running it from Python
StepShape = tuple[tuple[int, ...], int]  # samples of each micro-step, image size


class StepRunner:
    """Runs strides. Call `prepare` for a stride whose shape is new (`is_ready` returns False), then `run` for each of
    its launches."""

    def __init__(
        self,
        learner: Learner,
        work: Work,
        config: Config,
        ranks: Ranks,
        warnings: list[str],
        *,
        backend: Backend | None = None,
        warm: bool | None = None,
    ) -> None:
        """work: the code of a micro-step. warnings: receives the reason if steps cannot be captured.

        warm: whether new shapes are warmed up first; None: on GPUs.
        """
        self._learner, self._work, self._config, self._ranks, self._warnings = learner, work, config, ranks, warnings
        self._warm = learner.device.type == "cuda" if warm is None else warm
        dtype, rows = torch.promote_types(learner.dtype, torch.float32), max(MAX_STEPS, config.run.steps_per_launch)
        self.losses = torch.zeros(rows, dtype=dtype, device=learner.device)  # of the stride's steps
        self.rates = RateTable(learner.optimizer, rows)
        self.alone: StepTiming | None = None  # the timing of a single step, once `choose_length` has measured it
        if backend is None and learner.capturable:
            backend = CudaGraphs(learner.device, learner.graph_memory)
        self._captured = None
        if backend is not None:
            self._captured = CapturedSteps(backend, learner, work, self.rates, self.losses)
        self._compiled: set[StepShape] = set()
        self._warmed: set[StepShape] = set()
        self._draws = not self._warm  # whether a step draws random numbers; a warm-up detects it
        self._length, self._block_steps = 1, 1
        self._pixel_s: float | None = None  # a step's time per pixel, if the length of strides is derived from it

    @property
    def captures(self) -> bool:
        return self._captured is not None

    def shape(self, step: Step) -> StepShape:
        return step.phase.micro_batches, size_at(self._config.data, step.epoch)

    def is_ready(self, stride: Stride) -> bool:
        """Whether the stride can run at once."""
        return self._captured is None or self._stride_shape(stride) in self._captured.shapes

    def compile(
        self,
        steps: Iterable[Step],
        *,
        other_trials: Callable[[], None] | None = None,
        count: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compiles the code that steps of these shapes need: the model's regions, or the fused kernels in parallel.
        Evaluation uses some of it, too.

        other_trials: runs other convolutions of the model, for which cuDNN chooses algorithms while kernels are
        compiled. count: called with the number of compiled kernels and the number known so far.
        """
        steps = list(steps)
        self._compile_regions(steps, count)
        # Batch norm over ranks exchanges sums in forward: if a rank failed to compile, the others would wait for it.
        if not self._learner.fused or self._config.model.bn_group_ranks > 1:
            return
        shapes = [shape for shape in dict.fromkeys(map(self.shape, steps)) if shape not in self._compiled]
        if self._warm and shapes:
            self._compiled.update(shapes)
            self._compile(shapes, other_trials, count)

    def warm_up(self, steps: Iterable[Step]) -> None:
        """Runs steps of these shapes, so that kernels are chosen and compiled and communicators are opened, and
        restores the state."""
        steps = list(steps)
        self.compile(steps)
        for shape in map(self.shape, steps):
            if self._warm and shape not in self._warmed:
                self._attempt(partial(self._warm_up, shape))
                self._warmed.add(shape)

    def choose_length(self, block: Sequence[Step], *, measure: bool | None = None) -> None:
        """Chooses once how many steps a stride has; the number is the same on every rank. Before, each stride has one
        step.

        block: the first steps of the run, up to the first that is followed by an evaluation or checkpoint. measure:
        whether to choose by the measured time of a step if the config leaves it open; None: on GPUs. Random numbers are
        seeded once per launch, so steps that draw random numbers are captured one by one.
        """
        first, wanted = block[0], self._config.run.steps_per_launch
        measure = self._learner.device.type == "cuda" if measure is None else measure
        if self.alone is not None:
            return
        if self._captured is not None:
            if wanted == 1 or not (wanted or measure) or any(gather(self._draws, self._ranks)):
                return
            if not self.is_ready((first,)):
                self.prepare((first,))
        if self._captured is None:  # steps are not captured, or could not be
            self._length = max(1, wanted)
            return
        self.alone = alone = self._measure(self._captured, first)
        self._length, self._block_steps = wanted, len(block)
        if not wanted:
            micro_batches, image_size = self.shape(first)
            self._pixel_s = alone.step_s / (sum(micro_batches) * image_size**2)

    def length(self, first: Step) -> int:
        """Returns the number of steps of a stride that begins with this step. A step's time is estimated from the
        number of its pixels."""
        if self._pixel_s is None:
            return self._length
        micro_batches, image_size = self.shape(first)
        return stride_length(self._pixel_s * sum(micro_batches) * image_size**2, self._block_steps)

    def prepare(self, stride: Stride) -> None:
        """Captures the stride's shape. If the capture fails, the run continues with plain steps and a warning."""
        self.warm_up(stride[:1])
        captured = self._captured
        if captured is None:
            return
        capture, fits = partial(captured.capture, self._stride_shape(stride)), False
        with contextlib.suppress(torch.OutOfMemoryError) if captured.graphs else contextlib.nullcontext():
            self._attempt(capture)
            fits = True
        if not fits:
            # Graphs of other shapes occupy the memory that this one needs. They are captured again when they recur.
            captured.drop()
            self._attempt(capture)
        if self.captures:
            self._learner.sync.check()  # raises if ranks use different parameters: the graph would repeat that
            self._learner.arena.pinned = True
            if len(stride) > 1:
                # The first launch of a graph also sends it to the device, which takes long for a large graph.
                with preserved_state(self._learner):
                    self._replay(captured, stride, StepTimer(self._learner.device))

    def launches(self, stride: Stride) -> tuple[Launch, ...]:
        """Returns the launches of a stride. Call `run` with each of them, in order."""
        return launches(stride[0].phase.micro_batches, len(stride))

    def run(self, stride: Stride, launch: Launch, batch: Batch, timer: StepTimer) -> None:
        """Runs one launch of a stride on its batch."""
        if self._captured is None:
            seeds, inputs = [self._seed(step) for step in stride], inputs_of(batch, launch)
            run_launch(self._work, self._learner, launch, inputs, self.rates, self.losses, timer, seeds=seeds)
            return
        if self._draws and launch[0].first:
            torch.manual_seed(self._seed(stride[0]))
        self._captured.replay(launch, batch, timer)

    def follow(self, config: Config) -> None:
        """Continues with another run's config, which may differ only in fields that no graph contains
        (engine/session.py)."""
        self._config = config

    def close(self) -> None:
        """Frees the graphs. Must be called before the process group is destroyed, because NCCL waits for them."""
        if self._captured is not None:
            self._captured.close()

    def _seed(self, step: Step) -> int:
        # Random numbers depend only on (seed, step, rank), so a resumed run draws the same as an uninterrupted one.
        return zlib.crc32(f"{self._config.run.seed} {step.index} {self._ranks.rank}".encode())

    # --- a new shape --------------------------------------------------------------------------------------------

    def _stride_shape(self, stride: Stride) -> StrideShape:
        return self.launches(stride), size_at(self._config.data, stride[0].epoch)

    def _measure(self, captured: CapturedSteps, step: Step) -> StepTiming:
        """Replays a captured step, restores the state, and returns rank 0's time on every rank."""
        device, timer = self._learner.device, StepTimer(self._learner.device)
        with preserved_state(self._learner):
            for _ in range(TURNS + 1):  # the first replay of each turn takes longer
                wait(device)
                timer.start()
                self._replay(captured, (step,), timer)
                timer.mark("micro_step")  # the time after the last mark of the graphs
                wait(device)  # synchronises: the marks are read next
                timing = share(timer.marks().timing(()), self._ranks)
                if timing.step_s > 2 * LAUNCH_S:
                    break  # too long for several steps per launch, even without the overhead of a first replay
            return timing

    def _replay(self, captured: CapturedSteps, stride: Stride, timer: StepTimer) -> None:
        launches, image_size = self._stride_shape(stride)
        for launch in launches:
            captured.replay_again(launch, image_size, timer)

    def _attempt(self, work: Callable[[], None]) -> None:
        """Runs `work`, a warm-up or a capture. If a step cannot be captured, the run continues with plain steps.

        The outcome is the same on all ranks: if a single rank used plain steps or dropped its graphs, ranks would wait
        for each other forever.
        """
        if self._captured is None:
            work()
            return
        failure = None
        try:
            with self._captured.backend.on_capture_stream():
                work()
        except NotCaptured as error:
            rank = f"rank {self._ranks.rank}: " if self._ranks.world_size > 1 else ""
            failure = isinstance(error, NoRoom), f"{rank}{error}"  # text only: the error's frames hold memory
        failures = [item for item in gather(failure, self._ranks) if item is not None]
        if reason := next((text for no_room, text in failures if not no_room), None):
            self._fall_back(self._captured, reason)
        elif failures:
            raise torch.OutOfMemoryError(failures[0][1])

    def _compile_regions(self, steps: Iterable[Step], count: Callable[[int, int], None] | None) -> None:
        """Compiles regions. If one rank fails to, all ranks run plain code, because compiled code rounds
        differently."""
        learner, regions = self._learner, self._learner.compiled
        for shape in map(self.shape, steps):
            if not isinstance(regions, CompiledRegions) or regions.failed or shape in self._compiled:
                continue
            if not self._compiled:
                reason = compile_layers(learner, ranks_per_host=self._ranks.local_size, count=count)
                self._warn_of_slow_start(reason)
            self._compiled.add(shape)
            reason = None
            with self._on_capture_stream(), preserved_state(learner):
                for images, labels in self._blank_batches(shape):
                    reason = reason or compile_regions(
                        learner, self._work, regions, images, labels, self.losses[0], count=count
                    )
            if reason := next(filter(None, gather(reason, self._ranks)), None):
                regions.give_up(reason)
                self._warnings.append(f"the model is not compiled: {reason}")

    def _blank_batches(self, shape: StepShape) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields a blank batch of each size that occurs in a step of this shape."""
        micro_batches, image_size = shape
        for samples in dict.fromkeys(part.samples for part in _ends(micro_batches)):
            yield blank_batch(self._learner, samples, image_size)

    def _on_capture_stream(self) -> contextlib.AbstractContextManager[None]:
        captured = self._captured
        return contextlib.nullcontext() if captured is None else captured.backend.on_capture_stream()

    def _compile(
        self,
        shapes: Sequence[StepShape],
        other_trials: Callable[[], None] | None,
        count: Callable[[int, int], None] | None,
    ) -> None:
        with self._on_capture_stream(), preserved_state(self._learner):
            reason = compile_kernels(
                self._learner,
                self._work,
                lambda: itertools.chain.from_iterable(map(self._blank_batches, shapes)),
                self.losses[0],
                ranks_per_host=self._ranks.local_size,
                other_trials=other_trials,
                count=count,
            )
        self._warn_of_slow_start(reason)

    def _warn_of_slow_start(self, reason: str | None) -> None:
        if reason is not None:
            self._warnings.append(f"kernels are not compiled in parallel: {reason}")

    def _warm_up(self, shape: StepShape) -> None:
        micro_batches, image_size = shape
        learner, timer, ends = self._learner, StepTimer(self._learner.device), _ends(micro_batches)
        batches = {part.samples: blank_batch(learner, part.samples, image_size) for part in ends}

        def step() -> None:
            for part in ends:
                run_launch(self._work, learner, (part,), [batches[part.samples]], self.rates, self.losses, timer)

        with preserved_state(learner):
            before = _random_state(learner.device)
            step()
            after = _random_state(learner.device)
            self._draws |= after != before
            if self._captured is not None and len(after) > 1 and after[0] != before[0]:
                raise NotCaptured(
                    RuntimeError("it uses random numbers from the CPU generator, which a graph would repeat")
                )
            # Only once: other shapes run the same code, and later the loader's threads may wait for the device.
            if self._captured is not None and not self._warmed:
                # Other buffers are tables, or results that no step reads.
                buffers = persistent_buffers(learner.model)
                try:
                    with self._captured.backend.no_synchronisation():
                        step()
                except RuntimeError as error:
                    raise NotCaptured(error) from error
                found = persistent_buffers(learner.model)
                if name := next((name for name, buffer in buffers.items() if found[name] is not buffer), None):
                    raise NotCaptured(
                        RuntimeError(
                            f"its forward replaces the buffer {name}, and a graph would keep using the old tensor"
                        )
                    )

    def _fall_back(self, captured: CapturedSteps, reason: str) -> None:
        if self._config.run.graph == "on":
            raise InputError(f"--graph on: the step cannot be captured: {reason}; repair it or use --graph auto")
        captured.drop()
        self._learner.sync.forget()
        self._captured = None
        self._learner.arena.pinned = False
        self._learner.arena.zero_grad()
        self._warnings.append(f"steps run without a CUDA graph: {reason}")


def stride_length(step_s: float, block_steps: int) -> int:
    """Returns how many steps fill a launch and leave few single steps in a block: 33 steps are 4 x 8, and 1."""
    most = max(1, min(MAX_STEPS, int(LAUNCH_S / step_s), block_steps))
    return block_steps // -(-block_steps // most)


def _ends(micro_batches: tuple[int, ...]) -> Sequence[MicroStep]:
    """Returns the first and the last micro-step. Those in between have one of these two shapes and run the same
    code."""
    return micro_steps(micro_batches)[:: max(1, len(micro_batches) - 1)]


def _random_state(device: torch.device) -> list[bytes]:
    """Returns the states of the generators that a model draws from: the CPU's and the GPU's. The host has both, so this
    does not wait for the device."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return [state.numpy().tobytes() for state in states]
