"""Convolutions of channels-last tensors and their two gradients: by cuDNN, or for 1x1 as a matrix product by cuBLAS.

    1x1, stride 1:   z [m, n] = x [m, k] @ w.T     dx = dz @ w     dw = dz.T @ x

Which of the two is faster depends on the shape (cuDNN in the wide layers of ResNet-50, cuBLAS in the deep ones), so it
is measured once per shape, under the same switch as cuDNN's own choice of algorithms: torch.backends.cudnn.benchmark.
The choice is kept on disk (`hyperbatch.choices`).
Reference: torch.nn.functional.conv2d.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hyperbatch.choices import choices_of
from hyperbatch.kernels.compile import is_asking, is_compiling
from hyperbatch.kernels.memsets import replace_memsets
from hyperbatch.stopwatch import device_s

CALLS, ROUNDS = 4, 3  # calls and rounds of a measurement
SMALL_BYTES = 128 << 20  # of x or its product: up to here launches matter, and a second result fits into memory
_chosen: dict[tuple[Any, ...], int] = {}
Result = TypeVar("Result")


def padded(images: Tensor) -> Tensor:
    """Images with a fourth channel of zeros, if they have three. cuDNN would pad them in each call, at twice the cost.

    Images that are the first channels of such a tensor may have it as an attribute `padded`; then no copy is needed.
    """
    whole = getattr(images, "padded", None)
    if whole is not None and images.is_set_to(whole[:, :3]):  # not if other code has replaced its data since
        return whole
    return functional.pad(images, (0, 0, 0, 0, 0, 1)) if images.shape[1] == 3 and images.is_cuda else images


def convolve(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """Computes z = conv(x) without a bias. x may be `padded`."""
    if is_asking():
        return _room_for_output(x, conv)
    w = _padded(conv.weight, x, conv)

    def by_cudnn() -> Tensor:
        z = torch.ops.aten.convolution(x, w, None, conv.stride, conv.padding, conv.dilation, False, (0, 0), conv.groups)
        return channels_last(z)

    if not is_product(conv):
        return by_cudnn()
    return by_fastest("convolve", x, conv.weight, by_cudnn, lambda: _image(torch.mm(rows(x), w.flatten(1).t()), x))


def input_gradient(dz: Tensor, x: Tensor, conv: nn.Conv2d, weight: Tensor) -> Tensor:
    """Computes dx from dz. weight: the one that the forward used."""
    if is_asking():
        return torch.empty_like(x)

    def by_cudnn() -> Tensor:
        return channels_last(_backward(dz, x, _padded(weight, x, conv), conv, (True, False, False))[0])

    if not is_product(conv):
        return by_cudnn()
    return by_fastest("input", x, conv.weight, by_cudnn, lambda: _image(torch.mm(rows(dz), weight.flatten(1)), x))


def read_pixels_gradient(dz: Tensor, weight: Tensor) -> Tensor:
    """Computes the gradient of the pixels that a strided 1x1 convolution reads. That of all other pixels is zero."""
    return _image(torch.mm(rows(dz), weight.flatten(1)), dz)


def weight_gradient(dz: Tensor, x: Tensor, conv: nn.Conv2d, out: Tensor | None) -> Tensor:
    """Computes dw from dz: in `out` if a matrix product computes it, otherwise in memory that cuDNN allocates."""
    if is_asking():
        return torch.empty_like(conv.weight)

    def by_cudnn() -> Tensor:
        dw = _backward(dz, x, _room_for_weight(x, conv), conv, (False, True, False))[1]
        return dw if dw.shape == conv.weight.shape else dw[:, : conv.in_channels]

    def by_product() -> Tensor:
        dw = torch.empty_like(conv.weight) if out is None else out
        torch.mm(rows(dz).t(), rows(x), out=dw.flatten(1))
        return dw

    if not is_product(conv):
        return by_cudnn()
    return by_fastest("weight", x, conv.weight, by_cudnn, by_product)


def is_product(conv: nn.Conv2d, stride: int = 1) -> bool:
    """Whether it is a matrix product over the pixels that it reads, with this stride."""
    return conv.kernel_size == (1, 1) and conv.stride == (stride,) * 2 and conv.padding == (0, 0) and conv.groups == 1


def rows(x: Tensor) -> Tensor:
    """Returns a channels-last tensor as the matrix that it is in memory."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def _image(matrix: Tensor, like: Tensor) -> Tensor:
    """Returns the matrix as a channels-last tensor with the pixels of `like`."""
    n, _, h, w = like.shape
    return matrix.view(n, h, w, matrix.shape[1]).permute(0, 3, 1, 2)


