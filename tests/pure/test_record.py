"""The run folder: what is in it, and that a run killed at any moment leaves files that can be read."""

import json
import logging
import math
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hyperbatch.config import BatchPhase, Config
from hyperbatch.durable import replace_text
from hyperbatch.errors import InputError
from hyperbatch.mllog import MlperfEvents
from hyperbatch.record import Result, RunRecord, RunWriter, Span, read_metrics
from hyperbatch.record.lines import Lines


def write_step(writer: RunWriter, step: int, **values) -> None:
    fields = {"epoch": step / 4, "time_s": step / 10, "loss": 2.0, "lr": 0.1, "global_batch": 64, "images_per_s": 640.0}
    writer.step(step=step, **{**fields, **values})


def write_eval(writer: RunWriter, step: int, top1: float = 0.5) -> None:
    writer.eval(step=step, epoch=step / 4, time_s=step / 10, top1=top1, samples=360)


def span(name: str, start_s: float, *, track: str = "engine") -> Span:
    """A second."""
    return Span(name, start_s, 1.0, track, {})


def test_metric_lines_have_the_fixed_shape(tmp_path):
    with RunWriter(tmp_path) as writer:
        write_step(writer, 0, scale=1024)
        write_eval(writer, 1)
    step, evaluation = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert list(step) == [
        *("event", "step", "epoch", "time_s", "loss", "lr", "global_batch", "images_per_s"),
        "scale",
    ]
    assert list(evaluation) == ["event", "step", "epoch", "time_s", "top1", "samples"]
    assert (step["event"], evaluation["event"]) == ("step", "eval")


def test_lines_are_on_disk_at_once_and_nan_is_strict_json(tmp_path):
    writer = RunWriter(tmp_path, tensorboard=False)
    write_step(writer, 0, loss=math.nan, norms=[1.0, math.inf])

    def refuse(text):
        raise AssertionError(text)

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["loss"] is None
    assert line["norms"] == [1.0, None]
    writer.close()


def test_a_record_is_loaded_by_the_name_of_its_folder_and_shown_in_a_line(tmp_path):
    RunRecord(recipe="digits", config={"x": 0}, environment={}, world_size=1, grid="1x1").save(tmp_path)
    text = repr(RunRecord.load(str(tmp_path)))
    assert text.startswith(f"RunRecord(recipe='digits', folder='{tmp_path}', error='', result=Result(reached=False, ")
    assert "config" not in text


def test_numpy_scalars_are_numbers(tmp_path):
    numpy = pytest.importorskip("numpy")
    with RunWriter(tmp_path, tensorboard=False) as writer:
        write_step(writer, 0, loss=numpy.float32(1.5), lr=numpy.float32("nan"))
    [line] = read_metrics(tmp_path)
    assert (line["loss"], line["lr"]) == (1.5, None)


def test_resume_drops_the_steps_it_will_write_again_and_a_torn_line(tmp_path):
    with RunWriter(tmp_path) as writer:
        for step in range(6):
            write_step(writer, step)
        write_eval(writer, 3)
        write_eval(writer, 5)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"event":"step","step":2,"lo')
    with RunWriter(tmp_path, resume_from_step=4) as writer:
        write_step(writer, 4, loss=1.0)
    lines = read_metrics(tmp_path)
    assert [(line["event"], line["step"]) for line in lines] == [
        *(("step", step) for step in range(4)),
        ("eval", 3),
        ("step", 4),
    ]
    assert lines[-1]["loss"] == 1.0
    assert (tmp_path / "metrics.jsonl").read_text().endswith("}\n")
    assert not list(tmp_path.glob("*.partial"))


def test_lines_that_are_dropped_are_cut_off_in_place(tmp_path, monkeypatch):
    """A full disk has no room for a second file."""
    with RunWriter(tmp_path, tensorboard=False) as writer:
        for step in range(6):
            write_step(writer, step)
    before = (tmp_path / "metrics.jsonl").stat().st_ino
    (tmp_path / "metrics.jsonl.partial").symlink_to("/dev/full")
    monkeypatch.setattr("hyperbatch.durable._beside", lambda path: path.with_name(f"{path.name}.partial"))
    with RunWriter(tmp_path, resume_from_step=4, tensorboard=False) as writer:
        write_step(writer, 4)
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3, 4]
    assert (tmp_path / "metrics.jsonl").stat().st_ino == before
    assert writer.warnings == []


