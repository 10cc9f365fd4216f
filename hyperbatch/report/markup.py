"""HTML that cannot be forgotten to be escaped: `el` escapes every text that is not `Html` already."""

from __future__ import annotations

import html
import re
from typing import Any

VOID = {"br", "meta", "path", "line", "rect", "circle", "input"}


class Html(str):
    """Markup, as opposed to a text that happens to hold angle brackets."""

    __slots__ = ()


def el(tag: str, *children: Any, **attributes: Any) -> Html:
    """`el("td", text, cls="num", data_x=1)` is `<td class="num" data-x="1">text</td>`; None leaves an attribute out."""
    pairs = "".join(
        f' {name.removesuffix("_").replace("cls", "class").replace("_", "-")}="{html.escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in VOID:
        return Html(f"<{tag}{pairs}/>")
    return Html(f"<{tag}{pairs}>{join(*children)}</{tag}>")


def join(*children: Any) -> Html:
    """Texts are escaped, markup is kept, None is nothing, a list is its items."""
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
    """A table whose columns in `numeric` are set right. Where the page is narrow it scrolls sideways; with "stack" in
    `cls` its rows become blocks of a line for each column instead."""
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
