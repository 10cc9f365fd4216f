"""Starting from other weights: a new head for other classes, timm's weights, layers with another rate, frozen ones."""

from __future__ import annotations

import copy
import json
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hyperbatch import checkpoint
from hyperbatch.arena import Arena
from hyperbatch.checkpoint import Weights, start_from
from hyperbatch.cli import main
from hyperbatch.config import Config, LayerRate, OptimConfig, fields
from hyperbatch.errors import InputError
from hyperbatch.models import create_model
from hyperbatch.models.norm import freeze, keeps_statistics
from hyperbatch.optim.build import build_optimizer, set_rate
from hyperbatch.schedule.layers import layer_factors


def network(classes=4, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.Linear(6, classes),
    )


# Which layers


def spec(name):
    return next(spec for spec in fields() if spec.name == name)


def test_rates_are_read_from_a_flag_and_from_json():
    rates = spec("layer_rates").parse("*:0.1,head:1,conv1:0")
    assert rates == (LayerRate("*", 0.1), LayerRate("head", 1.0), LayerRate("conv1", 0.0))
    config = Config().override(layer_rates=rates)
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    for text, told in (
        ("head", "is not a list LAYER:FACTOR,LAYER:FACTOR"),
        ("head:fast", "is not a list LAYER:FACTOR"),
    ):
        with pytest.raises(InputError, match=told):
            spec("layer_rates").parse(text)
    with pytest.raises(InputError, match=r"--layer-rates head:-1: no factor may be negative"):
        Config().override(layer_rates=(LayerRate("head", -1.0),))


def test_the_last_entry_that_names_a_layer_counts():
    names = [
        "conv1.weight",
        "layer1.0.conv.weight",
        "layer1.10.conv.weight",
        "layer10.0.bn.bias",
        "fc.weight",
        "fc.bias",
    ]

    def found(text):
        return list(layer_factors(spec("layer_rates").parse(text), names, "fc").values())

    assert found("") == [1] * 6
    assert found("*:0,head:1") == [0, 0, 0, 0, 1, 1]
    assert found("layer1:0.5") == [1, 0.5, 0.5, 1, 1, 1]
    assert found("layer1.0:0.5,layer10:0") == [1, 0.5, 1, 0, 1, 1]
    assert found("layer*:0.1,*.bias:2") == [1, 0.1, 0.1, 2, 1, 2]
    assert found("head:3,*:1") == [1] * 6
    own = ["head.weight", "fc.weight"]
    assert layer_factors((LayerRate("head", 0.0),), own, "fc") == {"head.weight": 0.0, "fc.weight": 1.0}
    with pytest.raises(InputError, match=r"--layer-rates: the model has no layer 'layr1'; did you mean 'layer1'\?"):
        found("layr1:0")
    with pytest.raises(InputError, match=r"no linear layer, for which head stands; .* such as 'fc'$"):
        layer_factors((LayerRate("head", 1.0),), names, None)  # a convolution gives the logits, as in timm's DLA
    with pytest.raises(InputError, match=r"--layer-rates \*:0 freezes every layer; leave one to train"):
        found("*:0")


def test_each_layers_rate_and_decay_follow_its_factor():
    rates = (LayerRate("0", 0.1), LayerRate("head", 10.0), LayerRate("5.bias", 2.0))
    for decoupled in (False, True):
        model = network()
        arena = Arena(model, [name for name, _ in model.named_parameters()])
        optim = OptimConfig(
            layer_rates=rates,
            weight_decay=0.01,
            bias_lr_scale=4.0,
            decay_norm_bias=True,
            decoupled_weight_decay=decoupled,
        )
        optimizer = build_optimizer(optim, model, arena, lr=1.0)
        set_rate(optimizer, 0.5)
        lr, decay = {}, {}
        for group in optimizer.param_groups:
            lr |= dict.fromkeys(group["param_names"], group["lr"])
            decay |= dict.fromkeys(group["param_names"], group["weight_decay"])
        assert lr == pytest.approx(
            {
                "0.weight": 0.05,
                "4.weight": 0.5,
                "5.weight": 5.0,
                "1.weight": 2.0,
                "1.bias": 2.0,
                "4.bias": 2.0,
                "5.bias": 4.0,
            }
        )
        if decoupled:
            assert (decay["0.weight"], decay["5.weight"], decay["4.bias"]) == pytest.approx((0.001, 0.1, 0.01))
        else:
            assert (decay["0.weight"], decay["5.weight"], decay["4.bias"]) == pytest.approx((0.01, 0.01, 0.0025))


