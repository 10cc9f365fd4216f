"""Finds the rank of a failed run that failed first, from the exit codes of ranks and the reasons that they reported.

    own words      an error of the model, the data or our code: the earliest counts
    no words       the rank was killed, or called os._exit: only its exit code or signal is known
    words "after"  a broken exchange, or a signal: they may follow from another rank's end, and count last

The agent ends the surviving ranks by SIGTERM as soon as one has failed. Ranks are therefore given in the order in which
they ended: a rank that ended by SIGTERM before all others was not ended by the agent.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Exit:
    """How a rank's process ended; a negative code is a signal's number."""

    pid: int
    code: int

    @property
    def signal(self) -> int:
        """The signal that ended the process, or 0. A rank that trains handles SIGTERM and then exits with
        128 + SIGTERM, as a shell reports it (engine/preempt.py)."""
        return signal.SIGTERM if self.code == 128 + signal.SIGTERM else max(0, -self.code)

    @property
    def text(self) -> str:
        if not self.signal:
            return f"exited with {self.code}"
        try:
            name = signal.Signals(self.signal).name
        except ValueError:  # a real-time signal
            name = f"signal {self.signal}"
        return f"was killed by {name}" + ("; out of memory?" if name == "SIGKILL" else "")


def first_cause(exits: Mapping[int, Exit], said: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the words that the user should see. exits: of failed ranks, in the order in which they ended; not empty.

    said: the words that ranks reported before they ended (`ending.words_of`), also of ranks that are not in `exits`.
    """
    own = {rank: words for rank, words in said.items() if "after" not in words}
    if own:
        words = dict(own[_first(own)])
        return words | {"message": words["message"] + _unheard(exits, said, words["message"])}
    # The exit of a rank without words says more than the words of another rank, which only noticed that it was gone.
    ended = [rank for rank in exits if rank not in said or said[rank]["after"] == "signal"]
    if not ended:
        return dict(said[_first(said)])
    first = next(iter(exits))
    rank = next((rank for rank in ended if rank == first or exits[rank].signal != signal.SIGTERM), ended[0])
    if rank in said:
        return dict(said[rank])
    exit = exits[rank]
    return {
        "kind": "RunFailed",
        "message": f"rank {rank} (pid {exit.pid}) {exit.text}",
        "time": time.time(),
        "rank": rank,
        "host": socket.gethostname(),
        "step": None,
    }


def _first(said: Mapping[int, Mapping[str, Any]]) -> int:
    """Returns the rank with the earliest words. Words that a rank adopted from another keep the original's time."""
    return min(said, key=lambda rank: (said[rank]["time"], "heard" in said[rank]))


def _unheard(exits: Mapping[int, Exit], said: Mapping[int, Mapping[str, Any]], message: str) -> str:
    """Returns an addition to the message if a rank had to be killed after another failed: it hung or was stopped."""
    killed = [rank for rank, exit in exits.items() if exit.signal == signal.SIGKILL and rank not in said]
    return (
        f"; rank {killed[0]} did not respond and was terminated"
        if killed and f"rank {killed[0]}" not in message
        else ""
    )
