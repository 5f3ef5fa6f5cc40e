"""The memory panel: process, CUDA and model memory, their growth, and the KV cache by segment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import ClassVar

from textual.strip import Strip

from flexinspect.core.text import escape_unprintable
from flexinspect.drawing.plots import bar
from flexinspect.drawing.text_lines import Span, align_right, clip_text, line, wrap_paragraph
from flexinspect.drawing.theme import Theme
from flexinspect.inputs.model_sizes import human_bytes
from flexinspect.panels.base import (
    Help,
    Missing,
    Navigate,
    NoOptions,
    Panel,
    Picture,
    Request,
    TracePlace,
)
from flexinspect.panels.panel_source import Source
from flexinspect.panels.timeline import (
    COLUMN_GAP,
    MIN_TWO_COLUMN_WIDTH,
    Area,
    StepWindow,
    draw_timeline,
    draw_two_columns,
    drop_cut_span,
    left_width,
    load_step_window,
    navigate_to_step,
    timeline_columns,
)
from flexinspect.panels.token_window import load_segments
from flexinspect.records.prompt import Segment
from flexinspect.records.step import MemoryRecord
from flexinspect.trace.queries.range_queries import branch_of_step, memory_range
from flexinspect.trace.query_results import StepRow
from flexinspect.trace.reader import TraceReader

FIGURES: Mapping[str, Callable[[MemoryRecord], int | None]] = {
    "RSS": lambda record: record.rss,
    "CUDA allocated": lambda record: record.cuda_allocated,
    "CUDA reserved": lambda record: record.cuda_reserved,
    "CUDA peak": lambda record: record.cuda_peak,
    "KV cache": lambda record: record.kv_cache,
    "model": lambda record: record.model,
}
"""The recorded figures by their titles. The peak is that of one step."""

LEAK_STEPS = 16
"""Minimum number of growths in a window for a trend."""

LEAK_BYTES = 16_384
"""Growth in bytes per step below which it is noise of pages and buffers: four pages on most
machines."""

LEAK_FACTOR = 4
"""Memory must grow this many times faster than the KV cache to be reported as a leak."""

_MAX_PLOT_HEIGHT = 8
"""Maximum lines of a timeline, its title included."""

_BYTES_WIDTH = 8


@dataclass(frozen=True, slots=True)
class CachePart:
    """The cached tokens of a segment, and their bytes."""

    label: str
    n_tokens: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryData:
    """The memory of the window's steps and one before; `parts` is the current step's KV cache."""

    window: StepWindow
    records: Mapping[int, MemoryRecord]
    step_row: StepRow | None
    parts: tuple[CachePart, ...]

    @property
    def current_record(self) -> MemoryRecord | None:
        """The current step's memory."""
        return self.records.get(self.window.current)

    @property
    def figures(self) -> list[str]:
        """The titles of the recorded figures: those of CUDA only on a CUDA device."""
        return [
            name
            for name, value in FIGURES.items()
            if any(value(record) is not None for record in self.records.values())
        ]

    def series(self, name: str) -> dict[int, int | None]:
        """Return a figure for each loaded step."""
        return {step: FIGURES[name](self.records[step]) for step in sorted(self.records)}

    def growth(self, name: str) -> dict[int, int]:
        """Return the growth of a figure since the step before, for each step where both are known.

        Step 0 never has one.
        """
        values = self.series(name)
        growth = {}
        for before, step in pairwise(values):
            old, new = values[before], values[step]
            if step == before + 1 and old is not None and new is not None:
                growth[step] = new - old
        return growth


def load_memory(reader: TraceReader, place: TracePlace, n_columns: int) -> MemoryData:
    """Read the memory of the window that fits in `n_columns`, of one step before, and the segments.

    Raises `Missing` when the window has no memory.
    """
    window = load_step_window(reader, place, n_columns)
    before = max(window.start - 1, window.first)
    records = memory_range(reader, place.generation, before, window.stop, place.branch)
    if not any(step in records for step in window.steps):
        raise Missing(
            f"No memory is recorded in {window.format_steps()}.",
            "The memory hook records it at every level; 'flexinspect dump' shows whether it was "
            "disabled.",
        )
    branch = branch_of_step(reader, place.generation, window.current, place.branch)
    step = reader.step(place.generation, window.current, branch)
    record = records.get(window.current)
    segments = load_segments(reader, place)
    parts = cache_parts(segments, step, record.kv_cache) if step and record else ()
    return MemoryData(window, records, step, parts)


