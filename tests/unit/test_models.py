"""The built-in models: torchvision's names and sizes, both stems, 16-bit working weights, foreign models."""

import os
import subprocess
import sys
import types

import pytest
import timm_reference
import torch
from torch import nn

from hyperbatch.config import ModelConfig
from hyperbatch.errors import InputError
from hyperbatch.models import (
    create_from,
    create_model,
    merge_norm_statistics,
    merged_buffers,
    model_names,
    set_norm_group,
)
from hyperbatch.models.layers import Conv2d, GroupNorm, LayerNorm, Linear, adopt
from hyperbatch.models.norm import BatchNorm2d
from hyperbatch.plan.inventory import usual_data

# Sizes torchvision documents for its own models at 1000 classes.
TORCHVISION_PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}


@pytest.mark.parametrize(("name", "parameters"), TORCHVISION_PARAMETERS.items())
def test_imagenet_resnets_have_torchvisions_sizes(name, parameters):
    with torch.device("meta"):
        model = create_model(name)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_resnet50_has_torchvisions_tensors():
    with torch.device("meta"):
        state = create_model("resnet50").state_dict()
        names = dict(create_model("resnet50").named_parameters())
    assert len(names) == 161
    # 53 norms with mean, variance and count besides the parameters
    assert len(state) == 161 + 3 * 53
    shapes = {
        "conv1.weight": (64, 3, 7, 7),
        "bn1.running_var": (64,),
        "layer1.0.conv1.weight": (64, 64, 1, 1),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer1.0.downsample.1.num_batches_tracked": (),
        "layer4.0.conv2.weight": (512, 512, 3, 3),
        "layer4.2.bn3.bias": (2048,),
        "fc.weight": (1000, 2048),
        "fc.bias": (1000,),
    }
    assert {name: tuple(state[name].shape) for name in shapes} == shapes


def test_resnet50_equals_torchvisions_with_its_weights():
    models = pytest.importorskip("torchvision.models", exc_type=ImportError)
    theirs, ours = models.resnet50().double().eval(), create_model("resnet50").double().eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)


def test_v15_has_the_stride_in_the_3x3():
    block = create_model("resnet50").get_submodule("layer2.0")
    assert (block.get_submodule("conv1").stride, block.get_submodule("conv2").stride) == ((1, 1), (2, 2))  # type: ignore[attr-defined]


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(("name", "last"), [("resnet18", "bn2"), ("resnet50", "bn3"), ("resnet20", "bn2")])
def test_zero_init_last_gamma(name, last, zero):
    model = create_model(name, classes=10, zero_init_last_gamma=zero)
    for path, module in model.named_modules():
        if isinstance(module, BatchNorm2d):
            expect = 0.0 if zero and path.startswith("layer") and path.endswith(last) else 1.0
            assert torch.all(module.weight == expect), path


def test_convolutions_start_at_he_fan_out():
    torch.manual_seed(0)
    weight = create_model("resnet50").get_parameter("layer4.0.conv2.weight")
    # std = sqrt(2 / (512 * 9)); 2.4 M draws pin it to a thousandth
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=5e-3)


@pytest.mark.parametrize("name", ["resnet8", "resnet20", "resnet20x4"])
def test_small_resnets_take_one_channel_of_8_pixels_and_three_of_32(name):
    for channels, side in ((1, 8), (3, 32)):
        model = create_model(name, classes=7, in_channels=channels)
        assert model(torch.randn(2, channels, side, side)).shape == (2, 7)
        assert model.conv1.weight.shape[1:] == (channels, 3, 3)  # type: ignore[union-attr,index]


def test_small_resnet_sizes():
    # He et al. give 0.27 M for 20 layers and 0.85 M for 56 with parameter-free shortcuts; ours add 1x1 convolutions.
    with torch.device("meta"):
        sizes = {d: sum(p.numel() for p in create_model(f"resnet{d}", classes=10).parameters()) for d in (20, 56)}
    shortcuts = 16 * 32 + 32 * 64 + 2 * 32 + 2 * 64
    assert sizes == {20: 269_722 + shortcuts, 56: 853_018 + shortcuts}


