"""From one call to running ranks: in this process, through torchrun's elastic agent, or under somebody's launcher.

train(config)
  started by torchrun, srun or mpirun?   be the rank it says
  one process asked for?                 be the only rank
  else                                   check the input, then let the elastic agent start `engine.worker` N times
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hyperbatch.config import Config
from hyperbatch.data.source import DataCounts, check_data
from hyperbatch.engine.folder import claimed, default_out, resume_hint
from hyperbatch.engine.ranks import Ranks, ended_by_sigterm, find_ranks
from hyperbatch.errors import InputError, RunFailed
from hyperbatch.plan import inventory
from hyperbatch.plan.types import RankGrid
from hyperbatch.record import RunRecord
from hyperbatch.schedule import resolve_phases

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

AGENT_PATIENCE_S = 20.0  # below the 30 s the elastic agent gives ranks to end


def train(config: Config) -> RunRecord:
    """Trains and returns the record. InputError for wrong input, RunFailed when a run that began could not end."""
    ranks = find_ranks()
    if config.run.resume and not config.run.out:
        raise InputError("--resume needs the folder of the run to continue: give it with --out")
    if ranks is None:
        counts = check_data(config.data)  # before torch is loaded: the commonest mistake is answered at once
        nproc = config.run.nproc or default_nproc(config.run.device)
        check_input(config, nproc, counts)
        config = config.override(out=str(config.run.out or default_out(config)), nproc=nproc)
        with claimed(Path(config.run.out or "."), resume=config.run.resume):
            check_resume(config)
            return _train_elastic(config, nproc) if nproc > 1 else _train_here(config, Ranks())
    return _train_here(config, ranks)


def _train_here(config: Config, ranks: Ranks) -> RunRecord:
    from hyperbatch.engine.loop import run

    with ended_by_sigterm():
        record = run(config, ranks)
    if ranks.rank == 0:
        finish(record)
    return record


def finish(record: RunRecord) -> None:
    """What is drawn once the run is over; a report that fails must not turn a good run into a failed one."""
    from hyperbatch.report import write_report

    folder = Path(record.folder)
    try:
        write_report([folder])
    except Exception as error:
        record.warnings.append(f"report.html could not be written: {error}")
        record.save(folder)


def default_nproc(device: str) -> int:
    """One process per GPU; on a CPU two, so that the path of a large run is the path of a small one.

    Asked without loading torch, since a dry run asks, too.
    """
    gpus = 0 if device == "cpu" else count_gpus()
    return gpus or min(2, os.cpu_count() or 1)


def count_gpus() -> int:
    """GPUs a process started here would see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def check_input(config: Config, world_size: int, counts: DataCounts) -> None:
    """Every other mistake that can be seen before a worker starts, so that it is told once and at once.

    counts: what `check_data` found.
    """
    if config.comm.grid is not None:
        RankGrid.parse(config.comm.grid).check_world(world_size)
    resolve_phases(config.schedule.batch_phases, counts.train_samples, world_size, accumulate=config.run.accumulate)
    model = config.model.model
    if model in inventory.model_names():  # too small an image is refused
        inventory.layers(model, classes=counts.classes, image_size=config.data.image_size, in_channels=counts.channels)
    if config.model.init_from is not None and not Path(config.model.init_from).exists():
        raise InputError(f"--init-from {config.model.init_from}: no such file")


def check_resume(config: Config) -> None:
    """That the run to continue is this one."""
    if config.run.resume:
        from hyperbatch import checkpoint

        checkpoint.check_same_run(checkpoint.load(Path(config.run.out or "."))["config"], config)


def _train_elastic(config: Config, nproc: int) -> RunRecord:
    with tempfile.TemporaryDirectory(prefix="hyperbatch-") as scratch:
        config_path = Path(scratch) / "config.json"
        config_path.write_text(json.dumps(config.to_dict()))
        start_ranks(
            nproc, "hyperbatch.engine.worker", config_path, hint=lambda: resume_hint(Path(config.run.out or "."))
        )
    record = RunRecord.load(Path(config.run.out or "."))
    finish(record)
    return record


def start_ranks(nproc: int, module: str, argument: Path, *, hint: Callable[[], str] = str) -> None:
    """Runs `python -m module argument` as ranks 0 to nproc - 1 of this host, under torchrun's elastic agent.

    hint: what to tell the user to do, asked for when the ranks have failed.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The agent's own log repeats, over many lines, what is said below in one.
    for name in ("torch.distributed.elastic", *logging.root.manager.loggerDict):  # some have levels of their own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    agent = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(agent, sys.executable)("-m", module, str(argument))
    except ChildFailedError as error:
        raise _explain(error, argument.parent, hint) from None
    except SignalException as error:
        name = signal.Signals(error.sigval).name
        raise RunFailed("; ".join(part for part in (f"interrupted by {name}", hint()) if part)) from None


def _explain(error: ChildFailedError, scratch: Path, hint: Callable[[], str]) -> InputError | RunFailed:
    """The first failure among the ranks, in one line. Ranks leave their own words in rank-N.json."""
    said = {
        rank: json.loads(path.read_text())
        for rank in error.failures
        if (path := scratch / f"rank-{rank}.json").exists()
    }
    # SIGTERM is how the agent ends the survivors; after half a minute it uses SIGKILL on those that do not listen.
    killed = [rank for rank, f in error.failures.items() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM]
    first_words = min(said, key=lambda rank: said[rank]["time"], default=None)
    if first_words is not None and (not killed or time.time() - said[first_words]["time"] > AGENT_PATIENCE_S):
        words = said[first_words]
        print(words.get("traceback", ""), file=sys.stderr, end="")
        silent = f"; rank {killed[0]} did not answer and was ended" if killed else ""
        kind = InputError if words["kind"] == "InputError" else RunFailed
        return kind(words["message"] + silent)
    # A rank that was killed says nothing, and the others fail within the same moment because of it: it is named.
    rank = killed[0] if killed else error.get_first_failure()[0]
    failure = error.failures[rank]
    what = f"exited with {failure.exitcode}"
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        what = f"was killed by {name}" + ("; out of memory?" if name == "SIGKILL" else "")
    return RunFailed("; ".join(part for part in (f"rank {rank} (pid {failure.pid}) {what}", hint()) if part))
