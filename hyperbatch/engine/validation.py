"""A run's validation set: its batches, and the evaluator that counts the right answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

from hyperbatch.config import Config
from hyperbatch.data.batch import Batch
from hyperbatch.data.loader import eval_batches
from hyperbatch.data.source import ArraySource, Source
from hyperbatch.engine.cuda_graphs import Backend, CudaGraphs
from hyperbatch.engine.evaluate import ClassScores, Evaluator, Score, eval_limit, even_batch
from hyperbatch.engine.learner import Learner
from hyperbatch.engine.ranks import Ranks

KEPT_BYTES = 256 << 20  # batches up to this total size stay in memory


class Validation:
    """Call `prepare` before the run's time starts, then `evaluate` as often as needed, also in later runs of the
    learner."""

    def __init__(self, config: Config, ranks: Ranks, learner: Learner, source: Source, batch_per_rank: int) -> None:
        """batch_per_rank: samples of a training micro-step, which fit into memory."""
        self._config, self._ranks, self._learner, self._source = config, ranks, learner, source
        memory = learner.graph_memory
        self.backend: Backend | None = None if memory is None else CudaGraphs(learner.device, memory)
        self._batch_per_rank = config.run.eval_batch_per_rank or even_batch(
            len(source), ranks.world_size, eval_limit(batch_per_rank, config.data.eval_size, learner.device)
        )
        self._kept: list[Batch] | None = None
        self._prepared = False
        self.bad_samples: list[str] = []  # lines about images that this rank could not read, in the last evaluation
        self.evaluator = Evaluator(
            learner.model,
            learner.device,
            group=learner.comm.world,
            average=learner.average if config.optim.averaging == "ema" else None,
            tta=config.run.tta,
            tta_share=config.run.tta_share,
            classes=len(source.classes),
        )
        self._evaluated = False

    def prepare(self, *, capture: bool) -> str | None:
        """Prepares the batches that stay in memory, chooses kernels, and captures the evaluation in a CUDA graph.
        Returns the reason if the capture fails."""
        if self._prepared:
            return None
        self._prepared = True
        learner, size = self._learner, self._config.data.eval_size
        image_bytes = size * size * learner.in_channels * learner.dtype.itemsize
        if isinstance(self._source, ArraySource) and len(self._source) * image_bytes <= KEPT_BYTES:
            self._kept = list(self._batches())
        backend = self.backend if capture else None
        if backend is None and learner.device.type != "cuda":
            return None
        return self.evaluator.prepare(self._blank_batch(), backend)

    def rehearse(self) -> None:
        """Counts a blank batch, so that cuDNN has chosen its kernels before `prepare`. Errors are ignored, because
        `prepare` encounters them again."""
        if not self._prepared:
            with contextlib.suppress(RuntimeError):  # this includes lack of memory
                self.evaluator.prepare(self._blank_batch(), None)

    def _blank_batch(self) -> Batch:
        learner, size = self._learner, self._config.data.eval_size
        shape = (self._batch_per_rank, size, size, learner.in_channels)
        images = torch.zeros(shape, dtype=learner.dtype, device=learner.device).permute(0, 3, 1, 2)
        labels = torch.zeros(self._batch_per_rank, dtype=torch.int64, device=learner.device)
        return Batch(images, labels)

    def evaluate(self) -> Score:
        """Evaluates the validation set. Every rank must call it."""
        self.bad_samples, self._evaluated = [], True
        return self.evaluator.evaluate(self._batches() if self._kept is None else self._kept)

    def by_class(self) -> ClassScores | None:
        """Returns the last evaluation by class; None without an evaluation or with too many classes. Every rank must
        call it."""
        answers = self.evaluator.answers() if self._evaluated else None
        return None if answers is None else ClassScores.of(answers)

    def close(self) -> None:
        """Frees the graph."""
        if self.backend is not None:
            self.backend.close()

    def _batches(self) -> Iterable[Batch]:
        return eval_batches(
            self._source,
            self._config.data,
            batch_per_rank=self._batch_per_rank,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            device=self._learner.device,
            dtype=self._learner.dtype,
            ranks_per_host=self._ranks.local_size,
            bad_samples=self.bad_samples,
        )
