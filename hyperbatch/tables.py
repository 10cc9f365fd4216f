"""Text in a terminal: tables of a line of titles and columns with right-aligned numbers, and names from data sets."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence


def printable(text: str) -> str:
    """Returns the text with its control characters as escapes, such as \\n. In the name of a class or a file they could
    end the line or change the terminal."""
    return "".join(repr(c)[1:-1] if unicodedata.category(c) == "Cc" else c for c in text)


def text_table(titles: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1) -> list[str]:
    """Returns the lines of a table. left: the number of left-aligned columns (words) at the start; the others are
    right-aligned. None is shown as "-"."""
    cells = [[*titles], *(["-" if cell is None else str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(titles))]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
