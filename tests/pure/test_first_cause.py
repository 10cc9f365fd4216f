"""Which of several ends of ranks was the first: rules over exit codes and words."""

from __future__ import annotations

import json
import signal
from types import SimpleNamespace

import pytest

from hyperbatch.engine.agent import _explain
from hyperbatch.engine.culprit import Exit, first_cause
from hyperbatch.errors import InputError, Preempted, RunFailed

TERM, KILL = -signal.SIGTERM, -signal.SIGKILL


def words(message, time, **more):
    return {"kind": "RunFailed", "message": message, "time": time} | more


def lost(rank, time=2.0):
    return words(f"rank {rank}: RuntimeError: Connection closed by peer", time, after="exchange")


def cause(exits, said):
    return first_cause({rank: Exit(pid=100 + rank, code=code) for rank, code in exits.items()}, said)


def test_own_words_win_although_the_one_that_said_them_had_not_ended_when_the_agent_looked():
    model = words("rank 2: ValueError: bad", 1.0, rank=2)
    assert cause({0: 1}, {0: lost(0, 0.5), 2: model}) == model
    assert cause({0: 1, 1: TERM, 2: 1}, {0: words("rank 2: ValueError: bad", 1.0, heard=True), 2: model}) == model


def test_the_first_own_words_in_time():
    assert cause({0: 1, 1: 1}, {0: words("late", 2.0), 1: words("early", 1.0)})["message"] == "early"


def test_an_exit_without_words_is_named_by_its_code_whoever_lost_it():
    found = cause({1: 7, 0: 1, 2: TERM}, {0: lost(0)})
    assert found["message"] == "rank 1 (pid 101) exited with 7"
    assert (found["rank"], found["kind"]) == (1, "RunFailed")
    assert cause({0: 1, 1: KILL}, {0: lost(0)})["message"] == "rank 1 (pid 101) was killed by SIGKILL; out of memory?"


def test_sigterm_is_the_agents_unless_it_came_first():
    interrupted = words("rank 0 was interrupted", 1.0, after="signal")
    assert cause({1: TERM, 0: 1}, {0: interrupted})["message"] == "rank 1 (pid 101) was killed by SIGTERM"
    assert cause({0: 1, 1: TERM}, {0: interrupted})["message"] == "rank 0 was interrupted"
    assert cause({0: 1, 1: TERM}, {0: lost(0)})["message"] == "rank 1 (pid 101) was killed by SIGTERM"


def test_a_silent_rank_is_told_by_those_who_miss_it():
    said = {0: words("rank 1 has not responded for 6.1 s", 1.0)}
    assert cause({0: 1, 1: KILL}, said)["message"] == "rank 1 has not responded for 6.1 s"


def test_a_rank_that_hangs_after_another_failed_is_mentioned():
    found = cause({0: 1, 1: KILL}, {0: words("11 unreadable training samples", 1.0)})
    assert found["message"] == "11 unreadable training samples; rank 1 did not respond and was terminated"


def test_a_broken_exchange_is_told_where_nobody_knows_more():
    assert cause({0: 1, 1: 1}, {0: lost(0, 2.0), 1: lost(1, 1.0)})["message"].startswith("rank 1: RuntimeError")


@pytest.mark.parametrize("kind", [InputError, RunFailed, Preempted])
def test_the_command_ends_as_the_rank_says(tmp_path, kind):
    """A rank that made room exits with 1 when it could not leave a record, and the command with 75 all the same."""
    (tmp_path / "rank-0.json").write_text(json.dumps(words("it ends", 1.0, kind=kind.__name__)))
    failed = SimpleNamespace(failures={0: SimpleNamespace(pid=100, exitcode=1)})
    assert type(_explain(failed, tmp_path, str)) is kind
