"""Bytes that one training step has to move through the GPU's memory, from the shapes of the model, without torch.

    rung       what is fused                                                              MB per image of ResNet-50
    unfused    nothing: each operation reads its inputs and writes its output             479
    norm       statistics; normalise + ReLU (+ add); their backwards                      394
    moments    also: max-pool with its norm; one bit per element of a block's output;     278
               the norm before its sum from the moments of the convolution's input;
               the shortcut's gradient is added where it is read (models/fused_blocks.py)
    conv       statistics in the convolution's epilogue, normalise + ReLU in its          259
               prologue, forward and backward
    minimal    a convolution's output is written once and read once forward and once      112
               backward; its gradient is written and read once

Only activations and their gradients count per image; weights, their gradients and the update count per step. A tensor
that an operation reads is counted completely, once. Caches are not modelled, so a measured rate may exceed the copy
bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

from hyperbatch.plan.inventory import LayerSpec, layers

RUNGS = ("unfused", "norm", "moments", "conv", "minimal")
INDEX_BYTES = {
    "unfused": 8,
    "norm": 8,
    "moments": 1,
    "conv": 1,
    "minimal": 0,
}  # of a max pool's output: torch keeps int64
# Bytes per parameter and step in 16-bit training with fp32 masters. The working weight is read in forward and backward,
# and its gradient is written (6). The gradient is read for its norm and read again with master and momentum; these two
# and the working weight are written, and the gradient is cleared (24).
WEIGHT_BYTES = 6
UPDATE_BYTES = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Elements per image, summed over the layers of a kind."""

    image: int  # the network's input
    conv_in: int
    conv_out: int
    relu: int  # outputs of norms followed by a ReLU alone
    add: int  # outputs of norms that end a residual block: add, then ReLU
    plain: int  # outputs of norms that nothing follows: on a downsampling shortcut
    joins: int  # inputs of residual blocks: their gradient is the sum of two
    pool_in: int  # of max pools
    pool_out: int
    linear: int  # inputs and outputs of the head, including its average pool
    ends_in_1x1: bool  # whether residual blocks are bottlenecks


def sizes(model: str, *, image_size: int = 224, classes: int = 1000, in_channels: int = 3) -> Sizes:
    table = layers(model, classes=classes, image_size=image_size, in_channels=in_channels)
    convs = [layer for layer in table if layer.kind == "conv"]
    norms = {role: [layer for layer in table if _role(layer, table) == role] for role in ("relu", "add", "plain")}
    pools = [layer for layer in table if layer.kind == "pool" and "max" in layer.name]
    head = [layer for layer in table if layer.kind == "linear" or layer.name == "avgpool"]
    first_in_block = [layer for layer in convs if layer.name.endswith(".conv1")]
    return Sizes(
        image=table[0].inputs,
        conv_in=sum(layer.inputs for layer in convs),
        conv_out=sum(layer.activations for layer in convs),
        relu=_elements(norms["relu"]),
        add=_elements(norms["add"]),
        plain=_elements(norms["plain"]),
        joins=sum(layer.inputs for layer in first_in_block),
        pool_in=sum(layer.inputs for layer in pools),
        pool_out=_elements(pools),
        linear=sum(layer.inputs + layer.activations for layer in head),
        ends_in_1x1=any(layer.name.endswith(".conv3") for layer in convs),
    )


def image_bytes(
    model: str, rung: str, *, image_size: int = 224, classes: int = 1000, in_channels: int = 3, itemsize: int = 2
) -> dict[str, int]:
    """Returns the bytes per image by family of kernels, and their `total`."""
    s = sizes(model, image_size=image_size, classes=classes, in_channels=in_channels)
    # Forward reads the input and writes the output. Backward reads the output's gradient twice and the input once, and
    # writes the input's gradient, which is not needed for the image.
    convolution = 3 * s.conv_in + 3 * s.conv_out - s.image
    normed = s.relu + s.add + s.plain
    norm = relu = add = 0
    pool = 2 * (s.pool_in + s.pool_out)
    head = 3 * s.linear
    if rung == "unfused":
        norm = (3 + 5) * normed  # statistics, apply; backward: two sums, apply
        relu = (2 + 3) * (s.relu + s.add)  # in place; backward also reads its output
        add = 3 * s.add + 3 * s.joins  # forward; the sum of gradients where a block begins
    elif rung == "norm":
        # The ReLU is computed with the norm, whose input gives its sign again in backward. After an add it does not, so
        # backward reads the block's output (twice) and writes the shortcut's gradient; forward reads the shortcut.
        norm = (3 + 5) * normed + 4 * s.add
        add = 3 * s.joins
    elif rung == "moments":
        # Before a pool, neither the normalised tensor nor its gradient exists: statistics, pool; apply. The data about
        # the maxima that backward needs is as large as the pool's output.
        norm = (3 + 5) * (s.relu - s.pool_in) + (2 + 2) * s.pool_in
        pool = (2 + 4) * s.pool_out
        # The sum at a block's end: two reads and a write in each direction, and a bit per element written and read. For
        # the norm before it, backward reads the input of a 1x1 convolution (a quarter as wide) again; any other norm
        # needs statistics, sums and apply.
        norm += 6 * s.add + s.add // 8 + (s.add // 4 if s.ends_in_1x1 else 5 * s.add) + (1 + 4) * s.plain
    elif rung == "conv":
        # For each gradient, backward also reads the output to which it belongs (for both products) and, to mask what it
        # writes, the input. At a block's end forward reads the last output and the shortcut and writes the sum;
        # backward adds the shortcut's gradient and computes the sums of the last norm and of the shortcut's.
        convolution = 4 * s.conv_in + 5 * s.conv_out - s.image
        norm = (3 + 2) * s.add + s.plain
    elif rung == "minimal":
        convolution, pool = 5 * s.conv_out + 2 * s.image, 0
    else:
        raise ValueError(f"unknown rung {rung!r}; one of {', '.join(RUNGS)}")
    indices = 2 * s.pool_out * INDEX_BYTES[rung]  # written and read
    parts = {"convolution": convolution, "norm": norm, "relu": relu, "add": add, "pool": pool, "head": head}
    found = {name: elements * itemsize for name, elements in parts.items()}
    found["pool"] += indices
    return {**found, "total": sum(found.values())}


def step_bytes(model: str, rung: str, batch: int, *, image_size: int = 224, classes: int = 1000) -> float:
    """Returns the bytes of a whole 16-bit step: the images' share, weights and their gradients, and the update."""
    table = layers(model, classes=classes, image_size=image_size)
    parameters = sum(spec.numel for layer in table for spec in layer.tensors)
    per_image = image_bytes(model, rung, image_size=image_size, classes=classes)["total"]
    return batch * per_image + parameters * (WEIGHT_BYTES + UPDATE_BYTES)


def _elements(chosen: list[LayerSpec]) -> int:
    return sum(layer.activations for layer in chosen)


def _role(layer: LayerSpec, table: tuple[LayerSpec, ...]) -> str | None:
    """What follows a norm: "relu", "add" (a block's last norm), or "plain" (nothing)."""
    if layer.kind != "norm":
        return None
    block = layer.name.rpartition(".")[0]
    before = table[table.index(layer) - 1]
    if block.endswith("downsample") or before.kind != "conv":
        return "plain"
    last = max((other.name for other in table if other.name.startswith(f"{block}.bn")), default="")
    return "add" if block.startswith("layer") and layer.name == last else "relu"
