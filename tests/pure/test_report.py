"""The report of a run: what it says, that it needs nothing from outside, and that no broken folder stops it."""

import itertools
import json
import math
import os
import re
import shlex
import subprocess
import sys
import textwrap
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperbatch import cli
from hyperbatch.cli.parser import parse
from hyperbatch.cli.train import config_of
from hyperbatch.config import BatchPhase, Config
from hyperbatch.errors import InputError, RunFailed
from hyperbatch.plan.clusters import cluster_of_device
from hyperbatch.plan.types import GradGroup, GroupPlan, GroupTiming, StepTiming
from hyperbatch.recipes import find_recipe, get_recipe
from hyperbatch.record import Result, RunRecord, RunWriter
from hyperbatch.report import setup, units, write_report
from hyperbatch.report.chart import ticks
from hyperbatch.report.markup import el
from hyperbatch.report.predicted import predicted_step
from hyperbatch.report.runs import load_run, sample, smooth
from hyperbatch.report.summary import summary
from hyperbatch.report.watch import Follower, finished, spark, state, watch

PLAN = GroupPlan(
    strategy="cubic",
    groups=(
        GradGroup(index=0, parameters=("fc.weight", "fc.bias"), bytes=4000, dtype="float32", algorithm="torus"),
        GradGroup(index=1, parameters=("conv1.weight",), bytes=1_000_000, dtype="float32"),
    ),
)
TIMING = StepTiming(
    step_s=0.010,
    forward_s=0.003,
    backward_s=0.005,
    exposed_comm_s=0.0015,
    update_s=0.0005,
    groups=(
        GroupTiming(index=0, algorithm="torus", bytes=4000, ready_s=0.004, start_s=0.004, end_s=0.006),
        GroupTiming(index=1, algorithm="flat", bytes=1_000_000, ready_s=0.005, start_s=0.006, end_s=0.0095),
    ),
)


def make_run(
    folder: Path, *, steps: int = 40, reached: bool = True, config: Config | None = None, **fields
) -> RunRecord:
    """A folder as a run leaves it: the batch doubles in the middle, accuracy rises to 99.4 %."""
    config = config or find_recipe("digits").config()
    with RunWriter(folder, tensorboard=False) as writer:
        for step in range(1, steps + 1):
            writer.step(
                step=step,
                epoch=step / 10,
                time_s=step / 5,
                loss=2.0 / step,
                lr=0.1 * step,
                global_batch=32 if step <= steps // 2 else 64,
                images_per_s=1000.0 + step,
            )
            if step % 10 == 0:
                writer.eval(step=step, epoch=step / 10, time_s=step / 5, top1=0.994 * step / steps, samples=360)
    values = {
        "recipe": "digits",
        "config": config.to_dict(),
        "environment": {"torch": "2.13.0", "device": "cpu", "device_type": "cpu", "cores": 8},
        "world_size": 2,
        "grid": "1x2",
        "result": Result(
            reached=reached,
            target_top1=0.99,
            top1=0.994,
            time_to_target_s=8.0 if reached else None,
            train_s=7.5,
            images_per_s=1234.0,
            epochs=4.0,
            steps=steps,
        ),
        "plan": PLAN.to_dict(),
        "phases": [
            {"from_position": 0, "global_batch": 32, "batch_per_rank": 16, "accumulation": 1, "first_step": 0},
            {"from_position": 640, "global_batch": 64, "batch_per_rank": 32, "accumulation": 1, "first_step": 20},
        ],
        "trust_ratios": {"fc.weight": 0.02, "conv1.weight": 0.3, "fc.bias": 1.0},
        "clock": {"init_s": 1.0, "train_s": 7.5, "eval_s": 0.5, "pause_s": 0.0},
        "timing": TIMING.to_dict(),
        "folder": str(folder),
    }
    record = RunRecord(**{**values, **fields})
    record.save(folder)
    return record


