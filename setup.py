"""The one thing that pyproject.toml cannot say: README.md as PyPI can show it.

Its links are paths in the repository, which has no public address that a package could point to. So the packaged text
names the files, which are in the source distribution, and leaves the picture out.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).parent / "README.md"
FILE_LINK = r"(!?)\[([^]]+)\]\((?!\w+://|#)([^)]+)\)"


def packaged_readme() -> str:
    def named(link: re.Match[str]) -> str:
        is_picture, text, target = link.groups()
        path = target.partition("#")[0]
        return "" if is_picture else text if text == path else f"{text} (`{path}`)"

    return re.sub(r"\n{3,}", "\n\n", re.sub(FILE_LINK, named, README.read_text()))


setup(long_description=packaged_readme(), long_description_content_type="text/markdown")
