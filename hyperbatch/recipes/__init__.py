"""The recipes. A recipe is a function that returns a full config and states its claim, its source and its command.

Each published system has one file; the other recipes are in `everyday.py`, `speedrun.py`, `fast.py` and `mlperf.py`.
`recipe` registers a function under its name.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from hyperbatch.config import Config, SizePhase, format_value
from hyperbatch.errors import InputError, check_kind, check_whole, nearest

DEFAULT = "digits"

# The order of the list: everyday recipes first, then published systems by year.
MODULES = (
    "everyday",
    "speedrun",
    "fast",
    "mlperf",
    "krizhevsky",
    "amazon",
    "facebook",
    "pfn",
    "you",
    "tencent",
    "sony",
    "nvidia",
    "google",
    "fujitsu",
    "wightman",
    "liu",
    "beyer",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A recipe's claim and its sources.

    chosen: what the source does not state, and what the recipe uses instead.
    batches: the global batches for which the figures hold; if empty, only the recipe's first batch.
    record: the folder under records/ whose runs support the claim. published: whether others have published the claim.
    data: the address of the data set, if anyone may download it.
    """

    name: str
    claim: str
    source: str
    chosen: tuple[str, ...]
    ranks: int
    cluster: str
    build: Callable[..., Config]
    batches: tuple[int, ...] = ()
    record: str = ""
    published: bool = True
    data: str = ""

    @property
    def evidence(self) -> str:
        """The kind of evidence for the claim."""
        if self.record:
            return f"measured here: records/{self.record}"
        return "published only: not reproduced here" if self.published else "not measured yet"

    @property
    def standing(self) -> str:
        """The kind of evidence in one or two words."""
        return "measured" if self.record else "published" if self.published else "none yet"

    @property
    def command(self) -> str:
        data = "" if self.name == DEFAULT else " --data DIR"
        start = " --init-from FILE" if self.name == "finetune" else ""
        return f"hyperbatch train {self.name}{data}{start}"

    @property
    def notes(self) -> str:
        return inspect.getdoc(self.build) or ""

    def config(self, global_batch: int | None = None) -> Config:
        """Returns the full config. A recipe whose values depend on the batch (MLPerf's table) is given the batch."""
        if global_batch is not None and "global_batch" in inspect.signature(self.build).parameters:
            check_whole("global_batch", global_batch)
            return self._built(global_batch=int(global_batch))
        config = self._built()
        return config if global_batch is None else config.override(global_batch=global_batch)

    def with_values(self, values: Mapping[str, Any]) -> Config:
        """Returns the config with fields replaced by name. `global_batch` may be among them."""
        fields = dict(values)
        global_batch = fields.pop("global_batch", None)
        if global_batch is not None and "batch_phases" in fields:
            raise InputError("batch_phases sets the batch of every phase; leave out global_batch")
        return adapted(self.config(global_batch), fields)

    def _built(self, **arguments: int) -> Config:
        try:
            inspect.signature(self.build).bind(**arguments)
        except (TypeError, ValueError) as error:
            raise InputError(f"recipe {self.name!r} cannot be called: {error}; only global_batch is given") from error
        config = self.build(**arguments)
        if not isinstance(config, Config):
            raise InputError(f"recipe {self.name!r} returned a {type(config).__name__}; it must return a Config")
        return config

    def batch_note(self, config: Config) -> str | None:
        """Returns a line if the config's batch is none of those for which the recipe's figures hold."""
        known = self.batches or (self.build().global_batch,)
        if config.global_batch in known:
            return None
        near = min(known, key=lambda batch: abs(math.log(batch / config.global_batch)))
        how = {"none": "is kept", "linear": "is scaled linearly", "sqrt": "is scaled by the square root"}
        return (
            f"{self.name} was tuned for a global batch of {near:,}. At {config.global_batch:,}, its learning rate "
            f"{how[config.schedule.lr_scaling]}, and the accuracy that it reaches is not known"
        )

    def eval_note(self, config: Config) -> str | None:
        """Returns a line if only the size of the training images was changed. timm's --img-size sets both."""
        own, data = self.config().data, config.data
        if data.image_size == own.image_size or (data.eval_size, data.eval_resize) != (own.eval_size, own.eval_resize):
            return None
        whole = data.dataset != "images"  # no crop is taken, so --eval-resize does not count
        resize = "" if whole else f" --eval-resize {round(own.eval_resize / own.eval_size * data.image_size)}"
        return (
            f"training images have {data.image_size} px and evaluation images {data.eval_size} px; "
            f"--eval-size {data.image_size}{resize} evaluates at the size of training"
        )

    def size_note(self, config: Config) -> str | None:
        """Returns a line if the size phases of the config were moved to other epochs than the recipe's."""
        own = self.config()
        before, now = own.schedule.epochs, config.schedule.epochs
        phases = config.data.size_phases
        if now == before or not phases or phases != stretched(own.data.size_phases, now / before):
            return None
        return (
            f"image sizes change at the same fractions of the run as in {self.name} ({before:g} epochs): "
            f"--size-phases {format_value(phases)}"
        )


