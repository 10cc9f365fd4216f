"""Muon's kernels on CPU tensors, by Triton's interpreter, against the readable reference; and compiled for Hopper.

The interpreter has no products in bf16, so they are taken in fp32 there.
"""

from __future__ import annotations

import itertools
import re
import subprocess

import pytest
import torch
from interpreter import inside, outside, run_by_the_interpreter
from test_muon import set_grads
from torch import nn

from hyperbatch.arena import Arena
from hyperbatch.optim import Muon


@outside
def test_kernels_by_the_interpreter():
    run_by_the_interpreter(__file__)


# --- without running anything ---------------------------------------------------------------------------------------


TYPES = {
    **dict.fromkeys(("chunks", "grads", "rates", "places", "matrices"), "*i64"),
    **dict.fromkeys(("clock", "counters", "tiles"), "*i32"),
}


def compiled(kernel, constants, **options):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.fn.arg_names
    signature = {n: "constexpr" if n in constants else TYPES.get(n, "*fp32") for n in names}
    source = ASTSource(fn=kernel.fn, signature=signature, constexprs=constants, attrs={})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


@outside
@pytest.mark.parametrize(("tile", "warps"), [(128, 8), (64, 4)])
def test_products_compile_for_hopper_to_its_matrix_instructions(tile, warps, tmp_path):
    """One loop for each kind of product, on 16-byte copies to shared memory that run ahead of it."""
    triton = pytest.importorskip("triton")
    from hyperbatch.kernels import orthogonal
    from hyperbatch.optim.fused_muon import REGISTERS, STAGES

    constants = {"FACTORS": 18, "PARTIALS": 1024, "DTYPE": triton.language.bfloat16, "TILE": tile, "OVERLAP": True}
    options = {"num_warps": warps, "num_stages": STAGES, "maxnreg": REGISTERS, "launch_pdl": True}
    ptx = compiled(orthogonal.product_kernel, constants, **options)["ptx"]
    assert ptx.count("wgmma.mma_async") == 3 * 4  # a block of 64 is four products of 16
    assert "cp.async.cg.shared.global" in ptx
    assert not re.search(r"cp\.async\.ca|mma\.sync", ptx)
    (tmp_path / "product.ptx").write_text(ptx)
    command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", "product.ptx", "-o", "product.cubin"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stderr
    assert "Used" in said
    assert "serialized" not in said, said  # or each product would wait for the one before


@outside
@pytest.mark.parametrize("has_half", [False, True])
def test_the_other_two_compile_for_hopper_with_wide_accesses(has_half):
    triton = pytest.importorskip("triton")
    from hyperbatch.kernels import muon

    bf16, half = triton.language.bfloat16, triton.language.float16
    common = {"HALF": half, "HAS_HALF": has_half, "ALIGNED": True, "BLOCK": 1024, "OVERLAP": True}
    direction = compiled(muon.direction_kernel, {"COUNTERS": 55, "DTYPE": bf16, "SCALED": True, **common}, num_warps=4)
    assert "ld.global.v4.b32" in direction["ptx"]
    assert "st.global.v2.b32" in direction["ptx"]  # four elements of the direction
    constants = {"FACTORS": 18, "PARTIALS": 1024, "SCALED": True, "TOLD": False, "DTYPE": bf16, **common}
    weights = compiled(muon.apply_kernel, constants, num_warps=4, launch_pdl=True)
    assert "ld.global.v4.b32" in weights["ptx"]
    assert "st.global.v4.b32" in weights["ptx"]
    assert "convert_layout" not in weights["ttgir"]


