"""What is drawn from a run's folder afterwards."""

from __future__ import annotations

from pathlib import Path


def write_report(folders: list[Path], output: Path | None = None) -> Path:
    """One self-contained report.html for a run (or several, compared); returns its path."""
    raise NotImplementedError
