"""Formats numbers for people. NaN and None are a dash."""

from __future__ import annotations

import math

NONE = "–"


def missing(value: float | None) -> bool:
    return value is None or not math.isfinite(value)


def significant(value: float, digits: int) -> str:
    """Formats a value with this many significant digits; larger values have all their digits and no exponent."""
    return f"{value:,.0f}" if abs(value) >= 10**digits - 0.5 else f"{value:.{digits}g}"


def duration(seconds: float | None) -> str:
    if seconds is None or missing(seconds):
        return NONE
    if seconds == 0:
        return "0 s"
    if seconds < 1e-3:
        return f"{significant(seconds * 1e6, 3)} µs"
    if seconds < 1:
        return f"{significant(seconds * 1e3, 3)} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    if round(seconds) < 3600:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"
    return f"{round(seconds / 60) // 60} h {round(seconds / 60) % 60:02d} min"


def percent(share: float | None, digits: int = 2) -> str:
    """0.99 is 99 %, 0.9917 is 99.17 %."""
    if share is None or missing(share):
        return NONE
    return f"{share * 100:.{digits}f}".rstrip("0").rstrip(".") + " %" if digits else f"{share * 100:.0f} %"


def count(value: float | None) -> str:
    """1,234 below a million; above it three digits and a letter."""
    if value is None or missing(value):
        return NONE
    if abs(value) < 1e6:
        return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
    for unit, size in (("G", 1e9), ("M", 1e6)):
        if abs(value) >= size:
            return f"{significant(value / size, 3)} {unit}"
    raise AssertionError


def number(value: float | None) -> str:
    return NONE if value is None or missing(value) else f"{value:.4g}"


def size(nbytes: float) -> str:
    for unit, base in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= base:
            return f"{significant(nbytes / base, 3)} {unit}"
    return f"{nbytes:.0f} B"


def plural(n: float, noun: str) -> str:
    return f"{count(n)} {noun}{'' if n == 1 else 'es' if noun.endswith('s') else 's'}"