@pytest.mark.parametrize("training", [False, True])
def test_resnet50d_equals_timms_with_its_weights(training):
    torch.manual_seed(0)
    theirs, ours = timm_reference.resnet50d(7).double().train(training), create_model("resnet50d", classes=7).double()
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    ours.train(training)
    x = torch.randn(2, 3, 65, 70, dtype=torch.float64)  # odd sides, whose last averages are of fewer pixels
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-9, atol=1e-9)
    with torch.device("meta"):
        assert sum(p.numel() for p in create_model("resnet50d").parameters()) == 25_576_264


def test_alexnets():
    with torch.device("meta"):
        plain, pool5 = create_model("alexnet_bn"), create_model("alexnet_bn_pool5")
    names = [name for name, _ in plain.named_parameters()]
    assert "features.0.weight" in names
    assert "features.0.bias" not in names
    assert tuple(plain.get_parameter("classifier.1.weight").shape) == (4096, 9216)
    extra = set(dict(pool5.named_parameters())) - set(names)
    assert extra == {"features.18.weight", "features.18.bias"}
    model = create_model("alexnet_bn_pool5", classes=5)
    # dropout halves the learning signal but not the shapes; other sizes go through the adaptive pool
    assert model(torch.randn(2, 3, 224, 224)).shape == (2, 5)
    assert model(torch.randn(2, 3, 96, 96)).shape == (2, 5)
    with pytest.raises(InputError, match="no residual blocks"):
        create_model("alexnet_bn", zero_init_last_gamma=True)


@pytest.mark.parametrize("name", ["resnet8", "resnet50", "alexnet_bn"])
def test_16_bit_weights_with_fp32_norms_and_biases(name):
    """The arena's precision policy: the result is near fp32's and every gradient has its parameter's dtype."""
    torch.manual_seed(0)
    side = 96 if name == "alexnet_bn" else 32
    wide = create_model(name, classes=4)
    torch.manual_seed(0)
    narrow = create_model(name, classes=4)
    for parameter in narrow.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.bfloat16()
    x = torch.randn(2, 3, side, side)
    for model in (wide, narrow):
        model.eval()
    with torch.no_grad():
        expect, got = wide(x), narrow(x)
    assert got.dtype == torch.float32
    # bf16 keeps 8 bits: some percent of the spread of the logits after a few dozen layers
    assert (got - expect).abs().max() < 0.1 * expect.abs().max() + 0.02
    narrow.train()
    narrow(x.bfloat16()).square().mean().backward()
    for path, parameter in narrow.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.dtype == parameter.dtype
        assert torch.isfinite(parameter.grad).all()


def test_float64_stays_float64():
    model = create_model("resnet8", classes=3, in_channels=1).double()
    assert model(torch.randn(2, 1, 8, 8, dtype=torch.float64)).dtype == torch.float64


def test_channels_last_goes_through():
    model = create_model("resnet8", classes=3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last)
    seen = []
    model.get_submodule("layer3").register_forward_hook(lambda _m, _i, out: seen.append(out))
    model(x).sum().backward()
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


def test_bn_momentum_reaches_every_norm():
    model = create_model("resnet8", bn_momentum=0.25)
    assert {m.momentum for m in model.modules() if isinstance(m, BatchNorm2d)} == {0.25}


# Foreign models


def own_plain(classes=1000, in_channels=3):
    return nn.Sequential(nn.Conv2d(in_channels, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, classes))


def own_keywords(**options):
    return own_plain(**options)


def own_factory(*, weights=None, progress=True, **kwargs):
    """As torchvision's: another constructor knows the names, and this one calls the class count num_classes."""

    def network(num_classes=1000, width=4):
        return own_plain(num_classes, 1)

    return network(**kwargs)


def own_factory_of_nothing(**kwargs):
    def network(width=4):
        return own_plain()

    return network(**kwargs)


