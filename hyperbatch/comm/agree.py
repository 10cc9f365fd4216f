"""Compares plans and grids over ranks: if they differ, every rank raises an error instead of waiting for the others."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch.distributed as dist

from hyperbatch.errors import InputError

_SHOWN_CHARS = 200


def check_agreement(
    group: dist.ProcessGroup | None,
    what: str,
    description: Sequence[str],
    problem: str | None = None,
    *,
    advice: str = "use the same on all ranks",
) -> None:
    """Raises InputError on every rank of the group if one rank has a problem, or if descriptions differ.

    description: lines; the message shows the first line that differs. Ranks exchange a digest of it, and the lines only
    if the digests differ. problem: this rank's error, if any. advice: what the user should do if descriptions differ.
    """
    if group is None or dist.get_world_size(group) == 1:
        if problem:
            raise InputError(problem)
        return
    digest = hashlib.sha256("\n".join(description).encode()).hexdigest()
    names = dist.get_process_group_ranks(group)
    seen: list[tuple[str | None, str]] = _gather((problem, digest), group)
    for rank, (their_problem, _) in zip(names, seen, strict=True):
        if their_problem:
            raise InputError(f"rank {rank}: {their_problem}")
    odd = next((rank for rank, (_, theirs) in enumerate(seen) if theirs != seen[0][1]), None)
    if odd is None:
        return
    lines = _gather(list(description), group)  # every rank has seen the same digests and also gets here
    first, other = first_difference(lines[0], lines[odd])
    raise InputError(
        f"{what} differs between ranks: rank {names[0]} has {first!r}, rank {names[odd]} has {other!r}; {advice}"
    )


def first_difference(a: Sequence[str], b: Sequence[str]) -> tuple[str, str]:
    for i in range(max(len(a), len(b))):
        left, right = a[i] if i < len(a) else "nothing", b[i] if i < len(b) else "nothing"
        if left != right:
            return _around_difference(left, right)
    return "", ""


def _around_difference(a: str, b: str) -> tuple[str, str]:
    """Cuts long lines to the part where they differ, so that the message stays one line."""
    at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    start = max(0, at - _SHOWN_CHARS // 2)
    return a[start : start + _SHOWN_CHARS], b[start : start + _SHOWN_CHARS]


def _gather(value: object, group: dist.ProcessGroup) -> list:
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
