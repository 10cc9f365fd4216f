"""Switches a ResNet (ours or timm's), AlexNet-BN or whitening network to its fused training path.

fuse(model)      call it after the arena is built; from then on, model(images) in training mode runs the fused kernels

Parameters, buffers, names and the state dict do not change. Evaluation still uses the plain path, which is the
reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hyperbatch.errors import InputError
from hyperbatch.kernels import has_triton, interpreted
from hyperbatch.models.alexnet import AlexNetBN
from hyperbatch.models.blur import BlurConv2d, BlurMaxPool2d
from hyperbatch.models.layers import HALF_DTYPES, Conv2d
from hyperbatch.models.norm import BatchNorm2d, keeps_statistics
from hyperbatch.models.resnet import BasicBlock, Bottleneck, ResNet
from hyperbatch.models.timm_resnet import PARTS, gates, is_timm_resnet, timm_types, why_not_as_a_whole, with_fused
from hyperbatch.models.whitenet import ConvGroup, ConvUnit, WhiteNet

# The types of modules that the kernels replace. Subclasses are not accepted, because they may compute something else.
# An Identity takes the place of a missing max-pool.
TYPES = (nn.Conv2d, Conv2d, BatchNorm2d, nn.ReLU, nn.MaxPool2d, nn.Identity, nn.Sequential, BasicBlock, Bottleneck)
RESNET_TYPES = (*TYPES, BlurConv2d, BlurMaxPool2d, nn.AvgPool2d)
TIMM_TYPES = (*TYPES, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Flatten)  # timm's own types are added to these
UNIT_TYPES = (nn.Conv2d, BatchNorm2d, nn.SiLU, nn.GELU, nn.MaxPool2d, nn.Identity, ConvUnit, ConvGroup)


def why_not_fused(model: nn.Module, dtype: torch.dtype, device: torch.device) -> str | None:
    """Returns one line that says why the fused kernels cannot train this model, or None if they can."""
    of_timm = is_timm_resnet(model)
    if not of_timm and not isinstance(model, ResNet | AlexNetBN | WhiteNet):
        return f"{type(model).__name__} is not a built-in ResNet, AlexNet or whitening network, nor timm's ResNet"
    if not has_triton():
        return "Triton is not installed"
    if device.type != "cuda" and not interpreted():
        return f"the kernels run on CUDA devices, not on a {device.type}"
    if dtype not in HALF_DTYPES and not interpreted():
        return f"the kernels compute in fp16 and bf16, not in {str(dtype).removeprefix('torch.')}"
    if device.type == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        if not is_large_enough(properties):
            return f"{properties.name} has less shared memory than the kernels need (an A100's, at least)"
    if of_timm:
        types = (*TIMM_TYPES, *timm_types(model))
        if (reason := why_not_as_a_whole(model)) is not None:
            return reason
    else:
        types = UNIT_TYPES if isinstance(model, WhiteNet) else RESNET_TYPES if isinstance(model, ResNet) else TYPES
    for part in fused_parts(model):
        for name, module in model.get_submodule(part).named_modules(prefix=part):
            # A ResNet's frozen blocks are allowed: they run their own layers.
            if keeps_statistics(module) and isinstance(model, AlexNetBN | WhiteNet):
                return f"{name} is frozen"
            reason = _why_not(name, module, types)
            if reason is not None:
                return reason
    return None


def fused_parts(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of the parts that the kernels replace: all but the head, and but a first layer that is not
    always replaced."""
    if isinstance(model, WhiteNet):
        return model.groups
    if isinstance(model, AlexNetBN):
        return ("features",)
    return ("conv1", "bn1", "relu", "maxpool", *model.stages) if isinstance(model, ResNet) else PARTS


