"""The sections of a report on one run, each drawn from the run's record. A section without data is omitted."""

from __future__ import annotations

from typing import Any

from hyperbatch.config import format_epochs
from hyperbatch.record import RunRecord
from hyperbatch.report import units
from hyperbatch.report.markup import Html, el, join, table
from hyperbatch.report.runs import Run


def card(title: str, lead: Any, *body: Any, long: bool = False) -> Html:
    return el(
        "section",
        el("h2", title),
        el("p", lead, cls="lead") if lead else None,
        *body,
        cls="card long" if long else "card",
    )


def verdict(run: Run) -> tuple[str, str, str]:
    """Returns (kind of the pill, its text, the headline)."""
    if run.record is None:
        best = run.best_top1
        return "bad", "no record", f"{units.percent(best)} so far" if best is not None else "Not finished"
    result = run.record.result
    if run.record.error:
        return "bad", "failed", f"Failed after {units.plural(result.steps, 'step')}"
    if result.reached and result.target_top1 is not None:
        took = units.duration(result.time_to_target_s)
        return "good", f"reached {units.percent(result.target_top1)} top-1", f"{took} to target"
    if result.top1 is None:
        return "plain", "not evaluated", f"{units.plural(result.steps, 'step')} trained"
    if result.target_top1 is None:
        return "plain", "no target set", f"{units.percent(result.top1)} top-1"
    return "warn", f"missed {units.percent(result.target_top1)}", f"{units.percent(result.top1)} top-1"


def headline(run: Run, *more: tuple[str, str, str]) -> Html:
    """more: tiles from other modules."""
    kind, pill, big = verdict(run)
    return join(
        el("span", pill, cls=f"pill {kind}"),
        el("p", big, cls="big"),
        el("p", "on ", ", ".join(filter(None, hardware(run.record))), cls="lead") if run.record else None,
        el("div", [_tile(*tile) for tile in (*_tiles(run), *more)], cls="tiles"),
    )


def _tile(label: str, value: str, more: str = "") -> Html:
    return el(
        "div",
        el("div", label, cls="label"),
        el("div", value, cls="value"),
        el("div", more, cls="more") if more else None,
        cls="tile",
    )


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    if run.record is None:
        return [("steps written", units.count(len(run.steps["step"])), "in metrics.jsonl")]
    record, result, best = run.record, run.record.result, run.best_top1
    better = best is not None and result.top1 is not None and best > result.top1
    batches = [phase["global_batch"] for phase in record.phases if "global_batch" in phase]
    per_rank = (result.images_per_s or 0.0) / max(1, record.world_size)
    exchange = f"{record.grid}, {config_value(record, 'comm', 'algorithm')} all-reduce"
    beside = {"set-up": record.clock.get("init_s"), "evaluation": record.clock.get("eval_s")}
    around = ", ".join(f"{name} {units.duration(seconds)}" for name, seconds in beside.items() if seconds)
    notes = [
        f"best {units.percent(best)}" if better else "",
        "" if result.top5 is None else f"{units.percent(result.top5)} top-5",
        "" if result.val_loss is None else f"loss {units.number(result.val_loss)}",
        "averaged weights" if config_value(record, "optim", "averaging") == "ema" else "",
        "" if result.top1_plain is None else f"{units.percent(result.top1_plain)} without test-time augmentation",
    ]
    return [
        ("top-1 accuracy", units.percent(result.top1), ", ".join(filter(None, notes))),
        ("throughput", f"{units.count(result.images_per_s)} img/s", f"{units.count(per_rank)} per rank"),
        ("training", units.duration(result.train_s), around),
        ("trained for", format_epochs(round(result.epochs or 0.0, 2)), units.plural(result.steps, "step")),
        ("ranks", units.count(record.world_size), exchange if record.world_size > 1 else "no exchange"),
        ("global batch", " → ".join(units.count(b) for b in batches) or units.NONE, ""),
        *_compiled_tile(record),
        *_data_tile(record),
    ]


def compiled_parts(record: RunRecord) -> tuple[str, str] | None:
    """Returns what was compiled and how long it took; None if nothing was compiled, or the record has no such data."""
    made = record.compiled
    regions, kinds, seconds = (made.get(name) for name in ("regions", "kinds", "seconds"))
    if not regions or not kinds or seconds is None:
        return None
    what = "the whole model" if regions == 1 else f"{units.count(regions)} blocks of {units.plural(kinds, 'kind')}"
    warm = "" if made.get("cache_misses") else ", from the disk"
    return what, f"{units.duration(seconds)} of the set-up{warm}"


