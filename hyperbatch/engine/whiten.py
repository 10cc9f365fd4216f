"""Sets the first convolution's filters from the training images when training begins (`models.initial`).

before the clock:  a rehearsal on zeros, so that libraries are loaded; it uses neither data nor weights
on the clock:      images -> moments -> filters on rank 0 -> broadcast -> written where captured steps read them

A run that continues another, or starts from the weights in a file, already has its filters.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hyperbatch.data.loader import plain_shape
from hyperbatch.engine.run import Run
from hyperbatch.models.initial import whitening_filters, whitening_layer


def is_due(run: Run) -> bool:
    """Whether the run uses whitening and has not begun yet."""
    model = run.config.model
    return model.whiten_samples > 0 and model.init_from is None and run.progress.step == 0


def rehearse(run: Run) -> None:
    """Computes the filters of blank images on a GPU, where libraries and kernels are loaded at their first use."""
    if is_due(run) and run.learner.device.type == "cuda":
        learner = run.learner
        size, count = plain_shape(run.config.data, min(run.config.model.whiten_samples, len(run.train_set)))
        blank = torch.zeros(count, size, size, learner.in_channels, dtype=learner.dtype, device=learner.device)
        _, layer = whitening_layer(learner.model)
        whitening_filters([blank.permute(0, 3, 1, 2)], layer.kernel_size)


@torch.no_grad()
def whiten(run: Run) -> None:
    """Sets the filters. Every rank must call it, and gets the filters that rank 0 has computed."""
    if not is_due(run):
        return
    learner = run.learner
    name, layer = whitening_layer(learner.model)
    weight = layer.weight
    dtype = torch.promote_types(weight.dtype, torch.float32)
    filters = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    if run.ranks.rank == 0:
        images = (batch.images for batch in run.loader.plain(run.config.model.whiten_samples))
        filters.copy_(whitening_filters(images, layer.kernel_size))
    if run.ranks.world_size > 1:
        learner.comm.drain()  # waits, because the thread of `comm` must not use the group during the broadcast
        dist.broadcast(filters, src=0)
    if weight.requires_grad:
        learner.arena.load_masters({f"{name}.weight": filters})
    else:
        weight.copy_(filters)