def _why_not(name: str, module: nn.Module, types: tuple[type[nn.Module], ...]) -> str | None:
    """`why_not_fused` for one module. It is needed because the kernels replace the module's own forward."""
    if ".se." in name:  # part of a squeeze-excite, which is checked as a whole
        return None
    if name.endswith(".se") and type(module) in types:
        return None if gates(module) else f"{name} uses an unsupported gate"
    if type(module) is nn.BatchNorm2d:
        return f"{name} has running statistics that the kernels do not support"
    averages = name.endswith(".downsample.0")  # the average pool in the shortcut of a ResNet-D
    is_nothing = averages or name.rpartition(".")[2] in ("maxpool", "pool", "drop_block", "aa")
    misplaced = (
        (type(module) is nn.Identity and not is_nothing)
        or (type(module) is nn.AvgPool2d and not averages)
        or (type(module) in (nn.AdaptiveAvgPool2d, nn.Flatten) and not name.startswith("global_pool."))
    )
    if type(module) not in types or misplaced:
        return f"{name} is of type {type(module).__name__}, which the kernels do not support"
    if isinstance(module, nn.Conv2d):
        if not _takes(module.out_channels) or module.bias is not None:
            return f"{name} has a bias, or a number of channels that the kernels do not support"
        if module.padding_mode != "zeros" or isinstance(module.padding, str):
            return f"{name} uses unsupported padding"
    if isinstance(module, ConvGroup) and (len(module) < 2 or any(unit.pooled for unit in list(module)[1:])):
        return f"{name} is not a group of one unit with pooling and others without"
    if isinstance(module, ConvUnit) and module.pooled:
        pool = module.pool
        if not isinstance(pool, nn.MaxPool2d) or (pool.kernel_size, pool.stride, pool.padding) != (2, 2, 0):
            return f"{name} uses unsupported pooling"
    if isinstance(module, nn.GELU) and module.approximate != "none":
        return f"{name} is an approximation"
    if isinstance(module, nn.AvgPool2d) and not _averages_by_two(module):
        return f"{name} uses unsupported pooling"
    other_blur = isinstance(module, BlurMaxPool2d) and module.stride != 2
    if isinstance(module, nn.MaxPool2d) and (module.dilation != 1 or module.ceil_mode or other_blur):
        return f"{name} uses unsupported pooling"
    if isinstance(module, BatchNorm2d):
        if module.momentum is None or not module.track_running_stats:
            return f"{name} has running statistics that the kernels do not support"
        if module.weight is None or module.weight.dtype != torch.float32:
            return f"{name} has no fp32 scale and shift"
    return None


def _averages_by_two(pool: nn.AvgPool2d) -> bool:
    """Whether the pool takes the mean of every 2x2 pixels, or of those that remain at an edge."""
    sides = [
        side if isinstance(side, tuple) else (side, side) for side in (pool.kernel_size, pool.stride, pool.padding)
    ]
    return sides == [(2, 2), (2, 2), (0, 0)] and pool.ceil_mode and pool.divisor_override is None


def is_large_enough(properties: Any) -> bool:
    """Whether a device has enough shared memory: the largest tiles take 147 KB. properties: those that torch returns;
    not every version of torch reports all of them."""
    return properties.major >= 8 and getattr(properties, "shared_memory_per_block_optin", 1 << 20) >= 160 << 10


def _takes(channels: int) -> bool:
    """Whether the kernels support this number of channels: it must be divisible by 8, and at most 64 blocks of at most
    64 channels, a power of two, must cover it."""
    return channels % 8 == 0 and channels // min(64, channels & -channels) <= 64


def fuse(model: nn.Module) -> None:
    """Makes the training forward of the model use the fused kernels. Raises InputError if they cannot run it."""
    weight = next(module.weight for module in model.modules() if isinstance(module, nn.Conv2d))
    reason = why_not_fused(model, weight.dtype, weight.device)
    if reason is not None:
        raise InputError(f"the fused training path cannot run: {reason}")
    from hyperbatch.models.fused_network import FusedAlexNet, FusedResNet
    from hyperbatch.models.fused_units import FusedWhiteNet

    if isinstance(model, WhiteNet):
        model.fused = FusedWhiteNet(model)
    elif isinstance(model, AlexNetBN):
        model.fused = FusedAlexNet(model)
    elif isinstance(model, ResNet):
        model.fused = FusedResNet(model)
    else:
        if not hasattr(model, "fused"):
            model.__class__ = with_fused(type(model))
        model.fused = FusedResNet(model)  # type: ignore[assignment]
