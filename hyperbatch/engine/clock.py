"""Counts the seconds of a run in separate accounts. A resumed run continues the counts of its checkpoint.

init | train ... eval ... train ... capture ... train ... pause ... train | stop
     ^ the run's time starts here, before training data is used, as in MLPerf and speed runs
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Clock:
    """Books every moment to exactly one account.

    `capture` is the preparation of shapes that first occur during the run. The preparation of shapes before the first
    step belongs to `init`. `pause` is for checkpoints and reports.
    """

    def __init__(self) -> None:
        self.seconds = {"init": 0.0, "train": 0.0, "capture": 0.0, "eval": 0.0, "pause": 0.0}
        self.account = "init"  # the account to which time is booked now
        self._since = time.perf_counter()

    def switch(self, account: str) -> None:
        now = time.perf_counter()
        self.seconds[self.account] += now - self._since
        self.account, self._since = account, now

    @contextlib.contextmanager
    def booked(self, account: str) -> Iterator[None]:
        before = self.account
        self.switch(account)
        try:
            yield
        finally:
            self.switch(before)

    @property
    def run_s(self) -> float:
        """Seconds since training began. It includes evaluation and captures, but neither pauses nor initialisation."""
        self.switch(self.account)
        return self.seconds["train"] + self.seconds["capture"] + self.seconds["eval"]

    @property
    def train_s(self) -> float:
        """Seconds of training alone. Images per second refer to this time."""
        self.switch(self.account)
        return self.seconds["train"]

    def state_dict(self) -> dict[str, float]:
        self.switch(self.account)
        return {f"{name}_s": value for name, value in self.seconds.items()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Adds the seconds of the run that this one continues."""
        for name in self.seconds:
            self.seconds[name] += state.get(f"{name}_s", 0.0)  # an older checkpoint has no "capture_s"
