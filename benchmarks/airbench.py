"""Keller Jordan's cifar10-airbench on this machine: the peer of `cifar10` and `cifar10_96`.

    python -m benchmarks.airbench CHECKOUT --data DIR [--script 94|96] [--device cuda|cpu] [--runs N] [--mode NAME]

CHECKOUT is a clone of github.com/KellerJordan/cifar10-airbench. Network, data, optimizers, schedule and timing are
those of its scripts: the clock runs during whitening, training (also of the small network that selects images) and the
last evaluation, and stops during earlier evaluations. Two things are replaced when a script is loaded.

--mode  the mode of torch.compile. The scripts use max-autotune, which compiles `airbench96_faster` for many minutes.
        On the H200 it chose cuDNN's convolutions, which reduce-overhead uses as well.
--device cpu  replaces what a CPU lacks, for airbench94_muon only: weights and images are in fp32 with autocast to
        bf16 instead of fp16, the clock is the host's, and nothing is compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hyperbatch.data.cifar import CIFAR10, open_cifar

SCRIPTS = {"94": "airbench94_muon.py", "96": "airbench96_faster.py"}
FOR_A_CPU = (
    ("import torchvision\nimport torchvision.transforms as T\n", "from benchmarks.airbench import Moment, T\n"),
    ("@torch.compile\n", ""),
    ('torch.device("cuda")', 'torch.device("cpu")'),
    ("self.images.half() / 255", "self.images.float() / 255"),
    ("mod.half()", "mod.float()"),
    ("torch.cuda.Event(enable_timing=True)", "Moment()"),
    ("torch.cuda.synchronize()", "None"),
)


class Moment:
    """The part of a CUDA event that a script uses."""

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def elapsed_time(self, later: Moment) -> float:
        return 1e3 * (later.at_s - self.at_s)


def normalise(mean: Tensor, std: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda images: (images - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)


T = SimpleNamespace(Normalize=normalise)  # the part of torchvision.transforms that a script uses


def load_script(path: Path, folder: Path, *, device: str) -> ModuleType:
    """Loads the script as a module. None of its runs has started yet."""
    source = path.read_text()
    for old, new in FOR_A_CPU if device == "cpu" else ():
        if old not in source:
            raise SystemExit(f"{path} has no {old!r}: it is another version than the one this tool was written for")
        source = source.replace(old, new)
    copy = folder / path.name  # a file, because torch.compile reads sources
    copy.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, copy)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def prepare_data(data: str, folder: Path) -> None:
    """Writes CIFAR-10 to the files that the scripts keep after their download."""
    folder.mkdir()
    for name, source in zip(("train", "test"), open_cifar(CIFAR10, Path(data)), strict=True):
        kept = {
            "images": torch.tensor(source.images),
            "labels": torch.tensor(source.labels).long(),
            "classes": list(source.classes),
        }
        torch.save(kept, folder / f"{name}.pt")


def in_bf16(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wide(*args: Any, **kwargs: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(*args, **kwargs).float()

    return wide


def networks(script: ModuleType, device: str, mode: str) -> list[Any]:
    """Returns the networks that the script's `main` takes."""
    if hasattr(script, "CifarNet"):
        model = script.CifarNet().to(device).to(memory_format=torch.channels_last)
        if device == "cpu":
            model.forward = in_bf16(model.forward)
        else:
            model.compile(mode=mode)
        return [model]
    proxy, trained, frozen = (script.make_net(script.hyp[name]) for name in ("proxy", "net", "net"))
    proxy[0].bias.requires_grad = False
    frozen[0].bias.requires_grad = False
    return [script.hyp, *(torch.compile(network, mode=mode) for network in (proxy, trained, frozen))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--script", choices=SCRIPTS, default="94")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=1, help="runs that count, after one that warms up (not on a CPU)")
    parser.add_argument("--mode", default="max-autotune")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.device == "cpu" and args.script != "94":
        parser.error("on a CPU only --script 94 runs")
    name, data = SCRIPTS[args.script], str(Path(args.data).resolve())
    about: dict[str, Any] = {
        "script": name,
        "script_sha256": hashlib.sha256((args.checkout / name).read_bytes()).hexdigest(),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "mode": args.mode if args.device == "cuda" else "not compiled, autocast to bf16",
    }
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        script = load_script(args.checkout.resolve() / name, Path(folder), device=args.device)
        ended: list[dict[str, Any]] = []
        # The scripts pass their local variables to the function that prints a line; a run's last line has all of them.
        script.__dict__["print_training_details"] = lambda found, is_final_entry: (
            ended.append(dict(found)) if is_final_entry else None
        )
        with contextlib.chdir(folder):
            prepare_data(data, Path("cifar10"))
            models = networks(script, args.device, args.mode)
            warm_up = 1 if args.device == "cuda" else 0
            for run in range(warm_up + args.runs):
                started_s = time.perf_counter()
                with contextlib.redirect_stdout(io.StringIO()):
                    torch.manual_seed(run)
                    script.main(run, *models)
                found = ended[-1]
                row = {
                    "time_s": found.get("total_time_seconds", found.get("time_seconds")),
                    "top1": found["tta_val_acc"],
                    "wall_s": time.perf_counter() - started_s,
                }
                if run < warm_up:
                    about["first_run_s"] = row["wall_s"]  # includes compilation
                else:
                    rows.append(row)
                print(f"{name} {run}: {row['time_s']:.3f} s, {100 * row['top1']:.2f} %", file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps(about | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