RULES = {
    "sgd": {"optimizer": "sgd"},
    "lars": {"optimizer": "lars", "trust_coefficient": 0.05},
    "lamb": {"optimizer": "lamb"},
    "muon": {"optimizer": "muon"},
}


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("options", RULES.values(), ids=RULES)
def test_frozen_layers_stay_and_the_others_move_as_if_they_were_not_there(options, capturable):
    """The same steps by an optimizer that is given the other parameters alone."""
    frozen = {"0.weight", "1.weight", "1.bias"}
    optim = OptimConfig(layer_rates=(LayerRate("0", 0.0), LayerRate("1", 0.0), LayerRate("head", 3.0)), **options)
    model, other = network().double(), network().double()
    before = copy.deepcopy(model.state_dict())
    freeze(model, frozen)
    for name, param in other.named_parameters():
        param.requires_grad_(name not in frozen)
    other[1].eval()
    for each, settings in ((model, optim), (other, OptimConfig(layer_rates=(LayerRate("5", 3.0),), **options))):
        arena = Arena(each, [name for name, p in each.named_parameters() if p.requires_grad], dtype=torch.float64)
        optimizer = build_optimizer(settings, each, arena, lr=0.1, capturable=capturable)
        for step in range(3):
            arena.zero_grad()
            images = torch.randn(5, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            each(images).square().mean().backward()
            set_rate(optimizer, 0.1)
            optimizer.step()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
        moved = not torch.equal(tensor, before[name])
        assert moved == (name.startswith(("4", "5"))), name


def test_a_frozen_norm_keeps_its_statistics_whatever_mode_the_model_is_in():
    model = network()
    with torch.no_grad():
        model[1].running_mean.fill_(0.3)
    freeze(model, {"0.weight", "1.weight", "1.bias"})
    copied = copy.deepcopy(model)
    for each in (model, copied):
        assert keeps_statistics(each[1])
        each.eval()
        each.train()
        assert [module.training for module in each] == [True, False, True, True, True, True]
        each(torch.randn(8, 1, 4, 4))
        assert torch.all(each[1].running_mean == 0.3)
        assert each[1].num_batches_tracked == 0
    half = network()
    freeze(half, {"1.weight"})
    assert half.train()[1].training, "its shift is trained, and with it its statistics"
    assert not keeps_statistics(half[1])


# Which weights


def test_a_head_for_other_classes_starts_anew():
    model, fresh = network(classes=3), network(classes=3)
    theirs = network(classes=9, seed=1).state_dict()
    line = start_from(model, Weights(theirs, None), classes=None, where="base.pt")
    assert line == "the head (5) is initialised anew with 3 classes: base.pt was trained for 9"
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, (fresh.state_dict() if name.startswith("5") else theirs)[name]), name


def test_two_heads_for_other_classes_start_anew():
    """As in timm's distilled DeiT and LeViT, and in CrossViT."""

    def two_heads(classes, seed=0):
        torch.manual_seed(seed)
        return nn.ModuleDict(
            {"body": nn.Linear(6, 5), "head": nn.Linear(5, classes), "head_dist": nn.Linear(5, classes)}
        )

    model, fresh, theirs = two_heads(3), two_heads(3), two_heads(9, seed=1).state_dict()
    line = start_from(model, Weights(theirs, None), classes=None, where="base.pt")
    assert line == "the heads (head, head_dist) are initialised anew with 3 classes: base.pt was trained for 9"
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, (fresh.state_dict() if "head" in name else theirs)[name]), name
    theirs["head.weight"], theirs["head.bias"] = torch.ones(7, 5), torch.ones(7)
    with pytest.raises(InputError, match="4 of another shape"):
        start_from(model, Weights(theirs, None), classes=None, where="base.pt")


def test_a_head_of_as_many_other_classes_starts_anew_where_names_are_known():
    theirs = network(seed=1).state_dict()
    for ours, known, line in (
        ("abcd", "abcd", None),
        ("abcd", "abce", "the head (5) is initialised anew: base was trained for 4 other classes"),
        ("abcd", None, None),
        (None, "abcd", None),
    ):
        model = network()
        names = None if known is None else tuple(known)
        assert start_from(model, Weights(theirs, names), classes=ours, where="base") == line
        assert torch.equal(model[5].weight, theirs["5.weight"]) == (line is None)
        assert torch.equal(model[4].weight, theirs["4.weight"])


