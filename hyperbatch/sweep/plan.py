"""A plan file, which defines the runs of a sweep. All its mistakes are reported before anything is trained.

    name = "lars_against_sgd"
    recipe = "cifar10_resnet"
    seeds = [0]                   # or their number: 0 to N-1
    confirm = 5                   # fresh seeds for the best point of each search, or a list of them
    [fixed]                       # overrides of every run
    epochs = 30
    [grid]                        # arms are compared under every combination of these conditions
    global_batch = [256, 8192]
    [[arms]]                      # the alternatives that are compared
    name = "LARS"
    optimizer = "lars"
    grid.lr = [1, 2, 4]           # this arm's own search, of which the best point represents the arm
    [[arms]]                      # another part of the same arm, for some of the conditions
    name = "LARS"
    when.global_batch = [8192]
    grid.lr = [8, 16]

`docs/sweep.md` describes it. A run is identified by the digest of its config, so plans may be reordered and extended.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hyperbatch.config import Config, fields, format_value
from hyperbatch.errors import InputError, nearest
from hyperbatch.recipes import Recipe, find_recipe
from hyperbatch.recipes.files import read_toml
from hyperbatch.sweep.values import (
    GLOBAL_BATCH,
    Confirm,
    Values,
    check_count,
    check_disjoint,
    key_of,
    read_confirm,
    read_folder_name,
    read_grid,
    read_name,
    read_overrides,
    read_seeds,
    read_typed,
    show,
)

KEYS = ("name", "recipe", "seeds", "confirm", "about", "fixed", "grid", "arms")
Place = tuple[tuple[tuple[str, str], ...], str]  # a condition, and an arm under it


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Runs that differ only in their seed. A point is one cell of the table."""

    arm: str
    conditions: Values  # values of the plan's grid
    search: Values  # values of the arm's own grid
    overrides: Values  # all values that override the recipe, including the two above

    @property
    def place(self) -> Place:
        return key_of(self.conditions), self.arm


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    number: int  # in the plan, from 1; the argument of --row
    recipe: str  # as in the plan; the config of a custom recipe may have the label of another recipe
    point: Point
    config: Config
    confirms: bool = False  # whether it is trained only if its point is the best of a search

    @property
    def seed(self) -> int:
        return self.config.run.seed

    @property
    def digest(self) -> str:
        return digest(self.config, set(self.point.overrides))

    @property
    def command(self) -> str:
        """The `train` command for this run alone."""
        words = ["hyperbatch", "train", self.recipe]
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
class Search:
    """Several points of one arm under one condition. The best of them is trained again with fresh seeds."""

    runs: tuple[PlannedRun, ...]  # the runs that decide which point is the best
    seeds: tuple[int, ...]  # fresh seeds, which none of these runs has
    fresh: tuple[PlannedRun, ...]  # every point with these seeds, so that run numbers do not depend on which is best

    @property
    def point(self) -> Point:
        """The first point. Its arm and conditions are those of all points."""
        return self.runs[0].point

    @property
    def title(self) -> str:
        return point_title(self.point.arm, self.point.conditions)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    name: str
    recipe: str
    about: str
    text: str  # of the file
    runs: tuple[PlannedRun, ...]  # the runs that are trained in any case
    searches: tuple[Search, ...] = ()  # the searches that are confirmed

    @property
    def every_run(self) -> tuple[PlannedRun, ...]:
        """All runs in training order, including those that are trained only if their point is the best."""
        steps = [(step,) if isinstance(step, PlannedRun) else step.fresh for step in self.in_order()]
        return tuple(itertools.chain(*steps))

    @property
    def count(self) -> int:
        """The number of runs that are trained if every search has a best point."""
        return len(self.runs) + sum(len(search.seeds) for search in self.searches)

    def in_order(self) -> Iterator[PlannedRun | Search]:
        """Yields runs and searches. A confirmation directly follows its search, since it trains the same arm."""
        ends = {search.runs[-1].number: search for search in self.searches}
        for run in self.runs:
            yield run
            if run.number in ends:
                yield ends[run.number]

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
            "confirm": [
                {
                    "arm": search.point.arm,
                    "conditions": search.point.conditions,
                    "best_of_runs": [run.number for run in search.runs],
                    "seeds": search.seeds,
                    "runs": [search.fresh[0].number, search.fresh[-1].number],
                }
                for search in self.searches
            ],
        }


