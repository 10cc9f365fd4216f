"""Fused kernels, blocks and networks on a CUDA device: float64, torch's own 16-bit path, graphs, poisoned memory."""

from __future__ import annotations

import copy
import gc
import json
import os
from pathlib import Path
from statistics import mean, quantiles

import pytest
import torch
from fused_reference import Outcome, error, errors, exact_step, step
from torch import nn
from torch.nn import functional as F

from hyperbatch.arena import Arena
from hyperbatch.config import BatchPhase
from hyperbatch.models import create_model
from hyperbatch.models.fused import fuse, why_not_fused
from hyperbatch.models.resnet import BasicBlock, Bottleneck

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
if torch.cuda.is_available():
    from gated_reference import check as check_gated
    from norm_reference import check as check_norms
    from norm_reference import forward as forward_norms
    from norm_reference import make, new_gradients

    from hyperbatch.kernels import norm as kernels
    from hyperbatch.kernels.norm import one_pass
    from hyperbatch.models import fused_blocks

CUDA = torch.device("cuda", 0)
FP16, BF16 = torch.float16, torch.bfloat16
NAMES = {FP16: "fp16", BF16: "bf16"}
ROUND_OFF = {FP16: 2.0**-11, BF16: 2.0**-8}
SCALE = 1024.0  # of losses: keeps gradients of fp16 above its smallest numbers
# Two ways of rounding the same tensors: which ReLUs turn over, and with them the error, is chance in both. The mean of
# three draws of weights and images still scatters by about a tenth.
BY_CHANCE = 1.3


@pytest.fixture(autouse=True)
def _tidy():
    torch.manual_seed(0)
    yield
    gc.collect()
    torch.cuda.empty_cache()


# --- kernels ----------------------------------------------------------------------------------------------------------

# [n, c, h, w] of ResNet-50: 224 and 160 px, even and odd batches; one row; a few columns.
LAYERS = {
    "stem": (8, 64, 112, 112),
    "layer1": (8, 256, 56, 56),
    "layer1 160px": (7, 64, 40, 40),
    "layer2": (7, 128, 28, 28),
    "layer3": (8, 1024, 14, 14),
    "layer3 of batch 16": (16, 256, 14, 14),  # one launch, of programs that meet
    "layer3 160px": (3, 256, 10, 10),
    "layer4": (7, 2048, 7, 7),
    "alexnet": (5, 192, 27, 27),
    "narrow": (5, 24, 31, 17),
    "one row": (1, 64, 1, 1),
}


WAYS = ("one launch", "two launches")


@pytest.fixture(params=WAYS)
def launches(request, monkeypatch):
    choose(monkeypatch, request.param)


def choose(monkeypatch, how):
    """Two launches, or one where the tensor is small enough."""
    if how == "two launches":
        monkeypatch.setattr(one_pass, "is_small", lambda x: False)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.usefixtures("launches")
def test_norms_agree_with_float64(layer):
    counters = kernels.new_counters(CUDA)
    for shortcut in ("none", "plain", "norm"):
        check_norms(make(*LAYERS[layer], FP16, device="cuda"), shortcut, counters)
        assert not (counters & 0x7FFFFFFF).any()


@pytest.mark.parametrize("layer", ["layer1", "layer4"])
@pytest.mark.usefixtures("launches")
def test_norms_of_bf16(layer):
    check_norms(make(*LAYERS[layer], BF16, device="cuda"), "norm", kernels.new_counters(CUDA))


@pytest.mark.usefixtures("launches")
def test_both_parts_of_a_gradient_are_added():
    case = make(*LAYERS["layer3"], FP16, device="cuda")
    dy2 = (torch.randn_like(case.x, dtype=torch.float32) / 4).to(FP16)
    before = case.x2.double()  # far from 0 everywhere, so that dy2 meets no ReLU in doubt
    case.x2.copy_((before + 40 * before.sign()).to(FP16))
    check_norms(case, "plain", kernels.new_counters(CUDA), dy2=dy2)


