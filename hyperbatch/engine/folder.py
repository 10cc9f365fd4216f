"""The folder of a run: its default name, and whether it may be this run's."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

from hyperbatch.config import Config
from hyperbatch.errors import InputError


def default_out(config: Config) -> Path:
    label = config.recipe.replace(":", "_").replace("/", "_")
    return Path("runs") / f"{label}-{time.strftime('%Y%m%d-%H%M%S')}"


def claim_folder(out: Path, *, resume: bool) -> None:
    """Makes the run's folder, or says why it cannot be this run's."""
    if resume and not out.is_dir():
        raise InputError(f"--resume: {out} does not exist; give --out the folder of the run to continue")
    metrics = out / "metrics.jsonl"
    if not resume and metrics.exists() and metrics.stat().st_size > 0:
        raise InputError(f"--out {out} already holds a run; continue it with --resume or choose another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".writable-{uuid.uuid4().hex}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"--out {out} cannot be written: {error.strerror}; choose another folder") from None
