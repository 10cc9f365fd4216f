"""The arena's contract: views, order, alignment, what happens when others touch the model."""

from __future__ import annotations

import copy
import gc
import io

import pytest
import torch
from torch import nn

from hyperbatch.arena import ALIGN_BYTES, Arena
from hyperbatch.params import backward_order


class Net(nn.Module):
    """Channels-last convolutions, batch norm with buffers, dropout, tied, frozen and unused parameters."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 5, 3)
        self.bn = nn.BatchNorm2d(5)
        self.conv2 = nn.Conv2d(5, 7, 3, bias=False)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(7, 7)
        self.tied = nn.Linear(7, 7, bias=False)
        self.tied.weight = self.fc.weight
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        x = torch.relu(self.bn(self.conv1(x)))
        x = self.conv2(x).mean((2, 3))
        return self.frozen(self.tied(self.fc(self.drop(x))))


def images(dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(4, 3, 8, 8, generator=generator).to(dtype)


def build(dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = Net()
    order = backward_order(model, lambda: model(images()).sum().backward())
    return model, Arena(model, order, dtype=dtype, **options)


def test_the_probe_finds_the_order_and_leaves_no_trace():
    torch.manual_seed(0)
    model = Net()
    before = copy.deepcopy(model.state_dict())
    rng = torch.get_rng_state()
    order = backward_order(model, lambda: model(images()).sum().backward())
    assert order == [
        "fc.bias",
        "fc.weight",
        "conv2.weight",
        "bn.weight",
        "bn.bias",
        "conv1.weight",
        "conv1.bias",
        "unused.weight",
        "unused.bias",
    ]
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())


def test_a_failing_probe_leaves_no_trace_either():
    model = Net()
    before = copy.deepcopy(model.state_dict())

    def fail():
        model(images())
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        backward_order(model, fail)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.fc.weight._post_accumulate_grad_hooks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_parameters_become_aligned_views_with_their_own_layout(dtype):
    reference = Net()
    model, arena = build(dtype)
    for slot in arena.slots:
        assert slot.param.data_ptr() == arena.weights[slot.dtype][slot.offset :].data_ptr()
        assert slot.offset * slot.dtype.itemsize % ALIGN_BYTES == 0
        assert slot.param.dtype == slot.dtype
        assert slot.param.stride() == reference.get_parameter(slot.name).stride()
    assert model.tied.weight is model.fc.weight
    assert model.conv2.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.bn.weight.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert model.frozen.weight.dtype == dtype
    assert [spec.name for spec in arena.specs] == [slot.name for slot in arena.slots]
    assert {spec.kind for spec in arena.specs} == {"weight", "bias", "norm"}


def test_biases_stay_fp32_where_the_module_takes_them_so():
    class Linear(nn.Linear):
        takes_fp32_parameters = True

    model = nn.Sequential(Linear(3, 3), nn.Linear(3, 3))
    arena = Arena(model, ["1.weight", "1.bias", "0.weight", "0.bias"], dtype=torch.bfloat16)
    assert {slot.name: slot.dtype for slot in arena.slots} == {
        "1.weight": torch.bfloat16,
        "1.bias": torch.bfloat16,
        "0.weight": torch.bfloat16,
        "0.bias": torch.float32,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_land_in_the_arena_and_equal_plain_autograd(dtype):
    model, arena = build(dtype)
    model.drop.p = 0.0
    plain = copy.deepcopy(model)
    arena.zero_grad()
    for _ in range(2):  # two micro-steps accumulate
        model(images(dtype)).sum().backward()
        plain(images(dtype)).sum().backward()
    for slot in arena.slots:
        expected = plain.get_parameter(slot.name).grad
        if slot.name.startswith("unused"):
            assert slot.param.grad is None  # optimizers skip it
            assert expected is None
            assert not arena.slice_of([slot.name], arena.grads).any()
        else:
            assert slot.param.grad.data_ptr() == arena.grad_view(slot.name).data_ptr()
            assert torch.equal(slot.param.grad, expected)
            assert torch.equal(arena.views(arena.grads)[slot.name], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_model_that_was_cast_as_a_whole_trains(dtype):
    """Batch norm keeps fp32 parameters in 16 bits, and torch takes no 16-bit statistics beside them."""
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5)).bfloat16()
    Arena(model, [name for name, _ in model.named_parameters()], dtype=dtype)
    model(images(dtype)).sum().backward()
    assert model[1].running_mean.dtype == model[1].weight.dtype
    assert model[1].weight.dtype == (dtype if dtype == torch.float64 else torch.float32)


def test_padding_stays_zero():
    model, arena = build()
    arena.zero_grad()
    model(images()).sum().backward()
    for buffers in (arena.weights, arena.grads):
        used = torch.zeros_like(buffers[torch.float32], dtype=torch.bool)
        for slot in arena.slots:
            used[slot.offset : slot.offset + slot.numel] = True
        assert not buffers[torch.float32][~used].any()


def test_zero_grad_forgets_the_last_step():
    model, arena = build()
    arena.zero_grad()
    model(images()).sum().backward()
    arena.zero_grad()
    assert all(slot.param.grad is None for slot in arena.slots)
    arena.collect()
    assert all(slot.param.grad is None for slot in arena.slots)
    assert all(not buffer.any() for buffer in arena.grads.values())


@pytest.mark.parametrize("copy_on_ready", [False, True])
def test_an_old_gradient_reaches_nobody(copy_on_ready):
    """Not the next gradient in its place, and after `collect` not those who read the buffers, where none came."""
    model, arena = build(copy_on_ready=copy_on_ready)
    plain = copy.deepcopy(model)
    for slot in arena.slots:
        arena.grad_view(slot.name).fill_(torch.nan)  # as after a step that was skipped
    arena.zero_grad()
    for _ in range(2):
        for net in (model, plain):
            net.fc(torch.ones(2, 7)).sum().backward()  # the rest of the model is idle
    arena.collect(["fc.weight", "fc.bias"])
    assert torch.equal(arena.grad_view("fc.weight"), plain.fc.weight.grad)
    assert torch.equal(model.fc.bias.grad, plain.fc.bias.grad)
    assert arena.grad_view("conv1.weight").isnan().all(), "nobody asked for it"
    arena.collect()
    fc = arena.slice_of(["fc.bias", "fc.weight"], arena.grads)
    assert fc.isfinite().all()
    assert arena.grads[torch.float32].count_nonzero() == fc.count_nonzero() > 0
    assert model.conv1.weight.grad is None


def test_collect_moves_a_whole_group_when_copies_are_left_to_it():
    model, arena = build(copy_on_ready=False)
    arena.zero_grad()
    model(images()).sum().backward()
    assert model.fc.weight.grad.data_ptr() != arena.grad_view("fc.weight").data_ptr()
    value = model.fc.weight.grad.clone()
    arena.collect(["fc.bias", "fc.weight"])
    assert model.fc.weight.grad.data_ptr() == arena.grad_view("fc.weight").data_ptr()
    assert torch.equal(arena.grad_view("fc.weight"), value)
    assert model.conv1.weight.grad.data_ptr() != arena.grad_view("conv1.weight").data_ptr()
    arena.collect()
    assert model.conv1.weight.grad.data_ptr() == arena.grad_view("conv1.weight").data_ptr()


def test_slices_hold_neighbours_only():
    _, arena = build()
    part = arena.slice_of(["fc.bias", "fc.weight", "conv2.weight"], arena.weights)
    assert part.numel() == 64 + 64 + 320  # 7, 49 and 315 elements, each padded to 64
    assert part.data_ptr() == arena.weights[torch.float32].data_ptr()
    with pytest.raises(ValueError, match=r"'fc.bias' and 'conv2.weight' are not neighbours"):
        arena.slice_of(["fc.bias", "conv2.weight"], arena.weights)
    with pytest.raises(ValueError, match="at least one"):
        arena.slice_of([], arena.weights)


def test_the_layout_is_the_same_wherever_it_is_built():
    layouts = [[(s.name, s.dtype, s.offset, s.numel) for s in build(torch.float16)[1].slots] for _ in range(2)]
    assert layouts[0] == layouts[1]


@pytest.mark.parametrize("order", [["weight"], ["weight", "bias", "bias"], ["weight", "bias", "other"]])
def test_an_order_that_does_not_fit_is_refused(order):
    with pytest.raises(ValueError, match="order must name each trainable parameter once"):
        Arena(nn.Linear(2, 2), order)


def test_loading_fills_masters_before_working_weights():
    model, arena = build(torch.float16)
    # 1 + 2^-13 is halfway into nothing for fp16: only a master can hold it.
    state = {name: torch.full_like(value.float(), 1 + 2**-13) for name, value in model.state_dict().items()}
    calls = []

    class Listener:
        def changed(self):
            calls.append(1)

    listener = Listener()
    arena.call_on_load(listener.changed)
    model.load_state_dict(state)
    for name, master in arena.named_masters().items():
        assert (master == 1 + 2**-13).all(), name
        assert (model.get_parameter(name) == 1).all()
    assert calls
    model.conv2.load_state_dict({"weight": torch.full_like(model.conv2.weight.float(), 2 + 2**-12)})
    assert (arena.named_masters()["conv2.weight"] == 2 + 2**-12).all()
    arena.load_masters({"fc.weight": torch.full((7, 7), 3 + 2**-12), "bn.running_mean": torch.zeros(5)})
    assert (arena.named_masters()["fc.weight"] == 3 + 2**-12).all()
    assert (model.fc.weight == 3).all()
    assert all(arena.holds(slot) for slot in arena.slots)


def test_assigning_on_load_is_refused():
    model, _ = build()
    with pytest.raises(RuntimeError, match="assign=True"):
        model.load_state_dict(model.state_dict(), assign=True)


def test_a_copy_of_the_model_is_on_its_own():
    model, arena = build(torch.float16)
    twin = copy.deepcopy(model)
    before = {name: value.clone() for name, value in arena.named_masters().items()}
    twin.load_state_dict({name: torch.zeros_like(value) for name, value in twin.state_dict().items()})
    assert all(torch.equal(value, before[name]) for name, value in arena.named_masters().items())
    arena.zero_grad()
    twin(images(torch.float16)).float().sum().backward()
    assert all(not buffer.any() for buffer in arena.grads.values())
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)  # plain tensors, nothing of the arena


def test_a_whole_model_can_be_pickled_without_its_arena():
    model, arena = build(torch.bfloat16)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twin = torch.load(buffer, weights_only=False)
    before = {name: value.clone() for name, value in arena.named_masters().items()}
    twin.load_state_dict({name: torch.zeros_like(value) for name, value in twin.state_dict().items()})
    assert all(torch.equal(value, before[name]) for name, value in arena.named_masters().items())
    twin(images(torch.bfloat16)).float().sum().backward()
    assert all(not grads.any() for grads in arena.grads.values())


def test_a_model_that_moved_is_taken_back_in():
    model, arena = build(torch.bfloat16)
    model(images(torch.bfloat16)).float().sum().backward()
    masters = {name: value.clone() for name, value in arena.named_masters().items()}
    for param in model.parameters():  # what .to(device) does to each parameter
        param.data = param.data.clone()
    assert not arena.holds(arena.slots[0])
    arena.zero_grad()
    assert all(arena.holds(slot) for slot in arena.slots)
    assert all(torch.equal(value, masters[name]) for name, value in arena.named_masters().items())


def test_a_model_that_moved_after_a_capture_is_an_error():
    model, arena = build()
    arena.pinned = True
    model.conv1.weight.data = model.conv1.weight.data.clone()
    with pytest.raises(RuntimeError, match="after a graph captured"):
        arena.zero_grad()


def test_a_cast_of_the_model_is_an_error_that_says_what_to_do():
    model, arena = build()
    model.double()
    with pytest.raises(RuntimeError, match=r"build a new Arena\(dtype=\.\.\.\)"):
        arena.zero_grad()


def test_an_arena_that_is_gone_leaves_the_model_usable():
    model, arena = build()
    del arena
    gc.collect()
    model(images()).sum().backward()
    model.load_state_dict(model.state_dict())
    assert model.fc.weight.grad is not None


def test_new_roles_follow_the_layout_in_full_precision():
    _, arena = build(torch.bfloat16)
    momentum = arena.new_buffers()
    assert momentum[torch.bfloat16].shape == arena.weights[torch.bfloat16].shape
    assert momentum[torch.bfloat16].dtype == torch.float32
    assert arena.views(momentum)["conv2.weight"].stride() == arena.slot("conv2.weight").param.stride()
    assert len(arena.flat_weights()) == 3  # bf16, fp32 and the masters
