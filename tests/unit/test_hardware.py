"""What a run says about the machine: the processor's name, and a GPU's clock and utilisation where somebody tells."""

from __future__ import annotations

import platform

import pytest
import torch

from hyperbatch.engine import hardware
from hyperbatch.engine.hardware import Gauges, cpu_name, peak_resident_bytes


def test_the_processor_is_named_as_the_system_does(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Zen 9 @ 1 GHz\nprocessor\t: 1\nmodel name\t: other\n")
    assert cpu_name(info) == "Zen 9 @ 1 GHz"
    info.write_text("processor\t: 0\nmodel name\t:\n")
    assert cpu_name(info) in (platform.processor(), platform.machine())
    assert cpu_name(tmp_path / "none")


def test_a_cpu_has_memory_and_no_clock():
    gauges = Gauges(torch.device("cpu"))
    gauges.look()
    found = gauges.to_dict()
    assert found["device"] == cpu_name()
    assert found["memory_peak_bytes"] >= peak_resident_bytes() * 0.5 > 1e7
    assert not {"clock_mhz", "utilisation", "memory_bytes"} & set(found)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose driver answers; the clock of the host stands still."""
    told = {"clocks": iter([100, 1000, 2000]), "now_s": 0.0}
    properties = type("Properties", (), {"total_memory": 16_000})
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: next(told["clocks"]))
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 9_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU 9")
    monkeypatch.setattr(hardware.time, "monotonic", lambda: told["now_s"])
    return told


def test_a_gpu_is_looked_at_once_a_second_and_not_before_it_works(gpu):
    gauges = Gauges(torch.device("cuda", 0))
    for gpu["now_s"] in (0.5, 1.0, 1.5, 2.0):
        gauges.look()
    found = gauges.to_dict()
    assert (found["clock_mhz"], found["clock_least_mhz"], found["utilisation"]) == (1500, 1000, 0.5)
    assert (found["memory_peak_bytes"], found["memory_bytes"], found["device"]) == (9_000, 16_000, "GPU 9")


def test_a_driver_that_does_not_tell_is_asked_once(gpu, monkeypatch):
    asked = []

    def fail(device):
        asked.append(device)
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "clock_rate", fail)
    gauges = Gauges(torch.device("cuda", 0))
    gpu["now_s"] = 10.0
    gauges.look()
    assert len(asked) == 1
    assert "clock_mhz" not in gauges.to_dict()
