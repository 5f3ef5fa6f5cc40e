"""The memory panel: what takes the bytes, how they grow, and the KV cache by segment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual.strip import Strip

from flexinspect.panels.base import Help, Navigate, NoOptions, Panel, Picture, Request
from flexinspect.panels.parts.memorydata import (
    FIGURES,
    CachePart,
    MemoryData,
    describe_memory,
    find_leak,
    format_growth,
    load_memory,
    median_growth,
)
from flexinspect.panels.parts.windows import (
    COLUMN_GAP,
    MIN_TWO_COLUMN_WIDTH,
    Area,
    draw_timeline,
    draw_two_columns,
    drop_cut_span,
    left_width,
    navigate_to_step,
    timeline_columns,
)
from flexinspect.panels.source import Source
from flexinspect.sizes import human_bytes
from flexinspect.widgets.lines import Span, align_right, clip_text, line, wrap_paragraph
from flexinspect.widgets.look import Theme
from flexinspect.widgets.plots import bar

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
