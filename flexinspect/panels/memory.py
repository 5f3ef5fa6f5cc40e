"""The memory panel: what takes the bytes, how they grow, and the KV cache by segment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual.strip import Strip

from flexinspect.panels.base import Go, Help, NoOptions, Panel, Picture, Request
from flexinspect.panels.parts.memorydata import (
    FIGURES,
    MemoryData,
    Part,
    describe_memory,
    leak_of,
    load_memory,
    signed,
    usual_growth,
)
from flexinspect.panels.parts.windows import (
    BESIDE,
    GAP,
    Area,
    draw_timeline,
    fitting,
    go_to_step,
    left_width,
    put_beside,
    timeline_columns,
)
from flexinspect.panels.source import Source
from flexinspect.sizes import human_bytes
from flexinspect.widgets.lines import Span, clipped, line, paragraph, right
from flexinspect.widgets.look import Look
from flexinspect.widgets.plots import bar

_TALLEST = 8
"""Lines that a timeline takes at most, its title included."""

_BYTES = 8


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
    sized: ClassVar[bool] = True

    def options(self) -> NoOptions:
        """Return the options; there are none."""
        return NoOptions()

    def load(self, source: Source, request: Request[NoOptions]) -> MemoryData:
        """Read the memory of the window of steps that fits the width."""
        return load_memory(source.reader, request.place, timeline_columns(request.width))

    def describe(self, data: MemoryData) -> list[str]:
        """Return the growth that stands out, the figures as a table, the cache by segment."""
        return describe_memory(data)

    def paint(self, data: MemoryData, request: Request[NoOptions], look: Look) -> Picture:
        """Draw the figures, then timelines and segments as there is room for them."""
        width, height = request.width, request.height
        plan = arrange(data, width, height)
        leak = leak_of(data)
        left = [] if plan.wide else _warning(data, width, look)
        left += _figures(data, plan.left, look)
        lines = [strip for name in plan.timelines for strip in _timeline(data, plan, name, look)]
        if plan.wide:
            lines = [*_warning(data, plan.columns, look), *lines]
            left += _segments(data, plan.left, height - len(left), look)
            strips = put_beside(left, lines, width, height, look)
        else:
            strips = [*left, *lines]
            strips += _segments(data, width, height - len(strips), look)
        note = leak.note() if leak else data.window.words()
        return Picture(strips[:height], note, alarm=leak is not None)

    def point(
        self, x: int, y: int, data: MemoryData, request: Request[NoOptions], *, click: bool
    ) -> Go | None:
        """Go to the step of a timeline's column."""
        if not click:
            return None
        areas = arrange(data, request.width, request.height).timelines.values()
        return go_to_step(x, y, areas, data.window)


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes where: the areas of the timelines are without their titles."""

    left: int
    columns: int
    wide: bool
    timelines: dict[str, Area]


def arrange(data: MemoryData, width: int, height: int) -> Plan:
    """Return the places of everything in a picture of this size."""
    wide, columns = width >= BESIDE, timeline_columns(width)
    main = "CUDA allocated" if "CUDA allocated" in data.figures else "RSS"
    names = [main, "KV cache"]
    n_words = len(_warning(data, columns, Look("none")))
    top = n_words if wide else n_words + len(data.figures) + 1
    spare = height - top if wide else min(height - top, max((height - top) * 2 // 3, 6))
    names = names[: max(spare // 2, 0)]
    each = min(spare // len(names), _TALLEST if wide else 4) if names else 0
    x = left_width(width) + GAP if wide else 0
    areas = {
        name: Area(x, top + each * index + 1, columns, each - 1) for index, name in enumerate(names)
    }
    return Plan(left_width(width), columns, wide, areas)


def _warning(data: MemoryData, width: int, look: Look) -> list[Strip]:
    leak = leak_of(data)
    return paragraph(leak.sentence(data.window), width, look.style("warn")) if leak else []


def _figures(data: MemoryData, width: int, look: Look) -> list[Strip]:
    """Return the figures of the current step: now, growth, usual growth."""
    text, muted = look.style("text"), look.style("muted")
    name_width = min(max(width - 3 * (_BYTES + 1), 4), 16)
    head = clipped(f"step {data.window.current}", name_width)
    head += "".join(" " + right(name, _BYTES) for name in ("now", "growth", "usual"))
    strips = [line([(head, muted)], width, text)]
    for name in data.figures:
        now = None if data.now is None else FIGURES[name](data.now)
        step = data.growth(name).get(data.window.current)
        spans: list[Span] = [
            (clipped(name, name_width), look.style("title")),
            (" " + right(human_bytes(now), _BYTES), look.style("strong")),
            (" " + right(signed(step), _BYTES), text),
            (" " + right(signed(usual_growth(data, name)), _BYTES), muted),
        ]
        strips.append(line(spans, width, text))
    return strips


def _timeline(data: MemoryData, plan: Plan, name: str, look: Look) -> list[Strip]:
    """Return a figure over the window: from its lowest value, which the title names, up."""
    area = plan.timelines[name]
    values = {step: value for step, value in data.series(name).items() if value is not None}
    shown = {step: value for step, value in values.items() if step in data.window.steps}
    low, high = min(shown.values(), default=0), max(shown.values(), default=0)
    title: list[Span] = [
        (f"{name} ", look.style("title")),
        (f"from {human_bytes(low)} up by {human_bytes(high - low)}", look.style("text")),
        (f"  {data.window.words()}", look.style("muted")),
    ]
    heights: dict[int, float | None] = {step: float(value - low) for step, value in shown.items()}
    drawn = draw_timeline(heights, data.window, area, look)
    return [line(fitting(title, area.width), area.width, look.style("text")), *drawn]


def _segments(data: MemoryData, width: int, room: int, look: Look) -> list[Strip]:
    """Return the cache by segment, the largest that fit, in order; the rest in one line."""
    if room < 2 or not data.parts:
        return []
    parts = _that_fit(data.parts, room - 1)
    title: list[Span] = [
        ("KV cache by segment ", look.style("title")),
        ("(by length)", look.style("muted")),
    ]
    largest = max(part.n_bytes for part in data.parts)
    strips = [line(title, width, look.style("text"))]
    for part in parts:
        share = part.n_bytes / largest if largest and part in data.parts else 0.0
        name = min(max(width // 3, 6), 18)
        figures = f" {right(human_bytes(part.n_bytes), _BYTES)} {part.n_tokens:>6} tok "
        spans: list[Span] = [
            (clipped(part.label, name), look.style("text")),
            (figures, look.style("muted")),
            (bar(share, max(width - name - len(figures), 0)), look.style("accent")),
        ]
        strips.append(line(spans, width, look.style("text")))
    return strips


def _that_fit(parts: tuple[Part, ...], room: int) -> list[Part]:
    if len(parts) <= room:
        return list(parts)
    ranked = sorted(range(len(parts)), key=lambda index: -parts[index].n_tokens)
    kept = sorted(ranked[: room - 1])
    rest = [parts[index] for index in ranked[room - 1 :]]
    n_tokens = sum(part.n_tokens for part in rest)
    others = Part(f"{len(rest)} others", n_tokens, sum(part.n_bytes for part in rest))
    return [*(parts[index] for index in kept), others]
