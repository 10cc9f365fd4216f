"""Tensor tables of the known models, computed from their architecture and tested against the models themselves.

Each model is described once, by the layers of its forward pass. Sizes, multiply-adds, the order in which backward
finishes the parameters, and the memory of a step follow from this description. Frozen parameters are not in the tables,
because they are neither exchanged nor updated. For a timm model or the user's own model, the table is made by building
and tracing the model (hyperbatch/tracing.py). Only then is torch loaded.

    forward    conv1 bn1 maxpool  layer1.0.conv1 ... layer1.0.bn3 layer1.0.downsample.0/.1  ...  avgpool fc
    backward   fc  ...  layer1.0.downsample.1/.0 layer1.0.bn3 ... layer1.0.conv1  bn1 conv1
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, partial

from hyperbatch.errors import InputError, nearest
from hyperbatch.plan.types import TensorSpec
from hyperbatch.vocabulary import DTYPE_BYTES, TIMM_MODEL, is_foreign


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One layer in the timeline: its parameters, and per image its forward multiply-adds and output elements."""

    name: str
    kind: str  # "conv", "norm", "pool", "linear" or "attention"; a ReLU, add or dropout belongs to the layer before it
    tensors: tuple[TensorSpec, ...]
    macs: int
    activations: int
    inputs: int  # input elements per image
    saved: int  # output elements per image kept for backward


def model_names() -> list[str]:
    """The models whose tables are defined in this file."""
    return sorted(_MODELS)


def ask_for(model: str) -> None:
    """Allows making the table of a timm model or of the user's own model.

    This runs the model's code, so the name must come from the user, and never from a machine file or a checkpoint.
    """
    if is_foreign(model):
        _ASKED_FOR.add(model)


def has_table(model: str) -> bool:
    return model in _MODELS or model in _ASKED_FOR


def usual_data(model: str) -> tuple[int, int]:
    """Returns (image size, classes) of the model's usual data: CIFAR-10 for small images, otherwise ImageNet, at the
    size that a timm model requires."""
    if model.startswith(TIMM_MODEL):
        from hyperbatch.models.build import fixed_size

        return fixed_size(model) or 224, 1000
    return (32, 10) if model in _FOR_SMALL_IMAGES else (224, 1000)


@cache
def layers(model: str, *, classes: int = 1000, image_size: int = 224, in_channels: int = 3) -> tuple[LayerSpec, ...]:
    """Returns the layers in forward order. Raises InputError if the model has no table and `ask_for` was not called."""
    if model in _ASKED_FOR:
        return _traced(model, classes, image_size, in_channels)[0]
    if model not in _MODELS:
        what = "no tensor table of" if is_foreign(model) else "unknown"
        raise InputError(f"{what} model {model!r}{nearest(model, list(_MODELS))}")
    return tuple(_MODELS[model](classes, image_size, in_channels))


@cache
def tensors(
    model: str, *, classes: int = 1000, image_size: int = 224, in_channels: int = 3, dtype: str = "float32"
) -> tuple[TensorSpec, ...]:
    """Returns the tensors in the order in which backward finishes them.

    In a 16-bit run, norm parameters and biases stay float32. They keep their place in this order; the arena and the
    grouping strategies put each dtype into a separate buffer.
    """
    small = dtype if DTYPE_BYTES[dtype] >= 4 else "float32"
    if model in _ASKED_FOR:
        specs = _traced(model, classes, image_size, in_channels)[1]
    else:
        table = layers(model, classes=classes, image_size=image_size, in_channels=in_channels)
        specs = tuple(spec for layer in reversed(table) for spec in _finish_order(layer))
    return tuple(replace(spec, dtype=dtype if spec.kind == "weight" else small) for spec in specs)


def kept_bytes(model: str, dtype: str, *, classes: int = 1000, image_size: int = 224, in_channels: int = 3) -> int:
    """The bytes that autograd keeps for the backward of one image."""
    table = layers(model, classes=classes, image_size=image_size, in_channels=in_channels)
    kept = sum(layer.saved for layer in table) + image_size * image_size * in_channels
    # torch stores an int64 index for each output of a max pool
    indices = sum(layer.activations for layer in table if layer.kind == "pool" and "avg" not in layer.name)
    return kept * DTYPE_BYTES[dtype] + indices * 8


