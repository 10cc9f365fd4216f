"""Reports and pictures that are drawn from the files of a run."""

from __future__ import annotations

from pathlib import Path

from hyperbatch.durable import replace_text
from hyperbatch.errors import InputError


def write_report(folders: list[Path], output: Path | None = None) -> Path:
    """Writes one self-contained report.html for a run, or for the comparison of several runs. Returns its path.

    Without `output` it is written into the run's folder, or for several runs into the current folder.
    """
    from hyperbatch.report.page import render
    from hyperbatch.report.runs import load_runs

    if not folders:
        raise InputError("a report needs at least one run folder")
    runs = load_runs([Path(folder) for folder in folders])
    path = output or (runs[0].folder / "report.html" if len(runs) == 1 else Path("report.html"))
    try:
        text = render(runs)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, ZeroDivisionError) as error:
        # The files may have been written by anyone.
        raise InputError(
            f"{runs[0].folder}: its record or metrics cannot be drawn ({type(error).__name__}: {error}); they are "
            f"damaged"
        ) from error
    try:
        replace_text(path, text)
    except (OSError, ValueError, RuntimeError) as error:  # other types: null bytes; loops of links
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(
            f"cannot write the report to {path}: {reason}; `hyperbatch report RUN --output FILE` writes it elsewhere"
        ) from None
    return path
