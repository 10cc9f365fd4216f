"""Convolutions and their gradients, as cuDNN's or as matrix products, against torch's own autograd in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hyperbatch.kernels import conv as convolution
from hyperbatch.kernels.compile import asking

# [kernel, stride, padding]
PRODUCT = (1, 1, 0)
OTHERS = [(1, 2, 0), (1, 1, 1), (3, 1, 1), (3, 2, 1), (5, 1, 2), (7, 2, 3), (11, 4, 2)]
ROUND_OFF = 1e-12  # float64, some hundred terms


def make(kernel, stride, padding, *, inputs=6, outputs=10, size=(3, 13, 11), dtype=torch.float64):
    random = torch.Generator().manual_seed(0)
    conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False, dtype=dtype)
    with torch.no_grad():
        conv.weight.copy_(torch.randn(conv.weight.shape, generator=random, dtype=torch.float64))
    n, h, w = size
    x = torch.randn(n, inputs, h, w, generator=random, dtype=torch.float64).to(dtype)
    x = x.to(memory_format=torch.channels_last)
    z = conv(x).detach()
    dz = torch.randn(z.shape, generator=random, dtype=torch.float64).to(dtype).to(memory_format=torch.channels_last)
    return conv, x, dz


def autograd(conv, x, dz):
    x, weight = x.detach().requires_grad_(), conv.weight.detach().requires_grad_()
    z = F.conv2d(x, weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)
    return z.detach(), *torch.autograd.grad(z, (x, weight), dz)


@pytest.mark.parametrize("weights", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("window", [PRODUCT, *OTHERS], ids=str)
def test_agrees_with_autograd(window, weights):
    conv, x, dz = make(*window)
    conv = conv.to(memory_format=weights)
    assert convolution.is_product(conv) == (window == PRODUCT)
    with torch.no_grad():
        z = convolution.convolve(x, conv)
        got = z, convolution.input_gradient(dz, x, conv, conv.weight), convolution.weight_gradient(dz, x, conv, None)
    assert z.is_contiguous(memory_format=torch.channels_last)
    for a, b in zip(got, autograd(conv, x, dz), strict=True):
        torch.testing.assert_close(a, b, rtol=ROUND_OFF, atol=ROUND_OFF)


@pytest.mark.parametrize(("window", "padding"), [*((window, 0) for window in (PRODUCT, *OTHERS)), ((7, 2, 3), 2)])
def test_results_have_their_places_where_only_kernels_are_asked_for(window, padding):
    conv, x, dz = make(*window)
    x = F.pad(x, (0, 0, 0, 0, 0, padding)).to(memory_format=torch.channels_last)

    def results():
        yield convolution.convolve(x, conv)
        yield convolution.input_gradient(dz, x, conv, conv.weight)
        yield convolution.weight_gradient(dz, x, conv, None)

    with torch.no_grad():
        expected = list(results())
        with asking():
            got = list(results())
    for a, b in zip(got, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert [a.stride() for a in got[:2]] == [b.stride() for b in expected[:2]]
    assert not convolution.is_asking()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_product_of_16_bits_is_one_rounding_away(dtype):
    """Sums in fp32 of products that are exact there: one rounding of the result (2^-11, 2^-8) is left."""
    conv, x, dz = make(*PRODUCT, dtype=dtype)
    with torch.no_grad():
        got = (
            convolution.convolve(x, conv),
            convolution.input_gradient(dz, x, conv, conv.weight),
            convolution.weight_gradient(dz, x, conv, torch.full_like(conv.weight, float("nan"))),
        )
    round_off = 1.001 * torch.finfo(dtype).eps / 2
    for a, b in zip(got, autograd(conv.double(), x.double(), dz.double()), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=round_off, atol=1e-5 * float(b.abs().max()))


def test_groups_are_no_product():
    conv, x, dz = make(*PRODUCT)
    conv = nn.Conv2d(6, 10, 1, groups=2, bias=False, dtype=torch.float64)
    assert not convolution.is_product(conv)
    with torch.no_grad():
        got = convolution.input_gradient(dz, x, conv, conv.weight)
    torch.testing.assert_close(got, autograd(conv, x, dz)[1], rtol=ROUND_OFF, atol=ROUND_OFF)


@pytest.mark.parametrize("weights", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels last"])
def test_a_product_writes_where_it_is_told(weights):
    conv, x, dz = make(*PRODUCT)
    conv = conv.to(memory_format=weights)
    room = torch.full((100,), float("nan"), dtype=torch.float64)
    out = room[20:80].view(10, 6, 1, 1)
    dw = convolution.weight_gradient(dz, x, conv, out)
    assert dw.data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, autograd(conv, x, dz)[2], rtol=ROUND_OFF, atol=ROUND_OFF)
    assert room[:20].isnan().all()
    assert room[80:].isnan().all()


def test_a_matrix_is_read_where_it_lies():
    _, x, _ = make(*PRODUCT)
    matrix = convolution.rows(x)
    assert matrix.shape == (3 * 13 * 11, 6)
    assert matrix.data_ptr() == x.data_ptr()
    assert matrix[13 * 11 + 2 * 11 + 5].equal(x[1, :, 2, 5])


def test_a_padded_channel_changes_nothing():
    conv, x, dz = make(7, 2, 3, inputs=3)
    four = F.pad(x, (0, 0, 0, 0, 0, 1)).to(memory_format=torch.channels_last)
    z, _, dw = autograd(conv, x, dz)
    with torch.no_grad():
        torch.testing.assert_close(convolution.convolve(four, conv), z, rtol=ROUND_OFF, atol=ROUND_OFF)
        got = convolution.weight_gradient(dz, four, conv, None)
    assert got.shape == conv.weight.shape
    torch.testing.assert_close(got, dw, rtol=ROUND_OFF, atol=ROUND_OFF)
    assert convolution.padded(x) is x  # the CPU's convolution gains nothing


class Chooser:
    """Plays a device whose ways take these seconds."""

    def __init__(self, monkeypatch, seconds, *, benchmark=True, capturing=False, kept=None):
        self.measured = 0
        self.seconds = seconds
        kept = {} if kept is None else kept
        on_disk = SimpleNamespace(find=kept.get, keep=kept.__setitem__)
        monkeypatch.setattr(convolution, "choices_of", lambda device: on_disk)
        monkeypatch.setattr(convolution, "_chosen", {})
        monkeypatch.setattr(convolution, "_seconds", self.time)
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)

    def time(self, way, *, in_graph):
        self.measured += 1
        self.in_graph = in_graph
        return self.seconds[way()]

    def choose(self, rows=8, what="convolve"):
        x = SimpleNamespace(is_cuda=True, shape=(rows, 6), dtype=torch.float16, device="cuda:0")
        x.numel, x.element_size = lambda: rows * 6, lambda: 2
        conv = make(*PRODUCT)[0]
        return convolution.by_fastest(what, x, conv.weight, lambda: 0, lambda: 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "in_graph"), [(8, True), (1 << 26, False)])
def test_a_graph_that_measures_takes_memory_for_small_results_alone(monkeypatch, rows, in_graph):
    chooser = Chooser(monkeypatch, [1.0, 2.0])
    chooser.choose(rows)
    assert chooser.in_graph == in_graph


def test_the_faster_way_is_measured_once_per_shape(monkeypatch):
    chooser = Chooser(monkeypatch, [1.0, 2.0])
    assert [chooser.choose() for _ in range(3)] == [0, 0, 0]
    assert chooser.measured == 2
    chooser.seconds = [2.0, 1.0]
    assert chooser.choose(rows=9) == 1
    assert chooser.choose(what="input") == 1
    assert chooser.choose() == 0
    assert chooser.measured == 6


def test_a_choice_of_another_run_is_not_measured_again(monkeypatch):
    kept = {}
    first = Chooser(monkeypatch, [1.0, 2.0], kept=kept)
    assert (first.choose(), first.choose(what="input")) == (0, 0)
    assert list(kept.values()) == [0, 0]
    later = Chooser(monkeypatch, [2.0, 1.0], kept=kept)
    monkeypatch.setattr(convolution, "is_compiling", lambda: True)
    assert (later.choose(), later.choose(what="input")) == (0, 0)
    assert later.measured == 0
    monkeypatch.setattr(convolution, "is_compiling", lambda: False)
    assert later.choose(rows=9) == 1
    assert later.measured == 2
    still = Chooser(monkeypatch, [2.0, 1.0], kept=kept, benchmark=False)
    assert still.choose() == 1, "nothing that was measured where the same bits are wanted each time"


@pytest.mark.parametrize("value", [2, -1, 1.0, "0", [0], None])
def test_a_kept_choice_that_is_none_of_the_ways_is_measured_again(monkeypatch, value):
    kept = {}
    Chooser(monkeypatch, [1.0, 2.0], kept=kept).choose()
    kept.update(dict.fromkeys(kept, value))
    chooser = Chooser(monkeypatch, [1.0, 2.0], kept=kept)
    assert chooser.choose() == 0
    assert chooser.measured == 2
    assert list(kept.values()) == [0]


@pytest.mark.parametrize("state", [{"benchmark": False}, {"capturing": True}], ids=str)
def test_nothing_is_measured_where_it_may_not_be(monkeypatch, state):
    chooser = Chooser(monkeypatch, [1.0, 2.0], **state)
    assert chooser.choose() == 1
    assert chooser.measured == 0
    assert Chooser(monkeypatch, [1.0, 2.0]).choose() == 0  # and nothing was settled


def test_while_kernels_are_compiled_every_way_runs_once_unmeasured(monkeypatch):
    """So that cuDNN's own trials are done by then."""
    chooser, ran = Chooser(monkeypatch, [1.0, 2.0]), []
    x = SimpleNamespace(is_cuda=True, shape=(8, 6), dtype=torch.float16, device="cuda:0")
    ways = (lambda: ran.append("cudnn"), lambda: ran.append("product"))
    monkeypatch.setattr(convolution, "is_compiling", lambda: True)
    convolution.by_fastest("convolve", x, make(*PRODUCT)[0].weight, *ways)  # type: ignore[arg-type]
    assert ran == ["cudnn", "product"]
    assert chooser.measured == 0
    assert not convolution._chosen


def test_a_choice_made_before_holds_in_a_capture(monkeypatch):
    chooser = Chooser(monkeypatch, [1.0, 2.0])
    chooser.choose()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert chooser.choose() == 0
