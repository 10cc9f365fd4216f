"""Exact distributed evaluation: every sample counts once, whatever the world size.

    merged batch-norm statistics (and averaged weights) -> stand-ins
    batch -> graph's inputs -> forward with the stand-ins, once per view -> sums on the device          per batch
    sums -> sum over ranks -> host                                                                      once

Training's own weights and statistics are only read. A batch is counted by plain code or, on a GPU, by a CUDA graph.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyperbatch.data.batch import Batch
from hyperbatch.data.loader import eval_batches
from hyperbatch.data.remote.store import is_address
from hyperbatch.data.source import open_eval
from hyperbatch.engine.cuda_graphs import Backend, NotCaptured, Replay
from hyperbatch.engine.ranks import Ranks, join
from hyperbatch.errors import InputError
from hyperbatch.export import load_trained
from hyperbatch.models.layers import in_evaluation, to_channels_last
from hyperbatch.models.norm import merge_over_ranks, norm_buffers, persistent_buffers
from hyperbatch.models.tta import VIEWS, plain_and_averaged
from hyperbatch.optim.averaging import WeightAverage
from hyperbatch.recipes.files import run_config

PIXELS = 2500 * 32 * 32  # of a batch on a GPU, at least: smaller ones leave it idle
MAX_CLASSES = 1024  # whose answers are counted one by one: the table has the square of them
CONFUSIONS = 20  # of the most frequent ones that are told


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The outcome of an evaluation, the same on every rank."""

    top1: float
    samples: int
    top1_plain: float | None = None  # without test-time augmentation; None: there was none
    top5: float | None = None  # the right class is among the five most probable; None: there are no more than five
    val_loss: float | None = None  # cross entropy, without label smoothing; None: nothing was evaluated

    def to_dict(self) -> dict[str, Any]:
        """Without what there is not."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class Evaluator:
    """Counts the right answers of a model, as often as it is asked: its graph and its tensors stay where they are."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        group: dist.ProcessGroup | None = None,
        average: WeightAverage | None = None,
        tta: str = "none",
        tta_share: float = 1.0,
        classes: int = 0,
    ) -> None:
        """group: the ranks that evaluate together; None: this one alone. average: evaluated in the place of the
        model's own weights. classes: how many there are, where answers are to be counted by class."""
        self._model, self._group, self._average = model, group, average
        self._tta, self._tta_share = tta, tta_share
        # Where an evaluation is: a thread looks (engine/place.py). On a GPU the host is ahead of the device.
        self.batches_done = 0
        self.waits = False  # for other ranks, or for a device that does
        # Right, right without views, right among five, seen, and the sum of losses: fp64 holds the counts exactly.
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)
        self._answers: Tensor | None = None  # [label, answer] -> samples; a last column for answers that are no class
        if 0 < classes <= MAX_CLASSES:
            self._answers = torch.zeros(classes, classes + 1, dtype=torch.int64, device=device)
        self._outputs = 0  # of the model
        own = dict(model.named_parameters()) | dict(model.named_buffers(remove_duplicate=False))
        self._stand_ins = {name: torch.zeros_like(own[name]) for name in self._sources()}
        self._at_all_places = at_all_places(model, self._stand_ins)
        self._inputs: tuple[Tensor, Tensor, Tensor] | None = None  # where the graph looks for a batch
        self._replay: Replay | None = None

    def prepare(self, batch: Batch, backend: Backend | None) -> str | None:
        """Counts a batch of the shape of those to come without a trace, so that kernels are chosen, and captures it.

        Returns why it could not be captured; evaluation then runs as plain code. No rank waits for another here.
        """
        inputs = (batch.images, batch.labels, _real(batch))
        with self._evaluating():
            if backend is None:
                self._count(*inputs)
                return None
            try:
                with backend.on_capture_stream():
                    self._count(*inputs)
                    with backend.no_synchronisation():
                        self._count(*inputs)
                    # Modules may keep what follows from their weights until `train` is called, as the tables of
                    # biases in timm's LeViT. The graph must compute it, or it would read what is freed by then.
                    self._model.train()
                    self._model.eval()
                    replay = backend.capture(partial(self._count, *inputs))
                    replay()  # the first brings the graph to the device
            except RuntimeError as error:  # of memory, too
                return str(NotCaptured(error))
        self._replay, self._inputs = replay, inputs
        return None

    def evaluate(self, batches: Iterable[Batch]) -> Score:
        """Every rank of the group calls it."""
        self.batches_done, self.waits = 0, True
        with self._evaluating():
            self._take_over()
            self.waits = False
            self._sums.zero_()
            if self._answers is not None:
                self._answers.zero_()
            for self.batches_done, batch in enumerate(batches):
                if self._replay is None or self._inputs is None:
                    self._count(batch.images, batch.labels, _real(batch))
                    continue
                for place, tensor in zip(self._inputs, (batch.images, batch.labels, _real(batch)), strict=True):
                    place.copy_(tensor, non_blocking=True)
                self._replay()
            self.waits = True
            if self._group is not None:
                dist.all_reduce(self._sums, group=self._group)  # the counts in it are exact
        # Synchronises: the accuracy decides what the run does next.
        right, right_plain, right_of_five, samples, loss = self._sums.tolist()
        if not samples:
            return Score(top1=0.0, samples=0)
        return Score(
            top1=right / samples,
            samples=int(samples),
            top1_plain=None if self._tta == "none" else right_plain / samples,
            top5=right_of_five / samples if self._outputs > 5 else None,
            val_loss=loss / samples,
        )

    def answers(self) -> Tensor | None:
        """[label, answer] -> samples of the last evaluation, on the host; None: they were not counted. The last column
        are answers of networks with more outputs than classes. Every rank of the group calls it."""
        if self._answers is None:
            return None
        answers = self._answers.clone()
        if self._group is not None:
            dist.all_reduce(answers, group=self._group)
        return answers.cpu()

    def _count(self, images: Tensor, labels: Tensor, real: Tensor) -> None:
        """real: false on padding."""

        def network(images: Tensor) -> Tensor:
            return torch.func.functional_call(self._model, self._at_all_places, (images,), tie_weights=False)

        plain, averaged = plain_and_averaged(network, images, VIEWS[self._tta], self._tta_share, real)
        answers, own = averaged.argmax(1), averaged.gather(1, labels[:, None])
        loss = averaged.logsumexp(1) - own[:, 0]
        hits = (answers == labels, plain.argmax(1) == labels, (~(averaged <= own)).sum(1) < 5)  # a nan is no hit
        counts = torch.stack([*((hit & real).sum() for hit in hits), real.sum()])
        self._sums.add_(torch.cat([counts.double(), loss.masked_fill(~real, 0.0).double().sum(0, keepdim=True)]))
        self._outputs = averaged.shape[1]
        if self._answers is not None:
            classes, columns = self._answers.shape
            places = labels * columns + answers.clamp(max=classes)
            self._answers.view(-1).index_add_(0, places, real.to(torch.int64))

    def _sources(self) -> dict[str, Tensor]:
        """What the model is evaluated with in the place of its own: this rank's statistics, or all averages.

        Of all buffers, not only of norms: training may replace the tensor that a graph would read (`self.mean = ...`).
        """
        kept = persistent_buffers(self._model)
        own = {name: buffer for name, buffer in kept.items() if buffer.is_floating_point() or buffer.is_complex()}
        return own if self._average is None else own | self._average.weights() | self._average.statistics()

    def _take_over(self) -> None:
        """Fills the stand-ins. Statistics are merged over ranks (rule 4 of docs/design.md)."""
        sources = self._sources()
        if self._group is not None:
            norms = norm_buffers(self._model)
            sources |= merge_over_ranks({name: sources[name] for name in sources if name in norms}, self._group)
        if sources:
            torch._foreach_copy_([self._stand_ins[name] for name in sources], list(sources.values()))

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        fast = torch.backends.mha.get_fastpath_enabled()
        # A layer of torch's transformer would give all its tensors to one kernel, which takes them in one dtype only.
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with in_evaluation(self._model):
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)


