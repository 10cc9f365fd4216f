"""Exact distributed evaluation: every sample counts once, for any world size.

    merged batch-norm statistics (and averaged weights) -> stand-ins
    batch -> graph's inputs -> forward with the stand-ins, once per view -> sums on the device          per batch
    sums -> sum over ranks -> host                                                                      once

Evaluation only reads the weights and statistics of training. Plain code or, on a GPU, a CUDA graph counts each batch.
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
from hyperbatch.data.source import class_difference, open_eval
from hyperbatch.engine.cuda_graphs import Backend, NotCaptured, Replay
from hyperbatch.engine.ranks import Ranks, join
from hyperbatch.errors import InputError
from hyperbatch.export import load_trained
from hyperbatch.models.layers import in_evaluation, to_channels_last
from hyperbatch.models.norm import merge_over_ranks, persistent_buffers
from hyperbatch.models.tta import VIEWS, plain_and_averaged
from hyperbatch.optim.averaging import WeightAverage
from hyperbatch.recipes.files import run_config

PIXELS = 2500 * 32 * 32  # least size of a batch on a GPU; smaller ones leave it idle
MAX_CLASSES = 1024  # answers are counted by class up to here; the table has the square of this number of entries
CONFUSIONS = 20  # number of the most frequent confusions that are reported


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The outcome of an evaluation, the same on every rank."""

    top1: float
    samples: int
    top1_plain: float | None = None  # without test-time augmentation; None if there was no augmentation
    top5: float | None = None  # the right class is among the five most probable; None: there are at most five classes
    val_loss: float | None = None  # cross entropy, without label smoothing; None: nothing was evaluated

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that are not None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class Evaluator:
    """Counts the right answers of a model. It can be used repeatedly: its graph and its tensors are kept."""

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
        """group: the ranks that evaluate together; None: this one alone. average: evaluated instead of the model's own
        weights. classes: their number, if answers are to be counted by class; 0: they are not."""
        self._model, self._group, self._average = model, group, average
        self._tta, self._tta_share = tta, tta_share
        # The progress of an evaluation; a thread reads it (engine/place.py). On a GPU the host is ahead of the device.
        self.batches_done = 0
        self.waits = False  # for other ranks, or for a device that waits for them
        # Right answers, those without augmentation, those among the top five, samples, and the sum of losses. fp64
        # represents the counts exactly.
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)
        self._answers: Tensor | None = None  # [label, answer] -> samples; the last column: answers that are no class
        if 0 < classes <= MAX_CLASSES:
            self._answers = torch.zeros(classes, classes + 1, dtype=torch.int64, device=device)
        self._outputs = 0  # number of the model's outputs
        own = dict(model.named_parameters()) | dict(model.named_buffers(remove_duplicate=False))
        self._stand_ins = {name: torch.zeros_like(own[name]) for name in self._sources()}
        self._at_all_places = at_all_places(model, self._stand_ins)
        self._inputs: tuple[Tensor, Tensor, Tensor] | None = None  # the tensors from which the graph reads a batch
        self._replay: Replay | None = None

    def prepare(self, batch: Batch, backend: Backend | None) -> str | None:
        """Counts a batch of the shape of later ones, so that kernels are chosen, and captures this in a CUDA graph.

        Later results do not contain this batch. Returns the reason if the capture fails; evaluation then runs as plain
        code. No rank waits for another here.
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
                    # Until `train` is called, modules may cache tensors that they compute from their weights, such as
                    # the bias tables of timm's LeViT. The graph must compute them, or it would read freed memory.
                    self._model.train()
                    self._model.eval()
                    replay = backend.capture(partial(self._count, *inputs))
                    replay()  # the first replay sends the graph to the device
            except RuntimeError as error:  # this includes lack of memory
                return str(NotCaptured(error))
        self._replay, self._inputs = replay, inputs
        return None

    def evaluate(self, batches: Iterable[Batch]) -> Score:
        """Evaluates the batches. Every rank of the group must call it."""
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
        """Returns a table [label, answer] -> samples of the last evaluation, on the host; None if it was not counted.

        The last column counts answers that are no class, of networks with more outputs than classes. Every rank of the
        group must call it.
        """
        if self._answers is None:
            return None
        answers = self._answers.clone()
        if self._group is not None:
            dist.all_reduce(answers, group=self._group)
        return answers.cpu()

    def _count(self, images: Tensor, labels: Tensor, real: Tensor) -> None:
        """Adds a batch to the sums. real: False for padding."""

        def network(images: Tensor) -> Tensor:
            return torch.func.functional_call(self._model, self._at_all_places, (images,), tie_weights=False)

        plain, averaged = plain_and_averaged(network, images, VIEWS[self._tta], self._tta_share, real)
        answers, own = averaged.argmax(1), averaged.gather(1, labels[:, None])
        loss = averaged.logsumexp(1) - own[:, 0]
        # Of equal logits, which are frequent in 16 bits, the first is the higher, as in argmax. A nan is no hit.
        earlier = torch.arange(averaged.shape[1], device=averaged.device) < labels[:, None]
        higher = ~(averaged <= own) | ((averaged == own) & earlier)
        hits = (answers == labels, plain.argmax(1) == labels, higher.sum(1) < 5)
        counts = torch.stack([*((hit & real).sum() for hit in hits), real.sum()])
        self._sums.add_(torch.cat([counts.double(), loss.masked_fill(~real, 0.0).double().sum(0, keepdim=True)]))
        self._outputs = averaged.shape[1]
        if self._answers is not None:
            classes, columns = self._answers.shape
            places = labels * columns + answers.clamp(max=classes)
            self._answers.view(-1).index_add_(0, places, real.to(torch.int64))

    def _sources(self) -> dict[str, Tensor]:
        """Returns the tensors whose values replace the model's own in evaluation: its buffers and, if there is an
        average, the averaged weights and statistics.

        This includes all floating-point buffers, not only those of norm layers, because training may replace a tensor
        that a graph would read (`self.mean = ...`).
        """
        kept = persistent_buffers(self._model)
        own = {name: buffer for name, buffer in kept.items() if buffer.is_floating_point() or buffer.is_complex()}
        return own if self._average is None else own | self._average.weights() | self._average.statistics()

    def _take_over(self) -> None:
        """Copies the sources to the stand-ins. Statistics are merged over ranks (rule 4 of docs/design.md)."""
        sources = self._sources()
        if self._group is not None:
            # By name, as checkpoints do, so that an evaluation of a checkpoint has the same result.
            buffers = persistent_buffers(self._model)
            sources |= merge_over_ranks({name: sources[name] for name in sources if name in buffers}, self._group)
        if sources:
            torch._foreach_copy_([self._stand_ins[name] for name in sources], list(sources.values()))

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        fast = torch.backends.mha.get_fastpath_enabled()
        # On its fast path, a layer of torch's transformer passes all its tensors to one kernel, which needs one dtype.
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with in_evaluation(self._model):
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)


def at_all_places(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors by name, with an entry for every module that shares one of them (tied weights). A module that
    the model contains several times is listed under its first name only.

    `functional_call` ties tensors by name: it would swap the tensors of such a module once for each of its names, and
    afterwards leave the replacements in the module.
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
        """answers: [label, answer] -> samples, as `Evaluator.answers` returns them."""
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
    """Returns how many samples are evaluated at once. As no activations are kept, a training batch always fits."""
    return max(training_batch_per_rank, PIXELS // image_size**2 if device.type == "cuda" else 0)


def even_batch(samples: int, world_size: int, limit: int) -> int:
    """Returns the batch within the limit that needs the fewest batches and then the least padding: 10,000 samples with
    a limit of 3,000 are four batches of 2,500."""
    per_rank = max(1, -(-samples // world_size))
    return -(-per_rank // -(-per_rank // limit))


def _data_of_run(path: Path, given: str | None) -> str | None:
    """Returns the absolute path to the data of a run that was started in another folder with a relative path; None if
    the path can be used as given."""
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
    """Evaluates a checkpoint, a run's newest checkpoint, or an exported file on the validation set, in one process.

    tta: None uses the run's setting. averaged: whether to evaluate the averaged weights if the run has some.
    trust_code: whether a model or data set that is defined in a user's own code may be imported.
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
            told = class_difference(trained.classes, eval_set.classes, ("in the checkpoint", "in the data set"))
            raise InputError(
                f"the {len(eval_set.classes)} classes of the data set differ from those of the checkpoint ({told}); "
                "check --data"
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
            # The batch of a run on one GPU: it determines which images are the least certain of a batch (tta_share).
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
