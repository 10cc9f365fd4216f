"""The workload that a prediction is made for: a recipe, its batch over a number of ranks, its layers and tensors."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral

from hyperbatch.config import Config
from hyperbatch.errors import InputError, check_kind, shown
from hyperbatch.plan import fit
from hyperbatch.plan.clusters import load_cluster
from hyperbatch.plan.compute import LayerTime, layer_times
from hyperbatch.plan.fit import StepMemory, fitting_batch
from hyperbatch.plan.inventory import ask_for, kept_bytes, model_names, tensors, usual_data
from hyperbatch.plan.machine import Cluster
from hyperbatch.plan.types import TensorSpec
from hyperbatch.recipes import all_recipes, find_recipe
from hyperbatch.schedule import FULL_SIZE, Phase, resolve_phases, size_spans
from hyperbatch.vocabulary import PRECISION_DTYPE, TIMM_MODEL

MODEL_BATCH = 256  # per rank, for a model without a recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A run to predict. `written_for`: the largest global batch for which its number of epochs was stated."""

    original: Config  # the config before its batch was changed
    config: Config
    cluster: Cluster
    ranks: int
    written_for: int
    notes: tuple[str, ...]


def resolve(
    recipe: str | Config,
    cluster: str | Cluster | None,
    gpus: int | None,
    *,
    model: str | None = None,
    global_batch: int | None = None,
    batch_per_rank: int | None = None,
) -> Request:
    """Resolves names to values, and the batch to one that can be divided by the ranks.

    A recipe names the cluster and size of its claim, so both arguments may be omitted. The name of a model stands for a
    run with the defaults of `train`. model: replaces the recipe's. A requested batch must be divisible by the ranks;
    the recipe's own is changed to the nearest one that is.
    """
    check_kind("recipe", recipe, (str, Config), "give the name of a recipe or of a model, or a Config")
    known = find_recipe(recipe) if isinstance(recipe, str) and not is_model(recipe) else None
    ranks = gpus if gpus is not None else (known.ranks if known else 1)
    for flag, value in (("--gpus", ranks), ("--global-batch", global_batch), ("--batch-per-rank", batch_per_rank)):
        if value is not None and not isinstance(value, Integral):
            raise InputError(f"{flag} {shown(value)}: must be a whole number")
        if value is not None and value < 1:
            raise InputError(f"{flag} {value}: must be at least 1")
    ranks = int(ranks)  # it may be numpy's, which json cannot write
    if batch_per_rank is not None:
        if global_batch is not None:
            raise InputError("give --batch-per-rank or --global-batch, not both")
        global_batch = batch_per_rank * ranks

    notes = []
    if known is not None:
        original, config = known.config(), known.config(global_batch)
    else:
        original = config_of(recipe, MODEL_BATCH * ranks) if isinstance(recipe, str) else recipe
        config = original if global_batch is None else original.override(global_batch=global_batch)
        if isinstance(recipe, str):
            batch = f" and {MODEL_BATCH} images a rank" if global_batch is None else ""
            notes.append(f"{recipe} is a model and not a recipe: the defaults of `train`{batch} are assumed")
    if model is not None:
        config = config.override(model=model)
    ask_for(config.model.model)
    if not isinstance(cluster, Cluster):
        cluster = load_cluster(cluster or (known.cluster if known else "local"))
    config = config.with_precision("fp16")  # `auto` means 16 bits, and both 16-bit formats cost the same
    written_for = max(phase.global_batch for phase in original.schedule.batch_phases)
    if known is not None and "global_batch" in inspect.signature(known.build).parameters:
        # A recipe of MLPerf's table has the rate and the epochs of the row for this batch.
        written_for = config.schedule.lr_batch or config.global_batch
    if global_batch is None:
        first, phases = config.global_batch, config.schedule.batch_phases
        fitted = tuple(p._replace(global_batch=max(1, round(p.global_batch / ranks)) * ranks) for p in phases)
        if fitted != phases:
            config = config.override(batch_phases=fitted, lr_batch=config.schedule.lr_batch or first)
            notes.append(
                f"global batch {first:,} cannot be divided by {ranks:,} ranks; {fitted[0].global_batch:,} is used"
            )
    if ranks > cluster.devices:
        notes.append(f"{cluster.name} has {cluster.devices:,} devices; {ranks:,} are simulated")
    return Request(
        original=original, config=config, cluster=cluster, ranks=ranks, written_for=written_for, notes=tuple(notes)
    )


