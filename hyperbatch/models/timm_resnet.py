"""timm's ResNets on our fused training path. They have layers of the same kinds, some with other names.

    ResNet        conv1 bn1 act1 maxpool layer1 .. layer4 global_pool fc       conv1: one convolution, or a "deep" stem
    its blocks    conv1 bn1 act1 conv2 bn2 act2 [conv3 bn3 act3] downsample    maxpool: or a convolution, norm and ReLU
                  se: squeeze-excite, or None

Models are recognised by the names of their classes, and `models.fused` checks each layer. A model remains the same
object with all of timm's attributes. Only its `forward` changes, and only in training.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from hyperbatch.kernels.conv import is_product
from hyperbatch.models.layers import Conv2d

PARTS = ("conv1", "bn1", "act1", "maxpool", "layer1", "layer2", "layer3", "layer4", "global_pool")
_RESNET = ("timm.models.resnet", "ResNet")
_KNOWN = {
    ("timm.models.resnet", "BasicBlock"),
    ("timm.models.resnet", "Bottleneck"),
    ("timm.layers.adaptive_avgmax_pool", "SelectAdaptivePool2d"),
    ("timm.layers.squeeze_excite", "SEModule"),
}
_SIGMOIDS = {("timm.layers.activations", "Sigmoid"), ("torch.nn.modules.activation", "Sigmoid")}


def is_timm_resnet(model: nn.Module) -> bool:
    """Whether the model's class is exactly timm's, or the result of `with_fused` for it. Other subclasses may compute
    something else."""
    kind = type(model)
    return _name(kind) == _RESNET or getattr(kind, "made_of_timm", False)


def timm_types(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Returns the classes of its modules whose forward is known here, apart from torch's own classes."""
    return tuple({type(module) for module in model.modules() if _name(type(module)) in _KNOWN})


def why_not_as_a_whole(model: Any) -> str | None:
    """Returns one line that says what else timm's forward would do in training, or None if it does nothing else."""
    if model.drop_rate:
        return "it drops features before its head"
    if model.grad_checkpointing:
        return "it recomputes its blocks in backward (activation checkpointing)"
    if model.global_pool.pool_type != "avg" or not isinstance(model.global_pool.flatten, nn.Flatten):
        return "global_pool uses unsupported pooling"
    return None


def gates(module: Any) -> bool:
    """Whether a squeeze-excite module is x * sigmoid(fc2(relu(fc1(mean of x)))), with 1x1 convolutions that have
    biases."""
    layers = module.fc1, module.fc2
    plain = all(type(fc) in (nn.Conv2d, Conv2d) and is_product(fc) and fc.bias is not None for fc in layers)
    known = type(module.bn) is nn.Identity and type(module.act) is nn.ReLU and _name(type(module.gate)) in _SIGMOIDS
    return plain and known and not module.add_maxpool


@functools.cache
def with_fused(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns a subclass whose training forward runs `fused` if it is set, as in `models.resnet.ResNet`."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if self.training and self.fused is not None and why_not_as_a_whole(self) is None and self.fused.can_run():
            return self.fused(x)
        return kind.forward(self, x)

    added = {"forward": forward, "fused": None, "made_of_timm": True, "__module__": __name__}
    return type(kind.__name__, (kind,), added)


def _name(kind: type[nn.Module]) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__
