"""Reads the WordNet ids from the meta.mat of ImageNet's devkit, in a process of its own: some damaged files crash the
process in which scipy reads them.

    python devkit.py < meta.mat      {"1": "n02119789", "2": "n02100735", ...}
"""

from __future__ import annotations

import functools
import importlib.util
import io
import json
import os
import subprocess
import sys
from typing import Any

_TIMEOUT_S = 120.0


@functools.lru_cache(maxsize=1)  # called once to count the set, and again to open it
def wordnet_ids(meta: bytes) -> dict[int, str]:
    """Returns the WordNet ids by the devkit's own class numbers. Raises ImportError if scipy is not installed, and
    ValueError if the file cannot be read."""
    if importlib.util.find_spec("scipy") is None:
        raise ImportError
    command = [sys.executable, "-P", __file__]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # the child must find the same scipy as this process
    try:
        answer = subprocess.run(command, input=meta, env=env, capture_output=True, timeout=_TIMEOUT_S, check=True)
        return {int(number): wnid for number, wnid in json.loads(answer.stdout).items()}
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        raise ValueError("its meta.mat is damaged") from error


def _main() -> None:
    from scipy.io import loadmat

    synsets: Any = loadmat(io.BytesIO(sys.stdin.buffer.read()), squeeze_me=True)["synsets"]
    leaves = synsets[synsets["num_children"] == 0]  # the others are groups of classes
    pairs = zip(leaves["ILSVRC2012_ID"], leaves["WNID"], strict=True)
    json.dump({int(number): str(wnid) for number, wnid in pairs}, sys.stdout)


if __name__ == "__main__":
    _main()
