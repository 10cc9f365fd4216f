"""Layers that are replaced by quicker ones: the same numbers, names and blocks as before."""

import copy

import pytest
import torch
from blocky import without_inductor
from torch import nn
from torch.nn import functional as F

from hyperbatch.engine import compiled
from hyperbatch.models import create_model, heads, lone_norm, quick, residual, vit
from hyperbatch.models.gelu import LinearGelu, gelu
from hyperbatch.models.layers import Conv2d, DropPath, Linear, adopt
from hyperbatch.models.lone_norm import norm_rows, quick_norm
from hyperbatch.models.quick import PatchConv2d, patch_rows, quicken
from hyperbatch.models.regions import find_regions


def results(model, images):
    """Logits, the gradient of the images, and all of the parameters', for a loss that weighs every value anew."""
    model.zero_grad()
    images = images.clone(memory_format=torch.preserve_format).requires_grad_()
    out = model(images)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    (out * weights).sum().backward()
    return {"out": out.detach(), "images": images.grad, **{n: p.grad for n, p in model.named_parameters()}}


def check_same(model, images, **tolerances):
    """The model that was quickened, after it was seen to compute what it did before."""
    plain = copy.deepcopy(model)
    quicken(model)
    ours, expect = results(model, images), results(plain, images)
    assert ours.keys() == expect.keys()
    for name, value in expect.items():
        torch.testing.assert_close(ours[name], value, **tolerances, msg=lambda text, name=name: f"{name}: {text}")
    return model


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("kernel", "channels", "size", "bias"),
    [(4, 3, (8, 12), True), ((2, 3), 5, (6, 9), False), (2, 1, (2, 2), True), ((1, 2), 4, (3, 4), True)],
)
def test_patches_and_a_product_are_the_convolution(kernel, channels, size, bias, dtype, memory_format):
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, 7, kernel, kernel, bias=bias).to(dtype).to(memory_format=memory_format)
    images = torch.randn(3, channels, *size, dtype=dtype).contiguous(memory_format=memory_format)
    wide = 1e-13 if dtype == torch.float64 else 2e-5
    assert type(check_same(conv, images, rtol=wide, atol=wide)) is PatchConv2d
    # The first channels of a wider image, as the loader may have them.
    padded = torch.randn(3, channels + 1, *size, dtype=dtype).contiguous(memory_format=memory_format)
    plain = F.conv2d(padded[:, :channels], conv.weight, conv.bias, conv.stride)
    torch.testing.assert_close(conv(padded[:, :channels]), plain, rtol=wide, atol=wide)


def test_pixels_beyond_the_last_patch_are_left_out_as_by_torch():
    conv = nn.Conv2d(3, 4, 4, 4)
    images = torch.randn(2, 3, 10, 9)
    expect, single = conv(images), conv(images[0])
    quicken(conv)
    assert torch.equal(conv(images), expect)
    assert torch.equal(conv(images[0]), single)
    assert expect.shape == (2, 4, 2, 2)


@pytest.mark.parametrize("with_input", [False, True])
@pytest.mark.parametrize("way", [0, 1])
def test_the_faster_way_is_taken_in_training(monkeypatch, way, with_input):
    """Each is tried with all gradients that the layer will give, which stay as they were."""
    conv = quicken(nn.Conv2d(3, 4, 2, 2))
    taken = []
    monkeypatch.setattr(PatchConv2d, "_conv_forward", lambda *args: taken.append("cudnn") or F.conv2d(*args[1:], 2))
    monkeypatch.setattr(quick, "patch_rows", lambda *args: taken.append("patches") or patch_rows(*args))

    def fastest(what, x, weight, *trials, in_graph):
        asked.append((what, weight is conv.weight, in_graph))
        for trial in trials:
            trial()
        return way

    asked = []
    monkeypatch.setattr(quick, "fastest", fastest)
    images = torch.randn(2, 3, 4, 4, requires_grad=with_input)
    out = conv(images)
    assert asked == [("patches and their gradient" if with_input else "patches", True, False)]
    assert taken == ["cudnn", "patches", ["cudnn", "patches"][way]]
    assert images.grad is conv.weight.grad is conv.bias.grad is None
    torch.testing.assert_close(out, F.conv2d(images, conv.weight, conv.bias, 2))
    with torch.no_grad():
        conv(images)
    assert taken[3:] == ["patches"]
    assert len(asked) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_patches_of_16_bits_with_a_bias_of_32(dtype):
    torch.manual_seed(0)
    conv = quicken(Conv2d(3, 8, 4, 4)).to(memory_format=torch.channels_last)
    conv.weight.data = conv.weight.data.to(dtype)
    images = torch.randn(2, 3, 8, 8).to(dtype)
    out = conv(images)
    assert out.dtype == dtype
    assert out.is_contiguous(memory_format=torch.channels_last)
    expect = F.conv2d(images.double(), conv.weight.double(), conv.bias.double(), 4)
    torch.testing.assert_close(out.double(), expect, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
    out.sum().backward()
    assert conv.weight.grad.dtype == dtype
    assert conv.weight.grad.stride() == conv.weight.stride()  # moved to the arena as it lies
    assert conv.bias.grad.dtype == torch.float32


class Own(nn.Conv2d):
    pass


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, 2),
        nn.Conv2d(4, 4, 2, 2, padding=1),
        nn.Conv2d(4, 4, 2, 2, dilation=2),
        nn.Conv2d(4, 4, 2, 2, groups=2),
        Own(4, 4, 2, 2),
        nn.ConvTranspose2d(4, 4, 2, 2),
    ],
    ids=["overlapping", "padded", "dilated", "grouped", "another class", "transposed"],
)
def test_other_layers_stay_as_they_are(layer):
    before = type(layer)
    assert type(quicken(layer)) is before


