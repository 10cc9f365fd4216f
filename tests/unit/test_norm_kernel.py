"""Batch norm, ReLU and the residual add in kernels, by Triton's interpreter, against float64 torch.

fp32 tensors show the arithmetic, 16-bit ones the roundings at its ends.
"""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from interpreter import inside, outside, run_by_the_interpreter

if importlib.util.find_spec("triton"):
    from gated_reference import check as check_gated
    from gated_reference import new_gate
    from hopper import before_the_wait, compile_launches, spilled_bytes
    from norm_reference import (
        FP32,
        VARIANCE,
        check,
        check_gradients,
        check_statistics,
        exact,
        forward,
        make,
        new_gradients,
        poisoned,
        wide,
    )

    from hyperbatch.kernels import norm as kernels
    from hyperbatch.kernels.norm import gated, one_pass, sums, tiles, two_pass
    from hyperbatch.models.fused_gate import Gate

# [n, c, h, w] and what is added: odd rows, one row, one image, few and many columns, several blocks of them.
CASES = [
    ((2, 16, 5, 7), "none"),
    ((1, 8, 1, 1), "norm"),
    ((3, 24, 3, 3), "norm"),
    ((1, 192, 4, 5), "none"),
    ((2, 64, 9, 9), "plain"),
    ((2, 64, 9, 9), "norm"),
    ((5, 8, 61, 13), "none"),
    ((5, 8, 61, 13), "norm"),
]
MANY = 64  # processors: enough that a few hundred rows are dealt to several programs


@outside
def test_kernels_by_the_interpreter():
    run_by_the_interpreter(__file__)


