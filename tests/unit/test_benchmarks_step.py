"""What `benchmarks.step` adds to `bench step`: memory traffic, and first steps in processes of their own."""

import pytest
import torch

from benchmarks import comm, first_step, reality, step
from benchmarks.step import RUNG_OF, format_report, with_first_steps, with_traffic
from benchmarks.traffic import RUNGS, step_bytes
from hyperbatch.bench import step_runs
from hyperbatch.bench.step import bench_step, reference_path
from hyperbatch.errors import RunFailed

TINY = step_runs.Setting(model="resnet8", precision="fp32", image_size=8, classes=4, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def report():
    return bench_step("resnet8", batch=(2,), rounds=1, image_size=32, device="cpu")


def test_every_16_bit_candidate_of_a_gpu_has_a_rung(monkeypatch):
    monkeypatch.setattr(step_runs, "_can_fuse", lambda setting: True)
    gpu = step_runs.Setting(
        model="resnet50", precision="fp16", image_size=224, classes=1000, device=torch.device("cuda")
    )
    specs = [*step_runs.our_specs(gpu), *step_runs.peer_specs(), reference_path(gpu)[0][0]]
    assert {spec.name for spec in specs} == set(RUNG_OF)
    assert set(RUNG_OF.values()) <= set(RUNGS)


def test_traffic_is_held_against_the_copy_bandwidth(report):
    made = with_traffic(report, bandwidth=4.2e12)
    plain, eager = made["rows"]
    assert plain["rung"] is None, "in fp32 the model does not know the step"
    assert eager["rung"] == "unfused"
    moved = step_bytes("resnet8", "unfused", 2, image_size=32, classes=10)
    assert eager["model_bytes_per_s"] == pytest.approx(moved / (eager["ms_per_step"] / 1e3))
    assert eager["copy_share"] == pytest.approx(eager["model_bytes_per_s"] / 4.2e12)
    assert [row["rung"] for row in made["traffic"]] == list(RUNGS)
    for row in made["traffic"]:
        assert row["roof_images_per_s"] == pytest.approx(4.2e12 / row["bytes_per_image"]["total"])


def test_the_text_has_the_roofs_and_the_first_steps(report):
    made = with_traffic(report, bandwidth=4.2e12)
    rows = [row | {"first_step_s": 4.5, "warm_first_step_s": 2.5, "copy_share": 0.5} for row in made["rows"]]
    traffic = [{"rung": "norm", "bytes_per_image": {"total": 394e6}, "roof_images_per_s": 10650}]
    lines = format_report(made | {"rows": rows, "traffic": traffic}).splitlines()
    assert any(
        line.endswith("torch eager: 50% of the copy bandwidth, first step 4.5 s, with warm caches 2.5 s")
        for line in lines
    )
    assert any("copy bandwidth of 4.20 TB/s" in line for line in lines)
    assert any(line.split() == ["norm", "394", "MB", "per", "image", "10,650", "img/s"] for line in lines)


def test_first_steps_are_asked_for_by_name(report, monkeypatch):
    asked = []

    def first_step_s(*order, warm=False):
        asked.append(order)
        return 0.5 if warm else 1.5

    monkeypatch.setattr("benchmarks.step.first_step_s", first_step_s)
    apart = report["rows"][0] | {"name": "batch 2, precisions / reference path, fp32"}
    compiled = report["rows"][0] | {"name": "batch 2 / hyperbatch compiled, graph"}
    rows = with_first_steps(report | {"rows": [*report["rows"], apart, compiled]}, device="cpu")["rows"]
    assert [row["first_step_s"] for row in rows] == [1.5, 1.5, None, 1.5]
    assert [row.get("warm_first_step_s") for row in rows] == [None, None, None, 0.5]
    names = [(name, batch) for name, _, batch in asked]
    assert names == [("hyperbatch plain", 2), ("torch eager", 2), *[("hyperbatch compiled, graph", 2)] * 2]
    assert asked[0][1].model == "resnet8"


def test_a_first_step_is_timed_in_a_process_of_its_own(monkeypatch, tmp_path):
    """With caches of its own, which are gone afterwards."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    (spec,) = step_runs.our_specs(TINY)
    assert 0 < first_step.first_step_s(spec.name, TINY, 2) < 60
    assert list(tmp_path.iterdir()) == []


def test_a_first_step_that_fails_is_told():
    with pytest.raises(RunFailed, match="first step of nobody failed in its own process: KeyError"):
        first_step.first_step_s("nobody", TINY, 2)


@pytest.mark.parametrize("module", [comm, reality, step])
def test_asking_for_help_measures_nothing(module, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["module", "--help"])
    with pytest.raises(SystemExit) as left:
        module.main()
    assert left.value.code == 0
    assert "usage: python -m benchmarks." in capsys.readouterr().out
