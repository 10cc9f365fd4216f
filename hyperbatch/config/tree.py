"""The whole config: its sections, its fields with their flags, and the check of a complete config."""

from __future__ import annotations

import dataclasses
import os
import signal
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

from hyperbatch.config.option import RULES, BatchPhase
from hyperbatch.config.running import CommConfig, RunConfig
from hyperbatch.config.training import DataConfig, ModelConfig, OptimConfig, ScheduleConfig
from hyperbatch.config.values import (
    describe,
    finite,
    fits,
    format_epochs,
    format_value,
    native,
    parse_text,
    plain,
    tuple_item,
)
from hyperbatch.errors import InputError, check_whole, nearest
from hyperbatch.vocabulary import DEVICE_PRECISIONS

PATHS = ("data", "init_from", "plan", "out")  # the shell does not expand ~ in `--out=~/x`, config files and plans
NEVER_SEEN = ("KILL", "STOP", "INT")  # Ctrl-C always ends a run at once, and no process can handle the other two


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings of a run, in sections. `recipe` is only a label."""

    recipe: str = "custom"
    model: ModelConfig = field(default_factory=ModelConfig, metadata={"title": "model"})
    data: DataConfig = field(default_factory=DataConfig, metadata={"title": "data and augmentation"})
    optim: OptimConfig = field(default_factory=OptimConfig, metadata={"title": "optimizer and precision"})
    schedule: ScheduleConfig = field(
        default_factory=ScheduleConfig, metadata={"title": "epochs, batch and learning rate"}
    )
    comm: CommConfig = field(default_factory=CommConfig, metadata={"title": "gradient exchange"})
    run: RunConfig = field(default_factory=RunConfig, metadata={"title": "run"})

    def __post_init__(self) -> None:
        check(self)

    @property
    def global_batch(self) -> int:
        """The number of samples of the first step over all ranks."""
        return self.schedule.batch_phases[0].global_batch

    def with_precision(self, auto: str, *, on_gpu: bool = True) -> Self:
        """Returns a copy whose precision does not depend on the device. `auto` is the precision that "auto" means on
        this device."""
        if self.optim.precision not in DEVICE_PRECISIONS:
            return self
        return self.override(precision="fp16" if on_gpu and self.optim.precision == "fp16_on_gpu" else auto)

    @property
    def scatters_gradients(self) -> bool:
        """Whether a rank receives only its shard of the gradients. Muon needs whole gradients, and its ranks share the
        products."""
        return self.comm.sharded_update and self.optim.optimizer != "muon"

    def override(self, **values: Any) -> Self:
        """Returns a copy with fields replaced by their unique names. `global_batch=N` scales every batch phase."""
        global_batch = values.pop("global_batch", None)
        by_section: dict[str, dict[str, Any]] = {}
        known = {spec.name: spec for spec in fields()}
        for name, value in values.items():
            if name not in known:
                raise InputError(f"unknown config field {name!r}{nearest(name, [*known, 'global_batch'])}")
            by_section.setdefault(known[name].section, {})[name] = known[name].coerce(value)
        config = dataclasses.replace(
            self,
            **{name: dataclasses.replace(getattr(self, name), **part) for name, part in by_section.items()},
        )
        if global_batch is None:
            return config
        check_whole("global_batch", global_batch)
        return config._rescaled(int(global_batch))

    def _rescaled(self, global_batch: int) -> Self:
        first = self.global_batch
        if global_batch == first:
            return self
        phases = []
        for phase in self.schedule.batch_phases:
            scaled, rest = divmod(phase.global_batch * global_batch, first)
            if rest:
                raise InputError(
                    f"global batch {global_batch} does not scale the batch phases "
                    f"{format_value(self.schedule.batch_phases)} to whole numbers; give --batch-phases instead"
                )
            phases.append(BatchPhase(phase.from_epoch, scaled))
        # `lr` remains the rate for the recipe's batch, so that linear scaling gives the rate for the new batch.
        lr_batch = self.schedule.lr_batch or first
        schedule = dataclasses.replace(self.schedule, batch_phases=tuple(phases), lr_batch=lr_batch)
        return dataclasses.replace(self, schedule=schedule)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists and numbers, equal to what is read back from JSON."""
        return plain(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`. Fields of older versions that no longer exist are ignored."""
        saved = ((spec, values.get(spec.section, {})) for spec in fields())
        known = {spec.name: part[spec.name] for spec, part in saved if spec.name in part}
        return cls(recipe=values.get("recipe", "custom")).override(**known)


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One config field, with the properties of its command line flag."""

    name: str
    section: str
    type: Any
    default: Any
    help: str
    allowed: tuple[str, ...] | str  # allowed names, or the name of a rule
    free: bool
    repeated: bool
    needs: tuple[str, ...]  # another field, and its values that this field needs to have an effect; empty: none

    def of(self, config: Config) -> Any:
        return getattr(getattr(config, self.section), self.name)

    @property
    def choices(self) -> tuple[str, ...]:
        return () if isinstance(self.allowed, str) else self.allowed

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def parse(self, text: str) -> Any:
        """Returns the value of a command line text. Raises InputError, which names the field and what it expects."""
        try:
            return self.coerce(parse_text(self.type, text))
        except ValueError as error:
            raise InputError(f"{self.flag}: {text!r} is not {describe(self.type)}") from error

    def read(self, value: Any) -> Any:
        """Returns the value of an entry in a TOML file. Text is read as on the command line, and lists become
        tuples."""
        if isinstance(value, str):
            return self.parse(value)
        if isinstance(value, list):
            return self.coerce(value)
        # A whole number in a float field becomes a float, because 30 and 30.0 are the same run.
        return float(value) if type(value) is int and "float" in str(self.type) else value

    def coerce(self, value: Any) -> Any:
        """Converts lists to the tuples that the field declares, pairs to its phases, and other values with `native`.
        Expands ~ in paths. `check` later rejects invalid values."""
        item = tuple_item(self.type)
        if item is None or not isinstance(value, list | tuple):
            value = native(value)
            return os.path.expanduser(value) if self.name in PATHS and isinstance(value, str) else value
        parts = len(getattr(item, "_fields", ()))
        return tuple(
            item(*map(native, v)) if parts and isinstance(v, list | tuple) and len(v) == parts else native(v)
            for v in value
        )


@cache
def fields() -> tuple[FieldSpec, ...]:
    """Returns every field of every section, in declaration order."""
    classes = typing.get_type_hints(Config)
    hints = {section: typing.get_type_hints(classes[section]) for section in section_titles()}
    return tuple(
        FieldSpec(f.name, section, hints[section][f.name], f.default, **f.metadata)
        for section in section_titles()
        for f in dataclasses.fields(classes[section])
    )


def section_titles() -> dict[str, str]:
    """Returns the sections and their headings, in declaration order."""
    return {f.name: f.metadata["title"] for f in dataclasses.fields(Config) if "title" in f.metadata}


def without_effect(config: Config, names: Collection[str]) -> list[str]:
    """Returns a line for each of these fields that has no effect in this config, such as --muon-steps without Muon."""
    known = {spec.name: spec for spec in fields()}
    lines = []
    for spec in (known[name] for name in names):
        other = known[spec.needs[0]] if spec.needs else None
        if other is not None and other.of(config) not in spec.needs[1:] and spec.of(config) != spec.default:
            wanted = " or ".join(spec.needs[1:])
            lines.append(
                f"{spec.flag} has no effect with {other.flag} {other.of(config)}; it needs {other.flag} {wanted}"
            )
    return lines


def check(config: Config) -> None:
    """Raises InputError if a value is invalid for every run. The message names the flag and the range."""
    for spec in fields():
        value = spec.of(config)
        if not fits(spec.type, value):
            raise InputError(f"{spec.flag}: {value!r} is not {describe(spec.type)}")
        if spec.choices and value is not None and value not in spec.choices:
            raise InputError(f"{spec.flag}: {value!r} is not one of {', '.join(spec.choices)}")
        if not finite(value):
            raise InputError(f"{spec.flag} {format_value(value)}: must be a finite number")
        if isinstance(spec.allowed, str) and value is not None and not RULES[spec.allowed](value):
            raise InputError(f"{spec.flag} {format_value(value)}: must {spec.allowed}")

    def need(ok: bool, name: str, what: str) -> None:
        if not ok:
            spec = next(spec for spec in fields() if spec.name == name)
            raise InputError(f"{spec.flag} {format_value(spec.of(config))}: {what}")

    o, s, d, r = config.optim, config.schedule, config.data, config.run
    if s.warmup_epochs > s.epochs:
        raise InputError(
            f"--warmup-epochs {s.warmup_epochs:g} is longer than the whole run ({format_epochs(s.epochs)}); use "
            "--warmup-epochs 0 or a larger --epochs"
        )
    need(bool(s.batch_phases) and s.batch_phases[0].from_epoch == 0, "batch_phases", "must start at epoch 0")
    need(all(p.global_batch > 0 for p in s.batch_phases), "batch_phases", "every global batch must be positive")
    starts = [p.from_epoch for p in s.batch_phases]
    need(starts == sorted(set(starts)), "batch_phases", "epochs must increase")
    need(all(p.image_size > 0 for p in d.size_phases), "size_phases", "every image size must be positive")
    starts = [p.from_epoch for p in d.size_phases]
    need(starts == sorted(set(starts)), "size_phases", "epochs must increase")
    need(all(epoch >= 0 for epoch in s.milestones), "milestones", "must not be negative")
    need(r.seed < 1 << 63, "seed", "must be below 2^63")
    need(0 < d.crop_area[0] <= d.crop_area[1] <= 1, "crop_area", "must be LOW,HIGH with 0 < LOW <= HIGH <= 1")
    need(0 < d.crop_aspect[0] <= d.crop_aspect[1], "crop_aspect", "must be LOW,HIGH with 0 < LOW <= HIGH")
    need(0 < d.jitter_sides[0] <= d.jitter_sides[1], "jitter_sides", "must be LOW,HIGH with 0 < LOW <= HIGH")
    need(d.flip or not d.flip_alternates, "flip_alternates", "needs --flip")
    need(d.rand_magnitude <= 30, "rand_magnitude", "must be at most 30")
    need(all(layer and factor >= 0 for layer, factor in o.layer_rates), "layer_rates", "no factor may be negative")
    need(not o.nesterov or o.momentum > 0, "nesterov", "needs a momentum above 0")
    need(o.loss == "bce" or not o.bce_threshold, "bce_threshold", "needs --loss bce")
    need(
        not o.decoupled_weight_decay or o.optimizer not in ("lamb", "adamw"),
        "decoupled_weight_decay",
        f"{o.optimizer} always decouples weight decay, scaled by the learning rate; use --no-decoupled-weight-decay",
    )
    need(
        o.averaging == "none" or not config.comm.sharded_update or o.precision in ("fp32", "fp64"),
        "averaging",
        "in 16 bits, cannot be combined with --sharded-update: no rank has all fp32 weights; leave one of them out",
    )
    need(r.spike_factor == 0 or r.spike_factor > 1, "spike_factor", "must be above 1, or 0 to turn it off")
    signals = () if r.preempt_signals is None else r.preempt_signals.split(",")
    known = all(hasattr(signal, f"SIG{name}") and name not in NEVER_SEEN for name in signals)
    need(known, "preempt_signals", "must be names of signals that a process may handle, e.g. TERM,USR1")
    unsharded = o.optimizer in ("lars", "sgd") and not config.comm.sharded_update
    need(
        o.lars_precision != "fp16" or unsharded,
        "lars_precision",
        "needs --optimizer lars or sgd, and --no-sharded-update",
    )
    target = r.target_top1
    percent = 75.9 if target is None or not 1 < target <= 100 else target
    said = f"must be in (0, 1]; for {percent:g} % write {percent / 100:g}"
    need(target is None or 0 < target <= 1, "target_top1", said)