def own_num_classes(num_classes):
    return own_plain(num_classes, 1)


def own_needs_more(classes, depth):
    return own_plain(classes)


def own_not_a_module(classes):
    return classes


def own_broken(classes):
    return nn.Conv2d(3, classes, 3, groups=2)


OWN = (
    own_broken,
    *(own_plain, own_keywords, own_factory, own_factory_of_nothing, own_num_classes, own_needs_more),
    own_not_a_module,
)


@pytest.fixture
def own_module(monkeypatch):
    module = types.ModuleType("someones_models")
    for function in OWN:
        setattr(module, function.__name__, function)
    module.number, module.network = 3, own_plain(2)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "someones_models", module)


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize("function", ["own_plain", "own_keywords", "own_factory", "own_num_classes"])
def test_own_model_gets_what_its_signature_takes(function):
    model = create_model(f"someones_models:{function}", classes=6, in_channels=1, bn_momentum=0.3)
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 6)
    norm = model.get_submodule("1")
    assert isinstance(norm, BatchNorm2d)
    assert norm.momentum == 0.3


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet5", "did you mean 'resnet"),
        ("someones_models:own_not_a_module", "returned a int; it must return a torch.nn.Module"),
        (
            "someones_models:own_needs_more",
            "missing a required argument: 'depth'; give it a default, since only classes",
        ),
        ("someones_models:network", "is a network; give the class or the function that builds it"),
        (
            "someones_models:own_factory_of_nothing",
            "has no argument for the number of classes; call it classes or num_classes",
        ),
        (
            "someones_models:own_broken",
            r"raised ValueError: in_channels must be divisible by groups \(in own_broken, .*test_models.py:\d+\);",
        ),
        ("someones_models:number", "is a int"),
        ("someones_models:missing", "missing"),
        ("no_such_package.module:f", "no_such_package"),
    ],
)
def test_wrong_names_get_one_line(name, message):
    with pytest.raises(InputError, match=message) as caught:
        create_model(name)
    assert "\n" not in str(caught.value)


def test_a_module_that_is_no_python_gets_one_line(tmp_path, monkeypatch):
    (tmp_path / "mistyped_models.py").write_text("def network(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        InputError, match=r"cannot be imported: invalid syntax \(mistyped_models.py, line 1\); repair it"
    ):
        create_model("mistyped_models:network")


@pytest.mark.usefixtures("own_module")
def test_zero_gamma_of_an_own_model_that_takes_none():
    with pytest.raises(InputError, match="leave it off"):
        create_model("someones_models:own_plain", zero_init_last_gamma=True)


def rates(model):
    return {module.p for module in model.modules() if isinstance(module, nn.Dropout)}


def test_drop_rates_reach_the_models_that_take_them(monkeypatch):
    with torch.device("meta"):
        assert rates(create_model("alexnet_bn")) == {0.5}
        assert rates(create_model("alexnet_bn", dropout=0.25)) == {0.25}
        vit = create_model("vit_cifar", dropout=0.1, drop_path=0.3)
    assert rates(vit) == {0.1}
    assert vit.get_submodule("blocks.6.drop_path").rate == 0.3
    given = {}

    def build(classes, drop_rate=0.0, drop_path_rate=0.0):
        given.update(drop_rate=drop_rate, drop_path_rate=drop_path_rate)
        return own_plain(classes)

    module, fake = types.ModuleType("someones_models"), types.ModuleType("timm")
    module.build = build  # type: ignore[attr-defined]
    fake.is_model = lambda name: True  # type: ignore[attr-defined]
    fake.create_model = lambda name, num_classes, in_chans, **options: build(num_classes, **options)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "someones_models", module)
    monkeypatch.setitem(sys.modules, "timm", fake)
    for name in ("someones_models:build", "timm/any"):
        create_from(ModelConfig(model=name, dropout=0.1, drop_path=0.2), classes=3, in_channels=3)
        assert given == {"drop_rate": 0.1, "drop_path_rate": 0.2}
        create_model(name)
        assert given == {"drop_rate": 0.0, "drop_path_rate": 0.0}


