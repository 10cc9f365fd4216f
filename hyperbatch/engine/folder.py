"""The folder of a run: its default name, and whether it may be this run's."""

from __future__ import annotations

import itertools
import time
import uuid
from pathlib import Path

from hyperbatch.config import Config
from hyperbatch.errors import InputError
from hyperbatch.record import RunRecord


def default_out(config: Config) -> Path:
    """runs/<recipe>-<time>, with a number behind it when two runs start in the same second."""
    label = config.recipe.replace(":", "_").replace("/", "_")
    base = Path("runs") / f"{label}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([base], (base.with_name(f"{base.name}-{n}") for n in itertools.count(2)))
    for name in names:
        try:
            name.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(f"{name} cannot be made: {error.strerror}; choose a folder with --out") from None
        return name
    raise AssertionError("names are endless")


def claim_folder(out: Path, *, resume: bool) -> None:
    """Makes the run's folder, or says why it cannot be this run's. A failed run without a checkpoint is replaced."""
    if resume and not out.is_dir():
        raise InputError(f"--resume: {out} does not exist; give --out the folder of the run to continue")
    if not resume and (has_checkpoint(out) or _is_finished(out)):
        raise InputError(f"--out {out} already holds a run; continue it with --resume or choose another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".writable-{uuid.uuid4().hex}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"--out {out} cannot be written: {error.strerror}; choose another folder") from None


def _is_finished(out: Path) -> bool:
    return (out / "record.json").exists() and not RunRecord.load(out).error


def has_checkpoint(out: Path) -> bool:
    return any((out / "checkpoints").glob("step-*.pt"))


def resume_hint(out: Path) -> str:
    """How to go on after a run that was cut short."""
    if has_checkpoint(out):
        return f"--resume --out {out} continues from the newest checkpoint"
    return "it had saved no checkpoint yet; start it again"
