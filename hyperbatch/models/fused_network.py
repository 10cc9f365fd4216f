"""The training path of a whole ResNet or AlexNet-BN, built from `models.fused_blocks`, and when it can run.

model(images) in training mode ─ can_run? ─┬─ yes: FusedNetwork    kernels replace all layers but the head
                                           └─ no: model.forward    hooks, norms that keep their statistics, ...
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from hyperbatch.errors import InputError
from hyperbatch.kernels import conv as convolution
from hyperbatch.kernels import norm as kernels
from hyperbatch.models.alexnet import AlexNetBN, classify
from hyperbatch.models.blur import BlurMaxPool2d
from hyperbatch.models.fused import fused_parts
from hyperbatch.models.fused_blocks import Blur, ConvNorm, ConvNormPool, FusedBlock
from hyperbatch.models.fused_head import Classify, MeanOfPixels
from hyperbatch.models.layers import Linear, to_logits
from hyperbatch.models.norm import BatchNorm2d, keeps_statistics


class FusedNetwork:
    """The training path of a model, which replaces the model's own layers up to its head."""

    norms: list[BatchNorm2d]  # norms of the layers; a shared one is listed once for each use

    def __init__(self, model: Any) -> None:
        self.model = model
        self.counters = kernels.new_counters(next(model.parameters()).device)
        self.parts = {name: model.get_submodule(name) for name in fused_parts(model)}
        modules = dict.fromkeys(module for part in self.parts.values() for module in part.modules())
        self.children = {module: dict(module._modules) for module in modules}
        self.hooks = [hooks for module in modules for hooks in _hooks_of(module)]

    def can_run(self) -> bool:
        """Whether the kernels compute the same as the modules: the modules are unchanged and have no hooks, and the
        norms update their running statistics with those of the batch."""
        return self._is_untouched() and all(norm.training and norm.momentum is not None for norm in self.norms)

    def can_evaluate(self, images: Tensor) -> bool:
        """`can_run` for `evaluate`, if the network has it: norms use their running statistics, and no gradient is
        needed."""
        here = images.device == self.counters.device == next(self.model.parameters()).device
        running = not any(norm.training or norm.running_mean is None for norm in self.norms)
        return here and running and not torch.is_grad_enabled() and self._is_untouched()

    def _is_untouched(self) -> bool:
        own = self.model._modules
        replaced = any(own.get(name) is not part for name, part in self.parts.items())
        if replaced or any(module._modules != children for module, children in self.children.items()):
            raise InputError("layers of the model were replaced after fuse(model); call fuse(model) again")
        return not any(self.hooks) and not any("forward" in vars(module) for module in self.children)

    def __call__(self, images: Tensor) -> Tensor:
        if self.counters.device != images.device:  # the model has moved
            self.__init__(self.model)
        _count_batch(self.norms)
        with torch.cuda.device_of(images):  # Triton launches on the current device, which may not be the tensors' one
            return self.logits(images)

    def logits(self, images: Tensor) -> Tensor:
        raise NotImplementedError

    def evaluate(self, images: Tensor) -> Tensor:
        """Computes what the model's own layers compute in evaluation mode."""
        raise NotImplementedError


