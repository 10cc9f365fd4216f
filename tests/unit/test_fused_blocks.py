"""Fused networks by Triton's interpreter against the plain models in float64, and how they live with autograd."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from statistics import median
from types import SimpleNamespace

import pytest
import timm_reference
import torch
from fused_reference import alexnet, backward, batch, check, error, errors, exact_step, residual, shuffled, step
from interpreter import inside, outside, run_by_the_interpreter
from torch import nn
from torch.nn.utils import parametrizations, prune

from hyperbatch.arena import Arena
from hyperbatch.errors import InputError
from hyperbatch.models import create_model
from hyperbatch.models.blur import BlurMaxPool2d
from hyperbatch.models.fused import fuse, is_large_enough, why_not_fused
from hyperbatch.models.layers import adopt
from hyperbatch.models.norm import BatchNorm2d, freeze, keeps_statistics
from hyperbatch.models.resnet import BasicBlock, Bottleneck
from hyperbatch.params import backward_order

if importlib.util.find_spec("triton"):
    from norm_reference import poisoned

    from hyperbatch.kernels.norm import one_pass
    from hyperbatch.models import fused_blocks, fused_head

FP32 = 5e-5  # relative, per tensor: some ten layers of fp32 on both ways, each amplified by the norms behind it
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@outside
def test_networks_by_the_interpreter():
    run_by_the_interpreter(__file__)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=["moments", "outputs"])
def norms_from(request, monkeypatch):
    """Norms after 1x1 convolutions from the moments of their input wherever that is possible, or nowhere."""
    monkeypatch.setattr(fused_blocks, "BY_MOMENTS_BYTES", 0 if request.param == "moments" else 1 << 60)
    return request.param


def tiny(block=BasicBlock, blocks=2, **options):
    """One stage under a stem that keeps the size of the image: cheap at a few pixels."""
    return shuffled(residual(block, (blocks,), (8 if block is BasicBlock else 16,), small_stem=True, **options))


def fused(model):
    fuse(model)
    return model


@inside
@pytest.mark.usefixtures("norms_from")
def test_bottlenecks_agree_with_float64():
    model, data = shuffled(residual()), batch(2, (33, 31))
    want = exact_step(model, *data)
    got = step(fused(model), *data)
    check(got, want, FP32)
    assert got.logits.dtype == torch.float32
    assert not model.fused.stem[0].counters.any()


@inside
@pytest.mark.usefixtures("norms_from")
def test_blocks_that_start_as_the_identity():
    model, data = tiny(Bottleneck, zero_init_last_gamma=True), batch(2, (3, 4))
    want = exact_step(model, *data)
    got = step(fused(model), *data)
    check(got, want, FP32)
    assert not got.grads["layer1.0.conv3.weight"].any()
    assert got.grads["layer1.0.bn3.weight"].all()


NETWORKS = {
    "one image": (lambda: residual(blocks=(1, 1)), 1, (40, 33)),
    "basic blocks": (lambda: residual(BasicBlock), 2, (35, 32)),
    "resnet8": (lambda: create_model("resnet8", classes=10), 3, (9, 8)),
    "averages and basic blocks": (lambda: residual(BasicBlock, deep=True), 2, (32, 35)),
    "alexnet_pool5": (lambda: alexnet(norm_after_pool5=True), 2, (95, 95)),
}


@inside
@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
@pytest.mark.usefixtures("norms_from")
def test_blocks_and_pools_that_blur_are_fused(block):
    model, data = shuffled(residual(block, blurpool=True)), batch(2, (35, 32))
    want = exact_step(model, *data)
    check(step(fused(model), *data), want, FP32)
    assert not [name for name, module in model.named_modules() if module in model.fused.blocks]
    assert model.fused.stem
    alone = exact_step(shuffled(residual(block)), *data)
    assert error(want.logits, alone.logits) > 0.01, "the blur makes a difference"


@inside
def test_a_fused_model_that_blurs_can_be_pickled_and_blurs_by_a_stride_of_2_only():
    model = fused(residual(blurpool=True))
    again = pickle.loads(pickle.dumps(model))
    assert again.fused.blocks[2].shrink.backward is model.fused.blocks[2].shrink.backward
    model.maxpool = BlurMaxPool2d(3, stride=3, padding=1)
    with pytest.raises(InputError, match="maxpool uses unsupported pooling"):
        fuse(model)


@inside
@pytest.mark.parametrize("deep", [False, True])
def test_a_block_that_blurs_after_one_that_is_not_fused(deep):
    """It gives all of its gradient back itself."""
    model, data = shuffled(residual(blurpool=True, deep=deep)), batch(2, (33, 31))
    freeze(model, [name for name, _ in model.named_parameters() if name.startswith("layer1.1.")])
    want = exact_step(model, *data)
    check(step(fused(model), *data), want, FP32)
    assert model.fused.blocks.index(model.layer1[-1]) == 1


@inside
@pytest.mark.usefixtures("norms_from")
def test_all_blocks_of_a_resnet_d_are_fused():
    torch.manual_seed(1)  # no ReLU has an input within 2e-5 of 0, which fp32 might find on the other side
    model, data = shuffled(residual(deep=True), 1), batch(2, (33, 31), 1)
    want = exact_step(model, *data)
    check(step(fused(model), *data), want, FP32)
    assert len(model.fused.stem) == 3
    assert not [name for name, module in model.named_modules() if module in model.fused.blocks]
    model.maxpool = nn.AvgPool2d(2, 2)
    with pytest.raises(InputError, match="maxpool is of type AvgPool2d, which the kernels do not support"):
        fuse(model)


TIMMS = {
    "resnet50d": (timm_reference.Bottleneck, {"deep": True, "averages": True}),
    "a convolution in the place of the pool": (timm_reference.BasicBlock, {"deep": True, "replace_stem_pool": True}),
    "gates": (timm_reference.Bottleneck, {"averages": True, "gated": True}),
}


@inside
@pytest.mark.parametrize("network", TIMMS)
def test_timms_resnets_agree_with_float64(network):
    block, options = TIMMS[network]
    model, data = shuffled(adopt(timm_reference.small(block, **options))), batch(2, (37, 34))
    names, kind = list(model.state_dict()), type(model)
    want = exact_step(model, *data)
    got = step(fused(model), *data)
    check(got, want, FP32)
    assert len(model.fused.norms) == sum(isinstance(module, BatchNorm2d) for module in model.modules())
    assert isinstance(model, kind)
    assert list(model.state_dict()) == names
    with torch.no_grad():
        assert torch.equal(model.eval()(data[0]), kind.forward(model, data[0])), "evaluation stays timm's own"


@inside
def test_what_timms_resnets_do_besides_is_left_to_them(monkeypatch):
    """Once fused: dropout and gradient checkpoints may be switched on, and somebody may listen."""
    model, data = adopt(timm_reference.small(timm_reference.BasicBlock)), batch(2, (64, 64))
    fuse(model)
    kind = type(model)
    fuse(model)
    assert type(model) is kind
    runs = []
    monkeypatch.setattr(model.fused, "logits", lambda images: runs.append(images) or torch.zeros(2, 10))
    model(data[0])
    assert len(runs) == 1
    for name in ("drop_rate", "grad_checkpointing"):
        before = getattr(model, name)
        setattr(model, name, True)
        model(data[0])
        setattr(model, name, before)
    hook = model.global_pool.register_forward_hook(lambda *_: None)
    model(data[0])
    assert len(runs) == 1
    hook.remove()
    model(data[0])
    assert len(runs) == 2


@inside
@pytest.mark.parametrize("network", NETWORKS)
def test_networks_agree_with_float64(network):
    build, n, size = NETWORKS[network]
    model, data = shuffled(build()), batch(n, size)
    want = exact_step(model, *data)
    # A norm after the last pool all but takes the scale of the norm before it out: what is left of its gradient is less
    # than a tenth of the terms it is added up from.
    check(step(fused(model), *data), want, 10 * FP32 if network == "alexnet_pool5" else FP32)


FROZEN = {
    "stem and first block": ("conv1", "bn1", "layer1.0"),
    "a block between others": ("layer1.1",),
    "weights alone, norms are trained": ("layer1.0.conv1", "layer2.0.downsample.0", "conv1"),
    "all but the head": ("conv1", "bn1", "layer1", "layer2"),
}


@inside
@pytest.mark.parametrize("layers", FROZEN.values(), ids=FROZEN)
def test_frozen_layers_run_beside_fused_ones(layers):
    """Gradients of the others are the plain path's, and the norms that keep their statistics keep them."""
    model, data = shuffled(residual(BasicBlock)), batch(2, (35, 32))
    freeze(model, {name for name, _ in model.named_parameters() if name.startswith(tuple(f"{la}." for la in layers))})
    kept = {name: buffer.clone() for name, buffer in model.named_buffers() if name.startswith(layers)}
    want = exact_step(model, *data)
    got = step(fused(model), *data)
    check(got, want, FP32)
    assert model.fused.can_run()
    frozen_norms = [name for name, module in model.named_modules() if keeps_statistics(module)]
    assert bool(frozen_norms) == (layers != FROZEN["weights alone, norms are trained"])
    for name, buffer in kept.items():
        if name.rpartition(".")[0] in frozen_norms:
            assert torch.equal(buffer, got.buffers[name]), name
    assert len(model.fused.norms) == 10 - len(frozen_norms), "the others are fused"


