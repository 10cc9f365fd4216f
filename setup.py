"""The one thing that pyproject.toml cannot say: README.md with links that work on PyPI, too.

In the repository they are relative. PyPI knows no such files, so the packaged text points to the repository.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def packaged_readme() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    repository = project["urls"]["Repository"]

    def absolute(link: re.Match[str]) -> str:
        is_picture, text, target = link.groups()
        return f"{is_picture}[{text}]({repository}/{'raw' if is_picture else 'blob'}/HEAD/{target})"

    return re.sub(r"(!?)\[([^]]+)\]\((?!\w+://|#)([^)]+)\)", absolute, (ROOT / "README.md").read_text())


setup(long_description=packaged_readme(), long_description_content_type="text/markdown")
