"""records/questions.toml -> the first table of docs/evidence.md: the claims, and what the rows say about each.

A figure is computed from the rows of a record. Its verdict follows from its 95 % interval and the claim's bound:

    shown    the whole interval is on the claim's side of the bound
    missed   the whole interval is on the other side
    open     the bound is inside the interval, there is no interval (a single run), or there are no runs

Values that other programs measured are quoted from their files, and their verdicts are set by hand. A test checks the
quotes.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.wording import readable
from hyperbatch.recipes import all_recipes
from hyperbatch.report import units
from hyperbatch.sweep.plan import setting
from hyperbatch.sweep.statistics import CONFIDENCE, Spread, spread, t_quantile
from hyperbatch.sweep.table import MEASURES, PointResult, accuracy, best_points, percent, seconds
from hyperbatch.sweep.values import key_of

FILE = "questions.toml"
SHOWN, MISSED, OPEN = VERDICTS = ("shown", "missed", "open")
BOUNDS = ("at_least", "at_most", "within")
KEYS = {"claim", "short", "recipe", "answer", "record", "figures", "quote", "file", "verdict", "plan"}
FIGURE_KEYS = {"measure", "arm", "when", "against", "label", "each", *BOUNDS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One number of a record, or the difference of two, and the claimed bound."""

    measure: str = "top1"
    arm: str | None = None  # None: the record's only arm
    when: Mapping[str, Any] | None = None  # conditions of the point
    against: Mapping[str, Any] | None = None  # {"arm", "when"} of a point that is subtracted; missing keys are as above
    label: str | None = None  # the name of the comparison, if the names of arms and conditions do not describe it well
    each: bool = False  # whether the bound holds for every run and not for their mean
    at_least: float | None = None
    at_most: float | None = None
    within: float | None = None  # distance from 0, in either direction


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    claim: str
    short: str  # the claim in the summary; several questions may have the same
    answer: str
    record: str | None
    figures: tuple[Figure, ...]
    quote: str | None  # a figure of another tool, copied literally from `file`
    file: str | None
    verdict: str | None  # that of a quote
    plan: str | None  # a plan that would answer an open question


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One line of the table."""

    question: Question
    verdict: str
    figure: str


def read_questions(path: Path) -> list[Question]:
    """Reads the questions, the most important first."""
    return [] if not path.exists() else [_question(values) for values in tomllib.loads(path.read_text())["questions"]]


def _question(values: Mapping[str, Any]) -> Question:
    """Reads one question. A recipe's claim is taken from the recipe itself."""
    claim = values["claim"] if "claim" in values else _claim_of(values["recipe"])
    figures = [dict(figure) for figure in values.get("figures", [])]
    odd = [*(set(values) - KEYS), *(key for figure in figures for key in set(figure) - FIGURE_KEYS)]
    if odd or values.get("verdict", OPEN) not in VERDICTS or ("quote" in values) != ("verdict" in values):
        raise ValueError(f"{FILE}: {claim!r} has an unknown key or verdict, or a verdict without a quote: {odd}")
    keys = ("record", "quote", "file", "verdict", "plan")
    return Question(
        claim=claim,
        short=values["short"],
        answer=values["answer"],
        figures=tuple(Figure(**figure) for figure in figures),
        **{key: values.get(key) for key in keys},
    )


def _claim_of(recipe: str) -> str:
    return f"`{recipe}`: {all_recipes()[recipe].claim.replace('goal: ', 'the goal is ')}"


def answered(question: Question, points: Sequence[PointResult]) -> Answer:
    """Returns the answer to a question. points: those of the question's record."""
    if question.quote is not None:
        return Answer(question=question, verdict=question.verdict or OPEN, figure=question.quote)
    judged = [judge(figure, points) for figure in question.figures]
    verdicts = [verdict for _, verdict in judged]
    worst = next((verdict for verdict in (MISSED, OPEN) if verdict in verdicts), SHOWN if verdicts else OPEN)
    return Answer(question=question, verdict=worst, figure="; ".join(text for text, _ in judged) or "not run")


def judge(figure: Figure, points: Sequence[PointResult]) -> tuple[str, str]:
    """Returns (the number with its interval and n, the verdict)."""
    here = find_point(points, figure.arm, figure.when)
    if figure.against is None:
        values = measured(here, figure.measure)
        text = described(here, figure, values)
        if figure.each and values.n < len(here.rows):  # a run that failed, or that never reached its target
            return text, MISSED
        return text, verdict_of(figure, values)
    there = find_point(points, figure.against.get("arm", figure.arm), figure.against.get("when", figure.when))
    mean, half, count = difference(here, there, figure.measure)
    low, high = (mean, mean) if half is None else (mean - half, mean + half)
    scale, unit = (100, "points") if figure.measure == "top1" else (1, "s")
    text = f"{mean * scale:+.2f}" + ("" if half is None else f" ± {half * scale:.2f}") + f" {unit} ({count})"
    values = Spread(n=0, mean=mean, deviation=None, half_width=half, low=low, high=high)
    return f"{figure.label or _contrast(here, there)}: {text}", verdict_of(figure, values)


