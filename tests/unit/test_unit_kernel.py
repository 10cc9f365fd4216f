"""Max-pool, norm and smooth activations in kernels, and the whole fused network, by Triton's interpreter."""

from __future__ import annotations

import copy

import pytest
import torch
from hopper import compile_launches, spilled_bytes
from interpreter import inside, outside, run_by_the_interpreter
from torch import nn
from torch.nn import functional as F
from unit_reference import check, check_conv, make, make_conv

from hyperbatch.models import create_model
from hyperbatch.models.fused import why_not_fused
from hyperbatch.models.whitenet import ConvGroup


@outside
def test_kernels_by_the_interpreter():
    run_by_the_interpreter(__file__)


@outside
def test_kernels_compile_for_hopper_with_wide_accesses(monkeypatch):
    pytest.importorskip("triton")
    from hyperbatch.kernels import norm as kernels
    from hyperbatch.kernels import whiten
    from hyperbatch.kernels.norm import unit

    compiled = compile_launches(monkeypatch, unit, whiten)
    z, norm = make(64, 64, 31, 31)
    counters = kernels.new_counters(z.device)
    found, coef = unit.pool_statistics(z, norm, counters)
    unit.activate(found.value, coef, 0)
    grads = kernels.NormGradients(torch.empty(3, 64), torch.empty(64), torch.empty(64))
    unit.reduce_gradient(found.value, found.value, coef, grads, counters, 0)
    unit.apply_gradient(found.value, found.value, coef, grads.back, 0, found.value)
    unit.apply_unpool_gradient(found.value, found, coef, grads.back, 0, pixels=(31, 31))
    y = torch.empty(64, 256, 3, 3).half().to(memory_format=torch.channels_last).requires_grad_()
    unit.Peak.apply(y).sum().backward()
    whiten.whiten(
        torch.empty(64, 4, 32, 32).half().to(memory_format=torch.channels_last)[:, :3], nn.Conv2d(3, 24, 2).half(), 0
    )
    assert len(compiled) == 8
    for name in compiled:
        if name != "_whiten_kernel":
            assert "ld.global.v4.b32" in compiled[name], name
    assert "st.global.v4.b32" in compiled["_whiten_kernel"]


@outside
@pytest.mark.parametrize("channels", [128, 384, 512])
def test_the_units_of_the_deep_network_spill_no_registers(monkeypatch, channels):
    """With a shortcut, and with wide accesses for a number of channels that is no power of two, too."""
    pytest.importorskip("triton")
    from hyperbatch.kernels import norm as kernels
    from hyperbatch.kernels.norm import unit

    compiled = compile_launches(monkeypatch, unit)
    z, norm = make(8, channels, 6, 6)
    counters = kernels.new_counters(z.device)
    found, coef = unit.pool_statistics(z, norm, counters)
    value = found.value
    unit.activate(value, coef, 0, value)
    grads = kernels.NormGradients(torch.empty(3, channels), torch.empty(channels), torch.empty(channels))
    unit.reduce_gradient(value, value, coef, grads, counters, 0, value)
    unit.apply_gradient(value, value, coef, grads.back, 0, value)
    unit.apply_unpool_gradient(value, found, coef, grads.back, 0, pixels=(6, 6))
    unit.Peak.apply(value.requires_grad_()).sum().backward()
    assert len(compiled) == 7
    for name, ptx in compiled.items():
        assert "ld.global.v4.b32" in ptx or "peak" in name, name
        assert spilled_bytes(ptx) == 0, name