@inside
def test_averages_behind_a_frozen_block_are_spread_over_all_pixels():
    """Such a block takes its gradient from autograd, not from the next one's hands."""
    model, data = shuffled(residual(BasicBlock, (1, 1), deep=True)), batch(2, (35, 32))
    freeze(model, {name for name, _ in model.named_parameters() if name.startswith("layer1.0.bn")})
    want = exact_step(model, *data)
    check(step(fused(model), *data), want, FP32)
    assert len(model.fused.norms) == 6, "three of the stem, three behind the frozen block"


@inside
def test_other_networks_with_frozen_norms_say_why_they_are_not_fused():
    model = alexnet()
    freeze(model, {"features.1.weight", "features.1.bias"})
    assert why_not_fused(model, torch.float32, CPU) == "features.1 is frozen"


@inside
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_16_bits_are_as_near_as_the_plain_path(dtype, monkeypatch):
    """Both round the same tensors, each in its own way: which ReLUs turn over is chance, and decides one case's error.

    So the mean of three is compared, with room for chance; twice that where the interpreter cuts bf16 off.
    """
    moments = dtype == torch.float16  # the interpreter knows no products of bf16
    monkeypatch.setattr(fused_blocks, "BY_MOMENTS_BYTES", 0 if moments else 1 << 60)
    medians = {"ours": 0.0, "theirs": 0.0}
    for seed in range(3):
        torch.manual_seed(seed)
        model, data, scale = shuffled(tiny(Bottleneck, 1), seed), batch(8, (4, 5), seed), 1024.0
        Arena(model, [name for name, _ in model.named_parameters()], dtype=dtype)
        want = exact_step(model, *data)
        plain = step(copy.deepcopy(model), *data, scale=scale)
        got = step(fused(model), *data, scale=scale)
        assert got.logits.dtype == torch.float32
        assert model.conv1.weight.grad.dtype == dtype
        assert model.bn1.weight.grad.dtype == torch.float32
        assert max(errors(got.buffers, want.buffers).values()) < 4 * torch.finfo(dtype).eps
        medians["ours"] += median(errors(got.grads, want.grads).values())
        medians["theirs"] += median(errors(plain.grads, want.grads).values())
    assert medians["ours"] < (1.5 if dtype == torch.float16 else 3) * medians["theirs"]