class Mlp(nn.Module):
    """timm's."""

    def __init__(self, width, hidden, act=None, bias=True, rate=0.0):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden, bias=bias)
        self.act = act or nn.GELU()
        self.drop1 = nn.Dropout(rate)
        self.norm = nn.Identity()
        self.fc2 = nn.Linear(hidden, width)
        self.drop2 = nn.Dropout(rate)

    def forward(self, x):
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1(x))))))


class GELU(nn.Module):
    """timm's."""

    def forward(self, x):
        return F.gelu(x)


class SubMlp(Mlp):
    pass


class TimmNorm(nn.LayerNorm):
    """timm's."""


class Norm2d(nn.LayerNorm):
    """timm's."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Attention(nn.Module):
    """timm's."""

    def __init__(self, width, rate=0.0, heads=2):
        super().__init__()
        self.num_heads, self.head_dim, self.fused_attn = heads, width // heads, True
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        self.attn_drop = nn.Dropout(0.0)
        self.norm = nn.Identity()
        self.proj = nn.Linear(width, width)
        self.proj_drop = nn.Dropout(rate)

    def forward(self, x, attn_mask=None, is_causal=False):
        samples, tokens, width = x.shape
        qkv = self.qkv(x).reshape(samples, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        dropped = self.attn_drop.p if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropped, is_causal=is_causal)
        return self.proj_drop(self.proj(self.norm(x.transpose(1, 2).reshape(samples, tokens, width))))


class LayerScale(nn.Module):
    """timm's."""

    def __init__(self, width):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x):
        return x * self.gamma


class Block(nn.Module):
    """timm's."""

    def __init__(self, width, rate=0.0, norm=nn.LayerNorm):
        super().__init__()
        self.norm1, self.attn = norm(width, eps=1e-6), Attention(width)
        self.ls1, self.drop_path1 = nn.Identity(), nn.Dropout(rate)
        self.norm2, self.mlp = norm(width, eps=1e-6), Mlp(width, 4 * width)
        self.ls2, self.drop_path2 = nn.Identity(), nn.Dropout(rate)

    def forward(self, x, attn_mask=None, is_causal=False):
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


Mlp.__module__, GELU.__module__ = "timm.layers.mlp", "timm.layers.activations"
TimmNorm.__module__, TimmNorm.__qualname__ = "timm.layers.norm", "LayerNorm"
Norm2d.__module__, Norm2d.__qualname__ = "timm.layers.norm", "LayerNorm2d"
Attention.__module__, Block.__module__ = "timm.layers.attention", "timm.models.vision_transformer"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("act", [nn.GELU(), nn.GELU("tanh"), GELU()], ids=["exact", "tanh", "timm's"])
def test_a_linear_layer_with_its_gelu_is_the_two(act, dtype):
    torch.manual_seed(0)
    mlp = adopt(Mlp(6, 64, act, rate=0.5).to(dtype)).eval()  # dropout stays where it was
    wide = 1e-12 if dtype == torch.float64 else 1e-5
    check_same(mlp, torch.randn(2, 5, 6, dtype=dtype), rtol=wide, atol=wide)
    assert type(mlp.fc1) is LinearGelu
    assert type(mlp.act) is nn.Identity
    torch.manual_seed(1)
    mlp.train()(torch.ones(2, 6, dtype=dtype)).sum().backward()
    quicken(mlp)  # again: nothing changes
    assert type(mlp.fc1) is LinearGelu


