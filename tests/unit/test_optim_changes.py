"""What others do to an optimizer between steps: writes to weights, hooks, copies, foreign state dicts, checkpoints."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
from torch import nn

from hyperbatch.arena import Arena
from hyperbatch.errors import InputError
from hyperbatch.optim import LAMB, LARS, AdamW, Muon, base, param_groups
from hyperbatch.optim.lars import MOMENTUM_RULES

KINDS = {
    "reference": (LARS, {"foreach": False}),
    "foreach": (LARS, {"foreach": True}),
    "in place": (LARS, {}),
    "lamb reference": (LAMB, {"foreach": False}),
    "lamb foreach": (LAMB, {}),
}
every_kind = pytest.mark.parametrize(("kind", "path"), KINDS.values(), ids=KINDS)


def set_grads(params, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def make_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in [(5, 7), (9,)]]


# --- weights and state ----------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("in_arena", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_edit_of_16_bit_weights_stays(kind, path, in_arena, dtype):
    """`param.data` has a version of its own, so in-place edits of it can be told by their values only."""
    model = nn.ParameterList(make_params(dtype))
    arena = Arena(model, ["1", "0"], dtype=dtype) if in_arena else None
    optimizer = kind(model, lr=0.1, arena=arena, **path)
    set_grads(model)
    optimizer.step()
    masters = [optimizer.state[p]["master"].clone() for p in model]
    assert not any(torch.equal(m, p.float()) for m, p in zip(masters, model, strict=True))
    for param in model:
        param.data.clamp_(-0.5, 0.25)
    edited = [p.detach().clone() for p in model]
    optimizer.param_groups[0]["lr"] = 0.0
    if kind is LARS:
        for param in model:
            optimizer.state[param]["momentum_buffer"].zero_()
    optimizer.step()
    for param, value, before in zip(model, edited, masters, strict=True):
        assert torch.equal(param, value)
        same = before.to(dtype) == value
        assert same.any()
        assert not same.all()
        assert torch.equal(optimizer.state[param]["master"], torch.where(same, before, value.float()))


def test_refresh_takes_edits_over_without_a_step():
    """What a user of captured steps calls between replays."""
    params = make_params(torch.float16)
    optimizer = LARS(params, lr=0.1)
    set_grads(params)
    optimizer.step()
    params[0].data.fill_(3.0)
    optimizer.refresh()
    assert torch.equal(optimizer.state[params[0]]["master"], torch.full((5, 7), 3.0))


@every_kind
def test_state_put_beside_the_arena_is_taken_into_it(kind, path):
    model = nn.ParameterList(make_params())
    arena = Arena(model, ["1", "0"])
    optimizer = kind(model, lr=0.1, arena=arena, **path)
    set_grads(model)
    optimizer.step()
    key = kind.state_names[0]
    home = optimizer.state[model[0]][key]
    optimizer.state[model[0]][key] = torch.full((5, 7), 2.0)
    assert optimizer.init_state(model[0])[key] is home
    assert torch.equal(home, torch.full((5, 7), 2.0))


# --- rates ----------------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("rule", MOMENTUM_RULES)
@pytest.mark.parametrize("tensor_rate", [False, True])
def test_a_first_step_at_rate_0_leaves_weights_as_they_are(kind, path, rule, tensor_rate):
    options = {"decoupled_weight_decay": True, "momentum_rule": rule} if kind is LARS else {}
    params = make_params()
    optimizer = kind(params, lr=torch.tensor(0.0) if tensor_rate else 0.0, weight_decay=0.1, **options, **path)
    set_grads(params)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, make_params(), strict=True))


@every_kind
def test_rates_may_be_tensors_of_one_element_of_any_shape(kind, path):
    outcomes = []
    for shape in (None, (), (1,), (1, 1)):
        params = make_params(torch.float64)
        rate = 0.25 if shape is None else torch.full(shape, 0.25)
        optimizer = kind(params, lr=rate, weight_decay=rate, **path)
        for seed in range(2):
            set_grads(params, seed)
            optimizer.step()
        outcomes.append(params)
    for params in outcomes[1:]:
        for a, b in zip(params, outcomes[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_a_rate_of_several_elements_is_refused(kind):
    message = r"lr must be one number, but is a tensor of shape \(2,\)"
    with pytest.raises(ValueError, match=message):
        kind(None, lr=torch.tensor([0.1, 0.2]))
    params = make_params()
    optimizer = kind(params, lr=0.1)
    optimizer.param_groups[0]["lr"] = torch.tensor([0.1, 0.2])
    set_grads(params)
    with pytest.raises(ValueError, match=message):
        optimizer.step()


def test_lr_may_be_left_out_where_every_group_has_one():
    first, second = make_params()
    optimizer = LARS([{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.2}])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    with pytest.raises(ValueError, match="lr is missing: give LARS an lr"):
        LARS([{"params": [first], "lr": 0.1}, {"params": [second]}])
    with pytest.raises(ValueError, match="lr is missing"):
        LARS([first])


# --- skipped steps, as a device decides them ------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_a_step_that_the_device_skips_changes_nothing(kind, foreach, monkeypatch):
    """On a GPU nobody waits to see whether a step is bad: `skip` is a tensor, and everything is computed anyway."""
    options = {"momentum_rule": "rescaled"} if kind is LARS else {}
    params = make_params()
    optimizer = kind(params, lr=0.1, foreach=foreach, **options)
    set_grads(params)
    optimizer.step()
    group, stats = optimizer.param_groups[0], optimizer.layer_norms()
    names = kind.group_state_names
    before = copy.deepcopy(([p.detach() for p in params], optimizer.state_dict()))
    params[0].grad[0, 0] = torch.inf
    group["lr"] = 0.7
    monkeypatch.setattr(base, "read_is_free", lambda device: False)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert all(torch.equal(p, old) for p, old in zip(params, before[0], strict=True))
    for index, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[1]["state"][index][key]) for key, value in state.items())
    assert [float(group[name]) for name in names] == [float(before[1]["param_groups"][0][name]) for name in names]
    assert optimizer.layer_norms() == stats


# --- statistics -----------------------------------------------------------------------------------------------------


@every_kind
def test_layer_stats_are_copies_and_stay_in_place_inside(kind, path):
    """A captured step writes where it wrote when it was captured; what a reader holds must not change under him."""
    params = make_params()
    optimizer = kind(params, lr=0.1, **path)
    set_grads(params, 0)
    optimizer.step()
    inside, (held,) = optimizer._stats[0].trust, optimizer.layer_stats()
    expected = held.grad_norms.tolist()
    set_grads(params, 1)
    optimizer.step()
    assert held.grad_norms.tolist() == expected
    assert optimizer._stats[0].trust.data_ptr() == inside.data_ptr()
    assert optimizer.layer_stats()[0].grad_norms.tolist() != expected


@every_kind
def test_statistics_of_changing_sets_of_layers_do_not_pile_up(kind, path, monkeypatch):
    """Layers that a model skips at random (stochastic depth, experts) make a new set of them in nearly every step."""
    params = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    optimizer = kind(params, lr=0.1, **path)
    tables = []
    for step in range(1, 8):
        for i, param in enumerate(params):
            param.grad = torch.ones(2) if step >> i & 1 else None
        with monkeypatch.context() as patch:
            patch.setattr(base, "capturing", lambda device, step=step: step == 3)
            optimizer.step()
        tables.append(set(optimizer._stats_tables))
    captured = ("0.0", "0.1")
    assert tables[4] == {captured, ("0.0", "0.2")}, "replays write to the captured step's table for ever"
    assert tables[6] == {captured, ("0.0", "0.1", "0.2")}
    assert set(optimizer.layer_norms()) == {"0.0", "0.1", "0.2"}


# --- loading --------------------------------------------------------------------------------------------------------


@every_kind
def test_load_hooks_see_and_shape_what_is_loaded(kind, path):
    params = make_params()
    optimizer = kind(params, lr=0.1, **path)
    set_grads(params)
    optimizer.step()
    saved, key = copy.deepcopy(optimizer.state_dict()), kind.state_names[0]
    seen = []

    def scale(_, state_dict):
        state = {i: {k: v * 2 for k, v in values.items()} for i, values in state_dict["state"].items()}
        groups = [{**group, "lr": 0.7} for group in state_dict["param_groups"]]
        return {"state": state, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(scale)
    optimizer.register_load_state_dict_post_hook(lambda one: seen.append(one.state[params[0]][key].clone()))
    optimizer.register_load_state_dict_post_hook(lambda one: one.state.update(note=True))
    held = optimizer.state[params[0]][key]
    optimizer.load_state_dict(saved)
    assert torch.equal(held, saved["state"][0][key] * 2)
    assert torch.equal(seen[0], held)
    assert optimizer.param_groups[0]["lr"] == 0.7
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1
    optimizer.step()
    other = kind(make_params(), lr=0.1, **path)
    other.load_state_dict(optimizer.state_dict())
    assert other.state["note"] is True
    other.refresh()


@every_kind
def test_state_of_another_shape_is_refused_and_changes_nothing(kind, path):
    saved = kind([nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(5, 7))], lr=0.1, **path)
    set_grads(saved.param_groups[0]["params"])
    saved.step()
    params = make_params()
    optimizer = kind(params, lr=0.2, **path)
    with pytest.raises(ValueError, match=r"\(7,\) for parameter 0 of group 0, which has shape \(5, 7\)"):
        optimizer.load_state_dict(saved.state_dict())  # a vector of 7 would fit every row of 5 x 7
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert not optimizer.state


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_run_goes_on_from_the_state_of_torchs_sgd_and_adamw(momentum):
    sgd = {"lr": 0.1, "momentum": momentum}
    for theirs, kind, options in (
        (torch.optim.SGD(make_params(), **sgd), LARS, {"momentum_rule": "lr_outside"}),
        (torch.optim.AdamW(make_params(), lr=0.1, betas=(momentum, 0.99)), LAMB, {}),
    ):
        expected = theirs.param_groups[0]["params"]
        for step in range(5):
            set_grads(expected, step)
            theirs.step()
        params = [nn.Parameter(param.detach().clone()) for param in expected]
        optimizer = kind([{"params": params, "adapt": False}], lr=0.5, **options)
        optimizer.load_state_dict(theirs.state_dict())
        for step in range(5, 8):
            set_grads(params, step)
            set_grads(expected, step)
            optimizer.step()
            theirs.step()
        for a, b in zip(params, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_run_goes_on_from_the_state_of_torchs_muon(monkeypatch):
    """Whose buffer is an average of gradients, and ours a sum."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self)  # the dtype of its products
    params = [nn.Parameter(torch.randn(4, 6, dtype=torch.float64)) for _ in range(2)]
    theirs = torch.optim.Muon(params, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", ns_steps=3)
    for step in range(3):
        set_grads(params, step)
        theirs.step()
    copies = [nn.Parameter(param.detach().clone()) for param in params]
    optimizer = Muon(copies, lr=0.5)
    optimizer.load_state_dict(theirs.state_dict())
    for step in range(3, 6):
        for group, one in ((params, theirs), (copies, optimizer)):
            set_grads(group, step)
            one.step()
    for a, b in zip(copies, params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert not {"ns_steps", "ns_coefficients", "adjust_lr_fn"} & set(optimizer.param_groups[0])


SGD, ADAMW, PLAIN = torch.optim.SGD, torch.optim.AdamW, {"momentum": 0.9}
FOREIGN = {
    "has exp_avg, exp_avg_sq, step and not momentum_buffer: another kind of optimizer than LARS": (ADAMW, {}, LARS),
    "has momentum_buffer and not exp_avg, exp_avg_sq: another kind of optimizer than AdamW": (SGD, PLAIN, AdamW),
    "has the setting momentum_rule: another kind of optimizer than Muon": (LARS, {}, Muon),
    "has the setting adjust_lr: another kind of optimizer than LARS": (Muon, {}, LARS),
    "its momentum_buffer fits only a LARS with momentum_rule='lr_outside'": (SGD, PLAIN, LARS),
    "dampening=0.5, which Muon does not support": (SGD, {**PLAIN, "dampening": 0.5}, Muon),
    "amsgrad=True, which AdamW does not support": (ADAMW, {"amsgrad": True}, AdamW),
    "decoupled_weight_decay=False, which LAMB does not support": (torch.optim.Adam, {"weight_decay": 0.1}, LAMB),
}


@pytest.mark.parametrize("message", FOREIGN)
def test_state_that_means_something_else_is_refused(message):
    saving, options, kind = FOREIGN[message]
    saved = saving(make_params(), lr=0.1, **options)
    set_grads(saved.param_groups[0]["params"])
    saved.step()
    optimizer = kind(make_params(), lr=0.2)
    with pytest.raises(InputError) as raised:
        optimizer.load_state_dict(saved.state_dict())
    assert message in str(raised.value)
    assert "load the weights alone" in str(raised.value)
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert not optimizer.state


def test_adamw_adapts_no_group_whatever_it_loads():
    """torch's ignores the `adapt` of `param_groups`, but saves it."""
    model = nn.Linear(3, 2)
    for kind in (ADAMW, LAMB):
        saved = kind(param_groups(model, 0.1), lr=0.1)
        optimizer = AdamW(param_groups(model, 0.1))
        optimizer.load_state_dict(saved.state_dict())
        assert [group["adapt"] for group in optimizer.param_groups] == [False, False]


@every_kind
def test_group_keys_that_are_missing_stay_as_they_are(kind, path):
    """State dicts of other optimizers, and of older versions, lack some."""
    params = make_params()
    optimizer = kind([{"params": params, "adapt": False}], lr=0.1, weight_decay=0.3, **path)
    set_grads(params)
    optimizer.step()
    optimizer.load_state_dict(torch.optim.SGD(make_params(), lr=0.5, weight_decay=0.2).state_dict())
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["base_weight_decay"], group["adapt"]) == (0.5, 0.2, 0.2, False)
    assert all(float(group[name]) == 0.0 for name in kind.group_state_names)
    assert not any(value.any() for state in optimizer.state.values() for value in state.values())
    optimizer.step()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})