@inside
def test_every_step_starts_from_memory_that_means_nothing(monkeypatch):
    monkeypatch.setattr(fused_blocks, "BY_MOMENTS_BYTES", 0)
    monkeypatch.setattr(one_pass, "is_small", lambda x: False)
    model, data = tiny(Bottleneck, 1), batch(2, (3, 3))
    want = exact_step(model, *data)
    with poisoned():
        got = step(fused(model), *data)
    check(got, want, FP32)


@inside
def test_evaluation_and_the_way_back_are_the_plain_path():
    plain, data = tiny(), batch(2, (3, 3))
    model = copy.deepcopy(plain)
    names, start = list(model.state_dict()), copy.deepcopy(model.state_dict())
    fuse(model)
    assert list(model.state_dict()) == names
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model.eval()(data[0]), plain.eval()(data[0]))
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())
    model.fused = None
    ours, theirs = (step(one.train(), *data) for one in (model, plain))
    assert torch.equal(ours.logits, theirs.logits)
    assert all(torch.equal(grad, theirs.grads[name]) for name, grad in ours.grads.items())
    model.load_state_dict(start)
    assert error(fused(model)(data[0]), theirs.logits) < FP32  # the weights that were loaded, fused anew


@inside
def test_loaded_weights_are_the_ones_that_train():
    model, other, data = fused(tiny()), shuffled(tiny(), seed=7), batch(2, (3, 3))
    model.load_state_dict(other.state_dict())
    check(step(model, *data), exact_step(other, *data), FP32)


@inside
@pytest.mark.parametrize("in_arena", [False, True])
def test_a_copy_trains_on_its_own(in_arena):
    """Its gradients, running statistics and counts are its own; so are the original's."""
    model, data = tiny(), batch(2, (3, 3))
    want = exact_step(model, *data)
    arena = Arena(model, [name for name, _ in model.named_parameters()]) if in_arena else None
    other = copy.deepcopy(fused(model))
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(0.9)
    expect = exact_step(other, *data)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    check(step(other, *data), expect, FP32)
    assert all(param.grad is None for param in model.parameters())
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    if arena is not None:
        assert not any(grad.any() for grad in arena.grads.values())
    of_copy = {name: param.grad.clone() for name, param in other.named_parameters()}
    check(step(model, *data), want, FP32)
    assert all(torch.equal(param.grad, of_copy[name]) for name, param in other.named_parameters())


