"""The planner's prediction for a run: a step of its model, batch, ranks and groups on its device's machine file."""

from __future__ import annotations

from hyperbatch.config import Config
from hyperbatch.errors import InputError
from hyperbatch.plan.clusters import cluster_of_device
from hyperbatch.plan.planner import plan_step
from hyperbatch.plan.types import StepTiming
from hyperbatch.record import RunRecord
from hyperbatch.schedule import Phase


def predicted_step(record: RunRecord) -> tuple[str, StepTiming] | None:
    """Returns (name of the machine file, step of the run's last batch phase), or None if the planner does not know the
    model or the device. The record may have been written by anyone, so errors in it also mean None.
    """
    env = record.environment
    cluster = cluster_of_device("" if env.get("device_type") == "cpu" else str(env.get("device") or "?"))
    if cluster is None or not record.phases or not record.config.get("model"):
        return None
    try:
        last = record.phases[-1]
        per_rank, accumulation = int(last["batch_per_rank"]), int(last["accumulation"])
        phase = Phase(
            from_position=0,
            global_batch=int(last["global_batch"]),
            share_per_rank=int(last.get("share_per_rank") or per_rank * accumulation),
            accumulation=accumulation,
            batch_per_rank=per_rank,
        )
        config = Config.from_dict(record.config).with_precision("fp16")
        if record.data.get("classes"):
            config = config.override(classes=int(record.data["classes"]))
        algorithm = config.comm.algorithm
        step = plan_step(cluster, config, record.world_size, phase, grid=record.grid, algorithm=algorithm)
    except (InputError, KeyError, TypeError, ValueError):
        return None
    return cluster.name, step.timing
