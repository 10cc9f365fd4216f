"""Quick layers on a GPU: no further from float64 than torch's own, in captured steps, compiled blocks and the bench."""

from __future__ import annotations

import copy
import statistics
import warnings
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from test_graph_gpu import losses_of
from test_regions_gpu import same_bits, train

from hyperbatch.bench.step import bench_step, format_result
from hyperbatch.config import BatchPhase
from hyperbatch.kernels import add_norm, gelu, stack
from hyperbatch.kernels.compile import is_compiling
from hyperbatch.models import heads, pointwise, vit
from hyperbatch.models.gelu import LinearGelu
from hyperbatch.models.heads import QuickAttention
from hyperbatch.models.layer_scale import scaled_linear
from hyperbatch.models.layers import Conv2d, Linear
from hyperbatch.models.lone_norm import quick_norm
from hyperbatch.models.pointwise import PointwiseConv2d
from hyperbatch.models.quick import PatchConv2d, quicken
from hyperbatch.models.residual import fork, join
from hyperbatch.stopwatch import device_s

CUDA = torch.device("cuda", 0)
HALVES = [torch.float16, torch.bfloat16]
EXACT = 2**-24  # of its value: an error below this is none


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Inductor's, empty at the start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield
    torch.compiler.reset()


def errors(values, exact):
    return {name: float((values[name].double() - exact[name]).norm() / exact[name].norm()) for name in exact}


