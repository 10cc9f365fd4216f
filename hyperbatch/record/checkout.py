"""Finds the commit of the code that runs."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str | None:
    """Returns the commit of the checkout from which this runs, with "-dirty" if tracked files differ from it; None
    outside a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():  # an installed package may lie inside a checkout of something else
        return None
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
