"""The cost of a training run with many ranks on one host: memory, open files, messages to the terminal.

    python -m benchmarks.many_ranks_train OUT.json [--ranks 16,64,128]

Each rank is a forked process that trains the network of `digits` on random images, over gloo and an 8-wide torus: four
steps, an evaluation and a checkpoint, twice. Then

    resumed    half as many ranks continue the run from its checkpoint for four steps
    killed     a rank of another run is killed in its third step; the tool counts how many of the others name it

Rank 0 also receives the batch-norm statistics of a ResNet-50 from every rank, as at each of its checkpoints. Wall times
depend on how many ranks share this host's cores, and are not recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import tempfile
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # otherwise every rank would import it
import torch.multiprocessing as processes

import hyperbatch
from benchmarks.many_ranks import host_store, open_files
from hyperbatch.config import BatchPhase, Config
from hyperbatch.engine import loop, snapshot, stores
from hyperbatch.engine.ranks import Ranks
from hyperbatch.errors import RunFailed
from hyperbatch.recipes import get_recipe

_COLUMNS = 8
_STATISTICS = 53_120  # ResNet-50's running means and variances
_TIMEOUT_S = 300.0

Row = dict[str, Any]


def config(ranks: int, out: Path, **values: Any) -> Config:
    """ranks: sets the global batch, which stays the same when fewer ranks continue."""
    return get_recipe("digits").override(
        dataset="synthetic",
        train_samples=64 * ranks,
        eval_samples=5 * ranks,
        batch_phases=(BatchPhase(0, 16 * ranks),),
        max_steps=8,
        target_top1=None,
        algorithm="torus",
        device="cpu",
        timeout_s=_TIMEOUT_S,
        out=str(out),
        **values,
    )


def rank_body(config: Config, rank: int, world_size: int, port: int, killed: int, errors: Path, said: Any) -> None:
    os.dup2(os.open(errors / f"{rank}", os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    ranks = Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=rank % _COLUMNS,
        local_size=_COLUMNS,
        launcher="torchrun",
        master_addr=stores.LOOPBACK,
        master_port=port,
        agent_store=True,
    )
    train, train_stride, steps, found = loop.train, loop.train_stride, 0, {}

    def measured(*args: Any) -> Any:
        record = train(*args)
        found.update(files=open_files(), private_mb=private_mb(), statistics_mb=statistics_mb(ranks))
        return record

    def counted(*args: Any) -> Any:
        nonlocal steps
        steps += 1
        if rank == killed and steps == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_stride(*args)

    loop.train, loop.train_stride = measured, counted
    try:
        loop.run(config, ranks)
    except RunFailed as error:
        found["error"] = str(error)[:80]  # all messages of the ranks must fit into the pipe
    said.put((rank, found))
    os._exit(0)


def private_mb() -> float:
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()]
    return sum(int(line[1]) for line in lines if line[0].startswith("Private_")) / 1024


def statistics_mb(ranks: Ranks) -> float:
    """Returns the most by which this process grows while rank 0 receives the statistics."""
    buffers = {"means and variances": torch.ones(_STATISTICS), "count": torch.tensor(1)}
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    before = peak_mb()
    snapshot.gather_rows(buffers, ranks)
    return peak_mb() - before


def peak_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def run(config: Config, world_size: int, errors: Path, killed: int = -1) -> dict[int, Row]:
    """Returns the measurements of each rank. Ranks that died are missing."""
    context = processes.get_context("fork")
    ports: SimpleQueue[tuple[int, int]] = context.SimpleQueue()
    said: SimpleQueue[tuple[int, Row]] = context.SimpleQueue()
    host = context.Process(target=host_store, args=(ports,))
    host.start()
    port, _ = ports.get()
    errors.mkdir()
    ranks = [
        context.Process(target=rank_body, args=(config, rank, world_size, port, killed, errors, said))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    found: dict[int, Row] = {}
    while not said.empty():
        rank, values = said.get()
        found[rank] = values
    host.kill()
    host.join()
    return found


def measure(world_size: int, folder: Path) -> Row:
    out = folder / "run"
    found = run(config(world_size, out), world_size, folder / "errors")
    if len(found) != world_size or any("error" in each for each in found.values()):
        raise SystemExit(f"a run of {world_size} ranks has failed: {found}")
    row: Row = {"ranks": world_size}
    for key in ("private_mb", "files", "statistics_mb"):
        row[key] = {
            "rank 0": round(found[0][key]),
            "median": round(statistics.median(each[key] for each in found.values())),
        }
    row["checkpoint_bytes"] = max(path.stat().st_size for path in (out / "checkpoints").glob("step-*.pt"))
    row["record_bytes"] = (out / "record.json").stat().st_size
    half = run(config(world_size, out, resume="yes").override(max_steps=12), world_size // 2, folder / "resumed")
    row["resumed_ranks"] = sum("error" not in each for each in half.values())
    lost = world_size // 2 + 1
    left = run(config(world_size, folder / "other"), world_size, folder / "killed", killed=lost)
    printed = {int(path.name): path.read_text() for path in (folder / "killed").iterdir()}
    told = {rank: left.get(rank, {}).get("error", "") + printed[rank] for rank in printed}
    row["ranks_that_name_the_killed"] = sum(f"rank {lost} " in text for text in told.values())
    row["lines_of_a_killed_run"] = sum(text.count("\n") for text in printed.values())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", default="16,64,128")
    args = parser.parse_args()
    rows = []
    for world_size in map(int, args.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(world_size, Path(folder)))
        print(rows[-1], flush=True)
    versions = {"hyperbatch": hyperbatch.__version__, "torch": torch.__version__, "python": platform.python_version()}
    result = {"bench": "many_ranks_train", "versions": versions, "cores": os.cpu_count(), "rows": rows}
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
