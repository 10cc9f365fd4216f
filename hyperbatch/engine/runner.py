"""Runs the micro-steps of a learner: as plain code, or as replays of CUDA graphs (engine/cuda_graphs.py).

before the run:        every shape ahead is warmed up (nothing is kept): choosing and compiling kernels is slow
a shape's first step:  its micro-steps are captured, where steps are captured
every step:            batch -> micro-step -> loss, already updated weights
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial

import torch

from hyperbatch.config import Config
from hyperbatch.data.augment import size_at
from hyperbatch.data.batch import Batch
from hyperbatch.engine.cuda_graphs import Backend, CapturedSteps, CudaGraphs, NoRoom, NotCaptured, StepShape
from hyperbatch.engine.learner import Learner
from hyperbatch.engine.ranks import Ranks, gather
from hyperbatch.engine.step import MicroStep, Work, blank_batch, micro_steps
from hyperbatch.engine.steptimer import StepTimer
from hyperbatch.engine.warmup import compile_kernels, preserved_state
from hyperbatch.errors import InputError
from hyperbatch.schedule import Step


class StepRunner:
    """`prepare` a step whose shape is new (`is_ready` says so), then `run` each of its micro-steps."""

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
        """work: what a micro-step does. warnings: gets the reason when steps cannot be captured.

        warm: run shapes without a trace before they count; None: on GPUs.
        """
        self._learner, self._work, self._config, self._ranks, self._warnings = learner, work, config, ranks, warnings
        self._warm = learner.device.type == "cuda" if warm is None else warm
        dtype = torch.promote_types(learner.dtype, torch.float32)
        self.total = torch.zeros((), dtype=dtype, device=learner.device)  # this step's loss
        if backend is None and learner.capturable:
            backend = CudaGraphs(learner.device)
        self._captured = None if backend is None else CapturedSteps(backend, learner, work, self.total)
        self._warmed: set[StepShape] = set()

    @property
    def captures(self) -> bool:
        return self._captured is not None

    def is_ready(self, step: Step) -> bool:
        """Whether the step can run at once."""
        return self._captured is None or self._shape(step) in self._captured.shapes

    def warm_up(self, steps: Iterable[Step]) -> None:
        """Runs steps of these shapes without a trace: kernels are chosen and compiled, communicators opened."""
        for shape in map(self._shape, steps):
            if self._warm and shape not in self._warmed:
                self._attempt(partial(self._warm_up, shape))
                self._warmed.add(shape)

    def prepare(self, step: Step) -> None:
        """Captures the step's shape. A capture that fails leaves the run plain, with a warning."""
        self.warm_up([step])
        captured = self._captured
        if captured is None:
            return
        capture, fits = partial(captured.capture, self._shape(step)), False
        with contextlib.suppress(torch.OutOfMemoryError) if captured.graphs else contextlib.nullcontext():
            self._attempt(capture)
            fits = True
        if not fits:
            # Other shapes' graphs hold the memory that this one needs: they are captured anew if they come again.
            captured.drop()
            self._attempt(capture)
        if self.captures:
            self._learner.sync.check()  # a graph would go on using what some ranks alone use
            self._learner.arena.pinned = True

    def run(self, part: MicroStep, batch: Batch, timer: StepTimer) -> None:
        """One micro-step whose batch is there."""
        if self._captured is None:
            self._work(self._learner, part, batch.images, batch.labels, self.total, timer)
        else:
            self._captured.replay(part, batch, timer)

    def follow(self, config: Config) -> None:
        """For a further run of the learner, whose config differs in what no captured step holds (engine/session.py)."""
        self._config = config

    def close(self) -> None:
        """Lets the graphs go. Whoever destroys the process group does this first: NCCL waits for them."""
        if self._captured is not None:
            self._captured.close()

    # --- a new shape --------------------------------------------------------------------------------------------

    def _shape(self, step: Step) -> StepShape:
        return step.phase.micro_batches, size_at(self._config.data, step.epoch)

    def _attempt(self, work: Callable[[], None]) -> None:
        """Warms up or captures; where steps are captured and this one cannot be, the run goes on plain.

        The outcome is the same on all ranks: one that fell back, or dropped its graphs, alone would later wait alone.
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
            failure = isinstance(error, NoRoom), f"{rank}{error}"  # a text: the error's frames hold what was allocated
        failures = [item for item in gather(failure, self._ranks) if item is not None]
        if reason := next((text for no_room, text in failures if not no_room), None):
            self._fall_back(self._captured, reason)
        elif failures:
            raise torch.OutOfMemoryError(failures[0][1])

    def _warm_up(self, shape: StepShape) -> None:
        micro_batches, image_size = shape
        learner, timer = self._learner, StepTimer(self._learner.device)
        # The first and the last: those between them have the shape of one of the two and run nothing else.
        ends = micro_steps(micro_batches)[:: max(1, len(micro_batches) - 1)]
        batches = {part.samples: blank_batch(learner, part.samples, image_size) for part in ends}

        def step() -> None:
            for part in ends:
                self._work(learner, part, *batches[part.samples], self.total, timer)

        with preserved_state(learner):
            # Norms over ranks exchange sums in forward: a rank that fails to compile would leave the others waiting.
            if learner.fused and self._config.model.bn_group_ranks == 1:
                for images, labels in batches.values():
                    reason = compile_kernels(
                        learner, self._work, images, labels, self.total, ranks_per_host=self._ranks.local_size
                    )
                    if reason is not None:
                        self._warnings.append(f"kernels are compiled one after the other: {reason}")
            step()
            # Once: other shapes run the same code, and later the loader's threads wait for the device as they may.
            if self._captured is not None and not self._warmed:
                try:
                    with self._captured.backend.no_synchronisation():
                        step()
                except RuntimeError as error:
                    raise NotCaptured(error) from error

    def _fall_back(self, captured: CapturedSteps, reason: str) -> None:
        if self._config.run.graph == "on":
            raise InputError(f"--graph on: the step cannot be captured: {reason}; repair it or use --graph auto")
        captured.drop()
        self._learner.sync.forget()
        self._captured = None
        self._learner.arena.pinned = False
        self._learner.arena.zero_grad()
        self._warnings.append(f"steps run without a CUDA graph: {reason}")
