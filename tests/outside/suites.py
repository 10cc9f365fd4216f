"""Runs torch's and timm's own optimizer and scheduler tests on our optimizers, and compares numbers with other LARS.

    torch   the test folder of a checkout of the tag that is installed. Ours take the place of the optimizers
            in the installed `optim_db`, and of SGD in the scheduler tests.
    timm    the tests in its source distribution. Ours take the place of `lars`, `lamb`, their variants and `muon`.
    peers   20 steps in float64 beside every other implementation that can be imported (peers.py)

None of their files is copied. The exit status is 1 when a test fails that wanted.py does not list with a reason:

    python tests/outside/suites.py --torch-tests ~/pytorch/test --packages ~/packages --json result.json
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import logging
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

# Before torch is loaded. The tensors are tiny, and an error is to be one line.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_PRINT_REPRO_ON_FAILURE", "0")

import pytest
import torch
from peers import LARGEST_DIFFERENCE, compare_with_peers, stand_in_for_torchvision
from wanted import NOT_OFFERED, OUR_WORDS, WANTED

from hyperbatch import LAMB, LARS, Muon
from hyperbatch.bench import harness
from hyperbatch.kernels import interpreted

OURS = {"LARS": LARS, "LAMB": LAMB, "Muon": Muon}
# timm's names, with the settings that make ours the same variant. Its LARS adapts no group without weight decay, and
# its tests set none: their rates are for plain SGD, and the trust coefficient brings ours to that scale.
TIMM_VARIANTS = {
    "lars": (LARS, {"trust_coefficient": 0.1}),
    "larc": (LARS, {"trust_coefficient": 0.1, "trust_clip": True}),
    "nlars": (LARS, {"trust_coefficient": 0.1, "nesterov": True}),
    "nlarc": (LARS, {"trust_coefficient": 0.1, "nesterov": True, "trust_clip": True}),
    "lamb": (LAMB, {}),
    "lambc": (LAMB, {"trust_clip": True}),
    "muon": (Muon, {}),
}
RESULTS = ("passed", "failed", "skipped", "wanted")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    suite: str
    optimizer: str
    test: str
    result: str  # one of RESULTS
    message: str = ""  # the error's first line, or why the test was skipped
    reason: str = ""  # why the difference is wanted


class Collector:
    """A pytest plugin that keeps the tests of our optimizers and notes how each of them ended."""

    def __init__(self, suite: str, optimizer_of: Callable[[str], str | None], sgd: type | None) -> None:
        self.suite, self.optimizer_of, self.sgd = suite, optimizer_of, sgd
        self.outcomes: list[Outcome] = []
        self.broken: list[str] = []  # files that could not be imported

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.broken.append(report.longreprtext.strip().splitlines()[-1])

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if self.optimizer_of(item.name)]
        for item in items:
            if self.sgd is not None and hasattr(item.module, "SGD"):
                item.module.SGD = self.sgd

    def pytest_runtest_setup(self) -> None:
        torch.manual_seed(0)  # timm's tests draw their data without a seed
        sys.last_value = sys.last_traceback = sys.last_exc = None  # the last failure's frames may hold a full GPU

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.passed and report.when != "call":
            return
        test = report.nodeid.rpartition("::")[2]
        optimizer = self.optimizer_of(test) or ""
        result, message, reason = report.outcome, "", ""
        if report.skipped and hasattr(report, "wasxfail"):
            result = "passed"  # its authors expect it to fail
        elif report.skipped:
            message = report.longrepr[2]
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = (crash.message if crash else report.longreprtext).splitlines()[0]
            reason = reason_why_wanted(optimizer, test, message)
            result = "wanted" if reason else "failed"
        self.outcomes.append(
            Outcome(suite=self.suite, optimizer=optimizer, test=test, result=result, message=message, reason=reason)
        )


def reason_why_wanted(optimizer: str, test: str, message: str) -> str:
    for wanted in WANTED:
        named = optimizer in wanted.optimizers and fnmatch.fnmatchcase(test, wanted.test)
        if named and re.search(wanted.message, message):
            return wanted.reason
    return ""


def run_tests(
    file: Path, suite: str, optimizer_of: Callable[[str], str | None], *, sgd: type | None = None
) -> list[Outcome]:
    """Runs their file under pytest, without their configuration or ours. sgd: what stands in for torch's SGD."""
    if not file.is_file():
        raise SystemExit(f"{file} does not exist.")
    collector = Collector(suite, optimizer_of, sgd)
    options = ["--noconftest", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:terminal", "-c"]
    with mock.patch.object(torch.optim, "SGD", sgd or torch.optim.SGD):
        pytest.main([*options, os.devnull, f"--rootdir={file.parent}", str(file)], plugins=[collector])
    if collector.broken or not collector.outcomes:
        raise SystemExit(f"{file} did not run: {'; '.join(collector.broken) or 'it has no test of our optimizers'}")
    return collector.outcomes


def run_scheduler_tests(file: Path, suite: str) -> list[Outcome]:
    """Schedulers are tested on torch's SGD, so each of ours takes its place in turn."""
    outcomes = []
    for name, optimizer in OURS.items():
        outcomes += run_tests(file, suite, lambda test, name=name: name, sgd=optimizer)
    return outcomes


# --- torch ------------------------------------------------------------------------------------------------------


def run_torch(folder: Path) -> list[Outcome]:
    common = importlib.import_module("torch.testing._internal.common_optimizers")
    schedulers = next(info.scheduler_inputs for info in common.optim_db if info.name == "SGD")
    # test_optim.py makes its tests from this list when it is imported.
    common.optim_db[:] = [optimizer_info(common, name, schedulers) for name in OURS]
    sys.path.append(str(folder))  # the files import one another
    outcomes = run_tests(
        folder / "test_optim.py",
        "torch optimizers",
        lambda test: next((name for name in OURS if f"_{name}_" in test), None),
    )
    return outcomes + run_scheduler_tests(folder / "optim" / "test_lrscheduler.py", "torch schedulers")


def optimizer_info(common: Any, name: str, schedulers: Any) -> Any:
    """What torch's suite asks of an optimizer: right settings, wrong ones, and which implementations there are."""
    OptimizerInput = common.OptimizerInput
    settings: list[dict[str, Any]] = [{}, {"weight_decay": 0.1}]
    wrong: list[tuple[dict[str, Any], str]] = [({"lr": -1.0}, "lr must not be negative")]
    if name == "Muon":
        settings += [{"momentum": 0.0}, {"nesterov": False, "weight_decay": 0.1}, {"normalize_weights": True}]
        settings += [{"maximize": True, "weight_decay": 0.1}, {"decoupled_weight_decay": True, "weight_decay": 1e-3}]
        settings += [{"coefficients": "polar_express", "steps": 3, "adjust_lr": "match_rms_adamw"}]
        wrong += [({"momentum": -0.5}, "momentum must be in"), ({"steps": 0}, "steps must be a whole number")]
    elif name == "LARS":
        settings += [{"trust_clip": True}, {"momentum": 0.0}, {"nesterov": True, "weight_decay": 0.1}, {"eps": 1e-8}]
        settings += [{"maximize": True, "weight_decay": 0.1}, {"decoupled_weight_decay": True, "weight_decay": 1e-3}]
        settings += [{"momentum_rule": rule, "weight_decay": 0.1} for rule in ("lr_outside", "rescaled", "unscaled")]
        wrong += [({"momentum": -0.5}, "momentum must be in"), ({"trust_coefficient": 0.0}, "must be positive")]
    else:
        settings += [{"trust_clip": True}, {"betas": (0.8, 0.99)}]
        wrong += [({"betas": (1.0, 0.99)}, "betas must be two numbers in")]

    def inputs(device: Any, dtype: Any = None) -> list[Any]:
        every = [*settings, {"lr": torch.tensor(0.001)}]  # a new tensor each time, since schedulers write into it
        if torch.device(device).type == "cuda":
            every.append({"capturable": True, "weight_decay": 0.1})
        return [OptimizerInput(params=None, kwargs={"lr": 0.01, **kwargs}, desc=str(kwargs)) for kwargs in every]

    def wrong_inputs(device: Any, dtype: Any) -> list[Any]:
        params = [torch.nn.Parameter(torch.randn(2, 3, device=device, dtype=dtype))]
        errors = [
            common.ErrorOptimizerInput(
                OptimizerInput(params=params, kwargs=kwargs, desc=message), error_type=ValueError, error_regex=message
            )
            for kwargs, message in wrong
        ]
        errors += common.get_error_inputs_for_all_optims(device, dtype)
        for error in errors:  # one mistake each: ours look at the parameters first, and LARS has no default rate
            given = error.optimizer_error_input
            given.params = params if given.params is None else given.params
            given.kwargs.setdefault("lr", 0.1)
            error.error_regex = OUR_WORDS.get(error.error_regex, error.error_regex)
        return errors

    fused_on = ("cuda", "cpu") if interpreted() else ("cuda",)
    return common.OptimizerInfo(
        OURS[name],
        optim_inputs_func=inputs,
        optim_error_inputs_func=wrong_inputs,
        scheduler_inputs=schedulers,
        supported_impls=("foreach", "fused"),
        supports_fused_on=fused_on,
        not_og_supported_flags=("foreach", "fused", "maximize", "capturable"),
        has_capturable_arg=True,
        **dict.fromkeys(NOT_OFFERED, False),
    )


# --- timm -------------------------------------------------------------------------------------------------------


def run_timm(folder: Path | None) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as download:
        if folder is None:
            folder = download_timm(Path(download))
        sys.path.append(str(folder.parent))  # of the source distribution, where timm is not installed
        stand_in_for_torchvision()
        try:
            factory = importlib.import_module("timm.optim._optim_factory")
        except ImportError as error:
            raise SystemExit(f"timm cannot be imported ({error}). Install it, or leave --timm-tests out.") from None
        logging.getLogger(factory.__name__).setLevel(logging.ERROR)  # it would warn of each name that we take
        registry = factory.default_registry
        for name, (optimizer, defaults) in TIMM_VARIANTS.items():
            theirs = registry.get_optimizer_info(name)
            registry.register(replace(theirs, opt_class=optimizer, defaults=defaults))
        ours = {f"[{name}]": optimizer.__name__ for name, (optimizer, _) in TIMM_VARIANTS.items()}
        outcomes = run_tests(
            folder / "test_optim.py",
            "timm optimizers",
            lambda test: next((optimizer for end, optimizer in ours.items() if test.endswith(end)), None),
        )
        return outcomes + run_scheduler_tests(folder / "test_scheduler.py", "timm schedulers")


def download_timm(folder: Path) -> Path:
    """The tests of the installed version, or of the newest where none is installed."""
    try:
        package = f"timm=={metadata.version('timm')}"
    except metadata.PackageNotFoundError:
        package = "timm"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(folder), package], check=True)
    (archive,) = folder.glob("timm-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz") / "tests"