@inside
def test_gradients_are_written_where_the_arena_keeps_them(norms_from):
    layout = torch.channels_last if norms_from == "moments" else torch.contiguous_format
    model, data = tiny(Bottleneck).to(memory_format=layout), batch(2, (3, 3))
    want = exact_step(model, *data)
    # Left where autograd put them: only what was written there is in the arena.
    arena = Arena(model, [name for name, _ in model.named_parameters()], copy_on_ready=False)
    fuse(model)
    arena.zero_grad()
    for grad in arena.grads.values():
        grad.fill_(torch.nan)  # what a skipped step may have left
    backward(model, *data)
    for name, param in model.named_parameters():
        in_place = param.grad.data_ptr() == arena.grad_view(name).data_ptr()
        owner = model.get_submodule(name.rpartition(".")[0])
        product = isinstance(owner, nn.Conv2d) and owner.kernel_size == (1, 1)
        assert in_place == (product or isinstance(owner, BatchNorm2d | nn.Linear)), name
    arena.collect()
    for name, param in model.named_parameters():
        assert param.grad.data_ptr() == arena.grad_view(name).data_ptr(), name
        assert error(param.grad, want.grads[name]) < FP32, name


def room_for_images(n, size):
    """A batch's first three channels of four, as a step that is captured keeps them."""
    whole = torch.zeros(n, *size, 4).permute(0, 3, 1, 2)
    images = whole[:, :3]
    images.padded = whole
    return images


@inside
@pytest.mark.parametrize("build", [tiny, lambda: shuffled(alexnet())], ids=["resnet", "alexnet"])
def test_images_with_room_for_a_fourth_channel_are_not_copied(build, monkeypatch):
    model, size = build(), (3, 4) if build is tiny else (95, 95)
    data = batch(2, size)
    want = exact_step(model, *data)
    images = room_for_images(2, size)
    images.copy_(data[0])
    given, convolve = [], fused_blocks.convolution.convolve
    monkeypatch.setattr(fused_blocks.convolution, "convolve", lambda x, conv: given.append(x) or convolve(x, conv))
    check(step(fused(model), images, data[1]), want, FP32)
    assert given[0].data_ptr() == images.data_ptr()
    assert given[0].shape[1] == 4
    assert model.get_parameter("conv1.weight" if build is tiny else "features.0.weight").grad.shape[1] == 3


@inside
def test_only_images_that_say_so_are_taken_for_a_part_of_more():
    images = room_for_images(2, (3, 4))
    strange = torch.randn(2, 3, 4, 4).permute(0, 3, 1, 2)[:, :3]  # somebody's own fourth channel
    other, part = room_for_images(2, (3, 4)), room_for_images(2, (3, 4))
    other.data = torch.ones(2, 3, 3, 4)
    part.data = part.data[:1]
    for own in (strange, other, part, images.clone(), images[:1], images.double()):
        assert fused_blocks.convolution.padded(own) is own
    assert fused_blocks.convolution.padded(images) is images.padded
    twin = copy.deepcopy(images)
    twin.fill_(1)
    assert torch.equal(fused_blocks.convolution.padded(twin)[:, :3], twin)
    assert not images.any()


HEADS = {
    "another": lambda fc: nn.Sequential(nn.Flatten(), fc),
    "no bias": lambda fc: nn.Linear(fc.in_features, fc.out_features, bias=False),
    "watched": lambda fc: fc,
    "watched in backward": lambda fc: fc,
    "with a forward of its own": lambda fc: fc,
    "torch's": lambda fc: nn.Linear(fc.in_features, fc.out_features),
}


@inside
@pytest.mark.parametrize("head", HEADS)
def test_somebody_elses_head(head):
    model, data, seen = tiny(blocks=1), batch(2, (3, 4)), []
    model.fc = HEADS[head](model.fc)
    want = exact_step(model, *data)
    if head == "watched":
        model.fc.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    if head == "watched in backward":
        model.fc.register_full_backward_pre_hook(lambda module, gradient: seen.append(gradient))
    if head == "with a forward of its own":
        forward = model.fc.forward
        model.fc.forward = lambda x: seen.append(x) or forward(x)
    check(step(fused(model), *data), want, FP32)
    assert len(seen) == (head not in ("another", "no bias", "torch's"))


@inside
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_the_head_in_16_bits(bias_dtype):
    """An fp32 bias keeps its digits beside a 16-bit weight, and so does its gradient."""
    x = torch.randn(4, 6, 5, 3).half().requires_grad_()
    fc = nn.Linear(6, 3).half()
    fc.bias = nn.Parameter(torch.full((3,), 1 + 2.0**-12, dtype=bias_dtype))
    logits = fused_head.Classify.apply(x, fc.weight, fc.bias)
    exact = torch.nn.functional.linear(x.double().mean((2, 3)), fc.weight.double())
    assert logits.dtype == bias_dtype
    torch.testing.assert_close(logits.double() - fc.bias.double(), exact, rtol=0, atol=4e-3)
    assert ((logits - logits.half()).count_nonzero() > 0) == (bias_dtype == torch.float32)
    dy = torch.randn(4, 3).to(bias_dtype)
    logits.backward(dy)
    assert x.grad.dtype == fc.weight.grad.dtype == torch.float16
    assert fc.bias.grad.dtype == bias_dtype
    expect = (dy.half().double() @ fc.weight.double() / 15)[:, :, None, None].expand(x.shape)
    torch.testing.assert_close(x.grad.double(), expect, rtol=2.0**-10, atol=1e-7)
    torch.testing.assert_close(
        fc.bias.grad.double(), dy.double().sum(0), rtol=1e-6 if bias_dtype == torch.float32 else 2e-3, atol=1e-6
    )


