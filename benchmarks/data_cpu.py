"""Images per second of processor time, from files to normalised float32 batches on a CPU: ours and others'.

    python benchmarks/data_cpu.py OUT.json [--images N] [--rounds N]

Every candidate is a separate process with two threads or two workers, and reads the same generated 500x375 JPEGs:
random-resized crop to 224, mirrored, normalised, batches of 64. Candidates take turns, and the DataLoader runs after
each of them, because on a busy machine only neighbours in time can be compared. The measured time is the processor time
of the process and of all its children, user and system, which other programs on the machine disturb less. Peers that
are not installed are skipped: webdataset, DALI, SPDL, which needs FFmpeg's libraries, and FFCV, which is built from
source with OpenCV's and libjpeg-turbo's (`data_notes.md` explains how).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

SIZE, BATCH, WORKERS = 224, 64, 2
WIDTH, HEIGHT = 500, 375
SHARDS = 4
BASELINE = "DataLoader, folder, Pillow"

Run = Callable[[], int]  # one pass; returns the number of images


def ours(root: Path, data: str, decoder: str) -> Run:
    import torch

    from hyperbatch.config import BatchPhase, DataConfig
    from hyperbatch.data.loader import TrainLoader
    from hyperbatch.data.source import open_data
    from hyperbatch.schedule import resolve_phases, steps

    source, _ = open_data(DataConfig(data=str(root / data)))
    config = DataConfig(image_size=SIZE, decoder=decoder, data_threads=WORKERS, cache="none")
    loader = TrainLoader(source, config, seed=0, rank=0, world_size=1, device=torch.device("cpu"), dtype=torch.float32)
    plan = list(steps(resolve_phases((BatchPhase(0, BATCH),), len(source), 1), len(source), 1.0))
    return lambda: sum(len(made.labels) for made in loader.batches(plan))


def peers_of_the_bench(root: Path, name: str) -> Run:
    """torch's DataLoader, and DALI."""
    import torch

    from hyperbatch.bench.peers import NAMES, data_peers
    from hyperbatch.data.folders import FolderSource

    tree = FolderSource(root / "tree" / "train")
    found = data_peers(NAMES, tree, image_size=SIZE, batch=BATCH, workers=WORKERS, device=torch.device("cpu"))
    return next(candidate.run for candidate in found if candidate.name == name)


def webdataset(root: Path) -> Run:
    wds: Any = importlib.import_module("webdataset")
    from torch.utils.data import DataLoader

    make = _torch_style(root)
    shards = sorted(str(path) for path in (root / "shards").glob("train-*.tar"))

    def sample(parts: dict[str, Any]) -> tuple[Any, int]:
        return make(parts["jpg"], int(parts["__key__"])), int(parts["cls"])

    data = wds.WebDataset(shards, shardshuffle=False, empty_check=False).shuffle(64).map(sample).batched(BATCH)
    loader = DataLoader(data, batch_size=None, num_workers=WORKERS, persistent_workers=True)
    return lambda: sum(len(images) for images, _ in loader)


def spdl(root: Path) -> Run:
    io: Any = importlib.import_module("spdl.io")
    pipeline: Any = importlib.import_module("spdl.pipeline")
    import torch

    from hyperbatch.data.source import IMAGENET_MEAN, IMAGENET_STD

    io.demux_image(next((root / "tree").rglob("*.jpg")).read_bytes())  # fails without FFmpeg
    paths = sorted((root / "tree" / "train").rglob("*.jpg"))
    views = _views(len(paths))
    mean, std = (torch.tensor(values).view(1, 1, 1, 3) * 255 for values in (IMAGENET_MEAN, IMAGENET_STD))

    def decode(number: int) -> Any:
        view = views[number]
        left, top, right, bottom = (int(side) for side in view.box)
        crop = f"crop={right - left}:{bottom - top}:{left}:{top}:exact=1,scale={SIZE}:{SIZE}:flags=bilinear"
        turned = f"{crop}{',hflip' if view.flip else ''},format=pix_fmts=rgb24"
        return io.decode_packets(io.demux_image(paths[number].read_bytes()), filter_desc=turned)

    def convert(frames: list[Any]) -> Any:
        images = io.to_torch(io.convert_frames(frames))
        return images.float().sub_(mean).div_(std).permute(0, 3, 1, 2)

    def run() -> int:
        builder = pipeline.PipelineBuilder().add_source(range(len(paths))).pipe(decode, concurrency=WORKERS)
        made = builder.aggregate(BATCH).pipe(convert).add_sink(2).build(num_threads=WORKERS)
        with made.auto_stop():
            return sum(len(images) for images in made.get_iterator(timeout=60))

    return run