@pytest.mark.parametrize("model_first", [True, False])
def test_masters_survive_loading_in_either_order(model_first):
    model = nn.Linear(4, 3).bfloat16()
    optimizer = LARS(model.parameters(), lr=0.3)
    set_grads(model.parameters())
    optimizer.step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other = nn.Linear(4, 3).bfloat16()
    resumed = LARS(other.parameters(), lr=0.3)
    for one in (other.load_state_dict, resumed.load_state_dict)[:: 1 if model_first else -1]:
        one(saved[0] if one == other.load_state_dict else saved[1])
    for a, b in ((model, optimizer), (other, resumed)):
        set_grads(a.parameters(), 1)
        b.step()
    assert torch.equal(optimizer.state[model.weight]["master"], resumed.state[other.weight]["master"])


@pytest.mark.parametrize("by", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize(
    "options", [{"foreach": False}, {"foreach": True}, {"fused": False}, {"capturable": True}], ids=str
)
def test_copies_take_the_same_path(by, options):
    params = make_params()
    optimizer = LARS(params, lr=0.1, momentum_rule="rescaled", **options)
    set_grads(params)
    optimizer.step()
    if by == "deepcopy":
        other = copy.deepcopy(optimizer)
    elif by == "pickle":
        other = pickle.loads(pickle.dumps(optimizer))
    else:
        file = io.BytesIO()
        torch.save(optimizer, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    names = ("foreach", "fused", "_capturable")
    assert [getattr(other, name) for name in names] == [getattr(optimizer, name) for name in names]
    copies = other.param_groups[0]["params"]
    for group, one in ((params, optimizer), (copies, other)):
        set_grads(group, 1)
        one.step()
    assert all(torch.equal(a, b) for a, b in zip(params, copies, strict=True))


@every_kind
def test_distributed_checkpoints_prime_an_optimizer_without_moving_weights(kind, path):
    """torch.distributed.checkpoint makes empty state by a step at rate 0 with gradients of zero."""
    torch.manual_seed(0)
    options = {"decoupled_weight_decay": True, "momentum_rule": "rescaled"} if kind is LARS else {}

    def build():
        model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
        return model, kind(param_groups(model, 0.1), lr=0.2, **options, **path)

    def step(model, optimizer, seed):
        set_grads(model.parameters(), seed)
        optimizer.step()

    model, optimizer = build()
    before = copy.deepcopy(model.state_dict())
    dcp.get_optimizer_state_dict(model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.2]
    for seed in range(2):
        step(model, optimizer, seed)
    saved = copy.deepcopy(dcp.get_state_dict(model, optimizer))
    other, resumed = build()
    dcp.set_state_dict(other, resumed, model_state_dict=saved[0], optim_state_dict=saved[1])
    for one, its in ((model, optimizer), (other, resumed)):
        step(one, its, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


# --- groups added later ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LARS, AdamW])
def test_groups_with_and_without_names_may_be_mixed(kind):
    """torch takes only all or none: whoever unfreezes layers with its usual line would be refused."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = kind(param_groups(model[2], 0.1), lr=0.1)
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.01})
    optimizer.add_param_group({"params": model[0].weight})
    assert [group["param_names"] for group in optimizer.param_groups] == [["weight"], ["bias"], ["2.0", "2.1"], ["3.0"]]
    optimizer.add_param_group({"params": []})
    unnamed = kind([model[2].weight], lr=0.1)
    unnamed.add_param_group({"params": model[1].named_parameters()})
    assert [group["param_names"] for group in unnamed.param_groups] == [["0.0"], ["weight", "bias"]]
    for one in (optimizer, unnamed):
        before = model[1].weight.clone()
        set_grads(model.parameters())
        one.step()
        assert not torch.equal(model[1].weight, before)
        one.load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": model[1].parameters()})
    with pytest.raises(TypeError, match="ordered collections"):
        optimizer.add_param_group({"params": set(model[0].parameters())})


def test_layers_of_the_same_name_have_statistics_of_their_own():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = LARS(param_groups(model[1], 0.1), lr=0.1)
    for group in param_groups(model[0], 0.1):  # gradual unfreezing
        optimizer.add_param_group(group)
    set_grads(model.parameters())
    with torch.no_grad():
        model[0].weight.mul_(5)
    norms = [model[1].weight.norm().item(), model[0].weight.norm().item()]
    optimizer.step()
    rows = optimizer.layer_norms()
    assert list(rows) == ["weight", "bias", "2.weight", "3.bias"]
    assert [rows["weight"][0], rows["2.weight"][0]] == pytest.approx(norms)


# --- sparse gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy_on_ready", [True, False])
def test_a_sparse_gradient_in_an_arena_is_named(copy_on_ready):
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    arena = Arena(model, ["0.weight"], copy_on_ready=copy_on_ready)
    optimizer = LARS(model.parameters(), lr=0.1, arena=arena)

    def step():
        model(torch.tensor([1])).sum().backward()
        optimizer.step()

    with pytest.raises(ValueError, match=r"the gradient of 0\.weight is sparse"):
        step()