@outside
@pytest.mark.parametrize(
    ("inputs", "k", "outputs", "dtype"),
    [
        (24, 32, 64, torch.float16),
        (8, 16, 32, torch.float16),
        (24, 32, 128, torch.float16),
        (24, 32, 128, torch.bfloat16),
    ],
)
def test_the_convolution_with_its_pool_compiles_for_hopper(monkeypatch, inputs, k, outputs, dtype):
    """With the channels of the recipes in registers, but for a few numbers; accumulators alone would be 576 bytes."""
    pytest.importorskip("triton")
    from hyperbatch.kernels import norm as kernels
    from hyperbatch.kernels.norm import conv_pool

    compiled = compile_launches(monkeypatch, conv_pool)
    x, conv = make_conv(64, k, 7, 7, inputs=inputs, outputs=outputs, dtype=dtype)
    norm = make(1, outputs, 1, 1)[1]
    found, coef = conv_pool.conv_pool_statistics(x, conv, norm, kernels.new_counters(x.device))
    back, dw = torch.empty(3, outputs), torch.empty_like(conv.weight)
    conv_pool.weight_gradient_from_pooled(found.value, found, coef, back, 0, x, dw)
    for name in ("_conv_pool_kernel", "_weight_gradient_kernel"):
        assert "wgmma.mma_async" in compiled[name] or outputs < 64, name  # at least 64 rows
        assert spilled_bytes(compiled[name]) <= 160, name


@inside
@pytest.mark.parametrize(
    ("size", "inputs", "outputs", "whole", "name"),
    [
        ((3, 32, 9, 7), 24, 64, False, "silu"),
        ((3, 32, 9, 7), 24, 64, True, "silu"),
        ((2, 16, 6, 12), 16, 32, False, "gelu"),
        ((20, 32, 2, 3), 8, 128, True, "silu"),
    ],
    ids=str,
)
def test_the_convolution_with_its_pool_agrees_with_float64(size, inputs, outputs, whole, name):
    """Also, of whole numbers, which of equal pixels is the maximum."""
    check_conv(*make_conv(*size, inputs=inputs, outputs=outputs, whole=whole), name, whole=whole)


@inside
def test_the_convolution_with_its_pool_in_fp32():
    check_conv(*make_conv(2, 32, 5, 6, inputs=24, outputs=32, dtype=torch.float32), "silu")


@inside
def test_a_nan_goes_through_the_convolution_and_its_pool():
    from hyperbatch.kernels import norm as kernels
    from hyperbatch.kernels.norm import conv_pool

    x, conv = make_conv(1, 32, 8, 8, inputs=24, outputs=32)
    x[0, 3, 5, 5] = torch.nan
    norm = make(1, 32, 1, 1)[1]
    pooled, _ = conv_pool.conv_pool_statistics(x, conv, norm, kernels.new_counters(x.device))
    assert pooled.value[0, :, 2:, 2:].isnan().all()
    assert pooled.value.isnan().sum() == 32 * 4


@inside
def test_the_weight_gradient_drops_nothing_of_a_long_loop(monkeypatch):
    """Of several tiles a program, and a last one that is cut off."""
    from hyperbatch.kernels.norm import conv_pool

    monkeypatch.setattr(conv_pool, "FORWARD", conv_pool.Tile(rows=16, warps=4, stages=1, per_processor=1))
    monkeypatch.setattr(conv_pool, "BACKWARD", conv_pool.Tile(rows=16, warps=4, stages=1, per_processor=1))
    check_conv(*make_conv(3, 32, 9, 11, inputs=24, outputs=32), "silu")


@inside
@pytest.mark.parametrize("name", ["silu", "gelu"])
@pytest.mark.parametrize(
    ("size", "pooled"),
    [
        ((2, 16, 7, 7), True),
        ((3, 64, 6, 5), True),
        ((2, 8, 2, 3), True),
        ((2, 16, 5, 5), False),
        ((1, 128, 3, 4), False),
    ],
    ids=str,
)
def test_agrees_with_float64(size, pooled, name):
    check(*make(*size), name, pooled=pooled)


@inside
@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_a_shortcut_is_added_before_the_activation(name):
    check(*make(2, 16, 5, 5), name, pooled=False, joined=True)


@inside
def test_bf16():
    check(*make(2, 16, 5, 6, dtype=torch.bfloat16), "silu", pooled=True)


