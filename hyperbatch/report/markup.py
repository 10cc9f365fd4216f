"""HTML in which escaping cannot be forgotten: `el` escapes every text that is not already `Html`."""

from __future__ import annotations

import html
import re
from typing import Any

VOID = {"br", "meta", "path", "line", "rect", "circle", "input"}


class Html(str):
    """Markup, as opposed to a text that may contain angle brackets."""

    __slots__ = ()


def el(tag: str, *children: Any, **attributes: Any) -> Html:
    """`el("td", text, cls="num", data_x=1)` is `<td class="num" data-x="1">text</td>`; None omits an attribute."""
    pairs = "".join(
        f' {name.removesuffix("_").replace("cls", "class").replace("_", "-")}="{html.escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in VOID:
        return Html(f"<{tag}{pairs}/>")
    return Html(f"<{tag}{pairs}>{join(*children)}</{tag}>")


def join(*children: Any) -> Html:
    """Joins children: texts are escaped, markup is kept, None is skipped, and lists are flattened."""
    parts = []
    for child in children:
        if isinstance(child, Html):
            parts.append(child)
        elif isinstance(child, (list, tuple)):
            parts.append(join(*child))
        elif child is not None:
            parts.append(html.escape(str(child)))
    return Html("".join(parts))


def table(head: list[Any], rows: list[list[Any]], *, numeric: set[int] | None = None, cls: str | None = None) -> Html:
    """A table; columns in `numeric` are aligned right. On a narrow page it scrolls sideways, or with "stack" in `cls`
    each row becomes a block with one line per column."""
    numeric = numeric or set()
    stacked = "stack" in (cls or "").split()

    def cell(tag: str, column: int, value: Any) -> Html:
        label = html.unescape(re.sub("<[^>]*>", "", str(head[column]))) if stacked and tag == "td" and head else None
        return el(tag, value, cls="num" if column in numeric else None, data_label=label)

    return el(
        "div",
        el(
            "table",
            el("thead", el("tr", [cell("th", i, value) for i, value in enumerate(head)])) if head else None,
            el("tbody", [el("tr", [cell("td", i, value) for i, value in enumerate(row)]) for row in rows]),
            cls=cls,
        ),
        cls="scroll",
    )
