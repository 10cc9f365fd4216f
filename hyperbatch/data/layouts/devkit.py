"""The WordNet ids in the meta.mat of ImageNet's devkit, read by a process of its own: scipy's reader is not safe from
damaged files, and of some the process that calls it dies.

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


@functools.lru_cache(maxsize=1)  # a set is counted, and then opened
def wordnet_ids(meta: bytes) -> dict[int, str]:
    """By the devkit's own numbers. ImportError: there is no scipy. ValueError: the file cannot be read."""
    if importlib.util.find_spec("scipy") is None:
        raise ImportError
    command = [sys.executable, "-P", __file__]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # it finds scipy where this process would
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