def at_all_places(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same for every module that holds one of the tensors (tied weights), each module under its first name.

    `functional_call` ties by name: a module that stands in several places would be changed once for each of them, and
    be left with what took the place of its parameters.
    """
    found: dict[str, Tensor] = {}
    names: dict[Tensor, str] = {}
    for prefix, module in model.named_modules():
        for name, own in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            full_name = f"{prefix}.{name}" if prefix else name
            first = names.setdefault(own, full_name)
            if first in tensors:
                found[full_name] = tensors[first]
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassScores:
    """An evaluation by class, in the order of the classes."""

    samples: tuple[int, ...]
    right: tuple[int, ...]
    confusions: tuple[tuple[int, int, int], ...]  # (label, answer, samples), the most frequent first
    to_dict = asdict

    @classmethod
    def of(cls, answers: Tensor) -> Self:
        """answers: [label, answer] -> samples, as `Evaluator.answers` has them."""
        wrong = answers[:, : len(answers)].clone().fill_diagonal_(0)
        most = wrong.reshape(-1).sort(descending=True, stable=True)
        pairs = zip(most.indices[:CONFUSIONS].tolist(), most.values[:CONFUSIONS].tolist(), strict=True)
        return cls(
            samples=tuple(answers.sum(1).tolist()),
            right=tuple(answers.diagonal().tolist()),
            confusions=tuple((*divmod(place, len(answers)), count) for place, count in pairs if count),
        )


def _real(batch: Batch) -> Tensor:
    return torch.ones_like(batch.labels, dtype=torch.bool) if batch.mask is None else batch.mask


def eval_limit(training_batch_per_rank: int, image_size: int, device: torch.device) -> int:
    """Samples that evaluation takes at once: it keeps no activations, so training's batch always fits."""
    return max(training_batch_per_rank, PIXELS // image_size**2 if device.type == "cuda" else 0)


def even_batch(samples: int, world_size: int, limit: int) -> int:
    """The largest batch within the limit that leaves the least padding: 10,000 samples in batches of at most 3,000 are
    four of 2,500."""
    per_rank = max(1, -(-samples // world_size))
    return -(-per_rank // -(-per_rank // limit))


def _data_of_run(path: Path, given: str | None) -> str | None:
    """Where the data of a run lies that was started in another folder with a relative path; None: as it was given."""
    if given is None or is_address(given) or Path(given).exists():
        return None
    config = run_config(path if path.is_dir() else path.parent.parent)  # RUN/checkpoints/FILE
    return None if config is None else config.data.data


def evaluate_checkpoint(
    path: Path,
    *,
    data: str | None = None,
    device: str = "auto",
    tta: str | None = None,
    averaged: bool = True,
    trust_code: bool = False,
) -> dict[str, Any]:
    """Accuracy on the validation set of a checkpoint, a run's newest one, or an exported file, in one process.

    tta: None: as the run evaluates. averaged: the averaged weights of a run that has some to be evaluated by.
    trust_code: a model or data set of somebody's own may be imported.
    """
    trained = load_trained(path, averaged=averaged)
    trained.check_trust(trust_code, data=True)
    config = trained.config
    data = data or _data_of_run(path, config.data.data)
    if data is not None:
        config = config.override(data=data)
    if tta is not None:
        config = config.override(tta=tta)
    with join(Ranks(), device, config.run.timeout_s) as place:
        eval_set = open_eval(config.data)
        if tuple(eval_set.classes) != trained.classes:
            raise InputError(
                f"the {len(eval_set.classes)} classes of the data set differ from those of the checkpoint; check --data"
            )
        model = trained.build(trust_code=trust_code)
        dtype = torch.float64 if config.optim.precision == "fp64" else torch.float32
        to_channels_last(model.to(place))
        if dtype == torch.float64:
            model.double()
        bad_samples: list[str] = []
        batches = eval_batches(
            eval_set,
            config.data,
            # As a run on one GPU does: which images are the least certain of a batch depends on it (tta_share).
            batch_per_rank=config.run.eval_batch_per_rank
            or even_batch(len(eval_set), 1, max(256, PIXELS // config.data.eval_size**2)),
            rank=0,
            world_size=1,
            device=place,
            dtype=dtype,
            bad_samples=bad_samples,
        )
        evaluator = Evaluator(
            model, place, tta=config.run.tta, tta_share=config.run.tta_share, classes=len(trained.classes)
        )
        score = evaluator.evaluate(batches)
        answers = evaluator.answers()
    return {
        "checkpoint": str(path),
        "step": trained.step,
        **score.to_dict(),
        "classes": list(trained.classes),
        "by_class": {} if answers is None else ClassScores.of(answers).to_dict(),
        "tta": config.run.tta,
        "weights": trained.which,
        "warnings": list(dict.fromkeys(bad_samples)),
    }
