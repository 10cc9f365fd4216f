"""Memory that a training step on a CPU frees serves the next step."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hyperbatch import memory

BYTES = 64 << 20  # more than glibc ever keeps by itself
PAGES = BYTES // resource.getpagesize()
HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")


def faults_of_a_step() -> int:
    """Pages that the system had to clear for a tensor which is used and freed."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(BYTES, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in ("GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)


RUN = f"""
import statistics
from hyperbatch.engine.ranks import Ranks, join
from {__name__} import faults_of_a_step
without = faults_of_a_step()
with join(Ranks(), "cpu", 60):
    # At first small free blocks, which glibc keeps in a list of its own, lie between those that it could join.
    within = statistics.median([faults_of_a_step() for _ in range(30)][-9:])
print(without, within, faults_of_a_step())
"""


def test_a_run_on_a_cpu_keeps_the_memory_that_it_frees():
    """In a process of its own, because what glibc keeps depends on all allocations before."""
    out = subprocess.run([sys.executable, "-c", RUN], cwd=HERE, check=True, capture_output=True, text=True).stdout
    without, within, afterwards = map(float, out.split())
    assert within < PAGES / 100, "the pages are there"
    assert without > 10 * max(1, within)
    assert afterwards > 10 * max(1, within), "after the run, memory goes back to the system"


def test_the_users_own_settings_are_left_alone(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    with memory.freed_memory_kept():
        assert faults_of_a_step() > PAGES / 1000


PROGRAM = """
import resource
from hyperbatch.memory import freed_memory_kept
with freed_memory_kept():
    pass
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(b"1") * (8 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_a_program_that_has_trained_allocates_as_fast_as_before():
    faults = int(subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout)
    assert faults < (8 << 20) / resource.getpagesize() / 100, "glibc gave the same block back"