@outside
def test_kernels_compiled_for_hopper_wait_before_they_read_what_may_still_be_written(monkeypatch):
    """Without a GPU. A launch comes up while the one before still runs."""
    pytest.importorskip("triton")
    compiled = compile_launches(monkeypatch, two_pass)
    monkeypatch.setattr(tiles, "overlaps", lambda: True)
    monkeypatch.setattr(one_pass, "is_small", lambda x: False)
    case, counters = make(4, 64, 28, 28, torch.float16), kernels.new_counters(torch.device("cpu"))
    grads = new_gradients(case.norm)
    loads = 64 * 64 // (4 * 32 * 8)  # of one tensor, by each thread: 16 bytes each

    _, coef = kernels.norm_relu(case.x, case.norm, counters)
    assert before_the_wait(compiled["_statistics_kernel"]) == 0
    assert before_the_wait(compiled["_normalise_kernel"]) == loads, "x alone"
    kernels.norm_relu_backward(case.dy, case.x, coef, grads, counters)
    assert before_the_wait(compiled["_reduce_kernel"]) == 0
    coefs = 2 * 8 // 4  # scale and shift of the eight columns of a thread
    assert before_the_wait(compiled["_apply_kernel"]) == 2 * loads + coefs, "x, dy and coef, which the reduction reads"
    bits = torch.zeros(case.x.numel() // 8, dtype=torch.uint8)
    halves = case.dy[:, :, ::2, ::2].contiguous(memory_format=torch.channels_last)
    for dy2 in (None, kernels.OfMeans(halves), kernels.OfBlurred(halves)):
        kernels.join_backward(case.dy, bits, [kernels.Branch(case.x, coef, grads)], counters, dy2=dy2)
        assert before_the_wait(compiled["_join_reduce_kernel"]) == 0
        assert spilled_bytes(compiled["_join_reduce_kernel"]) == 0
    assert before_the_wait(compiled["_apply_kernel"]) == loads, "x alone: the reduction makes g"


@outside
@pytest.mark.parametrize("pixels", [56, 7])
def test_gates_compile_for_hopper_without_spilling(monkeypatch, pixels):
    pytest.importorskip("triton")
    compiled = compile_launches(monkeypatch, gated, two_pass)
    case, counters = make(2, 256, pixels, pixels, torch.float16), kernels.new_counters(torch.device("cpu"))
    gate, grads = Gate(new_gate(case)), new_gradients(case.norm)
    coef, means = gated.image_statistics(case.x, case.norm, counters)
    opened = gate.open(means, coef, gate.parameters, torch.float16)
    _, bits = gated.gated_join(case.x, coef, opened.gate, case.x2, coef)
    branches = [kernels.Branch(case.x, coef, grads)] * 2
    g, _, part = gated.reduce_gated(case.dy, bits, branches, counters)
    gated.finish_gated(part, means, opened.gate, means, coef, grads, case.x)
    gated.apply_gated(g, case.x, opened.gate, means, grads.back)
    assert len(compiled) == 5
    for name, ptx in compiled.items():
        assert spilled_bytes(ptx) == 0, name
    for name in ("_gated_join_kernel", "_gated_apply_kernel"):
        assert "ld.global.v4.b32" in compiled[name]
        assert "st.global.v4.b32" in compiled[name]


@pytest.fixture
def counters():
    """Every test leaves them as it found them."""
    counters = kernels.new_counters(torch.device("cpu"))
    yield counters
    assert not (counters & 0x7FFFFFFF).any()


@pytest.fixture(params=["whole", "meeting", "two launches"])
def launches(request, monkeypatch):
    choose(monkeypatch, request.param)


def choose(monkeypatch, how):
    """One launch, of programs whose tile has all rows, which meet or not; or two."""
    if how == "two launches":
        monkeypatch.setattr(one_pass, "is_small", lambda x: False)
    monkeypatch.setattr(one_pass.Launch, "meets", how == "meeting")


@pytest.fixture
def many(monkeypatch):
    """Several programs a column block, whose partials are merged, in two launches. The interpreter runs one program
    after the other, so that of one launch none may wait for another."""
    monkeypatch.setattr(tiles, "processors", lambda: MANY)


@inside
@pytest.mark.parametrize(("size", "shortcut"), CASES, ids=str)
@pytest.mark.usefixtures("launches", "many")
def test_agrees_with_float64(size, shortcut, counters):
    check(make(*size), shortcut, counters)


@inside
def test_many_column_blocks(counters):
    check(make(1, 2048, 3, 1), "none", counters)


@inside
@pytest.mark.parametrize("shortcut", ["none", "norm"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.usefixtures("launches", "many")
def test_16_bits_are_one_rounding_away(dtype, shortcut, counters):
    check(make(3, 24, 9, 7, dtype), shortcut, counters)


@inside
@pytest.mark.usefixtures("launches")
def test_one_program_a_column_block(monkeypatch, counters):
    monkeypatch.setattr(tiles, "processors", lambda: 0)
    check(make(2, 64, 17, 9), "norm", counters)


@inside
@pytest.mark.parametrize("processors", [0, 3, MANY])
@pytest.mark.parametrize(("dtype", "far"), [(torch.float32, 1e4), (torch.float16, 500.0)], ids=["fp32", "fp16"])
def test_variances_of_means_far_from_zero(monkeypatch, counters, processors, dtype, far):
    """E[x^2] - E[x]^2 would keep no digit: 1e8 of 1."""
    monkeypatch.setattr(tiles, "processors", lambda: processors)
    case = make(3, 16, 41, 11, dtype, far=far)
    check_statistics(kernels.statistics(case.x, case.norm, counters), case, exact(case))


@inside
def test_constant_channels_have_no_variance(counters):
    case = make(2, 8, 9, 9)
    case.x.copy_(torch.full_like(case.x, 0.1))
    case.norm.eps = 0.25
    coef = kernels.statistics(case.x, case.norm, counters)
    assert torch.equal(coef[1], torch.full((8,), 2.0))


@inside
@pytest.mark.parametrize("momentum", [0.1, 0.9])
@pytest.mark.parametrize("local", [False, True])
def test_running_statistics_are_those_of_torch(momentum, local, counters):
    case = make(2, 24, 9, 7, momentum=momentum)
    reference, start = wide(case.norm), copy.deepcopy(case.norm)
    reference(case.x.double())
    coef = kernels.statistics(case.x, case.norm, counters, local=local)
    if local:  # whoever adds up the ranks takes them in
        assert torch.equal(case.norm.running_mean, start.running_mean)
        assert torch.equal(case.norm.running_var, start.running_var)
        want = exact(case)
        torch.testing.assert_close(coef[:2].double(), torch.stack([want.mean, want.var]), rtol=VARIANCE, atol=FP32)
    else:
        torch.testing.assert_close(case.norm.running_mean.double(), reference.running_mean, rtol=1e-6, atol=FP32)
        torch.testing.assert_close(case.norm.running_var.double(), reference.running_var, rtol=VARIANCE, atol=0)
    assert case.norm.num_batches_tracked == 0


@inside
def test_one_row_keeps_its_biased_variance(counters):
    """torch refuses it in training."""
    case = make(1, 8, 1, 1)
    before = case.norm.running_var.clone()
    kernels.statistics(case.x, case.norm, counters)
    torch.testing.assert_close(case.norm.running_var, 0.9 * before)


@inside
@pytest.mark.parametrize("how", ["whole", "meeting"])
@pytest.mark.usefixtures("many")
def test_one_launch_gives_the_bits_of_two(how, monkeypatch, counters):
    """The second pass reads the same coefficients, and rounds alike."""
    case = make(2, 24, 9, 7, torch.float16)
    choose(monkeypatch, how)
    y, coef = kernels.norm_relu(case.x, case.norm, counters)
    assert torch.equal(y, kernels.normalise(case.x, coef))
    coef2 = kernels.statistics(case.x2, case.norm2, counters)
    for other in (None, coef2):
        out, bits, coef = kernels.norm_join(case.x, case.norm, counters, case.x2, other)
        again, same_bits = kernels.join(case.x, coef, case.x2, other)
        assert torch.equal(out, again)
        assert torch.equal(bits, same_bits)
    grads, grads2 = new_gradients(case.norm), new_gradients(case.norm2)
    dx = kernels.norm_relu_backward(case.dy, case.x, coef, grads, counters)
    assert torch.equal(dx, kernels.apply_gradient(case.dy, case.x, coef, grads.back, relu=True))
    branches = [kernels.Branch(case.x, coef, grads), kernels.Branch(case.x2, coef2, grads2)]
    g, _, dxs = kernels.join_backward(case.dy, bits, branches, counters)
    for branch, dx in zip(branches, dxs, strict=True):
        assert torch.equal(dx, kernels.apply_gradient(g, branch.x, branch.coef, branch.grads.back, relu=False))


@inside
def test_sums_of_whole_numbers_are_the_same_bits_however_they_are_dealt(monkeypatch, counters):
    """No order of summation can show where every sum is exact: then all forms give the same bits."""
    random = torch.Generator().manual_seed(0)
    case = make(4, 16, 16, 16)
    case.x.copy_(torch.randint(-3, 4, case.x.shape, generator=random))
    case.x[2:] = -case.x[:2]  # the mean is 0, and that of each program
    case.x[:, :, 1::2] = -case.x[:, :, ::2]
    case.dy.copy_(torch.randint(-3, 4, case.x.shape, generator=random))
    results = []
    ways = [("whole", 2), ("meeting", 2), ("two launches", 0), ("two launches", 2), ("two launches", MANY)]
    for how, processors in ways:
        choose(monkeypatch, how)
        monkeypatch.setattr(tiles, "processors", lambda processors=processors: processors)
        norm, grads = copy.deepcopy(case.norm), new_gradients(case.norm)
        y, coef = kernels.norm_relu(case.x, norm, counters)
        dx = kernels.norm_relu_backward(case.dy, case.x, coef, grads, counters)
        results.append((y, coef, norm.running_var, dx, grads.back, grads.weight, grads.bias))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@inside
@pytest.mark.parametrize("shortcut", ["plain", "norm"])
@pytest.mark.usefixtures("launches", "many")
def test_a_second_part_of_the_gradient_is_added(shortcut, counters):
    case = make(2, 24, 5, 7)
    check(case, shortcut, counters, dy2=torch.randn_like(case.x) * 0.5)


@inside
@pytest.mark.parametrize("size", [(2, 24, 5, 7), (1, 8, 6, 4), (3, 16, 1, 3)], ids=str)
@pytest.mark.parametrize("shortcut", ["plain", "norm"])
@pytest.mark.parametrize("kind", ["OfMeans", "OfBlurred"])
@pytest.mark.usefixtures("launches", "many")
def test_of_the_gradient_of_half_the_size_each_pixel_takes_its_share(shortcut, size, kind, counters):
    case, random = make(*size), torch.Generator().manual_seed(1)
    n, c, h, w = size
    halves = torch.randn(n, c, (h + 1) // 2, (w + 1) // 2, generator=random).to(memory_format=torch.channels_last)
    check(case, shortcut, counters, dy2=getattr(kernels, kind)(halves))


@inside
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "norm"])
@pytest.mark.parametrize(
    "size", [(17, 8, 5, 7), (2, 192, 9, 8), (3, 24, 1, 1)], ids=str
)  # more images, rows than a tile's
def test_gates_agree_with_float64(size, plain, counters):
    check_gated(make(*size), counters, plain=plain)


@inside
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_gates_of_16_bits(dtype, counters):
    check_gated(make(3, 24, 9, 7, dtype), counters, plain=False)


@inside
def test_gates_take_a_second_part_of_the_gradient(counters):
    case = make(2, 24, 5, 7)
    halves = torch.randn(2, 24, 3, 4, generator=torch.Generator().manual_seed(1)).to(memory_format=torch.channels_last)
    for dy2 in (torch.randn_like(case.x), kernels.OfMeans(halves), kernels.OfBlurred(halves)):
        check_gated(case, counters, plain=True, dy2=dy2)


@inside
@pytest.mark.parametrize("with_second", [False, True])
@pytest.mark.usefixtures("launches", "many")
def test_a_gradient_of_means_is_read_once_per_image(with_second, counters):
    case = make(3, 16, 5, 7)
    dy = torch.randn(3, 16, generator=torch.Generator().manual_seed(1)).view(3, 16, 1, 1).expand(case.x.shape)
    check(case, "norm", counters, dy=dy, dy2=torch.randn_like(case.x) if with_second else None)


@inside
def test_a_gradient_in_another_memory_format_is_taken(counters):
    case = make(2, 16, 5, 7)
    check(case, "plain", counters, dy=case.dy.contiguous())


@inside
@pytest.mark.usefixtures("many")
def test_a_sum_without_norms_at_hand_gives_its_gradient_and_sums(counters):
    case = make(2, 64, 9, 7)
    out, bits, *_ = forward(case, "plain", counters)
    with poisoned():
        g, sums, dxs = kernels.join_backward(case.dy, bits, [], counters)
    assert torch.equal(g, torch.where(out > 0, case.dy, 0.0))
    assert dxs == []
    torch.testing.assert_close(sums.double(), g.double().sum((0, 2, 3)), rtol=1e-5, atol=1e-5)


@inside
def test_local_sums_leave_the_rest_to_who_adds_up_the_ranks(counters):
    case = make(2, 16, 5, 7)
    want = exact(case)
    coef = kernels.statistics(case.x, case.norm, counters)
    grads = new_gradients(case.norm, local=True)
    kernels.reduce_gradient(case.dy, case.x, coef, grads, counters)
    check_gradients(None, grads, case, want)
    assert grads.back.isnan().all()
    joined = [new_gradients(norm, local=True) for norm in (case.norm, case.norm2)]
    _, bits, coef, coef2 = forward(case, "norm", counters)
    branches = [kernels.Branch(case.x, coef, joined[0]), kernels.Branch(case.x2, coef2, joined[1])]
    kernels.reduce_joined_gradient(case.dy, bits, branches, counters)
    want = exact(case, "norm")
    for i, grads in enumerate(joined):
        check_gradients(None, grads, case, want, i)
        assert grads.back.isnan().all()
    with pytest.raises(AssertionError):
        kernels.join_backward(case.dy, bits, branches, counters)
    with pytest.raises(AssertionError):
        kernels.norm_relu_backward(case.dy, case.x, coef, joined[0], counters)


@inside
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.usefixtures("launches")
def test_a_nan_reaches_the_output_of_its_channel_alone(value, counters):
    case = make(2, 16, 5, 7, torch.float16)
    case.x[1, 3, 2, 2] = value
    for out in (forward(case, "none", counters)[0], forward(case, "plain", counters)[0]):
        assert out[:, 3].isnan().any()
        assert out[:, [i for i in range(16) if i != 3]].isfinite().all()


@inside
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("launches")
def test_an_overflowed_gradient_is_seen(counters):
    """A loss scaler looks for it."""
    case = make(2, 16, 5, 7, torch.float16)
    out, bits, coef, coef2 = forward(case, "norm", counters)
    at = (out[:, 3] > 0).nonzero()[0].tolist()
    case.dy[at[0], 3, at[1], at[2]] = float("inf")
    grads, grads2 = new_gradients(case.norm), new_gradients(case.norm2)
    branches = [kernels.Branch(case.x, coef, grads), kernels.Branch(case.x2, coef2, grads2)]
    _, _, dxs = kernels.join_backward(case.dy, bits, branches, counters)
    for dx, of_norm in zip(dxs, (grads, grads2), strict=True):
        assert not of_norm.weight[3].isfinite()
        assert not of_norm.bias[3].isfinite()
        assert not dx[:, 3].isfinite().any()
        assert dx[:, 4:].isfinite().all()


@inside
def test_a_zero_weight_passes_no_gradient_down_but_learns(counters):
    """As the last norm of a block starts."""
    case = make(2, 16, 5, 7)
    with torch.no_grad():
        case.norm.weight.zero_()
    check(case, "plain", counters)
    _, bits, coef, _ = forward(case, "plain", counters)
    grads = new_gradients(case.norm)
    _, _, (dx,) = kernels.join_backward(case.dy, bits, [kernels.Branch(case.x, coef, grads)], counters)
    assert not dx.any()
    assert grads.weight.abs().min() > 0


@inside
@pytest.mark.parametrize("c", [8, 24, 64, 192, 2048, 2112])
@pytest.mark.parametrize("m", [1, 2, 63, 4097, 12544])
def test_tilings_cover_every_row_once(monkeypatch, m, c):
    monkeypatch.setattr(tiles, "processors", lambda: 132)
    for tiling in (tiles.streaming(m, c), tiles.reducing(m, c)):
        assert c % tiling.columns == 0
        assert tiling.columns & (tiling.columns - 1) == 0
        assert tiling.columns % 8 == 0, "bits of eight columns are a byte"
        assert c // tiling.columns <= sums.COLUMN_BLOCKS.value
        assert tiling.programs * tiling.rows_per_program >= m
        assert (tiling.programs - 1) * tiling.rows_per_program < m, "a program without rows would divide by 0"
        assert tiling.rows_per_program % tiling.rows == 0


@inside
@pytest.mark.parametrize("c", [8, 24, 64, 192, 2048, 2112])
@pytest.mark.parametrize("m", [1, 2, 63, 1024, 1025, 8232])
def test_tiles_of_one_launch_cover_every_row_once_and_run_at_once(monkeypatch, m, c):
    monkeypatch.setattr(one_pass, "processors", lambda: 132)
    monkeypatch.setattr(one_pass, "interpreted", lambda: False)
    launch = one_pass.Launch.of(m, c)
    assert launch.columns * launch.width == c
    assert launch.width % 8 == 0, "bits of eight columns are a byte"
    assert (launch.programs - 1) * launch.rows < m <= launch.programs * launch.rows
    assert launch.meets == (m > 1024)
    if launch.meets and launch.fits:
        assert launch.columns <= sums.COLUMN_BLOCKS.value
        assert launch.columns * launch.programs <= 2 * 132
        assert launch.options["num_warps"] <= 4, "two of them run on a processor, whatever registers they take"
    assert launch.fits or launch.columns * launch.programs > 2 * 132 or launch.columns > 64


@inside
@pytest.mark.parametrize(
    ("ranks", "told", "left"), [(1, None, 0), (8, None, 64), (8, 32, 32), (8, 200, 132), (1, 0, 0)]
)
def test_programs_that_meet_leave_processors_to_nccl(monkeypatch, ranks, told, left):
    """An all-reduce that holds them may wait for a rank that waits for us."""
    monkeypatch.setattr(one_pass, "processors", lambda: 132)
    monkeypatch.setattr(one_pass, "interpreted", lambda: False)
    monkeypatch.setattr(one_pass.dist, "is_initialized", lambda: ranks > 1)
    monkeypatch.setattr(one_pass.dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(one_pass.kernels, "processors_left", None)
    one_pass.kernels.leave_processors(told)
    assert one_pass._at_once() == 2 * (132 - left)
