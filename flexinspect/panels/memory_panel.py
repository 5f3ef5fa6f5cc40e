"""The memory panel: what takes the bytes, how they grow, and the KV cache by segment."""

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
from flexinspect.panels.source import Source
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
from flexinspect.records.prompt import Segment
from flexinspect.records.step import MemoryRecord
from flexinspect.trace.queries.range_queries import branch_of_step, lineage, memory_range
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.rows import StepRow

FIGURES: Mapping[str, Callable[[MemoryRecord], int | None]] = {
    "RSS": lambda record: record.rss,
    "CUDA allocated": lambda record: record.cuda_allocated,
    "CUDA reserved": lambda record: record.cuda_reserved,
    "CUDA peak": lambda record: record.cuda_peak,
    "KV cache": lambda record: record.kv_cache,
    "model": lambda record: record.model,
}
"""What is recorded, by the name that people see. The peak is that of one step."""

LEAK_STEPS = 16
"""Growths that a window must have before anything is said of a trend."""

LEAK_BYTES = 16_384
"""Bytes per step below which growth is the noise of pages and buffers: four pages of most
machines."""

LEAK_FACTOR = 4
"""How much faster than the cache memory must grow before it is said."""


@dataclass(frozen=True, slots=True)
class CachePart:
    """The tokens of a segment that are in the cache, and the bytes they take."""

    label: str
    n_tokens: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryData:
    """The memory of the window's steps; `about` is the current step, `parts` its cache."""

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
        """The names of what is recorded: CUDA only where there is one."""
        known = self.records.values()
        return [name for name in FIGURES if any(FIGURES[name](one) is not None for one in known)]

    def series(self, name: str) -> dict[int, int | None]:
        """Return a figure for each step of the window that has it."""
        return {step: FIGURES[name](self.records[step]) for step in sorted(self.records)}

    def growth(self, name: str) -> dict[int, int]:
        """Return the growth of a figure from the step before, for each step where both are known.

        Only within the window, so the first step has none; step 0 never has one.
        """
        values = self.series(name)
        found = {}
        for before, step in pairwise(values):
            old, new = values[before], values[step]
            if step == before + 1 and old is not None and new is not None:
                found[step] = new - old
        return found


def load_memory(reader: TraceReader, place: TracePlace, n_columns: int) -> MemoryData:
    """Read the memory of the window that fits in `n_columns`, one step more, and the segments.

    Raises `Missing` when the window has no memory.
    """
    window = load_step_window(reader, place, n_columns)
    before = max(window.start - 1, window.first)
    records = memory_range(reader, place.generation, before, window.stop, place.branch)
    if not any(step in records for step in window.steps):
        raise Missing(
            f"No memory is recorded in {window.format_steps()}.",
            "The memory hook records it at every level; 'flexinspect dump' shows whether it was "
            "switched off.",
        )
    branch = branch_of_step(reader, place.generation, window.current, place.branch)
    about = reader.step(place.generation, window.current, branch)
    now = records.get(window.current)
    segments = _load_segments(reader, place)
    parts = cache_parts(segments, about, now.kv_cache) if about and now else ()
    return MemoryData(window, records, about, parts)


def _load_segments(reader: TraceReader, place: TracePlace) -> list[Segment]:
    """Return the segments of the branch; a fork that is still open has those of its parent."""
    for branch, _, _ in lineage(reader, place.generation, place.branch):
        if found := reader.segments(place.generation, branch):
            return found
    return []