class Page(HTMLParser):
    """The page as text and tags; a tag that is not closed, or not in order, fails."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))


def report(*folders: Path, output: Path | None = None) -> Page:
    return Page(write_report(list(folders), output).read_text(encoding="utf-8"))


def test_a_report_says_what_the_run_did(tmp_path):
    make_run(tmp_path)
    page = report(tmp_path)
    for expected in (
        "reached 99 % top-1",
        "8.0 s to target",
        "99.4 %",
        "1,234 img/s",
        "617 per rank",
        "4 epochs",
        "32 → 64",
        "Top-1 accuracy",
        "Learning rate",
        "exposed communication 1.5 ms",
        "fc.weight … fc.bias",
        "torus",
        "How to repeat it",
        "hyperbatch train digits --nproc 2",
        "2.13.0",
    ):
        assert expected in page.text, expected
    assert (tmp_path / "report.html").exists()


def test_a_report_needs_nothing_from_outside(tmp_path):
    make_run(tmp_path)
    page = report(tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert set(re.findall(r"https?://[^\"' )]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe")
        assert "src" not in attributes
        assert "href" not in attributes
    assert "@import" not in text
    assert "url(" not in re.sub(r"url\(#", "", text)


def test_texts_of_the_run_are_escaped(tmp_path):
    evil = '</script><script>alert("x")</script>&amp;'
    folder = tmp_path / "<u>run&"
    config = find_recipe("digits").config().override(data=evil)
    make_run(
        folder,
        config=config,
        recipe=f"my.recipes:{evil}",
        warnings=[evil],
        environment={"device": evil, "device_type": "cuda"},
        trust_ratios={evil: 0.5},
    )
    other = tmp_path / "<u>other"
    make_run(other)
    for page in (report(folder), report(folder, other, output=tmp_path / "both.html")):
        assert [tag for tag, _ in page.tags].count("script") == 2  # the points and our own code
        assert "u" not in [tag for tag, _ in page.tags]
        assert evil in "".join(page.texts)


def test_the_points_of_the_page_are_json_whatever_the_run_is_called(tmp_path):
    folder = tmp_path / "<"
    make_run(folder)
    text = write_report([folder]).read_text()
    match = re.search(r'<script type="application/json" id="points">(.*?)</script>', text)
    assert match
    points = json.loads(match[1])
    assert set(points["charts"]) == {"accuracy", "loss", "rate", "batch", "speed"}
    assert points["charts"]["accuracy"]["lines"][0]["y"][-1] == 0.994


def write_layers(folder: Path, lines: int = 100) -> None:
    with RunWriter(folder, resume_from_step=10**6, tensorboard=False) as writer:
        for step in range(1, lines + 1):
            ratios = {"fc.weight": 0.01 * step, "conv1.weight": 0.3, "fc.bias": 1.0, "bad": math.nan}
            writer.layers(step=step, epoch=step / 10, time_s=step / 5, trust_ratios=ratios)


def test_trust_ratios_over_time_are_a_heat_map_with_every_layer(tmp_path):
    make_run(tmp_path)
    assert "at the last step" in report(tmp_path).texts, "an older record knows the last step alone"
    write_layers(tmp_path)
    page = report(tmp_path)
    assert {"fc.weight", "conv1.weight"} <= set(page.texts)
    [heat] = [attributes for tag, attributes in page.tags if tag == "svg" and "data-heat" in attributes]
    assert heat["viewbox"] == "0 0 50 2", "every second of 100 lines, and the layers that are adapted"
    assert {"step 2", "step 100", "epoch 10", "400 ms", "20.0 s"} <= set(page.texts)
    match = re.search(r'id="points">(.*?)</script>', (tmp_path / "report.html").read_text())
    assert match
    [data] = json.loads(match[1])["heat"]
    assert data["rows"]["fc.weight"][-1] == 1.0
    assert data["x"][2] == list(range(2, 101, 2))
    assert list(data["rows"]) == ["fc.weight", "conv1.weight"], "as they are drawn, from top to bottom"


def test_a_heat_map_has_each_value_in_its_colour(tmp_path):
    make_run(tmp_path, trust_ratios={"a": 0.1, "b": 0.001})
    with RunWriter(tmp_path, resume_from_step=10**6, tensorboard=False) as writer:
        for step, a, b in ((1, 0.001, 0.001), (2, 0.1, math.nan), (3, 0.1, 0.001)):
            writer.layers(step=step, epoch=1, time_s=1, trust_ratios={"a": a, "b": b})
    paths = {a["fill"]: a["d"] for tag, a in report(tmp_path).tags if tag == "path" and "--h" in (a.get("fill") or "")}
    assert paths == {"var(--h0)": "M0 0h1v1h-1zM0 1h1v1h-1zM2 1h1v1h-1z", "var(--h11)": "M1 0h2v1h-2z"}


RANKS = [
    {"rank": 0, "host": "a", "device": "H", "memory_peak_bytes": 8e9, "memory_bytes": 16e9, "step_s": 0.010},
    {"rank": 1, "host": "b", "device": "H", "memory_peak_bytes": 9e9, "memory_bytes": 16e9, "step_s": 0.010},
]
TIMES = [
    {"data_wait_s": 0.0, "forward_s": 0.002, "backward_s": 0.003, "update_s": 0.001},
    {"data_wait_s": 0.0, "forward_s": 0.004, "backward_s": 0.003, "update_s": 0.001},
]
GAUGES = {"utilisation": 0.97, "clock_mhz": 1755.4, "clock_least_mhz": 1200}


def test_every_rank_is_drawn_and_the_slowest_named(tmp_path):
    ranks = [{**about, **times, **GAUGES} for about, times in zip(RANKS, TIMES, strict=True)]
    make_run(tmp_path, ranks=ranks)
    page = report(tmp_path)
    assert (
        "Rank 1 (host b) is the slowest: its own work takes 8 ms of each step, 2 ms longer than the median" in page.text
    )
    assert "rank 1, forward: 4 ms" in page.texts
    assert "rank 0, exposed communication: 4 ms" in page.texts, "it waits for rank 1"
    assert "peak memory 9 GB of 16 GB, 97 % utilisation, 1,755 MHz, per rank at most" in page.text
    assert "1,755 MHz (least 1,200)" in page.texts
    make_run(tmp_path, ranks=RANKS[:1], world_size=1)
    page = report(tmp_path)
    assert "peak memory 8 GB of 16 GB" in page.text
    assert "Ranks" not in page.texts


def test_of_many_ranks_the_slowest_are_drawn(tmp_path):
    ranks = [{**RANKS[0], **TIMES[0], "rank": rank, "step_s": 0.1, "forward_s": 0.001 * rank} for rank in range(40)]
    make_run(tmp_path, ranks=ranks, world_size=40, grid="1x40")
    page = report(tmp_path)
    assert "all 40 ranks" in page.texts
    named = {text for text in page.texts if re.fullmatch(r"rank \d+", text)}
    assert named == {f"rank {rank}" for rank in range(24, 40)}


def test_the_planned_step_stands_beside_the_measured_one(tmp_path):
    make_run(tmp_path)
    page = report(tmp_path)
    assert re.search(r"A typical step, predicted for local: [\d.]+ ms", page.text)
    assert "A typical step, measured on rank 0: 10 ms" in page.text
    found = predicted_step(load_run(tmp_path).record)
    assert found is not None
    assert f"takes {0.010 / found[1].step_s:.2f} times as long" in page.text
    titles = [text for text in page.texts if ": exposed communication " in text]
    assert [title.partition(":")[0] for title in titles] == 2 * ["predicted for local", "measured on rank 0"]


@pytest.mark.parametrize(
    ("device", "cluster"),
    [
        ("NVIDIA H200", "h200x8"),
        ("NVIDIA H100 80GB HBM3", "dgx_h100"),
        ("NVIDIA A100-SXM4-80GB", "dgx_a100"),
        ("NVIDIA GeForce RTX 4090", None),
        ("", "local"),
    ],
)
def test_a_device_has_the_machine_file_of_its_kind(device, cluster):
    found = cluster_of_device(device)
    assert (found and found.name) == cluster


@pytest.mark.parametrize(
    "fields",
    [
        {"phases": []},
        {"phases": [{}]},
        {"config": find_recipe("digits").config().override(model="mine:model")},
        {"environment": {"device": "TPU", "device_type": "tpu"}},
        {"grid": "3x3"},
    ],
)
def test_what_cannot_be_planned_has_no_prediction(tmp_path, fields):
    make_run(tmp_path, **fields)
    assert "predicted for" not in report(tmp_path).text


def test_date_commit_and_the_datas_own_counts_are_shown(tmp_path):
    environment = {"date": "2026-01-02T03:04:05+00:00", "commit": "abc123", "device_type": "cpu", "device": "Zen 9"}
    data = {"train_samples": 1433, "eval_samples": 1, "classes": 3}
    make_run(tmp_path, environment=environment | {"cores": 2}, data=data)
    page = report(tmp_path)
    assert "2026-01-02 03:04:05+00:00 · commit abc123" in page.text
    assert "CPU, 2 cores (Zen 9)" in page.text
    assert "training data 1,433 images 1 for validation, 3 classes" in page.text
    assert re.search(r"classes 3 \(the recipe was written for 10\)", page.text)
    make_run(tmp_path / "other", data=data | {"classes": 4})
    assert "classes 3 4" in report(tmp_path, tmp_path / "other", output=tmp_path / "both.html").text


def test_what_was_compiled_is_shown(tmp_path):
    made = {"choice": "auto", "regions": 12, "kinds": 1, "compilations": 1, "cache_misses": 2, "seconds": 9.31}
    record = make_run(tmp_path, compiled=made)
    assert "compiled 12 blocks of 1 kind 9.3 s of the set-up" in report(tmp_path).text
    assert "  compiled  12 blocks of 1 kind, 9.3 s of the set-up\n" in summary(record)
    make_run(tmp_path, compiled=made | {"regions": 1, "cache_misses": 0})
    assert "compiled the whole model 9.3 s of the set-up, from the disk" in report(tmp_path).text
    make_run(
        tmp_path,
        compiled={"choice": "auto", "regions": 0, "reason": "--compile auto compiles only on a GPU, not on the CPU"},
    )
    assert "of the set-up" not in report(tmp_path).text


def test_faint_and_bold_lines_have_a_legend(tmp_path):
    make_run(tmp_path)
    assert {"faint: every step", "bold: moving average"} <= set(report(tmp_path).texts)


@pytest.mark.parametrize(("device_type", "changed"), [("cuda", {}), ("cpu", {"precision": ("auto", "fp16")})])
def test_the_precision_of_the_recipe_on_this_device_is_no_change(device_type, changed):
    config = get_recipe("cifar10", precision="fp16").to_dict()
    environment = {"device_type": device_type}
    record = RunRecord(recipe="cifar10", config=config, environment=environment, world_size=1, grid="1x1")
    assert setup.changed_fields(record) == changed


def test_changed_fields_are_highlighted_and_in_the_command(tmp_path):
    config = find_recipe("digits").config().override(lr=0.123, seed=7, out="somewhere", nproc=2)
    make_run(tmp_path, config=config)
    page = report(tmp_path)
    assert "hyperbatch train digits --lr 0.123 --seed 7 --nproc 2" in page.text
    changed = [tag for tag, attributes in page.tags if attributes.get("class") == "changed"]
    assert len(changed) == 2


def test_the_command_parses_back_to_the_same_config(tmp_path):
    flip = find_recipe("digits").config().data.flip
    config = (
        find_recipe("digits")
        .config()
        .override(
            batch_phases=(BatchPhase(0, 16), BatchPhase(1.5, 48)),
            milestones=(1.0, 2.5),
            data="a folder",
            nesterov=True,
            flip=not flip,
        )
    )
    record = make_run(tmp_path, config=config.override(nproc=1), world_size=1, grid="1x1")
    command = setup.command(record)
    assert command is not None
    assert ("--no-flip" if flip else "--flip") in command
    again = config_of(parse(shlex.split(command)[1:]))
    assert again == config.override(nproc=1)


def test_the_command_names_one_rank_too(tmp_path):
    record = make_run(tmp_path, world_size=1, grid="1x1")
    assert setup.command(record) == "hyperbatch train digits --nproc 1"


def test_a_foreign_recipe_is_shown_without_importing_it(tmp_path):
    make_run(tmp_path, recipe="this_module_does_not_exist:recipe")
    page = report(tmp_path)
    assert "is not a built-in recipe" in page.text
    assert "hyperbatch train this_module_does_not_exist:recipe" in page.text


def test_an_own_recipe_known_by_its_name_only_gets_no_command_that_cannot_run(tmp_path):
    make_run(tmp_path, recipe="stripes")
    page = report(tmp_path)
    assert "stripes is a recipe of your own" in page.text
    assert "hyperbatch train stripes" not in page.text


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"result": Result(target_top1=0.99, top1=0.5)}, "missed 99 %"),
        ({"result": Result(top1=0.5, steps=3)}, "no target set"),
        ({"result": Result(target_top1=0.99)}, "not evaluated"),
        ({"error": "rank 1 died"}, "rank 1 died"),
        ({"warnings": ["tensorboard/ is missing"]}, "tensorboard/ is missing"),
        ({"plan": {}, "phases": [], "trust_ratios": {}, "clock": {}, "timing": {}, "environment": {}}, "digits"),
        ({"world_size": 1, "grid": "1x1"}, "no exchange"),
        ({"trust_ratios": {"a": math.nan, "b": 0.0}}, "digits"),
        ({"trust_ratios": {"a": 0.5}}, "0.5"),
        ({"config": {}}, "digits"),
    ],
)
def test_any_outcome_has_a_report(tmp_path, fields, expected):
    make_run(tmp_path, **fields)
    assert expected in report(tmp_path).text


def test_a_run_that_failed_before_its_first_step(tmp_path):
    RunWriter(tmp_path, tensorboard=False).close()
    page = report(tmp_path)
    assert "no record.json" in page.text
    assert "Nothing was recorded." in page.text
    make_run(tmp_path, steps=0, result=Result(target_top1=0.99), error="out of memory", trust_ratios={}, timing={})
    assert "out of memory" in report(tmp_path).text


def test_half_written_files(tmp_path):
    make_run(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('not json\n{"event":"step"}\n[1]\n{"event":"step","step":"x"}\n{"event":"step","step":99,"lo')
    assert load_run(tmp_path).steps["step"] == list(range(1, 41))
    (tmp_path / "record.json").write_text('{"schema": 1, "rec')
    assert "is not valid JSON" in report(tmp_path).text
    (tmp_path / "record.json").unlink()
    assert "no record.json" in report(tmp_path).text
    make_run(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    assert "8.0 s to target" in report(tmp_path).text


def test_a_loss_that_is_not_a_number_breaks_the_curve_and_is_said(tmp_path):
    make_run(tmp_path)
    with RunWriter(tmp_path, resume_from_step=31, tensorboard=False) as writer:
        for step in range(31, 41):
            writer.step(
                step=step, epoch=3, time_s=step / 5, loss=math.nan, lr=1, global_batch=64, images_per_s=math.inf
            )
    assert "not finite from step 31 on" in report(tmp_path).text
    assert "nan" not in "".join(attributes.get("d") or "" for tag, attributes in report(tmp_path).tags if tag == "path")


def test_a_single_step_is_a_dot(tmp_path):
    make_run(tmp_path, steps=1)
    assert "Training loss" in report(tmp_path).text


@pytest.mark.parametrize(
    ("kind", "why"), [("nothing", "does not exist"), ("folder", "has neither record.json"), ("file", "is a file")]
)
def test_not_a_run_folder(tmp_path, kind, why):
    path = tmp_path / "x"
    if kind == "folder":
        path.mkdir()
    elif kind == "file":
        path.write_text("")
    with pytest.raises(InputError, match=f"is not a run folder: it {why}"):
        write_report([path])
    with pytest.raises(InputError, match=f"is not a run folder: it {why}"):
        watch(path, once=True)
    with pytest.raises(InputError, match=f"is not a run folder: it {why}"):
        state(path)
    if kind == "folder":
        (path / "photo.jpg").touch()  # an empty one may become that of a run
    with pytest.raises(InputError, match=f"is not a run folder: it {why}"):
        watch(path)


def test_the_folder_of_a_sweep_is_no_run_and_has_its_own_report(tmp_path):
    (tmp_path / "report.html").write_text("")
    with pytest.raises(InputError, match=f"a sweep has its own report: {tmp_path / 'report.html'}"):
        write_report([tmp_path])


def test_no_folder_and_an_unwritable_place(tmp_path):
    with pytest.raises(InputError, match="at least one"):
        write_report([])
    make_run(tmp_path)
    with pytest.raises(
        InputError, match=r"cannot write .*: No such file or directory; `hyperbatch report RUN --output"
    ):
        write_report([tmp_path], tmp_path / "no" / "such" / "folder.html")


def test_several_runs_are_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = find_recipe("digits").config()
    make_run(tmp_path / "a", config=base.override(lr=0.5))
    make_run(tmp_path / "b", config=base.override(lr=0.25), reached=False)
    RunWriter(tmp_path / "dead", tensorboard=False).close()
    path = write_report([tmp_path / name for name in ("a", "b", "dead")])
    page = Page(path.read_text())
    assert path == Path("report.html")
    assert "3 runs compared" in page.text
    assert "What differs" in page.text
    assert re.search(r"lr 0.5 0.25", page.text)
    points = json.loads(re.search(r'id="points">(.*?)</script>', path.read_text())[1])  # type: ignore[index]
    assert [line["label"] for line in points["charts"]["loss"]["lines"]] == ["a", "b", "dead"]


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    for parent in "xy":
        make_run(tmp_path / parent / "run")
    page = report(tmp_path / "x" / "run", tmp_path / "y" / "run", output=tmp_path / "both.html")
    assert str(tmp_path / "x" / "run") in page.text


def test_ten_thousand_steps_stay_below_a_megabyte(tmp_path):
    make_run(tmp_path, steps=10_000)
    assert write_report([tmp_path]).stat().st_size < 300_000
    assert write_report([tmp_path] * 4, tmp_path / "many.html").stat().st_size < 1_000_000


def columns(loss: list[float]) -> dict[str, list[float]]:
    n = len(loss)
    return {
        "step": [float(i) for i in range(n)],
        "loss": loss,
        "images_per_s": [1.0] * n,
        "global_batch": [32.0 if i < n * 0.7 else 64.0 for i in range(n)],
    }


def test_sampling_keeps_ends_spikes_and_changes():
    loss = [1.0] * 5000
    loss[1234], loss[3456] = 50.0, -5.0
    loss[4000] = math.nan
    kept = sample(columns(loss), 200, extremes=("loss", "images_per_s"), changes="global_batch", also={77})
    assert kept == sorted(set(kept))
    assert len(kept) <= 300
    assert {0, 77, 4999, 1234, 3456, 4000, 3499, 3500} <= set(kept)
    assert sample(columns(loss[:100]), 200, extremes=("loss",), changes="global_batch") == list(range(100))


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9))
def test_ticks_are_few_rising_and_cover_the_range(low, span):
    high = low + span
    marks = ticks(low, high)
    assert 2 <= len(marks) <= 9
    assert all(b > a for a, b in itertools.pairwise(marks))
    slack = 1e-6 * max(1.0, abs(low), abs(high))
    assert marks[0] <= low + slack
    assert marks[-1] >= high - slack


def test_smoothing_keeps_a_constant_and_skips_nan():
    assert smooth([2.0] * 300, 0.02) == pytest.approx([2.0] * 300)
    values = smooth([2.0] * 150 + [math.nan] + [2.0] * 149, 0.02)
    assert math.isnan(values[150])
    assert values[151] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (units.duration(0.0), "0 s"),
        (units.duration(0.00002), "20 µs"),
        (units.duration(0.25), "250 ms"),
        (units.duration(0.9996), "1,000 ms"),
        (units.duration(3599.7), "1 h 00 min"),
        (units.duration(7.44), "7.4 s"),
        (units.duration(122), "2 min 02 s"),
        (units.duration(119.7), "2 min 00 s"),
        (units.duration(7199.8), "2 h 00 min"),
        (units.duration(None), "–"),
        (units.percent(0.99), "99 %"),
        (units.percent(0.7517), "75.17 %"),
        (units.percent(1.0), "100 %"),
        (units.percent(0.5, 0), "50 %"),
        (units.count(1234.4), "1,234"),
        (units.count(1_730_000), "1.73 M"),
        (units.count(2e12), "2,000 G"),
        (units.count(32), "32"),
        (units.count(math.nan), "–"),
        (units.size(999), "999 B"),
        (units.size(22_000_000), "22 MB"),
        (units.size(999.6e6), "1,000 MB"),
        (units.plural(1, "rank"), "1 rank"),
        (units.plural(2048, "rank"), "2,048 ranks"),
    ],
)
def test_numbers_as_people_read_them(got, expected):
    assert got == expected


def test_markup_escapes_texts_and_attributes():
    assert el("p", "<&>", title='"') == '<p title="&quot;">&lt;&amp;&gt;</p>'
    assert el("p", el("b", "x"), None, ["y", 1]) == "<p><b>x</b>y1</p>"


def test_the_closing_summary(tmp_path):
    record = make_run(tmp_path, warnings=["one", "two"])
    lines = summary(record).splitlines()
    assert lines[0] == "digits reached 99 % top-1 in 8.0 s"
    assert "1,234 images/s on 2 ranks" in summary(record)
    assert "one (and 1 more in the report)" in summary(record)
    assert lines[-1].endswith("report.html")
    assert "missed its target of 99 % top-1" in summary(make_run(tmp_path, reached=False))
    failed = make_run(tmp_path, error="boom")
    assert "failed: boom" in summary(failed)
    assert "report.html" not in summary(failed)  # no such file yet
    write_report([tmp_path])
    assert summary(failed).endswith("report.html")
    assert "no target" in summary(make_run(tmp_path, result=Result()))


def test_test_time_augmentation_and_averages_are_said_everywhere(tmp_path, capsys):
    """Nobody must take an accuracy with them for one without."""
    base = find_recipe("digits").config()
    result = Result(top1=0.9412, top1_plain=0.9333, steps=40)
    record = make_run(tmp_path / "with", config=base.override(tta="mirror", averaging="ema"), result=result)
    make_run(tmp_path / "without", config=base)
    lines = [line.strip() for line in summary(record).splitlines()]
    assert "accuracy  94.12 % top-1 with averaged weights (93.33 % without test-time augmentation)" in lines
    assert "time      set-up 1.0 s, training 7.5 s, evaluation 500 ms" in lines
    page = report(tmp_path / "with")
    assert "averaged weights, 93.33 % without test-time augmentation" in page.text
    assert "set-up 1.0 s, evaluation 500 ms" in page.text
    assert "without test-time augmentation" not in report(tmp_path / "without").text
    both = report(tmp_path / "with", tmp_path / "without", output=tmp_path / "both.html")
    assert "without TTA" in both.text
    assert "TTA is test-time augmentation" in both.text
    alone = report(tmp_path / "without", tmp_path / "without", output=tmp_path / "alone.html")
    assert "TTA" not in alone.text
    with RunWriter(tmp_path / "going", tensorboard=False) as writer:
        shared = {"step": 1, "epoch": 1.0, "time_s": 1.0}
        writer.step(**shared, loss=1.0, lr=0.1, global_batch=8, images_per_s=10.0)
        writer.eval(**shared, top1=0.9412, top1_plain=0.9333, samples=360)
    watch(tmp_path / "going", once=True)
    assert re.search(r"without TTA\s+93.33 %", capsys.readouterr().out)


def test_one_rank_communicates_nothing(tmp_path):
    """The planner predicts groups for it, too, and its step copies gradients after backward."""
    make_run(tmp_path, world_size=1, grid="1x1", timing={**TIMING.to_dict(), "groups": []})
    page = report(tmp_path)
    assert "A typical step, predicted for local" in page.text
    assert "communication" not in page.text.lower()
    assert "all-reduce within a step" not in page.text


def test_one_epoch_is_not_epochs(tmp_path):
    record = make_run(tmp_path, result=Result(epochs=1.0, steps=40, top1=0.9))
    assert "trained   1 epoch in " in summary(record)
    assert "trained for 1 epoch 40 steps" in report(tmp_path).text


def test_top5_loss_and_classes_are_shown_where_the_run_has_them(tmp_path, capsys):
    result = Result(top1=0.9, top5=0.975, val_loss=0.34567, steps=40)
    by_class = {"samples": [10, 20, 0], "right": [9, 12, 0], "confusions": [[1, 0, 8], [0, 2, 1]]}
    record = make_run(tmp_path / "new", result=result, classes=["cat", "<dog>", "unseen"], by_class=by_class)
    make_run(tmp_path / "old")
    assert "accuracy  90 % top-1, 97.5 % top-5, loss 0.3457" in summary(record)
    page = report(tmp_path / "new")
    assert "97.5 % top-5, loss 0.3457" in page.text
    assert "Recognised worst" in page.text
    assert re.search(r"<dog> 60 % 20 cat 90 % 10", page.text), "the worst first, and none without samples"
    assert re.search(r"<dog> cat 8 40 % cat unseen 1 10 %", page.text)
    assert "Classes" not in report(tmp_path / "old").texts
    both = report(tmp_path / "new", tmp_path / "old", output=tmp_path / "both.html")
    assert "validation loss" in both.text
    neither = report(tmp_path / "old", tmp_path / "old", output=tmp_path / "neither.html")
    assert "validation loss" not in neither.text
    with RunWriter(tmp_path / "going", tensorboard=False) as writer:
        for step in (1, 2):
            shared = {"step": step, "epoch": 1.0, "time_s": 1.0}
            writer.step(**shared, loss=1.0, lr=0.1, global_batch=8, images_per_s=10.0)
            writer.eval(**shared, top1=0.9, top5=0.975, val_loss=1.0 / step, samples=360)
    assert "Validation loss" in report(tmp_path / "going").text
    assert "Validation loss" not in report(tmp_path / "old").text
    watch(tmp_path / "going", once=True)
    shown = capsys.readouterr().out
    assert re.search(r"top-5\s+97.5 %", shown)
    assert re.search(r"validation loss\s+0.5", shown)


def test_watching_a_finished_run_prints_it_and_returns(tmp_path, capsys):
    make_run(tmp_path / "run")
    watch(tmp_path / "run")
    out = capsys.readouterr().out
    assert "step 40" in out
    assert "reached 99 % top-1" in out
    with pytest.raises(InputError):
        watch(tmp_path / "none")


def test_watching_prints_names_with_brackets_as_they_are(tmp_path, capsys):
    """rich takes [old] for a style, [/b] for the end of one, and :cat: for a picture."""
    folder = tmp_path / "[old] :cat: [" / "b]"
    make_run(folder)
    watch(folder, once=True)
    assert f"\n  report    {folder / 'report.html'}\n" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [40, 60, 200])
def test_curves_fit_into_the_terminal_with_their_last_values(tmp_path, monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    make_run(tmp_path / "run", steps=300)
    watch(tmp_path / "run", once=True)
    lines = capsys.readouterr().out.splitlines()
    curve = next(line for line in lines if line.startswith("learning rate"))
    assert curve.endswith("█"), "the rate of this run rises until its last step"
    assert "…" not in "".join(lines)


def test_watching_ends_with_the_folder(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.setattr("time.sleep", lambda seconds: (tmp_path / "run").rmdir())  # again and again if it goes on
    with pytest.raises(RunFailed, match=f"^{tmp_path / 'run'} was deleted while it was watched$"):
        watch(tmp_path / "run")


def test_watching_once_a_run_that_has_not_begun(tmp_path, capsys):
    (tmp_path / ".lock").touch()
    watch(tmp_path, once=True)
    assert "no step yet" in capsys.readouterr().out
    assert state(tmp_path) == {"run": str(tmp_path), "finished": False, "step": None, "eval": None, "record": None}


def test_watching_once_as_one_json_object(tmp_path, capsys):
    make_run(tmp_path)
    assert cli.main(["watch", str(tmp_path), "--once", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["finished"]
    assert (values["step"]["step"], values["eval"]["top1"]) == (40, 0.994)
    assert values["record"]["recipe"] == "digits"
    (tmp_path / "record.json").unlink()
    assert state(tmp_path)["record"] is None


def test_following_reads_whole_lines_only_and_starts_over_with_a_new_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    follower.look()
    path.write_text('{"event":"step","step":1}\n{"event":"eval","st')
    follower.look()
    assert (len(follower.steps), len(follower.evals)) == (1, 0)
    with open(path, "a") as file:
        file.write('ep":1}\n')
    follower.look()
    assert (len(follower.steps), len(follower.evals)) == (1, 1)
    path.write_text('{"event":"step","step":1}\n')
    follower.look()
    assert (len(follower.steps), len(follower.evals)) == (1, 0)


def test_a_record_older_than_the_metrics_is_of_the_attempt_before(tmp_path):
    make_run(tmp_path)
    assert finished(tmp_path)
    os.utime(tmp_path / "record.json", (1, 1))
    assert not finished(tmp_path)


def test_sparklines():
    assert spark([0.0, 1.0]) == "▁█"
    assert spark([None, math.nan]) == ""
    assert spark([1.0, None, 1.0]) == "▁ ▁"
    assert len(spark([float(i) for i in range(1000)])) <= 48


def test_reporting_loads_no_torch(tmp_path):
    make_run(tmp_path)
    code = """
        import sys
        from pathlib import Path
        from hyperbatch.report import write_report
        from hyperbatch.report.summary import summary
        from hyperbatch.report.watch import watch
        write_report([Path(sys.argv[1])])
        assert not {"torch", "tensorboard", "numpy"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], check=True)
