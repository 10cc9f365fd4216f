"""The fused kernels on CPU tensors, by Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from interpreter import INTERPRETED, inside, outside, run_by_the_interpreter
from test_muon import set_grads
from torch import nn

from hyperbatch.arena import Arena
from hyperbatch.optim import LAMB, LARS, param_groups

if INTERPRETED:
    from hyperbatch.optim import fused_kernels


@outside
def test_kernels_by_the_interpreter():
    run_by_the_interpreter(__file__)


@outside
@pytest.mark.parametrize("rule", ["lars", "lamb", "adamw"])
@pytest.mark.parametrize("half", [False, True])
def test_kernels_compile_for_hopper_with_wide_accesses_and_no_shuffles(half, rule):
    """Without a GPU: 16-byte loads and stores, and no detour through shared memory between the two precisions."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hyperbatch.kernels import layerwise

    code = layerwise.LARS_CODES["lr_inside"] if rule == "lars" else layerwise.LAMB_CODE
    common = {"HALF": triton.language.float16, "HAS_HALF": half, "ALIGNED": True, "BLOCK": 1024, "OVERLAP": True}
    types = {"first_chunk": "i32", "chunks": "*i64", "grads": "*i64", "rates": "*i64", "clock": "*i32"}
    for kernel, flags in (
        (layerwise.update_kernel, {"FLAGS": (half, False, code, False, False, False, False), "PARTIALS": 1024}),
        (layerwise.norms_kernel, {"GROUPS": 2, "SCALED": half, "DIRECTION": rule == "lamb"}),
    ):
        flags |= common
        signature = {n: "constexpr" if n in flags else types.get(n, "*fp32") for n in kernel.fn.arg_names}
        source = ASTSource(fn=kernel.fn, signature=signature, constexprs=flags, attrs={})
        options = {"num_warps": 4, "launch_pdl": kernel is layerwise.update_kernel}
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert "ld.global.v4.b32" in compiled.asm["ptx"]
        assert ("st.global.v4.b32" in compiled.asm["ptx"]) == (kernel is layerwise.update_kernel)
        assert "convert_layout" not in compiled.asm["ttgir"]


@outside
def test_the_look_at_the_weights_compiles_for_hopper_with_wide_loads():
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hyperbatch.kernels import layerwise

    look = layerwise.weight_norms_kernel.fn
    flags = {"HALF": triton.language.bfloat16, "HAS_HALF": True, "ALIGNED": True, "BLOCK": 1024}
    signature = {n: "constexpr" if n in flags else "*i64" if n == "chunks" else "*fp32" for n in look.arg_names}
    source = ASTSource(fn=look, signature=signature, constexprs=flags, attrs={})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert "ld.global.v4.b32" in compiled.asm["ptx"]  # four masters
    assert "ld.global.v2.b32" in compiled.asm["ptx"]  # and their four copies
    assert "convert_layout" not in compiled.asm["ttgir"]


def make_params(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator) for shape in [(7,), (33, 65), (5000,), (0,), (32, 32)]]
    values.append(torch.zeros(9))
    values.append(torch.randn(6, 4, 3, 3, generator=generator).to(memory_format=torch.channels_last))
    params = [nn.Parameter(value.to(dtype)) for value in values]
    return [*params, nn.Parameter(torch.randn(6, 10, generator=generator).to(dtype)[:, ::2])]


