"""Networks of one's own, of unusual kinds: each of them trains as it should, or is refused in one line."""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hyperbatch
from hyperbatch import checkpoint, get_recipe
from hyperbatch.arena import Arena
from hyperbatch.cli import main
from hyperbatch.config import Config, SizePhase
from hyperbatch.data.batch import Batch
from hyperbatch.engine import loop, measure
from hyperbatch.engine.evaluate import Evaluator, at_all_places, evaluate_checkpoint
from hyperbatch.engine.ranks import Ranks
from hyperbatch.errors import InputError
from hyperbatch.models import create_model
from hyperbatch.models.layers import in_evaluation, to_channels_last
from hyperbatch.params import backward_order


class Network(nn.Module):
    """For digits: 8x8 pixels of one channel."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(128, classes)

    def forward(self, images):
        return self.head(self.body(images))


class Twice(Network):
    """One layer and one norm in two places each, and two layers with one weight."""

    def __init__(self, classes):
        super().__init__(classes)
        self.first = self.again = nn.Linear(128, 128)
        self.norm = self.same_norm = nn.BatchNorm1d(128)
        self.tied = nn.Linear(128, 128)
        self.tied.weight = self.first.weight

    def forward(self, images):
        x = self.norm(self.again(self.body(images)))
        return self.head(self.tied(self.same_norm(F.relu(x))))


class Spectrum(Network):
    """With a complex buffer that is drawn, at an odd place among the others, and one that forward replaces."""

    def __init__(self, classes):
        super().__init__(classes)
        self.register_buffer("alone", torch.ones(()))
        self.register_buffer("filter", torch.randn(128, dtype=torch.complex64))
        self.register_buffer("mean", torch.zeros(128))

    def forward(self, images):
        x = torch.fft.ifft(torch.fft.fft(self.body(images).float()) * self.filter).real
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return self.head(x - self.mean)


class Centred(Network):
    """With a running mean that has no variance, and a buffer whose elements share their memory."""

    def __init__(self, classes):
        super().__init__(classes)
        self.register_buffer("running_mean", torch.zeros(128))
        self.register_buffer("scale", torch.full((1,), 0.5).expand(128))

    def forward(self, images):
        x = self.body(images)
        if self.training:
            self.running_mean.lerp_(x.detach().mean(0).to(self.running_mean), 0.1)
        return self.head((x - self.running_mean) * self.scale)


class Encoder(nn.Module):
    """torch's transformer, which evaluates by other code than it trains with."""

    def __init__(self, classes):
        super().__init__()
        self.patches = nn.Conv2d(1, 16, 4, 4)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, classes)

    def forward(self, images):
        return self.head(self.layers(self.patches(images).flatten(2).transpose(1, 2)).mean(1))


class Volume(Network):
    """A weight of five dimensions, and one whose elements share their memory."""

    def __init__(self, classes):
        super().__init__(classes)
        self.filters = nn.Conv3d(1, 1, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(1).expand(128))

    def forward(self, images):
        return self.head(self.body(self.filters(images[:, :, None])[:, :, 0]) * self.scale)


class Wide(Network):
    def __init__(self, classes):
        super().__init__(classes + 4)
        nn.init.constant_(self.head.bias[classes:], 9.0)  # so that it answers with what is no class


class Half(Network):
    def __init__(self, classes):
        super().__init__(classes)
        self.bfloat16()


class Double(Network):
    def __init__(self, classes):
        super().__init__(classes)
        self.double()


class PairInEvaluation(Network):
    def forward(self, images):
        logits = super().forward(images)
        return logits if self.training else (logits, images)


class OneSize(Network):
    def forward(self, images):
        if images.shape[-1] != 8:
            raise AssertionError(f"images of 8 pixels, not {images.shape[-1]}")
        return super().forward(images)


class InPlace(Network):
    def forward(self, images):
        return super().forward(images.mul_(2))


class Growing(Network):
    def __init__(self, classes):
        super().__init__(classes)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, images):
        self.seen = torch.cat([self.seen, images.new_ones(1)])
        return super().forward(images)


class Detached(Network):
    def forward(self, images):
        return super().forward(images).detach()


class OfOnePrecision(Network):
    def forward(self, images):
        return F.linear(self.body(images).float(), self.head.weight)


class Complex(Network):
    def __init__(self, classes):
        super().__init__(classes)
        self.phase = nn.Parameter(torch.ones(128, dtype=torch.complex64))

    def forward(self, images):
        return self.head((self.body(images) * self.phase).real)