def test_lines_that_cannot_be_dropped_stay_with_a_warning(tmp_path, monkeypatch):
    with RunWriter(tmp_path, tensorboard=False) as writer:
        for step in (0, 5, 1):  # as nobody but a text editor leaves them
            write_step(writer, step)
    told = []
    (tmp_path / "metrics.jsonl.partial").symlink_to("/dev/full")
    monkeypatch.setattr("hyperbatch.durable._beside", lambda path: path.with_name(f"{path.name}.partial"))
    with RunWriter(tmp_path, resume_from_step=4, tensorboard=False, warn=told.append) as writer:
        write_step(writer, 4)
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 5, 1, 4]
    line = "metrics.jsonl keeps the old lines of the steps from 4 on, which are repeated: No space left on device"
    assert told == writer.warnings == [line]
    assert not list(tmp_path.glob("*.partial"))


def test_two_processes_may_replace_a_file_at_once(tmp_path, monkeypatch):
    path, others = tmp_path / "report.html", iter([tmp_path / "report.html"])
    monkeypatch.setattr(os, "fsync", lambda _: [replace_text(other, "theirs") for other in others])
    replace_text(path, "ours")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["ours"]


@pytest.mark.parametrize("go_on", [False, True])
def test_a_line_that_has_found_room_for_a_part_leaves_no_trace(tmp_path, go_on):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    lines = Lines(tmp_path / "lines", go_on=go_on)
    lines.add("first")
    resource.setrlimit(resource.RLIMIT_FSIZE, (9, hard))
    try:
        lines.add("second")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    lines.add("third")
    lines.close()
    assert lines.lost == 1
    assert (tmp_path / "lines").read_bytes() == b"first\nthird\n"


def test_resume_in_a_folder_without_metrics(tmp_path):
    with RunWriter(tmp_path / "new", resume_from_step=3) as writer:
        write_step(writer, 3)
    assert [line["step"] for line in read_metrics(tmp_path / "new")] == [3]


def test_a_fresh_run_forgets_what_was_there(tmp_path):
    for _ in range(2):
        with RunWriter(tmp_path) as writer:
            write_step(writer, 0)
            writer.mlperf("seed", 1)
            writer.spans([span("step", 0)])
        (tmp_path / "record.json").write_text("{}")
    RunWriter(tmp_path).close()
    assert not (tmp_path / "record.json").exists()
    assert read_metrics(tmp_path) == []
    assert (tmp_path / "mllog.txt").read_text() == ""