@pytest.mark.parametrize("kind", ["OfMeans", "OfBlurred"])
@pytest.mark.parametrize("pixels", [(28, 28), (13, 27)], ids=str)
@pytest.mark.usefixtures("launches")
def test_each_pixel_takes_its_share_of_the_gradient_of_half_the_size(pixels, kind):
    case = make(8, 512, *pixels, FP16, device="cuda")
    halves = torch.randn(8, 512, *((side + 1) // 2 for side in pixels), device=CUDA).to(FP16)
    before = case.x2.double()  # far from 0 everywhere, so that the gradient meets no ReLU in doubt
    case.x2.copy_((before + 40 * before.sign()).to(FP16))
    dy2 = getattr(kernels, kind)(halves.to(memory_format=torch.channels_last))
    check_norms(case, "plain", kernels.new_counters(CUDA), dy2=dy2)


@pytest.mark.parametrize("size", [(8, 256, 56, 56), (33, 2048, 7, 7), (3, 512, 13, 27)], ids=str)
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_gates_agree_with_float64(size, dtype):
    counters = kernels.new_counters(CUDA)
    for plain in (True, False):
        check_gated(make(*size, dtype, device="cuda"), counters, plain=plain)
        assert not counters.any()


@pytest.mark.usefixtures("launches")
def test_norms_of_means_far_from_zero():
    check_norms(make(8, 64, 28, 28, FP16, device="cuda", far=100.0), "none", kernels.new_counters(CUDA))


@pytest.mark.parametrize("layer", ["layer1", "layer3", "layer3 of batch 16", "narrow"])
def test_norms_give_the_same_bits_every_time(layer, monkeypatch):
    case, counters = make(*LAYERS[layer], FP16, device="cuda"), kernels.new_counters(CUDA)
    for how in WAYS:
        choose(monkeypatch, how)
        runs = []
        for _ in range(5):
            out, bits, coef, coef2 = forward_norms(case, "norm", counters)
            grads = [new_gradients(case.norm), new_gradients(case.norm2)]
            branches = [kernels.Branch(case.x, coef, grads[0]), kernels.Branch(case.x2, coef2, grads[1])]
            g, sums, dxs = kernels.join_backward(case.dy, bits, branches, counters)
            dx = kernels.norm_relu_backward(case.dy, case.x, coef, new_gradients(case.norm), counters)
            runs.append([out, bits, coef, g, sums, *dxs, dx, *(t for n in grads for t in (n.back, n.weight, n.bias))])
        for run in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))
        again, same_bits = kernels.join(case.x, coef, case.x2, coef2)
        assert torch.equal(out, again)
        assert torch.equal(bits, same_bits)
        for branch, dx in zip(branches, dxs, strict=True):
            assert torch.equal(dx, kernels.apply_gradient(g, branch.x, branch.coef, branch.grads.back, relu=False))


# --- blocks -----------------------------------------------------------------------------------------------------------


def as_16_bit(module: nn.Module, dtype: torch.dtype) -> None:
    """As the arena keeps it: convolutions of 16 bits, norms of fp32."""
    module.to(memory_format=torch.channels_last)
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            layer.to(dtype)