def channels_last(x: Tensor) -> Tensor:
    """Returns x in channels-last layout, usually x itself. It is copied if its layout is ambiguous, as with one
    channel, or if torch chose another layout: without cuDNN, and for gradients of torch's own operations."""
    return x.contiguous(memory_format=torch.channels_last)


def _padded(weight: Tensor, x: Tensor, conv: nn.Conv2d) -> Tensor:
    missing = x.shape[1] - conv.in_channels
    return functional.pad(weight, (0, 0, 0, 0, 0, missing)) if missing else weight


def _backward(
    dz: Tensor, x: Tensor, weight: Tensor, conv: nn.Conv2d, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, ...]:
    return torch.ops.aten.convolution_backward(
        dz, x, weight, None, conv.stride, conv.padding, conv.dilation, False, (0, 0), conv.groups, wanted
    )


def _room_for_output(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """Returns an uninitialised tensor with the size of conv(x)."""
    assert not isinstance(conv.padding, str)
    sides = [
        (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for side, padding, dilation, kernel, stride in zip(
            x.shape[2:], conv.padding, conv.dilation, conv.kernel_size, conv.stride, strict=True
        )
    ]
    shape = (len(x), conv.out_channels, *sides)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _room_for_weight(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """Returns a tensor with the size of the weight; its values do not matter for the weight's own gradient."""
    w = conv.weight
    if x.shape[1] == conv.in_channels:
        return w
    size = (w.shape[0], x.shape[1], *w.shape[2:])
    return torch.empty(size, dtype=w.dtype, device=w.device, memory_format=torch.channels_last)


def by_fastest(what: str, x: Tensor, weight: Tensor, *ways: Callable[[], Result]) -> Result:
    """Returns the result of the implementation that is fastest for this shape."""
    return ways[fastest(what, x, weight, *ways)]()


def fastest(what: str, x: Tensor, weight: Tensor, *ways: Callable[[], Any], in_graph: bool | None = None) -> int:
    """Returns the index of the fastest implementation for this shape, or the last one if nothing may be measured.

    in_graph: as for `_seconds`; None: whether the results are small.
    """
    key = (what, x.shape, weight.shape, x.dtype, x.device)
    if key not in _chosen:
        last = len(ways) - 1
        if not (x.is_cuda and torch.backends.cudnn.benchmark) or torch.cuda.is_current_stream_capturing():
            return last
        kept, name = choices_of(x.device), f"{what} {tuple(x.shape)} {tuple(weight.shape)} {x.dtype}"
        before = kept.find(name)
        if isinstance(before, int) and 0 <= before <= last:
            _chosen[key] = before
            return before
        if is_compiling():
            # Compiling threads would disturb a measurement. Each implementation runs once, so that cuDNN makes its own
            # trials meanwhile: it chooses by shape, whatever the values in the tensors are.
            for way in ways[:-1]:
                way()
            return last
        if in_graph is None:
            pixels = x.numel() // x.shape[1]
            in_graph = pixels * max(x.shape[1], weight.shape[0]) * x.element_size() <= SMALL_BYTES
        seconds = [_seconds(way, in_graph=in_graph) for way in ways]
        _chosen[key] = seconds.index(min(seconds))
        kept.keep(name, _chosen[key])
    return _chosen[key]


def _seconds(way: Callable[[], Any], *, in_graph: bool) -> float:
    """Returns a call's seconds, the best of a few rounds, as cuDNN does. Waits for the device, in a shape's first step.

    in_graph: measure inside a CUDA graph, where small products will run; launches by the host would take longer.
    """
    here = torch.cuda.current_stream()
    stream = _stream_to_measure_on(torch.cuda.current_device())
    torch.cuda.synchronize()  # so that nothing else runs on any stream meanwhile
    with torch.cuda.stream(stream):
        way()  # loads kernels and lets cuDNN choose
        run, calls = (_captured(way), CALLS) if in_graph else (way, 1)
        # One round more than ROUNDS, because the first uploads a graph to the device.
        best_s = min(device_s(run, device=stream.device) for _ in range(1 + ROUNDS))
    here.wait_stream(stream)
    return best_s / calls


def _captured(way: Callable[[], Any]) -> Callable[[], None]:
    """Captures CALLS calls in a graph, whose results have their own memory."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for _ in range(CALLS):
            way()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the first error is raised
            graph.capture_end()
        raise
    graph.capture_end()
    replace_memsets(graph)
    graph.instantiate()
    return graph.replay


@functools.cache
def _stream_to_measure_on(device: int) -> torch.cuda.Stream:
    """Always the same stream, because cuBLAS keeps 32 MiB for each stream that it has seen."""
    return torch.cuda.Stream(device)
