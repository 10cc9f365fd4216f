"""Shared by all bench verbs: interleaved rounds, order statistics, and rows that name device, versions and commit.

    round 1   a b c | round 2   b c a | round 3   c a b ...      drift of the machine affects all candidates alike

A verb's result is one JSON object: {"bench", "device", "versions", "commit", "rows": [...]}.
"""

from __future__ import annotations

import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

import hyperbatch
from hyperbatch.record import commit
from hyperbatch.tables import text_table


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A function to time. `peer`: whether it is someone else's code, with which ours is compared."""

    name: str
    run: Callable[[], Any]
    peer: bool = False


def interleave(
    candidates: Sequence[Candidate],
    measure: Callable[[Callable[[], Any]], float],
    *,
    rounds: int,
    warmup: int = 3,
    before_round: Callable[[], None] = lambda: None,
    told: Callable[[str, float], None] = lambda what, sample: None,
) -> dict[str, list[float]]:
    """Returns one sample per round for each name. Each round starts with another candidate.

    told: is called with each sample, including those of the warm-up.
    """
    for candidate in candidates:
        for _ in range(warmup):
            told(f"{candidate.name}, warm-up", measure(candidate.run))
    samples: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for i in range(rounds):
        before_round()
        for k in range(len(candidates)):
            candidate = candidates[(i + k) % len(candidates)]
            samples[candidate.name].append(measure(candidate.run))
            told(f"{candidate.name}, round {i + 1} of {rounds}", samples[candidate.name][-1])
    return samples


def say(text: str) -> None:
    """Prints the progress of a long bench to stderr, because stdout is for the result."""
    print(f"  ... {text}", file=sys.stderr, flush=True)


def rows(
    candidates: Sequence[Candidate],
    samples: dict[str, list[float]],
    *,
    unit: str,
    scale: float = 1.0,
    higher_is_better: bool = False,
    **extra: Any,
) -> list[dict[str, Any]]:
    """Returns one row per candidate. ratio_to_best_peer: its median divided by the best peer's; null without peers."""
    medians = {c.name: statistics.median(samples[c.name]) * scale for c in candidates}
    peers = [medians[c.name] for c in candidates if c.peer]
    best = (max if higher_is_better else min)(peers) if peers else None
    table = []
    for candidate in candidates:
        values = sorted(value * scale for value in samples[candidate.name])
        table.append(
            {
                "name": candidate.name,
                "median": medians[candidate.name],
                "p20": quantile(values, 0.2),
                "p80": quantile(values, 0.8),
                "unit": unit,
                "better": "higher" if higher_is_better else "lower",
                "ratio_to_best_peer": None if best is None else medians[candidate.name] / best,
                "peer": candidate.peer,
                "samples": len(values),
                **extra,
            }
        )
    return table


def quantile(ordered: Sequence[float], q: float) -> float:
    """The quantile of an ordered sample, with linear interpolation between neighbours."""
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def result(bench: str, table: list[dict[str, Any]], *, device: str | None = None, **extra: Any) -> dict[str, Any]:
    return {
        "bench": bench,
        "device": device or device_name(),
        "versions": versions(),
        "commit": commit(),
        "rows": table,
        **extra,
    }


def pick_device(name: str) -> torch.device:
    """Returns the named device. "auto" is the first GPU, or the CPU if there is none."""
    return torch.device("cuda:0" if name == "auto" and torch.cuda.is_available() else name.replace("auto", "cpu"))


def device_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{platform.processor() or platform.machine()}, {threads} thread{'' if threads == 1 else 's'}"


def versions() -> dict[str, str | None]:
    """The versions of everything on which a timing may depend; null means not installed."""
    found: dict[str, str | None] = {
        "hyperbatch": hyperbatch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }
    for name in ("torch", "triton", "torchvision", "timm", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def format_table(report: dict[str, Any]) -> str:
    """Formats the result as text."""
    lines = [f"{report['bench']} on {report['device']} (commit {report['commit'] or 'unknown'})"]
    for unit, better in dict.fromkeys((row["unit"], row["better"]) for row in report["rows"]):
        rows = [
            (
                row["name"],
                *(f"{n:,.0f}" if (n := row[part]) >= 1000 else f"{n:.4g}" for part in ("median", "p20", "p80")),
                None if row["ratio_to_best_peer"] is None else f"{row['ratio_to_best_peer']:.3f}",
            )
            for row in report["rows"]
            if (row["unit"], row["better"]) == (unit, better)
        ]
        titles = (f"{unit}, {better} is better", f"median {unit}", f"p20 {unit}", f"p80 {unit}", "ratio to best peer")
        lines += ["", *text_table(titles, rows)]
    return "\n".join(lines)
