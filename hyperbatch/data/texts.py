"""Formats the results of `hyperbatch data` as text: of info, pack and verify."""

from __future__ import annotations

from hyperbatch.data.pack import DataInfo, PackReport
from hyperbatch.data.verify import VerifyReport
from hyperbatch.tables import printable, text_table

_NAMES_SHOWN = 10
_MB = 1e6


def format_info(info: DataInfo) -> str:
    names = ", ".join(map(printable, info.class_names[:_NAMES_SHOWN])) + (
        ", ..." if info.classes > _NAMES_SHOWN else ""
    )
    titles = ("split", "images", "MB", "kB per image", "smallest class", "largest class")
    titles += ("median width px", "median height px", "unreadable", "other files")
    rows = [
        (
            name,
            f"{split.samples:,}",
            f"{split.bytes / _MB:,.1f}",
            f"{split.mean_bytes / 1e3:,.1f}",
            *(f"{count:,}" for count in split.samples_per_class),
            split.median_width,
            split.median_height,
            *(None if count is None else f"{count:,}" for count in (split.unreadable, split.other_files)),
        )
        for name, split in info.splits.items()
    ]
    known = [
        i for i in range(len(titles)) if any(row[i] is not None for row in rows)
    ]  # the sizes and unreadable headers are known for packed sets only
    table = text_table([titles[i] for i in known], [[row[i] for i in known] for row in rows])
    return "\n".join([f"{info.kind}, {info.classes:,} classes: {names}", "", *table])


def format_verify(report: VerifyReport) -> str:
    read = f"{_counted(report.samples, 'sample')}, {report.bytes / _MB:,.1f} MB"
    if report.ok:
        lines = [f"ok: {read}, no problem found"]
    else:
        lines = [f"NOT ok: {_counted(report.problem_count, 'problem')} in {read}"]
        lines += [f"  {printable(problem)}" for problem in report.problems]
        if report.problem_count > len(report.problems):
            lines.append(f"  and {report.problem_count - len(report.problems):,} more")
    return "\n".join([*lines, *(f"note: {note}" for note in report.notes)])


def format_pack(report: PackReport) -> str:
    lines = [
        f"packed {_counted(report.samples, 'sample')}, {report.bytes / _MB:,.1f} MB, "
        f"in {_counted(report.shards, 'shard')}"
    ]
    if report.resumed_shards:
        lines.append(f"  {_counted(report.resumed_shards, 'shard')} had been written before")
    if report.unreadable:
        lines.append(
            f"warning: {_counted(report.unreadable, 'image')} with an unreadable header packed; --skip-bad leaves out "
            f"images that cannot be decoded"
        )
    if report.skipped:
        lines.append(
            f"warning: {_counted(report.skipped, 'sample')} left out; they are listed in {report.skipped_list}"
        )
    return "\n".join(lines)


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")
