"""Initial weights for recipes that do not use the model's own initialisation.

dirac       a 3x3 convolution passes its inputs on unchanged: input i becomes output i, further outputs are random
whitening   the first convolution turns patches of the training images into uncorrelated numbers of equal variance:

    patches p = [c x h x w]  ->  moments E[p p^T] = V diag(l) V^T  ->  filters  V^T / sqrt(l + eps)  and their negatives
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hyperbatch.errors import InputError

WHITEN_EPS = 5e-4  # limits the amplification of directions in which images hardly differ


@torch.no_grad()
def dirac_(model: nn.Module) -> None:
    """Initialises trained, ungrouped convolutions with odd sides above 1 as the identity on their first outputs.

    A convolution with fewer outputs than inputs passes on the first inputs.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.groups == 1 and module.weight.requires_grad:
            sides = module.kernel_size
            if all(side % 2 for side in sides) and max(sides) > 1:
                # The same as nn.init.dirac_, whose loop over channels takes a tenth of a second for a small network.
                first = module.weight[: module.in_channels].zero_()
                first[:, :, sides[0] // 2, sides[1] // 2].fill_diagonal_(1.0)


def whitening_layer(model: nn.Module) -> tuple[str, nn.Conv2d]:
    """Returns the name of the first convolution, and the convolution. Raises InputError unless it has two outputs for
    each element of its patches."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            elements = module.weight[0].numel()
            if module.groups == 1 and module.out_channels == 2 * elements:
                return name, module
            raise InputError(
                f"whitening: {name}, the first convolution of {type(model).__name__}, has {module.out_channels} "
                f"outputs, not {2 * elements} (two for each element of its patches); "
                "use --model whitenet, or leave --whiten-samples and --whiten-bias-epochs out"
            )
    raise InputError(f"whitening: {type(model).__name__} has no convolution; leave --whiten-samples out")


@torch.no_grad()
def whitening_filters(batches: Iterable[Tensor], kernel: tuple[int, ...], *, eps: float = WHITEN_EPS) -> Tensor:
    """Returns filters [2 c h w, c, h, w] for images [n, c, height, width], in fp32 or wider, on the images' device.

    The moments are taken about zero, which is the mean of normalised images.
    """
    total, count, channels = None, 0, 0
    for images in batches:
        patches = _patches(images, kernel)
        # One product per image, and then their sum: a single product over millions of patches would use few of a GPU's
        # cores.
        moments = (patches @ patches.transpose(1, 2)).sum(0)
        total = moments if total is None else total + moments
        count += patches.shape[0] * patches.shape[2]
        channels = images.shape[1]
    if total is None:
        raise ValueError("whitening_filters needs at least one batch")
    values, vectors = torch.linalg.eigh(total / count)  # synchronises: it reads whether the iteration converged
    filters = vectors.T / (values.clamp(min=0) + eps).sqrt()[:, None]
    return torch.cat([filters, -filters]).view(-1, channels, *kernel)


def _patches(images: Tensor, kernel: tuple[int, ...]) -> Tensor:
    """Returns [n, c h w, places], in the order of a filter's elements. Same as torch's unfold, which launches a kernel
    per image."""
    height, width = images.shape[2] - kernel[0] + 1, images.shape[3] - kernel[1] + 1
    wide = images.to(torch.promote_types(images.dtype, torch.float32))
    views = [wide[:, :, y : y + height, x : x + width] for y in range(kernel[0]) for x in range(kernel[1])]
    return torch.stack(views, dim=2).flatten(1, 2).flatten(2)