@cache
def _traced(
    model: str, classes: int, image_size: int, in_channels: int
) -> tuple[tuple[LayerSpec, ...], tuple[TensorSpec, ...]]:
    """Traces a model without a table. Returns its layers in forward order and its tensors in backward's order."""
    from hyperbatch.tracing import trace_model

    trace = trace_model(model, classes=classes, image_size=image_size, in_channels=in_channels)
    specs = {
        found.name: TensorSpec(name=found.name, shape=found.shape, kind=found.kind)
        for layer in trace.layers
        for found in layer.parameters
    }
    table = tuple(
        LayerSpec(
            name=layer.name,
            kind=layer.kind,
            tensors=tuple(specs[found.name] for found in layer.parameters),
            macs=layer.macs,
            activations=layer.outputs,
            inputs=layer.inputs,
            saved=layer.saved,
        )
        for layer in trace.layers
    )
    return table, tuple(specs[name] for name in trace.order)


def _finish_order(layer: LayerSpec) -> tuple[TensorSpec, ...]:
    # Backward computes a linear layer's weight gradient through the transpose, one node after the bias gradient.
    return layer.tensors[::-1] if layer.kind == "linear" else layer.tensors


class _Builder:
    """Collects layers while it follows one image's shape through the network."""

    def __init__(self, image_size: int, channels: int) -> None:
        self.side, self.channels = image_size, channels
        self.layers: list[LayerSpec] = []

    @property
    def elements(self) -> int:
        return self.channels * self.side * self.side

    def _append(self, name: str, kind: str, specs: tuple[TensorSpec, ...], macs: int, inputs: int, keep: int) -> None:
        """keep: how many tensors of its output's size are kept for backward."""
        self.layers.append(
            LayerSpec(
                name=name,
                kind=kind,
                tensors=specs,
                macs=macs,
                activations=self.elements,
                inputs=inputs,
                saved=self.elements * keep,
            )
        )

    def conv(self, name: str, out: int, kernel: int, stride: int = 1, padding: int | None = None) -> None:
        """A convolution without bias. Its output is kept, since the following norm needs it for backward."""
        padding = kernel // 2 if padding is None else padding
        inputs, fan_in = self.elements, self.channels * kernel * kernel
        weight = TensorSpec(name=f"{name}.weight", shape=(out, self.channels, kernel, kernel))
        self.side = _out_side(name, self.side, kernel, stride, padding)
        self.channels = out
        self._append(name, "conv", (weight,), fan_in * self.elements, inputs, 1)

    def frozen_conv(self, name: str, out: int, kernel: int) -> None:
        """A convolution without padding of which only the bias is trained, followed by a smooth activation."""
        inputs, fan_in = self.elements, self.channels * kernel * kernel
        self.side = _out_side(name, self.side, kernel, 1, 0)
        self.channels = out
        bias = TensorSpec(name=f"{name}.bias", shape=(out,), kind="bias")
        self._append(name, "conv", (bias,), fan_in * self.elements, inputs, 2)

    def norm(self, name: str, *, keep: int = 1, parts: tuple[str, ...] = ("weight", "bias")) -> None:
        """Batch norm and the activation or add after it.

        keep=0: nothing that follows needs the output for its backward. keep=2: a smooth activation follows; its
        backward needs its input, and the next layer needs its output.
        """
        specs = tuple(TensorSpec(name=f"{name}.{part}", shape=(self.channels,), kind="norm") for part in parts)
        self._append(name, "norm", specs, 0, self.elements, keep)

    def pool(self, name: str, kernel: int, stride: int, padding: int = 0) -> None:
        inputs = self.elements
        self.side = _out_side(name, self.side, kernel, stride, padding)
        self._append(name, "pool", (), 0, inputs, 1)

    def global_pool(self, name: str, side: int = 1) -> None:
        inputs = self.elements
        self.side = side
        self._append(name, "pool", (), 0, inputs, 1)

    def linear(self, name: str, out: int, *, bias: bool = True) -> None:
        inputs = self.elements
        specs = [TensorSpec(name=f"{name}.weight", shape=(out, inputs))]
        if bias:
            specs.append(TensorSpec(name=f"{name}.bias", shape=(out,), kind="bias"))
        self.channels, self.side = out, 1
        self._append(name, "linear", tuple(specs), inputs * out, inputs, 1)

    def patches(self, name: str, out: int, patch: int) -> None:
        """A convolution with bias that cuts the image into tokens. Its output goes into a sum, which keeps no input."""
        inputs, fan_in = self.elements, self.channels * patch * patch
        weight = TensorSpec(name=f"{name}.weight", shape=(out, self.channels, patch, patch))
        bias = TensorSpec(name=f"{name}.bias", shape=(out,), kind="bias")
        self.side = _out_side(name, self.side, patch, patch, 0)
        self.channels = out
        self._append(name, "conv", (weight, bias), fan_in * self.elements, inputs, 0)

    def token_linear(self, name: str, out: int, *, keep: int) -> None:
        """A linear layer over the channels of each token."""
        inputs, fan_in = self.elements, self.channels
        weight = TensorSpec(name=f"{name}.weight", shape=(out, fan_in))
        bias = TensorSpec(name=f"{name}.bias", shape=(out,), kind="bias")
        self.channels = out
        self._append(name, "linear", (weight, bias), fan_in * self.elements, inputs, keep)

    def attention(self, name: str) -> None:
        """Mixes the values by queries and keys: the products of each token with all keys, then with all values."""
        inputs, tokens = self.elements, self.side * self.side
        self.channels //= 3
        self._append(name, "attention", (), 2 * tokens * self.elements, inputs, 1)


