"""What torch's flight recorder knows of this rank's collectives, in one line: for a run that hangs.

torch keeps the last few thousand, those of NCCL and in newer versions those of gloo, too, unless TORCH_FR_BUFFER_SIZE
(before: TORCH_NCCL_TRACE_BUFFER_SIZE) is 0. Collectives of a captured step are not among them.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch._C import _distributed_c10d

# Without stack traces, which take seconds to write. A build of torch has those of its own backends.
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def last_collective() -> str:
    """The oldest collective that is under way, or else the last one; empty: nothing is known."""
    dumps = [getattr(_distributed_c10d, name) for name in _DUMPS if hasattr(_distributed_c10d, name)]
    with contextlib.suppress(Exception):  # a version that writes something else
        return in_words([entry for dump in dumps for entry in json.loads(dump()).get("entries", [])])
    return ""


def in_words(entries: Sequence[Mapping[str, Any]]) -> str:
    """entries: of one rank, as the recorder has them."""
    ordered = sorted(entries, key=lambda entry: entry["time_created_ns"])
    under_way = [entry for entry in ordered if not entry["retired"] and entry["state"] != "completed"]
    if under_way:
        more = f", and {len(under_way) - 1} after it" if len(under_way) > 1 else ""
        return f"waits in {_name(under_way[0])}{more}"
    return f"its last collective was {_name(ordered[-1])}" if ordered else ""


def _name(entry: Mapping[str, Any]) -> str:
    """nccl:all_reduce number 341 of process group 0 (4320 Float)"""
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    sizes = ", ".join(
        "x".join(map(str, size)) + f" {kind}"
        for size, kind in zip(entry["input_sizes"][:1], entry["input_dtypes"][:1], strict=False)
    )
    group = entry["process_group"][0]
    return f"{entry['profiling_name']} number {number} of process group {group}" + (f" ({sizes})" if sizes else "")


class Question:
    """Asked in a thread of its own: the answer waits for the driver where it is the device that hangs."""

    def __init__(self, ask: Callable[[], str]) -> None:
        self.answer = ""  # until it is there
        self._ask = ask
        threading.Thread(target=self._run, name="hyperbatch-recorder", daemon=True).start()

    def _run(self) -> None:
        self.answer = self._ask()