def run(path, dtype, steps=2, scale=None, kind=LARS, **options):
    params = make_params(dtype)
    groups = [{"params": params[:3]}, {"params": params[3:], "adapt": False, "weight_decay": 0.0}]
    optimizer = kind(groups, lr=0.2, weight_decay=1e-2, **options, **path)
    if scale is not None:
        optimizer.grad_scale = torch.tensor(scale)
    for step in range(steps):
        set_grads(params, step, scale or 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 0.2 * (step + 1)
        optimizer.step()
    return [optimizer.state[p].get("master", p).detach() for p in params], params, optimizer


VARIANTS = [
    {"momentum_rule": "lr_inside", "trust_clip": True, "eps": 1e-3},
    {"momentum_rule": "rescaled", "nesterov": True},
    {"momentum_rule": "lr_outside", "nesterov": True, "maximize": True},
    {"momentum_rule": "unscaled", "decoupled_weight_decay": True},
]


@inside
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_fused_agrees_with_the_reference(options):
    fused, *_ = run({"fused": True}, torch.float32, **options)
    reference, *_ = run({"foreach": False}, torch.float32, **options)
    for a, b in zip(fused, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


def trusts(optimizer):
    """Without that of an empty parameter, which has none."""
    return {trust for *_, trust in optimizer.layer_norms().values() if not math.isnan(trust)}


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_lamb_without_trust_is_torchs_adamw(dtype):
    """No direction's norm is taken then; a group that adapts again brings it back."""
    settings = {"lr": 0.01, "eps": 1e-8, "weight_decay": 0.1}
    params = make_params(dtype)
    optimizer = LAMB([{"params": params, "adapt": False}], fused=True, **settings)
    plain = [nn.Parameter(param.detach().double()) for param in params]
    adamw = torch.optim.AdamW(plain, **settings)
    for step in range(4):
        set_grads(params, step)
        for ours, theirs in zip(params, plain, strict=True):
            theirs.grad = None if ours.grad is None else ours.grad.double()
        optimizer.step()
        adamw.step()
    for ours, theirs in zip(params, plain, strict=True):
        full = optimizer.state[ours].get("master", ours)
        torch.testing.assert_close(full.double(), theirs, rtol=2e-5, atol=2e-6)
    assert trusts(optimizer) == {1.0}
    optimizer.param_groups[0]["adapt"] = True
    set_grads(params, 9)
    optimizer.step()
    assert len(trusts(optimizer)) > 1


@inside
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_weights_have_masters_and_unscaled_gradients(dtype):
    fused, params, optimizer = run({"fused": True}, dtype, scale=128.0)
    reference, _, other = run({"foreach": False}, dtype, scale=128.0)
    for a, b, param in zip(fused, reference, params, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
        # The interpreter cuts bf16 off where hardware rounds it: one unit in the last place.
        torch.testing.assert_close(param.float(), a, rtol=torch.finfo(dtype).eps, atol=1e-7)
    measured, expected = optimizer.layer_norms(), other.layer_norms()
    assert measured["0.1"] == pytest.approx(expected["0.1"], rel=1e-5)


@inside
def test_a_bad_gradient_skips_the_step_of_all_layers():
    _, params, optimizer = run({"fused": True}, torch.float16, steps=1, momentum_rule="rescaled")
    before = [p.detach().clone() for p in params]
    for bad in (float("inf"), float("nan")):
        set_grads(params, 5)
        params[2].grad[4999] = bad
        for group in optimizer.param_groups:
            group["lr"] = 0.7  # the buffer was not rescaled to this one
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
        assert optimizer.last_found_inf == 1
    assert optimizer.skipped_steps == 2
    assert float(optimizer.param_groups[0]["last_lr"]) == pytest.approx(0.2)
    set_grads(params, 6)
    optimizer.step()
    assert optimizer.last_found_inf == 0
    assert not torch.equal(params[2], before[2])


@inside
def test_weights_changed_from_outside_are_measured_anew():
    _, params, optimizer = run({"fused": True}, torch.float32, steps=1)
    with torch.no_grad():
        params[1].mul_(10.0)
    norm = params[1].norm().item()
    set_grads(params, 3)
    optimizer.step()
    assert optimizer.layer_norms()["0.1"][0] == pytest.approx(norm, rel=1e-6)


@inside
def test_eps_counts_where_gradients_are_small():
    """With a gradient of 1e-6 and an eps of 1 the trust ratio is a millionth of what it would be without."""
    results = []
    for path in ({"fused": True}, {"foreach": False}):
        params = make_params(torch.float32)
        optimizer = LARS(params, lr=0.2, eps=1.0, trust_coefficient=1.0, **path)
        set_grads(params, 0, 1e-6)
        optimizer.step()
        results.append({n: row for n, row in optimizer.layer_norms().items() if n in ("0.0", "0.1", "0.2")})
    for name, row in results[0].items():
        assert row == pytest.approx(results[1][name], rel=1e-5)


@inside
@pytest.mark.parametrize("rule", ["lr_inside", "rescaled", "lr_outside", "unscaled"])
def test_a_first_step_at_rate_0_leaves_weights_as_they_are(rule):
    params = make_params(torch.float32)
    optimizer = LARS(params, lr=0.0, weight_decay=0.1, decoupled_weight_decay=True, momentum_rule=rule, fused=True)
    set_grads(params, 0)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, make_params(torch.float32), strict=True))


def few_params(dtype):
    """The interpreter is slow: plain, square, channels last, and with gaps in memory."""
    *_, images, gaps = make_params(dtype)
    generator = torch.Generator().manual_seed(1)
    plain, square = (torch.randn(shape, generator=generator).to(dtype) for shape in [(9, 5), (8, 8)])
    return [nn.Parameter(plain), nn.Parameter(square), images, gaps]


def other_layout(params):
    params[2].data = params[2].data.contiguous()
    params[0].data = params[0].data.t().contiguous().t()


def double_and_back(params):
    module = nn.ParameterList(params)
    module.double().float()


def vector_to_parameters(params):
    params = [param for param in params if param.is_contiguous()]  # torch's function takes no others
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(params) * 2.0, params)


