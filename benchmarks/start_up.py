"""Where the time from Enter to exit goes: runs a command in this process, and samples its main thread every 20 ms.

    python -m benchmarks.start_up SAMPLES.json train cifar10 --data DIR    runs it, saves the samples, prints the table
    python -m benchmarks.start_up SAMPLES.json                             prints the table of saved samples

For a cold start, first remove Triton's cache and that of hyperbatch (docs/engine.md, "Kept for the next run"). Seconds
are counted from the start of the process; what happens after its last line is not recorded.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

PAUSE_S = 0.02
OPENING = "Python, the command line, numpy"
TORCH = "torch is imported"
# A sample belongs to the first stage with a function on the stack, given as file:function.
STAGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("the report is written", ("launch.py:finish",)),
    ("the last checkpoint is written", ("saver.py:wait", "saver.py:save")),
    ("training and its evaluation", ("loop.py:train_strides", "loop.py:begin")),
    ("processes that compile are ended", ("workers.py:stop",)),
    ("evaluation is warmed up and captured", ("validation.py:prepare",)),
    ("steps are warmed up, measured and captured", ("loop.py:prepared_strides", "whiten.py:rehearse")),
    ("waiting for kernels to be compiled", ("compile.py:wait", "thread.py:shutdown")),
    ("waiting until Triton is prepared", ("compile.py:_wait_for_preparation", "cache.py:triton_key")),
    ("kernels are asked for, cuDNN makes its trials", ("warmup.py:compile_kernels",)),
    ("memory for checkpoints", ("saver.py:__init__",)),
    (
        "the data is opened, the loader built",
        ("source.py:open_data", "loader.py:__post_init__", "source.py:check_data"),
    ),
    ("the order of backward is found, cuDNN loaded", ("measure.py:probe",)),
    ("the batch that fits is measured", ("measure.py:fitting_batch",)),
    ("Triton and the kernels are imported", ("learner.py:use_fused",)),
    ("the model is built", ("learner.py:build_learner",)),
    ("the GPU's context is opened", ("ranks.py:join",)),
    ("the engine's modules are imported", ("loop.py:<module>",)),
    ("GPUs are counted", ("agent.py:count_gpus",)),
)

Sample = tuple[float, list[str]]  # seconds since the start; the stack, outermost first


def stage_of(stack: Iterable[str]) -> str:
    frames = [frame for frame in stack if not frame.startswith("<frozen importlib")]
    if "loop.py:<module>" in frames:
        # Its first import is torch; our own packages were loaded before.
        inside = frames[frames.index("loop.py:<module>") + 1 :]
        if inside[:1] == ["__init__.py:<module>"]:
            return TORCH
    return next((name for name, marks in STAGES if any(mark in frames for mark in marks)), OPENING)


def table(samples: list[Sample]) -> list[tuple[str, float, float]]:
    """Returns (stage, seconds when it first occurred, seconds in all), in the order of first occurrence."""
    first_s: dict[str, float] = {}
    total_s: dict[str, float] = {}
    before_s = 0.0
    for at_s, stack in samples:
        stage = stage_of(stack)
        first_s.setdefault(stage, before_s)
        total_s[stage] = total_s.get(stage, 0.0) + at_s - before_s  # since the previous sample
        before_s = at_s
    return [(stage, first_s[stage], total_s[stage]) for stage in first_s]


def show(samples: list[Sample]) -> None:
    print(" begins  seconds  what the main thread does")
    for stage, first_s, total_s in table(samples):
        print(f"{first_s:7.2f}  {total_s:7.2f}  {stage}")
    print(f"{samples[-1][0]:7.2f}           the last sample")


def since_start_s() -> float:
    """Seconds since the start of this process, by the kernel's clock, in hundredths."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def sampled(words: list[str]) -> tuple[int, list[Sample]]:
    """Runs the command. Returns its exit code, and the samples of its main thread."""
    samples: list[Sample] = []
    main_thread, over = threading.get_ident(), threading.Event()

    def look() -> None:
        while not over.wait(PAUSE_S):
            frame, stack = sys._current_frames().get(main_thread), []
            while frame is not None:
                stack.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_code.co_name}")
                frame = frame.f_back
            samples.append((round(since_start_s(), 3), stack[::-1]))

    thread = threading.Thread(target=look, name="samples", daemon=True)
    thread.start()
    from hyperbatch.cli import main
    from hyperbatch.cli.byte_code import keep_byte_code

    keep_byte_code()
    code = main(words)
    over.set()
    thread.join()
    return code, samples


def run(path: Path, words: list[str]) -> None:
    if not words:
        show([(at_s, stack) for at_s, stack in json.loads(path.read_text())])
        return
    code, samples = sampled(words)
    path.write_text(json.dumps(samples))
    show(samples)
    if "torch" in sys.modules:
        from hyperbatch.engine.worker import leave

        leave(code)
    raise SystemExit(code)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
