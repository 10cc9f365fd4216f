"""Replaces layers of foreign models by faster ones, in place.

    Conv2d, kernel = stride    ->  patches as rows, and one matrix product      stems, patch embeddings, downsampling
    Conv2d, 1x1                ->  a matrix product, where it is faster         `models/pointwise.py`
    Conv2d, depthwise          ->  kernels of ours, where they are faster       `models/depthwise.py`
    Mlp: fc1, GELU             ->  LinearGelu, Identity                         transformers, ConvNeXt
    Block: x + f(norm(x))      ->  residual sums and norms in one operation     transformers
    Attention                  ->  gradients of q, k and v in one pass          transformers
    Block: g * fc2(...) + x    ->  the scale's gradient from that of fc2        ConvNeXt: `models/layer_scale.py`
    LayerNorm, LayerNorm2d     ->  kernels of ours, outside of regions          `models/lone_norm.py`

A layer remains the same module: only its class changes, and not its parameters, names and state dict. Layers are
recognised by their class and settings, without running the model. Reference: the layers' own forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hyperbatch.kernels import has_triton
from hyperbatch.kernels.conv import fastest
from hyperbatch.models.depthwise import DepthwiseConv2d, compile_depthwise, depthwise_layers, is_depthwise
from hyperbatch.models.gelu import LinearGelu, compile_gelus
from hyperbatch.models.heads import QuickAttention, compile_heads, quick_timm_attention
from hyperbatch.models.layer_scale import quick_convnext_block
from hyperbatch.models.layers import Conv2d, LayerNorm, Linear, as_dtype
from hyperbatch.models.lone_norm import compile_lone_norms, is_lone_norm, quick_norm
from hyperbatch.models.pointwise import PointwiseConv2d, is_pointwise
from hyperbatch.models.regions import find_regions
from hyperbatch.models.residual import QuickBlock, compile_norms, quick_timm_block

GELU_COLUMNS = 64  # columns must be a multiple of this; otherwise the kernels would read memory in small pieces
# (module, name) of classes whose forward begins with self.act(self.fc1(x)) and does not use act and fc1 again
_MLP, _TIMM_MLP = ("hyperbatch.models.vit", "Mlp"), ("timm.layers.mlp", "Mlp")
# Blocks of a vision transformer: x + attn(norm1(x)), then x + mlp(norm2(x)); timm's have layers after attn and mlp
_BLOCK, _TIMM_BLOCK = ("hyperbatch.models.vit", "Block"), ("timm.models.vision_transformer", "Block")
_TIMM_LAYERS = {"norm1", "attn", "ls1", "drop_path1", "norm2", "mlp", "ls2", "drop_path2"}
# Attention that consists of a product for queries, keys and values, torch's own function, and another product
_ATTENTION, _TIMM_ATTENTION = ("hyperbatch.models.vit", "Attention"), ("timm.layers.attention", "Attention")
_TIMM_ATTENTION_LAYERS = {"qkv", "q_norm", "k_norm", "attn_drop", "norm", "proj", "proj_drop"}
# A block of ConvNeXt: gamma * mlp(norm(conv_dw(x))) + x
_CONVNEXT_BLOCK = ("timm.models.convnext", "ConvNeXtBlock")
_CONVNEXT_LAYERS = {"conv_dw", "norm", "mlp", "shortcut", "drop_path"}
_TIMM_MLP_LAYERS = {"fc1", "act", "drop1", "norm", "fc2", "drop2"}
_TIMM_NORM, _TIMM_NORM2D = ("timm.layers.norm", "LayerNorm"), ("timm.layers.norm", "LayerNorm2d")
# timm's own names for torch's function
_GELUS = {("timm.layers.activations", "GELU"): "none", ("timm.layers.activations", "GELUTanh"): "tanh"}


class PatchConv2d(Conv2d):
    """A convolution whose windows neither overlap nor leave gaps, as a product: [patches, pixels of a patch] @
    weight.T.

    cuDNN pads the three channels of images to four, and has slow kernels for such strides, but it need not gather
    patches. Both ways are therefore measured, forward and backward, once for each shape (`kernels.conv`). In
    evaluation, and in compiled code, where nothing can be measured, the product is used.
    """

    def forward(self, input: Tensor) -> Tensor:
        down, across = self.kernel_size
        if input.dim() != 4 or input.shape[2] % down or input.shape[3] % across:
            return super().forward(input)  # it ignores the remaining pixels
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self._by_patches(input)
        ways = super().forward, self._by_patches
        trials = (partial(self._try, way, input) for way in ways)
        what = "patches and their gradient" if input.requires_grad else "patches"
        return ways[fastest(what, input, self.weight, *trials, in_graph=False)](input)

    def _by_patches(self, input: Tensor) -> Tensor:
        down, across = self.kernel_size
        dtype = self.weight.dtype
        filters = self.weight.permute(0, 2, 3, 1).flatten(1)  # no copy: weights are channels-last in training
        rows = patch_rows(input.to(dtype), down, across)
        out = F.linear(rows, filters, as_dtype(self.bias, dtype))
        return out.view(len(input), input.shape[2] // down, -1, self.out_channels).permute(0, 3, 1, 2)

    def _try(self, way: Callable[[Tensor], Tensor], input: Tensor) -> None:
        """Runs forward and backward once and discards the results."""
        leaf = input.detach().requires_grad_(input.requires_grad)
        out = way(leaf)
        wanted = [tensor for tensor in (leaf, *self.parameters()) if tensor.requires_grad]
        if wanted:
            torch.autograd.grad(out, wanted, out.detach())


def patch_rows(images: Tensor, down: int, across: int) -> Tensor:
    """Returns [patches of all images, pixels of a patch]. A row has the lines of the patch one after the other, with
    the channels of a pixel together."""
    lines = images.permute(0, 2, 3, 1).unflatten(2, (-1, across)).unflatten(1, (-1, down))
    return lines.transpose(2, 3).reshape(-1, down * across * images.shape[1])


def quicken(model: nn.Module) -> nn.Module:
    """Replaces the layers that it recognises, in place."""
    places = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    for module in reversed(list(model.modules())):  # layers before the modules that contain them
        if is_patch_conv(module):
            module.__class__ = PatchConv2d
        elif _class_of(module) in (_MLP, _TIMM_MLP) and places[getattr(module, "fc1", module)] == places[module]:
            _fuse_gelu(module)
        elif _class_of(module) in (_BLOCK, _TIMM_BLOCK):
            _fuse_norms(module)
        elif _class_of(module) in (_ATTENTION, _TIMM_ATTENTION):
            _stack_heads(module)
        elif _class_of(module) == _CONVNEXT_BLOCK:
            _fuse_scale(module)
        elif is_depthwise(module):
            module.__class__ = DepthwiseConv2d
        elif is_pointwise(module):
            module.__class__ = PointwiseConv2d
    compiled = {module for region in find_regions(model) for module in region.module.modules()}
    for module in model.modules():
        if _is_norm(module) and module not in compiled:
            module.__class__ = quick_norm(type(module), images=_class_of(module) == _TIMM_NORM2D)
    return model


def has_quick_kernels(model: nn.Module) -> bool:
    """Whether the model has layers whose kernels can be compiled before the first step."""

    def has_kernels(module: nn.Module) -> bool:
        known = isinstance(module, DepthwiseConv2d | LinearGelu) or is_lone_norm(module)
        return known or _joins_norms(module) or _stacks_heads(module)

    return has_triton() and any(has_kernels(module) for module in model.modules())


def compile_quick(model: nn.Module, dtype: torch.dtype) -> None:
    """Launches the kernels of quick layers for activations of this dtype. Call it inside
    `kernels.compile.compiling`."""
    modules = list(model.modules())
    compile_depthwise(depthwise_layers(model))
    compile_gelus([module for module in modules if isinstance(module, LinearGelu)], dtype)
    compile_norms([module for module in modules if _joins_norms(module)], dtype)
    compile_heads([module for module in modules if _stacks_heads(module)], dtype)
    compile_lone_norms([module for module in modules if is_lone_norm(module)], dtype)


def _joins_norms(module: nn.Module) -> bool:
    return getattr(type(module), "joins_norms", False)


def _stacks_heads(module: nn.Module) -> bool:
    return getattr(type(module), "stacks_heads", False)


def is_patch_conv(module: nn.Module) -> bool:
    """Whether the module is exactly torch's convolution, or ours, over patches. 1x1 convolutions do not count, because
    they gather nothing."""
    return (
        isinstance(module, nn.Conv2d)
        and type(module) in (nn.Conv2d, Conv2d)
        and module.kernel_size == module.stride != (1, 1)
        and module.padding in ((0, 0), "valid")
        and module.dilation == (1, 1)
        and module.groups == 1
    )


def _fuse_gelu(mlp: nn.Module) -> None:
    """Makes fc1 compute both, and act nothing. If a hook reads the outputs of fc1 or act, they are not changed."""
    linear, act = mlp.get_submodule("fc1"), mlp.get_submodule("act")
    form = act.approximate if type(act) is nn.GELU else _GELUS.get(_class_of(act))
    if form is None or not _is_plain_linear(linear) or linear.out_features % GELU_COLUMNS or _is_hooked(act):
        return
    cast(Any, linear).__class__ = LinearGelu
    cast(Any, linear).tanh = form == "tanh"
    mlp.act = nn.Identity()


def _fuse_norms(block: nn.Module) -> None:
    timms = _class_of(block) == _TIMM_BLOCK
    if timms and _layers(block) != _TIMM_LAYERS:
        return  # this version of timm is not supported
    if all(_is_plain_norm(block.get_submodule(name)) for name in ("norm1", "norm2")):
        block.__class__ = quick_timm_block(type(block)) if timms else QuickBlock
        cast(Any, block).sums_biases = _has_plain_branches(block, _TIMM_MLP if timms else _MLP)


def _has_plain_branches(block: nn.Module, known_mlp: tuple[str, str]) -> bool:
    """Whether attention and MLP are known to end with linear layers, and no hook reads an output inside the block."""
    attention, mlp = block.get_submodule("attn"), block.get_submodule("mlp")
    if not _stacks_heads(attention) or _class_of(mlp) != known_mlp:
        return False
    looked_into = (attention, *attention.children(), mlp, *mlp.children(), *block.children())
    ends = attention.get_submodule("proj"), mlp.get_submodule("fc2")
    return all(map(_is_plain_linear, ends)) and not any(map(_is_hooked, looked_into))


def _stack_heads(attention: nn.Module) -> None:
    timms = _class_of(attention) == _TIMM_ATTENTION
    layers = dict(attention.named_children())
    if timms:
        if layers.keys() != _TIMM_ATTENTION_LAYERS or not attention.fused_attn:
            return  # this version of timm is not supported, or the attention does not use torch's function
        if not all(type(layers[name]) is nn.Identity for name in ("q_norm", "k_norm", "norm")):
            return
    if _is_plain_linear(layers["qkv"]) and not any(map(_is_hooked, layers.values())):
        attention.__class__ = quick_timm_attention(type(attention)) if timms else QuickAttention


def _is_plain_linear(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the layer is a plain linear layer with a bias and without hooks."""
    known = isinstance(layer, nn.Linear) and type(layer) in (nn.Linear, Linear)
    return known and layer.bias is not None and not _is_hooked(layer)