def block_step(run, block: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Outcome:
    """With the gradient of x among those of the parameters."""
    block.zero_grad()
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    out = run(leaf)
    out.backward(dy)
    grads = {name: param.grad.double() / SCALE for name, param in block.named_parameters()}
    grads["x"] = leaf.grad.double() / SCALE
    return Outcome(out.detach(), grads, {name: buffer.clone() for name, buffer in block.named_buffers()})


# block, inputs, width, stride, batch, pixels a side
BLOCKS = {
    "layer1.0": (Bottleneck, 64, 64, 1, 8, 56),
    "layer1.1": (Bottleneck, 256, 64, 1, 7, 56),
    "layer2.0": (Bottleneck, 256, 128, 2, 8, 56),
    "layer2.1 160px": (Bottleneck, 512, 128, 1, 7, 20),
    "layer3.1": (Bottleneck, 1024, 256, 1, 7, 14),
    "layer4.0": (Bottleneck, 1024, 512, 2, 8, 14),
    "layer4.1 160px": (Bottleneck, 2048, 512, 1, 3, 5),
    "resnet18": (BasicBlock, 64, 128, 2, 8, 56),
}
CASES = [(name, FP16) for name in BLOCKS] + [("layer1.0", BF16), ("layer3.1", BF16)]


@pytest.mark.parametrize("moments", [True, False], ids=["moments", "outputs"])
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=[f"{name} {NAMES[dtype]}" for name, dtype in CASES])
def test_blocks_agree_with_float64(name, dtype, moments, monkeypatch):
    """Outputs within three roundings. Gradients: a value that is off by a rounding turns its ReLU over now and then.

    So do some 2^-11 of them (fp16), and where they do the gradient is wrong by its whole size: a few roots of that in
    all, on the plain path, too.
    """
    kind, inputs, width, stride, n, side = BLOCKS[name]
    if kind is BasicBlock and moments:
        pytest.skip("has no product")
    monkeypatch.setattr(fused_blocks, "BY_MOMENTS_BYTES", 0 if moments else 1 << 60)
    block = kind(inputs, width, stride, 0.1).to(CUDA)
    with torch.no_grad():
        for module in block.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.normal_(1, 0.3)
                module.bias.normal_(0, 0.3)
    as_16_bit(block, dtype)
    x = torch.randn(n, inputs, side, side, device=CUDA).relu_().to(dtype).to(memory_format=torch.channels_last)
    shape = block(x).shape
    # Not scaled: the weights' gradients are sums over ten thousand rows and must stay below fp16's largest number.
    dy = torch.randn(shape, device=CUDA).to(dtype).to(memory_format=torch.channels_last)
    exact, plain, fused = copy.deepcopy(block).double(), copy.deepcopy(block), block
    layers = fused_blocks.FusedBlock(fused, kernels.new_counters(CUDA))
    want = block_step(exact, exact, x.double(), dy.double())
    theirs = block_step(plain, plain, x, dy)
    ours = block_step(lambda leaf: layers(leaf, None)[0], fused, x, dy)
    assert not (layers.counters & 0x7FFFFFFF).any()
    assert error(ours.logits, want.logits) < 3 * ROUND_OFF[dtype]
    far = errors(ours.grads, want.grads)
    assert max(far.values()) < 4 * ROUND_OFF[dtype] ** 0.5, far
    summary = compare([far], [errors(theirs.grads, want.grads)], f"{name} {NAMES[dtype]}")
    assert summary < BY_CHANCE
    for key, buffer in want.buffers.items():
        if "running" in key:
            # Sums of some hundred values at least: what rounding did to them is all but averaged out.
            assert error(ours.buffers[key], buffer) < ROUND_OFF[dtype], key


# --- networks ---------------------------------------------------------------------------------------------------------


def at_the_quantiles(values: dict[str, float]) -> tuple[float, float]:
    """Median and 90th percentile."""
    cuts = quantiles(values.values(), n=10, method="inclusive")
    return cuts[4], cuts[8]


def compare(ours: list[dict[str, float]], theirs: list[dict[str, float]], what: str) -> float:
    """The larger of two ratios, ours to theirs: of medians and of 90th percentiles, each averaged over the draws."""
    of_ours, of_theirs = (
        [mean(each) for each in zip(*(at_the_quantiles(one) for one in all_draws), strict=True)]
        for all_draws in (ours, theirs)
    )
    ratios = [a / (b + 1e-6) for a, b in zip(of_ours, of_theirs, strict=True)]
    text = ", ".join(f"{a:.2e} / {b:.2e}" for a, b in zip(of_ours, of_theirs, strict=True))
    print(f"{what}: median, 90 %: {text} = {ratios[0]:.2f}, {ratios[1]:.2f}")
    return max(ratios)


def network(name: str, dtype: torch.dtype, seed: int = 0) -> tuple[nn.Module, Arena]:
    """In an arena, with 16-bit weights; dropout off, since it would draw other numbers on each path."""
    torch.manual_seed(seed)
    with CUDA:
        model = create_model(name.removeprefix("blurred "), classes=1000, blurpool=name.startswith("blurred"))
    model.to(memory_format=torch.channels_last)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    arena = Arena(model, [name for name, _ in model.named_parameters()][::-1], dtype=dtype)
    return model, arena


