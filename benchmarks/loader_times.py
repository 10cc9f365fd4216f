"""Where the time between JPEG files and weights goes: training runs with one loader after the other, in one process.

    python -m benchmarks.loader_times OUT.json [--seconds 90]

ResNet-50, batch 400, as `bench step --data generated` trains it: on synthetic pixels, on JPEG files of 500x375 and on
shards of 256 px. The learner is built and its steps are captured once; each row is a run of the engine's loop from the
same weights. The measurements, the most important first:

    default            img/s, and a breakdown of a batch by thread, stage and stream (loader_marks.py)
    rates first        learning rates are sent to the device before the step's batch is ready, as in an earlier version
    queued             what can be queued behind a step without delaying nvJPEG (loader_probe.py)
    share S            the CPU cores decode this share of the JPEGs; 1.0: all
    rates aside        rates are sent at once on a separate stream, and a kernel copies them to the step's table
    in parts           nvJPEG gets a few files at a time: is each part slow, or only the first?

The file is rewritten after each measurement; it names the ones that failed or did not fit into --seconds. On a CPU the
cores decode in nvJPEG's place and views are blank: this only shows that everything runs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import loader_probe
from benchmarks.loader_marks import InParts, Watch
from hyperbatch.bench import harness, step_data
from hyperbatch.bench.step_data import Form
from hyperbatch.bench.step_runs import Setting
from hyperbatch.checkpoint import Progress
from hyperbatch.config import BatchPhase, DataConfig
from hyperbatch.data.batch import Batch
from hyperbatch.data.decode import choose_decoder, decode_full
from hyperbatch.data.decoders import cpu_decode_share
from hyperbatch.data.gpu.drafts import Draft
from hyperbatch.data.gpu.jpegs import Decoded, JpegFiles
from hyperbatch.data.gpu.maker import DeviceMaker
from hyperbatch.data.loader import TrainLoader
from hyperbatch.data.source import EncodedSource, Source, open_data
from hyperbatch.engine import loop
from hyperbatch.engine.clock import Clock
from hyperbatch.engine.journal import Journal
from hyperbatch.engine.kernel_choice import training_kernels
from hyperbatch.engine.loop import micro_step
from hyperbatch.engine.ranks import Ranks, join
from hyperbatch.engine.run import build_run, phases_of
from hyperbatch.engine.runner import StepRunner
from hyperbatch.engine.saver import Saver
from hyperbatch.engine.steptimer import StepTimer
from hyperbatch.engine.warmup import preserved_state
from hyperbatch.optim.build import settings_at
from hyperbatch.optim.rates import RateTable
from hyperbatch.plan.inventory import usual_data
from hyperbatch.stopwatch import wait
from hyperbatch.tables import text_table

SHARES = (0.0, 0.5, 0.7, 1.0)  # in addition to the default
FILES_PER_PART = 40


class Bench:
    """Runs one learner with one loader after the other."""

    def __init__(self, setting: Setting, batch: int, steps: int, forms: Sequence[Form], scratch: Path) -> None:
        self.device, self.batch, self._scratch = setting.device, batch, scratch
        self._base = step_data.short_run(setting, steps).override(batch_phases=(BatchPhase(0, batch),))
        self._steps, self._count = steps, 0
        self.data = {form.name: open_data(self._base.override(**form.overrides).data) for form in forms}
        self._ranks = Ranks()
        config = self._base.override(**forms[-1].overrides)
        self._run = build_run(config, self._ranks, setting.device, data=self.data[forms[-1].name])
        self.runner = StepRunner(self._run.learner, micro_step, config, self._ranks, self._run.warnings)

    def default_share(self, form: Form) -> float:
        source, config = self.data[form.name][0], self._base.override(**form.overrides).data
        return cpu_decode_share(source, config, "nvjpeg")

    def train(
        self, form: Form, name: str, share: float | None, prepare: Callable[[TrainLoader], None] = lambda loader: None
    ) -> dict[str, Any]:
        """Returns the row of a run.

        share: the share of JPEGs that cores decode; None if there are no JPEGs. prepare: is called with the loader
        before the run.
        """
        train_set, eval_set = self.data[form.name]
        out = self._scratch / f"run-{self._count}"
        out.mkdir()
        self._count += 1
        epochs = (self._steps + 1) * self.batch / len(train_set)
        config = self._base.override(**form.overrides, epochs=epochs, out=str(out))
        clock, learner = Clock(), self._run.learner
        loader = self._loader(train_set, config.data, share)
        run = replace(
            self._run,
            config=config,
            clock=clock,
            train_set=train_set,
            eval_set=eval_set,
            loader=loader,
            phases=phases_of(config, self._ranks, learner, train_set),
            warnings=[],
            progress=Progress(),
            timer=StepTimer(self.device),
        )
        self.runner.follow(config)
        prepare(loader)
        with (
            Journal(config, self._ranks, out, clock, resume_from_step=None, quiet=True) as journal,
            preserved_state(learner),
            Saver(run, None, warn=journal.warn) as saver,
            contextlib.closing(loader),
        ):
            record = loop.train(run, self.runner, journal, saver)
        wait(self.device)
        row = step_data.row_of(record, config, f"{form.name}, {name}", self.batch)
        timing = row["timing"]
        return row | {
            "share": share,
            "data": form.about,
            "step_ms": 1e3 * (timing["step_s"] - timing["data_wait_s"]),
            "data_wait_ms": 1e3 * timing["data_wait_s"],
        }

    def _loader(self, source: Source, config: DataConfig, share: float | None) -> TrainLoader:
        device, dtype = self.device, self._run.learner.dtype
        ours: dict[str, Any] = {"seed": 0, "rank": 0, "world_size": 1, "device": device, "dtype": dtype}
        if share is None:
            return TrainLoader(source, config, **ours)
        on_cores = choose_decoder("auto")
        if share == 1.0:
            config = replace(config, decoder=on_cores)
        else:
            config = replace(config, decoder="nvjpeg", cpu_decode_share=share)
        if device.type == "cuda":
            return TrainLoader(source, config, **ours)
        loader = TrainLoader(source, replace(config, decoder="auto"), **ours)
        loader._maker = CpuMaker(
            source,
            config,
            device=device,
            dtype=dtype,
            decoder=config.decoder,
            meter=loader._meter,
            cpu_decoder=on_cores,
            decode=decode_on_cores,
        )
        return loader

    def close(self) -> None:
        self.runner.close()
        self._run.close()


class CpuMaker(DeviceMaker):
    """Replaces the GPU's maker on a machine without a GPU."""

    def _render(self, draft: Draft) -> Batch:
        count, size = len(draft.images), draft.plan.size
        images = torch.zeros(count, self.source.channels, size, size, dtype=self.dtype)
        return Batch(images, torch.from_numpy(self.source.labels[draft.shown]))