def test_a_killed_run_leaves_readable_files(tmp_path):
    code = """
        import sys, time
        from pathlib import Path
        from hyperbatch.record import RunWriter, Span
        writer = RunWriter(Path(sys.argv[1]))
        for step in range(2000):
            writer.step(step=step, epoch=0, time_s=0, loss=1, lr=1, global_batch=1, images_per_s=1)
            writer.spans([Span("step", step / 10, 0.1, "engine", {"step": step})])
            writer.mlperf("block_start", kind="INTERVAL_START", first_epoch_num=step)
        print("ready", flush=True)
        time.sleep(60)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(2000))
    assert len((tmp_path / "mllog.txt").read_text().splitlines()) == 2000
    spans = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(spans) >= 2000 - 512


def test_trace_is_json_after_every_flush_and_goes_on_after_a_resume(tmp_path):
    def events():
        return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

    writer = RunWriter(tmp_path, tensorboard=False)
    assert [event["name"] for event in events()] == ["process_name"]
    writer.spans([Span('say "hi"', 0.5, 0.25, "comm", {"bytes": 12}), span("forward", 1, track="gpu")])
    writer.close()
    found = next(event for event in events() if event["name"] == 'say "hi"')
    assert (found["ph"], found["ts"], found["dur"], found["args"]) == ("X", 500_000, 250_000, {"bytes": 12})
    tracks = {event["tid"]: event["args"]["name"] for event in events() if event["name"] == "thread_name"}
    assert sorted(tracks.values()) == ["comm", "gpu"]
    assert tracks[found["tid"]] == "comm"

    before = len(events())
    with RunWriter(tmp_path, resume_from_step=7, tensorboard=False) as writer:
        writer.spans([span("forward", 3, track="gpu")])
    after = events()
    assert len(after) == before + 3
    assert {event["pid"] for event in after[before:]} == {2}
    assert "step 7" in after[before]["args"]["name"]


def test_layers_have_lines_of_their_own_that_follow_a_resume(tmp_path):
    with RunWriter(tmp_path, tensorboard=False) as writer:
        for step in (1, 5, 9):
            writer.layers(step=step, epoch=0.5, time_s=1.0, trust_ratios={"fc.weight": 0.0123456, "odd": math.nan})
    with RunWriter(tmp_path, resume_from_step=6, tensorboard=False) as writer:
        writer.layers(step=8, epoch=0.5, time_s=1.0, trust_ratios={})
        writer.go_back(7)
    lines = read_metrics(tmp_path, "layers.jsonl")
    assert [line["step"] for line in lines] == [1, 5]
    assert lines[0]["trust_ratios"] == {"fc.weight": 0.01235, "odd": None}
    assert read_metrics(tmp_path) == []


def test_ranks_share_the_room_in_the_trace(tmp_path, monkeypatch):
    monkeypatch.setattr("hyperbatch.record.trace.MAX_SPANS", 10)
    with RunWriter(tmp_path, tensorboard=False, world_size=2) as writer:
        writer.spans(span("step", step) for step in range(7))
        writer.spans((span("step", step) for step in range(4)), rank=1)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "rank 0", 2: "rank 1"}
    spans = [event["pid"] for event in events if event["ph"] == "X"]
    assert (spans.count(1), spans.count(2)) == (5, 4)


def test_trace_is_bounded_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("hyperbatch.record.trace.MAX_SPANS", 10)
    with RunWriter(tmp_path, tensorboard=False) as writer:
        writer.spans(span("step", step) for step in range(25))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 10
    assert "15" in events[-1]["args"]["labels"]
    writer.close()
    assert len(writer.warnings) == 1
    assert "15" in writer.warnings[0]


def test_tensorboard_reads_the_curves(tmp_path, monkeypatch):
    monkeypatch.setattr("hyperbatch.record.board.INTERVAL_S", 1e9)
    # Other packages' warnings are not ours to fail on.
    code = """
        import sys
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        board = EventAccumulator(sys.argv[1]).Reload()
        for tag in sorted(board.Tags()["scalars"]):
            print(tag, *[(event.step, round(event.value, 4)) for event in board.Scalars(tag)])
    """
    with RunWriter(tmp_path) as writer:
        write_step(writer, 3, loss=1.25)
        write_step(writer, 4, loss=9.0)  # too soon after the last one: left to metrics.jsonl
        write_eval(writer, 5, 0.75)
        write_eval(writer, 8, 0.875)
    with RunWriter(tmp_path, resume_from_step=6) as writer:
        write_eval(writer, 8, 0.5)
    assert writer.warnings == []
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), str(tmp_path / "tensorboard")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert "train/loss (3, 1.25)" in out
    assert "eval/top1 (5, 0.75) (8, 0.5)" in out


def test_without_tensorboard_a_run_writes_the_rest(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with RunWriter(tmp_path) as writer:
        write_step(writer, 0)
        write_eval(writer, 1)
    assert writer.warnings == []
    assert not (tmp_path / "tensorboard").exists()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_writing_loads_neither_torch_nor_tensorflow(tmp_path):
    code = """
        import sys
        from pathlib import Path
        from hyperbatch.record import RunWriter
        with RunWriter(Path(sys.argv[1])) as writer:
            writer.eval(step=1, epoch=1, time_s=1, top1=1, samples=1)
        assert "tensorboard" in sys.modules
        assert not {"torch", "tensorflow", "hyperbatch.engine"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], check=True)


def make_record(**values) -> RunRecord:
    fields = {"recipe": "digits", "config": Config().to_dict(), "environment": {}, "world_size": 2, "grid": "1x2"}
    return RunRecord(**{**fields, **values})


def test_record_survives_the_disk(tmp_path):
    record = make_record(result=Result(reached=True, top1=0.99), warnings=["w"], trust_ratios={"fc.weight": 0.01})
    record.folder = str(tmp_path)
    record.save(tmp_path)
    assert RunRecord.load(tmp_path).to_dict() == json.loads(json.dumps(record.to_dict()))


def test_record_of_a_newer_version_loads_without_its_new_fields(tmp_path):
    values = make_record().to_dict()
    values["new"], values["result"]["new"] = 1, 2
    (tmp_path / "record.json").write_text(json.dumps(values))
    assert RunRecord.load(tmp_path).recipe == "digits"