class Lazy(Network):
    def __init__(self, classes):
        super().__init__(classes)
        self.head = nn.LazyLinear(classes)


class LazyNorm(Network):
    """It has no parameters, but buffers."""

    def __init__(self, classes):
        super().__init__(classes)
        self.norm = nn.LazyBatchNorm1d(affine=False)


class Nowhere(Network):
    def __init__(self, classes):
        with torch.device("meta"):
            super().__init__(classes)


class Sparse(Network):
    def __init__(self, classes):
        super().__init__(classes)
        self.register_buffer("neighbours", torch.eye(4).to_sparse())


def parallel(classes):
    return nn.DataParallel(Network(classes))


def scripted(classes):
    return torch.jit.script(Network(classes))


def leaving(classes):
    sys.exit(3)


@pytest.fixture(autouse=True)
def own(monkeypatch):
    module = types.ModuleType("unusual")
    kinds = [Network, *Network.__subclasses__(), Encoder, parallel, scripted, leaving]
    for kind in kinds:
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "unusual", module)


def config(name: str, out: Path, **values) -> Config:
    sizes = {"image_size": 8, "eval_size": 8, "eval_resize": 8, "augment": "none"}
    few = {"max_steps": 4, "lr": 0.01, "device": "cpu", "out": str(out), "target_top1": None}
    return get_recipe("digits").override(model=f"unusual:{name}", **sizes | few | values)


def val_loss(folder: Path) -> float:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["val_loss"] for row in rows if row["event"] == "eval"][-1]


