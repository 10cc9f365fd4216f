"""The time of an evaluation, made as in a run: python -m benchmarks.evaluation [--model NAME] [--precision fp16]

Prints one JSON object: the seconds of an evaluation of random images of CIFAR-10's size and number, for each kind of
test-time augmentation, plain and (on a GPU) captured, and the seconds to prepare it before a run's time would start.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from hyperbatch.bench.harness import result
from hyperbatch.config import BatchPhase, Config
from hyperbatch.engine.kernel_choice import training_kernels
from hyperbatch.engine.ranks import Ranks, join
from hyperbatch.engine.run import build_run
from hyperbatch.record import strict_json
from hyperbatch.stopwatch import wall_s

KINDS = (("none", 1.0), ("mirror", 1.0), ("mirror_shift", 1.0), ("mirror_shift", 0.25))


def measure(config: Config, device: torch.device, *, capture: bool, rounds: int) -> dict[str, Any]:
    run = build_run(config, Ranks(), device)
    try:
        reasons: list[str | None] = []
        prepare_s = wall_s(lambda: reasons.append(run.validation.prepare(capture=capture)), device=device)
        seconds = sorted(wall_s(run.validation.evaluate, device=device) for _ in range(rounds))
    finally:
        run.close()
    return {
        "tta": config.run.tta,
        "tta_share": config.run.tta_share,
        "captured": capture and reasons == [None],
        "why_not": reasons[0],
        "median_s": statistics.median(seconds),
        "least_s": seconds[0],
        "prepare_s": prepare_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet20x4")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=0, help="samples of an evaluation step [as a run chooses]")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    sizes = dict.fromkeys(("image_size", "eval_size", "eval_resize"), args.image_size)
    config = Config(recipe="evaluation").override(
        **sizes,
        model=args.model,
        precision=args.precision,
        dataset="synthetic",
        classes=10,
        train_samples=1024,
        eval_samples=args.samples,
        batch_phases=(BatchPhase(0, 512),),
        eval_batch_per_rank=args.batch,
        device=args.device,
    )
    rows = []
    with training_kernels(deterministic=False), join(Ranks(), args.device, 300.0) as device:
        for tta, share in KINDS:
            chosen = config.override(tta=tta, tta_share=share)
            for capture in (False, True) if device.type == "cuda" else (False,):
                rows.append(measure(chosen, device, capture=capture, rounds=args.rounds))
    workload = {"model": args.model, "precision": args.precision, "samples": args.samples}
    print(strict_json(result("evaluation", rows, **workload), indent=1))


if __name__ == "__main__":
    main()
