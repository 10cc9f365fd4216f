"""Exact distributed evaluation: every sample counts once, whatever the world size."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyperbatch import checkpoint
from hyperbatch.data.loader import Batch, eval_batches
from hyperbatch.data.source import open_eval
from hyperbatch.engine.ranks import Ranks, join
from hyperbatch.errors import InputError
from hyperbatch.models import create_from
from hyperbatch.models.norm import merged_buffers


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], group: dist.ProcessGroup | None = None) -> tuple[float, int]:
    """(top-1 accuracy, samples counted). Batch-norm statistics are merged over ranks on a copy (rule 4)."""
    buffers = merged_buffers(model, group)
    training = model.training
    model.eval()
    counts: Tensor | None = None  # correct, seen: integers, so the sum over ranks is exact
    for batch in batches:
        logits = torch.func.functional_call(model, buffers, (batch.images,))
        correct = logits.argmax(dim=1) == batch.labels
        seen = torch.ones_like(correct) if batch.mask is None else batch.mask
        both = torch.stack([(correct & seen).sum(), seen.sum()])
        counts = both if counts is None else counts + both
    model.train(training)
    if counts is None:
        return 0.0, 0
    if group is not None:
        dist.all_reduce(counts, group=group)
    correct_total, samples = counts.tolist()  # synchronises: the accuracy decides whether the run goes on
    return correct_total / samples, samples


def evaluate_checkpoint(path: Path, *, data: str | None = None, device: str = "auto") -> dict[str, Any]:
    """Top-1 of a checkpoint (or a run's newest) on its validation set, in one process."""
    saved = checkpoint.load(path)
    config = saved.config
    if data is not None:
        config = config.override(data=data)
    with join(Ranks(), device, config.run.timeout_s) as place:
        eval_set = open_eval(config.data)
        if list(eval_set.classes) != saved.classes:
            raise InputError(f"the data has {len(eval_set.classes)} other classes than the checkpoint; check --data")
        model = create_from(config.model, classes=len(saved.classes), in_channels=saved.channels)
        checkpoint.fill_model(model, saved.weights(), where=str(path))
        dtype = torch.float64 if config.optim.precision == "fp64" else torch.float32
        model.to(place, dtype).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        bad_samples: list[str] = []
        batches = eval_batches(
            eval_set,
            config.data,
            batch_per_rank=config.run.eval_batch_per_rank or 256,
            rank=0,
            world_size=1,
            device=place,
            dtype=dtype,
            bad_samples=bad_samples,
        )
        top1, samples = evaluate(model, batches)
    return {
        "checkpoint": str(path),
        "step": saved.progress.step,
        "top1": top1,
        "samples": samples,
        "warnings": list(dict.fromkeys(bad_samples)),
    }