@inside
def test_of_equal_pixels_the_first_is_the_maximum():
    z, norm = make(2, 8, 6, 6)
    check(z.round(), norm, "silu", pooled=True)


@inside
def test_a_nan_goes_through_the_pool():
    from hyperbatch.kernels import norm as kernels
    from hyperbatch.kernels.norm import unit

    z, norm = make(1, 8, 4, 4)
    z[0, 3, 0, 1] = torch.nan
    pooled, _ = unit.pool_statistics(z, norm, kernels.new_counters(z.device))
    assert pooled.value[0, 3, 0, 0].isnan()
    assert pooled.value.isnan().sum() == 1


@inside
def test_the_peak_of_an_image_and_its_gradient_are_those_of_a_pool():
    from hyperbatch.kernels.norm.unit import Peak

    torch.manual_seed(0)
    y = torch.randn(3, 24, 3, 4).half().round(decimals=1).to(memory_format=torch.channels_last)  # with ties
    y[1, 5, 2, 2] = torch.nan
    ours, theirs = y.clone().requires_grad_(), y.clone().requires_grad_()
    weights = torch.randn(3, 24).half()
    peak, expect = Peak.apply(ours), F.max_pool2d(theirs, (3, 4)).flatten(1)
    torch.testing.assert_close(peak, expect, rtol=0, atol=0, equal_nan=True)
    (peak * weights)[[0, 2]].sum().backward()
    (expect * weights)[[0, 2]].sum().backward()
    assert torch.equal(ours.grad, theirs.grad)


@inside
@pytest.mark.parametrize("act", ["silu", "gelu"])
@pytest.mark.parametrize("channels", [1, 3])
def test_whitening_agrees_with_float64_and_pads_with_zeros(act, channels):
    from unit_reference import ACTIVATIONS

    from hyperbatch.kernels.whiten import whiten

    torch.manual_seed(0)
    function, number = ACTIVATIONS[act]
    conv = nn.Conv2d(channels, 8 * channels, 2).half().to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 9, 8).half().to(memory_format=torch.channels_last)[:, :channels]
    y = whiten(x, conv, number)
    expect = function(F.conv2d(x.double(), conv.weight.double(), conv.bias.double()))
    assert y.shape == (2, 32, 8, 7)
    assert not y[:, 8 * channels :].any()
    torch.testing.assert_close(y[:, : 8 * channels].double(), expect, rtol=2**-10, atol=2e-3)


@inside
@pytest.mark.parametrize(("trained_bias", "depth"), [(False, 2), (True, 2), (False, 3)])
def test_the_fused_network_trains_as_its_layers(trained_bias, depth):
    """In fp32, where the interpreter allows it, so that nothing but the order of sums differs."""
    from hyperbatch.models.fused import fuse

    torch.manual_seed(0)
    model = _narrow(depth)  # the interpreter is slow
    model.whiten.bias.requires_grad_(trained_bias)
    plain = copy.deepcopy(model)
    fuse(model)
    x, labels = torch.randn(4, 3, 32, 32).to(memory_format=torch.channels_last), torch.arange(4)
    for network in (model, plain):
        network.train()
        F.cross_entropy(network(x), labels).backward()
    assert model.fused.can_run()
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if other.grad is None:
            assert param.grad is None, name
        else:
            torch.testing.assert_close(param.grad, other.grad, rtol=1e-3, atol=1e-5, msg=name)
    for (name, buffer), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=1e-4, atol=1e-5, msg=name)