def test_weights_without_a_head_are_taken():
    theirs = {name: tensor for name, tensor in network(seed=1).state_dict().items() if not name.startswith("5")}
    model = network()
    assert (
        start_from(model, Weights(theirs, None), classes=None, where="x")
        == "the head (5) is initialised anew: x has none"
    )
    assert torch.equal(model[0].weight, theirs["0.weight"])


def test_weights_of_another_model_are_still_refused():
    theirs = network(seed=1).state_dict()
    for change, told in (
        ({"0.weight": torch.ones(4, 2, 3, 3)}, r"1 of another shape \(e.g. 0.weight\)"),
        ({"4.weight": torch.ones(7, 16), "5.weight": torch.ones(4, 7)}, "2 of another shape"),
        ({"6.weight": torch.ones(1)}, "1 unknown"),
    ):
        with pytest.raises(InputError, match=told):
            start_from(network(), Weights({**theirs, **change}, None), classes=None, where="x")


class Timm:
    """What we call of timm: models of 9 classes, whose weights were made with another seed."""

    def __init__(self, offline=False, needs_numbers=False):
        self.offline, self.needs_numbers, self.asked = offline, needs_numbers, []

    def is_model(self, name):
        return name == "tiny"

    def list_models(self):
        return ["tiny"]

    def is_model_pretrained(self, name):
        return name in ("tiny", "resnet18")

    def create_model(self, name, *, num_classes=9, in_chans=3, pretrained=False):
        self.asked.append((name, num_classes, in_chans, pretrained))
        if pretrained and self.offline:
            raise OSError("no connection to the hub\nand a long story")
        if self.needs_numbers:  # timm's RegNets find their widths in this way
            torch.linspace(1, 2, 2).unique()
        model = create_model("resnet18", classes=num_classes, in_channels=in_chans)
        if pretrained:
            nn.init.constant_(model.conv1.weight, 0.5)
        return model


@pytest.mark.parametrize(("model", "needs_numbers"), [("timm/tiny", False), ("timm/tiny", True), ("resnet18", False)])
def test_timms_weights_are_fetched_when_asked_for_and_the_dry_run_fetches_nothing(
    monkeypatch, capsys, model, needs_numbers
):
    from hyperbatch.engine.learner import initial_model
    from hyperbatch.engine.ranks import Ranks

    timm = Timm(needs_numbers=needs_numbers)
    monkeypatch.setitem(sys.modules, "timm", timm)
    notes = []
    config = Config().override(model=model, init_from="timm")
    made = initial_model(config, Ranks(), classes=5, in_channels=1, notes=notes)
    name = model.removeprefix("timm/")
    assert notes == [f"the head (fc) is initialised anew with 5 classes: timm's {name} was trained for 9"]
    assert torch.all(made.conv1.weight == 0.5)
    assert made.fc.weight.shape == (5, 512)
    assert timm.asked[-1] == (name, 9, 1, True)
    timm.asked.clear()
    command = ["train", "digits", "--model", model, "--image-size", "32", "--init-from", "timm", "--dry-run"]
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["start_note"]
    assert told == f"the head (fc) is initialised anew with 10 classes: timm's {name} was trained for 9"
    assert not any(pretrained for *_, pretrained in timm.asked)
    assert main(command) == 0
    assert f"note      {told}" in capsys.readouterr().out


def test_what_timm_cannot_give_is_one_line(monkeypatch):
    from hyperbatch.models import pretrained_weights

    monkeypatch.setitem(sys.modules, "timm", Timm(offline=True))
    for model, told in (
        ("timm/tiny", "the weights of 'tiny' cannot be fetched: no connection to the hub$"),
        ("whitenet", "timm has no weights for whitenet; use --model timm/NAME or resnet50"),
        ("resnet34", "timm has no pretrained weights for 'resnet34'"),
        ("resnet50d", "timm has no pretrained weights for 'resnet50d'"),  # by its name, but this timm has none
    ):
        with pytest.raises(InputError, match=told):
            pretrained_weights(model, in_channels=3)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(InputError, match=r"--init-from timm: timm cannot be imported .*hyperbatch\[timm\]"):
        pretrained_weights("resnet18", in_channels=3)