def _fuse_scale(block: nn.Module) -> None:
    if _layers(block) != _CONVNEXT_LAYERS or getattr(block, "gamma", None) is None:
        return
    mlp = block.get_submodule("mlp")
    if _class_of(mlp) != _TIMM_MLP or _layers(mlp) != _TIMM_MLP_LAYERS:
        return  # this version of timm is not supported
    linear = mlp.get_submodule("fc2")
    if type(linear) not in (nn.Linear, Linear) or linear.bias is None or _is_hooked(mlp) or _is_hooked(linear):
        return
    if _is_plain_norm(block.get_submodule("norm")):
        block.__class__ = quick_convnext_block(type(block))


def _layers(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _is_plain_norm(layer: nn.Module) -> bool:
    """Whether the layer is a norm over the last dimension without hooks."""
    return _is_norm(layer) and _class_of(layer) != _TIMM_NORM2D and not _is_hooked(layer)


def _is_norm(layer: nn.Module) -> bool:
    """Whether the layer is a layer norm over one dimension with scale and shift."""
    known = type(layer) in (nn.LayerNorm, LayerNorm) or _class_of(layer) in (_TIMM_NORM, _TIMM_NORM2D)
    if not (known and isinstance(layer, nn.LayerNorm)):
        return False
    return len(layer.normalized_shape) == 1 and layer.weight is not None and layer.bias is not None


def _class_of(module: nn.Module) -> tuple[str, str]:
    return type(module).__module__, type(module).__qualname__


def _is_hooked(module: nn.Module) -> bool:
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks)
