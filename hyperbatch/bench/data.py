"""`hyperbatch bench data`: images per second from files to normalised batches on the device, ours against others'.

Every candidate reads the same distinct generated JPEGs, makes a random-resized crop, mirrors, normalises and batches
them. Files are read once before timing, so they come from the page cache: this measures decoding, not disks. Small
images in memory have separate rows and a separate peer (`data_arrays`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from hyperbatch.bench import harness
from hyperbatch.bench.data_arrays import array_rows
from hyperbatch.bench.harness import Candidate
from hyperbatch.bench.peers import check_names, data_peers
from hyperbatch.config import BatchPhase, DataConfig
from hyperbatch.cores import usable_cores
from hyperbatch.data.decoders import resolve_decoders
from hyperbatch.data.folders import FolderSource
from hyperbatch.data.loader import TrainLoader
from hyperbatch.data.pack import pack
from hyperbatch.data.source import EncodedSource, open_data
from hyperbatch.schedule import resolve_phases, steps
from hyperbatch.stopwatch import wall_s

SMALL_SIDE = 256  # pixels: the shorter side of images in the smaller shards
JPEG_QUALITY = 87  # of the generated files


def bench_data(
    *,
    images: int = 0,
    width: int = 500,
    height: int = 375,
    image_size: int = 224,
    batch: int = 0,
    passes: int = 0,
    threads: int = 0,
    rounds: int = 5,
    peers: Sequence[str] | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Returns rows of images per second.

    threads: number of our threads and of others' worker processes; 0 means one per core.
    images, batch, passes over the set in a round: 0 means 256, 64 and 1 on a CPU, and 2,048, 256 and 4 on a GPU.
    peers: a selection of dataloader, dali and arrays; None means all that are installed.
    """
    names = check_names(peers)
    target = harness.pick_device(device)
    gpu = target.type == "cuda"
    images, batch, passes = images or (2048 if gpu else 256), batch or (256 if gpu else 64), passes or (4 if gpu else 1)
    threads = threads or usable_cores()
    dtype = torch.float16 if gpu else torch.float32
    with tempfile.TemporaryDirectory(prefix="hyperbatch-bench-") as folder:
        root = Path(folder)
        mean_bytes = write_jpegs(root / "tree", images, width, height)
        harness.say(f"{images} JPEGs of {width}x{height} written")
        pack(root / "tree", root / "shards")
        pack(root / "tree", root / "small", short_side=SMALL_SIDE)
        pack(root / "tree", root / "decoded", short_side=SMALL_SIDE, decoded=True)
        harness.say(f"packed unchanged, at {SMALL_SIDE} px, and decoded at {SMALL_SIDE} px")
        sets = {name: _encoded(root / name) for name in ("tree", "shards", "small", "decoded")}
        tree = sets["tree"]
        assert isinstance(tree, FolderSource)

        candidates, loaders = [], []
        auto = resolve_decoders("auto", target)
        runs = [
            *((f"folder, {decoder}", tree, decoder, "none") for decoder in dict.fromkeys((*auto, "pillow"))),
            (f"shards, {auto[0]}", sets["shards"], auto[0], "none"),
            (f"shards of {SMALL_SIDE} px, {auto[0]}", sets["small"], auto[0], "none"),
            (f"shards of {SMALL_SIDE} px, decoded", sets["decoded"], auto[0], "none"),
            ("kept in host memory", sets["shards"], auto[0], "host"),
            *([("kept in GPU memory", sets["shards"], auto[0], "gpu")] if gpu else []),
        ]
        for name, source, decoder, cache in runs:
            config = DataConfig(image_size=image_size, decoder=decoder, data_threads=threads, cache=cache)
            loader = TrainLoader(source, config, seed=0, rank=0, world_size=1, device=target, dtype=dtype)
            loaders.append(loader)
            candidates.append(Candidate(name=f"hyperbatch, {name}", run=_ours(loader, len(source), batch, passes)))
        others = data_peers(names, tree, image_size=image_size, batch=batch, workers=threads, device=target)
        candidates += [Candidate(name=c.name, run=_repeated(c.run, passes), peer=True) for c in others]
        measure = partial(_images_per_s, device=target)
        try:
            samples = harness.interleave(candidates, measure, rounds=rounds, warmup=1, told=_say_speed)
        finally:
            for loader in loaders:
                loader.close()
    table = harness.rows(
        candidates,
        samples,
        unit="img/s",
        higher_is_better=True,
        threads=threads,
        image=f"{width}x{height} JPEG, {mean_bytes / 1e3:.0f} kB",
        cache="page cache",
    )
    table += array_rows(
        measure,
        images=50_000 if gpu else images,
        batches=(2_000, 12_500) if gpu else (batch,),
        device=target,
        dtype=dtype,
        rounds=rounds,
        peer="arrays" in names,
        told=_say_speed,
    )
    return harness.result("data", table, load_1min=os.getloadavg()[0])


def write_jpegs(folder: Path, count: int, width: int, height: int) -> float:
    """Writes a folder tree of distinct JPEGs like photographs (about 70 kB at 500x375). Returns their mean size."""
    for split in ("train", "val"):
        for name in ("a", "b"):
            (folder / split / name).mkdir(parents=True)

    def write(i: int) -> int:
        rng = np.random.default_rng(i)
        coarse = Image.fromarray(rng.integers(0, 256, (height // 6, width // 6, 3), dtype=np.uint8))
        pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.float32)
        pixels += 6 * rng.standard_normal(pixels.shape, dtype=np.float32)
        path = folder / ("train" if i < count else "val") / "ab"[i % 2] / f"{i}.jpg"
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path, quality=JPEG_QUALITY)
        return path.stat().st_size

    with ThreadPoolExecutor() as pool:
        return float(np.mean(list(pool.map(write, range(count + 2)))))  # the last two are the val split


def _encoded(folder: Path) -> EncodedSource:
    source, _ = open_data(DataConfig(data=str(folder)))
    assert isinstance(source, EncodedSource)
    return source


def _images_per_s(run: Callable[[], int], device: torch.device) -> float:
    counts: list[int] = []
    seconds = wall_s(lambda: counts.append(run()), device=device)  # until the last batch has arrived
    return counts[0] / seconds


def _say_speed(what: str, images_per_s: float) -> None:
    harness.say(f"{what}: {images_per_s:,.0f} img/s")


def _ours(loader: TrainLoader, samples: int, batch: int, passes: int) -> Callable[[], int]:
    plan = list(steps(resolve_phases((BatchPhase(0, batch),), samples, 1), samples, float(passes)))
    return lambda: sum(len(made.labels) for made in loader.batches(plan))


def _repeated(run: Callable[[], int], passes: int) -> Callable[[], int]:
    return lambda: sum(run() for _ in range(passes))