def results(forward, x, layer, dy):
    """Output and gradients of the input and the layer's parameters."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    y = forward(layer, x)
    y.backward(dy.to(y.dtype))
    return {"y": y.detach(), "x": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}


def check_errors(quick, plain, exact):
    ours, theirs = errors(quick, exact), errors(plain, exact)
    ratios = {name: max(ours[name], EXACT) / max(theirs[name], EXACT) for name in exact}
    print({name: (f"{ours[name]:.2e}", round(ratio, 3)) for name, ratio in ratios.items()})
    assert statistics.geometric_mean(ratios.values()) <= 1.01  # products of other kernels round otherwise
    assert max(ratios.values()) <= 1.05


def linear_of(width, hidden, dtype):
    torch.manual_seed(0)
    layer = Linear(width, hidden, device=CUDA)
    with torch.no_grad():
        layer.weight *= 4
        layer.bias.normal_()
        layer.weight.data = layer.weight.data.to(dtype)
    return layer


@pytest.mark.parametrize("form", ["none", "tanh"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("shape", "hidden"), [((64, 197, 384), 1536), ((8, 28, 28, 192), 768), ((1001, 64), 256)])
def test_a_linear_layer_with_its_gelu_is_no_further_from_float64_than_torch(shape, hidden, dtype, form):
    plain = linear_of(shape[-1], hidden, dtype)
    quick = linear_of(shape[-1], hidden, dtype)
    quick.__class__, quick.tanh = LinearGelu, form == "tanh"
    x, dy = torch.randn(shape, device=CUDA).to(dtype), torch.randn(*shape[:-1], hidden, device=CUDA).to(dtype)
    wide = nn.Linear(shape[-1], hidden, device=CUDA, dtype=torch.float64)
    wide.load_state_dict(plain.state_dict())
    exact = results(lambda layer, x: F.gelu(layer(x), approximate=form), x.double(), wide, dy)
    check_errors(
        results(lambda layer, x: layer(x), x, quick, dy),
        results(lambda layer, x: F.gelu(layer(x), approximate=form), x, plain, dy),
        exact,
    )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("channels", "size", "kernel", "out"), [(3, 224, 16, 384), (3, 224, 4, 96), (96, 56, 2, 192)])
def test_patches_are_no_further_from_float64_than_cudnn(channels, size, kernel, out, dtype):
    torch.manual_seed(0)
    plain = Conv2d(channels, out, kernel, kernel, device=CUDA).to(memory_format=torch.channels_last)
    plain.weight.data = plain.weight.data.to(dtype)
    wide = nn.Conv2d(channels, out, kernel, kernel, device=CUDA, dtype=torch.float64)
    wide.load_state_dict(plain.state_dict())
    quick = Conv2d(channels, out, kernel, kernel, device=CUDA).to(memory_format=torch.channels_last)
    quick.weight.data = plain.weight.data.clone(memory_format=torch.preserve_format)
    quick.load_state_dict(plain.state_dict())
    quick.__class__ = PatchConv2d
    x = torch.randn(16, channels, size, size, device=CUDA).to(dtype).contiguous(memory_format=torch.channels_last)
    dy = torch.randn(16, out, size // kernel, size // kernel, device=CUDA).to(dtype)
    runs = [results(lambda layer, x: layer(x), x.to(layer.weight.dtype), layer, dy) for layer in (quick, plain, wide)]
    check_errors(*runs)
    assert runs[0]["weight"].stride() == quick.weight.stride()


@pytest.mark.parametrize("wide", [True, False], ids=["fp32 norm", "16-bit norm"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(64, 197, 384), (1001, 768), (37, 24)])
def test_sums_and_norms_are_no_further_from_float64_than_torch(shape, dtype, wide):
    torch.manual_seed(0)
    layer = nn.LayerNorm(shape[-1], eps=1e-6, device=CUDA)
    with torch.no_grad():
        layer.weight.normal_(1, 0.25), layer.bias.normal_()
    layer.to(torch.float32 if wide else dtype)
    exact = nn.LayerNorm(shape[-1], eps=1e-6, device=CUDA, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    x, branch, ds, dn = (torch.randn(shape, device=CUDA).to(dtype) for _ in range(4))

    def plain(x, branch, layer, before, behind):
        s = x + (branch + before.to(x.dtype))
        n = F.layer_norm(s.to(layer.weight.dtype), s.shape[-1:], layer.weight, layer.bias, 1e-6).to(s.dtype)
        return s + behind.to(x.dtype), n

    def run(function, layer, dtype, branch):
        x_, branch_ = x.to(dtype).requires_grad_(), branch.to(dtype).requires_grad_()
        kind = torch.promote_types(dtype, torch.float32)
        biases = [torch.zeros(shape[-1], dtype=kind, device=CUDA, requires_grad=True) for _ in range(2)]
        s, n = function(x_, branch_, layer, *biases)
        inputs, given = [x_, *layer.parameters(), *biases], [ds.to(dtype), dn.to(dtype)]
        grads = torch.autograd.grad([s, n], inputs, given, allow_unused=True)
        names = "n", "x", "weight", "bias", "bias before", "bias behind"
        return dict(zip(names, (n.detach(), *grads), strict=True)), s.detach()

    quick, s = run(join, layer, dtype, branch)
    theirs, their_s = run(plain, layer, dtype, branch)
    assert torch.equal(s, their_s)
    right, _ = run(plain, exact, torch.float64, s.double() - x.double())
    bare, _ = run(lambda x, branch, layer, *biases: join(x, branch, layer), layer, dtype, branch)
    assert bare.pop("bias before") is bare.pop("bias behind") is None
    others = errors(theirs, right)
    for found in (quick, bare):
        ours = errors(found, {name: right[name] for name in found})
        print({name: (f"{ours[name]:.2e}", f"{others[name]:.2e}") for name in found})
        # Below 1e-6 both are as good as fp32 is.
        assert all(max(ours[name], 1e-6) <= 1.02 * max(others[name], 1e-6) for name in found)
    _, n = fork(s, layer)
    assert torch.equal(n, quick["n"])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("way", [0, 1], ids=["cudnn", "product"])
@pytest.mark.parametrize(("channels", "size", "out"), [(48, 56, 192), (960, 14, 160), (1536, 1, 64), (64, 1, 1536)])
def test_single_pixels_are_no_further_from_float64_than_cudnn(monkeypatch, channels, size, out, way, dtype):
    """In layers of EfficientNetV2, by each of the two ways."""
    monkeypatch.setattr(pointwise, "by_fastest", lambda what, x, weight, *ways: ways[way]())
    torch.manual_seed(0)
    plain = Conv2d(channels, out, 1, device=CUDA).to(memory_format=torch.channels_last)
    plain.weight.data = plain.weight.data.to(dtype)
    wide = nn.Conv2d(channels, out, 1, device=CUDA, dtype=torch.float64)
    wide.load_state_dict(plain.state_dict())
    quick = copy.deepcopy(plain)
    quick.__class__ = PointwiseConv2d
    x = torch.randn(64, channels, size, size, device=CUDA).to(dtype).contiguous(memory_format=torch.channels_last)
    dy = torch.randn(64, out, size, size, device=CUDA).to(dtype)
    runs = [results(lambda layer, x: layer(x), x.to(layer.weight.dtype), layer, dy) for layer in (quick, plain, wide)]
    check_errors(*runs)


def test_a_squeeze_excite_is_compiled_with_products_of_ours():
    torch.manual_seed(0)
    gate = quicken(nn.Sequential(Conv2d(64, 16, 1), nn.SiLU(), Conv2d(16, 64, 1), nn.Sigmoid())).to(CUDA)
    for layer in (gate[0], gate[2]):
        assert type(layer) is PointwiseConv2d
        layer.weight.data = layer.weight.data.half()
    x = torch.randn(8, 64, 7, 7, device=CUDA).half().contiguous(memory_format=torch.channels_last).requires_grad_()

    def excited(x):
        return x * gate(x.mean((2, 3), keepdim=True))

    expect = excited(x)
    dy, wanted = torch.randn_like(expect), [x, *gate.parameters()]
    right = torch.autograd.grad(expect, wanted, dy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inductor's advice
        y = torch.compile(excited, fullgraph=True, dynamic=False)(x)
        gradients = torch.autograd.grad(y, wanted, dy)
    torch.testing.assert_close(y, expect, rtol=2e-3, atol=2e-3)
    for got, grad in zip(gradients, right, strict=True):
        assert float((got - grad).norm() / grad.norm()) < 0.01


def _scaled(forward, factors, layer, x):
    return forward(x, layer, factors)


@pytest.mark.parametrize("scale", [1.0, 1e-6], ids=["one", "tiny"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "width"), [(200_704, 96), (12_544, 768)])
def test_a_linear_layer_with_its_scale_is_no_further_from_float64_than_torch(rows, width, dtype, scale):
    """Also where layer scale begins."""
    plain = linear_of(4 * width, width, dtype)
    quick = linear_of(4 * width, width, dtype)
    wide = nn.Linear(4 * width, width, device=CUDA, dtype=torch.float64)
    wide.load_state_dict(plain.state_dict())
    x, dy = torch.randn(rows, 4 * width, device=CUDA).to(dtype), torch.randn(rows, width, device=CUDA).to(dtype)
    factors = (scale * (1 + torch.rand(width, device=CUDA))).to(dtype)
    runs = []

    def torchs(x, layer, factors):
        return layer(x) * factors

    for layer, forward in ((quick, scaled_linear), (plain, torchs), (wide, torchs)):
        own = factors.to(layer.weight.dtype, copy=True).requires_grad_()
        by = partial(_scaled, forward, own)
        runs.append(results(by, x.to(layer.weight.dtype), layer, 8 * dy) | {"scale": own.grad})
    ours, theirs = errors(runs[0], runs[2]), errors(runs[1], runs[2])
    print({name: (f"{ours[name]:.2e}", f"{theirs[name]:.2e}") for name in ours})
    # Below 1e-6 both are as good as fp32 is.
    assert all(max(ours[name], 1e-6) <= 1.05 * max(theirs[name], 1e-6) for name in ours)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "width"), [(802_816, 96), (200_704, 192), (50_176, 384), (256, 768)])
def test_norms_between_blocks_and_their_speed(rows, width, dtype):
    """Of ConvNeXt-T, 256 images, with 16-bit parameters as timm's layers have them. Times decide nothing."""
    torch.manual_seed(0)
    layers = [nn.LayerNorm(width, eps=1e-6, device=CUDA, dtype=kind) for kind in (dtype, dtype, torch.float64)]
    with torch.no_grad():
        layers[0].weight.normal_(1, 0.25), layers[0].bias.normal_()
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    layers[0].__class__ = quick_norm(nn.LayerNorm, images=False)
    x, dy = torch.randn(rows, width, device=CUDA).to(dtype), torch.randn(rows, width, device=CUDA).to(dtype)
    runs = [results(lambda layer, x: layer(x), x.to(layer.weight.dtype), layer, dy) for layer in layers]
    check_errors(*runs)
    out = [layer(x.requires_grad_()) for layer in layers[:2]]
    for name, layer, y in zip(("ours", "torch"), layers, out, strict=False):
        wanted = [x, layer.weight, layer.bias]
        for what, run, passes in (
            ("forward", partial(layer, x), 2),
            ("backward", partial(torch.autograd.grad, y, wanted, dy, retain_graph=True), 3),
        ):
            run()
            seconds = min(device_s(run, device=CUDA, calls=10) for _ in range(5))
            moved = passes * x.numel() * x.element_size()
            print(f"{rows} x {width} {name} {what}: {seconds * 1e6:.0f} us, {moved / seconds / 1e12:.2f} TB/s")


