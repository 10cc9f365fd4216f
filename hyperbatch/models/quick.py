"""Quicker forms of layers that others' models are made of, in the place where they stand.

    Conv2d, kernel = stride    ->  patches as rows, and one matrix product      stems, patch embeddings, downsampling
    Conv2d, depthwise          ->  kernels of ours, where they are faster       `models/depthwise.py`

A layer stays the module that it was: parameters, names, hooks and state dict do not change, only its class does. It is
recognised by its class and settings; nothing is run to find out. Reference: the layer's own forward.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from hyperbatch.models.depthwise import DepthwiseConv2d, is_depthwise
from hyperbatch.models.layers import Conv2d, as_dtype


class PatchConv2d(Conv2d):
    """A convolution whose windows neither overlap nor leave gaps, as a product: [patches, pixels of one] @ weight.T.

    cuDNN has no kernel of its own for these, and pads the three channels of images to four besides.
    """

    def forward(self, input: Tensor) -> Tensor:
        down, across = self.kernel_size
        if input.dim() != 4 or input.shape[2] % down or input.shape[3] % across:
            return super().forward(input)  # which leaves the rest of the pixels out
        dtype = self.weight.dtype
        filters = self.weight.permute(0, 2, 3, 1).flatten(1)  # no copy: weights are channels-last in training
        rows = patch_rows(input.to(dtype), down, across)
        out = F.linear(rows, filters, as_dtype(self.bias, dtype))
        return out.view(len(input), input.shape[2] // down, -1, self.out_channels).permute(0, 3, 1, 2)


def patch_rows(images: Tensor, down: int, across: int) -> Tensor:
    """[patches of all images, pixels of a patch]: in a row, line after line, with the channels of a pixel together."""
    lines = images.permute(0, 2, 3, 1).unflatten(2, (-1, across)).unflatten(1, (-1, down))
    return lines.transpose(2, 3).reshape(-1, down * across * images.shape[1])


def quicken(model: nn.Module) -> nn.Module:
    """Replaces what it knows, in place."""
    for module in model.modules():
        if is_patch_conv(module):
            module.__class__ = PatchConv2d
        elif is_depthwise(module):
            module.__class__ = DepthwiseConv2d
    return model


def is_patch_conv(module: nn.Module) -> bool:
    """Exactly torch's convolution, or ours; not 1x1 ones, where there is nothing to gather."""
    return (
        isinstance(module, nn.Conv2d)
        and type(module) in (nn.Conv2d, Conv2d)
        and module.kernel_size == module.stride != (1, 1)
        and module.padding in ((0, 0), "valid")
        and module.dilation == (1, 1)
        and module.groups == 1
    )
