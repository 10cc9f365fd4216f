"""One rank, as the elastic agent starts it: python -m hyperbatch.engine.worker CONFIG.json."""

from __future__ import annotations

import contextlib
import ctypes
import json
import signal
import sys
import time
import traceback
from pathlib import Path

from hyperbatch.config import Config
from hyperbatch.engine.ranks import ended_by_sigterm, find_ranks
from hyperbatch.errors import InputError, RunFailed

PR_SET_PDEATHSIG = 1


def main(config_path: Path) -> int:
    """0 when the run ended, target reached or not: the parent reads the record. Failures are left beside the config."""
    end_with_parent()
    ranks = find_ranks()
    assert ranks is not None, "the agent sets RANK and WORLD_SIZE"
    config = Config.from_dict(json.loads(config_path.read_text()))
    try:
        from hyperbatch.engine.loop import run

        # Rank 0 leaves a record when it is told to stop; the others may be waiting for it in code no signal reaches.
        with ended_by_sigterm() if ranks.rank == 0 else contextlib.nullcontext():
            run(config, ranks)
    except (InputError, RunFailed) as error:
        words = {"kind": "InputError" if isinstance(error, InputError) else "RunFailed", "message": str(error)}
    except KeyboardInterrupt:
        return 1  # the parent was told to stop, and says so
    except Exception as error:
        # Our bug or the machine's fault. The parent prints the traceback if this rank was the first to fail; the others
        # only heard of it through a lost connection.
        message = f"rank {ranks.rank}: {type(error).__name__}: {str(error).strip()}"
        words = {"kind": "RunFailed", "message": message, "traceback": traceback.format_exc()}
    else:
        return 0
    said = {**words, "time": time.time()}
    (config_path.parent / f"rank-{ranks.rank}.json").write_text(json.dumps(said))
    return 2 if words["kind"] == "InputError" else 1


def end_with_parent() -> None:
    """A command that is killed cannot end its ranks, and they would go on in a folder that nobody holds any more."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