def _out_side(name: str, side: int, kernel: int, stride: int, padding: int) -> int:
    out = (side + 2 * padding - kernel) // stride + 1
    if out < 1:
        raise InputError(f"image size too small: {name} would get an empty input; use a larger --image-size")
    return out


def _residual_block(
    b: _Builder, prefix: str, planes: int, out: int, stride: int, bottleneck: bool, averages: bool
) -> None:
    side, channels = b.side, b.channels
    if bottleneck:
        b.conv(f"{prefix}.conv1", planes, 1)
        b.norm(f"{prefix}.bn1")
        b.conv(f"{prefix}.conv2", planes, 3, stride)  # v1.5: the 3x3 convolution has the stride
        b.norm(f"{prefix}.bn2")
        b.conv(f"{prefix}.conv3", out, 1)
        b.norm(f"{prefix}.bn3")
    else:
        b.conv(f"{prefix}.conv1", planes, 3, stride)
        b.norm(f"{prefix}.bn1")
        b.conv(f"{prefix}.conv2", out, 3)
        b.norm(f"{prefix}.bn2")
    if stride != 1 or channels != out:
        b.side, b.channels = side, channels
        if averages and stride > 1:
            b.pool(f"{prefix}.downsample.avgpool", 2, 2, side % 2)  # an odd last row or column is averaged alone
        first = int(averages)  # the pool takes one index
        b.conv(f"{prefix}.downsample.{first}", out, 1, 1 if averages else stride)
        b.norm(f"{prefix}.downsample.{first + 1}", keep=0)


