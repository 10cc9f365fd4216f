"""Describes this rank's current collective in one line, from torch's flight recorder, for a run that hangs.

torch records the last few thousand collectives of NCCL, and in newer versions of gloo, unless TORCH_FR_BUFFER_SIZE
(in older versions TORCH_NCCL_TRACE_BUFFER_SIZE) is 0. Collectives of a captured step are not recorded.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch._C import _distributed_c10d

# These dumps have no stack traces, which would take seconds to write. A build of torch has only the dumps of its own
# backends.
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def last_collective() -> str:
    """Describes the oldest collective in flight, or the last one if none is in flight; "" if nothing is recorded."""
    dumps = [getattr(_distributed_c10d, name) for name in _DUMPS if hasattr(_distributed_c10d, name)]
    with contextlib.suppress(Exception):  # a version of torch with another format
        return in_words([entry for dump in dumps for entry in json.loads(dump()).get("entries", [])])
    return ""


def in_words(entries: Sequence[Mapping[str, Any]]) -> str:
    """Like `last_collective`, from one rank's entries of the recorder."""
    ordered = sorted(entries, key=lambda entry: entry["time_created_ns"])
    under_way = [entry for entry in ordered if not entry["retired"] and entry["state"] != "completed"]
    if under_way:
        more = f", and {len(under_way) - 1} after it" if len(under_way) > 1 else ""
        return f"waits in {_name(under_way[0])}{more}"
    return f"its last collective was {_name(ordered[-1])}" if ordered else ""


def _name(entry: Mapping[str, Any]) -> str:
    """Returns for example "nccl:all_reduce number 341 of process group 0 (4320 Float)"."""
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    sizes = ", ".join(
        "x".join(map(str, size)) + f" {kind}"
        for size, kind in zip(entry["input_sizes"][:1], entry["input_dtypes"][:1], strict=False)
    )
    group = entry["process_group"][0]
    return f"{entry['profiling_name']} number {number} of process group {group}" + (f" ({sizes})" if sizes else "")


class Question:
    """Calls `ask` in a separate thread, because the call blocks in the driver if the device hangs."""

    def __init__(self, ask: Callable[[], str]) -> None:
        self.answer = ""  # empty until `ask` has returned
        self._ask = ask
        threading.Thread(target=self._run, name="hyperbatch-recorder", daemon=True).start()

    def _run(self) -> None:
        self.answer = self._ask()