NAMES = ("Twice", "Spectrum", "Centred", "Encoder", "Volume", "Wide", "Half", "Double")
AVERAGED = {"averaging": "ema", "averaging_decay": 0.5}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((name, {}) for name in NAMES),
        # Torch's Conv3d of 16 bits gives numbers out of nowhere on a CPU (2.13).
        *((name, AVERAGED | ({} if name == "Volume" else {"precision": "bf16"})) for name in NAMES),
    ],
)
def test_a_network_trains_resumes_and_is_exported_as_any_other(name, values, tmp_path):
    """An evaluation in between changes nothing, and what is saved is what was evaluated."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    loop.run(config(name, whole, **values), Ranks())
    loop.run(config(name, parts, **values | {"max_steps": 2}), Ranks())
    loop.run(config(name, parts, resume="yes", **values), Ranks())
    one, other = checkpoint.load(whole), checkpoint.load(parts)
    for kept in ("model", "norm", "average", "average_norm"):
        mine, theirs = getattr(one, kept), getattr(other, kept)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine), kept
    file = tmp_path / "model.safetensors"
    assert main(["export", str(whole), "--output", str(file)]) == 0
    from_run, from_file = (evaluate_checkpoint(path, device="cpu", trust_code=True) for path in (whole, file))
    assert from_run["val_loss"] == from_file["val_loss"]
    assert from_run["val_loss"] == pytest.approx(val_loss(whole), rel=1e-2 if "precision" in values else 1e-5)
    assert sum(from_run["by_class"]["samples"]) == from_run["samples"]
    (prediction,) = hyperbatch.load_model(file, device="cpu", trust_code=True).predict(np.zeros((8, 8), np.uint8))
    assert {answer for answer, _ in prediction.top} <= set(from_run["classes"])


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("PairInEvaluation", {}, r"returns a tuple in evaluation; it must return the logits"),
        ("OneSize", {"image_size": 9}, r"raised AssertionError: images of 8 pixels, not 9 \(in forward, .*:\d+\); it"),
        ("OneSize", {"eval_size": 9, "eval_resize": 9}, r"it must evaluate images of \[2, 1, 9, 9\] \(--eval-size\)"),
        (
            "OneSize",
            {"size_phases": (SizePhase(0, 7), SizePhase(1, 8))},
            r"it must train on images of \[2, 1, 7, 7\] \(--image-size\)",
        ),
        ("OfOnePrecision", {"precision": "bf16"}, r"it must train in bf16 on images of .* \(--precision\)"),
        ("InPlace", {}, "changes its images in place"),
        ("Growing", {}, "changes the shape of its buffer seen"),
        ("Detached", {}, "depend on no parameter that is trained"),
        ("Complex", {}, r"a parameter of Complex is torch.complex64"),
        ("Lazy", {}, "head is a LazyLinear, whose size is not known before its first batch"),
        ("LazyNorm", {}, "norm is a LazyBatchNorm1d, whose size is not known before its first batch"),
        ("Nowhere", {}, "body.0 is a Conv2d on torch's meta device"),
        ("Sparse", {}, "the network is a Sparse with a sparse tensor"),
        ("parallel", {}, "the network is a DataParallel; return the network inside of it"),
        ("scripted", {}, "which torch.jit has compiled"),
        ("leaving", {}, r"raised SystemExit: 3 \(in leaving, .*test_own_models.py:\d+\)"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning", "ignore:Casting complex values")
def test_what_cannot_be_trained_is_refused_before_the_first_step(name, values, words, tmp_path):
    with pytest.raises(InputError, match=words) as caught:
        loop.run(config(name, tmp_path, **values), Ranks())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("code", "words"), [("1 / 0", "ZeroDivisionError"), ("raise SystemExit(0)", "SystemExit: 0")])
def test_a_module_that_fails_while_it_is_imported_gets_one_line(code, words, tmp_path, monkeypatch):
    (tmp_path / "failing_models.py").write_text(f"import math\n{code}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=rf"raised {words}.* \(in <module>, .*failing_models.py:2\); its module must"):
        create_model("failing_models:network")


def test_libraries_are_not_named_as_the_place_of_a_mistake(monkeypatch):
    import argparse

    def reads_argv(classes):
        return argparse.ArgumentParser().parse_args()

    monkeypatch.setattr(sys, "argv", ["hyperbatch", "train"])
    monkeypatch.setattr(sys.modules["unusual"], "reads_argv", reads_argv, raising=False)
    with pytest.raises(InputError, match=r"raised SystemExit: 2 \(in reads_argv, .*test_own_models.py"):
        create_model("unusual:reads_argv")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("out of memory"),
        torch.AcceleratorError("an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
        RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
    ],
)
def test_errors_of_the_device_and_of_other_ranks_are_no_mistakes_of_the_network(error):
    class Failing(Network):
        def forward(self, images):
            raise error

    with pytest.raises(type(error)) as raised:
        measure.probe(Failing(3), torch.zeros(2, 1, 8, 8), 3)
    assert raised.value is error
    assert error.__context__ is None, "whoever catches it can free what its frames hold"


def test_a_network_is_called_with_others_tensors_and_keeps_its_own():
    network = Twice(3).eval()
    own = dict(network.named_parameters())
    others = {name: torch.randn_like(param) for name, param in own.items()}
    expect = copy.deepcopy(network)
    expect.load_state_dict(
        {name: others.get(name, value) for name, value in expect.state_dict().items()}
        | {
            "again.weight": others["first.weight"],
            "again.bias": others["first.bias"],
            "tied.weight": others["first.weight"],
            "same_norm.weight": others["norm.weight"],
            "same_norm.bias": others["norm.bias"],
        }
    )
    images = torch.randn(2, 1, 8, 8)
    answer = torch.func.functional_call(network, at_all_places(network, others), (images,), tie_weights=False)
    torch.testing.assert_close(answer, expect(images))
    assert all(param is own[name] for name, param in network.named_parameters())


def test_evaluation_reads_a_buffer_that_training_replaces_at_one_place():
    """Where a CUDA graph finds it, with the value of today."""
    places = []

    class Watched(Spectrum):
        def forward(self, images):
            if not self.training:
                places.append(self.mean.data_ptr())
            return super().forward(images)

    network, images, labels = Watched(3), torch.randn(8, 1, 8, 8), torch.arange(8) % 3
    evaluator = Evaluator(network, torch.device("cpu"))
    for _ in range(3):
        network(images)
        with in_evaluation(network):
            loss = F.cross_entropy(network(images), labels)
        score = evaluator.evaluate([Batch(images, labels)])
        assert score.val_loss == pytest.approx(loss.item(), rel=1e-5)
    assert len(set(places[1::2])) == 1


class Cached(Network):
    """As timm's LeViT, EfficientFormer and TinyViT: in evaluation, a table is made of weights once, and kept."""

    def __init__(self, classes):
        super().__init__(classes)
        self.biases = nn.Parameter(torch.randn(classes))
        self.table = None

    def train(self, mode=True):
        self.table = None if mode else self.table
        return super().train(mode)

    def forward(self, images):
        if self.training:
            return super().forward(images) + self.biases.flip(0)
        self.table = self.biases.flip(0) if self.table is None else self.table
        return super().forward(images) + self.table