def cache_parts(segments: Sequence[Segment], step: StepRow, kv_cache: int) -> tuple[CachePart, ...]:
    """Return the cache by segment: its bytes in proportion to the tokens of each, which is exact.

    The cache holds the last `kv_after` of the tokens processed so far, with the same number of
    bytes for each. It does not hold the token that the step chose, which was not processed yet.
    """
    n_cached = step.kv_after
    n_processed = n_cached if step.first_pos is None else max(step.first_pos, n_cached)
    parts: list[CachePart] = []
    for segment in segments:
        n_tokens = min(segment.stop, n_processed) - max(segment.start, n_processed - n_cached)
        if n_tokens > 0:
            n_bytes = round(kv_cache * n_tokens / n_cached)
            parts.append(CachePart(escape_unprintable(segment.label), n_tokens, n_bytes))
    return tuple(parts)


def format_growth(n: float | None) -> str:
    """Return growth as "+2 kB", "-16 kB" or "0 B"; "-" for None."""
    if n is None:
        return "-"
    size = human_bytes(round(abs(n)))
    return size if round(n) == 0 else f"{'+' if n > 0 else '-'}{size}"


def median_growth(data: MemoryData, name: str) -> float | None:
    """Return the median growth of a figure per step of the window, None without any."""
    values = list(data.growth(name).values())
    return median(values) if values else None


