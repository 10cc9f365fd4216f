"""The kernels of the whitening network on a GPU, against float64 torch, and its fused step against its layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F
from unit_reference import ACTIVATIONS, check, check_conv, make, make_conv

from hyperbatch.models import create_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", ["silu", "gelu"])
@pytest.mark.parametrize(
    ("size", "pooled"),
    [((96, 64, 31, 31), True), ((64, 64, 15, 15), False), ((64, 256, 15, 15), True), ((32, 256, 3, 3), False)],
    ids=str,
)
def test_units_agree_with_float64(size, pooled, name):
    check(*make(*size, device="cuda"), name, pooled=pooled)


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_a_shortcut_is_added_before_the_activation(name):
    check(*make(32, 384, 7, 7, device="cuda"), name, pooled=False, joined=True)


@pytest.mark.parametrize("name", ["silu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "inputs", "outputs"),
    [((96, 32, 31, 31), 24, 64), ((7, 16, 12, 9), 8, 32), ((33, 32, 8, 15), 24, 128)],
    ids=str,
)
def test_the_convolution_with_its_pool_agrees_with_float64(size, inputs, outputs, dtype, name):
    check_conv(*make_conv(*size, inputs=inputs, outputs=outputs, dtype=dtype, device="cuda"), name)


def test_the_convolution_with_its_pool_takes_the_first_of_equal_pixels():
    check_conv(*make_conv(96, 32, 31, 31, inputs=24, outputs=64, device="cuda", whole=True), "silu", whole=True)


def test_the_convolution_with_its_pool_gives_the_same_bits_again():
    from hyperbatch.kernels import norm as kernels
    from hyperbatch.kernels.norm import conv_pool

    x, conv = make_conv(96, 32, 31, 31, inputs=24, outputs=64, device="cuda")
    norm = make(1, 64, 1, 1, device="cuda")[1]
    counters, back = kernels.new_counters(x.device), torch.randn(3, 64, device="cuda")
    found, coef = conv_pool.conv_pool_statistics(x, conv, norm, counters)
    dy, dws = torch.randn_like(found.value), []
    for _ in range(5):
        again, coef_again = conv_pool.conv_pool_statistics(x, conv, norm, counters)
        assert torch.equal(again.value, found.value)
        assert torch.equal(again.tap, found.tap)
        assert torch.equal(coef_again, coef)
        dw = torch.empty_like(conv.weight)
        dws.append(conv_pool.weight_gradient_from_pooled(dy, found, coef, back, 0, x, dw))
    assert all(torch.equal(dw, dws[0]) for dw in dws)


@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_whitening_agrees_with_float64(act):
    from hyperbatch.kernels.whiten import whiten

    torch.manual_seed(0)
    function, number = ACTIVATIONS[act]
    conv = torch.nn.Conv2d(3, 24, 2).half().cuda()
    x = torch.randn(100, 3, 32, 32).half().cuda().to(memory_format=torch.channels_last)
    expect = function(F.conv2d(x.double(), conv.weight.double(), conv.bias.double()))
    torch.testing.assert_close(whiten(x, conv, number)[:, :24].double(), expect, rtol=2**-10, atol=2e-3)


@pytest.mark.parametrize("name", ["whitenet", "whitenet_deep"])
def test_the_fused_step_is_as_near_to_fp32_as_the_plain_one(name):
    from hyperbatch.models.fused import fuse

    torch.manual_seed(0)
    exact = create_model(name, classes=10, activation="silu", init="dirac").cuda()
    exact.to(memory_format=torch.channels_last)
    exact.whiten.bias.requires_grad_(False)
    plain = copy.deepcopy(exact)
    for module in plain.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            module.half()
    fused = copy.deepcopy(plain)
    fuse(fused)
    x, labels = torch.randn(256, 3, 32, 32, device="cuda"), torch.randint(0, 10, (256,), device="cuda")
    for model in (exact, plain, fused):
        dtype = model.whiten.weight.dtype
        loss = F.cross_entropy(model(x.to(dtype).to(memory_format=torch.channels_last)), labels)
        (1024 * loss).backward()
    for (which, e), p, f in zip(exact.named_parameters(), plain.parameters(), fused.parameters(), strict=True):
        if e.grad is not None:
            error_plain = (p.grad.float() - e.grad).norm() / e.grad.norm()
            error_fused = (f.grad.float() - e.grad).norm() / e.grad.norm()
            assert error_fused <= 1.2 * error_plain + 2e-3, (which, error_plain.item(), error_fused.item())


@pytest.mark.parametrize("name", ["whitenet", "whitenet_deep"])
def test_the_fused_evaluation_is_as_near_to_fp32_as_the_plain_one(name):
    from hyperbatch.models.fused import fuse

    torch.manual_seed(0)
    exact = create_model(name, classes=10, activation="silu", init="dirac").cuda().eval()
    exact.to(memory_format=torch.channels_last)
    for module in exact.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.running_mean, std=0.2)
            torch.nn.init.uniform_(module.running_var, 0.5, 2.0)
    plain = copy.deepcopy(exact)
    for module in plain.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            module.half()
    fused = copy.deepcopy(plain)
    fuse(fused)
    x = torch.randn(2_500, 3, 32, 32, device="cuda").half()
    with torch.no_grad():
        assert fused.fused.can_evaluate(x)
        expect = exact(x.float())
        error_plain, error_fused = ((model(x) - expect).norm() / expect.norm() for model in (plain, fused))
    assert 0 < error_fused <= 1.2 * error_plain