def with_gaps(params):
    params[0].data = torch.stack([params[0].data, params[0].data], dim=-1)[..., 0]


def transposed_in_place(params):
    params[1].data = params[1].data.t()  # same address, other strides


def clamped(params):
    for param in params:
        param.data.clamp_(-0.5, 0.25)


def scaled(params):
    for param in params:
        param.data.mul_(1.5)


CHANGES = [other_layout, double_and_back, vector_to_parameters, with_gaps, transposed_in_place, clamped, scaled]


@inside
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize(("kind", "dtype"), [(LARS, torch.float32), (LARS, torch.float16), (LAMB, torch.float16)])
def test_it_follows_parameters_that_others_move_or_write(change, kind, dtype):
    """`.data` has a version of its own, so neither shows there."""
    if dtype == torch.float16 and change is double_and_back:
        pytest.skip("ends in fp32")
    outcomes = []
    for path in ({"fused": True}, {"foreach": False}):
        params = few_params(dtype)
        options = {"momentum_rule": "rescaled"} if kind is LARS else {}
        optimizer = kind(params, lr=0.2, weight_decay=1e-2, **options, **path)
        for step in range(3):
            set_grads(params, step)
            optimizer.step()
            if step == 0:
                for param in params:
                    param.grad = None
                change(params)
        outcomes.append((params, [optimizer.state[p].get("master", p) for p in params], optimizer.layer_norms()["0.0"]))
    (params, weights, norms), (expected, expected_weights, expected_norms) = outcomes
    for a, b in zip(weights, expected_weights, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
    for a, b, weight in zip(params, expected, weights, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, weight.to(dtype), rtol=0, atol=0)
    assert norms == pytest.approx(expected_norms, rel=1e-5)


@inside
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_edit_of_16_bit_weights_stays(dtype):
    params = few_params(dtype)
    optimizer = LARS(params, lr=0.2, momentum_rule="lr_outside", fused=True)
    set_grads(params, 0)
    optimizer.step()
    before = [(p.detach().clone(), optimizer.state[p]["master"].clone()) for p in params]
    clamped(params)
    edited = [p.detach().clone() for p in params]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for param, value, (weight, master) in zip(params, edited, before, strict=True):
        assert torch.equal(param, value)
        expected = torch.where(weight == value, master, value.float())  # what was not edited keeps its digits
        assert torch.equal(optimizer.state[param]["master"], expected)


@inside
@pytest.mark.parametrize("in_arena", [False, True])
def test_replaced_state_counts(in_arena):
    outcomes = []
    for path in ({"fused": True}, {"foreach": False}):
        model = nn.ParameterList(few_params(torch.float32))
        arena = Arena(model, [name for name, _ in model.named_parameters()]) if in_arena else None
        optimizer = LARS(model, lr=0.2, momentum_rule="rescaled", arena=arena, **path)
        for step in range(2):
            set_grads(model, step)
            if arena is not None:
                arena.collect()
            optimizer.step()
            if step == 0:
                home = optimizer.state[model[0]]["momentum_buffer"]
                optimizer.state[model[0]]["momentum_buffer"] = torch.ones(9, 5, dtype=torch.float64)
                optimizer.state[model[1]] = {"momentum_buffer": torch.ones(8, 8)}
                optimizer.param_groups[0]["last_lr"] = 0.1
        outcomes.append([p.detach().clone() for p in model])
        assert arena is None or optimizer.state[model[0]]["momentum_buffer"] is home
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


SETTINGS = [
    {"nesterov": True},
    {"trust_clip": True, "trust_coefficient": 10.0},
    {"momentum_rule": "rescaled"},
    {"momentum_rule": "unscaled"},
    {"adapt": False},
    {"maximize": True},
    {"decoupled_weight_decay": True},
    {"eps": 100.0, "momentum": 0.5},
]


@inside
@pytest.mark.parametrize(
    ("settings", "by_loading"), [*((x, False) for x in SETTINGS), (SETTINGS[0], True), (SETTINGS[2], True)], ids=str
)
def test_settings_may_change_between_steps(settings, by_loading):
    outcomes = []
    for path in ({"fused": True}, {"foreach": False}):
        params = few_params(torch.float32)
        groups = [{"params": params[:2]}, {"params": params[2:], "adapt": False, "weight_decay": 0.0}]
        optimizer = LARS(groups, lr=0.2, weight_decay=1e-2, **path)
        set_grads(params, 0)
        optimizer.step()
        saved = optimizer.state_dict()
        for group in saved["param_groups"] if by_loading else optimizer.param_groups:
            group.update(settings)
        if by_loading:
            optimizer.load_state_dict(saved)
        for step in (1, 2):
            set_grads(params, step)
            optimizer.param_groups[0]["lr"] = 0.1 * step
            optimizer.step()
        outcomes.append(params)
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-6, atol=5e-6)