@inside
@pytest.mark.parametrize("room", ["arena", "none", "zeros"])
def test_micro_steps_add_up(room):
    """In an arena, without one, and into gradients that are there already; forwards of both before any backward."""
    model, first, second = (
        tiny(Bottleneck if room == "arena" else BasicBlock),
        batch(2, (3, 3)),
        batch(3, (4, 3), seed=1),
    )
    plain = copy.deepcopy(model)
    parts = [exact_step(plain, *data).grads for data in (first, second)]
    arena = Arena(model, [name for name, _ in model.named_parameters()]) if room == "arena" else None
    fuse(model)
    if arena is not None:
        arena.zero_grad()
    if room == "zeros":
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
    losses = [nn.functional.cross_entropy(model(images), labels) for images, labels in (first, second)]
    for loss in reversed(losses):
        loss.backward()
    for name, param in model.named_parameters():
        assert error(param.grad, parts[0][name] + parts[1][name]) < FP32, name
        if arena is not None:
            assert param.grad.data_ptr() == arena.grad_view(name).data_ptr(), name
    assert model.bn1.num_batches_tracked == 2


def in_arena(model):
    """A fused model and its arena."""
    arena = Arena(model, [name for name, _ in model.named_parameters()])
    return fused(model), arena


def loss_of(model, data):
    return nn.functional.cross_entropy(model(data[0]), data[1])


def check_in_arena(model, arena, want):
    """Each gradient is right, and where the arena keeps it."""
    arena.collect()
    for name, param in model.named_parameters():
        assert param.grad.data_ptr() == arena.grad_view(name).data_ptr(), name
        assert error(param.grad, want[name]) < FP32, name


@inside
@pytest.mark.usefixtures("norms_from")
def test_one_backward_over_several_calls():
    """A parameter's gradients of two calls are on their way at once: only one of them can be in the arena."""
    model, batches = tiny(Bottleneck), [batch(2 + i, (3, 3 + i), seed=i) for i in range(3)]
    parts = [exact_step(model, *data).grads for data in batches]
    model, arena = in_arena(model)
    for calls in (2, 3):
        arena.zero_grad()
        sum(loss_of(model, data) for data in batches[:calls]).backward()
        check_in_arena(model, arena, {name: sum(part[name] for part in parts[:calls]) for name in parts[0]})


SHARED = {
    "block": lambda layer: layer.append(layer[1]),
    "convolution and norm": lambda layer: (
        setattr(layer[1], "conv3", layer[0].conv3),
        setattr(layer[1], "bn3", layer[0].bn3),
    ),
    "weight in one block": lambda layer: setattr(layer[0].downsample[0], "weight", layer[0].conv3.weight),
}


@inside
@pytest.mark.usefixtures("norms_from")
@pytest.mark.parametrize("what", SHARED)
def test_shared_weights(what):
    model, data = tiny(Bottleneck), batch(2, (3, 3))
    SHARED[what](model.layer1)
    want = exact_step(model, *data)
    model, arena = in_arena(model)
    got = step(model, *data)
    check(got, want, FP32)
    check_in_arena(model, arena, want.grads)


@inside
@pytest.mark.usefixtures("norms_from")
def test_several_backwards_through_one_graph():
    model, data = tiny(Bottleneck), batch(2, (3, 3))
    want = exact_step(model, *data).grads
    model, arena = in_arena(model)
    arena.zero_grad()
    loss = loss_of(model, data)
    for times in (1, 2):
        loss.backward(retain_graph=True)
        check_in_arena(model, arena, {name: times * grad for name, grad in want.items()})
    arena.zero_grad()
    loss.backward()
    check_in_arena(model, arena, want)


@inside
@pytest.mark.usefixtures("norms_from")
def test_what_is_written_in_the_arena_is_not_copied(monkeypatch):
    """In the first micro-step only what cuDNN leaves elsewhere is; in the second nothing, it is added in place."""
    (model, arena), data, copied = in_arena(tiny(Bottleneck)), batch(2, (3, 3)), []
    copy_all = torch._foreach_copy_
    names = {arena.grad_view(name).data_ptr(): name for name, _ in model.named_parameters()}
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda to, of: copied.extend(names[t.data_ptr()] for t in to) or copy_all(to, of)
    )
    for _ in range(2):
        arena.zero_grad()
        backward(model, *data)
        assert sorted(copied) == ["conv1.weight", "layer1.0.conv2.weight", "layer1.1.conv2.weight"]
        copied.clear()
        backward(model, *data)
        assert not copied