def load_plan(path: Path, *, data: str | None = None) -> Plan:
    """Reads a plan file. data: the folder of the data set on this machine, for every run."""
    text, values = read_toml(path, "plan")
    try:
        return parse_plan(values, name=path.stem, text=text, data=data)
    except InputError as error:
        raise InputError(f"plan {path}: {error}") from None


def parse_plan(values: Mapping[str, Any], *, name: str = "sweep", text: str = "", data: str | None = None) -> Plan:
    for key in values:
        if key != "seed" and key in {spec.name for spec in fields()} - set(KEYS):
            raise InputError(f"{key} is a field of the config; write it below [fixed], [grid] or [[arms]]")
    for key in values:
        if key not in KEYS:
            raise InputError(f"the plan must not have {key!r}{nearest(key, list(KEYS))}")
    name = read_folder_name(values, name)
    if "recipe" not in values:
        raise InputError('recipe is missing; write recipe = "NAME" (`hyperbatch recipes` lists them)')
    recipe = _recipe(read_typed(values, "recipe", str, ""))
    fixed = read_overrides(read_typed(values, "fixed", dict, {}), "[fixed]")
    grid = read_grid(read_typed(values, "grid", dict, {}), "[grid]")
    check_disjoint(fixed, grid, "[fixed]", "[grid]")
    runs: list[PlannedRun] = []
    known: dict[str, int] = {}
    confirm: dict[Place, Confirm] = {}
    blocks = list(_arms(values, name, grid))
    every = read_confirm(values.get("confirm", 0), "confirm")
    check_count(sum(block.most_runs(grid, every) for block in blocks))
    for block in blocks:
        for conditions, found in itertools.product(list(_product(grid | block.when)), list(_product(block.search))):
            overrides = {**fixed, **conditions, **block.own, **found}
            point = Point(arm=block.name, conditions=conditions, search=found, overrides=overrides)
            if known.setdefault(title(point), block.index) != block.index:
                raise InputError(f"two arms have the point {title(point)!r}; give one of them another name")
            if block.confirm is not None and confirm.setdefault(point.place, block.confirm) != block.confirm:
                raise InputError(f"arm {block.name!r} has two values of confirm for one search; leave out one of them")
            with_data = overrides if data is None else {**overrides, "data": data}
            try:
                config = recipe.with_values({"nproc": 1, **with_data})
            except InputError as error:
                raise InputError(f"{title(point)}: {error}") from None
            for seed in block.seeds:
                number, seeded = len(runs) + 1, config.override(seed=seed)
                runs.append(PlannedRun(number=number, recipe=recipe.name, point=point, config=seeded))
    runs, searches = _confirmed(runs, confirm, every)
    about = read_typed(values, "about", str, "").strip()
    plan = Plan(name=name, recipe=recipe.name, about=about, text=text, runs=tuple(runs), searches=tuple(searches))
    _check_distinct(plan.every_run)
    return plan


def title(point: Point) -> str:
    return point_title(point.arm, {**point.conditions, **point.search})


def point_title(arm: str, settings: Values) -> str:
    """A short name of a point, e.g. `LARS, global batch 8192, lr 2`."""
    return ", ".join([arm, *(setting(name, value) for name, value in settings.items())])


def setting(name: str, value: Any) -> str:
    return f"{name.replace('_', ' ')} {show(value)}"


def digest(config: Config, given: set[str]) -> str:
    """A digest of what a run computes, in twelve characters: every value that is not a default, and the seed.

    Fields that only say where things are or how the work is divided count only if the plan sets them; the folder of the
    data never counts. Defaults are omitted, so that rows remain valid if a later version has more fields.
    """
    parts = {}
    for spec in fields():
        value = spec.of(config)
        counts = spec.name in given and spec.name != "data" if spec.free else value != spec.default
        if counts or spec.name == "seed":
            parts[spec.name] = format_value(value)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _confirmed(
    runs: Sequence[PlannedRun], confirm: Mapping[Place, Confirm], otherwise: Confirm
) -> tuple[list[PlannedRun], list[Search]]:
    """Returns (the runs, the searches to confirm). A point without a rival gets further runs with the fresh seeds.

    The runs that `confirm` adds are numbered after all others, so that they change no number.
    """
    places: dict[Place, list[PlannedRun]] = {}
    for run in runs:
        places.setdefault(run.point.place, []).append(run)
    seeds = {place: _fresh_seeds(confirm.get(place, otherwise), here) for place, here in places.items()}
    number = itertools.count(len(runs) + 1)

    def fresh(place: Place, *, confirms: bool) -> list[PlannedRun]:
        points = {id(run.point): run for run in places[place]}.values()
        return [
            replace(run, number=next(number), config=run.config.override(seed=seed), confirms=confirms)
            for run in points
            for seed in seeds[place]
        ]

    more = {here[-1].number: fresh(place, confirms=False) for place, here in places.items() if not _is_search(here)}
    searches = [
        Search(runs=tuple(here), seeds=tuple(seeds[place]), fresh=tuple(fresh(place, confirms=True)))
        for place, here in places.items()
        if _is_search(here) and seeds[place]
    ]
    return [one for run in runs for one in (run, *more.get(run.number, ()))], searches