def address(tensor):
    return tensor.data_ptr()


@pytest.mark.parametrize("dtype", HALVES)
def test_attention_is_no_further_from_float64_than_torch(dtype, monkeypatch):
    torch.manual_seed(0)
    plain, wide = (vit.Attention(384, 6, 0.0).to(CUDA, kind) for kind in (torch.float32, torch.float64))
    nn.init.normal_(plain.qkv.bias)
    for layer in (plain.qkv, plain.proj):
        layer.weight.data = layer.weight.data.to(dtype)
    wide.load_state_dict(plain.state_dict())
    quick = copy.deepcopy(plain)
    quick.__class__ = QuickAttention
    x, dy = (torch.randn(64, 197, 384, device=CUDA).to(dtype) for _ in range(2))
    given, taken = [], []
    operation, kernel = heads.stack_heads, stack.stack
    monkeypatch.setattr(heads, "stack_heads", lambda *parts: given.extend(map(address, parts)) or operation(*parts))
    monkeypatch.setattr(stack, "stack", lambda *parts: taken.extend(map(address, parts)) or kernel(*parts))

    def run(layer, kind):
        leaf = x.to(kind).requires_grad_()
        y = layer(leaf)
        names, inputs = ("x", "weight", "bias"), (leaf, layer.qkv.weight, layer.qkv.bias)
        return {"y": y.detach(), **dict(zip(names, torch.autograd.grad(y, inputs, dy.to(kind)), strict=True))}

    check_errors(run(quick, dtype), run(plain, dtype), run(wide, torch.float64))
    assert len(given) == 3
    assert taken == given  # as torch's attention has left them, without a copy


