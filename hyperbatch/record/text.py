"""Writes values as strict JSON, which every reader accepts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def strict_json(value: Any, indent: int | None = None) -> str:
    """Returns a value as strict JSON: NaN and infinities, which other readers reject, become null."""
    try:
        return json.dumps(
            value, allow_nan=False, default=_scalar, indent=indent, separators=None if indent else (",", ":")
        )
    except ValueError:
        return json.dumps(_finite(value), default=_scalar, indent=indent, separators=None if indent else (",", ":"))


def _scalar(value: Any) -> Any:
    """Returns the Python value of a numpy or torch scalar, or the text of any other object."""
    return value.item() if hasattr(value, "item") else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    value = _scalar(value) if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
