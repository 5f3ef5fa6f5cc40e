"""The GPU panel: utilization, memory of this run and of other processes, temperature, power."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from msgspec import Struct
from textual.strip import Strip

from flexinspect.core.text import escape_unprintable
from flexinspect.drawing.text_lines import Pen
from flexinspect.drawing.theme import Theme
from flexinspect.inputs.model_sizes import human_bytes
from flexinspect.panels import timeline
from flexinspect.panels.base import (
    Help,
    Missing,
    NoOptions,
    Panel,
    Picture,
    Request,
    import_hint,
)
from flexinspect.panels.panel_source import Source
from flexinspect.records.step import GPU_EVENT, GpuRecord
from flexinspect.trace.queries import gpus_range, newest_events

FULL_SHARE = 0.97
"""Share of the memory of a device from which on it counts as full."""
_MAX_PROCESSES = 4
_SERIES = {"utilization": "%", "memory": " GB"}
"""The timelines and their units."""


class GpuData(Struct, frozen=True):
    """The readings of the window's steps, by step; `pid` is the process of the run."""

    window: timeline.StepWindow
    readings: Mapping[int, GpuRecord]
    pid: int | None

    @property
    def step(self) -> int:
        """The step whose reading is shown: the last one up to the current step, or the first."""
        before = [step for step in self.readings if step <= self.window.current]
        return max(before) if before else min(self.readings)

    @property
    def shown(self) -> GpuRecord:
        """The reading that is shown."""
        return self.readings[self.step]

    @property
    def is_full(self) -> bool:
        """Whether the memory of the device is nearly used up."""
        return self.shown.memory_used > FULL_SHARE * self.shown.memory_total > 0

    def series(self, name: str) -> dict[int, float]:
        """Return a timeline: percent, or used memory in gigabytes, by step."""
        found = {
            step: one.utilization if name == "utilization" else one.memory_used / 1e9
            for step, one in self.readings.items()
        }
        return {step: value for step, value in found.items() if value == value}


class GpuPanel(Panel[GpuData, NoOptions]):
    """What NVML says of the GPU of a run."""

    name = "gpu"
    title = "GPU"
    help = Help(
        "It shows what NVML says of the GPU of the run: utilization, memory of the run and of "
        "other processes, temperature and power.",
        "It is read at most four times a second, so not at every step; the figures are those of "
        "the last reading up to this step; click a timeline to go to a step.",
        "Look for memory that other processes hold, for a device that is nearly full, and for a "
        "low utilization: then the GPU waits for Python or for data.",
    )
    depends_on_size = True

    def load(self, source: Source, request: Request[NoOptions]) -> GpuData:
        """Read the window of steps that fits the width. Raises `Missing` without any reading."""
        reader, place = source.reader, request.place
        window = timeline.load_step_window(reader, place, timeline.column_widths(request.width)[1])
        found = gpus_range(reader, place.generation, window.start, window.stop, place.branch)
        if not found:
            raise Missing(*_missing(source, window))
        pid = reader.run().get("pid")
        readings = {step: records[0] for step, records in sorted(found.items())}
        return GpuData(window, readings, pid if isinstance(pid, int) else None)

    def describe(self, data: GpuData) -> list[str]:
        """Return the figures of the reading, and the range of the timelines."""
        one, name = data.shown, escape_unprintable(data.shown.name)
        lines = [f"GPU {one.device}, {name}, as read at step {data.step}:"]
        lines += [f"  {title:<12} {text}" for title, text in _figures(data)]
        if data.is_full:
            lines.append("The memory of this GPU is nearly full.")
        return [*lines, *(_describe_range(data, name) for name in _SERIES if data.series(name))]

    def paint(self, data: GpuData, request: Request[NoOptions], theme: Theme) -> Picture:
        """Draw the figures, and the timelines beside or below them."""
        pen, width, height = Pen(theme, request.width), request.width, request.height
        left_width, _ = timeline.column_widths(width)
        left_pen = pen.resize(left_width)
        title = f"GPU {data.shown.device} {escape_unprintable(data.shown.name)}"
        left = [left_pen.line((title, "title"), (f"  step {data.step}", "muted"))]
        left += [
            left_pen.line((f"{name:<12} ", "muted"), (text, "warn" if data.is_full else "text"))
            for name, text in _figures(data)
        ]
        top = 0 if left_width < width else len(left)
        names = [name for name in _SERIES if data.series(name)]
        areas = timeline.stack_timelines(names, width, top, max(height - top, 0))
        drawn = [*chain.from_iterable(_draw(n, data, a, theme) for n, a in areas.items())]
        strips = timeline.draw_beside(left, drawn, height, pen)
        target = timeline.timeline_target(data.window, areas)
        note = "memory nearly full" if data.is_full else data.window.format_steps()
        return Picture(strips, note, data.is_full, target)


def _missing(source: Source, window: timeline.StepWindow) -> tuple[str, str]:
    """Return why no GPU was read, and what to do."""
    reader = source.reader
    if hint := import_hint(source):
        return "No GPU is recorded.", hint
    device = str(reader.model(0).get("device", "")) or "another device"
    if not device.startswith("cuda"):
        return "No GPU is recorded.", f"The model ran on {escape_unprintable(device)}."
    texts = [row.event.text for row in newest_events(reader, GPU_EVENT, 0, 1)]
    reason = texts[-1] if texts else "It was not read in these steps."
    return f"No GPU is recorded in {window.format_steps()}.", escape_unprintable(reason)


def _figures(data: GpuData) -> list[tuple[str, str]]:
    one = data.shown
    used = f"{human_bytes(one.memory_used)} of {human_bytes(one.memory_total)}"
    if one.memory_own is not None and one.memory_other is not None:
        own, other = human_bytes(one.memory_own), human_bytes(one.memory_other)
        used += f": {own} of this run, {other} of others and the driver"
    figures = [("memory", used)]
    if one.utilization == one.utilization:
        figures.insert(0, ("utilization", f"{one.utilization:.0f} %"))
    if one.temperature is not None:
        figures.append(("temperature", f"{one.temperature} °C"))
    if one.power is not None:
        figures.append(("power", f"{one.power:.0f} W"))
    if one.processes:
        figures.append(("processes", _process_text(one, data.pid)))
    return figures


def _process_text(one: GpuRecord, pid: int | None) -> str:
    listed = [
        f"{'this run' if process == pid else process} {human_bytes(size)}"
        for process, size in one.processes[:_MAX_PROCESSES]
    ]
    more = len(one.processes) - len(listed)
    return ", ".join([*listed, f"and {more} more"] if more else listed)


def _range_text(data: GpuData, name: str) -> str:
    values, unit = data.series(name), _SERIES[name]
    low, high = min(values.values()), max(values.values())
    digits = 0 if name == "utilization" else 1
    return f"{low:.{digits}f}{unit} to {high:.{digits}f}{unit}"


def _describe_range(data: GpuData, name: str) -> str:
    title = name.capitalize() if name == "utilization" else "Used memory"
    return f"{title} in {data.window.format_steps()}: {_range_text(data, name)}."


def _draw(name: str, data: GpuData, area: timeline.Area, theme: Theme) -> list[Strip]:
    """Draw a timeline from 0; a step without a reading has the one before it."""
    values, last = data.series(name), None
    heights: list[float | None] = []
    for step in data.window.steps:
        last = values.get(step, last)
        heights.append(last)
    title = [(f"{name} ", "title"), (_range_text(data, name), "text")]
    return timeline.draw_timeline(title, heights, data.window, area, theme)
