"""What torch's flight recorder says, in a line."""

from __future__ import annotations

import json

from hyperbatch.comm import recorder


def entry(number, *, group="0", name="nccl:all_reduce", retired=False, state="scheduled", p2p=0):
    return {
        "collective_seq_id": number,
        "p2p_seq_id": p2p,
        "is_p2p": bool(p2p),
        "process_group": [group, "default_pg"],
        "profiling_name": name,
        "input_sizes": [[7, 2]],
        "input_dtypes": ["Float"],
        "state": state,
        "retired": retired,
        "time_created_ns": 100 + number + p2p,
    }


def test_the_oldest_that_is_under_way_is_named():
    done = [entry(1, retired=True, state="completed"), entry(2, state="completed")]
    assert recorder.in_words([*done, entry(4, state="started"), entry(3, state="started")]) == (
        "waits in nccl:all_reduce number 3 of process group 0 (7x2 Float), and 1 after it"
    )
    assert recorder.in_words(done) == "its last collective was nccl:all_reduce number 2 of process group 0 (7x2 Float)"
    assert "nccl:send number 5 of process group 3" in recorder.in_words([entry(0, p2p=5, name="nccl:send", group="3")])


def test_without_a_recorder_nothing_is_said(monkeypatch):
    assert recorder.in_words([]) == ""
    module = recorder._distributed_c10d
    for name in recorder._DUMPS:
        monkeypatch.delattr(module, name, raising=False)
    assert recorder.last_collective() == ""
    monkeypatch.setattr(module, "_dump_nccl_trace_json", lambda: b'{"entries": [{"other": 1}]}', raising=False)
    assert recorder.last_collective() == "", "another version writes it otherwise"
    known = json.dumps({"entries": [entry(9)]}).encode()
    monkeypatch.setattr(module, "_dump_nccl_trace_json", lambda: known)
    assert recorder.last_collective().startswith("waits in nccl:all_reduce number 9 of")