def _resnet(
    classes: int,
    image_size: int,
    in_channels: int,
    *,
    blocks: tuple[int, ...],
    width: int,
    bottleneck: bool,
    small_images: bool,
    deep: bool = False,
) -> list[LayerSpec]:
    b = _Builder(image_size, in_channels)
    if deep:
        for index, out, stride in ((0, width // 2, 2), (3, width // 2, 1)):
            b.conv(f"conv1.{index}", out, 3, stride)
            b.norm(f"conv1.{index + 1}")
        b.conv("conv1.6", width, 3)
        b.norm("bn1")
        b.pool("maxpool", 3, 2, 1)
    elif small_images:
        b.conv("conv1", width, 3)
        b.norm("bn1")
    else:
        b.conv("conv1", width, 7, 2)
        b.norm("bn1")
        b.pool("maxpool", 3, 2, 1)
    for stage, count in enumerate(blocks):
        planes = width << stage
        for i in range(count):
            stride = 2 if stage > 0 and i == 0 else 1
            out = planes * (4 if bottleneck else 1)
            _residual_block(b, f"layer{stage + 1}.{i}", planes, out, stride, bottleneck, deep)
    b.global_pool("avgpool")
    b.linear("fc", classes)
    return b.layers


def _alexnet(classes: int, image_size: int, in_channels: int, *, norm_after_pool5: bool) -> list[LayerSpec]:
    b = _Builder(image_size, in_channels)
    index = 0
    for out, kernel, stride, padding, pooled in (
        (64, 11, 4, 2, True),
        (192, 5, 1, 2, True),
        (384, 3, 1, 1, False),
        (256, 3, 1, 1, False),
        (256, 3, 1, 1, True),
    ):
        b.conv(f"features.{index}", out, kernel, stride, padding)
        b.norm(f"features.{index + 1}")
        index += 3  # the ReLU takes one index
        if pooled:
            b.pool(f"features.{index}.maxpool", 3, 2)
            index += 1
    if norm_after_pool5:
        b.norm(f"features.{index}")
    b.global_pool("avgpool", side=6)
    for index, out in ((1, 4096), (4, 4096), (6, classes)):
        b.linear(f"classifier.{index}", out)
    return b.layers


def _whitenet(
    classes: int, image_size: int, in_channels: int, *, widths: tuple[int, ...], depth: int
) -> list[LayerSpec]:
    b = _Builder(image_size, in_channels)
    b.frozen_conv("whiten", 2 * in_channels * 2 * 2, 2)
    for group, width in enumerate(widths, start=1):
        for index in range(depth):
            unit = f"group{group}.{index}"
            b.conv(f"{unit}.conv", width, 3)
            if index == 0:
                b.pool(f"{unit}.pool", 2, 2)
            b.norm(f"{unit}.norm", keep=2, parts=("bias",))  # the scale is fixed
    b.global_pool("maxpool")
    b.linear("head", classes, bias=False)
    return b.layers


def _vit(classes: int, image_size: int, in_channels: int, *, patch: int, width: int, depth: int) -> list[LayerSpec]:
    b = _Builder(image_size, in_channels)
    b.patches("patch_embed.proj", width, patch)
    for index in range(depth):
        block = f"blocks.{index}"
        b.norm(f"{block}.norm1", keep=2)  # nothing else keeps its input, which is a sum
        b.token_linear(f"{block}.attn.qkv", 3 * width, keep=1)
        b.attention(f"{block}.attn.mixed")
        b.token_linear(f"{block}.attn.proj", width, keep=0)
        b.norm(f"{block}.norm2", keep=2)
        b.token_linear(f"{block}.mlp.fc1", 4 * width, keep=2)  # before and after the activation
        b.token_linear(f"{block}.mlp.fc2", width, keep=0)
    b.norm("norm")
    b.global_pool("avgpool")
    b.linear("head", classes)
    return b.layers


def _families() -> dict[str, partial[list[LayerSpec]]]:
    known: dict[str, partial[list[LayerSpec]]] = {}
    for depth, blocks, bottleneck in (
        (18, (2, 2, 2, 2), False),
        (34, (3, 4, 6, 3), False),
        (50, (3, 4, 6, 3), True),
        (101, (3, 4, 23, 3), True),
        (152, (3, 8, 36, 3), True),
    ):
        known[f"resnet{depth}"] = partial(_resnet, blocks=blocks, width=64, bottleneck=bottleneck, small_images=False)
    known["resnet50d"] = partial(known["resnet50"], deep=True)
    for name, depth, width in (
        *((f"resnet{depth}", depth, 16) for depth in (8, 20, 32, 44, 56)),
        ("resnet20x4", 20, 64),
    ):
        blocks = ((depth - 2) // 6,) * 3
        known[name] = partial(_resnet, blocks=blocks, width=width, bottleneck=False, small_images=True)
    known["alexnet_bn"] = partial(_alexnet, norm_after_pool5=False)
    known["alexnet_bn_pool5"] = partial(_alexnet, norm_after_pool5=True)
    known["whitenet"] = partial(_whitenet, widths=(64, 256, 256), depth=2)
    known["whitenet_deep"] = partial(_whitenet, widths=(128, 384, 512), depth=3)
    known["vit_s16"] = partial(_vit, patch=16, width=384, depth=12)
    known["vit_cifar"] = partial(_vit, patch=4, width=384, depth=7)
    return known


_MODELS = _families()
_ASKED_FOR: set[str] = set()
_FOR_SMALL_IMAGES = {
    name
    for name, build in _MODELS.items()
    if build.func is _whitenet or build.keywords.get("small_images") or name == "vit_cifar"
}


def training_flops(model: str, *, classes: int = 1000, image_size: int = 224, in_channels: int = 3) -> float:
    """FLOPs of one training step per image. A multiply-add counts as two, and backward is twice the forward.

    The first layer needs no gradient of its input, and none of its weight if that is frozen.
    """
    table = layers(model, classes=classes, image_size=image_size, in_channels=in_channels)
    spared = 1 if any(spec.kind == "weight" for spec in table[0].tensors) else 2
    return 2.0 * (3 * math.fsum(layer.macs for layer in table) - spared * table[0].macs)