# --- result -----------------------------------------------------------------------------------------------------


def count(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    counts = Counter((outcome.suite, outcome.optimizer, outcome.result) for outcome in outcomes)
    return [
        {"suite": suite, "optimizer": optimizer, **{result: counts[suite, optimizer, result] for result in RESULTS}}
        for suite in dict.fromkeys(outcome.suite for outcome in outcomes)
        for optimizer in OURS
    ]


def show(report: dict[str, Any]) -> None:
    print(f"{'suite':18}{'optimizer':10}" + "".join(f"{result:>9}" for result in RESULTS))
    for row in report["rows"]:
        print(f"{row['suite']:18}{row['optimizer']:10}" + "".join(f"{row[result]:9}" for result in RESULTS))
    print("\nNot offered, so not tested")
    for reason in NOT_OFFERED.values():
        print(f"  {reason}")
    for title, result in (("Wanted differences", "wanted"), ("Differences that are not wanted", "failed")):
        found = Counter(
            f"{outcome['optimizer']}: {outcome['reason'] or outcome['test'] + ': ' + outcome['message']}"
            for outcome in report["differences"]
            if outcome["result"] == result
        )
        print(f"\n{title}: {sum(found.values()) or 'none'}")
        for line, times in found.items():
            print(f"  {line}" + (f" ({times} tests)" if times > 1 else ""))
    print(f"\nLargest relative difference after 20 steps in float64 (at most {LARGEST_DIFFERENCE:g} is allowed)")
    for row in report["peers"]:
        difference = row["why_not"] if row["difference"] is None else f"{row['difference']:.1e}"
        print(f"  {row['peer']:24}{row['ours']:52}{difference}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-tests", type=Path, help="the folder test of a checkout of pytorch")
    parser.add_argument("--timm-tests", type=Path, help="the folder tests of timm; default: downloaded by pip")
    parser.add_argument("--packages", type=Path, help="a folder made by pip install --target, searched last")
    parser.add_argument("--only", choices=("torch", "timm", "peers"), help="default: all three")
    parser.add_argument("--json", type=Path, help="also write the result here")
    args = parser.parse_args()
    chosen = [args.only] if args.only else ["torch", "timm", "peers"]
    if "torch" in chosen and args.torch_tests is None:
        parser.error("torch's wheel holds no tests: give --torch-tests, or --only timm or peers")
    if args.packages is not None:
        sys.path.append(str(args.packages.resolve()))
    outcomes = run_torch(args.torch_tests.resolve()) if "torch" in chosen else []
    outcomes += run_timm(args.timm_tests and args.timm_tests.resolve()) if "timm" in chosen else []
    peers = compare_with_peers() if "peers" in chosen else []
    report = harness.result(
        "outside_suites",
        count(outcomes),
        differences=[asdict(outcome) for outcome in outcomes if outcome.result in ("failed", "wanted")],
        skipped=Counter(outcome.message for outcome in outcomes if outcome.result == "skipped"),
        peers=peers,
    )
    if "timm" in sys.modules:
        report["versions"]["timm"] = sys.modules["timm"].__version__
    show(report)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    far = any(row["difference"] is not None and not row["difference"] <= LARGEST_DIFFERENCE for row in peers)
    return int(far or any(outcome.result == "failed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