def test_no_tile_comes_before_those_that_it_waits_for():
    """In every matrix: all tiles of a product are there once, and each counts the tiles of the products before it."""
    pytest.importorskip("triton")
    from hyperbatch.optim.fused_muon import GRAM_CODE, SQUARE_CODE, Matrix, tile_rows

    quintic, cubic = (3.0, -3.0, 1.0), (1.5, -0.5, 0.0)
    matrices = [
        Matrix(200, 300, (quintic, cubic, quintic)),
        Matrix(500, 70, (quintic, quintic)),
        None,
        Matrix(64, 64, (cubic,)),
    ]
    rows, counts = tile_rows(matrices, 64)
    assert sum(counts) == len(rows)
    finished = [0] * len(matrices)
    for (iteration, product), run in itertools.groupby(rows, key=lambda row: (row[1], row[0])):
        tiles: dict[int, list[tuple[int, int]]] = {}
        for _, _, place, i, j, before in run:
            assert before == finished[place]
            tiles.setdefault(place, []).append((i, j))
        for place, found in tiles.items():
            matrix = matrices[place]
            assert matrix is not None
            assert product != SQUARE_CODE or matrix.polynomials[iteration][2]
            down, across = -(-matrix.rows // 64), -(-matrix.columns // 64)
            small = min(down, across)
            if product in (GRAM_CODE, SQUARE_CODE):
                assert sorted(found) == [(i, j) for i in range(small) for j in range(i, small)]
            else:
                assert sorted(found) == [(i, j) for i in range(down) for j in range(across)]
            finished[place] += len(found)
    # A is 4 x 4, 2 x 2 and 1 x 1 tiles, of which 10, 3 and 1 are computed; a cubic has no square.
    assert finished == [(3 + 2) * 10 + 3 * 4 * 5, (2 + 2) * 3 + 2 * 8 * 2, 0, 1 + 1]


# --- by the interpreter ---------------------------------------------------------------------------------------------


SHAPES = [(7,), (33, 65), (70, 20), (1500,), (0, 4), (80, 66), (1, 5), (5, 1), (4, 64)]


def make_params(dtype, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    values.append(torch.randn(6, 4, 3, 3, generator=generator).to(memory_format=torch.channels_last))
    values.append(torch.randn(20, 6, generator=generator).t())  # the first dimension is the innermost one
    params = [nn.Parameter(value.to(dtype)) for value in values]
    return [*params, nn.Parameter(torch.randn(6, 10, generator=generator).to(dtype)[:, ::2])]


def few_params(dtype):
    return make_params(dtype, [(9,), (33, 20)])


def run(path, dtype, make=make_params, updates=2, scale=None, **options):
    params = make(dtype)
    groups = [{"params": params[:3]}, {"params": params[3:-2], "weight_decay": 0.0, "momentum": 0.5}]
    groups.append({"params": params[-2:], "adapt": False})
    optimizer = Muon(groups, lr=0.1, weight_decay=0.1, **{"steps": 2, **options}, **path)
    if scale is not None:
        optimizer.grad_scale = torch.tensor(scale)
    for step in range(updates):
        set_grads(params, step, scale or 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (step + 1)
        optimizer.step()
    return [optimizer.state[p].get("master", p).detach() for p in params], params, optimizer


CUBIC = ((3.0, -3.2, 1.2), (1.5, -0.5, 0.0), (2.0, -1.5, 0.5))
VARIANTS = [
    {"steps": 3},
    {"coefficients": CUBIC, "steps": 3, "nesterov": False, "normalize_weights": True},
    {"coefficients": "polar_express", "steps": 2, "maximize": True, "adjust_lr": "match_rms_adamw"},
    {"steps": 1, "decoupled_weight_decay": True, "adjust_lr": "none"},
]


@inside
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_fused_agrees_with_the_reference(options):
    fused, params, optimizer = run({"fused": True}, torch.float32, **options)
    reference, others, other = run({"foreach": False}, torch.float32, **options)
    for a, b in zip(fused, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
    for a, b in zip(params, others, strict=True):
        buffers = optimizer.state[a]["momentum_buffer"], other.state[b]["momentum_buffer"]
        torch.testing.assert_close(*buffers, rtol=1e-6, atol=1e-6)
    measured, expected = optimizer.layer_norms(), other.layer_norms()
    for name in ("0.0", "0.1", "1.2", "2.0"):
        assert measured[name] == pytest.approx(expected[name], rel=1e-5), name


@inside
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_weights_have_masters_and_unscaled_gradients(dtype):
    fused, params, _ = run({"fused": True}, dtype, few_params, scale=128.0)
    reference, *_ = run({"foreach": False}, dtype, few_params, scale=128.0)
    for a, b, param in zip(fused, reference, params, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
        # The interpreter cuts bf16 off where hardware rounds it: one unit in the last place.
        torch.testing.assert_close(param.float(), a, rtol=torch.finfo(dtype).eps, atol=1e-7)


@inside
@pytest.mark.filterwarnings("ignore:invalid value|overflow:RuntimeWarning")  # nobody will look at these products
@pytest.mark.parametrize("told", [False, True])
def test_a_bad_gradient_skips_the_step_of_all_layers(told):
    _, params, optimizer = run({"fused": True}, torch.float16, few_params, updates=1, normalize_weights=True)
    for bad in (torch.inf, torch.nan):
        before = [(p.detach().clone(), *(x.clone() for x in optimizer.state[p].values())) for p in params]
        set_grads(params, 5)
        if told:
            optimizer.found_inf = torch.ones(1)
        else:
            params[1].grad[3, 3] = bad
        optimizer.step()
        for param, tensors in zip(params, before, strict=True):
            assert all(
                torch.equal(a, b) for a, b in zip((param, *optimizer.state[param].values()), tensors, strict=True)
            )
        assert optimizer.last_found_inf == 1
        if told:
            del optimizer.found_inf
    assert optimizer.skipped_steps == 2
    _, others, other = run({"fused": True}, torch.float16, few_params, updates=1, normalize_weights=True)
    for group, one in ((params, optimizer), (others, other)):  # nothing of what was bad is left in any buffer
        set_grads(group, 6)
        one.step()
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


@inside
def test_three_launches_whatever_the_shapes_groups_and_iterations(monkeypatch):
    from hyperbatch.kernels.compile import Kernel
    from hyperbatch.optim import fused

    launched = []
    launch = Kernel.__getitem__

    def counted(kernel, grid):
        launched.append(kernel.fn.__name__)
        return launch(kernel, grid)

    _, params, optimizer = run({"fused": True}, torch.float32, few_params, updates=1, capturable=True)
    set_grads(params, 1)
    monkeypatch.setattr(Kernel, "__getitem__", counted)
    monkeypatch.setattr(fused, "capturing", lambda device: True)  # no capture here, but a step as in one
    optimizer.step()
    assert launched == ["direction_kernel", "product_kernel", "apply_kernel"]


@inside
def test_one_launch_for_each_product_gives_the_same_bits(monkeypatch):
    from hyperbatch.optim import fused_muon

    together, *_ = run({"fused": True}, torch.float32, few_params)
    monkeypatch.setattr(fused_muon, "ONE_LAUNCH", False)
    apart, _, optimizer = run({"fused": True}, torch.float32, few_params)
    assert [len(counts) for counts, _ in optimizer._fused_step._kernels._waves] == [2 * 3]
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))


@inside
def test_untouched_parameters_and_no_matrices_at_all():
    for params in (few_params(torch.float32), few_params(torch.float32)[:1]):
        before = params[-1].detach().clone()
        optimizer = Muon(params, lr=0.3, weight_decay=0.1, steps=1, fused=True)
        set_grads(params, 0)
        if len(params) > 1:
            params[-1].grad = None
            optimizer.step()
            assert torch.equal(params[-1], before)
        set_grads(params, 1)
        optimizer.step()
        assert not torch.equal(params[-1], before)


@inside
@pytest.mark.parametrize(
    "settings",
    [{"steps": 2}, {"adapt": False}, {"nesterov": False, "maximize": True}, {"coefficients": CUBIC[1:]}],
    ids=str,
)
def test_settings_may_change_between_steps(settings):
    outcomes = []
    for path in ({"fused": True}, {"foreach": False}):
        params = few_params(torch.float32)
        optimizer = Muon(params, lr=0.2, weight_decay=1e-2, steps=1, **path)
        set_grads(params, 0)
        optimizer.step()
        optimizer.param_groups[0].update(settings)
        set_grads(params, 1)
        optimizer.step()
        outcomes.append(params)
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-6, atol=5e-6)


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_over_an_arena_and_resumed_bit_for_bit(dtype):
    def build(path):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(72, 5))
        model = model.to(memory_format=torch.channels_last)
        arena = Arena(model, [name for name, _ in model.named_parameters()][::-1], dtype=dtype)
        return model, Muon(model.named_parameters(), lr=0.05, weight_decay=0.1, steps=2, arena=arena, **path)

    def train(model, optimizer, seeds):
        for seed in seeds:
            set_grads([*model.parameters()], seed)
            optimizer.arena.collect()
            optimizer.step()
        return [optimizer.state[p].get("master", p).detach().clone() for p in model.parameters()]

    model, optimizer = build({"fused": True})
    train(model, optimizer, range(1))
    saved = model.state_dict(), optimizer.state_dict()
    saved = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, saved)
    ours = train(model, optimizer, range(1, 3))
    other, resumed = build({"fused": True})
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert all(torch.equal(a, b) for a, b in zip(ours, train(other, resumed, range(1, 3)), strict=True))
    plain, reference = build({"foreach": False})
    for a, b in zip(ours, train(plain, reference, range(3)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@inside
def test_what_the_kernels_cannot_do_is_said():
    params = [nn.Parameter(torch.randn(4, 3, 5).transpose(0, 1).clone(memory_format=torch.preserve_format))]
    with pytest.raises(ValueError, match="neither the outermost nor the innermost"):
        Muon(params, lr=0.1, fused=True)
    with pytest.raises(ValueError, match=r"product_dtype is torch\.float16"):
        Muon([nn.Parameter(torch.ones(2, 2))], lr=0.1, fused=True, product_dtype=torch.float16)