def test_a_captured_evaluation_computes_what_a_network_would_keep():
    """A graph is its operations on tensors that are there: it would read a table of before for ever."""
    tables = []

    class Backend:
        @staticmethod
        def capture(run):
            tables.append(network.table)
            run()
            tables.append(network.table)
            return lambda: None

        on_capture_stream = no_synchronisation = staticmethod(contextlib.nullcontext)

    network = Cached(3)
    network.body.eval()
    evaluator = Evaluator(network, torch.device("cpu"))
    assert evaluator.prepare(Batch(torch.randn(2, 1, 8, 8), torch.tensor([0, 2])), Backend()) is None
    assert tables[0] is None
    assert tables[1] is not None
    assert network.training
    assert not network.body.training


def test_parts_that_are_never_in_training_mode_stay_so():
    network = Network(3)
    network.body.eval()
    images, labels = torch.randn(2, 1, 8, 8), torch.tensor([0, 2])
    measure.probe_evaluation(network, images, 3)
    Evaluator(network, torch.device("cpu")).evaluate([Batch(images, labels)])
    assert network.training
    assert network.head.training
    assert not any(module.training for module in network.body.modules())


def test_parts_hear_of_the_end_of_an_evaluation():
    """Adapters that are merged into the weights for evaluation must be taken out again."""

    class Adapter(nn.Linear):
        merged = False

        def train(self, mode=True):
            self.merged = not mode
            return super().train(mode)

    network = Network(3)
    network.head = Adapter(network.head.in_features, 3)
    measure.probe_evaluation(network, torch.randn(2, 1, 8, 8), 3)
    assert network.head.training
    assert not network.head.merged


def test_a_probe_puts_buffers_back_that_forward_has_replaced():
    network = Spectrum(3)
    before = network.mean
    backward_order(network, lambda: network(torch.ones(2, 1, 8, 8)).sum().backward())
    assert network.mean is before
    assert torch.equal(before, torch.zeros(128))


def test_a_probe_of_evaluation_leaves_no_tensor_behind():
    """A table that it computes in fp32 would stay in a run of 16 bits, but not in the resumed one."""

    class Table(Network):
        def __init__(self, classes):
            super().__init__(classes)
            self.register_buffer("table", torch.zeros(0), persistent=False)

        def forward(self, images):
            if not len(self.table):
                self.table = torch.arange(128.0).to(self.head.weight.dtype)
            return self.head(self.body(images) * self.table)

    network = Table(3)
    measure.probe_evaluation(network, torch.zeros(2, 1, 8, 8), 3)
    assert not len(network.table)


def test_a_probe_leaves_expanded_buffers_alone():
    network = Centred(3)
    assert len(backward_order(network, lambda: network(torch.ones(2, 1, 8, 8)).sum().backward())) == 6
    assert torch.equal(network.running_mean, torch.zeros(128))
    assert network.scale.stride() == (0,)


class Attention(nn.Module):
    """As in timm's EVA, BEiT and SwinV2: keys have a bias of zeros that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))
        self.register_buffer("k_bias", torch.zeros(8), persistent=False)
        self.register_buffer("filt", torch.full((8, 1, 3, 3), 1 / 9), persistent=False)  # as timm's BlurPool2d has it
        self.register_buffer("attn_mask", torch.zeros(4, 5, 5), persistent=False)  # as Swin's windows have it
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("positions", torch.zeros(5, 4), persistent=False)

    def forward(self, x):
        return F.linear(x, self.qkv.weight, torch.cat([self.q_bias, self.get_buffer("k_bias"), self.v_bias]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_buffers_in_the_place_of_parameters_have_their_precision(dtype):
    layer = Attention()
    Arena(layer, [name for name, _ in layer.named_parameters()], dtype=dtype)
    assert layer(torch.randn(2, 8, dtype=dtype)).dtype == dtype
    assert layer.k_bias.dtype == layer.filt.dtype == layer.attn_mask.dtype == dtype
    assert layer.mean.dtype == layer.positions.dtype == torch.float32


def test_only_images_weights_are_channels_last():
    network = to_channels_last(Volume(3))
    assert network.get_parameter("body.0.weight").is_contiguous(memory_format=torch.channels_last)
    assert network.get_parameter("filters.weight").is_contiguous()


def test_weights_whose_layout_could_be_either_are_channels_last_as_torchs_are():
    layers = [nn.Conv2d(8, 16, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(1, 8, 3)]
    ours = [to_channels_last(copy.deepcopy(layer)).get_parameter("weight").stride() for layer in layers]
    assert ours == [layer.to(memory_format=torch.channels_last).get_parameter("weight").stride() for layer in layers]
    assert ours[0] == (8, 1, 8, 8)