def test_operations_are_what_torch_asks_of_one():
    z, bias = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    z.requires_grad_(), bias.requires_grad_()
    for tanh in (False, True):
        torch.library.opcheck(gelu, (z, bias, tanh))
        torch.autograd.gradcheck(lambda z, tanh=tanh: gelu(z, bias, tanh), (z,))
        (total,) = torch.autograd.grad(gelu(z, bias, tanh).sum(), bias)  # as if it had been added to z before
        torch.testing.assert_close(total, torch.autograd.grad(gelu(z, bias, tanh).sum(), z)[0].sum((0, 1)))
    layer = nn.LayerNorm(8, dtype=torch.float64)
    numbers = (layer.weight.detach(), layer.bias.detach(), 1e-6)
    plain = z.detach()
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(residual.norm, (plain, *numbers), test_utils=tests)
    torch.library.opcheck(residual.add_norm, (plain, plain, *numbers), test_utils=tests)
    rows = torch.ones(6, dtype=torch.float64)
    args = (plain, plain, plain, numbers[0], rows, rows)
    for passing in (plain, None):
        torch.library.opcheck(residual.add_norm_backward, (passing, *args[1:]), test_utils=tests)
    torch.library.opcheck(residual.add_norm_bias_backward, args, test_utils=tests)
    torch.library.opcheck(heads.stack_heads, (plain[None], plain[None] + 1, plain[None] + 2), test_utils=tests)
    both = torch.randn_like(plain).requires_grad_()
    torch.autograd.gradcheck(lambda x, y, *_: residual.join(x, y, layer), (z, both, *layer.parameters()))
    torch.autograd.gradcheck(lambda x, *_: residual.fork(x, layer), (z, *layer.parameters()))
    torch.autograd.gradcheck(lambda x, *_: norm_rows(x, layer), (z, *layer.parameters()))


def hooked(mlp):
    mlp.act.register_forward_hook(lambda *_: None)
    return mlp


def twice(mlp):
    mlp.fc2 = nn.Sequential(mlp.fc1, nn.Linear(64, 64))
    return mlp


@pytest.mark.parametrize(
    "model",
    [
        Mlp(8, 64, nn.ReLU()),
        Mlp(8, 64, bias=False),
        Mlp(8, 60),
        SubMlp(8, 64),
        hooked(Mlp(8, 64)),
        twice(Mlp(64, 64)),
        nn.Sequential(nn.Linear(8, 64), nn.GELU()),
    ],
    ids=["another activation", "no bias", "odd width", "another class", "hooked", "used twice", "not known"],
)
def test_what_is_not_known_stays(model):
    before = [type(module) for module in model.modules()]
    quicken(model)
    assert [type(module) for module in model.modules()] == before


def test_16_bit_layers_have_gradients_of_their_parameters_precision():
    mlp = quicken(adopt(Mlp(8, 64)))
    for layer in (mlp.fc1, mlp.fc2):
        assert isinstance(layer, Linear)
        layer.weight.data = layer.weight.data.half()
    mlp(torch.randn(4, 8).half()).float().square().sum().backward()
    assert mlp.fc1.weight.grad.dtype == torch.float16
    assert mlp.fc1.bias.grad.dtype == torch.float32