def is_model(name: str) -> bool:
    """Whether a name that may be a recipe's is that of a model: one of timm's, or a built-in model without a recipe."""
    return name.startswith(TIMM_MODEL) or (name in model_names() and name not in all_recipes())


def config_of(model: str, global_batch: int) -> Config:
    """The config of a model without a recipe: the defaults of `train`, with data of the model's usual size."""
    image_size, classes = usual_data(model)
    data = {"image_size": image_size, "eval_size": image_size, "eval_resize": image_size, "classes": classes}
    if image_size < FULL_SIZE:
        data |= {"train_samples": 50_000, "eval_samples": 10_000}  # CIFAR-10's
    return Config(recipe=model).override(model=model, **data, global_batch=global_batch, precision="auto")


def resolve_all(
    config: Config, memory_bytes: float | None, ranks: int, channels: int | None = None
) -> tuple[Phase, ...]:
    """Divides every batch phase over the ranks, in micro-steps that fit a device's memory. None: no limit is known."""
    return resolve_phases(
        config.schedule.batch_phases,
        config.data.train_samples,
        ranks,
        accumulate=config.run.accumulate,
        max_batch_per_rank=None if memory_bytes is None else largest_batch(config, memory_bytes, channels),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpan:
    """A part of a run in which neither the batch nor the image size changes."""

    from_position: float
    to_position: float
    phase: Phase
    image_size: int

    @property
    def steps(self) -> float:
        return (self.to_position - self.from_position) / self.phase.global_batch

    @property
    def pixels(self) -> float:
        return (self.to_position - self.from_position) * self.image_size**2


def run_spans(config: Config, phases: Sequence[Phase], epochs: float | None = None) -> list[RunSpan]:
    """Divides the run where its batch or its image size changes.

    epochs: the length of a run that is longer or shorter than the recipe. Its image sizes keep their fractions of the
    run, as in `train --epochs`; its batch phases keep their epochs.
    """
    samples, planned = config.data.train_samples, config.schedule.epochs
    end = (planned if epochs is None else epochs) * samples
    sizes = [(span.from_epoch / planned * end, span.image_size) for span in size_spans(config)]
    starts = {*(phase.from_position for phase in phases), *(start for start, _ in sizes)}
    return [
        RunSpan(
            from_position=start,
            to_position=stop,
            phase=next(phase for phase in reversed(phases) if phase.from_position <= start),
            image_size=next(size for first, size in reversed(sizes) if first <= start),
        )
        for start, stop in pairwise([*sorted(start for start in starts if start < end), end])
    ]


def main_span(spans: Sequence[RunSpan]) -> RunSpan:
    """The part with most pixels. If all images have one size, this is the part with most epochs."""
    return max(spans, key=lambda span: span.pixels)


def at_size(config: Config, image_size: int) -> Config:
    """The same run with images of one size throughout."""
    return config.override(image_size=image_size, size_phases=())


def largest_batch(config: Config, memory_bytes: float, channels: int | None = None) -> int:
    """The number of samples in one micro-step that fits a device with this much memory."""
    fixed, one = (step_memory(config, batch, channels).total for batch in (0, 1))
    return fitting_batch(memory_bytes, fixed, one - fixed)


def step_memory(config: Config, batch_per_rank: int, channels: int | None = None) -> StepMemory:
    """The memory of one rank in a micro-step with this many samples of the run's largest images."""
    model, dtype = config.model.model, PRECISION_DTYPE[config.optim.precision]
    kept = kept_bytes(model, dtype, **_shape(config, channels) | {"image_size": config.data.largest_image_size})
    return fit.step_memory(model_tensors(config, channels), batch_per_rank * kept, config.optim.optimizer)


def model_tensors(config: Config, channels: int | None = None) -> tuple[TensorSpec, ...]:
    return tensors(config.model.model, dtype=PRECISION_DTYPE[config.optim.precision], **_shape(config, channels))


def model_times(cluster: Cluster, config: Config, batch_per_rank: int) -> list[LayerTime]:
    """The layer times of a step with images of `image_size`."""
    return layer_times(cluster, config.model.model, batch_per_rank, config.optim.precision, **_shape(config))


def image_channels(config: Config) -> int:
    """The handwritten digits have one channel; all other data of the recipes have three."""
    return 1 if config.data.dataset == "digits" else 3


def _shape(config: Config, channels: int | None = None) -> dict[str, int]:
    """channels: those of the user's data; None: those of the data that the recipe is for."""
    return {
        "classes": config.data.classes,
        "image_size": config.data.image_size,
        "in_channels": channels or image_channels(config),
    }