def _is_search(runs: Sequence[PlannedRun]) -> bool:
    return len({id(run.point) for run in runs}) > 1


def _fresh_seeds(confirm: Confirm, runs: Sequence[PlannedRun]) -> list[int]:
    """Returns the seeds that confirm these runs. Without a search, `confirm` may name seeds they already have."""
    used = {run.seed for run in runs}
    if isinstance(confirm, int):
        return list(itertools.islice((seed for seed in itertools.count() if seed not in used), confirm))
    if _is_search(runs) and (both := sorted(used.intersection(confirm))):
        raise InputError(
            f"arm {runs[0].point.arm!r}, confirm = {confirm!r}: its search already uses seed {both[0]}; "
            "give other seeds, or a number of seeds"
        )
    return [seed for seed in confirm if seed not in used]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """One [[arms]] table of the file."""

    index: int
    name: str
    own: Values
    search: Values
    when: Values  # the values of the plan's grid to which the block applies
    seeds: list[int]
    confirm: Confirm | None  # None: that of the plan

    def most_runs(self, grid: Values, confirm: Confirm) -> int:
        """The most runs that this block can have, with fresh seeds for every point. confirm: that of the plan."""
        points = math.prod(map(len, [*(grid | self.when).values(), *self.search.values()]))
        fresh = confirm if self.confirm is None else self.confirm
        return points * (len(self.seeds) + (fresh if isinstance(fresh, int) else len(fresh)))


def _arms(values: Mapping[str, Any], name: str, grid: Values) -> Iterator[_Block]:
    """Yields the blocks of the plan. A plan without arms has one."""
    seeds = values.get("seeds", 1)
    read_seeds(seeds, "seeds")
    arms = read_typed(values, "arms", list, [])
    if "arms" in values and not arms:
        raise InputError("arms is empty; leave it out or write [[arms]]")
    for index, arm in enumerate(arms or [{"name": name}]):
        if not isinstance(arm, dict):
            raise InputError(f"arms = {arm!r} is not a table; write [[arms]]")
        own_name = read_name(arm, f"arm {index + 1}")
        where = f"arm {own_name!r}"
        tables = ("grid", "when", "seeds", "confirm")
        own = read_overrides({key: arm[key] for key in arm if key not in ("name", *tables)}, where, tables)
        search = read_grid(read_typed(arm, "grid", dict, {}), f"{where}, grid")
        when = read_grid(read_typed(arm, "when", dict, {}), f"{where}, when")
        check_disjoint(own, search, where, "its grid")
        check_disjoint(own, grid, where, "[grid]")
        check_disjoint(search, grid, f"{where}, grid", "[grid]")
        for field, chosen in when.items():
            if odd := [value for value in chosen if value not in grid.get(field, [])]:
                raise InputError(f"{where}, when: {field} = {show(odd[0])} is not in [grid]; add it there")
        own_seeds = read_seeds(arm.get("seeds", seeds), f"{where}, seeds")
        confirm = read_confirm(arm["confirm"], f"{where}, confirm") if "confirm" in arm else None
        yield _Block(index=index, name=own_name, own=own, search=search, when=when, seeds=own_seeds, confirm=confirm)


def _recipe(name: str) -> Recipe:
    if name.endswith((".toml", ".json", ".py")) or "/" in name:
        raise InputError(
            f"recipe = {name!r} is a file; give the name of a recipe or package.module:function, and what a config "
            "file sets below [fixed]"
        )
    return find_recipe(name)


def _product(grid: Values) -> Iterator[Values]:
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def _check_distinct(runs: Sequence[PlannedRun]) -> None:
    seen: dict[str, PlannedRun] = {}
    for run in runs:
        twin = seen.setdefault(run.digest, run)
        if twin is not run:
            raise InputError(
                f"runs {twin.number} ({title(twin.point)}) and {run.number} ({title(run.point)}) are the same; "
                "leave out one of them"
            )
