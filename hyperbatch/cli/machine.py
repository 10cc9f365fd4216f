"""`hyperbatch profile`, `bench` and `doctor`: measure this machine and check that it computes correctly."""

from __future__ import annotations

import argparse
from pathlib import Path

from hyperbatch.cli.shared import AddVerb, add_device, is_first_rank, numbers, positive, show
from hyperbatch.errors import InputError

# The options of each bench other than --json
BENCH_OPTIONS = {
    "comm": ("size_mb", "grid", "nproc", "rounds"),
    "step": ("model", "batch", "peers", "max_autotune", "precision", "rounds", "data", "steps", "image_size"),
    "data": ("image_size", "rounds", "peers"),
}


def add(verb: AddVerb) -> None:
    parser = verb("profile", _profile, "Measure this machine and write a machine file for `simulate` and `plan`.")
    help = "Model to measure: built-in, timm/NAME, or package.module:callable. [default: resnet50]"
    parser.add_argument("--model", default="resnet50", metavar="NAME", help=help)
    add_device(parser)
    help = "Machine file to write. [default: machine.toml]"
    parser.add_argument("--output", default="machine.toml", metavar="FILE", help=help)
    help = "Samples per step to measure. [default: 32,128,256; on a CPU 2,8]"
    parser.add_argument("--batches", metavar="N,N,...", help=help)
    help = "Image side in pixels. [default: the usual one of the model]"
    parser.add_argument("--image-size", type=positive, metavar="N", help=help)

    parser = verb("bench", _bench, "Compare the speed of one part with its alternatives.")
    parts = ("lars", "muon", "step", "comm", "data")
    parser.add_argument("what", choices=parts, metavar="PART", help=f"The part to measure: {', '.join(parts)}.")
    help = "Number of interleaved rounds of `comm`, `data` and `step`. [default: 5; 10 for step, 3 on a CPU]"
    parser.add_argument("--rounds", type=positive, metavar="N", help=help)
    help = "Image side in pixels of `step` and `data`. [default: the usual one of the model; 224 for data]"
    parser.add_argument("--image-size", type=positive, metavar="N", help=help)
    help = (
        "Peers to compare with, or none. For `step`: eager, graph, masters (a graph with fp32 master weights) and "
        "compile (about a minute per batch size). For `data`: dataloader, dali and arrays. [default: all]"
    )
    parser.add_argument("--peers", metavar="NAME,...", help=help)
    step = parser.add_argument_group(
        "step",
        "Compares the whole training step with torch's, on synthetic data on the device. On a CPU it only shows that "
        "the command works.",
    )
    help = "Built-in model, timm/NAME, or package.module:callable. [default: resnet50; on a CPU resnet20]"
    step.add_argument("--model", metavar="NAME", help=help)
    help = (
        "Samples per step, measured one after the other. [default: 16,42,256,400; 256 for models that are not built "
        "in; on a CPU 32]"
    )
    step.add_argument("--batch", metavar="N,N,...", help=help)
    help = "Also measure torch.compile in its max-autotune mode, which takes minutes."
    step.add_argument("--max-autotune", action="store_true", default=None, help=help)
    step.add_argument("--precision", metavar="NAME", help="Precision on a GPU, fp16 or bf16. [default: fp16]")
    help = (
        'Measure whole training runs on this data set, and on synthetic pixels, instead of single steps. "generated" '
        "writes JPEG files and trains on them, on shards with a shorter side of 256 px (JPEGs and decoded) and on "
        "pixels in memory."
    )
    step.add_argument("--data", metavar="DIR", help=help)
    step.add_argument("--steps", type=positive, metavar="N", help="Steps with --data. [default: 200; on a CPU 20]")
    comm = parser.add_argument_group(
        "comm",
        "Compares every all-reduce with that of the backend, on this host or under torchrun, srun or mpirun.",
    )
    comm.add_argument("--size-mb", type=positive, metavar="N", help="Megabytes to all-reduce. [default: 25]")
    help = "Grid of the ranks. [default: hosts x ranks per host]"
    comm.add_argument("--grid", metavar="ROWSxCOLUMNS", help=help)
    help = "Ranks to start on this host. [default: one per GPU, or two on a CPU]"
    comm.add_argument("--nproc", type=positive, metavar="N", help=help)

    parser = verb("doctor", _doctor, "Check this machine and, with --collectives, every all-reduce on it.")
    help = "Verify every all-reduce on this host, or on all hosts under torchrun, srun or mpirun."
    parser.add_argument("--collectives", action="store_true", help=help)
    help = "Processes for --collectives. [default: one per GPU, or two on a CPU]"
    parser.add_argument("--nproc", type=positive, default=None, metavar="N", help=help)


def _profile(args: argparse.Namespace) -> int:
    from hyperbatch.engine.profile import format_profile, profile

    answer = profile(
        args.model,
        device=args.device,
        output=Path(args.output),
        batches=None if args.batches is None else numbers(args.batches, "--batches"),
        image_size=args.image_size,
    )
    if is_first_rank():
        show(args, answer.to_dict(), lambda: format_profile(answer))
    return 0


def _bench(args: argparse.Namespace) -> int:
    import importlib

    names = dict.fromkeys(name for takes in BENCH_OPTIONS.values() for name in takes)
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    for name in options:
        homes = [f"`bench {what}`" for what, takes in BENCH_OPTIONS.items() if name in takes]
        if f"`bench {args.what}`" not in homes:
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"{flag} belongs to {' and '.join(homes)}, not to `bench {args.what}`")
    if "batch" in options:
        options["batch"] = numbers(options["batch"], "--batch")
    if "peers" in options:
        named = [name for name in options["peers"].split(",") if name]
        options["peers"] = [] if named == ["none"] else named
    module = importlib.import_module(f"hyperbatch.bench.{args.what}")
    values = getattr(module, f"bench_{args.what}")(**options)
    from hyperbatch.bench.harness import format_table

    if is_first_rank():
        show(args, values, lambda: getattr(module, "format_result", format_table)(values))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from hyperbatch.engine.doctor import doctor, format_doctor

    if args.nproc is not None and not args.collectives:
        raise InputError("--nproc is the number of processes for --collectives; add --collectives")
    diagnosis = doctor(collectives=args.collectives, nproc=args.nproc)
    if is_first_rank():
        show(args, diagnosis.to_dict(), lambda: format_doctor(diagnosis))
    return 0 if diagnosis.ok else 1