def _contrast(here: PointResult, there: PointResult) -> str:
    """Names the two points of a difference in as few words as distinguish them."""
    here, there = readable(here), readable(there)
    where, elsewhere = (
        [_condition(name, value) for name, value in point.conditions.items()] for point in (here, there)
    )
    if where == elsewhere:
        return ", ".join([f"{here.arm} minus {there.arm}", *where])
    if here.arm == there.arm:
        return f"{here.arm}, {', '.join(where)} minus {', '.join(elsewhere)}"
    return f"{', '.join([here.arm, *where])} minus {', '.join([there.arm, *elsewhere])}"


def _condition(name: str, value: Any) -> str:
    """E.g. `batch 4,096` or `4 ranks`."""
    if name == "ranks":
        return units.plural(value, "rank")
    return f"batch {value:,}" if name in ("batch", "global_batch") else setting(name, value)


def find_point(points: Sequence[PointResult], arm: str | None, when: Mapping[str, Any] | None) -> PointResult:
    """Returns the point that represents the arm under a condition: its fresh seeds if its search was confirmed."""
    wanted = key_of(dict(when or {}))
    found = [
        point
        for (conditions, name), point in best_points(points).items()
        if arm in (None, name) and set(wanted) <= set(conditions)
    ]
    if len(found) != 1:
        raise ValueError(f"{FILE}: {len(found)} points are of arm {arm!r} when {when!r}; name one")
    return found[0]


def measured(point: PointResult, measure: str) -> Spread:
    if measure != "top1" and measure not in MEASURES:
        raise ValueError(f"{FILE}: {measure!r} is none of top1, {', '.join(MEASURES)}")
    return point.top1 if measure == "top1" else point.measures[measure]


def described(point: PointResult, figure: Figure, values: Spread) -> str:
    text = (accuracy if figure.measure == "top1" else seconds)(values)
    if figure.each:
        ends = (values.low, values.high)
        text = " to ".join(percent(end) if figure.measure == "top1" else f"{end or 0:.1f} s" for end in ends)
    of = f" of {point.top1.n}" if values.n < point.top1.n else ""
    return f"{text} (n = {values.n}{of}{_failed(point)})"


def _failed(*points: PointResult) -> str:
    failed = sum(point.failed for point in points)
    return f", {failed} failed" if failed else ""


def verdict_of(figure: Figure, values: Spread) -> str:
    given = [name for name in BOUNDS if getattr(figure, name) is not None]
    if len(given) != 1:
        raise ValueError(f"{FILE}: a figure has one of {', '.join(BOUNDS)}, not {given}")
    bound = getattr(figure, given[0])
    if values.mean is None or (values.half_width is None and not figure.each):
        return OPEN
    half = values.half_width or 0.0
    low, high = (values.low, values.high) if figure.each else (values.mean - half, values.mean + half)
    assert low is not None
    assert high is not None
    if figure.each:  # a single run that misses the bound is enough
        good = low >= bound if given == ["at_least"] else high <= bound
        return SHOWN if good else MISSED
    if given == ["within"]:
        nearest = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
        return SHOWN if max(-low, high) <= bound else MISSED if nearest > bound else OPEN
    if given == ["at_most"]:
        low, high, bound = -high, -low, -bound
    return SHOWN if low >= bound else MISSED if high < bound else OPEN


def difference(here: PointResult, there: PointResult, measure: str) -> tuple[float, float | None, str]:
    """Returns (mean, half of its 95 % interval, number): by pairs if both have the same seeds, else by Welch's t."""
    left, right = (
        {row.seed: value for row in point.rows if row.error is None and (value := row.number(measure)) is not None}
        for point in (here, there)
    )
    if left and left.keys() == right.keys():
        of_pairs = spread([left[seed] - right[seed] for seed in left])
        assert of_pairs.mean is not None
        return of_pairs.mean, of_pairs.half_width, units.plural(of_pairs.n, "pair") + _failed(here, there)
    a, b = measured(here, measure), measured(there, measure)
    assert a.mean is not None
    assert b.mean is not None
    count = f"n = {a.n} and {b.n}{_failed(here, there)}"
    if a.deviation is None or b.deviation is None:
        return a.mean - b.mean, None, count
    shares = [a.deviation**2 / a.n, b.deviation**2 / b.n]
    total = sum(shares)
    if total == 0:
        return a.mean - b.mean, 0.0, count
    degrees = total**2 / (shares[0] ** 2 / (a.n - 1) + shares[1] ** 2 / (b.n - 1))
    return a.mean - b.mean, t_quantile(max(1, math.floor(degrees)), CONFIDENCE) * math.sqrt(total), count
