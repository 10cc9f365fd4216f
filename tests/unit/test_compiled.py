"""Regions compiled with inductor's code for CPUs: accuracy, what stays as it was, caches, random numbers."""

import copy
import os
import statistics
from collections import Counter

import pytest
import torch
from blocky import Network
from torch import nn

from hyperbatch.arena import Arena
from hyperbatch.config import Config
from hyperbatch.engine.compiled import Compilation, CompiledRegions, choose_regions, prepare_compiler, reason_of
from hyperbatch.models import create_model
from hyperbatch.models.layers import adopt
from hyperbatch.models.regions import find_regions
from hyperbatch.params import backward_order

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Inductor's, empty, for all tests here: what one has compiled, the next one finds."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield
    torch.compiler.reset()


def images_of(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(16, 3, 8, 8, generator=generator, dtype=torch.float64)
    return images.to(dtype).contiguous(memory_format=torch.channels_last)


def network(dtype):
    """In an arena, as the engine has it; in 16 bits with norm parameters in fp32."""
    model = adopt(Network(4, 3)).to(memory_format=torch.channels_last)
    if dtype == torch.float64:
        model.double()
    images = images_of(0, model.stem.weight.dtype)
    order = backward_order(model, lambda: model(images).sum().backward())
    return model, Arena(model, order, dtype=dtype)


def step(model, arena, seed):
    """Logits of a training step, its gradients as they lie in the arena, and the statistics after it, in float64."""
    arena.zero_grad()
    logits = model(images_of(seed, arena.dtype))
    logits.double().square().mean().backward()
    values = {"logits": logits.detach(), **arena.views(arena.grads), **dict(model.named_buffers())}
    return {name: value.double() for name, value in values.items() if value.numel() > 1}


class Steps:
    """The same steps in float64, plain and compiled: every value's distance from the first, over all of them."""

    def __init__(self, draws):
        exact_model, exact_arena = network(torch.float64)
        self.model, self.arena = network(torch.bfloat16)
        self.regions = CompiledRegions(find_regions(self.model), "on", {})
        self.arrived = []
        for name, param in self.model.named_parameters():
            param.register_post_accumulate_grad_hook(lambda _, name=name: self.arrived.append(name))
        squares = {"plain": Counter(), "compiled": Counter()}
        for seed in range(draws):
            torch.manual_seed(seed)
            fresh = Network(4, 3).state_dict()
            self.model.load_state_dict(fresh)
            exact_model.load_state_dict(self.model.state_dict())  # the rounded weights
            exact = step(exact_model, exact_arena, seed)
            for way in squares:
                self.model.load_state_dict(fresh)
                self.arrived.clear()
                if way == "compiled":
                    with self.regions.compiling():
                        values = step(self.model, self.arena, seed)
                else:
                    self.regions.give_up("for comparison")
                    values = step(self.model, self.arena, seed)
                squares[way].update({n: float((values[n] - v).norm() / v.norm()) ** 2 for n, v in exact.items()})
        self.ratios = {name: (squares["compiled"][name] / square) ** 0.5 for name, square in squares["plain"].items()}


@pytest.fixture(scope="module")
def steps(cache):
    return Steps(12)


def test_a_compiled_step_is_as_exact_as_the_models_own(steps):
    """In bf16, against float64. Single values may come out nearer or further by chance, all together do not."""
    assert len(steps.ratios) == 1 + len(steps.arena.slots) + 6
    assert statistics.geometric_mean(steps.ratios.values()) <= 1.0
    assert max(steps.ratios.values()) <= 1.35


def test_blocks_of_a_kind_share_one_compilation(steps):
    about = steps.regions.about
    assert (about.regions, about.kinds, about.compilations) == (3, 1, 1)
    assert (about.cache_hits, about.cache_misses) == (0, 2)  # forward and backward


def test_gradients_arrive_block_by_block_in_the_arena(steps):
    places = [name.split(".")[1] if name.startswith("blocks") else name.split(".")[0] for name in steps.arrived]
    assert list(dict.fromkeys(places)) == ["head", "2", "1", "0", "stem"]
    assert places == sorted(places, key=["head", "2", "1", "0", "stem"].index)
    for slot in steps.arena.slots:
        assert slot.param.grad.data_ptr() == steps.arena.grad_view(slot.name).data_ptr()


def test_a_warm_start_compiles_nothing(steps):
    """What another process has compiled is on the disk: here torch forgets all that is in memory."""
    torch.compiler.reset()
    model, arena = network(torch.bfloat16)
    regions = CompiledRegions(find_regions(model), "on", {})
    counted = []
    with regions.compiling(lambda *count: counted.append(count)):
        step(model, arena, 0)
    assert regions.about.cache_misses == 0
    assert regions.about.cache_hits > 0
    assert counted == [(1, 1)]


def test_evaluation_copies_and_the_state_dict_stay_as_they_were(steps):
    model, images = steps.model, images_of(0, torch.bfloat16)
    assert list(model.state_dict()) == list(Network(4, 3).state_dict())
    plain = adopt(Network(4, 3)).to(memory_format=torch.channels_last)
    Arena(plain, [slot.name for slot in steps.arena.slots], dtype=torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    assert all(block._compiled_call_impl is None for block in copy.deepcopy(model).blocks)
    with torch.no_grad():
        in_training = model(images)
        assert torch.equal(in_training, plain(images))
        model.eval(), plain.eval()
        assert torch.equal(model(images), plain(images))
    model.train()


class Dropped(nn.Module):
    """Dropout, and stochastic depth as timm has it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.drop = nn.Dropout(0.25)

    def forward(self, x):
        kept = x.new_empty(len(x), 1).bernoulli_(0.5)
        return self.drop(x) * self.scale * kept / 0.5


def test_random_numbers_in_a_region_follow_the_seed():
    model = nn.Sequential(Dropped(), Dropped())
    regions = CompiledRegions(find_regions(model), "on", {})
    with regions.compiling():

        def run(seed):
            torch.manual_seed(seed)
            x = torch.ones(512, 64, requires_grad=True)
            first = model[0](x)
            first.sum().backward()
            return first.detach(), x.grad, model[1](x).detach()

        (first, grad, second), again, other = run(1), run(1), run(2)
    assert regions.about.regions == 2
    assert all(torch.equal(a, b) for a, b in zip((first, grad, second), again, strict=True))
    assert not torch.equal(first, other[0])
    assert not torch.equal(first, second)  # a block draws its own numbers
    assert torch.equal(grad, first)  # backward drops what forward did
    rows = first.abs().sum(1)
    assert 0.4 < float((rows > 0).double().mean()) < 0.6
    assert 0.72 < float((first[rows > 0] > 0).double().mean()) < 0.78
    assert first.unique().tolist() == pytest.approx([0.0, 1 / 0.5 / 0.75])


# --- which models, and why not ------------------------------------------------------------------------------------


def chosen(model, *, device=GPU, dtype=torch.float16, fused=False, **values):
    return choose_regions(Config(recipe="test").override(**values), model, dtype, device, fused=fused)


def test_auto_compiles_what_has_no_fused_kernels_on_a_gpu_in_16_bits():
    assert isinstance(chosen(Network(4, 3)), CompiledRegions)
    assert isinstance(chosen(Network(4, 3), dtype=torch.bfloat16), CompiledRegions)
    assert isinstance(chosen(create_model("resnet20"), device=CPU, compile="on"), CompiledRegions)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"device": CPU}, "--compile auto compiles only on a GPU, not on the CPU"),
        ({"dtype": torch.float32}, "--compile auto compiles only in fp16 and bf16"),
        ({"deterministic": True}, "--compile auto does not compile with --deterministic"),
        ({"compile": "off"}, "--compile off"),
        ({"compile": "on", "fused": True}, "fused kernels replace its layers"),
        ({"compile": "on", "bn_group_ranks": 2}, "with --bn-group-ranks, its layers exchange statistics"),
    ],
)
def test_why_nothing_is_compiled(values, reason):
    about = chosen(Network(4, 3), **values)
    assert isinstance(about, Compilation)
    assert about.reason == reason
    assert about.to_dict()["regions"] == 0


def test_auto_leaves_our_networks_to_their_kernels():
    for name in ("resnet50", "alexnet_bn", "whitenet"):
        assert isinstance(chosen(create_model(name)), Compilation)


def test_caches_stay_and_ranks_share_the_cores_unless_torch_was_told_otherwise(monkeypatch, tmp_path):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "")  # put back after the test
        del os.environ[name]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prepare_compiler(1)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "hyperbatch" / "inductor")
    assert "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ
    monkeypatch.setattr("hyperbatch.engine.compiled.usable_cores", lambda: 16)
    prepare_compiler(8)
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "2"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = "elsewhere"
    prepare_compiler(4)
    assert (os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TORCHINDUCTOR_COMPILE_THREADS"]) == ("elsewhere", "2")


def test_a_reason_is_one_line():
    assert reason_of(ValueError("first\nsecond")) == "ValueError: first"
    assert reason_of(RuntimeError()) == "RuntimeError"
    outer = RuntimeError("backend raised:")
    outer.inner_exception = KeyError("what")
    assert reason_of(outer) == "KeyError: 'what'"