def ffcv(root: Path) -> Run:
    """JPEGs of the same quality in FFCV's format. It draws its own crops, and averages pixels to shrink images."""
    loader: Any = importlib.import_module("ffcv.loader")
    fields: Any = importlib.import_module("ffcv.fields")
    decoders: Any = importlib.import_module("ffcv.fields.decoders")
    transforms: Any = importlib.import_module("ffcv.transforms")
    writer: Any = importlib.import_module("ffcv.writer")
    import numpy as np
    from PIL import Image

    from hyperbatch.bench.data import JPEG_QUALITY
    from hyperbatch.data.source import IMAGENET_MEAN, IMAGENET_STD

    paths, beton = sorted((root / "tree" / "train").rglob("*.jpg")), str(root / "train.beton")

    class Files:
        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, number: int) -> tuple[Any, int]:
            return Image.open(paths[number]), number % 2

    columns = {"image": fields.RGBImageField(write_mode="jpg", jpeg_quality=JPEG_QUALITY), "label": fields.IntField()}
    writer.DatasetWriter(beton, columns, num_workers=1).from_indexed_dataset(Files())
    mean, std = (255 * np.array(values) for values in (IMAGENET_MEAN, IMAGENET_STD))
    image = [decoders.RandomResizedCropRGBImageDecoder((SIZE, SIZE)), transforms.RandomHorizontalFlip()]
    image += [transforms.NormalizeImage(mean, std, np.float32), transforms.ToTensor(), transforms.ToTorchImage()]
    label = [decoders.IntDecoder(), transforms.ToTensor(), transforms.Squeeze()]
    made = loader.Loader(
        beton,
        batch_size=BATCH,
        num_workers=WORKERS,
        order=loader.OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        pipelines={"image": image, "label": label},
    )
    return lambda: sum(len(images) for images, _ in made)


def _views(count: int) -> list[Any]:
    """The crops that `hyperbatch.bench.peers` makes for images of this one size."""
    import numpy as np

    from hyperbatch.config import DataConfig
    from hyperbatch.data import augment, stream

    config = DataConfig(image_size=SIZE)
    drawn = stream.uniforms(0, np.zeros(count), np.arange(count), augment.uniforms_needed(config)).tolist()
    return [augment.train_view(config, WIDTH, HEIGHT, 0, row, whole=False) for row in drawn]


