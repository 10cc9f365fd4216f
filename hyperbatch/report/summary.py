"""The last lines of `hyperbatch train`: whether the target was reached, how fast, and where the report is."""

from __future__ import annotations

from pathlib import Path

from hyperbatch.config import format_epochs
from hyperbatch.record import RunRecord
from hyperbatch.report import sections, units


def summary(record: RunRecord) -> str:
    """Returns a few aligned lines of plain text, starting with the verdict."""
    result = record.result
    rows = [("accuracy", accuracy(record))]
    rows.append(("speed", f"{units.count(result.images_per_s)} images/s on {units.plural(record.world_size, 'rank')}"))
    spent = f"{units.duration(result.train_s)} of training, {units.plural(result.steps, 'step')}"
    rows.append(("trained", f"{format_epochs(round(result.epochs or 0.0, 2))} in {spent}"))
    rows.append(("time", time_spent(record)))
    if compiled := sections.compiled_parts(record):
        rows.append(("compiled", ", ".join(compiled)))
    if record.warnings:
        more = f" (and {len(record.warnings) - 1} more in the report)" if len(record.warnings) > 1 else ""
        rows.append(("warning", record.warnings[0] + more))
    page = Path(record.folder) / "report.html"
    if record.folder and (not record.error or page.exists()):  # a failed run has a report only if the user wrote one
        rows.append(("report", str(page)))
    return "\n".join([verdict(record), *(f"  {label:<9} {text}" for label, text in rows)])


def accuracy(record: RunRecord) -> str:
    result = record.result
    if result.top1 is None:
        return "not evaluated"
    averaged = " with averaged weights" if sections.config_value(record, "optim", "averaging") == "ema" else ""
    text = f"{units.percent(result.top1)} top-1{averaged}"
    if result.top1_plain is not None:
        text += f" ({units.percent(result.top1_plain)} without test-time augmentation)"
    if result.top5 is not None:
        text += f", {units.percent(result.top5)} top-5"
    return text if result.val_loss is None else f"{text}, loss {units.number(result.val_loss)}"


def time_spent(record: RunRecord) -> str:
    parts = {"set-up": "init_s", "training": "train_s", "evaluation": "eval_s"}
    return ", ".join(f"{label} {units.duration(record.clock.get(name))}" for label, name in parts.items())


def verdict(record: RunRecord) -> str:
    result = record.result
    if record.error:
        return f"{record.recipe} failed: {record.error}"
    if result.target_top1 is None:
        return f"{record.recipe} finished (no target was set)"
    target = f"{units.percent(result.target_top1)} top-1"
    if result.reached:
        return f"{record.recipe} reached {target} in {units.duration(result.time_to_target_s)}"
    return f"{record.recipe} missed its target of {target}"