def growth_trend(data: MemoryData, name: str) -> float | None:
    """Return the median growth per step of a figure that grows throughout, otherwise None.

    A figure grows throughout if the window has at least `LEAK_STEPS` growths and the figure rises
    in each quarter of it. The median ignores the occasional jumps of an allocator.
    """
    values = [value for value in data.series(name).values() if value is not None]
    if len(values) <= LEAK_STEPS:
        return None
    marks = [values[index * (len(values) - 1) // 4] for index in range(5)]
    if any(new <= old for old, new in pairwise(marks)):
        return None
    return median_growth(data, name)


@dataclass(frozen=True, slots=True)
class MemoryLeak:
    """A figure that grows much faster than the KV cache; both rates in bytes per step."""

    name: str
    rate: int
    cache: int

    def format_note(self) -> str:
        """Return both rates in a short form."""
        rate, cache = human_bytes(self.rate), human_bytes(self.cache)
        return f"{self.name} grows by {rate} a step, the KV cache by {cache}"

    def sentence(self, window: StepWindow) -> str:
        """Return a full sentence with the steps and the conclusion."""
        return (
            f"{self.format_note()}, throughout {window.format_steps()}: "
            "something else keeps memory at every step."
        )


def find_leak(data: MemoryData) -> MemoryLeak | None:
    """Return the figure that grows much faster than the KV cache in the window, if there is one."""
    cache = growth_trend(data, "KV cache") or 0.0
    for name in ("CUDA allocated", "RSS"):
        rate = growth_trend(data, name) if name in data.figures else None
        if rate is not None and rate >= max(LEAK_FACTOR * cache, LEAK_BYTES):
            return MemoryLeak(name, round(rate), round(cache))
    return None


def describe_memory(data: MemoryData) -> list[str]:
    """Return a leak if there is one, the figures as a table, the cache by segment, and ranges."""
    leak = find_leak(data)
    lines = [leak.sentence(data.window)] if leak else []
    current = data.window.current
    if data.current_record is None:
        lines.append(f"No memory is recorded at step {current}.")
    if current == data.window.first:
        lines.append(f"Memory at the end of step {current}, the first one: no growth yet.")
    else:
        lines.append(f"Memory at the end of step {current}, growth from step {current - 1}:")
    lines += _figures_table(data)
    lines += _describe_cache(data)
    lines += [_describe_range(data, name) for name in data.figures if name != "model"]
    return lines


def figure_texts(data: MemoryData, name: str) -> tuple[str, str, str]:
    """Return a figure of the current step, its growth, and its median growth per step."""
    record = data.current_record
    return (
        human_bytes(None if record is None else FIGURES[name](record)),
        format_growth(data.growth(name).get(data.window.current)),
        format_growth(median_growth(data, name)),
    )


def _figures_table(data: MemoryData) -> list[str]:
    rows = [f"{'':<14}  {'now':>9}  {'growth':>9}  {'median growth per step':>22}"]
    for name in data.figures:
        now, growth, usual = figure_texts(data, name)
        rows.append(f"{name:<14}  {now:>9}  {growth:>9}  {usual:>22}")
    return rows


def _describe_cache(data: MemoryData) -> list[str]:
    if not data.parts or data.step_row is None:
        return []
    n_tokens = sum(part.n_tokens for part in data.parts)
    key_bytes = human_bytes(round(sum(part.n_bytes for part in data.parts) / n_tokens))
    width = max(len(part.label) for part in data.parts)
    lines = [f"KV cache by segment: {data.step_row.kv_after} keys of {key_bytes} each."]
    for part in data.parts:
        tokens = "1 token " if part.n_tokens == 1 else f"{part.n_tokens} tokens"
        lines.append(f"  {part.label:<{width}}  {tokens:>13}  {human_bytes(part.n_bytes):>8}")
    return lines


def _describe_range(data: MemoryData, name: str) -> str:
    values = {
        step: value
        for step, value in data.series(name).items()
        if value is not None and step in data.window.steps
    }
    low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    return (
        f"{name} in {data.window.format_steps()}: {human_bytes(values[low])} (step {low}) to "
        f"{human_bytes(values[high])} (step {high}), by {human_bytes(values[high] - values[low])}."
    )


class MemoryPanel(Panel[MemoryData, NoOptions]):
    """Memory figures with their growth, the KV cache by segment, and two timelines."""

    name: ClassVar[str] = "memory"
    title: ClassVar[str] = "Memory"
    help: ClassVar[Help] = Help(
        "It shows the memory at the end of the step: the process (RSS), the CUDA allocator on a "
        "CUDA device, the model, and the KV cache, also by segment.",
        "'growth' is the change since the step before and 'median' the median growth over the "
        "steps shown; timelines begin at their lowest value, not at 0; click one to go to a step.",
        "Look for memory that grows faster than the KV cache: the cache grows with every token, "
        "and any other growth means that something else keeps memory.",
    )
    depends_on_size: ClassVar[bool] = True

    def options(self) -> NoOptions:
        """Return the initial options; there are none."""
        return NoOptions()

    def load(self, source: Source, request: Request[NoOptions]) -> MemoryData:
        """Read the memory of the window of steps that fits the width."""
        return load_memory(source.reader, request.place, timeline_columns(request.width))

    def describe(self, data: MemoryData) -> list[str]:
        """Return a leak if there is one, the figures as a table, and the cache by segment."""
        return describe_memory(data)

    def paint(self, data: MemoryData, request: Request[NoOptions], theme: Theme) -> Picture:
        """Draw the figures, then timelines and segments if there is room for them."""
        width, height = request.width, request.height
        layout = memory_layout(data, width, height)
        leak = find_leak(data)
        left = [] if layout.wide else _draw_leak_warning(data, width, theme)
        left += _draw_figures(data, layout.left, theme)
        lines = [
            strip
            for name in layout.timelines
            for strip in _draw_titled_timeline(data, layout, name, theme)
        ]
        if layout.wide:
            lines = [*_draw_leak_warning(data, layout.columns, theme), *lines]
            left += _draw_cache_parts(data, layout.left, height - len(left), theme)
            strips = draw_two_columns(left, lines, width, height, theme)
        else:
            strips = [*left, *lines]
            strips += _draw_cache_parts(data, width, height - len(strips), theme)
        note = leak.format_note() if leak else data.window.format_steps()
        return Picture(strips[:height], note, alarm=leak is not None)

    def on_mouse(
        self, x: int, y: int, data: MemoryData, request: Request[NoOptions], *, click: bool
    ) -> Navigate | None:
        """Go to the step of a timeline's column."""
        if not click:
            return None
        areas = memory_layout(data, request.width, request.height).timelines.values()
        return navigate_to_step(x, y, areas, data.window)


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """The layout of a picture; the areas of `timelines` exclude their titles."""

    left: int
    columns: int
    wide: bool
    timelines: dict[str, Area]


def memory_layout(data: MemoryData, width: int, height: int) -> MemoryLayout:
    """Lay out a picture of this size."""
    wide, columns = width >= MIN_TWO_COLUMN_WIDTH, timeline_columns(width)
    main = "CUDA allocated" if "CUDA allocated" in data.figures else "RSS"
    names = [main, "KV cache"]
    n_warning = len(_draw_leak_warning(data, columns, Theme("none")))
    top = n_warning if wide else n_warning + len(data.figures) + 1
    spare = height - top if wide else min(height - top, max((height - top) * 2 // 3, 6))
    names = names[: max(spare // 2, 0)]
    each = min(spare // len(names), _MAX_PLOT_HEIGHT if wide else 4) if names else 0
    x = left_width(width) + COLUMN_GAP if wide else 0
    areas = {
        name: Area(x, top + each * index + 1, columns, each - 1) for index, name in enumerate(names)
    }
    return MemoryLayout(left_width(width), columns, wide, areas)


def _draw_leak_warning(data: MemoryData, width: int, theme: Theme) -> list[Strip]:
    leak = find_leak(data)
    return wrap_paragraph(leak.sentence(data.window), width, theme.style("warn")) if leak else []


def _draw_figures(data: MemoryData, width: int, theme: Theme) -> list[Strip]:
    """Draw the figures of the current step: value, growth, median growth."""
    text, muted = theme.style("text"), theme.style("muted")
    name_width = min(max(width - 3 * (_BYTES_WIDTH + 1), 4), 16)
    header = clip_text(f"step {data.window.current}", name_width)
    header += "".join(f" {align_right(name, _BYTES_WIDTH)}" for name in ("now", "growth", "median"))
    strips = [line([(header, muted)], width, text)]
    for name in data.figures:
        styles = (theme.style("strong"), text, muted)
        spans: list[Span] = [(clip_text(name, name_width), theme.style("title"))]
        for figure, style in zip(figure_texts(data, name), styles, strict=True):
            spans.append((f" {align_right(figure, _BYTES_WIDTH)}", style))
        strips.append(line(spans, width, text))
    return strips


def _draw_titled_timeline(
    data: MemoryData, layout: MemoryLayout, name: str, theme: Theme
) -> list[Strip]:
    """Draw a figure over the window, scaled from its lowest value, which the title shows."""
    area = layout.timelines[name]
    values = {step: value for step, value in data.series(name).items() if value is not None}
    shown = {step: value for step, value in values.items() if step in data.window.steps}
    low, high = min(shown.values(), default=0), max(shown.values(), default=0)
    title: list[Span] = [
        (f"{name} ", theme.style("title")),
        (f"from {human_bytes(low)} up by {human_bytes(high - low)}", theme.style("text")),
        (f"  {data.window.format_steps()}", theme.style("muted")),
    ]
    heights: dict[int, float | None] = {step: float(value - low) for step, value in shown.items()}
    drawn = draw_timeline(heights, data.window, area, theme)
    return [line(drop_cut_span(title, area.width), area.width, theme.style("text")), *drawn]


def _draw_cache_parts(data: MemoryData, width: int, room: int, theme: Theme) -> list[Strip]:
    """Draw the cache by segment: the largest ones that fit, in order, and the rest in one line."""
    if room < 2 or not data.parts:
        return []
    parts = _largest_parts(data.parts, room - 1)
    title: list[Span] = [
        ("KV cache by segment ", theme.style("title")),
        ("(by length)", theme.style("muted")),
    ]
    largest = max(part.n_bytes for part in data.parts)
    strips = [line(title, width, theme.style("text"))]
    for part in parts:
        share = part.n_bytes / largest if largest and part in data.parts else 0.0
        name = min(max(width // 3, 6), 18)
        figures = f" {align_right(human_bytes(part.n_bytes), _BYTES_WIDTH)} {part.n_tokens:>6} tok "
        spans: list[Span] = [
            (clip_text(part.label, name), theme.style("text")),
            (figures, theme.style("muted")),
            (bar(share, max(width - name - len(figures), 0)), theme.style("accent")),
        ]
        strips.append(line(spans, width, theme.style("text")))
    return strips


def _largest_parts(parts: tuple[CachePart, ...], room: int) -> list[CachePart]:
    if len(parts) <= room:
        return list(parts)
    ranked = sorted(range(len(parts)), key=lambda index: -parts[index].n_tokens)
    shown = sorted(ranked[: room - 1])
    rest = [parts[index] for index in ranked[room - 1 :]]
    n_tokens = sum(part.n_tokens for part in rest)
    others = CachePart(f"{len(rest)} others", n_tokens, sum(part.n_bytes for part in rest))
    return [*(parts[index] for index in shown), others]