@inside
def test_backward_twice_through_one_graph_gives_the_same_bits():
    model, (images, labels) = fused(tiny()), batch(2, (3, 3))
    loss = nn.functional.cross_entropy(model(images), labels)
    params = list(model.parameters())
    last = torch.autograd.grad(loss, [params[-1]], retain_graph=True)
    # The first block is left out.
    part = torch.autograd.grad(loss, list(model.layer1[1].parameters()), retain_graph=True)
    runs = [torch.autograd.grad(loss, params, retain_graph=True) for _ in range(2)]
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(last[0], runs[0][-1])
    of_last = [p for name, p in zip(dict(model.named_parameters()), runs[0], strict=True) if "layer1.1" in name]
    assert all(torch.equal(a, b) for a, b in zip(part, of_last, strict=True))


@inside
def test_gradients_appear_block_by_block():
    """What a later block leaves can travel before an earlier one starts."""
    model, data = fused(residual(BasicBlock, (1, 2), (8, 8), small_stem=True)), batch(2, (4, 4))
    seen = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    backward(model, *data)
    assert sorted(seen) == sorted(dict(model.named_parameters()))
    groups = [".".join(name.split(".")[:2]) if name.startswith("layer") else "" for name in seen]
    blocks = [group for i, group in enumerate(groups) if group and (i == 0 or groups[i - 1] != group)]
    assert blocks == ["layer2.1", "layer2.0", "layer1.0"]
    assert seen[:2] == ["fc.weight", "fc.bias"] or seen[:2] == ["fc.bias", "fc.weight"]
    assert set(seen[-3:]) == {"conv1.weight", "bn1.weight", "bn1.bias"}


@inside
def test_the_order_of_backward_is_found_in_a_fused_model():
    model, data = fused(tiny()), batch(2, (3, 3))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    order = backward_order(model, lambda: backward(model, *data))
    assert order[0].startswith("fc.")
    assert sorted(order) == sorted(dict(model.named_parameters()))
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@inside
def test_a_training_forward_without_gradients():
    model, (images, _) = fused(tiny()), batch(2, (3, 3))
    want = copy.deepcopy(model).double()
    want.fused = None
    with torch.no_grad():
        got = model(images)
    expect = want(images.double())
    assert not got.requires_grad
    assert error(got, expect.detach()) < FP32
    assert max(errors(dict(model.named_buffers()), dict(want.named_buffers())).values()) < FP32


@inside
def test_frozen_parameters_and_images_that_want_a_gradient():
    model, (images, labels) = tiny(Bottleneck, 1), batch(2, (3, 3))
    frozen = ["conv1.weight", "layer1.0.bn2.weight", "layer1.0.downsample.0.weight"]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    plain = copy.deepcopy(model).double()
    fuse(model)
    wants = []
    for one, dtype in ((model, torch.float32), (plain, torch.float64)):
        leaf = images.to(dtype).clone().requires_grad_()
        backward(one, leaf, labels)
        wants.append(leaf.grad)
    assert error(*wants) < FP32
    for name, param in plain.named_parameters():
        got = model.get_parameter(name).grad
        assert (got is None) == (name in frozen), name
        if got is not None:
            assert error(got, param.grad) < FP32, name


# --- what users do to a fused model -----------------------------------------------------------------------------------


@inside
@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_images_of_one_channel(block):
    """Their memory is channels-last and not: torch takes it for the other, and so lays out what it makes of them."""
    model = shuffled(residual(block, (1,), (16,), small_stem=True, in_channels=1))
    data = (torch.randn(2, 1, 5, 4), batch(2, (5, 4))[1])
    want = exact_step(model, *data)
    check(step(fused(model), *data), want, FP32)


@inside
@pytest.mark.usefixtures("norms_from")
def test_saved_tensors_that_come_back_in_another_layout():
    """As from torch.autograd.graph.save_on_cpu(pin_memory=True)."""
    for model, data in ((tiny(Bottleneck), batch(2, (3, 4))), (shuffled(alexnet()), batch(2, (95, 95)))):
        want = exact_step(model, *data)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous().clone(), lambda t: t):
            check(step(fused(model), *data), want, FP32)


def each_norm(change):
    return lambda model: [change(module) for module in model.modules() if isinstance(module, BatchNorm2d)]