def test_speed_of_sums_and_norms():
    """Of ViT-S, 256 images. Times decide nothing; they are printed, after a look at large offsets."""
    rows, width = 50_432, 384
    x, branch, ds, dn = (torch.randn(rows, width, device=CUDA).half() for _ in range(4))
    weight, bias = torch.ones(width, device=CUDA), torch.zeros(width, device=CUDA)
    s, n, mean, rstd = add_norm.forward(x, branch, weight, bias, 1e-6)
    torch.testing.assert_close(n, F.layer_norm(s, (width,), eps=1e-6), rtol=2**-10, atol=1e-5)
    for name, run, passes in (
        ("forward", lambda: add_norm.forward(x, branch, weight, bias, 1e-6), 4),
        ("forward without a branch", lambda: add_norm.forward(x, None, weight, bias, 1e-6), 2),
        ("backward", lambda: add_norm.backward(ds, dn, s, weight, mean, rstd), 4),
        ("backward with biases", lambda: add_norm.backward(ds, dn, s, weight, mean, rstd, biases=True), 4),
        ("three side by side", lambda: stack.stack(x, ds, dn), 6),
    ):
        run()
        seconds = min(device_s(run, device=CUDA, calls=10) for _ in range(5))
        moved = passes * x.numel() * x.element_size()
        print(f"{rows} x {width} {name}: {seconds * 1e6:.0f} us, {moved / seconds / 1e12:.2f} TB/s")


VIT = {
    "model": "vit_cifar",
    "optimizer": "adamw",
    "lr": 1e-3,
    "image_size": 32,
    "eval_size": 32,
    "eval_resize": 32,
    "shift_pixels": 4,
}


@pytest.fixture
def launched(monkeypatch):
    """How often the kernels of gradients were launched: not where they are compiled ahead."""
    calls = Counter()
    for module, name in ((gelu, "backward"), (add_norm, "backward"), (stack, "stack")):
        counted = partial(_counted, calls, module.__name__.rpartition(".")[2], getattr(module, name))
        monkeypatch.setattr(module, name, counted)
    return calls


