"""Which state of the code a run was made with."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str | None:
    """Of the checkout this runs from, "-dirty" when tracked files differ from it; null outside a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():  # an installed package may lie inside a checkout of something else
        return None
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
