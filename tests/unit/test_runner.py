"""A runner whose job failed fails every later one: on the caller's thread and on a stream, which is played here."""

from __future__ import annotations

import contextlib

import pytest
import torch

from hyperbatch.comm.runner import ExchangeHandle, InlineRunner, StreamRunner


class Stream:
    def __init__(self, *_):
        pass

    def wait_stream(self, _):
        pass

    def wait_event(self, _):
        pass


class Event:
    def __init__(self, enable_timing=False):
        pass

    def record(self, _):
        pass

    def query(self):
        return True


@pytest.fixture
def capturing(monkeypatch):
    """CUDA's streams without a GPU. The value says whether a capture is under way."""
    state = {"capturing": False}
    for name, played in (
        ("Stream", Stream),
        ("Event", Event),
        ("current_stream", lambda *_: Stream()),
        ("stream", lambda _: contextlib.nullcontext()),
        ("is_current_stream_capturing", lambda: state["capturing"]),
    ):
        monkeypatch.setattr(torch.cuda, name, played)
    return state


def failing():
    raise RuntimeError("the first failure")


@pytest.mark.parametrize(
    "make", [InlineRunner, lambda: StreamRunner(torch.device("cuda", 0))], ids=["inline", "stream"]
)
def test_after_a_failure_every_later_job_fails_with_the_same_error(make, capturing):
    runner, ran, told = make(), [], []

    def wait(handle: ExchangeHandle) -> str:
        with pytest.raises(RuntimeError) as caught:
            handle.wait()
        return str(caught.value)

    runner.submit(lambda: ran.append(1), told.append).wait()
    assert wait(runner.submit(failing, told.append)) == "the first failure"
    assert wait(runner.submit(lambda: ran.append(2), told.append)) == "the first failure"
    assert ran == [1], "a later job does not even start"
    assert [type(error) for error in told] == [type(None), RuntimeError, RuntimeError]


def test_a_failed_capture_may_be_tried_again(capturing):
    runner = StreamRunner(torch.device("cuda", 0))
    capturing["capturing"] = True
    with pytest.raises(RuntimeError, match="the first failure"):
        runner.submit(failing)  # at once: what comes next would only hide it
    capturing["capturing"] = False
    ran = []
    runner.submit(lambda: ran.append(1)).wait()
    assert ran == [1]


def test_an_interrupt_is_not_kept_for_later():
    def interrupted():
        raise KeyboardInterrupt

    runner = InlineRunner()
    with pytest.raises(KeyboardInterrupt):
        runner.submit(interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.submit(lambda: None).wait()
