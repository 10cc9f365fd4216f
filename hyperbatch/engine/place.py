"""The place of a rank in a run (step and phase), which other ranks report when it makes no progress.

The heartbeat's thread reads it. This costs a step nothing, because the clock, the timer's marks and the exchange
already contain the information.
"""

from __future__ import annotations

from hyperbatch.comm.place import Place
from hyperbatch.comm.recorder import last_collective
from hyperbatch.engine.clock import Clock
from hyperbatch.engine.run import Run

ACCOUNTS = {"init": "set-up", "capture": "capture of a step", "pause": "checkpoint"}
# Maps the phase that the timer has marked last to what the rank does after it
AFTER = {
    "": "waiting for data",
    "data_wait": "forward pass",
    "forward": "backward pass",
    "backward": "gradient exchange",
    "exposed_comm": "update",
}


def place_of(clock: Clock, run: Run | None) -> Place:
    """Returns the place of this rank. run: None if it is not built yet."""
    if run is None:
        return Place(phase=ACCOUNTS["init"])
    account, done = clock.account, run.progress.step
    if account == "eval":
        evaluator = run.validation.evaluator
        batch = evaluator.batches_done + 1
        phase = "evaluation, exchange" if evaluator.waits else f"evaluation, batch {batch}"
        return Place(phase=phase, step=done, waits=evaluator.waits, must_go_on=True)
    if account != "train":
        return Place(phase=ACCOUNTS[account], step=done, must_go_on=account == "pause")
    ends = run.timer.ends
    phase = AFTER.get(ends[-1][0] if ends else "")
    # On a GPU the host is ahead of the device, and waits for it when it reads the losses.
    group = run.learner.sync.under_way()
    on_cpu = run.learner.device.type == "cpu"
    if phase is None:
        phase = "log" if on_cpu else "waiting for the device"
    waits = phase in ("gradient exchange", "log", "waiting for the device") or group is not None
    return Place(phase=phase, step=done + 1, group=group, waits=waits, marks=len(ends), must_go_on=True)


def collective_of(clock: Clock) -> str:
    """Returns the collective that this rank waits in, or its last one; "" during set-up and captures, because a capture
    allows no device queries."""
    return "" if clock.account in ("init", "capture") else last_collective()