@inside
def test_what_a_graph_relies_on_may_not_change(monkeypatch):
    """The interpreter captures nothing; it stands in for a capture here."""
    from hyperbatch.optim import fused

    def captured():
        params = few_params(torch.float32)
        optimizer = LARS(params, lr=0.2, capturable=True, fused=True)
        set_grads(params, 0)
        optimizer.step()
        with monkeypatch.context() as patch:
            patch.setattr(fused, "capturing", lambda device: True)
            optimizer.step()
        optimizer.step()
        return params, optimizer

    params, optimizer = captured()
    optimizer.param_groups[0]["nesterov"] = True
    with pytest.raises(RuntimeError, match=r"settings .* after a CUDA graph captured"):
        optimizer.step()
    params, optimizer = captured()
    address = params[1].data_ptr()
    params[1].data = params[1].data.clone()
    for use in (optimizer.step, optimizer.refresh):
        with pytest.raises(RuntimeError, match="moved after a CUDA graph captured"):
            use()
    assert any(held.data_ptr() == address for held in optimizer._fused_step._captured)  # the graph still writes there


@inside
def test_rates_may_be_tensors_of_one_element_anywhere():
    outcomes = []
    for rate in (0.3, torch.tensor([[0.3]]), torch.tensor(0.3, dtype=torch.float64), torch.tensor([0.3])):
        params = few_params(torch.float32)
        set_grads(params, 0)
        LARS(params, lr=rate, weight_decay=rate, fused=True).step()
        outcomes.append(params)
    for params in outcomes[1:]:
        for a, b in zip(params, outcomes[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@inside
def test_a_sparse_gradient_is_named():
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = LARS(table.named_parameters(), lr=0.1, fused=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="the gradient of weight is sparse"):
        optimizer.step()


@inside
def test_untouched_parameters_and_groups_with_other_flags():
    params, plain = make_params(torch.float32), make_params(torch.float32)
    optimizers = []
    for group, path in ((params, {"fused": True}), (plain, {"foreach": False})):
        set_grads(group, 0)
        group[1].grad = None
        groups = [
            {"params": group[:2], "nesterov": True},
            {"params": group[2:4]},
            {"params": group[4:], "nesterov": True},
        ]
        optimizers.append(LARS(groups, lr=0.3, weight_decay=0.1, **path))
        optimizers[-1].step()
    assert torch.equal(params[1], make_params(torch.float32)[1])
    for a, b in zip(params, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


@inside
@pytest.mark.parametrize(("kind", "dtype"), [(LARS, torch.bfloat16), (LAMB, torch.float16)])
def test_over_an_arena_with_both_precisions(kind, dtype):
    outcomes = []
    for path in ({"fused": True}, {"foreach": False}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50), nn.Linear(50, 3))
        arena = Arena(model, [name for name, _ in model.named_parameters()][::-1], dtype=dtype)
        rate = 0.5 if kind is LARS else 0.01
        optimizer = kind(model.named_parameters(), lr=rate, weight_decay=1e-2, arena=arena, **path)
        for _ in range(2):
            arena.zero_grad()
            model(torch.ones(4, 40).to(dtype) * torch.arange(4).to(dtype)[:, None]).float().pow(2).sum().backward()
            optimizer.step()
        outcomes.append([*arena.named_masters().values(), *model.parameters()])
        for buffer in (*arena.flat_weights(), *arena.grads.values()):
            assert torch.isfinite(buffer).all()
    for a, b in zip(*outcomes, strict=True):
        # One rounding of a bf16 weight may go the other way, and backward carries it on.
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4)


@inside
@pytest.mark.parametrize(("kind", "adapt"), [(LARS, True), (LAMB, True), (LAMB, False)])
def test_rates_by_layer_take_two_launches_and_agree_with_float64(kind, adapt, monkeypatch):
    """A group for each depth and kind, as layer-wise rate decay makes them, over an arena."""
    launches = []
    for name in ("norms_kernel", "update_kernel"):
        kernel = getattr(fused_kernels, name)
        counted = type("Counted", (), {"__getitem__": lambda _, grid, k=kernel, n=name: launches.append(n) or k[grid]})
        monkeypatch.setattr(fused_kernels, name, counted())
    outcomes = []
    for dtype, path in ((torch.float32, {"fused": True}), (torch.float64, {"foreach": False})):
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(20, 20), nn.LayerNorm(20)))).to(dtype)
        arena = Arena(model, [name for name, _ in model.named_parameters()][::-1], dtype=dtype)
        groups = param_groups(model, 0.05, layer_decay=0.5, lr=0.1)
        assert len(groups) == 8
        groups = [{**group, "adapt": group["adapt"] and adapt} for group in groups]
        optimizer = kind(groups, lr=0.1, arena=arena, **path)
        for step in range(3):
            arena.zero_grad()
            for i, param in enumerate(model.parameters()):
                values = torch.sin(torch.arange(param.numel(), dtype=torch.float64) * (i + step + 1))
                (param * values.view(param.shape).to(dtype)).sum().backward()
            optimizer.step()
        outcomes.append([param.detach().double() for param in model.parameters()])
    assert launches == ["norms_kernel", "update_kernel"] * 3
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-6, atol=3e-7)


