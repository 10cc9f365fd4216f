"""The files of a run: record.json, metrics.jsonl, layers.jsonl, mllog.txt, trace.json, tensorboard/.

`RunRecord` is the run's summary and the contract with the report. `RunWriter` appends to the folder during the run, so
that a run that is killed at any moment leaves readable files. This room does not import torch, so that a report can be
written on any machine.

    writer.py    RunWriter, which has one of each:
      lines.py     files of lines: writing and reading             trace.py    trace.json, also of predicted steps
      board.py     tensorboard/
    summary.py   RunRecord and Result: record.json                text.py     strict JSON
    checkout.py  the commit that ran
"""

from hyperbatch.record.checkout import commit
from hyperbatch.record.lines import parse_metric_line, read_metrics
from hyperbatch.record.summary import Result, RunRecord, note_failure
from hyperbatch.record.text import strict_json
from hyperbatch.record.trace import Span, TraceFile, group_spans, spans_per_rank, write_trace
from hyperbatch.record.writer import RunWriter

__all__ = [
    "Result",
    "RunRecord",
    "RunWriter",
    "Span",
    "TraceFile",
    "commit",
    "group_spans",
    "note_failure",
    "parse_metric_line",
    "read_metrics",
    "spans_per_rank",
    "strict_json",
    "write_trace",
]