def _torch_style(root: Path) -> Callable[[bytes, int], Any]:
    """Returns a function that makes the DataLoader's samples from bytes."""
    import io

    import numpy as np
    import torch
    from PIL import Image

    from hyperbatch.data.source import IMAGENET_MEAN, IMAGENET_STD

    views = _views(len(list((root / "tree" / "train").rglob("*.jpg"))))
    mean, std = torch.tensor(IMAGENET_MEAN).view(3, 1, 1), torch.tensor(IMAGENET_STD).view(3, 1, 1)

    def make(data: bytes, number: int) -> torch.Tensor:
        view = views[number % len(views)]
        image = Image.open(io.BytesIO(data)).convert("RGB")
        left, top, right, bottom = (int(side) for side in view.box)
        image = image.crop((left, top, right, bottom)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        if view.flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div_(255)
        return pixels.sub_(mean).div_(std)

    return make


CANDIDATES: dict[str, Callable[[Path], Run]] = {
    "hyperbatch, folder, simplejpeg": lambda root: ours(root, "tree", "simplejpeg"),
    "hyperbatch, shards, simplejpeg": lambda root: ours(root, "shards", "simplejpeg"),
    "hyperbatch, folder, Pillow": lambda root: ours(root, "tree", "pillow"),
    BASELINE: lambda root: peers_of_the_bench(root, BASELINE),
    "webdataset, shards, Pillow": webdataset,
    "SPDL, folder, FFmpeg": spdl,
    "FFCV, its own file, JPEG": ffcv,
    "DALI, folder, cpu": lambda root: peers_of_the_bench(root, "DALI, folder, cpu"),
}


def serve(name: str, root: Path, passes: int) -> None:
    """Makes a pass for each line on stdin. The first pass, before any line, is warm-up."""
    run = CANDIDATES[name](root)
    run()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(sum(run() for _ in range(passes)), flush=True)


class Served:
    def __init__(self, name: str, root: Path, passes: int) -> None:
        command = [sys.executable, __file__, "--serve", name, str(root), "--passes", str(passes)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self.is_there = self._out.readline() == "ready\n"

    def why_not(self) -> str:
        assert self._process.stderr is not None
        return (self._process.stderr.read().strip().splitlines() or ["it ended"])[-1]

    def measure(self) -> dict[str, float]:
        start_cpu_s, start_s = _cpu_s(self._process.pid), time.perf_counter()
        self._in.write("\n")
        self._in.flush()
        images = int(self._out.readline())
        seconds = time.perf_counter() - start_s
        end_cpu_s = _cpu_s(self._process.pid)
        while (now_cpu_s := _cpu_s_later(self._process.pid)) > end_cpu_s:  # work done ahead counts too
            end_cpu_s = now_cpu_s
        return {"images": images, "cpu_s": end_cpu_s - start_cpu_s, "wall_s": seconds}

    def close(self) -> None:
        self._in.close()
        self._process.wait()


def _cpu_s(pid: int) -> float:
    """Seconds of the process and all its descendants, user and system."""
    parents, ticks = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            number = int(folder.name)
            parents[number], ticks[number] = int(fields[1]), int(fields[11]) + int(fields[12])
    tree, waiting = [], [pid]
    while waiting:
        tree.append(waiting.pop())
        waiting += [child for child, parent in parents.items() if parent == tree[-1]]
    return sum(ticks[number] for number in tree) / os.sysconf("SC_CLK_TCK")


def _per_cpu_s(sample: dict[str, float]) -> float:
    return sample["images"] / sample["cpu_s"]


def _cpu_s_later(pid: int) -> float:
    time.sleep(0.1)
    return _cpu_s(pid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", default="")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve[0], Path(args.serve[1]), args.passes)
        return
    from hyperbatch.bench.data import write_jpegs
    from hyperbatch.bench.harness import result
    from hyperbatch.data.pack import pack

    with tempfile.TemporaryDirectory(prefix="hyperbatch-bench-") as folder:
        root = Path(folder)
        mean_bytes = write_jpegs(root / "tree", args.images, WIDTH, HEIGHT)
        pack(root / "tree", root / "shards", shard_bytes=int(args.images * (mean_bytes + 2048) / SHARDS))
        served, left_out = {}, {}
        for name in CANDIDATES:
            if args.only in name or name == BASELINE:
                served[name] = Served(name, root, args.passes)
                if not served[name].is_there:
                    left_out[name] = served.pop(name).why_not()
        names = [name for name in served if name != BASELINE]
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in served}
        beside: dict[str, list[dict[str, float]]] = {name: [] for name in names}  # baseline, right after each
        for turn in range(args.rounds):
            for place in range(len(names)):
                name = names[(turn + place) % len(names)]
                samples[name].append(served[name].measure())
                beside[name].append(served[BASELINE].measure())
                samples[BASELINE].append(beside[name][-1])
        for process in served.values():
            process.close()
    per_cpu_s = {name: [_per_cpu_s(one) for one in found] for name, found in samples.items()}
    ratios = {
        name: [_per_cpu_s(a) / _per_cpu_s(b) for a, b in zip(samples[name], beside[name], strict=True)]
        for name in names
    }
    rows = [
        {
            "name": name,
            "median": statistics.median(found),
            "lowest": min(found),
            "highest": max(found),
            "unit": "images per second of processor time",
            "ratio_to_dataloader": statistics.median(ratios.get(name, [1.0])),
            "ratio_by_round": ratios.get(name),
            "images_per_s": [one["images"] / one["wall_s"] for one in samples[name]],
            "raw": samples[name],
            "dataloader_after_it": beside.get(name),
        }
        for name, found in per_cpu_s.items()
    ]
    made = result("data_cpu", rows, load_1min=os.getloadavg()[0])
    made["versions"] |= {name: _version(name) for name in _PACKAGES}
    made |= {"image": f"{WIDTH}x{HEIGHT} JPEG, {mean_bytes / 1e3:.0f} kB", "left_out": left_out}
    if args.out:
        args.out.write_text(json.dumps(made, indent=1) + "\n")
    for row in rows:
        print(f"{row['name']:32s} {row['median']:7.0f} images per cpu second  x{row['ratio_to_dataloader']:.2f}")
    for name, why in left_out.items():
        print(f"{name:32s} left out: {why}")


_PACKAGES = ("pillow", "simplejpeg", "webdataset", "spdl_io", "nvidia-dali-cuda120", "av", "ffcv", "numba")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
