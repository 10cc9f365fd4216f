"""What the site needs beside the pages of docs/: three pages of the repository's root, a table of all config fields,
and links that leave docs/.

In the repository a link is a path between files. On the site, a link to a page becomes one to that page of the site,
and a link to any other file (records/, benchmarks/, examples/) becomes its path in the repository, which has no public
address.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).parents[1]
FROM_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    for name, page in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    files.append(File.generated(config, "fields.md", content=fields_page()))
    return files


def fields_page() -> str:
    """Every config field by section: what `hyperbatch train --help-all` shows."""
    sys.path.insert(0, str(ROOT))
    from hyperbatch.config import fields, format_value, section_titles

    lines = [
        "# Config fields",
        "",
        "Each is a flag of `hyperbatch train`, a key of a config file and a keyword of `get_recipe`.",
    ]
    for section, title in section_titles().items():
        lines += ["", f"## {title.capitalize()} (`[{section}]`)", "", "| field | meaning | default |", "|---|---|---|"]
        for spec in fields():
            if spec.section == section:
                choices = f" One of {', '.join(f'`{name}`' for name in spec.choices)}." if spec.choices else ""
                lines.append(f"| `{spec.name}` | {spec.help}{choices} | {format_value(spec.default)} |")
    return "\n".join(lines) + "\n"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    folder = "" if page.file.src_uri in FROM_ROOT.values() else "docs"

    def moved(link: re.Match[str]) -> str:
        picture, text, heading = link[1], link[2], link[4] or ""
        path = posixpath.normpath(posixpath.join(folder, link[3]))
        if path in FROM_ROOT:
            target = FROM_ROOT[path]
        elif path.startswith("docs/") and not (ROOT / path).is_dir():
            target = path.removeprefix("docs/")
        else:
            return text if path in text else f"{text} (`{path}`)"
        return f"{picture}[{text}]({target}{heading})"

    return LINK.sub(moved, markdown)