@pytest.mark.parametrize("norm", [nn.LayerNorm, TimmNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_of_timm_compute_what_they_did(dtype, norm):
    torch.manual_seed(0)
    block = adopt(Block(16, norm=norm).to(dtype))
    with torch.no_grad():
        for layer in (block.norm1, block.norm2):
            layer.weight.normal_(), layer.bias.normal_()
    plain, x = copy.deepcopy(block), torch.randn(2, 5, 16, dtype=dtype)
    wide = 1e-12 if dtype == torch.float64 else 2e-5
    check_same(block, x, rtol=wide, atol=wide)
    assert type(block).__name__ == "QuickBlock"
    assert list(block.state_dict()) == list(plain.state_dict())
    assert type(block.attn).__name__ == "QuickAttention"
    assert block.leaves_biases()
    for named in ({"attn_mask": torch.rand(2, 2, 5, 5, dtype=dtype)}, {"is_causal": True}):
        for each in (block, plain):
            each.zero_grad()
            each(x, **named).square().sum().backward()
        for (name, ours), (_, theirs) in zip(block.named_parameters(), plain.named_parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=20 * wide, atol=20 * wide, msg=name)
    assert type(copy.deepcopy(block)) is type(block) is type(quicken(Block(16)))


def dropped_paths(block):
    block.drop_path1, block.drop_path2 = nn.Dropout(0.5), nn.Dropout(0.5)


def dropped_samples(block):
    block.drop_path2 = DropPath(0.5)


def dropped_projection(block):
    block.attn.proj_drop.p = 0.5


def dropped_weights(block):
    block.attn.attn_drop.p = 0.5


def dropped_inside(block):
    block.mlp.drop1.p = 0.5


def dropped_mlp(block):
    block.mlp.drop2.p = 0.5


def scaled(block):
    block.ls1 = LayerScale(16)


def scaled_mlp(block):
    block.ls2 = LayerScale(16)


def normed_mlp(block):
    block.mlp.norm = nn.LayerNorm(64)


def no_bias(block):
    block.attn.proj = nn.Linear(16, 16, bias=False)


def unknown_mlp(block):
    block.mlp = SubMlp(16, 64)


def watched_mlp(block):
    block.mlp.register_forward_hook(lambda *_: None)


def watched_proj(block):
    block.attn.proj.register_forward_hook(lambda *_: None)


BEHIND = [
    dropped_paths,
    dropped_samples,
    dropped_projection,
    dropped_inside,
    dropped_mlp,
    scaled,
    scaled_mlp,
    normed_mlp,
]
UNKNOWN = [no_bias, unknown_mlp, watched_mlp, watched_proj]


@pytest.mark.parametrize(
    ("change", "early"),
    [(change, True) for change in (*BEHIND, *UNKNOWN, dropped_weights)] + [(change, False) for change in BEHIND],
)
def test_what_a_block_does_behind_its_linear_layers_is_done(change, early):
    """Set before layers are replaced, or after. Biases that are no plain summands get their gradients as ever."""
    torch.manual_seed(0)
    block, x = Block(16), torch.randn(2, 5, 16)
    if early:
        change(block)
    plain = copy.deepcopy(block)
    quicken(block)
    assert type(block).__name__ == "QuickBlock"
    if not early:
        change(block), change(plain)
    assert block.leaves_biases() == (change is dropped_weights)
    for each in (block, plain):
        torch.manual_seed(1)
        each(x).square().sum().backward()
    for (name, ours), (_, theirs) in zip(block.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4, msg=name)


def gated(attention):
    attention.gate = nn.Linear(16, 16)


def without_torchs_function(attention):
    attention.fused_attn = False


def normed_queries(attention):
    attention.q_norm = nn.LayerNorm(8)


def bare_product(attention):
    attention.qkv = nn.Linear(16, 48, bias=False)


def watched_product(attention):
    attention.qkv.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change", [gated, without_torchs_function, normed_queries, bare_product, watched_product])
def test_attention_that_is_not_known_stays(change):
    block = Block(16)
    change(block.attn)
    quicken(block)
    assert type(block.attn) is Attention
    assert not block.leaves_biases()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [lambda: Attention(16), lambda: vit.Attention(16, 2, 0.0)], ids=["timm's", "ours"])
def test_attention_computes_what_it_did(make, dtype):
    torch.manual_seed(0)
    attention = adopt(make().to(dtype))
    wide = 1e-12 if dtype == torch.float64 else 2e-5
    check_same(attention, torch.randn(2, 5, 16, dtype=dtype), rtol=wide, atol=wide)
    assert attention.stacks_heads


def test_gradients_of_heads_are_stacked_as_they_lie():
    """What torch's attention leaves is no copy; other layouts give the same."""
    gradients = [torch.randn(2, 5, 3, 4).transpose(1, 2) for _ in range(3)]
    stacked, total = heads.stack_heads(*gradients)
    expect = torch.stack(gradients).permute(1, 3, 0, 2, 4).reshape(2, 5, 36)
    assert torch.equal(stacked, expect)
    torch.testing.assert_close(total, expect.sum((0, 1)))
    again, _ = heads.stack_heads(*(gradient.contiguous() for gradient in gradients))
    assert torch.equal(again, expect)


@pytest.mark.parametrize("kind", [nn.LayerNorm, TimmNorm, Norm2d])
def test_a_norm_is_ours_outside_of_regions(monkeypatch, kind):
    plain, rows = kind(16), []
    model = quicken(nn.Sequential(Block(16, norm=TimmNorm), Block(16, norm=TimmNorm), copy.deepcopy(plain)))
    layer, x = model[2], torch.randn(2, 16, 16, 16)
    assert type(layer) is quick_norm(kind, images=kind is Norm2d)
    assert type(model[0].norm1) is TimmNorm
    assert list(layer.state_dict()) == list(plain.state_dict())
    monkeypatch.setattr(lone_norm, "norm_rows", lambda *args: rows.append(args) or norm_rows(*args))
    assert torch.equal(layer(x), plain(x))  # where there are no kernels
    monkeypatch.setattr(lone_norm, "by_kernels", lambda x: True)
    torch.testing.assert_close(layer(x), plain(x))
    assert len(rows) == 1


@pytest.mark.parametrize("norm", [nn.LayerNorm(16, bias=False), nn.LayerNorm((4, 16)), nn.RMSNorm(16)])
def test_other_norms_stay(norm):
    before = type(norm)
    assert type(quicken(nn.Sequential(Block(16), Block(16), norm))[2]) is before


def other_version(block):
    block.extra = nn.Identity()
    return block


def other_norm(block):
    block.norm1 = nn.RMSNorm(16)
    return block


def bare_norm(block):
    block.norm2 = nn.LayerNorm(16, bias=False)
    return block


def watched(block):
    block.norm1.register_forward_hook(lambda *_: None)
    return block


@pytest.mark.parametrize("change", [other_version, other_norm, bare_norm, watched])
def test_blocks_that_are_not_known_stay(change):
    assert type(quicken(change(Block(16)))) is Block


@pytest.mark.parametrize("name", ["vit_cifar", "vit_s16"])
def test_a_transformer_keeps_its_blocks_parameters_and_state(name):
    model = create_model(name, classes=10, drop_path=0.1)
    parameters, state = dict(model.named_parameters()), list(model.state_dict())
    regions = [(region.name, region.kind) for region in find_regions(model)]
    quicken(model)
    assert type(model.patch_embed.proj) is PatchConv2d
    assert all(type(block.mlp.fc1) is LinearGelu for block in model.blocks)
    assert [block.leaves_biases() for block in model.blocks] == [True] + [False] * (len(model.blocks) - 1)  # dropped
    assert all(parameters[name] is param for name, param in model.named_parameters())
    assert list(model.state_dict()) == state
    assert [(region.name, region.kind) for region in find_regions(model)] == regions
    model.load_state_dict(create_model(name, classes=10).state_dict())


def test_a_transformer_computes_what_it_did():
    torch.manual_seed(0)
    model = create_model("vit_cifar", classes=10).double()
    nn.init.normal_(model.head.weight)
    model.blocks = model.blocks[:2]
    check_same(model, torch.randn(2, 3, 16, 16, dtype=torch.float64), rtol=1e-10, atol=1e-12)
    assert all(block.leaves_biases() for block in model.blocks)


def test_convolutions_of_others_are_replaced_once_they_are_ours():
    model = quicken(adopt(nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.GELU(), nn.Conv2d(4, 8, 2, 2))))
    assert [type(layer) for layer in model] == [PatchConv2d, nn.GELU, PatchConv2d]
    assert all(layer.takes_fp32_parameters for layer in (model[0], model[2]))
    quicken(model)  # again: nothing changes
    assert type(model[0]) is PatchConv2d


def test_compiled_blocks_take_the_quick_layers_whole(monkeypatch):
    """As one graph, forward and backward, one for all; their gradients are those of the model's own code."""
    monkeypatch.setattr(compiled, "compile_function", None)  # put back after the test
    without_inductor()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(16) for _ in range(3))).double()
    plain = copy.deepcopy(model)
    x = torch.randn(4, 5, 16, dtype=torch.float64, requires_grad=True)
    before = [(region.name, region.kind) for region in find_regions(model)]
    found = find_regions(quicken(model))
    assert [(region.name, region.kind) for region in found] == before == [("0", 0), ("1", 0), ("2", 0)]
    regions = compiled.CompiledRegions(found, "on", {})
    with regions.compiling():
        model(x).square().sum().backward()
    assert (regions.about.regions, regions.about.compilations) == (3, 1)
    plain(x).square().sum().backward()
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12, msg=name)
