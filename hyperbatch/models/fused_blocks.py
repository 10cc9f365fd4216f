"""The layers of ResNet and AlexNet-BN in fused 16-bit kernels, for training. Reference: the models' own layers.

There is one autograd function per residual block, so that its gradients are ready to be exchanged as soon as its
backward is done. Weight gradients are written directly into the arena.

    x ─┬─ conv norm relu ─ [blur] conv norm relu ─ conv norm ─ [gate] ─(+)─ relu ─ out
       └───────────── [mean of 2x2, or blur] [conv norm] ───────────────┘

Saved for backward are the inputs and outputs of the convolutions, and one bit per element of out. The widest tensor,
the output of the last 1x1 convolution, is not saved: its norm follows from the moments of its input
(`kernels.norm.product`).

The gradient of the shortcut does not pass through autograd, which would need a pass over memory to add it. It is handed
to the previous block, whose backward reads both parts anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hyperbatch.kernels import conv as convolution
from hyperbatch.kernels import norm as kernels
from hyperbatch.kernels.average import average
from hyperbatch.kernels.blur import blur, blur_gradient
from hyperbatch.kernels.norm import gated, pool
from hyperbatch.kernels.norm.moments import normalise_with_moments
from hyperbatch.kernels.norm.product import ProductNorm, product_backward, product_statistics
from hyperbatch.models.blur import BlurConv2d
from hyperbatch.models.fused_gate import Gate, Opened
from hyperbatch.models.norm import BatchNorm2d, gather_rows, pool_moments

# The size of a convolution's output from which on its norm is computed from the moments of the input. Measured on an
# H200: with 26 MB, this saves 2 % of a step of batch 16; with 17 MB, it costs 3 % of a step of batch 42.
BY_MOMENTS_BYTES = 24 << 20
BY_MOMENTS_CHANNELS = 256  # the most channels of that input, because its moments are a channels x channels matrix


class ConvNorm:
    """A convolution and the batch norm after it."""

    def __init__(self, conv: nn.Conv2d, norm: BatchNorm2d, counters: Tensor, parameters: Sequence[Tensor] = ()) -> None:
        self.conv, self.norm, self.counters, self._parameters = conv, norm, counters, parameters

    @property
    def parameters(self) -> Sequence[Tensor]:
        return self._parameters or (self.conv.weight, self.norm.weight, self.norm.bias)

    def of_forward(self, parameters: Sequence[Tensor]) -> ConvNorm:
        """Returns a copy for backward with the parameters of forward, because the modules may hold other parameters by
        then (torch.func.functional_call)."""
        return ConvNorm(self.conv, self.norm, self.counters, parameters)

    @property
    def shared(self) -> bool:
        """Whether statistics span a group of ranks."""
        return self.norm.norm_group is not None

    def statistics(self, z: Tensor) -> Tensor:
        """Returns the norm's coef for the convolution's output z."""
        coef = kernels.statistics(z, self.norm, self.counters, local=self.shared)
        return share_statistics(coef, kernels.matrix(z)[0], self.norm) if self.shared else coef

    def image_statistics(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (coef, mean of z over the pixels of each image)."""
        coef, means = gated.image_statistics(z, self.norm, self.counters, local=self.shared)
        return (share_statistics(coef, kernels.matrix(z)[0], self.norm) if self.shared else coef), means

    def norm_relu(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (relu(norm(z)), coef)."""
        if not self.shared:
            return kernels.norm_relu(z, self.norm, self.counters)
        coef = self.statistics(z)
        return kernels.normalise(z, coef), coef

    def norm_join(self, z: Tensor, shortcut: Tensor, shortcut_coef: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (relu(norm(z) + shortcut), its bits, coef)."""
        if not self.shared:
            return kernels.norm_join(z, self.norm, self.counters, shortcut, shortcut_coef)
        coef = self.statistics(z)
        return *kernels.join(z, coef, shortcut, shortcut_coef), coef

    def new_gradients(self) -> kernels.NormGradients:
        _, scale, shift = self.parameters
        back = torch.empty(3, self.norm.num_features, device=scale.device)
        return kernels.NormGradients(back, new_grad(scale), new_grad(shift), local=self.shared)

    def norm_relu_backward(self, dy: Tensor, z: Tensor, coef: Tensor) -> tuple[Tensor, kernels.NormGradients]:
        """Returns dz, computed from the gradient of relu(norm(z)), and the norm's own gradients."""
        grads = self.new_gradients()
        if not self.shared:
            return kernels.norm_relu_backward(dy, z, coef, grads, self.counters), grads
        kernels.reduce_gradient(dy, z, coef, grads, self.counters)
        share_sums(grads, coef, self.norm)
        return kernels.apply_gradient(dy, z, coef, grads.back, relu=True), grads

    def by_moments(self, x: Tensor) -> bool:
        """Whether the norm of the convolution's output is computed from the moments of its input. The convolution must
        be a matrix product with a large output and numbers of channels that the kernels support."""
        n, c = self.conv.weight.shape[:2]
        large = x.numel() // c * n * x.element_size() >= BY_MOMENTS_BYTES
        powers = n & (n - 1) == 0 and c & (c - 1) == 0 and 16 <= c <= BY_MOMENTS_CHANNELS
        return large and powers and not self.shared and convolution.is_product(self.conv)

    def statistics_of_product(self, x: Tensor, z: Tensor) -> Tensor | ProductNorm:
        """Returns the statistics of z = conv(x), computed from x if that is cheaper."""
        if not self.by_moments(x):
            return self.statistics(z)
        return product_statistics(x, self.conv.weight, self.norm, self.counters)

    def weight_gradient(self, dz: Tensor, x: Tensor) -> Tensor:
        return convolution.weight_gradient(dz, x, self.conv, new_grad(self.parameters[0]))

    def input_gradient(self, dz: Tensor, x: Tensor) -> Tensor:
        return convolution.input_gradient(dz, x, self.conv, self.parameters[0])


def saved_by(ctx: Any, layers: Sequence[ConvNorm]) -> tuple[list[ConvNorm], list[Any]]:
    """Returns the layers with the parameters that they had in forward, and the other saved tensors.

    These are converted to channels-last memory, because hooks that store saved tensors elsewhere may return them in
    another layout.
    """
    saved = ctx.saved_tensors
    return (
        [layer.of_forward(saved[3 * i : 3 * i + 3]) for i, layer in enumerate(layers)],
        [x if x is None or x.dim() != 4 else convolution.channels_last(x) for x in saved[3 * len(layers) :]],
    )


def coef_of(norm: Tensor | ProductNorm) -> Tensor:
    return norm.coef if isinstance(norm, ProductNorm) else norm


@dataclass(frozen=True, kw_only=True, slots=True)
class Shrink:
    """How a shortcut halves its input before its convolution."""

    forward: Callable[[Tensor], Tensor]
    handed: type[kernels.OfMeans | kernels.OfBlurred]  # wraps the output's gradient, for another kernel to read
    backward: Callable[[Tensor, Tensor], Tensor]  # (gradient of the output, a tensor of the input's size)


class Handover:
    """Passes on the gradient of a block's output that comes through the next block's shortcut. It is the gradient of
    all pixels or, if the shortcut has a stride of 2, of the even pixels, of means or of a blur."""

    gradient: kernels.Handed | None = None

    def take(self) -> kernels.Handed | None:
        gradient, self.gradient = self.gradient, None
        return gradient


class Residual(torch.autograd.Function):
    """out = relu(path(x) + shortcut(x)) of one block. dy is the gradient of out, without the part that the handover
    passes on."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, block: FusedBlock, before: Handover | None, after: Handover, *parameters: Tensor
    ) -> Tensor:
        depth, layers = len(block.path), block.layers
        inputs, outputs = [x], [x] * len(layers)
        norms: list[Any] = [None] * len(layers)  # a coef, or a ProductNorm
        moments = None
        for i, layer in enumerate(block.path[:-1]):
            if isinstance(layer.conv, BlurConv2d):
                inputs[i] = blur(inputs[i])
            outputs[i] = convolution.convolve(inputs[i], layer.conv)
            if i == depth - 2 and block.gate is None and block.path[-1].by_moments(outputs[i]):
                norms[i] = layer.statistics(outputs[i])
                y, moments = normalise_with_moments(outputs[i], norms[i], block.counters)
            else:
                y, norms[i] = layer.norm_relu(outputs[i])
            inputs.append(y)

        shortcut, shortcut_coef = x, None
        shrunk = None if block.shrink is None else block.shrink.forward(x)
        if block.shortcut is not None:
            source = x if shrunk is None else shrunk
            outputs[depth] = shortcut = convolution.convolve(source, block.shortcut.conv)
            norms[depth] = block.shortcut.statistics_of_product(source, shortcut)
            shortcut_coef = coef_of(norms[depth])
        last, end = block.path[-1], depth - 1
        outputs[end] = convolution.convolve(inputs[-1], last.conv)
        opened: Opened | None = None
        if block.gate is not None:
            norms[end], means = last.image_statistics(outputs[end])
            opened = block.gate.open(means, norms[end], parameters[3 * len(layers) :], x.dtype)
            out, bits = gated.gated_join(outputs[end], norms[end], opened.gate, shortcut, shortcut_coef)
        elif moments is None:
            out, bits, norms[end] = last.norm_join(outputs[end], shortcut, shortcut_coef)
        else:
            norms[end] = product_statistics(moments, last.conv.weight, last.norm, block.counters)
            out, bits = kernels.join(outputs[end], norms[end].coef, shortcut, shortcut_coef, follows=True)

        # The output of a product is not needed again if its norm was computed from moments.
        products = [norm if isinstance(norm, ProductNorm) else None for norm in norms]
        ctx.save_for_backward(
            *parameters,
            *(opened or ()),
            bits,
            shrunk,
            *inputs,
            *(z if product is None else None for z, product in zip(outputs, products)),
            *(coef_of(norm) for norm in norms),
            *(product and product.centred for product in products),
            *(product and product.sums for product in products),
        )
        ctx.block, ctx.before, ctx.after = block, before, after
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        block: FusedBlock = ctx.block
        layers, kept = saved_by(ctx, block.layers)
        of_gate, opened, (bits, shrunk, *kept) = block.split_gate(kept)
        depth = len(block.path)
        inputs, rest = kept[:depth], kept[depth:]
        outputs, coefs, centred, sums = (rest[i : i + len(layers)] for i in range(0, len(rest), len(layers)))
        grads: list[Any] = [None] * len(layers)
        weights: list[Any] = [None] * len(layers)

        # The gradient g of the sum enters both branches, through the norms at their ends.
        ends = range(depth - 1, len(layers))
        for i in ends:
            grads[i] = layers[i].new_gradients()
        plain = [i for i in ends if outputs[i] is not None]
        branches = [kernels.Branch(outputs[i], coefs[i], grads[i]) for i in plain]
        if opened is None:
            g, sum_g, dzs = block.join_backward(dy, ctx.after.take(), bits, branches)
        else:
            g, sum_g, dzs, of_gate = block.gated_backward(dy, ctx.after.take(), bits, branches, opened, of_gate)

        def through(i: int, x: Tensor) -> Tensor:
            """Returns the gradient of x, the input of the layer at the end of a branch, and stores the weight's
            gradient in `weights`."""
            if i in plain:
                dz = dzs[plain.index(i)]
                weights[i] = layers[i].weight_gradient(dz, x)
                if i == depth and ctx.before is not None and convolution.is_product(layers[i].conv, stride=2):
                    return convolution.read_pixels_gradient(dz, layers[i].parameters[0])
                return layers[i].input_gradient(dz, x)
            w = layers[i].parameters[0]
            weights[i] = new_grad(w)
            product = ProductNorm(coef=coefs[i], centred=centred[i], sums=sums[i], rows=kernels.matrix(x)[0])
            return product_backward(g, x, w, product, sum_g, grads[i], weights[i], block.counters)

        through_shortcut = g
        if block.shortcut is not None:
            through_shortcut = through(depth, inputs[0] if shrunk is None else shrunk)
        d = through(depth - 1, inputs[-1])
        for i in reversed(range(depth - 1)):
            dz, grads[i] = layers[i].norm_relu_backward(d, outputs[i], coefs[i])
            weights[i] = layers[i].weight_gradient(dz, inputs[i])
            d = layers[i].input_gradient(dz, inputs[i])
            if isinstance(layers[i].conv, BlurConv2d):
                d = blur(d)  # the blur is symmetric, so its gradient is the same blur
        shrink = block.shrink
        if ctx.before is not None:
            ctx.before.gradient = through_shortcut if shrink is None else shrink.handed(through_shortcut)
        else:
            d = d.add_(through_shortcut if shrink is None else shrink.backward(through_shortcut, inputs[0]))
        parameters = [tensor for w, norm in zip(weights, grads) for tensor in (w, norm.weight, norm.bias)]
        return d, None, None, None, *parameters, *of_gate


class ConvNormPool(torch.autograd.Function):
    """relu(norm(conv(x))), followed by a max-pool if there is a window."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: ConvNorm, window: dict[str, int] | None, *parameters: Tensor) -> Tensor:
        z = convolution.convolve(x, layer.conv)
        ctx.layer, ctx.window = layer, window
        if window is None:
            y, coef = layer.norm_relu(z)
            ctx.save_for_backward(*parameters, x, z, coef)
            return y
        coef = layer.statistics(z)
        pooled, peaks = pool.normalise_pool(z, coef, **window)
        ctx.save_for_backward(*parameters, x, z, coef, peaks.value, peaks.tap)
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (layer,), (x, z, coef, *peaks) = saved_by(ctx, [ctx.layer])
        dy = convolution.channels_last(dy)
        if ctx.window is None:
            dz, grads = layer.norm_relu_backward(dy, z, coef)
        else:
            peaks, grads = pool.Peaks(value=peaks[0], tap=peaks[1]), layer.new_gradients()
            pool.reduce_pool_gradient(dy, peaks, z, coef, grads, layer.counters)
            if layer.shared:
                share_sums(grads, coef, layer.norm)
            dz = pool.apply_pool_gradient(dy, peaks, z, grads.back, **ctx.window)
        dw = layer.weight_gradient(dz, x)
        dx = layer.input_gradient(dz, x) if ctx.needs_input_grad[0] else None
        return dx, None, None, dw, grads.weight, grads.bias


class Blur(torch.autograd.Function):
    """The blur with a stride of 2 that follows a pool."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.size = x.shape[2:]
        return blur(x, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return blur_gradient(convolution.channels_last(dy), *ctx.size, stride=2)


class FusedBlock:
    def __init__(self, block: Any, counters: Tensor) -> None:
        """block: a BasicBlock or Bottleneck, ours or timm's."""
        pairs = [(block.conv1, block.bn1), (block.conv2, block.bn2)]
        if hasattr(block, "conv3"):
            pairs.append((block.conv3, block.bn3))
        self.counters = counters
        se = getattr(block, "se", None)
        self.gate = None if se is None else Gate(se)
        self.path = [ConvNorm(conv, norm, counters) for conv, norm in pairs]
        self.shortcut = None
        self.shrink: Shrink | None = None
        if block.downsample is not None:
            *before, conv, norm = block.downsample
            assert all(isinstance(module, nn.AvgPool2d | nn.Identity) for module in before)
            if any(isinstance(module, nn.AvgPool2d) for module in before):
                self.shrink = BY_MEANS
            elif isinstance(conv, BlurConv2d):
                self.shrink = BY_BLUR
            assert isinstance(conv, nn.Conv2d)
            assert isinstance(norm, BatchNorm2d)
            self.shortcut = ConvNorm(conv, norm, counters)

    @property
    def layers(self) -> list[ConvNorm]:
        """The layers of the path, then that of the shortcut."""
        return self.path if self.shortcut is None else [*self.path, self.shortcut]

    def split_gate(self, kept: list[Any]) -> tuple[list[Tensor], Opened | None, list[Any]]:
        """Splits the tensors that forward saved after those of its layers into (parameters of the gate, its other
        tensors, the rest)."""
        if self.gate is None:
            return [], None, kept
        count = len(self.gate.parameters)
        return kept[:count], Opened(*kept[count : count + len(Opened._fields)]), kept[count + len(Opened._fields) :]

    def gated_backward(
        self,
        dy: Tensor,
        dy2: kernels.Handed | None,
        bits: Tensor,
        branches: list[kernels.Branch],
        opened: Opened,
        parameters: list[Tensor],
    ) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        """Returns (g, its column sums, dz of each branch, gradients of the gate). The first branch is the gated one."""
        assert self.gate is not None
        first, *others = branches
        g, sums, of_images = gated.reduce_gated(dy, bits, branches, self.counters, dy2=dy2)
        ds, of_gate = self.gate.backward(of_images, first.coef, opened, parameters, [new_grad(p) for p in parameters])
        gated.finish_gated(of_images, opened.means, opened.gate, ds, first.coef, first.grads, first.x)
        if self.path[-1].shared:
            for branch, layer in zip(branches, self.layers[len(self.path) - 1 :], strict=True):
                share_sums(branch.grads, branch.coef, layer.norm)
        dz = gated.apply_gated(g, first.x, opened.gate, ds, first.grads.back)
        more = [kernels.apply_gradient(g, b.x, b.coef, b.grads.back, relu=False) for b in others]
        return g, sums, [dz, *more], of_gate

    def join_backward(
        self, dy: Tensor, dy2: kernels.Handed | None, bits: Tensor, branches: list[kernels.Branch]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Returns (g, its column sums, dz of each branch)."""
        if not self.path[-1].shared:
            return kernels.join_backward(dy, bits, branches, self.counters, dy2=dy2)
        g, sums = kernels.reduce_joined_gradient(dy, bits, branches, self.counters, dy2=dy2)
        for branch, layer in zip(branches, self.layers[len(self.path) - 1 :], strict=True):
            share_sums(branch.grads, branch.coef, layer.norm)
        return g, sums, [kernels.apply_gradient(g, b.x, b.coef, b.grads.back, relu=False) for b in branches]

    def __call__(self, x: Tensor, before: Handover | None) -> tuple[Tensor, Handover]:
        after = Handover()
        parameters = [tensor for layer in self.layers for tensor in layer.parameters]
        parameters += [] if self.gate is None else self.gate.parameters
        return Residual.apply(x, self, before, after, *parameters), after


def means_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient of x from that of its means, for a block without a handover. There are few of these, so
    torch's own operation is good enough."""
    return torch.ops.aten.avg_pool2d_backward(dy, x, [2, 2], [2, 2], [0, 0], True, False, None)


def halved_blur_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return blur_gradient(dy, *x.shape[2:], stride=2)


# Named functions, so that a fused model can be pickled.
BY_MEANS = Shrink(forward=average, handed=kernels.OfMeans, backward=means_gradient)
BY_BLUR = Shrink(forward=functools.partial(blur, stride=2), handed=kernels.OfBlurred, backward=halved_blur_gradient)


def new_grad(param: Tensor) -> Tensor:
    """Returns the tensor to write a gradient of this parameter to: its place in the arena, so that it need not be
    copied, or new memory if the arena already holds a gradient."""
    place = getattr(param, "place_of_grad", None)
    view = place() if place is not None and param.grad is None else None
    return torch.empty_like(param) if view is None else view


# --- statistics over a group of ranks ---------------------------------------------------------------------------------


def share_statistics(coef: Tensor, rows: int, norm: BatchNorm2d) -> Tensor:
    """Returns coef over all ranks of the norm's group, from a coef with this rank's mean and variance."""
    assert norm.norm_group is not None
    mean, var = coef[0], coef[1]
    own = torch.cat([mean, var, mean.new_full((1,), rows)])
    mean, var, count = pool_moments(gather_rows(own, norm.norm_group.process_group))
    norm.blend_running(mean, var, count)
    rstd = torch.rsqrt(var + norm.eps)
    scale = norm.weight.detach() * rstd
    # Compared with the coef of a single rank, there is one more row: the number of samples of the statistics.
    return torch.stack([mean, rstd, scale, norm.bias.detach() - mean * scale, count.expand_as(mean)])


def share_sums(grads: kernels.NormGradients, coef: Tensor, norm: BatchNorm2d) -> None:
    """Fills `back` with values over the norm's group. The parameters' gradients remain those of this rank's samples."""
    assert norm.norm_group is not None
    sums = torch.stack([grads.bias, grads.weight])
    dist.all_reduce(sums, group=norm.norm_group.process_group)
    mean, rstd, scale, _, count = coef
    mean_g, mean_gx = sums / count
    grads.back[0] = scale
    grads.back[1] = -scale * rstd * mean_gx
    grads.back[2] = -scale * mean_g - grads.back[1] * mean
