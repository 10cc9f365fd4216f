"""The folder of a run: its default name, and the checks and the lock that reserve it for one run."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shlex
import shutil
import time
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path

from hyperbatch.config import Config
from hyperbatch.durable import FULL, replace_text
from hyperbatch.engine.ranks import Ranks, errors_shared, share
from hyperbatch.errors import InputError
from hyperbatch.recipes.files import RUN_CONFIG, format_config, located
from hyperbatch.record import RunRecord

DEFAULT_PARENT = Path("runs")
LOCK = ".lock"
SWEEP_ROWS = "rows.jsonl"  # in the folder of a sweep
HELD = "HYPERBATCH_HOLDS"  # environment variable: the folder that the command which started this rank has locked for it


def default_out(config: Config) -> Path:
    """Creates and returns runs/<recipe>-<time>; a number is appended if two runs start in the same second."""
    label = config.recipe.replace(":", "_").replace("/", "_")
    base = DEFAULT_PARENT / f"{label}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([base], (base.with_name(f"{base.name}-{n}") for n in itertools.count(2)))
    for name in names:
        try:
            name.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(f"{name} cannot be created: {error.strerror}; choose a folder with --out") from None
        return name
    raise AssertionError("names are endless")


def claim_folder(config: Config, ranks: Ranks, held: contextlib.ExitStack) -> Path:
    """Returns the run's folder. Rank 0 claims it until `held` is closed, unless a parent command has claimed it."""
    out = config.run.out
    with errors_shared(ranks):
        if ranks.rank == 0 and ranks.launcher != "none":
            out = out or str(default_out(config))
            held.enter_context(claimed(Path(out), resume=config.run.resume))
    return Path(share(out, ranks) or default_out(config))


@contextlib.contextmanager
def claimed(out: Path, *, resume: str) -> Iterator[None]:
    """Creates the run's folder and locks it, or raises InputError if it belongs to another run. A failed run without a
    checkpoint is replaced.

    resume: "no", "yes" or "auto", as in the config. If an InputError is raised in this context, no files are left.

    While the lock is held, no other run can use the folder: neither a second command nor a --resume of a run that is
    still alive. The kernel releases the lock when the process ends, however it ends.
    """
    if resume == "yes" and not out.is_dir():
        raise InputError(f"--resume: {out} does not exist; use --out with the folder of the run to continue")
    existed = out.is_dir()
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".writable-{uuid.uuid4().hex}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        if error.errno not in FULL or not _goes_on(out, resume):
            raise _unwritable(out, error) from None
    if (out / SWEEP_ROWS).exists():
        raise InputError(f"--out {out} holds a sweep, whose report would be replaced; choose another folder")
    with contextlib.nullcontext() if os.environ.get(HELD) == _name(out) else _lock(out):
        if resume == "no" if has_checkpoint(out) else resume != "yes" and _is_finished(out):
            raise InputError(f"--out {out} already holds a run; continue it with --resume or choose another folder")
        with _tidied(out, existed=existed):
            yield


@contextlib.contextmanager
def _tidied(out: Path, *, existed: bool) -> Iterator[None]:
    """On InputError, empties a folder that was empty before, and removes one that did not exist before. A run that was
    to be continued, and has not trained, keeps the config that it had."""
    empty = [entry.name for entry in out.iterdir()] in ([], [LOCK])
    config, saved = out / RUN_CONFIG, _checkpoints(out)
    before = config.read_bytes() if saved and config.exists() else None
    try:
        yield
    except InputError:
        if before is not None and _checkpoints(out) == saved:
            with contextlib.suppress(OSError):  # the error of the run says more
                replace_text(config, before.decode(errors="surrogateescape"))
        if empty and not has_checkpoint(out) and not (out / "record.json").exists():  # otherwise training had begun
            shutil.rmtree(out, ignore_errors=True)
            if out.parent == DEFAULT_PARENT:  # `default_out` has created both
                with contextlib.suppress(OSError):
                    DEFAULT_PARENT.rmdir()  # fails if it contains other runs
            elif existed:
                out.mkdir(exist_ok=True)
        raise


def holds_run(folder: Path) -> bool:
    """Whether a run has written files to this folder, however it ended."""
    return (folder / RUN_CONFIG).exists() or (folder / "record.json").exists()


def _goes_on(out: Path, resume: str) -> bool:
    """Whether the folder already holds this run. A full disk is then no error: the run can train until there is space
    again, like a run whose disk becomes full while it trains."""
    return resume != "no" and (has_checkpoint(out) or (out / RUN_CONFIG).exists())


def _unwritable(out: Path, error: OSError) -> InputError:
    return InputError(f"--out {out} cannot be written: {error.strerror}; choose another folder")


@contextlib.contextmanager
def _lock(out: Path) -> Iterator[None]:
    try:
        file = (out / LOCK).open("w")
    except OSError as error:
        raise _unwritable(out, error) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"--out {out} is in use by another run; choose another folder") from None
        except OSError:
            pass  # a file system without locks
        before = os.environ.get(HELD)
        os.environ[HELD] = _name(out)
        try:
            yield
        finally:
            os.environ.pop(HELD)
            if before is not None:
                os.environ[HELD] = before


def _name(out: Path) -> str:
    return str(out.resolve())


def _is_finished(out: Path) -> bool:
    return (out / "record.json").exists() and not RunRecord.load(out).error


def has_checkpoint(out: Path) -> bool:
    return bool(_checkpoints(out))


def _checkpoints(out: Path) -> set[str]:
    return {path.name for path in (out / "checkpoints").glob("step-*.pt")}


def keep_config(config: Config, out: Path) -> str:
    """Writes the config to the run's folder, for `--resume`. If that fails and the run can continue without it, returns
    a note for the user; otherwise ""."""
    path, text = out / RUN_CONFIG, format_config(located(config))
    if _says(path, text):
        return ""
    try:
        replace_text(path, text)
    except OSError as error:
        if not _goes_on(out, config.run.resume):
            raise _unwritable(out, error) from None
        return f"{path} cannot be written and keeps its old content: {error.strerror}"
    return ""


def _says(path: Path, text: str) -> bool:
    """Whether the file sets the same values as the text. The texts may differ: a recipe may have 2 and a file 2.0."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")) == tomllib.loads(text)
    except (OSError, ValueError):
        return False


def resume_hint(out: Path) -> str:
    """Returns advice on how to continue a run that was cut short."""
    if has_checkpoint(out):
        return f"--resume --out {shlex.quote(str(out))} continues from the newest checkpoint"
    return "no checkpoint had been saved yet, so the run can only be started from the beginning"