_registry: dict[str, Recipe] = {}


def recipe(
    *,
    claim: str,
    source: str,
    chosen: tuple[str, ...] = (),
    ranks: int = 1,
    cluster: str = "local",
    batches: tuple[int, ...] = (),
    record: str = "",
    published: bool = True,
    data: str = "",
) -> Callable[[Callable[..., Config]], Callable[..., Config]]:
    """Registers the decorated function. `ranks` and `cluster` are those of the claim."""

    def register(build: Callable[..., Config]) -> Callable[..., Config]:
        name = build.__name__
        _registry[name] = Recipe(
            name=name,
            claim=claim,
            source=source,
            chosen=chosen,
            ranks=ranks,
            cluster=cluster,
            build=build,
            batches=batches,
            record=record,
            published=published,
            data=data,
        )
        return build

    return register


def all_recipes() -> dict[str, Recipe]:
    for module in MODULES:
        importlib.import_module(f"{__name__}.{module}")
    # Modules import each other, so the order of registration is not that of the list. Custom recipes come last.
    order = {f"{__name__}.{module}": i for i, module in enumerate(MODULES)}
    return dict(sorted(_registry.items(), key=lambda item: order.get(item[1].build.__module__, len(order))))


def published_data(config: Config) -> str:
    """Returns the address of the data set of a built-in recipe; "" if it has none, or if the config uses other data."""
    known = all_recipes().get(config.recipe)
    return known.data if known and known.config().data.dataset == config.data.dataset else ""


def find_recipe(name: str) -> Recipe:
    """Returns a built-in recipe by name, or a custom one given as package.module:function."""
    if ":" in name:
        from hyperbatch.errors import load_object

        build = load_object(name, "recipe")
        return Recipe(name=name, claim="", source="", chosen=(), ranks=1, cluster="local", build=build, published=False)
    known = all_recipes()
    if name not in known:
        raise InputError(f"unknown recipe {name!r}{nearest(name, list(known))}")
    return known[name]


def get_recipe(name: str, **values: Any) -> Config:
    """Returns a recipe's config with fields replaced by name: `get_recipe("digits", epochs=5, global_batch=128)`."""
    check_kind("name", name, str, "give the name of a recipe, such as 'digits'")
    return find_recipe(name).with_values(values)


def adapted(config: Config, values: Mapping[str, Any]) -> Config:
    """Replaces fields of a recipe's config. Other epochs also move its size phases, unless `values` has size phases."""
    epochs, phases = values.get("epochs"), config.data.size_phases
    moved = {}
    if phases and isinstance(epochs, Real) and "size_phases" not in values:
        moved["size_phases"] = stretched(phases, float(epochs) / config.schedule.epochs)
    return config.override(**moved, **values)


def stretched(phases: tuple[SizePhase, ...], factor: float) -> tuple[SizePhase, ...]:
    """Returns size phases that begin at the same fractions of a run whose epochs are multiplied by this factor."""
    if factor == 1:
        return phases
    return tuple(SizePhase(round(phase.from_epoch * factor, 6), phase.image_size) for phase in phases)


def weights_note(config: Config) -> str | None:
    """Returns a line if the fine-tuning recipe has no pretrained weights to start from."""
    if config.recipe != "finetune" or config.model.init_from is not None:
        return None
    return "finetune starts from random weights; use --init-from to start from pretrained weights"


def recipe_notes(config: Config) -> list[str]:
    """Returns a line for each way in which a config differs from what the figures of its recipe hold for."""
    recipe = all_recipes().get(config.recipe)  # None for a custom recipe
    found = [] if recipe is None else [recipe.batch_note(config), recipe.size_note(config), recipe.eval_note(config)]
    return [note for note in (weights_note(config), *found) if note]
