"""Test-time augmentation: logits averaged over several views of an image.

    mirror          0.5 unchanged + 0.5 mirrored
    mirror_shift    0.5 of `mirror` + 0.25 of `mirror` one pixel further down and right + 0.25 one further up and left

The border that a shift leaves open is filled by reflection. With a share below 1, only that share of a batch, the
images with the least certain logits, gets further views. Everything stays on the device, and shapes depend only on
those of the batch, so that a CUDA graph can capture it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class View(NamedTuple):
    """A view of an image, and its weight in the average."""

    weight: float
    mirror: bool = False
    shift_pixels: int = 0  # to the right and down


# The keys are those of vocabulary.TTA. The first view is the unchanged image.
VIEWS: dict[str, tuple[View, ...]] = {
    "none": (View(1.0),),
    "mirror": (View(0.5), View(0.5, mirror=True)),
    "mirror_shift": (
        View(0.25),
        View(0.25, mirror=True),
        *(View(0.125, mirror, shift) for shift in (1, -1) for mirror in (False, True)),
    ),
}

Network = Callable[[Tensor], Tensor]  # images [n, c, h, w] -> logits [n, classes]


def shown(images: Tensor, view: View) -> Tensor:
    """Returns the view of the images."""
    if view.shift_pixels:
        border, (height, width) = abs(view.shift_pixels), images.shape[-2:]
        start = border - view.shift_pixels
        wide = functional.pad(images, (border,) * 4, mode="reflect")
        images = wide[..., start : start + height, start : start + width]
    return images.flip(-1) if view.mirror else images


def averaged_logits(network: Network, images: Tensor, views: tuple[View, ...]) -> Tensor:
    """Computes the average by its definition, one view after the other. It is the reference for
    `plain_and_averaged`."""
    return torch.stack([view.weight * _wide(network(shown(images, view))) for view in views]).sum(0)


def plain_and_averaged(
    network: Network, images: Tensor, views: tuple[View, ...], share: float = 1.0, real: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the logits of the unchanged images, and the logits averaged over the views.

    share: the share of the batch, the least certain images, that is averaged; the others keep their plain logits. real:
    bool[n], false on padding, which is chosen last.
    """
    plain = _wide(network(images))
    first, *others = views
    if not others:
        return plain, plain
    count = min(len(images), math.ceil(share * len(images)))
    chosen = least_certain(plain, count, real) if count < len(images) else None
    again = images if chosen is None else images[chosen]
    total = first.weight * (plain if chosen is None else plain[chosen])
    # Process as many views at a time as fill a batch, because the network has already run with that shape.
    at_once = len(images) // count
    for start in range(0, len(others), at_once):
        part = others[start : start + at_once]
        batch = torch.cat([shown(again, view) for view in part]).contiguous(memory_format=torch.channels_last)
        for view, logits in zip(part, _wide(network(batch)).split(count), strict=True):
            total = total + view.weight * logits
    return plain, total if chosen is None else plain.index_copy(0, chosen, total)


def least_certain(logits: Tensor, count: int, real: Tensor | None = None) -> Tensor:
    """Returns the `count` rows whose two highest logits are closest together. Ties are broken by the order of rows."""
    highest, second = logits.topk(2, dim=1).values.unbind(1)
    margin = highest - second
    if real is not None:
        margin = margin.masked_fill(~real, torch.inf)
    return margin.argsort(stable=True)[:count]


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
