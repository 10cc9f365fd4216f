"""Byte code of torch's modules, kept by us where Python keeps none.

Without it Python compiles a thousand files at every start, which takes longer than all else that an import of torch
does. pip makes byte code when it installs a package; uv and many container images do not, and then nobody may:
PYTHONDONTWRITEBYTECODE is set, or the folder cannot be written.
"""

from __future__ import annotations

import importlib.util
import os
import sys

from hyperbatch.choices import cache_folder

FOLDER = "byte_code"  # in the cache


def keep_byte_code() -> None:
    """From now on, this process and those that it starts keep byte code in our cache, if torch has none and gets none.

    For a process that is ours, before it imports what takes long. Python checks each file against its source.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or spec.cached is None or os.path.exists(spec.cached):
        return
    kept_by_python = sys.pycache_prefix or os.access(os.path.dirname(spec.origin), os.W_OK)
    folder = cache_folder()
    if (kept_by_python and not sys.dont_write_bytecode) or not folder.is_absolute():
        return
    sys.pycache_prefix = sys.pycache_prefix or str(folder / FOLDER)
    sys.dont_write_bytecode = False
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
