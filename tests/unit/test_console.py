"""What a run says: what fits into a narrow terminal, and lines in a log."""

import io
import os
import re
import sys
import time

import pytest
from rich.console import Console as RichConsole

from hyperbatch.config import Config
from hyperbatch.data.source import DataCounts
from hyperbatch.engine import console as module
from hyperbatch.engine.console import Console, Pace, fitted, format_duration
from hyperbatch.engine.evaluate import Score
from hyperbatch.launch import _told_if_slow, opening

PARTS = ("step 120/450", "1:20 left", "epoch 2.4", "loss 1.234", "12,345 images/s", "rate 0.5")


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (5, "step 120/450"),
        (22, "step 120/450"),
        (23, "step 120/450  1:20 left"),
        (39, "step 120/450  1:20 left  epoch 2.4"),
        (90, "  ".join(PARTS)),
    ],
)
def test_steps_and_time_left_are_kept_longest(columns, line):
    assert fitted(PARTS, columns) == line


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (42.4, "0:42"), (80, "1:20"), (7384, "2:03:04")])
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def test_the_time_left_follows_the_pace_since_the_start():
    pace = Pace(100, 20, now_s=1000.0)
    assert pace.left_s(20, 1005.0) is None
    assert pace.left_s(40, 1010.0) == 30.0  # half a second a step
    assert pace.parts(40, 1.5, 0.5, 0.1, 2e4, 1010.0)[:2] == ("step 40/100", "0:30 left")
    assert [pace.line_is_due(1000.0 + s) for s in (9, 10, 11, 19, 20.5)] == [False, True, False, False, True]


def test_the_best_accuracy_stands_beside_the_target():
    assert Pace(100, 0).to_target() == ""
    pace = Pace(100, 0, target=0.759, now_s=0.0)
    assert pace.parts(1, 0.1, 2.0, 0.1, 100.0, 1.0)[1:4] == ("1:39 left", "target 75.9 %", "epoch 0.1")
    for top1 in (0.5, 0.7512, 0.6):
        pace.evaluated(top1)
    assert pace.to_target() == "target 75.9 %: best 75.12 %"
    resumed = Pace(100, 50, target=0.99, best=0.972)
    assert resumed.to_target() == "target 99 %: best 97.20 %"


def test_a_first_step_that_takes_long_is_told(monkeypatch, capsys):
    monkeypatch.setattr(module, "LINE_S", 0.05)
    voice, said, deadline = Console(), "", time.monotonic() + 30
    voice.start(100, 20)
    while not said and time.monotonic() < deadline:
        time.sleep(0.01)
        said += capsys.readouterr().err
    voice.close()
    assert said == "step 20/100  running the first step ...\n"


def terminal(width):
    return RichConsole(file=io.StringIO(), force_terminal=True, width=width, highlight=False, _environ={})


@pytest.mark.parametrize("width", [30, 60, 120])
def test_the_line_of_a_terminal_has_its_width(width, monkeypatch):
    out = terminal(width)
    voice = Console(out=out)
    voice.stage("compiling kernels")
    voice.count(12, 40)
    time.sleep(0.2)
    voice.start(450)
    monkeypatch.setattr(module.time, "monotonic", lambda: voice._pace._start_s + 60)
    voice.step(120, 2.4, 1.2345, 0.5, 12345.0)
    voice.eval(120, 2.4, Score(top1=0.5, samples=10), None)
    voice.close()
    assert isinstance(out.file, io.StringIO)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.file.getvalue()).replace("\r", "\n")
    assert "compiling kernels 12/40 ..."[: width - 8] in text
    assert "step 120/450  2:45 left" in text
    assert ("loss" in text) == (width > 30)
    assert "top-1  50.00%" in text
    assert text.splitlines()[-1].strip() == "", "the line of a run that has ended is gone"
    assert all(len(line) <= max(width, 60) for line in text.splitlines())