def cache_parts(segments: Sequence[Segment], step: StepRow, kv_cache: int) -> tuple[CachePart, ...]:
    """Return the cache by segment: its bytes in proportion to the tokens of each, which is exact.

    The cache holds the last `kv_after` of the tokens fed so far, each of them in as many bytes.
    The token that a step chose is not fed yet.
    """
    n_cached = step.kv_after
    n_processed = n_cached if step.first_pos is None else max(step.first_pos, n_cached)
    found: list[CachePart] = []
    for segment in segments:
        n_tokens = min(segment.stop, n_processed) - max(segment.start, n_processed - n_cached)
        if n_tokens > 0:
            n_bytes = round(kv_cache * n_tokens / n_cached)
            found.append(CachePart(escape_unprintable(segment.label), n_tokens, n_bytes))
    return tuple(found)


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
    """Return the usual growth per step of a figure that grows throughout, None if it does not.

    Throughout: the window has at least `LEAK_STEPS` growths, and the figure rises in each quarter
    of it. The median, because an allocator takes memory in jumps that mean nothing.
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
    """A figure that grows much faster than the cache: both in bytes per step."""

    name: str
    rate: int
    cache: int

    def format_note(self) -> str:
        """Return it in few words."""
        rates = f"{human_bytes(self.rate)} a step", human_bytes(self.cache)
        return f"{self.name} grows by {rates[0]}, the KV cache by {rates[1]}"

    def sentence(self, window: StepWindow) -> str:
        """Return it in whole sentences."""
        return (
            f"{self.format_note()}, throughout {window.format_steps()}: something else keeps memory at every "
            "step."
        )


def find_leak(data: MemoryData) -> MemoryLeak | None:
    """Return what grows much faster than the cache in the window, None if nothing does."""
    cache = growth_trend(data, "KV cache") or 0.0
    for name in ("CUDA allocated", "RSS"):
        rate = growth_trend(data, name) if name in data.figures else None
        if rate is not None and rate >= max(LEAK_FACTOR * cache, LEAK_BYTES):
            return MemoryLeak(name, round(rate), round(cache))
    return None


def describe_memory(data: MemoryData) -> list[str]:
    """Return the growth that stands out, the figures as a table, and the cache by segment."""
    leak = find_leak(data)
    lines = [leak.sentence(data.window)] if leak else []
    current = data.window.current
    if data.current_record is None:
        lines.append(f"No memory is recorded at step {current}.")
    lines += [f"Memory at the end of step {current}, growth from step {current - 1}:"]
    if current == data.window.first:
        lines[-1] = f"Memory at the end of step {current}, the first one: no growth yet."
    lines += _figures_table(data)
    lines += _describe_cache(data)
    for name in data.figures:
        if name != "model":
            lines.append(_describe_range(data, name))
    return lines


def _figures_table(data: MemoryData) -> list[str]:
    rows = [f"{'':<14}  {'now':>9}  {'growth':>9}  {'usual growth per step':>21}"]
    for name in data.figures:
        now = None if data.current_record is None else FIGURES[name](data.current_record)
        step = data.growth(name).get(data.window.current)
        usual = median_growth(data, name)
        rows.append(
            f"{name:<14}  {human_bytes(now):>9}  {format_growth(step):>9}  {format_growth(usual):>21}"
        )
    return rows


def _describe_cache(data: MemoryData) -> list[str]:
    if not data.parts or data.step_row is None:
        return []
    n_tokens = sum(part.n_tokens for part in data.parts)
    each = human_bytes(round(sum(part.n_bytes for part in data.parts) / n_tokens))
    width = max(len(part.label) for part in data.parts)
    rows = [
        f"  {part.label:<{width}}  {_format_tokens(part.n_tokens):>13}  {human_bytes(part.n_bytes):>8}"
        for part in data.parts
    ]
    return [f"KV cache by segment, by length: {data.step_row.kv_after} keys of {each} each.", *rows]


def _format_tokens(n: int) -> str:
    return "1 token " if n == 1 else f"{n} tokens"


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


_MAX_PLOT_HEIGHT = 8
"""Lines that a timeline takes at most, its title included."""

_BYTES_WIDTH = 8


class MemoryPanel(Panel[MemoryData, NoOptions]):
    """Figures with their growth, the cache by segment, and two timelines."""

    name: ClassVar[str] = "memory"
    title: ClassVar[str] = "Memory"
    help: ClassVar[Help] = Help(
        "It shows the memory at the end of the step: the process (RSS), CUDA's allocator where "
        "there is one, the model, and the KV cache, also by segment.",
        "'growth' is the change since the step before and 'usual' the median over the steps "
        "shown; the timelines begin at their lowest value, not at 0; click one to go to its step.",
        "Look for memory that grows faster than the KV cache: the cache grows with every token, "
        "and what grows beside it is kept by something else.",
    )
    depends_on_size: ClassVar[bool] = True

    def options(self) -> NoOptions:
        """Return the options; there are none."""
        return NoOptions()

    def load(self, source: Source, request: Request[NoOptions]) -> MemoryData:
        """Read the memory of the window of steps that fits the width."""
        return load_memory(source.reader, request.place, timeline_columns(request.width))

    def describe(self, data: MemoryData) -> list[str]:
        """Return the growth that stands out, the figures as a table, the cache by segment."""
        return describe_memory(data)

    def paint(self, data: MemoryData, request: Request[NoOptions], theme: Theme) -> Picture:
        """Draw the figures, then timelines and segments as there is room for them."""
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
    """What goes where: the areas of the timelines are without their titles."""

    left: int
    columns: int
    wide: bool
    timelines: dict[str, Area]


def memory_layout(data: MemoryData, width: int, height: int) -> MemoryLayout:
    """Return the places of everything in a picture of this size."""
    wide, columns = width >= MIN_TWO_COLUMN_WIDTH, timeline_columns(width)
    main = "CUDA allocated" if "CUDA allocated" in data.figures else "RSS"
    names = [main, "KV cache"]
    n_words = len(_draw_leak_warning(data, columns, Theme("none")))
    top = n_words if wide else n_words + len(data.figures) + 1
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
    """Return the figures of the current step: now, growth, usual growth."""
    text, muted = theme.style("text"), theme.style("muted")
    name_width = min(max(width - 3 * (_BYTES_WIDTH + 1), 4), 16)
    head = clip_text(f"step {data.window.current}", name_width)
    head += "".join(" " + align_right(name, _BYTES_WIDTH) for name in ("now", "growth", "usual"))
    strips = [line([(head, muted)], width, text)]
    for name in data.figures:
        now = None if data.current_record is None else FIGURES[name](data.current_record)
        step = data.growth(name).get(data.window.current)
        spans: list[Span] = [
            (clip_text(name, name_width), theme.style("title")),
            (" " + align_right(human_bytes(now), _BYTES_WIDTH), theme.style("strong")),
            (" " + align_right(format_growth(step), _BYTES_WIDTH), text),
            (" " + align_right(format_growth(median_growth(data, name)), _BYTES_WIDTH), muted),
        ]
        strips.append(line(spans, width, text))
    return strips


def _draw_titled_timeline(
    data: MemoryData, layout: MemoryLayout, name: str, theme: Theme
) -> list[Strip]:
    """Return a figure over the window: from its lowest value, which the title names, up."""
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
    """Return the cache by segment, the largest that fit, in order; the rest in one line."""
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
    kept = sorted(ranked[: room - 1])
    rest = [parts[index] for index in ranked[room - 1 :]]
    n_tokens = sum(part.n_tokens for part in rest)
    others = CachePart(f"{len(rest)} others", n_tokens, sum(part.n_bytes for part in rest))
    return [*(parts[index] for index in kept), others]
