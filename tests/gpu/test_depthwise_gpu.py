"""Depthwise convolutions on a CUDA device: float64, torch's own 16-bit path, bits, graphs, compiled blocks, choices."""

from __future__ import annotations

import pytest
import torch
from depthwise_reference import Block, check, make, reference, through_kernels
from torch import nn
from torch.nn import functional as F

from hyperbatch import choices
from hyperbatch.kernels import conv as convolution
from hyperbatch.kernels.compile import compiling
from hyperbatch.models.depthwise import DepthwiseConv2d, compile_depthwise, depthwise_layers
from hyperbatch.models.depthwise_sums import SumsInDepthwise
from hyperbatch.models.layers import adopt
from hyperbatch.models.quick import quicken

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CONVNEXT = [(96, 56), (192, 28), (384, 14), (768, 7)]  # channels, pixels of a side


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Nothing is chosen yet."""
    monkeypatch.setenv("HYPERBATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(convolution, "_chosen", {})


def settings():
    from hyperbatch.kernels import depthwise

    return depthwise.SETTINGS


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(("channels", "pixels"), CONVNEXT)
def test_agrees_with_float64(channels, pixels, which):
    check(*make(5, channels, pixels, pixels, 7, device="cuda"), settings()[which])


@pytest.mark.parametrize(
    "case",
    [(1, 40, 9, 13, 7), (3, 5, 7, 7, 7), (2, 96, 112, 75, 3), (1, 144, 33, 1, 5), (2, 24, 1, 61, 7), (64, 32, 7, 9, 3)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_any_size(case, dtype):
    for setting in settings():
        check(*make(*case, dtype=dtype, device="cuda"), setting)


def backward_by_torch(x, dz, weight, bias):
    inputs = [tensor.detach().requires_grad_() for tensor in (x, weight, bias.to(x.dtype))]
    z = F.conv2d(*inputs, padding=weight.shape[-1] // 2, groups=len(weight))
    dx, dw, dbias = torch.autograd.grad(z, inputs, dz)
    return z.detach(), x + dx, dw, dbias


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_no_further_from_float64_than_torchs_own(dtype):
    inputs = make(16, 96, 56, 56, 7, dtype=dtype, device="cuda")
    inputs[3].copy_(inputs[3].to(dtype))  # torch takes a bias of 16 bits
    exact = reference(*inputs)

    def distances(found):
        return [float((got.double() - expect).norm() / expect.norm()) for got, expect in zip(found, exact, strict=True)]

    ours, torchs = distances(through_kernels(*inputs)), distances(backward_by_torch(*inputs))
    print("ours", ours, "torch's", torchs)
    assert all(a <= 1.02 * b for a, b in zip(ours, torchs, strict=True))


@pytest.mark.parametrize("which", [0, 1])
def test_same_bits_every_time(which):
    inputs = make(32, 192, 28, 28, 7, device="cuda")
    first, *others = (through_kernels(*inputs, settings()[which]) for _ in range(3))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_no_kernel_spills_and_one_compilation_ahead_serves_the_steps():
    """Of all that ConvNeXt-T needs; registers are printed for whoever runs it."""
    from hyperbatch.kernels import depthwise

    kernels = [depthwise._taps_kernel, depthwise._conv_kernel, depthwise._weight_kernel, depthwise._finish_kernel]

    for one in kernels:
        one.fn.device_caches.clear()  # as a new process has it

    def compiled():
        return {(i, key): found for i, one in enumerate(kernels) for key, found in table(one.fn).items()}

    def table(function):
        return function.device_caches[torch.cuda.current_device()][0]

    layers = [nn.Conv2d(c, c, 7, padding=3, groups=c) for c, _ in CONVNEXT]
    model = quicken(adopt(nn.Sequential(*layers))).half().cuda()
    with compiling():
        compile_depthwise(depthwise_layers(model))
    ahead = set(compiled())
    for layer, (channels, pixels) in zip(model, CONVNEXT, strict=True):
        x, dz, _, _ = make(2, channels, pixels, pixels, 7, device="cuda")
        for setting in depthwise.SETTINGS:
            through_kernels(x, dz, layer.weight.detach(), layer.bias.detach(), setting)
    torch.cuda.synchronize()
    assert set(compiled()) == ahead
    for (i, _), found in compiled().items():
        print(kernels[i].fn.__name__, found.n_regs, found.n_spills)
        assert found.n_spills == 0


def block_and_images():
    torch.manual_seed(0)
    block = quicken(adopt(Block(96))).half().cuda().to(memory_format=torch.channels_last)
    assert isinstance(block.conv_dw, DepthwiseConv2d)
    for name, parameter in block.named_parameters():
        if name == "norm.weight" or name.endswith("bias"):
            parameter.data = parameter.data.float()  # as the arena keeps them
    images = torch.randn(8, 96, 28, 28, device="cuda").half().to(memory_format=torch.channels_last)
    return block, images.requires_grad_()


def gradients(run, block, images):
    out = run(images)
    inputs = [images, *block.parameters()]
    weights = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape)
    return [out.detach(), *torch.autograd.grad((out.float() * weights).mean() * 1024, inputs)]


@pytest.mark.filterwarnings("ignore")  # torch's own, about how models should be written
@pytest.mark.parametrize("benchmark", [False, True])
def test_compiled_blocks_take_the_operation_whole(monkeypatch, benchmark):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    block, images = block_and_images()
    plain = gradients(block, block, images)
    compiled = torch.compile(
        block, fullgraph=True, dynamic=False, options={"post_grad_custom_post_pass": SumsInDepthwise()}
    )
    for got, expect in zip(gradients(compiled, block, images), plain, strict=True):
        assert got.dtype == expect.dtype
        assert float((got.float() - expect.float()).norm()) <= 5e-3 * float(expect.float().norm())
    torch.compiler.reset()


def test_captured_steps_give_the_bits_of_uncaptured_ones():
    block, images = block_and_images()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients(block, block, images)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(block, block, images)
    with torch.no_grad():
        images.copy_(torch.randn_like(images))
        block.conv_dw.weight.copy_(torch.randn_like(block.conv_dw.weight))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, gradients(block, block, images), strict=True))


def test_the_fastest_is_measured_once_and_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    x, dz, weight, bias = make(32, 192, 28, 28, 7, device="cuda")

    def results():
        monkeypatch.setattr(convolution, "_chosen", {})
        choices._opened.cache_clear()  # as a new process has it
        inputs = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
        z = torch.ops.hyperbatch.depthwise(*inputs)
        return z.detach(), *torch.autograd.grad(z, inputs, dz)

    first = results()
    print(convolution._chosen)
    assert len(convolution._chosen) == 3
    (path,) = (tmp_path / "choices").iterdir()
    assert path.read_text().count("depthwise") == 3
    monkeypatch.setattr(convolution, "_seconds", None)  # not needed
    assert all(torch.equal(a, b) for a, b in zip(first, results(), strict=True))