def test_a_log_gets_lines_of_steps_now_and_then_and_of_stages_that_last(monkeypatch, capsys):
    monkeypatch.setattr(module, "STAGE_S", 0.05)
    voice = Console()
    voice.stage("opening the data")
    voice.stage("building the model")
    deadline = time.monotonic() + 30
    said = ""
    while "building" not in said and time.monotonic() < deadline:
        time.sleep(0.01)
        said += capsys.readouterr().err
    assert "building the model ...\n" in said
    voice.start(100)
    for second in range(1, 36):
        monkeypatch.setattr(module.time, "monotonic", lambda s=second: voice._pace._start_s + s)
        voice.step(second, second / 10, 2.0, 0.1, 100.0)
    voice.say("note: [bold] is a word, and a line that is longer than eighty characters is not broken into two lines")
    voice.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "step 10/100  1:30 left  epoch 1.0  loss 2.000  100 images/s  rate 0.1"
    assert [line.split()[1] for line in lines[:3]] == ["10/100", "20/100", "30/100"]
    assert lines[3].startswith("note: [bold] is a word")
    assert lines[3].endswith("two lines")


def test_a_log_says_now_and_then_how_far_a_stage_has_come(monkeypatch, capsys):
    monkeypatch.setattr(module, "STAGE_S", 1e6)
    voice = Console()
    voice.stage("compiling kernels")
    start_s = time.monotonic()
    voice.count(1, 30)  # nothing before the stage has taken long
    voice._say_stage()
    for second in range(0, 25, 4):
        monkeypatch.setattr(module.time, "monotonic", lambda s=second: start_s + 1 + s)
        voice.count(second, 40)
    voice.stage("warming up")
    voice._say_stage()
    voice.close()
    lines = capsys.readouterr().err.splitlines()
    counted = [f"compiling kernels {count} ..." for count in ("1/30", "12/40", "24/40")]
    assert lines == [*counted, "warming up ..."]


def test_other_ranks_are_silent(capsys):
    voice = Console(enabled=False)
    voice.stage("opening the data")
    voice.count(1, 2)
    voice.start(10)
    voice.step(1, 0.1, 2.0, 0.1, 100.0)
    voice.eval(1, 0.1, Score(top1=0.5, samples=10), None)
    voice.close()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_the_opening_line_says_what_is_trained_on_what_and_where(monkeypatch):
    config = Config(recipe="digits").override(model="resnet8", dataset="digits", out="runs/mine")
    counts = DataCounts(train_samples=1433, eval_samples=364, classes=10)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    line = "digits: resnet8 on digits (1,433 training images, 10 classes), 2 ranks on the CPU, in runs/mine"
    assert opening(config, 2, counts) == line
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    on_gpus = config.override(data="/data/photos", out=None)
    assert opening(on_gpus, 2) == "digits: resnet8 on /data/photos, 2 ranks on GPUs"
    assert opening(on_gpus, 1) == "digits: resnet8 on /data/photos, 1 rank on a GPU"
    assert opening(on_gpus.override(device="cpu"), 1).endswith("1 rank on the CPU")


def test_data_that_takes_long_is_no_reason_to_be_silent(monkeypatch, capsys):
    monkeypatch.setattr("hyperbatch.launch.OPENING_S", 0.01)
    said, deadline = "", time.monotonic() + 30
    with _told_if_slow("digits: resnet8"):
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
            said = capsys.readouterr().err
    assert said == "digits: resnet8; reading the data ...\n"
    monkeypatch.setattr("hyperbatch.launch.OPENING_S", 1e6)
    with _told_if_slow("digits: resnet8"):
        pass
    assert capsys.readouterr().err == ""


def test_a_closed_pipe_is_an_error_and_not_the_end_of_the_process(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with monkeypatch.context() as patch, open(write, "w") as pipe:
        patch.setattr(sys, "stderr", pipe)
        with pytest.raises(BrokenPipeError):
            Console().say("a line")
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), write)  # so that the file can be closed


def test_a_notebook_gets_plain_lines_on_stderr(monkeypatch, capsys):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    Console().say("a line")
    assert capsys.readouterr() == ("", "a line\n")
