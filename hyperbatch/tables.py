"""Tables in a terminal: a line of titles, then columns with right-aligned numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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
