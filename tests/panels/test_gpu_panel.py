"""The GPU panel shows the last reading of the GPU, and what is missing in a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from flexinspect.drawing.theme import Theme
from flexinspect.panels.base import Missing, Navigate, NoOptions, Request, TracePlace
from flexinspect.panels.gpu_panel import GpuPanel
from flexinspect.panels.panel_source import Source
from flexinspect.records.step import EventRecord, GenerationRecord, GpuRecord, StepRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import open_trace

GB = 10**9
ONE = GpuRecord(
    *(0, "H100 \x1b[2J", 87.0, 52 * GB, 80 * GB, 10 * GB, 61, 412.5),
    ((4242, 40 * GB), (17, 10 * GB)),
)
RUN = {"pid": 17, "model": {"device": "cuda:0"}}

Make = Callable[..., Source]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    opened = []

    def made(
        readings: Mapping[int, GpuRecord], run: dict[str, Any] | None = None, event: str = ""
    ) -> Source:
        path = tmp_path / f"{len(opened)}.flextrace"
        with TraceWriter.create(path, RUN if run is None else run) as writer:
            writer.begin_generation(GenerationRecord(0, "s", "m", "c", (), ()))
            if event:
                writer.write_event(EventRecord("gpu", event, 0.0))
            for step in range(6):
                gpus = (readings[step],) if step in readings else ()
                record = StepRecord(0, step, "decode", 1, step, step + 1, 0.0, 1.0, 0.1, gpus=gpus)
                writer.write_step(record)
        opened.append(open_trace(path))
        return Source(opened[-1])

    yield made
    for reader in opened:
        reader.close()


def request(step: int = 5, width: int = 80, height: int = 20) -> Request[NoOptions]:
    return Request(TracePlace(step=step), NoOptions(), width, height)


def described(source: Source, step: int = 5) -> list[str]:
    panel = GpuPanel()
    return panel.describe(panel.load(source, request(step)))


def test_all_figures_are_described_with_who_holds_the_memory(make: Make) -> None:
    lines = described(make({2: replace(ONE, utilization=20.0), 4: ONE}))
    assert lines[0] == "GPU 0, H100 \\x1b[2J, as read at step 4:"
    assert [line.split()[0] for line in lines[1:6]] == [
        "utilization",
        "memory",
        "temperature",
        "power",
        "processes",
    ]
    assert lines[1].endswith("87 %")
    assert "52.0 GB of 80.0 GB: 10.0 GB of this run, 42.0 GB of others" in lines[2]
    assert lines[3].endswith("61 °C")
    assert lines[4].endswith("412 W")
    assert lines[5].endswith("4242 40.0 GB, this run 10.0 GB")
    assert lines[6] == "Utilization in steps 0-5: 20% to 87%."


@pytest.mark.parametrize(("step", "shown"), [(0, 2), (2, 2), (3, 2), (4, 4), (5, 4)])
def test_a_step_between_two_readings_has_the_one_before_it(
    make: Make, step: int, shown: int
) -> None:
    lines = described(make({2: ONE, 4: ONE}), step)
    assert lines[0].endswith(f"as read at step {shown}:")


def test_what_nvml_does_not_tell_is_left_out(make: Make) -> None:
    bare = GpuRecord(0, "T4", math.nan, 2 * GB, 16 * GB)
    lines = described(make({0: bare}))
    assert [line.split()[0] for line in lines[1:]] == ["memory", "Used"]
    assert "of this run" not in lines[1]


def test_a_device_that_is_nearly_full_alarms(make: Make) -> None:
    source, panel = make({0: replace(ONE, memory_used=79 * GB)}), GpuPanel()
    data = panel.load(source, request())
    assert "The memory of this GPU is nearly full." in panel.describe(data)
    assert panel.paint(data, request(), Theme("none")).alarm


def test_timelines_are_drawn_and_a_click_goes_to_a_step(make: Make) -> None:
    panel = GpuPanel()
    data = panel.load(make({0: ONE, 3: replace(ONE, utilization=5.0)}), request())
    picture = panel.paint(data, request(), Theme("none"))
    text = "\n".join(strip.text for strip in picture.strips)
    assert "utilization 5% to 87%" in text
    assert "\x1b" not in text
    targets = {picture.target(0, y) for y in range(20)}
    assert Navigate(step=0) in targets


@pytest.mark.parametrize(("width", "height"), [(10, 2), (40, 6), (80, 24), (200, 60)])
def test_a_picture_keeps_to_its_size(make: Make, width: int, height: int) -> None:
    panel, asked = GpuPanel(), request(width=width, height=height)
    data = panel.load(make({0: ONE, 3: ONE}), asked)
    picture = panel.paint(data, asked, Theme("none"))
    assert len(picture.strips) <= height
    assert {strip.cell_length for strip in picture.strips} == {width}


@pytest.mark.parametrize(
    ("run", "event", "hint"),
    [
        ({"model": {"device": "cpu"}}, "", "The model ran on cpu."),
        (RUN, "nvidia-ml-py is not installed", "nvidia-ml-py is not installed"),
        (RUN, "", "It was not read in these steps."),
    ],
)
def test_without_a_reading_it_says_why(
    make: Make, run: dict[str, Any], event: str, hint: str
) -> None:
    with pytest.raises(Missing, match="No GPU is recorded") as caught:
        GpuPanel().load(make({}, run, event), request())
    assert caught.value.hint == hint
