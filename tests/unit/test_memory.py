"""Memory that a training step on a CPU frees serves the next step."""

from __future__ import annotations

import platform
import resource
import statistics
import subprocess
import sys

import pytest
import torch

from hyperbatch import memory
from hyperbatch.engine.ranks import Ranks, join

BYTES = 64 << 20  # more than glibc ever keeps by itself
PAGES = BYTES // resource.getpagesize()

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


def test_a_run_on_a_cpu_keeps_the_memory_that_it_frees():
    without = faults_of_a_step()
    with join(Ranks(), "cpu", 60):
        within = statistics.median(faults_of_a_step() for _ in range(9))  # now and then a small block is in the way
    assert within < PAGES / 100, "the pages are there"
    assert without > 10 * max(1, within)
    assert faults_of_a_step() > 10 * max(1, within), "after the run, memory goes back to the system"


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