def test_a_timm_that_gives_no_reason_is_one_line_too(monkeypatch, tmp_path):
    from hyperbatch.models import pretrained_weights

    (tmp_path / "timm.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(InputError, match=r"timm cannot be imported \(ImportError\); run pip install"):
        pretrained_weights("resnet18", in_channels=3)


def test_a_timm_with_a_torchvision_for_another_torch_is_not_to_be_installed_again(monkeypatch, tmp_path):
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(InputError, match=r"nms does not exist\); install the torchvision that was built for torch \d"):
        create_model("timm/resnet18", classes=10)


def test_the_dry_run_says_what_happens_to_the_head_and_what_is_trained(tmp_path, capsys):
    names = [str(digit) for digit in range(10)]
    model = create_model("resnet8", classes=10, in_channels=1)
    other = create_model("resnet8", classes=7, in_channels=1)
    save_file(model.state_dict(), tmp_path / "same.safetensors", metadata={"classes": json.dumps(names)})
    save_file(model.state_dict(), tmp_path / "named.safetensors", metadata={"classes": json.dumps(names[::-1])})
    torch.save(other.state_dict(), tmp_path / "other.pt")
    for file, note in (
        ("same.safetensors", None),
        ("named.safetensors", "was trained for 10 other classes"),
        ("other.pt", "was trained for 7"),
    ):
        path = tmp_path / file
        assert (
            main(["train", "digits", "--init-from", str(path), "--layer-rates", "*:0,head:1", "--dry-run", "--json"])
            == 0
        )
        told = json.loads(capsys.readouterr().out)
        assert (told["start_note"] is None) == (note is None)
        assert note is None or told["start_note"].endswith(note)
        assert told["parameters"] == 64 * 10 + 10
    path = (tmp_path / "other.pt").rename(tmp_path / "[bold].pt")  # a style of rich
    assert main(["train", "digits", "--init-from", str(path), "--dry-run"]) == 0
    assert "[bold].pt was trained for 7" in " ".join(capsys.readouterr().out.split())
    torch.save({"state_dict": model.state_dict()}, tmp_path / "nested.pt")
    save_file(model.state_dict(), tmp_path / "foreign.safetensors", metadata={"classes": "ten of them"})
    for file in ("nested.pt", "foreign.safetensors"):
        assert main(["train", "digits", "--init-from", str(tmp_path / file), "--dry-run", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["start_note"] is None
    save_file({"x": torch.ones(1)}, tmp_path / "wrong.safetensors")
    assert main(["train", "digits", "--init-from", str(tmp_path / "wrong.safetensors"), "--dry-run"]) == 2
    assert "do not fit the model" in capsys.readouterr().err
    assert main(["train", "digits", "--layer-rates", "layer9:0", "--dry-run"]) == 2
    assert "the model has no layer 'layer9'" in capsys.readouterr().err


def test_a_dry_run_tells_what_is_decayed_and_the_rate_of_each_layer(capsys):
    def groups(*flags):
        assert (
            main(["train", "digits", "--model", "resnet8", "--weight-decay", "0.01", *flags, "--dry-run", "--json"])
            == 0
        )
        return json.loads(capsys.readouterr().out)["optimizer_groups"]

    model = create_model("resnet8", classes=10, in_channels=1)
    weights = [param.numel() for param in model.parameters() if param.ndim > 1]
    plain = groups()
    assert plain["decayed"] == {"tensors": len(weights), "parameters": sum(weights)}
    assert plain["undecayed"]["tensors"] == len(list(model.parameters())) - len(weights)
    assert plain["factors"] == []
    by_layer = groups("--layer-decay", "0.5", "--layer-rates", "layer3:0,conv1:2")
    assert by_layer["decayed"]["tensors"] == len(weights) - 3
    assert [(row["factor"], row["count"]["tensors"], row["first"]) for row in by_layer["factors"]] == [
        (0.5**4, 2, "bn1.weight"),
        (0.5**3, 7, "conv1.weight"),  # twice the stem's, which is that of layer1
        (0.5**2, 9, "layer2.0.conv1.weight"),
        (1.0, 2, "fc.weight"),
    ]
    for flags in ((), ("--layer-decay", "0.5")):
        assert main(["train", "digits", *flags, "--dry-run"]) == 0
        out = capsys.readouterr().out
        assert "weight decay on" in out
        assert ("learning rate by layer" in out) == bool(flags)
    assert main(["train", "digits", "--layer-decay", "0"]) == 2
    assert "--layer-decay 0: must be in (0, 1]" in capsys.readouterr().err


def test_class_names_come_with_the_weights(tmp_path):
    tensors = {"a": torch.ones(2)}
    save_file(tensors, tmp_path / "plain.safetensors")
    save_file(tensors, tmp_path / "named.safetensors", metadata={"classes": '["x", "y"]'})
    torch.save(tensors, tmp_path / "plain.pt")
    found = [
        checkpoint.load_weights(tmp_path / name).classes
        for name in ("plain.safetensors", "named.safetensors", "plain.pt")
    ]
    assert found == [None, ("x", "y"), None]
