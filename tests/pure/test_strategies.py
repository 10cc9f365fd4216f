"""Group plans: every strategy covers each parameter once, in backward order; the published groupings come out."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperbatch.errors import InputError
from hyperbatch.plan.inventory import tensors
from hyperbatch.plan.strategies import plan_groups
from hyperbatch.plan.types import GroupPlan, TensorSpec, param_specs

GREEDY = ("single", "per_layer", "threshold", "equal", "cubic")


def spec(name: str, numel: int = 1, dtype: str = "float32", kind: str = "weight") -> TensorSpec:
    return TensorSpec(name=name, shape=(numel,), dtype=dtype, kind=kind)


def sizes(plan: GroupPlan) -> list[int]:
    return [len(group.parameters) for group in plan.groups]


def test_cubic_gives_fujitsus_groups_of_resnet50() -> None:
    plan = plan_groups(tensors("resnet50"), "cubic")
    assert sizes(plan) == [3, 21, 57, 80]
    # The published sizes are in 16 bits: half of these, and a hundredth of a MB of rounding.
    assert [round(group.bytes / 2 / 1e6, 1) for group in plan.groups] == pytest.approx([4.1, 22.0, 20.1, 4.8], abs=0.11)


def test_cubic_in_mixed_precision_sends_the_same_weights_and_fp32_last() -> None:
    single = plan_groups(tensors("resnet50"), "cubic")
    table = tensors("resnet50", dtype="float16")
    half = {t.name for t in table if t.dtype == "float16"}
    mixed = plan_groups(table, "cubic")
    assert mixed.groups[-1].dtype == "float32"
    assert set(mixed.groups[-1].parameters) == {t.name for t in table} - half
    expected = [[name for name in group.parameters if name in half] for group in single.groups]
    assert [len(names) for names in expected] == sizes(mixed)[:-1]
    assert [set(names) for names in expected] == [set(group.parameters) for group in mixed.groups[:-1]]


@pytest.mark.parametrize(("count", "expected"), [(3, [3]), (4, [3, 1]), (24, [3, 21]), (25, [3, 21, 1])])
def test_cubic_of_small_models(count: int, expected: list[int]) -> None:
    assert sizes(plan_groups([spec(f"l{i}.weight") for i in range(count)], "cubic")) == expected


def test_single_is_one_group_of_each_precision() -> None:
    assert sizes(plan_groups([spec("a"), spec("b")], "single")) == [2]
    table = [spec("a", dtype="bfloat16"), spec("n", kind="norm"), spec("b", dtype="bfloat16")]
    assert [g.parameters for g in plan_groups(table, "single").groups] == [("a", "b"), ("n",)]


def test_per_layer_keeps_a_module_together() -> None:
    table = [spec(name) for name in ("fc.bias", "fc.weight", "b.conv.weight", "b.norm.weight", "b.norm.bias", "scale")]
    assert sizes(plan_groups(table, "per_layer")) == [2, 1, 2, 1]


def test_threshold_closes_a_group_once_it_is_full() -> None:
    table = [spec(f"{i}.weight", numel) for i, numel in enumerate([1, 2, 3, 10, 1])]
    plan = plan_groups(table, "threshold", threshold_bytes=12)
    assert [group.bytes for group in plan.groups] == [12, 12, 40, 4]


def test_equal_shares_layers_out() -> None:
    table = [spec(f"l{i}.{kind}") for i in range(10) for kind in ("bias", "weight")]
    assert sizes(plan_groups(table, "equal", count=4)) == [4, 6, 4, 6]
    assert sizes(plan_groups(table[:4], "equal", count=4)) == [2, 2], "never more groups than layers"


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.sampled_from(["float16", "float32"])), min_size=1, max_size=60),
    st.sampled_from(GREEDY),
    st.integers(1, 9),
)
def test_every_plan_covers_each_parameter_once_in_backward_order(
    table: list[tuple[int, str]], strategy: str, number: int
) -> None:
    params = [spec(f"m{i // 3}.p{i}", numel, dtype) for i, (numel, dtype) in enumerate(table)]
    plan = plan_groups(params, strategy, count=number, threshold_bytes=number * 10**5, base=number)
    plan.check_covers(params)
    assert [group.index for group in plan.groups] == list(range(len(plan.groups)))
    assert plan.bytes == sum(p.nbytes for p in params)
    dtypes = {p.name: p.dtype for p in params}
    for dtype in set(dtypes.values()):
        sent = [name for group in plan.groups if group.dtype == dtype for name in group.parameters]
        assert sent == [p.name for p in params if p.dtype == dtype]
    if len(set(dtypes.values())) == 2:
        assert [group.dtype for group in plan.groups].count("float32") == 1
        assert plan.groups[-1].dtype == "float32"
    elif strategy == "cubic":
        assert len(plan.groups) >= (2 if len(params) > number else 1)


def test_optimal_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    table = [spec("a"), spec("b")]
    asked = {}

    def optimal_groups(params, **options):
        asked.update(options)
        return plan_groups(params, "single")

    module = types.ModuleType("hyperbatch.plan.optimal")
    module.optimal_groups = optimal_groups  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hyperbatch.plan.optimal", module)
    plan_groups(table, "optimal", ready_s=[0.0, 1.0], cost=float, max_groups=3)
    assert asked == {"ready_s": [0.0, 1.0], "cost": float, "max_groups": 3}
    module.optimal_groups = lambda params, **_: plan_groups(params[:1], "single")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="missing \\['b'\\]"):
        plan_groups(table, "optimal", ready_s=[0.0, 1.0], cost=float)


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("cubik", {}, "did you mean 'cubic'"),
        ("equal", {"count": 0}, "count is 0; give a whole number of at least 1"),
        ("equal", {"groups": 3}, "has no option groups"),
        ("optimal", {}, "needs ready_s"),
    ],
)
def test_wrong_input_is_named(strategy: str, options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_groups([spec("a")], strategy, **options)


def test_nothing_to_group_is_an_error() -> None:
    with pytest.raises(InputError, match="no trainable parameters"):
        plan_groups([], "single")


def test_planning_loads_no_torch() -> None:
    code = "import sys, hyperbatch.plan.strategies; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_module_gives_the_same_plan_as_its_parameters() -> None:
    class Parameter:
        dtype = "torch.float32"

        def __init__(self, *shape: int, trained: bool = True) -> None:
            self.shape, self.requires_grad = shape, trained

    class Module:  # all that is asked of a torch.nn.Module
        def named_parameters(self):
            return {
                "a.weight": Parameter(2, 3),
                "a.frozen": Parameter(9, trained=False),
                "b.bias": Parameter(4),
            }.items()

    expected = [TensorSpec(name="b.bias", shape=(4,)), TensorSpec(name="a.weight", shape=(2, 3))]
    assert list(param_specs(Module())) == expected
    assert plan_groups(Module(), "per_layer") == plan_groups(expected, "per_layer")  # pyright: ignore[reportArgumentType]