def decode_on_cores(files: JpegFiles, device: torch.device) -> Decoded:
    """Replaces nvJPEG on a machine without a GPU."""
    contents = [bytes(content.numpy()) for content in files.contents()]
    pixels = [decode_full(data, "a file", decoder=choose_decoder("auto")) for data in contents]
    return Decoded.of([torch.from_numpy(image.transpose(2, 0, 1).copy()).to(device) for image in pixels])


# Variants


@contextlib.contextmanager
def rates_first() -> Iterator[None]:
    """Sends rates before the batch is ready."""
    train_stride = loop.train_stride

    def early(runner: StepRunner, stride: Any, batches: Any, timer: Any, rates: Any = None) -> Any:
        if rates is not None:
            runner.rates.write(rates)
        return train_stride(runner, stride, batches, timer)

    loop.train_stride = early
    try:
        yield
    finally:
        loop.train_stride = train_stride


@contextlib.contextmanager
def rates_aside(kept: RateTable, device: torch.device) -> Iterator[None]:
    """Sends rates so that no copy to the device waits for a step.

    The copy is made at once, on a separate stream, into new memory, from which a kernel, which must wait, copies the
    rates.
    """
    aside = torch.cuda.Stream(device) if device.type == "cuda" else None

    def write(rates: Sequence[tuple[float, ...]]) -> None:
        kept._rows = [[value for *_, value in settings_at(kept._optimizer, *rate)] for rate in rates]
        table = kept._table
        if table is None:
            return
        host = torch.tensor(kept._rows, dtype=table.dtype, pin_memory=aside is not None)
        if aside is None:
            torch.mul(host, 1.0, out=table[: len(host)])
            return
        here = torch.cuda.current_stream(device)
        with torch.cuda.stream(aside):
            staged = host.to(device, non_blocking=True)
        here.wait_stream(aside)
        torch.mul(staged, 1.0, out=table[: len(host)])
        staged.record_stream(here)

    kept.write = write
    try:
        yield
    finally:
        del kept.write