UNUSUAL = {
    "norms that keep their statistics": each_norm(lambda norm: norm.eval()),
    "one norm that keeps its statistics": lambda model: model.layer1[0].bn2.eval(),
    "norms that average over all batches": each_norm(lambda norm: setattr(norm, "momentum", None)),
    "forward hook": lambda model: model.layer1[0].register_forward_hook(lambda module, inputs, output: 2 * output),
    "pre-hook": lambda model: model.layer1.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],)),
    "backward hook": lambda model: model.layer1[1].conv1.register_full_backward_hook(
        lambda module, inputs, outputs: (2 * inputs[0],)
    ),
    "another forward": lambda model: setattr(model.layer1[0], "forward", lambda x: model.layer1[0].downsample(x)),
    "pruned weight": lambda model: prune.l1_unstructured(model.layer1[0].conv1, "weight", amount=0.5),
}


@inside
@pytest.mark.parametrize("what", UNUSUAL)
def test_what_the_kernels_do_not_do_runs_on_the_plain_path(what):
    plain, data = tiny(Bottleneck), batch(2, (3, 4))
    model = fused(copy.deepcopy(plain))
    for one in (model, plain):
        UNUSUAL[what](one)
    for _ in range(2):
        got, want = step(model, *data), step(plain, *data)
        assert torch.equal(got.logits, want.logits)
        for ours, theirs in ((got.grads, want.grads), (got.buffers, want.buffers)):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@inside
@pytest.mark.parametrize("what", ["the stem", "a convolution", "one block more"])
def test_layers_that_are_replaced_are_fused_anew(what):
    model, data = fused(tiny(Bottleneck)), batch(2, (3, 4))
    model.fc = nn.Linear(64, 10)  # not fused: may change
    backward(model, *data)
    if what == "the stem":
        model.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
    elif what == "a convolution":
        model.layer1[1].conv2 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
    else:
        model.layer1.append(Bottleneck(64, 16, 1, 0.1))
    with pytest.raises(InputError, match="replaced after fuse"):
        model(data[0])
    want = exact_step(model, *data)
    check(step(fused(model), *data), want, FP32)


@inside
@pytest.mark.usefixtures("norms_from")
def test_other_parameters_for_one_call():
    """Backward uses those of its forward, and what is in the arena stays where it is."""
    model, data = tiny(Bottleneck), batch(2, (3, 4))
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for param in changed.parameters():
            param.mul_(1.5)
    want = exact_step(changed, *data).grads
    model, arena = in_arena(model)
    arena.zero_grad()
    others = {name: param.detach().clone().requires_grad_() for name, param in changed.named_parameters()}
    nn.functional.cross_entropy(torch.func.functional_call(model, others, data[0]), data[1]).backward()
    assert all(param.grad is None for param in model.parameters())
    assert not any(grad.any() for grad in arena.grads.values())
    for name, other in others.items():
        assert error(other.grad, want[name]) < FP32, name


@inside
@pytest.mark.usefixtures("norms_from")
@pytest.mark.parametrize("layer", ["conv1", "layer1.0.conv1", "layer1.0.downsample.0", "layer1.1.conv3"])
def test_weights_that_change_before_backward_are_refused(layer):
    """As by torch: backward would mix old and new."""
    model, data = fused(tiny(Bottleneck)), batch(2, (3, 4))
    loss = loss_of(model, data)
    with torch.no_grad():
        model.get_submodule(layer).weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- why not ----------------------------------------------------------------------------------------------------------


def test_reasons_are_given():
    pytest.importorskip("triton")
    model = residual()
    assert why_not_fused(model, torch.float16, CUDA) is None
    assert why_not_fused(alexnet(), torch.bfloat16, CUDA) is None
    assert "Linear is not a built-in" in str(why_not_fused(nn.Linear(2, 2), torch.float16, CUDA))
    model.layer1[0].conv2.bias = nn.Parameter(torch.zeros(16))  # type: ignore[index]
    assert "layer1.0.conv2 has a bias" in str(why_not_fused(model, torch.float16, CUDA))
    assert "channels" in str(why_not_fused(create_narrow(), torch.float16, CUDA))


def create_narrow():
    model = residual(BasicBlock)
    model.layer2[0].conv1 = nn.Conv2d(16, 12, 3, bias=False)
    return model


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"momentum": None}, "has running statistics that the kernels do not support"),
        ({"track_running_stats": False}, "has running statistics that the kernels do not support"),
        ({"affine": False}, "no fp32 scale and shift"),
        ({"dtype": torch.float16}, "no fp32 scale and shift"),
    ],
    ids=str,
)
def test_other_norms_are_named(change, reason):
    pytest.importorskip("triton")
    model = residual()
    model.layer2[1].bn2 = BatchNorm2d(32, **change)  # type: ignore[index]
    assert f"layer2.1.bn2 {reason}" in str(why_not_fused(model, torch.float16, CUDA)).replace("has no", "no")
    model.layer2[1].bn2 = nn.BatchNorm2d(32)  # type: ignore[index]
    assert "running statistics that the kernels do not support" in str(why_not_fused(model, torch.float16, CUDA))