@pytest.mark.usefixtures("own_module")
def test_models_without_drop_rates_refuse_them_in_one_line(monkeypatch):
    fake = types.ModuleType("timm")
    fake.is_model = lambda name: True  # type: ignore[attr-defined]
    fake.create_model = lambda name, num_classes, in_chans: own_plain(num_classes)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", fake)
    for name, options, message in (
        ("resnet50", {"dropout": 0.1}, r"--dropout 0\.1: resnet50 has no dropout; leave it out"),
        ("alexnet_bn", {"drop_path": 0.1}, r"--drop-path 0\.1: alexnet_bn has no stochastic depth; leave it out"),
        ("timm/any", {"drop_path": 0.1}, r"--drop-path 0\.1: timm/any has no stochastic depth; leave it out"),
        ("someones_models:own_plain", {"dropout": 0.1}, r"takes no argument dropout or drop_rate\); leave it out"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            create_model(name, **options)
        assert "\n" not in str(caught.value)


def test_timm_missing_gets_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)  # what an import of a missing package finds
    with pytest.raises(InputError, match=r"needs timm.*pip install") as caught:
        create_model("timm/resnet50")
    assert "\n" not in str(caught.value)


def test_timm_is_given_classes_and_channels(monkeypatch):
    fake = types.ModuleType("timm")
    fake.is_model = lambda name: name == "tiny"  # type: ignore[attr-defined]
    fake.list_models = lambda: ["tiny"]  # type: ignore[attr-defined]
    fake.create_model = lambda name, num_classes, in_chans: own_plain(num_classes, in_chans)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", fake)
    assert create_model("timm/tiny", classes=6, in_channels=1)(torch.randn(2, 1, 8, 8)).shape == (2, 6)
    with pytest.raises(InputError, match="did you mean 'tiny'"):
        create_model("timm/tinny")
    with pytest.raises(InputError, match=r"^timm has no model 'x'; timm\.list_models\(\) lists the 1 known$"):
        create_model("timm/x")
    with pytest.raises(InputError, match="zero_init_last"):
        create_model("timm/tiny", zero_init_last_gamma=True)


def test_a_timm_model_of_one_size_is_planned_at_that_size(monkeypatch):
    fake = types.ModuleType("timm")

    def about(name):
        if "." in name:
            raise RuntimeError("Invalid pretrained tag (a1) for tiny.")
        return (
            None
            if name == "unknown"
            else types.SimpleNamespace(input_size=(3, 256, 256), fixed_input_size=name == "fixed")
        )

    fake.get_pretrained_cfg = about  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", fake)
    names = ("fixed", "free", "unknown", "tiny.a1")
    assert [usual_data(f"timm/{name}")[0] for name in names] == [256, 224, 224, 224]
    monkeypatch.setitem(sys.modules, "timm", None)
    assert usual_data("timm/fixed") == (224, 1000)


def test_a_name_with_an_unknown_tag_of_weights_is_one_line(monkeypatch):
    fake = types.ModuleType("timm")

    def refuse(name, **options):
        raise RuntimeError("Invalid pretrained tag (a1) for tiny.")

    fake.is_model, fake.create_model = lambda name: True, refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", fake)
    with pytest.raises(InputError, match=r"^model 'timm/tiny\.a1' cannot be built: Invalid .* \(a1\) for tiny$"):
        create_model("timm/tiny.a1")


def test_names_are_sorted_and_buildable():
    names = model_names()
    assert names == sorted(names)
    assert {"resnet8", "resnet50", "alexnet_bn", "alexnet_bn_pool5"} <= set(names)
    with torch.device("meta"):
        for name in names:
            create_model(name, classes=3)


# Layers


@pytest.mark.parametrize(
    ("torchs", "shape"),
    [
        (nn.Linear(6, 4), (3, 6)),
        (nn.Conv2d(2, 4, 3, padding=1), (3, 2, 5, 5)),
        (nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), (3, 2, 5, 5)),
        (nn.LayerNorm(6), (3, 6)),
        (nn.LayerNorm(6, elementwise_affine=False), (3, 6)),
        (nn.GroupNorm(2, 4), (3, 4, 5)),
        (nn.BatchNorm2d(3), (4, 3, 5, 5)),
    ],
)
def test_adopted_layers_are_torchs_in_one_dtype_and_work_in_two(torchs, shape):
    x = torch.randn(shape)
    expect = torchs(x)
    ours = adopt(torchs)
    assert isinstance(ours, Linear | Conv2d | LayerNorm | GroupNorm | BatchNorm2d)
    torch.testing.assert_close(ours(x), expect, rtol=0, atol=0)
    for name, parameter in ours.named_parameters():
        if name == "weight" and parameter.ndim > 1:
            parameter.data = parameter.data.bfloat16()
    got = ours(x.bfloat16())
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expect, rtol=0.05, atol=0.05)  # bf16: 8 bits