def watched(bench: Bench, form: Form, share: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (row, breakdown) of a run with marks."""
    with contextlib.ExitStack() as held:
        watches: list[Watch] = []

        def prepare(loader: TrainLoader) -> None:
            assert isinstance(loader._maker, DeviceMaker)
            watches.append(held.enter_context(Watch(loader._maker)))

        row = bench.train(form, f"default ({share})", share, prepare)
        return row, watches[0].report()


def in_parts(bench: Bench, form: Form, share: float) -> dict[str, Any]:
    decoders: list[InParts] = []

    def prepare(loader: TrainLoader) -> None:
        assert isinstance(loader._maker, DeviceMaker)
        drafter = loader._maker._drafter
        decoders.append(InParts(drafter.decode, FILES_PER_PART))
        object.__setattr__(drafter, "decode", decoders[0])

    row = bench.train(form, f"in parts of {FILES_PER_PART}", share, prepare)
    return row | {"part_ms": decoders[0].median_ms()}


# The answers, in order


class Answers:
    """Writes the results so far, and decides which measurements there is still time for."""

    def __init__(
        self, out: Path, seconds: float, *, now: Callable[[], float] = time.perf_counter, **about: Any
    ) -> None:
        self._out, self._about = out, about
        self._now, self._start_s, self._seconds = now, now(), seconds
        self._longest_s = 0.0  # the longest measurement since steps were captured
        self.rows: list[dict[str, Any]] = []
        self.more: dict[str, Any] = {"breakdown": {}, "left_out": [], "failed": {}}

    def ask(self, what: str, answer: Callable[[], object]) -> None:
        """Makes a measurement, unless it would exceed the time if it took as long as the longest so far."""
        start_s, known = self._now(), len(self.rows)
        if start_s - self._start_s + self._longest_s > self._seconds:
            self.more["left_out"].append(what)
            return
        try:
            answer()
        except Exception as error:  # the other results are still useful
            self.more["failed"][what] = f"{type(error).__name__}: {error}"
            harness.say(f"{what} failed: {error}")
        end_s = self._now()
        if known:  # the first one builds what the others reuse
            self._longest_s = max(self._longest_s, end_s - start_s)
        speed = f", {self.rows[-1]['mean']:,.0f} img/s" if len(self.rows) > known else ""
        harness.say(f"{what}: {end_s - start_s:.1f} s{speed} ({end_s - self._start_s:.0f} s so far)")
        self.write()

    def write(self) -> dict[str, Any]:
        report = harness.result("loader_times", self.rows, **self._about, **self.more)
        self._out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        return report


def ask_all(bench: Bench, answers: Answers, synthetic: Form, forms: Sequence[Form], shares: Sequence[float]) -> None:
    rows = answers.rows

    def default(form: Form) -> None:
        row, answers.more["breakdown"][form.name] = watched(bench, form, bench.default_share(form))
        rows.append(row)

    def first(form: Form) -> None:
        with rates_first():
            rows.append(bench.train(form, "rates first", bench.default_share(form)))

    def aside(form: Form) -> None:
        with rates_aside(bench.runner.rates, bench.device):
            rows.append(bench.train(form, "rates aside", bench.default_share(form)))

    def parts(form: Form) -> None:
        rows.append(in_parts(bench, form, bench.default_share(form)))

    def share_of(share: float) -> Callable[[Form], None]:
        return lambda form: rows.append(bench.train(form, f"share {share}", share))

    def queued(form: Form) -> None:
        source = bench.data[form.name][0]
        assert isinstance(source, EncodedSource)
        answers.more["queued"] = loader_probe.probe(source, bench.batch, bench.device)

    files, *others = forms
    asked = [("default", default, form) for form in forms]
    asked += [("rates first", first, files), ("queued", queued, files)]
    asked += [(f"share {share}", share_of(share), form) for share in shares for form in forms]
    asked += [("rates aside", aside, files), ("in parts", parts, files)]
    asked += [(name, answer, form) for form in others for name, answer in (("rates first", first), ("in parts", parts))]
    answers.ask("synthetic", lambda: rows.append(bench.train(synthetic, "step alone", None)))
    for name, answer, form in asked:
        answers.ask(f"{form.name}, {name}", lambda answer=answer, form=form: answer(form))


def table(report: dict[str, Any]) -> list[str]:
    """Formats the report as text."""
    alone = next((row["mean"] for row in report["rows"] if row["share"] is None), None)
    titles = ("run", "img/s", "of synthetic", "step ms", "data wait ms")
    cells = [
        (
            row["name"],
            f"{row['mean']:,.0f}",
            None if alone is None else f"{row['mean'] / alone:.3f}",
            f"{row['step_ms']:.2f}",
            f"{row['data_wait_ms']:.2f}",
        )
        for row in report["rows"]
    ]
    lines = text_table(titles, cells)
    for name, found in report["breakdown"].items():
        lines += ["", f"{name}: ms of a batch, which takes {found['period_ms']:.2f}"]
        for part in ("step_thread_ms", "device_thread_ms", "of_decodes_ms", "gpu_ms", "busy_cores"):
            stages = ", ".join(f"{stage} {value:.2f}" for stage, value in found[part].items())
            lines.append(f"  {part.removesuffix('_ms').replace('_', ' ')}: {stages}")
        lines.append(f"  a batch waits for the step: {found['batch_waits_for_step_ms']:.2f}")
    for row in report["rows"]:
        if "part_ms" in row:
            lines += ["", f"{row['name']}: ms of each part {' '.join(f'{value:.1f}' for value in row['part_ms'])}"]
    for row in report.get("queued", {}).get("rows", []):
        spread = f"{min(row['decode_ms']):.1f} to {max(row['decode_ms']):.1f}"
        lines.append(
            f"queued behind a load of {row['load_ms']:.1f} ms: {row['queued']}: nvJPEG takes {spread} ms, held up on "
            f"{row['held_up']} of {row['streams']} streams"
        )
    lines += [f"failed: {what}: {error}" for what, error in report["failed"].items()]
    lines += [f"left out: {what}" for what in report["left_out"]]
    return lines


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loader_times", description="Where the time between JPEGs and weights goes."
    )
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--device", default="auto", help="[%(default)s]")
    parser.add_argument("--model", default=None, help="[resnet50; on a CPU resnet20]")
    parser.add_argument("--image-size", type=int, default=None, help="[the usual one of the model]")
    parser.add_argument("--batch", type=int, default=None, help="[400; on a CPU 4]")
    parser.add_argument("--steps", type=int, default=40, help="of each run [%(default)s]")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="[%(default)s]")
    parser.add_argument("--seconds", type=float, default=90.0, help="after which nothing new is begun [%(default)s]")
    options = parser.parse_args(arguments)
    device = harness.pick_device(options.device)
    gpu = device.type == "cuda"
    model, batch = options.model or ("resnet50" if gpu else "resnet20"), options.batch or (400 if gpu else 4)
    usual_size, classes = usual_data(model)
    setting = Setting(
        model=model,
        precision="fp16" if gpu else "fp32",
        image_size=options.image_size or usual_size,
        classes=classes,
        device=device,
    )
    about: dict[str, Any] = {"model": model, "batch": batch, "steps": options.steps, "image_size": setting.image_size}
    about["connections"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")  # hardware queues that streams share
    answers = Answers(options.out, options.seconds, **about)
    with (
        tempfile.TemporaryDirectory(prefix="hyperbatch-bench-") as scratch,
        training_kernels(deterministic=False),
        join(Ranks(), device.type, 600.0),
    ):
        synthetic, *forms = itertools.islice(step_data.forms(step_data.GENERATED, Path(scratch), setting), 3)
        bench = Bench(setting, batch, options.steps, [synthetic, *forms], Path(scratch))
        with contextlib.closing(bench):
            ask_all(bench, answers, synthetic, forms, [float(share) for share in options.shares.split(",") if share])
    print("\n".join(table(answers.write())))


if __name__ == "__main__":
    main(sys.argv[1:])
