"""`bench step --data`: short runs through the engine, from files to updated weights, and their speed.

    synthetic     pixels that are already on the device: the baseline of the others
    files         every image of every step is read and decoded
    decoded       shards of decoded pixels: every image of every step is read
    kept          decoded once, then cropped from the pixels that the device (or the host, without a GPU) keeps

Files have just been written or copied, so they come from the page cache: this measures decoding, not disks.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hyperbatch.bench import harness
from hyperbatch.bench.data import SMALL_SIDE, write_jpegs
from hyperbatch.bench.harness import Candidate
from hyperbatch.bench.step_runs import Setting
from hyperbatch.config import BatchPhase, Config, DataConfig
from hyperbatch.data.pack import pack
from hyperbatch.data.source import EncodedSource, open_data, spread_ids
from hyperbatch.engine.loop import run
from hyperbatch.engine.ranks import Ranks
from hyperbatch.errors import InputError
from hyperbatch.record import RunRecord, read_metrics

GENERATED = "generated"
SYNTHETIC = "synthetic"
GENERATED_IMAGES = {"cuda": 2048, "cpu": 64}
GENERATED_SIZE = (500, 375)  # about 70 kB each, as in `bench data`
MLPERF_H200_IMAGES_PER_S = 7950  # MLPerf training v4.0, 8 x H200, per GPU, including decoding and all-reduce
WINDOWS = 10


class Form(NamedTuple):
    """A way to store the training images."""

    name: str
    overrides: dict[str, Any]
    about: str


def end_to_end(data: str, setting: Setting, batches: Sequence[int], steps: int | None) -> list[dict[str, Any]]:
    """Returns a row for each batch and form. data: a folder as for `train --data`, or "generated"."""
    device = setting.device.type
    steps = steps or (200 if device == "cuda" else 2 * WINDOWS)
    if steps < 2 * WINDOWS:
        raise InputError(f"--steps {steps}: give at least {2 * WINDOWS}, so that the first steps can be excluded")
    with tempfile.TemporaryDirectory(prefix="hyperbatch-bench-") as scratch:
        base = short_run(setting, steps)
        rows = []
        for form in forms(data, Path(scratch), setting):
            images = len(open_data(base.override(**form.overrides).data)[0])
            for batch in batches:
                config = base.override(
                    **form.overrides,
                    batch_phases=(BatchPhase(0, batch),),
                    epochs=(steps + 1) * batch / images,
                    out=str(Path(scratch) / f"run-{len(rows)}"),
                )
                harness.say(f"{form.name}, batch {batch}: {steps} steps")
                rows.append(trained(config, f"batch {batch} / {form.name}", batch) | {"data": form.about})
    alone = {row["batch"]: row["mean"] for row in rows if row["name"].endswith(SYNTHETIC)}
    return [row | {"ratio_to_synthetic": row["mean"] / alone[row["batch"]]} for row in rows]


def short_run(setting: Setting, steps: int) -> Config:
    """The config of a run that only trains this many steps; the caller sets data, batch and folder."""
    return Config(recipe="bench-step").override(
        model=setting.model,
        image_size=setting.image_size,
        eval_size=setting.image_size,  # a model of a fixed size is tested with this size
        eval_resize=setting.image_size,
        classes=setting.classes,
        precision=setting.precision,
        warmup_epochs=0.0,
        eval_every_epochs=1e9,
        checkpoint_every_epochs=0.0,
        max_steps=steps,
        final_eval=False,
        device=setting.device.type,
        nproc=1,
    )


def forms(data: str, scratch: Path, setting: Setting) -> Iterator[Form]:
    """Yields synthetic pixels, then the folder as it is, or every form of the generated files."""
    device, count = setting.device.type, GENERATED_IMAGES[setting.device.type]
    plain = {"dataset": "synthetic", "train_samples": count, "eval_samples": count, "augment": "none", "flip": False}
    yield Form(SYNTHETIC, plain, "pixels on the device")
    folder = generate(scratch, count, setting.classes) if data == GENERATED else Path(data)
    yield _files("files to weights", folder, "none")
    if data == GENERATED:
        small = scratch / "small"
        pack(folder, small, short_side=SMALL_SIDE)
        yield _files(f"shards of {SMALL_SIDE} px to weights", small, "none")
        pixels = scratch / "pixels"
        pack(folder, pixels, short_side=SMALL_SIDE, decoded=True)
        yield _files(f"decoded shards of {SMALL_SIDE} px to weights", pixels, "none")
        kept = "gpu" if device == "cuda" else "host"
        yield _files(f"pixels of {SMALL_SIDE} px kept in {kept} memory", small, kept)


def _files(name: str, folder: Path, cache: str) -> Form:
    source, _ = open_data(DataConfig(data=str(folder)))
    return Form(name, {"data": str(folder), "cache": cache}, describe(source))


def trained(config: Config, name: str, batch: int) -> dict[str, Any]:
    """Trains the config and returns its row."""
    return row_of(run(config, Ranks()), config, name, batch)


def row_of(record: RunRecord, config: Config, name: str, batch: int) -> dict[str, Any]:
    """Computes the speed from the run's own metrics."""
    lines = [line for line in read_metrics(Path(record.folder)) if line["event"] == "step"]
    steady = lines[len(lines) // 5 :]  # without the first fifth
    ends_s = [line["time_s"] for line in steady]
    speeds, mean = window_speeds(ends_s, batch)
    wait_s = sum(line["data_wait_s"] for line in steady[1:])
    model = config.model.model
    candidate = Candidate(name=name, run=lambda: None)
    row = harness.rows([candidate], {name: speeds}, unit="images/s", higher_is_better=True, model=model, batch=batch)[0]
    comparable = model == "resnet50" and config.data.image_size == 224 and "H200" in harness.device_name()
    return row | {
        "mean": mean,
        "ms_per_step": 1e3 * batch / mean,
        "steps": len(steady),
        "data_wait_fraction": wait_s / (ends_s[-1] - ends_s[0]),  # the device's waits between steps
        "bottleneck": record.data["bottleneck"],
        "loader": record.data,
        "timing": record.timing,
        "ratio_to_mlperf_v4_h200": mean / MLPERF_H200_IMAGES_PER_S if comparable else None,
    }


def generate(scratch: Path, images: int, classes: int) -> Path:
    """Writes JPEGs with the detail of photographs, in as many classes as the model's head has. Returns their folder."""
    made, tree = scratch / "made", scratch / "tree"
    write_jpegs(made, images, *GENERATED_SIZE)
    harness.say(f"{images} JPEGs written")
    files = sorted((made / "train").rglob("*.jpg"))
    for i, file in enumerate(files):
        for split in ("train", "val")[: 1 + (i < classes)]:  # the same classes in both splits
            (tree / split / f"{i % classes:04}").mkdir(parents=True, exist_ok=True)
            os.link(file, tree / split / f"{i % classes:04}" / file.name)
    return tree


def window_speeds(ends_s: list[float], batch: int) -> tuple[list[float], float]:
    """Returns (images per second in each of WINDOWS intervals, over all of them), from the times at which steps ended.

    Single steps are not used, since the host notes their ends and may be a step ahead of the device.
    """
    edges = np.linspace(0, len(ends_s) - 1, WINDOWS + 1).astype(int)
    speeds = [batch * int(b - a) / (ends_s[b] - ends_s[a]) for a, b in itertools.pairwise(edges)]
    return speeds, batch * (len(ends_s) - 1) / (ends_s[-1] - ends_s[0])


def describe(source: Any) -> str:
    """Describes the size of the files, since the time of decoding depends on the pixels."""
    if not isinstance(source, EncodedSource):
        return f"{len(source):,} images in memory"
    chosen = spread_ids(source, 64)
    shapes = [source.image(i).shape for i in chosen]
    height, width = np.mean([shape[:2] for shape in shapes], axis=0)
    kilobytes = np.mean([len(source.read(i)) for i in chosen]) / 1e3
    return f"{len(source):,} files of {width:.0f}x{height:.0f} px and {kilobytes:.0f} kB on average"