@inside
@pytest.mark.parametrize("depth", [2, 3])
def test_the_fused_network_evaluates_as_its_layers_and_leaves_no_trace(depth):
    from hyperbatch.models.fused import fuse

    torch.manual_seed(0)
    model = _narrow(depth).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.5)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.normal_(module.bias)
    plain = copy.deepcopy(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fuse(model)
    x = torch.randn(4, 3, 32, 32)
    assert not model.fused.can_evaluate(x), "somebody may want a gradient"
    with torch.no_grad():
        assert model.fused.can_evaluate(x)
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
        # Other statistics in their places, as an evaluation over ranks has them.
        others = {name: 2 * tensor for name, tensor in before.items() if "running" in name}
        expect = torch.func.functional_call(plain, others, (x,))
        torch.testing.assert_close(torch.func.functional_call(model, others, (x,)), expect, rtol=1e-4, atol=1e-5)
        assert (expect - plain(x)).abs().max() > 1e-2
        model.group1[0].norm.train()
        assert not model.fused.can_evaluate(x)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def _narrow(depth=2):
    from hyperbatch.models.whitenet import WhiteNet

    return WhiteNet((8, 16, 16), depth, classes=10, in_channels=3, activation="silu", bn_momentum=0.4, bn_eps=1e-5).to(
        memory_format=torch.channels_last
    )


@inside
def test_a_first_unit_trains_as_its_layers(monkeypatch):
    """By the kernels that store no z; in fp32, where the interpreter allows it."""
    from hyperbatch.kernels import norm as kernels
    from hyperbatch.models import fused_units
    from hyperbatch.models.whitenet import ConvUnit

    torch.manual_seed(0)
    unit = ConvUnit(24, 32, pooled=True, activation="silu", bn_momentum=0.4, bn_eps=1e-5)
    unit.to(memory_format=torch.channels_last)
    plain = copy.deepcopy(unit)
    x = torch.randn(2, 24, 9, 7)
    wide = F.pad(x, (0, 0, 0, 0, 0, 8)).to(memory_format=torch.channels_last)
    monkeypatch.setattr(fused_units.convolution, "convolve", None)  # not needed
    y, expect = fused_units.FusedUnit(unit, kernels.new_counters(x.device))(wide), plain(x)
    torch.testing.assert_close(y, expect, rtol=1e-4, atol=1e-5)
    weights = torch.randn(y.shape)
    (y * weights).sum().backward()
    (expect * weights).sum().backward()
    for (name, param), other in zip(unit.named_parameters(), plain.parameters(), strict=True):
        if other.requires_grad:
            torch.testing.assert_close(param.grad, other.grad, rtol=1e-3, atol=1e-4, msg=name)
        else:
            assert param.grad is None


@inside
def test_convolutions_that_the_kernels_with_a_pool_do_not_compute():
    from hyperbatch.kernels.norm.conv_pool import can_take

    def takes(k=32, outputs=64, side=8, **options):
        conv = nn.Conv2d(24, outputs, **{"kernel_size": 3, "padding": 1, "bias": False, **options})
        return can_take(torch.empty(1, k, side, side), conv)

    assert takes()
    assert not takes(k=24)
    assert not takes(outputs=48)
    assert not takes(k=64)
    assert not takes(outputs=256)
    assert not takes(side=1)
    for options in ({"stride": 2}, {"padding": 0}, {"dilation": 2}, {"groups": 2}, {"bias": True}):
        assert not takes(**options)
    assert not takes(kernel_size=1, padding=1)


@inside
def test_what_the_kernels_do_not_compute_is_refused():
    cpu = torch.device("cpu")
    assert why_not_fused(_narrow(), torch.float16, cpu) is None
    assert why_not_fused(create_model("whitenet_deep", classes=10), torch.float16, cpu) is None
    model = _narrow()
    model.group1 = ConvGroup(model.group1[0], model.group1[0])
    assert "group1 is not a group" in why_not_fused(model, torch.float16, cpu)
    model = _narrow()
    model.group1[0].act = nn.GELU("tanh")
    assert "approximation" in why_not_fused(model, torch.float16, cpu)
    model = _narrow()
    model.group2[0].pool = nn.MaxPool2d(3, 2, 1)
    assert "group2.0 uses unsupported pooling" in why_not_fused(model, torch.float16, cpu)
