"""The GPU is read through the functions of nvidia-ml-py; a stand-in has their names and types."""

from __future__ import annotations

import math
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from flexinspect.records.step import GpuRecord
from flexinspect_hooks.observers import gpu_hook
from flexinspect_hooks.observers.gpu_hook import GpuHook, Nvml

GB = 10**9
UUID = "12345678-0000-1111-2222-333344445555"


class NVMLError(Exception):
    """As pynvml's: raised with the code of an error."""


class FakeNvml(ModuleType):
    """Answers as nvidia-ml-py does: structs with fields, milliwatts, bytes, a list of processes."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.calls: list[str] = []
        self.refused: set[str] = set()
        self.processes = [
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=10 * GB, gpuInstanceId=None),
            SimpleNamespace(pid=4242, usedGpuMemory=40 * GB, gpuInstanceId=None),
            SimpleNamespace(pid=5, usedGpuMemory=None, gpuInstanceId=None),
        ]
        answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetHandleByIndex": "by index",
            "nvmlDeviceGetHandleByUUID": "by uuid",
            "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * GB, free=28 * GB, used=52 * GB),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=87, memory=12),
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetPowerUsage": 412_500,
            "nvmlDeviceGetComputeRunningProcesses": self.processes,
            "nvmlDeviceGetGraphicsRunningProcesses": [],
        }
        for name, answer in answers.items():
            setattr(self, name, self._function(name, answer))

    def _function(self, name: str, answer: Any) -> Any:
        def call(*args: Any) -> Any:
            self.calls.append(name)
            if name in self.refused:
                raise NVMLError(3)
            return answer

        return call


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    facts = SimpleNamespace(uuid=UUID)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    return fake


def context(device: str = "cuda:0") -> Any:
    events: list[tuple[str, str]] = []
    return SimpleNamespace(
        device=torch.device(device),
        events=events,
        record_event=lambda kind, text, facts: events.append((kind, text)),
    )


def recorded(hook: GpuHook, n: int = 1) -> list[GpuRecord]:
    draft: Any = SimpleNamespace(gpus=[])
    for _ in range(n):
        hook.record(None, None, {}, draft)  # type: ignore[arg-type]
    return list(draft.gpus)


def test_a_reading_has_every_figure(nvml: FakeNvml) -> None:
    hook = GpuHook()
    (close,) = hook.install(context())
    (one,) = recorded(hook)
    assert one == GpuRecord(
        *(0, "NVIDIA H100 80GB HBM3", 87.0, 52 * GB, 80 * GB, 10 * GB, 61, 412.5),
        ((4242, 40 * GB), (os.getpid(), 10 * GB)),
    )
    assert one.memory_other == 42 * GB
    close()
    assert nvml.calls[0] == "nvmlInit"
    assert nvml.calls[-1] == "nvmlShutdown"
    assert "nvmlDeviceGetHandleByIndex" not in nvml.calls


def test_it_is_read_at_most_four_times_a_second(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(n / 10 for n in range(20))
    monkeypatch.setattr(gpu_hook.time, "monotonic", lambda: next(times))
    hook = GpuHook()
    hook.install(context())
    assert len(recorded(hook, 20)) == 7


def test_what_a_device_does_not_support_is_unknown(nvml: FakeNvml) -> None:
    nvml.refused = {
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetComputeRunningProcesses",
    }
    one = Nvml(0).read()
    assert math.isnan(one.utilization)
    assert (one.temperature, one.power, one.memory_own, one.memory_other) == (None,) * 4
    assert (one.memory_used, one.processes) == (52 * GB, ())


def test_a_device_that_is_not_found_by_its_id_is_taken_by_its_number(nvml: FakeNvml) -> None:
    nvml.refused = {"nvmlDeviceGetHandleByUUID"}
    assert Nvml(0)._handle == "by index"


def test_a_name_in_bytes_is_text(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "nvmlDeviceGetName", lambda handle: b"Tesla T4")
    assert Nvml(0).read().name == "Tesla T4"


def test_without_the_package_an_event_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    hook, asked = GpuHook(), context()
    assert list(hook.install(asked)) == []
    ((kind, text),) = asked.events
    assert kind == "gpu"
    assert "pip install 'flexinspect[gpu]'" in text
    assert recorded(hook) == []


def test_a_driver_that_does_not_answer_is_an_event_and_nothing_stays_open(nvml: FakeNvml) -> None:
    nvml.refused = {"nvmlDeviceGetName"}
    hook, asked = GpuHook(), context()
    assert list(hook.install(asked)) == []
    assert asked.events[0][1].startswith("NVML cannot read the GPU: NVMLError")
    assert nvml.calls[-1] == "nvmlShutdown"
    assert recorded(hook) == []


def test_on_a_cpu_nothing_is_asked(nvml: FakeNvml) -> None:
    hook, asked = GpuHook(), context("cpu")
    assert list(hook.install(asked)) == []
    assert recorded(hook) == []
    assert (nvml.calls, asked.events) == ([], [])