def _counted(calls, name, function, *args, **options):
    if not is_compiling():
        calls[name] += 1
        if options.get("biases"):
            calls["biases"] += 1
    return function(*args, **options)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"precision": "bf16"},
        {"dropout": 0.1, "drop_path": 0.2},
        {"accumulate": 3},
        {"averaging": "ema", "averaging_decay": 0.9},
        {"optimizer": "lars", "lr": 0.5},
        {"optimizer": "lamb", "lr": 0.01},
    ],
    ids=["fp16", "bf16", "dropout", "unequal micro-steps", "ema", "lars", "lamb"],
)
def test_captured_steps_give_the_bits_of_uncaptured_ones(tmp_path, launched, values):
    plain, losses = train(tmp_path / "plain", graph="off", **{**VIT, **values})
    assert launched["gelu"] * 15 == launched["add_norm"] * 7 > 0  # two norms in each of 7 blocks, and one behind them
    assert launched["stack"] == launched["gelu"]
    assert launched["biases"] == (0 if "dropout" in values else launched["gelu"])
    record, captured = train(tmp_path / "captured", graph="on", **{**VIT, **values})
    for each in (plain, record):
        assert each.compiled["regions"] == 7
        assert not each.warnings
    assert record.environment["cuda_graph"]
    assert captured == losses
    same_bits(tmp_path / "plain", tmp_path / "captured")


def test_training_goes_as_without(tmp_path, launched):
    values = {**VIT, "compile": "auto", "deterministic": False}
    record, losses = train(tmp_path / "quick", **values)
    assert record.compiled["regions"] == 7
    assert launched
    launched.clear()
    _, expected = train(tmp_path / "plain", **(values | {"compile": "off"}))
    assert not launched
    assert losses_of(losses) == pytest.approx(losses_of(expected), rel=0.02)


@pytest.mark.parametrize(
    ("name", "regions", "kinds", "norms"), [("vit_small_patch16_224", 12, 1, 25), ("convnext_tiny", 18, 4, 23)]
)
def test_timms_models_have_quick_layers(tmp_path, launched, name, regions, kinds, norms):
    pytest.importorskip("timm")
    values = {"model": f"timm/{name}", "image_size": 224, "eval_size": 224, "eval_resize": 224, "compile": "auto"}
    values |= {"deterministic": False, "max_steps": 2, "batch_phases": (BatchPhase(0, 16),), "lr": 0.01, "graph": "off"}
    record, _ = train(tmp_path, **values)
    assert not record.warnings
    assert (record.compiled["regions"], record.compiled["kinds"]) == (regions, kinds)
    assert launched["gelu"] > 0
    assert launched["add_norm"] * regions == launched["gelu"] * norms
    assert launched["stack"] == launched["biases"] == (launched["gelu"] if name.startswith("vit") else 0)


# torch.compile's own graphs begin with an empty one.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_bench_step_runs_quick_layers(launched):
    report = bench_step("vit_cifar", batch=(64,), peers=["compile"], rounds=3, image_size=32)
    assert launched
    ours = report["rows"][0]
    assert ours["name"].endswith("hyperbatch compiled, graph")
    assert all(row["finite"] and not row["skipped_updates"] for row in report["rows"])
    print(format_result(report))


@pytest.mark.parametrize(("rows", "hidden"), [(50_432, 1536), (802_816, 384), (12_544, 3072)])
def test_whole_batches_and_their_speed(rows, hidden):
    """Of ViT-S, ConvNeXt's first stage and its last, 256 images. Times decide nothing; they are printed."""
    h, dy = torch.randn(rows, hidden, device=CUDA).half(), torch.randn(rows, hidden, device=CUDA).half()
    dh, total = gelu.backward(dy, h, False)
    torch.testing.assert_close(gelu.forward(h, False), F.gelu(h), rtol=2**-10, atol=1e-6)
    torch.testing.assert_close(dh, torch.ops.aten.gelu_backward(dy, h), rtol=2**-10, atol=1e-5)
    wide = torch.ops.aten.gelu_backward(dy.float(), h.float()).sum(0, dtype=torch.float64)
    torch.testing.assert_close(total.double(), wide, rtol=1e-4, atol=1e-2)
    moved = h.numel() * h.element_size()
    for name, run, passes in (
        ("forward", lambda: gelu.forward(h, False), 2),
        ("backward", lambda: gelu.backward(dy, h, False), 3),
        ("torch forward", lambda: F.gelu(h), 2),
        ("copy", lambda: h.clone(), 2),
    ):
        run()
        seconds = min(device_s(run, device=CUDA, calls=10) for _ in range(5))
        print(f"{rows} x {hidden} {name}: {seconds * 1e6:.0f} us, {passes * moved / seconds / 1e12:.2f} TB/s")
