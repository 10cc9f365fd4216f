"""Mean, deviation and confidence interval of a few runs, by Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Statistics of n values. A single value has no deviation and no interval."""

    n: int
    mean: float | None
    deviation: float | None  # sample standard deviation, with n - 1 in the denominator
    half_width: float | None  # the mean lies within mean +- this with CONFIDENCE, if values are normally distributed
    low: float | None
    high: float | None


def spread(values: Sequence[float]) -> Spread:
    n = len(values)
    mean = statistics.fmean(values) if values else None
    deviation = statistics.stdev(values) if n > 1 else None
    half = None if deviation is None else t_quantile(n - 1, CONFIDENCE) * deviation / math.sqrt(n)
    low, high = (min(values), max(values)) if values else (None, None)
    return Spread(n=n, mean=mean, deviation=deviation, half_width=half, low=low, high=high)


def t_probability(t: float, degrees: int) -> float:
    """P(|T| <= t) with whole degrees of freedom, by the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    theta = math.atan2(t, math.sqrt(degrees))
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(3 if odd else 2, degrees - 1, 2):
        term *= (k - 1) / k * cosine * cosine
        total += term
    return 2 / math.pi * (theta + sine * total) if odd else sine * total


def t_quantile(degrees: int, confidence: float) -> float:
    """The t with P(|T| <= t) = confidence."""
    low, high = 0.0, 1.0
    while t_probability(high, degrees) < confidence:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        if t_probability(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return high
