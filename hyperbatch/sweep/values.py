"""The values of a plan file. They are read as the config reads them, and each mistake is reported in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hyperbatch.config import fields, format_value
from hyperbatch.errors import InputError, nearest

NOT_HERE = {
    "seed": "write seeds = N or a list at the top of the plan",
    **dict.fromkeys(("seeds", "confirm"), "write it at the top of the plan, above the first [table], or in an arm"),
    "out": "a sweep's folder is given with --out",
    "resume": "a sweep continues automatically",
}
MOST_RUNS = 20_000  # of a plan: checking takes a millisecond per run, so a slip in a grid would look like a hang
MOST_LETTERS = 200  # of a name: file systems allow 255 bytes
GLOBAL_BATCH = "global_batch"  # not a config field; it scales every batch phase, as --global-batch does

Values = dict[str, Any]
Confirm = int | list[int]  # the number of fresh seeds, or a list of them


def show(value: Any) -> str:
    """Formats a value as the command line writes it."""
    return format_value(_tuples(value))


def key_of(settings: Values) -> tuple[tuple[str, str], ...]:
    """A key that is equal for equal settings, whichever way a plan or a row writes them."""
    return tuple((name, show(value)) for name, value in settings.items())


def read_typed(values: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = values.get(key, default)
    if not isinstance(value, kind):
        what = {str: "a text", dict: "a table", list: f"a list of tables; write [[{key}]] above each"}[kind]
        raise InputError(f"{key} = {value!r} is not {what}")
    return value


def read_name(values: Mapping[str, Any], default: str) -> str:
    """Reads the name of an arm, which appears in tables, labels of charts and lines of progress."""
    name = read_typed(values, "name", str, default)
    if not name.strip() or not name.isprintable() or len(name) > MOST_LETTERS:
        raise InputError(f"arm name = {name!r}: give a name of 1 to {MOST_LETTERS} printable characters in one line")
    return name


def read_folder_name(values: Mapping[str, Any], default: str) -> str:
    """Reads the name of the plan, which its folder may have too."""
    name = read_typed(values, "name", str, default)
    odd = not name.isprintable() or any(letter in name for letter in "/\\ ") or name.strip(".") == ""
    if odd or len(name.encode()) > MOST_LETTERS:
        raise InputError(
            f"name = {name!r}: use at most {MOST_LETTERS} bytes without blanks and slashes, because a folder may get "
            "this name"
        )
    return name


def check_count(count: int) -> None:
    if count > MOST_RUNS:
        raise InputError(
            f"it has {count:,} runs, including those that may confirm a search; a plan may have at most {MOST_RUNS:,}: "
            "shorten its lists, or write several plans"
        )


def read_seeds(value: Any, where: str) -> list[int]:
    if type(value) is int:
        check_count(value)
    seeds = list(range(value)) if type(value) is int else value
    if not isinstance(seeds, list) or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise InputError(f"{where} = {value!r}: give how many (0 to N-1), or a list of whole numbers")
    if not seeds:
        raise InputError(f"{where} = {value!r}: contains no seed; give at least one")
    if len(set(seeds)) < len(seeds):
        raise InputError(f"{where} = {value!r}: contains a seed twice")
    return seeds


def read_confirm(value: Any, where: str) -> Confirm:
    if value == [] or (type(value) is int and value >= 0):
        check_count(value or 0)
        return value or 0
    if not isinstance(value, list):
        raise InputError(f"{where} = {value!r}: give how many fresh seeds, or a list of whole numbers")
    return read_seeds(value, where)


def read_overrides(table: Mapping[str, Any], where: str, more: Sequence[str] = ()) -> Values:
    return {name: _value(name, value, where, more) for name, value in table.items()}


def read_grid(table: Mapping[str, Any], where: str) -> Values:
    found = {}
    for name, choices in table.items():
        if not isinstance(choices, list):
            raise InputError(f"{where}: {name} = {choices!r} is not a list; a grid has a list for each field")
        if not choices:
            raise InputError(f"{where}: {name} is an empty list; give at least one value")
        found[name] = [_value(name, value, where) for value in choices]
        if len({show(value) for value in found[name]}) < len(choices):
            raise InputError(f"{where}: {name} = {choices!r} has a value twice")
    return found


def _value(name: str, value: Any, where: str, more: Sequence[str] = ()) -> Any:
    """Reads a field's value. Texts are parsed as on the command line."""
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


def check_disjoint(left: Values, right: Values, here: str, there: str) -> None:
    if both := sorted(left.keys() & right.keys()):
        raise InputError(f"{both[0]} is set in {here} and in {there}; leave it in one of them")
