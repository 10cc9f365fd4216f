"""A plan file: which runs a sweep makes. Everything that is wrong with one is told before anything is trained.

    name = "lars_against_sgd"
    recipe = "cifar10_resnet"
    seeds = 5                     # 0 to 4, or a list
    [fixed]                       # overrides of every run
    epochs = 30
    [grid]                        # the conditions under which arms are compared: every combination
    global_batch = [256, 8192]
    [[arms]]                      # what is compared
    name = "LARS"
    optimizer = "lars"
    grid.lr = [1, 2, 4]           # this arm's own search: its best point stands for it
    [[arms]]                      # one more part of the same arm, for some of the conditions
    name = "LARS"
    when.global_batch = [8192]
    grid.lr = [8, 16]

`docs/sweep.md` describes it. A run is recognised by the digest of its config, so plans may be reordered and grow.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperbatch.config import Config, fields, format_value
from hyperbatch.errors import InputError, nearest
from hyperbatch.recipes import adapted, find_recipe

KEYS = ("name", "recipe", "seeds", "about", "fixed", "grid", "arms")
NOT_HERE = {
    "seed": "write seeds = N or a list at the top of the plan",
    "seeds": "write it at the top of the plan, above the first [table], or in an arm",
    "out": "a sweep's folder is given with --out",
    "resume": "a sweep continues by itself",
}
GLOBAL_BATCH = "global_batch"  # not a field: it scales every batch phase, as --global-batch does

Values = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Runs that differ in their seed alone: one cell of the table."""

    arm: str
    conditions: Values  # of the plan's grid
    search: Values  # of the arm's own grid
    overrides: Values  # of the recipe: these and all others


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    number: int  # in the plan, from 1: what --row asks for
    point: Point
    config: Config

    @property
    def seed(self) -> int:
        return self.config.run.seed

    @property
    def digest(self) -> str:
        return digest(self.config, set(self.point.overrides))

    @property
    def command(self) -> str:
        """The ordinary command that trains this run alone."""
        words = ["hyperbatch", "train", self.config.recipe]
        known = {spec.name: spec for spec in fields()}
        for name, value in ({"nproc": 1} | self.point.overrides | {"seed": self.seed}).items():
            if name == GLOBAL_BATCH:
                words += ["--global-batch", str(value)]
            elif isinstance(value, bool):
                words.append(known[name].flag if value else known[name].flag.replace("--", "--no-", 1))
            elif name != "data":
                words += [known[name].flag, format_value(value)]
        return shlex.join(words) + (" --data DIR" if self.config.data.data else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    name: str
    recipe: str
    about: str
    text: str  # of the file
    runs: tuple[PlannedRun, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "recipe": self.recipe,
            "about": self.about,
            "runs": [
                {
                    "run": run.number,
                    "arm": run.point.arm,
                    "conditions": run.point.conditions,
                    "search": run.point.search,
                    "seed": run.seed,
                    "digest": run.digest,
                    "command": run.command,
                }
                for run in self.runs
            ],
        }


def load_plan(path: Path, *, data: str | None = None) -> Plan:
    """data: the data set's folder on this machine, for every run."""
    try:
        text = path.read_text()
        values = tomllib.loads(text)
    except OSError as error:
        raise InputError(f"plan {path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"plan {path}: not valid TOML ({error})") from None
    try:
        return parse_plan(values, name=path.stem, text=text, data=data)
    except InputError as error:
        raise InputError(f"plan {path}: {error}") from None


def parse_plan(values: Mapping[str, Any], *, name: str = "sweep", text: str = "", data: str | None = None) -> Plan:
    for key in values:
        if key != "seed" and key in {spec.name for spec in fields()} - set(KEYS):
            raise InputError(f"{key} is a field of the config; write it below [fixed], [grid] or [[arms]]")
    _known(values, KEYS, "the plan")
    name = _typed(values, "name", str, name)
    if not name or any(letter in name for letter in "/\\ \t\n"):
        raise InputError(f"name = {name!r}: give a name without blanks and slashes, since a folder may be called so")
    if "recipe" not in values:
        raise InputError('recipe is missing; write recipe = "NAME" (`hyperbatch recipes` lists them)')
    recipe = find_recipe(_typed(values, "recipe", str, ""))
    fixed = _overrides(_typed(values, "fixed", dict, {}), "[fixed]")
    grid = _grid(_typed(values, "grid", dict, {}), "[grid]")
    _disjoint(fixed, grid, "[fixed]", "[grid]")
    runs: list[PlannedRun] = []
    known: dict[str, int] = {}
    for block in _arms(values, name, grid):
        for conditions, found in itertools.product(list(_product(grid | block.when)), list(_product(block.search))):
            overrides = {**fixed, **conditions, **block.own, **found}
            point = Point(arm=block.name, conditions=conditions, search=found, overrides=overrides)
            if known.setdefault(title(point), block.index) != block.index:
                raise InputError(f"two arms have the point {title(point)!r}; give one of them another name")
            with_data = overrides if data is None else {**overrides, "data": data}
            try:
                config = _configured(recipe.config, {"nproc": 1, **with_data})
            except InputError as error:
                raise InputError(f"{title(point)}: {error}") from None
            for seed in block.seeds:
                runs.append(PlannedRun(number=len(runs) + 1, point=point, config=config.override(seed=seed)))
    _check_distinct(runs)
    return Plan(
        name=name, recipe=recipe.name, about=_typed(values, "about", str, "").strip(), text=text, runs=tuple(runs)
    )


def title(point: Point) -> str:
    return point_title(point.arm, {**point.conditions, **point.search})


def point_title(arm: str, settings: Values) -> str:
    """A point in a few words, e.g. `LARS, global batch 8192, lr 2`."""
    return ", ".join([arm, *(setting(name, value) for name, value in settings.items())])


def setting(name: str, value: Any) -> str:
    return f"{name.replace('_', ' ')} {show(value)}"


def show(value: Any) -> str:
    """A value as the command line writes it."""
    return format_value(_tuples(value))


def digest(config: Config, given: set[str]) -> str:
    """What is computed, in twelve letters: every value that is not a default, and the seed.

    Fields that only say where things are or how the work is cut count where the plan sets them, except the place of the
    data. Defaults are left out, so that rows stay known when a later version has more fields.
    """
    parts = {}
    for spec in fields():
        value = spec.of(config)
        counts = spec.name in given and spec.name != "data" if spec.free else value != spec.default
        if counts or spec.name == "seed":
            parts[spec.name] = format_value(value)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


# From the file's tables to values


def _known(values: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for key in values:
        if key not in names:
            raise InputError(f"{where} must not have {key!r}{nearest(key, list(names))}")


def _typed(values: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = values.get(key, default)
    if not isinstance(value, kind):
        what = {str: "a text", dict: "a table", list: "a list of tables"}[kind]
        raise InputError(f"{key} = {value!r} is not {what}")
    return value


def _seeds(value: Any, where: str) -> list[int]:
    seeds = list(range(value)) if type(value) is int else value
    if not isinstance(seeds, list) or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise InputError(f"{where} = {value!r}: give how many (0 to N-1), or a list of whole numbers")
    if not seeds:
        raise InputError(f"{where} = {value!r}: no seed, so nothing to run")
    if len(set(seeds)) < len(seeds):
        raise InputError(f"{where} = {value!r}: a seed is there twice")
    return seeds


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """One [[arms]] of the file."""

    index: int
    name: str
    own: Values
    search: Values
    when: Values  # those values of the plan's grid that it is for
    seeds: list[int]


def _arms(values: Mapping[str, Any], name: str, grid: Values) -> Iterator[_Block]:
    """A plan without any is one arm."""
    seeds = values.get("seeds", 1)
    _seeds(seeds, "seeds")
    arms = _typed(values, "arms", list, [])
    if "arms" in values and not arms:
        raise InputError("arms is empty; leave it out or write [[arms]]")
    for index, arm in enumerate(arms or [{"name": name}]):
        if not isinstance(arm, dict):
            raise InputError(f"arms = {arm!r} is not a table; write [[arms]]")
        own_name = _typed(arm, "name", str, f"arm {index + 1}")
        where = f"arm {own_name!r}"
        tables = ("grid", "when", "seeds")
        own = _overrides({key: arm[key] for key in arm if key not in ("name", *tables)}, where, tables)
        search = _grid(_typed(arm, "grid", dict, {}), f"{where}, grid")
        when = _grid(_typed(arm, "when", dict, {}), f"{where}, when")
        _disjoint(own, search, where, "its grid")
        _disjoint(own, grid, where, "[grid]")
        _disjoint(search, grid, f"{where}, grid", "[grid]")
        for field, chosen in when.items():
            if odd := [value for value in chosen if value not in grid.get(field, [])]:
                raise InputError(f"{where}, when: {field} = {show(odd[0])} is not in [grid]; add it there")
        own_seeds = _seeds(arm.get("seeds", seeds), f"{where}, seeds")
        yield _Block(index=index, name=own_name, own=own, search=search, when=when, seeds=own_seeds)


def _overrides(table: Mapping[str, Any], where: str, more: Sequence[str] = ()) -> Values:
    return {name: _value(name, value, where, more) for name, value in table.items()}


def _grid(table: Mapping[str, Any], where: str) -> Values:
    found = {}
    for name, choices in table.items():
        if not isinstance(choices, list):
            raise InputError(f"{where}: {name} = {choices!r} is not a list; a grid has a list for each field")
        if not choices:
            raise InputError(f"{where}: {name} is an empty list, so nothing would be run")
        found[name] = [_value(name, value, where) for value in choices]
        if len({show(value) for value in found[name]}) < len(choices):
            raise InputError(f"{where}: {name} = {choices!r} has a value twice")
    return found


def _value(name: str, value: Any, where: str, more: Sequence[str] = ()) -> Any:
    """A field's value; texts are read as the command line reads them."""
    known = {spec.name: spec for spec in fields()}
    if name in NOT_HERE:
        raise InputError(f"{where}: {name} does not belong there; {NOT_HERE[name]}")
    if name == GLOBAL_BATCH:
        if type(value) is not int or value < 1:
            raise InputError(f"{where}: {name} = {value!r} is not a positive whole number")
        return value
    if name not in known:
        raise InputError(f"{where} has an unknown config field {name!r}{nearest(name, [*known, GLOBAL_BATCH, *more])}")
    try:
        return known[name].read(value)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _tuples(value: Any) -> Any:
    return tuple(_tuples(part) for part in value) if isinstance(value, list | tuple) else value


def _disjoint(left: Values, right: Values, here: str, there: str) -> None:
    if both := sorted(left.keys() & right.keys()):
        raise InputError(f"{both[0]} is set in {here} and in {there}; leave it in one of them")


def _product(grid: Values) -> Iterator[Values]:
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def _configured(build: Any, overrides: Values) -> Config:
    if GLOBAL_BATCH in overrides and "batch_phases" in overrides:
        raise InputError("batch_phases sets the batch of every phase; leave out global_batch")
    rest = {name: value for name, value in overrides.items() if name != GLOBAL_BATCH}
    return adapted(build(overrides.get(GLOBAL_BATCH)), rest)


def _check_distinct(runs: Sequence[PlannedRun]) -> None:
    seen: dict[str, PlannedRun] = {}
    for run in runs:
        twin = seen.setdefault(run.digest, run)
        if twin is not run:
            raise InputError(
                f"runs {twin.number} ({title(twin.point)}) and {run.number} ({title(run.point)}) are the same"
            )
