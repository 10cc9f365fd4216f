"""The cost of opening a packed set of ten million samples: seconds, and memory of each of a host's ranks.

    python benchmarks/many_samples.py OUT.json [--samples N] [--ranks N]

The index is real; the shards are files of the right size without content, so no image can be read. Every rank is a
process that opens the training set as `train` does, looks up a batch of samples and hashes the sample list. The first
one to open it writes the file that all of them share. Memory is read from Linux's /proc/self: "private" is memory that
belongs to one rank alone, "rss" counts shared pages for each rank that touches them, and "pss" divides them by the
ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np

import hyperbatch
from hyperbatch.data.shards import INDEX_DTYPE, MANIFEST, Manifest, Shard, ShardSource, Split, index_path, read_manifest

_IMAGE_BYTES = 110_000  # the mean of ImageNet
_SHARD_BYTES = 512 << 20
_CLASSES = 1000
_BATCH = 256


def write_set(folder: Path, samples: int) -> None:
    rng = np.random.default_rng(0)
    names = tuple(f"n{number:08d}" for number in range(_CLASSES))
    splits = {split: _write_split(folder, split, count, rng) for split, count in (("train", samples), ("val", 50_000))}
    (folder / MANIFEST).write_text(json.dumps(Manifest(classes=names, splits=splits).to_dict()))


def _write_split(folder: Path, split: str, samples: int, rng: np.random.Generator) -> Split:
    room = (-(-_IMAGE_BYTES // 512) + 3) * 512
    per_shard, shards = _SHARD_BYTES // room, []
    for start in range(0, samples, per_shard):
        rows = np.zeros(min(per_shard, samples - start), INDEX_DTYPE)
        rows["offset"] = 512 + room * np.arange(len(rows))
        rows["length"] = rng.integers(_IMAGE_BYTES // 2, _IMAGE_BYTES, len(rows))
        rows["label"] = rng.integers(0, _CLASSES, len(rows))
        rows["width"], rows["height"] = 500, 375
        rows["crc32"] = rng.integers(0, 1 << 32, len(rows))
        path = folder / f"{split}-{len(shards):06d}.tar"
        with open(path, "wb") as file:
            file.truncate(512 + room * len(rows) + 1024)
        np.save(index_path(path), rows)
        checksum = zlib.crc32(index_path(path).read_bytes())
        shards.append(Shard(name=path.name, samples=len(rows), index_crc32=checksum, names_crc32=0))
    return Split(samples=samples, bytes=samples * _IMAGE_BYTES, classes=tuple(range(_CLASSES)), shards=tuple(shards))


def rank(folder: Path) -> None:
    """Measures one rank. It prints a line when it has opened the set, and one after all ranks have done so."""
    from hyperbatch.data.identity import sample_list

    before = _memory_mb()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    source = ShardSource(folder, "train", read_manifest(folder))
    opened_s, opened_cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    start_s = time.perf_counter()
    source.locations(np.random.default_rng(0).integers(0, len(source), _BATCH).tolist())
    batch_ms = 1e3 * (time.perf_counter() - start_s)
    opened = _memory_mb()
    start_s = time.perf_counter()
    sample_list(source)
    hashed_s = time.perf_counter() - start_s
    print("ready", flush=True)
    input()  # waits until all ranks have come this far, so that pss is that of a whole host
    row = {
        "open_s": opened_s,
        "open_cpu_s": opened_cpu_s,
        "locate_batch_ms": batch_ms,
        "sample_list_s": hashed_s,
        "before": before,
        "opened": opened,
        "after_sample_list": _memory_mb(),
    }
    print(json.dumps(row), flush=True)


def _memory_mb() -> dict[str, float]:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    rollup = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    wanted = {"rss": lines["VmRSS"], "peak_rss": lines["VmHWM"], "private": lines["RssAnon"], "pss": rollup["Pss"]}
    return {name: int(text.split()[0]) / 1000 for name, text in wanted.items()}


def measure(folder: Path, ranks: int) -> list[dict[str, object]]:
    """Runs all ranks at once."""
    command = [sys.executable, __file__, "--rank", str(folder)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(ranks)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    return [json.loads(process.communicate("\n")[0]) for process in processes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?")
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(args.rank)
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        os.environ["XDG_CACHE_HOME"] = str(root / "cache")
        (root / "set").mkdir()
        write_set(root / "set", args.samples)
        rows = {"first": measure(root / "set", 1), "later": measure(root / "set", 1)}
        rows[f"{args.ranks} ranks at once"] = measure(root / "set", args.ranks)
    result = {
        "bench": "many_samples",
        "samples": args.samples,
        "unit": "seconds, milliseconds and megabytes (1e6 bytes), a row for each rank",
        "versions": {
            "hyperbatch": hyperbatch.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        "cores": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "rows": rows,
    }
    text = json.dumps(result, indent=1)
    if args.out:
        Path(args.out).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