# --- LAMB -----------------------------------------------------------------------------------------------------------


@inside
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"betas": (0.0, 0.5), "trust_clip": True, "eps": 1e-3}),
        (torch.float16, {"betas": (0.8, 0.95)}),
        (torch.bfloat16, {"trust_clip": True}),
    ],
    ids=str,
)
def test_fused_lamb_agrees_with_the_reference(dtype, options):
    scale = None if dtype == torch.float32 else 128.0
    fused, params, optimizer = run({"fused": True}, dtype, steps=3, scale=scale, kind=LAMB, **options)
    reference, others, other = run({"foreach": False}, dtype, steps=3, scale=scale, kind=LAMB, **options)
    for a, b in zip(fused, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-6, atol=5e-6)
    for a, b in zip(params, others, strict=True):
        for key in LAMB.state_names:
            torch.testing.assert_close(optimizer.state[a][key], other.state[b][key], rtol=2e-6, atol=1e-7)
    measured, expected = optimizer.layer_norms(), other.layer_norms()
    assert measured.keys() == expected.keys()
    for name in ("0.0", "0.1", "0.2", "1.1"):
        assert measured[name] == pytest.approx(expected[name], rel=1e-5), name
    assert [float(group["step"]) for group in optimizer.param_groups] == [3.0, 3.0]


@inside
def test_fused_lamb_skips_bad_steps_and_counts_those_of_each_group():
    params = few_params(torch.float16)
    optimizer = LAMB([{"params": params[:2]}, {"params": params[2:]}], lr=0.1, fused=True, capturable=True)
    set_grads(params, 0)
    before = [p.detach().clone() for p in params]
    params[1].grad[0, 0] = torch.inf  # in the very first step, which must leave no trace in state or counts
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    assert not any(optimizer.state[p][key].any() for p in params for key in LAMB.state_names)
    assert (optimizer.last_found_inf, optimizer.skipped_steps) == (1, 1)
    set_grads(params, 1)
    optimizer.found_inf = torch.ones(1)  # GradScaler has seen one
    optimizer.step()
    del optimizer.found_inf
    assert optimizer.skipped_steps == 2
    for step, used in ((2, params), (3, params[:2])):
        set_grads(params, step)
        for param in params:
            param.grad = param.grad if any(param is one for one in used) else None
        optimizer.step()
    assert [float(group["step"]) for group in optimizer.param_groups] == [2.0, 1.0]
    assert optimizer.skipped_steps == 2


@inside
def test_state_of_fused_lamb_serves_the_other_paths():
    outcomes = []
    for first, then in (({"fused": True}, {"foreach": False}), ({"foreach": False}, {"fused": True})):
        params = few_params(torch.float16)
        optimizer = LAMB(params, lr=0.1, **first)
        set_grads(params, 0)
        optimizer.step()
        other = LAMB(params, lr=0.1, **then)
        other.load_state_dict(optimizer.state_dict())
        set_grads(params, 1)
        other.step()
        assert float(other.param_groups[0]["step"]) == 2.0
        outcomes.append([other.state[p]["master"] for p in params])
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-6, atol=5e-6)