def test_record_with_nan_is_strict_json(tmp_path):
    make_record(result=Result(top1=math.nan)).save(tmp_path)
    assert "NaN" not in (tmp_path / "record.json").read_text()


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"schema": 2}', '{"schema": 1}'])
def test_a_folder_without_a_good_record_is_refused_in_one_line(tmp_path, text):
    if text is not None:
        (tmp_path / "record.json").write_text(text)
    with pytest.raises(InputError) as caught:
        RunRecord.load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


# MLPerf's own checker reads mllog.txt. `training_4.0.0` is its last ruleset with ResNet-50.

# A row of the reference convergence points: batch 4,096.
REFERENCE = Config().override(
    batch_phases=(BatchPhase(0, 4096),),
    lr=10.0,
    warmup_epochs=5.0,
    weight_decay=2e-4,
    decay_power=2.0,
    end_lr=1e-4,
    epochs=42.0,
    seed=17,
    target_top1=0.759,
)


def write_mllog(folder: Path, config: Config, *, top1: float, reached: bool = True, **options) -> Path:
    with RunWriter(folder, tensorboard=False) as writer:
        events = MlperfEvents(writer, config, platform="one machine", **options)
        events.init_start()
        events.run_start(train_samples=1_281_167, eval_samples=50_000, world_size=64, batch_per_rank=64, accumulation=1)
        for epoch, accuracy in ((4, 0.3), (8, top1)):
            events.block_start(epoch - 4, epoch)
            events.eval_start(epoch)
            events.eval_stop(epoch, accuracy)
        events.run_stop(reached)
    return folder / "mllog.txt"


def passes_checker(path: Path, caplog) -> bool:
    compliance = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")
    caplog.set_level(logging.WARNING)
    checker = compliance.make_checker("training", "4.0.0", False, True)
    return compliance.main(str(path), "training_4.0.0/common.yaml", checker)[0]


def test_a_run_at_the_reference_values_passes_the_closed_division(tmp_path, caplog):
    assert passes_checker(write_mllog(tmp_path, REFERENCE, top1=0.7595, division="closed"), caplog), caplog.text


@pytest.mark.parametrize("change", [{"weight_decay": 3e-5}, {"end_lr": 0.0}, {"lars_eps": 1e-9}])
def test_the_closed_division_refuses_other_values(tmp_path, caplog, change):
    assert not passes_checker(
        write_mllog(tmp_path, REFERENCE.override(**change), top1=0.7595, division="closed"), caplog
    )


def test_the_closed_division_refuses_a_missed_target(tmp_path, caplog):
    path = write_mllog(tmp_path, REFERENCE, top1=0.7, reached=False, division="closed")
    assert not passes_checker(path, caplog)
    assert '"status":"aborted"' in path.read_text()


def test_any_resnet_run_passes_the_open_division(tmp_path, caplog):
    config = Config().override(model="resnet18", batch_phases=(BatchPhase(0, 32), BatchPhase(2, 64)), lr=0.7)
    assert passes_checker(write_mllog(tmp_path, config, top1=0.5), caplog), caplog.text


def test_a_log_without_its_end_does_not_pass(tmp_path, caplog):
    path = write_mllog(tmp_path, REFERENCE, top1=0.7595)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert not passes_checker(path, caplog)


def test_mllog_lines_have_mlperfs_fields_and_name_the_caller(tmp_path):
    lines = write_mllog(tmp_path, REFERENCE, top1=0.76).read_text().splitlines()
    assert all(line.startswith(":::MLLOG {") for line in lines)
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    for event in events:
        assert list(event) == ["namespace", "time_ms", "event_type", "key", "value", "metadata"]
        assert os.path.basename(event["metadata"]["file"]) == os.path.basename(__file__)
    values = {event["key"]: event["value"] for event in events}
    assert values["global_batch_size"] == 4096
    assert values["lars_opt_base_learning_rate"] == 10.0
    # 37 epochs of 1,281,167 samples at 4,096 a step.
    assert values["lars_opt_learning_rate_decay_steps"] == pytest.approx(37 * 1_281_167 / 4096, abs=1)
    accuracies = [event["metadata"]["epoch_num"] for event in events if event["key"] == "eval_accuracy"]
    assert accuracies == [4, 8]


def test_the_log_does_not_claim_a_cleared_cache(tmp_path):
    text = write_mllog(tmp_path, REFERENCE, top1=0.76).read_text()
    [line] = [line for line in text.splitlines() if '"cache_clear"' in line]
    assert json.loads(line.removeprefix(":::MLLOG "))["value"] is False