class Halved(Bottleneck):
    def forward(self, x):
        return super().forward(x) / 2


CHANGED = {
    "layer1.0.relu is of type SiLU": lambda model: setattr(model.layer1[0], "relu", nn.SiLU()),
    "relu is of type Identity": lambda model: setattr(model, "relu", nn.Identity()),
    "maxpool is of type AvgPool2d": lambda model: setattr(model, "maxpool", nn.AvgPool2d(3, 2, 1)),
    "layer1.2 is of type Dropout": lambda model: model.layer1.append(nn.Dropout()),
    "layer2.0 is of type Halved": lambda model: setattr(model.layer2[0], "__class__", Halved),
    "layer1.0.conv2 is of type ParametrizedConv2d": lambda model: parametrizations.weight_norm(model.layer1[0].conv2),
    "maxpool uses unsupported pooling": lambda model: setattr(model, "maxpool", nn.MaxPool2d(3, 2, 1, ceil_mode=True)),
    "layer1.0.conv2 uses unsupported padding": lambda model: setattr(model.layer1[0].conv2, "padding_mode", "reflect"),
}


@pytest.mark.parametrize("reason", CHANGED)
def test_layers_that_compute_something_else_are_named(reason):
    pytest.importorskip("triton")
    model = residual()
    CHANGED[reason](model)
    assert reason in str(why_not_fused(model, torch.float16, CUDA))


def gate_of(channels, **changes):
    module = timm_reference.SEModule(channels, 8)
    for name, value in changes.items():
        setattr(module, name, value)
    return module


TIMM_CHANGED = {
    "layer1.0.se is of type Dropout": lambda model: setattr(model.layer1[0], "se", nn.Dropout()),
    "layer1.0.se uses an unsupported gate": lambda model: setattr(model.layer1[0], "se", gate_of(32, act=nn.SiLU())),
    "layer2.0.se uses an unsupported gate": lambda model: setattr(model.layer2[0], "se", gate_of(64, add_maxpool=True)),
    "layer2.0.drop_path is of type Dropout": lambda model: setattr(model.layer2[0], "drop_path", nn.Dropout()),
    "layer2.0.aa is of type AvgPool2d": lambda model: setattr(model.layer2[0], "aa", nn.AvgPool2d(2)),
    "maxpool is of type AdaptiveAvgPool2d": lambda model: setattr(model, "maxpool", nn.AdaptiveAvgPool2d(8)),
    "layer2.0.downsample.0 uses unsupported pooling": lambda model: setattr(
        model.layer2[0].downsample[0], "ceil_mode", False
    ),
    "global_pool uses unsupported": lambda model: setattr(
        model, "global_pool", timm_reference.SelectAdaptivePool2d("max")
    ),
    "it drops features": lambda model: setattr(model, "drop_rate", 0.1),
    "it recomputes its blocks": lambda model: setattr(model, "grad_checkpointing", True),
    "bn1 has running statistics": lambda model: setattr(model, "bn1", nn.BatchNorm2d(16)),
    "Other is not a built-in": lambda model: setattr(model, "__class__", type("Other", (type(model),), {})),
}


@pytest.mark.parametrize("reason", TIMM_CHANGED)
def test_what_timms_resnets_may_have_besides_is_named(reason):
    pytest.importorskip("triton")
    model = adopt(timm_reference.small(deep=True, averages=True))
    assert why_not_fused(model, torch.float16, CUDA) is None
    TIMM_CHANGED[reason](model)
    assert str(why_not_fused(model, torch.float16, CUDA)).startswith(reason)


@outside
def test_only_cuda_and_16_bits_without_the_interpreter():
    pytest.importorskip("triton")
    model = residual()
    assert "not on a cpu" in str(why_not_fused(model, torch.float16, CPU))
    assert "not in float32" in str(why_not_fused(model, torch.float32, CUDA))
    with pytest.raises(InputError, match="the fused training path cannot run: the kernels run on CUDA devices"):
        fuse(model)
    assert model.fused is None


@pytest.mark.parametrize(
    ("major", "shared_bytes", "enough"), [(9, 232448, True), (8, 166912, True), (8, 101376, False), (7, 98304, False)]
)
def test_devices_with_little_shared_memory_stay_plain(major, shared_bytes, enough):
    """H100, A100; RTX 30 and 40; V100."""
    assert is_large_enough(SimpleNamespace(major=major, shared_memory_per_block_optin=shared_bytes)) is enough


def test_without_triton_it_says_so(monkeypatch):
    monkeypatch.setattr("hyperbatch.models.fused.has_triton", lambda: False)
    assert why_not_fused(residual(), torch.float16, CUDA) == "Triton is not installed"