class FusedResNet(FusedNetwork):
    """Computes what the forward of a ResNet, ours or timm's, computes in training mode. A stem or block whose norms
    keep their statistics, such as a frozen one, runs its own layers, because the kernels use the statistics of the
    batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.plain_stem = [module for name, module in self.parts.items() if not name.startswith(("layer", "global"))]
        self.pool = self.plain_stem[-1]
        self.stem = _stem(self.plain_stem, self.counters)
        self.window = _window(self.pool)
        stages: list[Any] = [module for name, module in self.parts.items() if name.startswith("layer")]
        blocks = [block for stage in stages for block in stage]
        self.blocks = [
            block if any(map(keeps_statistics, block.modules())) else FusedBlock(block, self.counters)
            for block in blocks
        ]
        layers = [layer for block in self.blocks if isinstance(block, FusedBlock) for layer in block.layers]
        self.norms = [layer.norm for layer in (*self.stem, *layers)]

    def logits(self, images: Tensor) -> Tensor:
        handover = None
        if not self.stem:
            x: Any = images.to(next(self.plain_stem[0].parameters()).dtype)
            for module in self.plain_stem:
                x = module(x)
            x = convolution.channels_last(x)
        else:
            x = _images(images, self.stem[0])
            *first, last = self.stem
            for layer in first:
                x = ConvNormPool.apply(x, layer, None, *layer.parameters)
            x = ConvNormPool.apply(x, last, self.window, *last.parameters)
            if isinstance(self.pool, BlurMaxPool2d):
                x = Blur.apply(x)
        for block in self.blocks:
            if isinstance(block, FusedBlock):
                x, handover = block(x, handover)
            else:
                x, handover = convolution.channels_last(block(x)), None  # autograd returns the whole gradient
        fc = self.model.fc
        if _is_plain(fc):
            return to_logits(Classify.apply(x, fc.weight, fc.bias))
        return to_logits(fc(MeanOfPixels.apply(x)))


class FusedAlexNet(FusedNetwork):
    """Computes what `AlexNetBN.forward` computes in training mode: each convolution with its norm, ReLU and pool."""

    def __init__(self, model: AlexNetBN) -> None:
        super().__init__(model)
        self.layers: list[tuple[ConvNorm, dict[str, int] | None]] = []
        modules = list(model.features)
        for i, module in enumerate(modules):
            if isinstance(module, nn.Conv2d):
                norm, follower = modules[i + 1], modules[i + 3]
                assert isinstance(norm, BatchNorm2d)
                self.layers.append((ConvNorm(module, norm, self.counters), _window(follower)))
        last = modules[-1]
        self.last_norm = last if isinstance(last, BatchNorm2d) else None  # of 6x6 pixels: torch's own is fast enough
        self.norms = [layer.norm for layer, _ in self.layers]

    def logits(self, images: Tensor) -> Tensor:
        x: Any = _images(images, self.layers[0][0])
        for layer, window in self.layers:
            x = ConvNormPool.apply(x, layer, window, *layer.parameters)
        return classify(self.model, x if self.last_norm is None else self.last_norm(x))


def _stem(modules: list[nn.Module], counters: Tensor) -> list[ConvNorm]:
    """Returns the stem's convolutions with their norms, each followed by a ReLU, or an empty list if the stem runs its
    own layers. modules: those up to the pool, which timm's ResNet-RS replaces by another convolution, norm and ReLU."""
    layers: list[Any] = [layer for m in modules for layer in (m if isinstance(m, nn.Sequential) else (m,))]
    if not isinstance(modules[-1], nn.Sequential):
        layers.pop()
    convs, norms, relus = layers[::3], layers[1::3], layers[2::3]
    known = all(isinstance(module, nn.Conv2d) for module in convs) and all(type(module) is nn.ReLU for module in relus)
    if any(map(keeps_statistics, layers)) or not known or len(layers) % 3:
        return []
    return [ConvNorm(conv, norm, counters) for conv, norm in zip(convs, norms, strict=True)]


def _window(module: nn.Module) -> dict[str, int] | None:
    """Returns the window of the max-pool after a ReLU, or None if there is none. In a BlurMaxPool2d, the blur has the
    stride, so the window has a stride of 1."""
    if not isinstance(module, nn.MaxPool2d):
        return None
    kernel, stride, padding = module.kernel_size, module.stride, module.padding
    if isinstance(module, BlurMaxPool2d):
        stride = 1
    assert isinstance(kernel, int)
    assert isinstance(stride, int)
    assert isinstance(padding, int)
    return {"kernel": kernel, "stride": stride, "padding": padding}


def _is_plain(fc: nn.Module) -> bool:
    """Whether the layer is a linear layer with a bias, an unchanged forward and no hooks."""
    plain = type(fc) in (nn.Linear, Linear) and fc.bias is not None and "forward" not in vars(fc)
    return plain and not any(_hooks_of(fc))


def _hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Returns the module's own tables of hooks. They are not copies, so hooks that are registered later appear in
    them."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def _images(images: Tensor, first: ConvNorm) -> Tensor:
    return convolution.channels_last(convolution.padded(images.to(first.conv.weight.dtype)))


def _count_batch(norms: list[BatchNorm2d]) -> None:
    """Counts the batch in all norms with one launch; torch's norms take one each. A norm that several layers share
    counts once for each."""
    uses = Counter(norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None)
    if not uses:  # all are frozen
        return
    with torch.no_grad():
        torch._foreach_add_(list(uses), list(uses.values()))  # pyright: ignore[reportPrivateImportUsage]