GARBAGE = """
import torch
from hyperbatch.models.layers import Conv2d

for groups, stride, width in ((1, 2, 1), (64, 2, 1), (1, 3, 2), (1, (1, 3), 2)):
    layer = Conv2d(64, 64, 3, stride, 1, groups=groups).to(torch.bfloat16, memory_format=torch.channels_last)
    images = torch.ones(4, 64, 1, width, dtype=torch.bfloat16)
    layer(images).float().sum().backward()
    expect = torch.zeros(3, 3)
    expect[1, 1 : 1 + width] = 4.0
    assert torch.equal(layer.weight.grad.float(), expect.expand(64, 64 // groups, 3, 3)), (groups, stride, width)
"""


def test_a_kernel_whose_stride_is_larger_than_the_images_has_no_gradient_beside_them():
    """torch 2.13 leaves what was in memory there, in bf16 on a CPU. glibc fills memory with large numbers here."""
    subprocess.run([sys.executable, "-c", GARBAGE], check=True, env={**os.environ, "MALLOC_PERTURB_": "128"})


def test_adopt_leaves_subclasses_alone():
    class Mine(nn.Linear):
        pass

    assert type(adopt(nn.Sequential(Mine(2, 2))).get_submodule("0")) is Mine


# Norm statistics


def test_merging_is_the_statistics_of_the_union():
    """For equal counts the merged biased variance is exactly that of all samples together."""
    torch.manual_seed(0)
    parts = torch.randn(3, 50, 4, dtype=torch.float64) + torch.arange(3).view(3, 1, 1)
    per_rank = [
        {
            "bn.running_mean": x.mean(0),
            "bn.running_var": x.var(0, correction=0),
            "bn.num_batches_tracked": torch.tensor(7),
        }
        for x in parts
    ]
    merged = merge_norm_statistics(per_rank)
    everything = parts.reshape(-1, 4)
    torch.testing.assert_close(merged["bn.running_mean"], everything.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(merged["bn.running_var"], everything.var(0, correction=0), rtol=1e-12, atol=1e-12)
    assert merged["bn.num_batches_tracked"] == 7


def test_merged_buffers_of_one_process_are_copies():
    model = create_model("resnet8", classes=3)
    buffers = merged_buffers(model)
    assert set(buffers) == {name for name, _ in model.named_buffers()}
    buffers["bn1.running_mean"].fill_(9)
    assert torch.all(model.get_buffer("bn1.running_mean") == 0)


def test_groups_need_a_batch_norm_that_can_share():
    with pytest.raises(InputError, match="BatchNorm1d cannot share"):
        set_norm_group(nn.Sequential(nn.BatchNorm1d(3)), object())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="has no batch norm"):
        set_norm_group(nn.Sequential(nn.Linear(3, 3)), object())  # type: ignore[arg-type]
    set_norm_group(nn.Sequential(nn.Linear(3, 3)), None)