def images_of(n: int, size: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator(CUDA).manual_seed(1000 + seed)
    images = torch.randn(n, 3, size, size, device=CUDA, generator=random).to(dtype)
    labels = torch.randint(1000, (n,), device=CUDA, generator=random)
    return images.to(memory_format=torch.channels_last), labels


NETWORKS = [
    ("resnet50", 16, 224, FP16),
    ("resnet50", 7, 160, FP16),
    ("resnet50", 16, 64, FP16),
    ("resnet50", 16, 64, BF16),
    ("resnet50", 16, 32, FP16),
    ("resnet50", 1, 224, FP16),
    ("resnet50d", 16, 224, FP16),
    ("resnet50d", 7, 104, BF16),
    ("timm_reference:resnetrs50", 16, 224, FP16),
    ("timm_reference:resnetrs50", 7, 104, BF16),
    ("resnet18", 7, 224, FP16),
    ("resnet18", 1, 64, FP16),
    ("resnet18", 16, 32, BF16),
    ("blurred resnet50", 16, 88, FP16),
    ("blurred resnet50", 7, 104, BF16),
    ("blurred resnet18", 16, 64, FP16),
    ("alexnet_bn", 7, 224, FP16),
    ("alexnet_bn", 16, 160, BF16),
    ("alexnet_bn", 16, 64, FP16),  # 32 px leave nothing for its last pool
    ("alexnet_bn", 1, 224, FP16),
]


@pytest.mark.parametrize(
    ("name", "n", "size", "dtype"), NETWORKS, ids=[f"{a} {b}x{c}px {NAMES[d]}" for a, b, c, d in NETWORKS]
)
def test_networks_are_no_further_from_float64_than_the_plain_path(name, n, size, dtype):
    """Whole networks amplify any rounding, so the measure is torch's own 16-bit path from the same weights."""
    measured: dict[str, tuple[list, list]] = {"gradients": ([], []), "statistics": ([], []), "logits": ([], [])}
    for seed in range(3 if n > 1 else 10):  # one image is one draw: its errors scatter more
        model, _ = network(name, dtype, seed)
        data = images_of(n, size, dtype, seed)
        assert why_not_fused(model, dtype, CUDA) is None
        want = exact_step(model, *data)
        plain = copy.deepcopy(model)
        theirs = step(plain, *data, scale=SCALE)
        del plain
        fuse(model)
        ours = step(model, *data, scale=SCALE)
        for i, got in enumerate((ours, theirs)):
            measured["gradients"][i].append(errors(got.grads, want.grads))
            of_batch = {key: value for key, value in want.buffers.items() if "running" in key}
            measured["statistics"][i].append(errors({key: got.buffers[key] for key in of_batch}, of_batch))
            measured["logits"][i].append(dict.fromkeys("ab", error(got.logits, want.logits)))
        assert all(torch.equal(ours.buffers[key], v) for key, v in want.buffers.items() if key not in of_batch)
        del model
    what = f"{name} {n}x{size}px {NAMES[dtype]}"
    ratios = {part: compare(*both, f"{what} {part}") for part, both in measured.items()}
    assert max(ratios.values()) < BY_CHANCE, ratios


@pytest.mark.usefixtures("same_algorithms")
def test_timms_resnet50d_gives_the_bits_of_ours():
    pytest.importorskip("timm")
    data = images_of(8, 160, FP16)
    ours, _ = network("resnet50d", FP16)
    theirs, _ = network("timm/resnet50d", FP16)
    theirs.load_state_dict(ours.state_dict())
    start = copy.deepcopy(ours.state_dict())
    results = []
    for model in (ours, theirs):
        assert why_not_fused(model, FP16, CUDA) is None
        fuse(model)
        step(model, *data, scale=SCALE)  # kernels are chosen and compiled
        model.load_state_dict(start)
        results.append(step(model, *data, scale=SCALE))
    assert torch.equal(results[0].logits, results[1].logits)
    for key, grad in results[0].grads.items():
        assert torch.equal(grad, results[1].grads[key]), key


# --- memory and graphs ------------------------------------------------------------------------------------------------


@pytest.fixture
def same_algorithms(monkeypatch):
    """cuDNN's that give the same bits, so that bits can be compared."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


def fused_step(model: nn.Module, arena: Arena, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    for slot in arena.slots:
        slot.param.grad = None
    loss = F.cross_entropy(model(images), labels)
    (loss * SCALE).backward()
    return loss.detach()


def grads_of(arena: Arena) -> dict[str, torch.Tensor]:
    return {slot.name: arena.grad_view(slot.name).clone() for slot in arena.slots}


def fill_with_nan(gibibytes: int) -> None:
    """The allocator hands out again what it was given back: large blocks, and small ones of each size."""
    large = [torch.full((1 << 29,), float("nan"), device=CUDA, dtype=FP16) for _ in range(gibibytes)]
    small = [torch.full((1 << i,), float("nan"), device=CUDA) for i in range(7, 19) for _ in range(1 << (19 - i))]
    torch.cuda.synchronize()  # before the memory goes back: later streams would not wait for the fills
    del large, small


@pytest.mark.parametrize("moments", [True, False], ids=["moments", "outputs"])
@pytest.mark.parametrize(
    ("name", "n", "size"),
    [
        ("resnet50", 16, 224),
        ("resnet50d", 8, 104),
        ("timm_reference:resnetrs50", 8, 104),
        ("resnet18", 3, 64),
        ("alexnet_bn", 5, 224),
    ],
)
@pytest.mark.usefixtures("same_algorithms")
def test_poisoned_memory_leaves_no_trace(name, n, size, moments, monkeypatch):
    if moments and "50" not in name:
        pytest.skip("has no product")
    monkeypatch.setattr(fused_blocks, "BY_MOMENTS_BYTES", 0 if moments else 1 << 60)
    model, arena = network(name, FP16)
    data = images_of(n, size, FP16)
    fuse(model)
    fused_step(model, arena, *data)  # compiles, and allocates what stays
    start = copy.deepcopy(model.state_dict())
    loss, expect = fused_step(model, arena, *data), grads_of(arena)
    buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
    for _ in range(2):
        model.load_state_dict(start)
        for grad in arena.grads.values():
            grad.fill_(float("nan"))
        fill_with_nan(8)
        again = fused_step(model, arena, *data)
        assert torch.equal(again, loss)
        for key, grad in grads_of(arena).items():
            assert torch.equal(grad, expect[key]), key
            assert grad.isfinite().all(), key
        assert all(torch.equal(buffer, buffers[key]) for key, buffer in model.named_buffers())


@pytest.mark.parametrize("moments", [True, False], ids=["moments", "outputs"])
@pytest.mark.parametrize(
    ("name", "n", "size"),
    [("resnet50", 16, 160), ("resnet50d", 8, 104), ("timm_reference:resnetrs50", 8, 104), ("alexnet_bn", 7, 224)],
)
@pytest.mark.usefixtures("same_algorithms")
def test_a_captured_step_gives_the_same_bits(name, n, size, moments, monkeypatch):
    if moments and "50" not in name:
        pytest.skip("has no product")
    monkeypatch.setattr(fused_blocks, "BY_MOMENTS_BYTES", 0 if moments else 1 << 60)
    model, arena = network(name, FP16)
    images, labels = images_of(n, size, FP16)
    fuse(model)
    arena.pinned = True
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            plain_loss = fused_step(model, arena, images, labels)
        plain = grads_of(arena)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        loss = fused_step(model, arena, images, labels)
    counts = model.get_buffer("bn1.num_batches_tracked" if "resnet" in name else "features.1.num_batches_tracked")
    before = counts.item()
    for turn in range(2):
        for grad in arena.grads.values():
            grad.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert counts.item() == before + turn + 1
        assert torch.equal(loss, plain_loss)
        for key, grad in grads_of(arena).items():
            assert torch.equal(grad, plain[key]), key
    # Another batch in the same place: the graph computes, it does not remember.
    others, other_labels = images_of(n, size, FP16, seed=1)
    images.copy_(others)
    labels.copy_(other_labels)
    graph.replay()
    torch.cuda.synchronize()
    replayed = grads_of(arena)
    with torch.cuda.stream(stream):
        other_loss = fused_step(model, arena, images, labels)
        eager = grads_of(arena)
    torch.cuda.synchronize()
    assert torch.equal(loss, other_loss)
    assert not torch.equal(loss, plain_loss)
    assert all(torch.equal(grad, replayed[key]) for key, grad in eager.items())


@pytest.mark.parametrize("moments", [True, False], ids=["moments", "outputs"])
@pytest.mark.usefixtures("same_algorithms")
def test_one_backward_over_two_calls_is_two_backwards(moments, monkeypatch):
    """Bit for bit, and in a graph: a sum of two fp16 numbers does not depend on their order."""
    monkeypatch.setattr(fused_blocks, "BY_MOMENTS_BYTES", 0 if moments else 1 << 60)
    model, arena = network("resnet50", FP16)
    fuse(model)
    batches = [images_of(4 + i, 96, FP16, seed=i) for i in range(2)]

    def losses() -> list[torch.Tensor]:
        arena.zero_grad()
        return [F.cross_entropy(model(images), labels) * SCALE for images, labels in batches]

    def one_backward() -> None:
        first, second = losses()
        (first + second).backward()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for loss in losses():
            loss.backward()
        want = grads_of(arena)
        one_backward()
        at_once = grads_of(arena)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        one_backward()
    for grad in arena.grads.values():
        grad.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    for key, grad in grads_of(arena).items():
        assert torch.equal(at_once[key], want[key]), key
        assert torch.equal(grad, want[key]), key


@pytest.mark.usefixtures("same_algorithms")
def test_an_ordinary_step_copies_no_gradient_that_was_written_in_the_arena(monkeypatch):
    model, arena = network("resnet50", FP16)
    data, copied = images_of(4, 64, FP16), []
    fuse(model)
    convs = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    by_cudnn = [conv for conv in convs if not fused_blocks.convolution.is_product(conv)]  # which chooses the place
    copy_all = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, of: copied.extend(to) or copy_all(to, of))
    for _ in range(2):
        fused_step(model, arena, *data)
        assert sorted(t.shape for t in copied) == sorted(conv.weight.shape for conv in by_cudnn)
        copied.clear()


@pytest.mark.parametrize("cudnn", [True, False], ids=["cudnn", "no cudnn"])
@pytest.mark.parametrize("channels", [1, 3])
def test_layouts_that_torch_chooses_otherwise(channels, cudnn):
    """Images of one channel are channels-last and not; without cuDNN torch makes tensors in its default layout."""
    with CUDA:
        model = create_model("resnet20", classes=10, in_channels=channels).to(memory_format=torch.channels_last)
        images, labels = torch.randn(8, channels, 32, 32).half(), torch.randint(10, (8,))
    Arena(model, [name for name, _ in model.named_parameters()], dtype=FP16)
    want = exact_step(model, images, labels)
    with torch.backends.cudnn.flags(enabled=cudnn):
        plain = step(copy.deepcopy(model), images, labels, scale=SCALE)
        fuse(model)
        got = step(model, images, labels, scale=SCALE)
    ours, theirs = errors(got.grads, want.grads), errors(plain.grads, want.grads)
    assert compare([ours], [theirs], f"{channels} channels, cuDNN {cudnn}") < 2  # one draw: a wrong layout is far off


# --- real data --------------------------------------------------------------------------------------------------------

STEPS, WINDOW = 200, 20


def smoothed_losses(out: Path, seed: int, fused: str) -> list[float]:
    """Means of WINDOW steps each."""
    from hyperbatch.engine import loop
    from hyperbatch.engine.ranks import Ranks
    from hyperbatch.recipes import find_recipe

    config = (
        find_recipe("imagenette")
        .build()
        .override(
            data=str(Path(os.environ["HYPERBATCH_TEST_DATA"]) / "imagenette224_4k"),
            model="resnet50",
            image_size=128,
            eval_size=128,
            eval_resize=144,
            batch_phases=(BatchPhase(0, 64),),
            lr_batch=256,
            epochs=5.0,
            warmup_epochs=1.0,
            max_steps=STEPS,
            eval_every_epochs=5.0,
            target_top1=None,
            seed=seed,
            fused=fused,
            precision="fp16",
            device="cuda",
            out=str(out),
        )
    )
    record = loop.run(config, Ranks())
    assert record.environment["fused_kernels"] == (fused == "on")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line.get("loss") is not None]
    assert len(losses) == STEPS
    return [mean(losses[i : i + WINDOW]) for i in range(0, STEPS, WINDOW)]


def apart(a: list[float], b: list[float]) -> float:
    return mean((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5


@pytest.mark.slow
@pytest.mark.skipif("HYPERBATCH_TEST_DATA" not in os.environ, reason="HYPERBATCH_TEST_DATA names no folder")
def test_200_steps_on_real_images_stay_within_seed_noise(tmp_path):
    curves = {
        (seed, fused): smoothed_losses(tmp_path / f"{seed}-{fused}", seed, fused)
        for seed in (0, 1)
        for fused in ("on", "off")
    }
    for key, curve in curves.items():
        print(key, " ".join(f"{value:.3f}" for value in curve))
        assert curve[-1] < 0.95 * curve[0], "it learns"
    between_paths = mean(apart(curves[seed, "on"], curves[seed, "off"]) for seed in (0, 1))
    between_seeds = mean(apart(curves[0, fused], curves[1, fused]) for fused in ("on", "off"))
    print(f"between paths {between_paths:.4f}, between seeds {between_seeds:.4f}")
    assert between_paths <= between_seeds