def _compiled_tile(record: RunRecord) -> list[tuple[str, str, str]]:
    parts = compiled_parts(record)
    return [] if parts is None else [("compiled", *parts)]


def _data_tile(record: RunRecord) -> list[tuple[str, str, str]]:
    """Returns the tile with the data's own counts; none for older records."""
    images, held_back, classes = (record.data.get(name) for name in ("train_samples", "eval_samples", "classes"))
    if not images:
        return []
    more = f"{units.count(held_back)} for validation, {units.plural(classes or 0, 'class')}"
    return [("training data", units.plural(images, "image"), more)]


def hardware(record: RunRecord) -> tuple[str, str]:
    """Returns the name of the hardware and a detail about it."""
    env = record.environment
    device = str(env.get("device") or env.get("device_type") or "unknown")
    if env.get("device_type") == "cpu":
        return "CPU", units.plural(env.get("cores") or 0, "core") + ("" if device == "cpu" else f" ({device})")
    name = f"{record.world_size} × {device}" if record.world_size > 1 else device
    return name, f"CUDA {env['cuda']}" if env.get("cuda") else ""


def config_value(record: RunRecord, section: str, name: str) -> Any:
    part = record.config.get(section)
    return part.get(name) if isinstance(part, dict) else None


def alerts(run: Run) -> Html:
    out = []
    if run.problem:
        out.append(el("p", run.problem, cls="alert bad"))
    if run.record and run.record.error:
        out.append(el("p", run.record.error, cls="alert bad"))
    if run.first_bad_step is not None:
        out.append(el("p", f"The loss was not finite from step {run.first_bad_step:,} on.", cls="alert bad"))
    found = [*run.record.rollbacks, *run.record.stragglers] if run.record else []
    out += [el("p", str(each.get("message", "")), cls="alert warn") for each in found if isinstance(each, dict)]
    out += [el("p", warning, cls="alert warn") for warning in (run.record.warnings if run.record else [])]
    return join(*out)


def groups(run: Run) -> Html | None:
    plan = run.record.plan if run.record else {}
    items = plan.get("groups") or []
    if not items or run.record is None:
        return None
    total = sum(group["bytes"] for group in items) or 1
    default = config_value(run.record, "comm", "algorithm") or units.NONE
    rows = []
    for group in items:
        names = list(group["parameters"])
        ends = f"{names[0]} … {names[-1]}" if len(names) > 1 else "".join(names)
        share = el("span", el("span", style=f"width:{group['bytes'] / total * 100:.1f}%"), cls="mini")
        rows.append(
            [
                group["index"],
                ends,
                len(names),
                join(share, units.size(group["bytes"])),
                group.get("dtype", units.NONE),
                group.get("algorithm") or default,
            ]
        )
    tensors = sum(len(group["parameters"]) for group in items)
    lead = (
        f"{units.plural(tensors, 'tensor')}, {units.size(total)}, in {units.plural(len(items), 'group')} by the "
        f"{plan.get('strategy', 'unknown')} strategy, in the order in which backward finishes them."
    )
    head = ["group", "tensors", "count", "bytes", "precision", "all-reduce"]
    body = table(head, rows, numeric={2, 3}, cls="stack")
    return card("Gradient groups", lead, body if len(rows) <= 24 else folded(f"all {len(rows)} groups", body))


def folded(text: str, body: Html) -> Html:
    return el("details", el("summary", text), body)


def phases(run: Run) -> Html | None:
    if run.record is None or not run.record.phases:
        return None
    rows = []
    for phase in run.record.phases:
        done = phase.get("first_step") or 0  # steps done when the phase began
        logged = [epoch for step, epoch in zip(run.steps["step"], run.steps["epoch"], strict=True) if step <= done]
        rows.append(
            [
                units.count(done),
                units.number(round(logged[-1], 2)) if logged else "0",
                units.count(phase.get("global_batch")),
                units.count(phase.get("batch_per_rank")),
                units.count(phase.get("accumulation")),
            ]
        )
    lead = "Batch-size control as it was carried out. Global batch = batch per rank × micro-steps × ranks."
    head = ["after step", "epoch", "global batch", "batch per rank", "micro-steps"]
    return card("Batch phases", lead, table(head, rows, numeric=set(range(5)), cls="tight stack"))
