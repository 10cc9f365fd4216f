"""The plain vision transformer against one written with torch's own attention, and its positions, weights and masks."""

import math

import pytest
import torch
from torch import nn

from hyperbatch.engine.kernel_choice import training_kernels
from hyperbatch.errors import InputError
from hyperbatch.models import create_model
from hyperbatch.models.attention import suits_cudnn
from hyperbatch.models.layers import LayerNorm
from hyperbatch.models.vit import DropPath, VisionTransformer

SMALL = {"patch": 4, "width": 24, "depth": 3, "heads": 3, "classes": 5, "in_channels": 3}


def small(**options) -> VisionTransformer:
    """With a head, norms and biases that are not what they start as: a mistake in them must be seen."""
    torch.manual_seed(0)
    model = VisionTransformer(**SMALL | options).double()
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 1 or not param.any():
                param.add_(torch.randn_like(param) * 0.2)
    return model


class Reference(nn.Module):
    """The paper's network with torch's attention, one step a line."""

    def __init__(self, model: VisionTransformer, *, explicit: bool) -> None:
        super().__init__()
        self.ours, self.explicit = model, explicit

    def attention(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        attn = block.attn
        if not self.explicit:
            theirs = nn.MultiheadAttention(x.shape[2], attn.heads, batch_first=True).double()
            weights = (attn.qkv.weight, attn.qkv.bias, attn.proj.weight, attn.proj.bias)
            own = (theirs.in_proj_weight, theirs.in_proj_bias, theirs.out_proj.weight, theirs.out_proj.bias)
            return torch.func.functional_call(
                theirs, dict(zip(names_of(theirs, own), weights, strict=True)), (x, x, x), {"need_weights": False}
            )[0]
        n, tokens, width = x.shape
        each = width // attn.heads
        out = torch.zeros_like(x)
        for head in range(attn.heads):
            rows = slice(head * each, (head + 1) * each)
            q, k, v = (
                x @ matrix[rows].T + bias[rows]
                for matrix, bias in zip(attn.qkv.weight.chunk(3), attn.qkv.bias.chunk(3), strict=True)
            )
            scores = torch.stack([q[i] @ k[i].T for i in range(n)]) / math.sqrt(each)
            share = scores.exp() / scores.exp().sum(2, keepdim=True)
            out = torch.cat([out[:, :, : rows.start], share @ v, out[:, :, rows.stop :]], dim=2)
        assert out.shape == (n, tokens, width)
        return out @ attn.proj.weight.T + attn.proj.bias

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        model = self.ours
        x = nn.functional.conv2d(images, model.patch_embed.proj.weight, model.patch_embed.proj.bias, stride=4)
        height, width = x.shape[2:]
        x = x.permute(0, 2, 3, 1).reshape(len(x), height * width, -1)
        x = x + torch.tensor([place(y, z, x.shape[2]) for y in range(height) for z in range(width)]).to(x)
        for block in model.blocks:
            x = x + self.attention(block, norm(block.norm1, x))
            hidden = norm(block.norm2, x) @ block.mlp.fc1.weight.T + block.mlp.fc1.bias
            hidden = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
            x = x + hidden @ block.mlp.fc2.weight.T + block.mlp.fc2.bias
        return norm(model.norm, x).mean(1) @ model.head.weight.T + model.head.bias


def names_of(module: nn.Module, tensors) -> list[str]:
    return [next(name for name, param in module.named_parameters() if param is tensor) for tensor in tensors]


def norm(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(2, keepdim=True)
    return centred / (centred.square().mean(2, keepdim=True) + 1e-6).sqrt() * layer.weight + layer.bias


def place(row: int, column: int, width: int) -> list[float]:
    """MoCo v3's fixed positions, as the paper takes them over."""
    quarter = width // 4
    waves = [1 / 10_000 ** (k / (quarter - 1)) for k in range(quarter)]
    return [function(at * wave) for at in (column, row) for function in (math.sin, math.cos) for wave in waves]


@pytest.mark.parametrize("explicit", [False, True], ids=["torch's attention", "explicit softmax"])
@pytest.mark.parametrize("size", [(16, 16), (12, 21)])
def test_outputs_and_gradients_are_the_references(size, explicit):
    model = small()
    images = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 5, dtype=torch.float64)
    found, expected = model(images), Reference(model, explicit=explicit)(images)
    # Positions are kept in fp32: 6e-8 of values up to 1.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    wanted = [images, *model.parameters()]
    ours = torch.autograd.grad((found * weights).sum(), wanted)
    theirs = torch.autograd.grad((expected * weights).sum(), wanted)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_vit_s16_has_the_papers_size():
    with torch.device("meta"):
        model = create_model("vit_s16")
    # The 22,050,664 of timm's vit_small_patch16_224, less a class token and 197 learned positions.
    assert sum(p.numel() for p in model.parameters()) == 22_050_664 - 384 - 197 * 384 == 21_974_632
    names = [name for name, _ in model.named_parameters()]
    assert [name for name in names if name.startswith("blocks.3.")] == [
        f"blocks.3.{layer}.{part}"
        for layer in ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
        for part in ("weight", "bias")
    ]
    assert len(model.blocks) == 12
    assert not [name for name in model.state_dict() if "waves" in name]  # positions are not saved


def test_initial_weights_are_the_papers():
    torch.manual_seed(0)
    model = create_model("vit_s16")
    block = model.blocks[5]
    for chunk in block.attn.qkv.weight.chunk(3):  # each of the three as a matrix of its own
        assert chunk.abs().max().item() == pytest.approx(math.sqrt(6 / (384 + 384)), rel=1e-3)
    assert block.mlp.fc1.weight.abs().max().item() == pytest.approx(math.sqrt(6 / (384 + 1536)), rel=1e-3)
    assert 0 < block.mlp.fc1.bias.abs().max() < 1e-5
    patches = model.patch_embed.proj.weight
    assert patches.std().item() == pytest.approx(math.sqrt(1 / (3 * 16 * 16)), rel=0.01)
    assert not model.head.weight.any()
    assert not block.attn.qkv.bias.any()
    assert torch.equal(model(torch.randn(2, 3, 224, 224)), torch.zeros(2, 1000))


def test_16_bit_weights_beside_fp32_norms_and_biases():
    model = small().float()
    images = torch.randn(4, 3, 32, 32)
    expected = model.double()(images.double())
    for module in model.modules():
        for param in module.parameters(recurse=False):
            keeps = isinstance(module, LayerNorm) or param.ndim == 1
            param.data = param.data.float() if keeps else param.data.bfloat16()
    found = model(images)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()
    found.sum().backward()
    assert all(param.grad is not None and param.grad.dtype == param.dtype for param in model.parameters())


def test_stochastic_depth_grows_with_depth_and_keeps_the_mean():
    model = VisionTransformer(**SMALL | {"depth": 5}, drop_path=0.2)
    assert [block.drop_path.rate for block in model.blocks] == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    torch.manual_seed(0)
    path, x = DropPath(0.25), torch.ones(20_000, 2, 3)
    out = path(x)
    assert out.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert torch.equal(out.amax((1, 2)), out.amin((1, 2)))  # whole samples
    assert out.mean().item() == pytest.approx(1, abs=0.02)
    assert path.eval()(x) is x
    assert DropPath(0.0)(x) is x


def test_dropout_works_in_training_alone():
    model, images = small(dropout=0.3), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    assert not torch.equal(model(images), model(images))
    model.eval()
    torch.testing.assert_close(model(images), Reference(model, explicit=True)(images), rtol=1e-6, atol=1e-6)


def test_options_that_it_cannot_have():
    with pytest.raises(InputError, match="--zero-init-last-gamma: vit_s16 has no norms that end its blocks"):
        create_model("vit_s16", zero_init_last_gamma=True)
    with pytest.raises(InputError, match="--activation silu: vit_cifar has a fixed activation"):
        create_model("vit_cifar", activation="silu")


def test_training_leaves_cudnns_attention_out_and_torchs_settings_as_they_were():
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with training_kernels(deterministic=False):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_cudnns_attention_is_taken_where_its_padding_is_masked():
    assert [keys for keys in (1, 63, 64, 65, 128, 192, 196, 197, 320) if not suits_cudnn(2, keys)] == [64, 192, 320]
    assert not suits_cudnn(1, 196)
