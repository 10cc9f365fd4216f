"""Reads the values of config fields from text, writes them as text, and checks them against a field's type."""

from __future__ import annotations

import math
import numbers
import os
import types
import typing
from typing import Any

from hyperbatch.config.option import LayerRate


def format_value(value: Any) -> str:
    """Returns the text that `FieldSpec.parse` reads back."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(
            ":".join(format_value(v) for v in item) if isinstance(item, tuple) else format_value(item) for item in value
        )
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    return str(value)


def format_epochs(epochs: float) -> str:
    """Returns `1 epoch`, `2.5 epochs`."""
    return f"{epochs:g} epoch{'' if epochs == 1 else 's'}"


def native(value: Any) -> Any:
    """Converts a numpy number to a Python number, and a path to its text."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    item = getattr(value, "item", None)
    return value if item is None or not isinstance(value, numbers.Number) else item()


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, tuple) else value


def tuple_item(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None


def parse_text(hint: Any, text: str) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        if text.lower() == "none":
            return None
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if hint is bool:
        if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise ValueError(text)
        return text.lower() in ("true", "1", "yes")
    item = tuple_item(hint)
    if item is None:
        return hint(text)
    parts = [part for part in text.split(",") if part]
    if hasattr(item, "_fields"):
        kinds = list(typing.get_type_hints(item).values())
        rows = [part.split(":") for part in parts]
        if any(len(row) != len(kinds) for row in rows):
            raise ValueError(text)
        return tuple(tuple(kind(v) for kind, v in zip(kinds, row, strict=True)) for row in rows)
    args = typing.get_args(hint)
    if args[-1] is not Ellipsis and len(parts) != len(args):
        raise ValueError(text)
    return tuple(item(part) for part in parts)


def describe(hint: Any) -> str:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join("none" if arg is type(None) else describe(arg) for arg in typing.get_args(hint))
    if hint is bool:
        return "true or false"
    item = tuple_item(hint)
    if item is None:
        return {int: "a whole number", float: "a number", str: "a text"}[hint]
    if hasattr(item, "_fields"):
        pair = "LAYER:FACTOR" if item is LayerRate else "EPOCH:VALUE"
        return f"a list {pair},{pair}"
    args = typing.get_args(hint)
    return "a list of numbers" if args[-1] is Ellipsis else f"{len(args)} numbers LOW,HIGH"


def fits(hint: Any, value: Any) -> bool:
    """Whether a value has a field's type. A whole number is accepted as a float. True and false are not accepted as
    numbers."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return any(fits(arg, value) for arg in typing.get_args(hint))
    item = tuple_item(hint)
    if item is not None:
        args = typing.get_args(hint)
        if not isinstance(value, tuple | list) or (args[-1] is not Ellipsis and len(value) != len(args)):
            return False
        return all(fits(item, part) for part in value)
    if hasattr(hint, "_fields"):
        kinds = typing.get_type_hints(hint).values()
        return isinstance(value, hint) and all(fits(kind, part) for kind, part in zip(kinds, value, strict=True))
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def finite(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(finite(part) for part in value)
    return not isinstance(value, float) or math.isfinite(value)
