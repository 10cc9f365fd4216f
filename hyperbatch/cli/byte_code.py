"""Caches the byte code of torch's modules if Python does not.

Without byte code, Python compiles a thousand files at every start, which takes longer than all other work of importing
torch. pip creates byte code when it installs a package, but uv and many container images do not. Sometimes Python may
not create it later either, because PYTHONDONTWRITEBYTECODE is set or the folder is not writable.
"""

from __future__ import annotations

import importlib.util
import os
import sys

from hyperbatch.choices import cache_folder

FOLDER = "byte_code"  # in the cache folder


def keep_byte_code() -> None:
    """Makes this process and its children keep byte code in our cache if torch has none and Python writes none.

    Call it only in a process of our own, before slow imports. Python checks each cached file against its source.
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
