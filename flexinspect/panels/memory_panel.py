"""The memory panel: process, CUDA and model memory, their growth, and the KV cache by segment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from statistics import median

from msgspec import Struct
from textual.strip import Strip

from flexinspect.core.text import escape_unprintable, plural
from flexinspect.drawing.plots import bar
from flexinspect.drawing.text_lines import Pen, align_right, clip_text
from flexinspect.drawing.theme import Theme
from flexinspect.inputs.model_sizes import human_bytes
from flexinspect.panels import timeline
from flexinspect.panels.base import Help, Missing, NoOptions, Panel, Picture, Request, hook_hint
from flexinspect.panels.panel_source import Source
from flexinspect.panels.token_window import load_segments
from flexinspect.records.prompt import Segment
from flexinspect.records.step import MemoryRecord
from flexinspect.rules.numerics.memory_growth import steady_growth
from flexinspect.trace.queries import branch_of_step, memory_range
from flexinspect.trace.query_results import StepRow

FIGURES: Mapping[str, Callable[[MemoryRecord], int | None]] = {
    "RSS": lambda record: record.rss,
    "CUDA allocated": lambda record: record.cuda_allocated,
    "CUDA reserved": lambda record: record.cuda_reserved,
    "CUDA peak": lambda record: record.cuda_peak,
    "KV cache": lambda record: record.kv_cache,
    "model": lambda record: record.model,
}
"""The recorded figures by their titles. The peak is that of one step."""

_BYTES_WIDTH = 8


class CachePart(Struct, frozen=True):
    """The cached tokens of a segment, and their bytes."""

    label: str
    n_tokens: int
    n_bytes: int


class MemoryData(Struct, frozen=True):
    """The memory of the window's steps and one before; `parts` is the current step's KV cache."""

    window: timeline.StepWindow
    records: Mapping[int, MemoryRecord]
    step_row: StepRow | None
    parts: tuple[CachePart, ...]

    @property
    def figures(self) -> list[str]:
        """The titles of the recorded figures, without the KV cache of a training."""
        is_training = self.step_row is not None and self.step_row.phase == "train"
        names = (name for name in FIGURES if not (is_training and name == "KV cache"))
        return [name for name in names if set(self.series(name).values()) - {None}]

    @property
    def main_figure(self) -> str:
        """The title of the figure in which a leak shows."""
        return "CUDA allocated" if "CUDA allocated" in self.figures else "RSS"

    def series(self, name: str) -> dict[int, int | None]:
        """Return a figure for each loaded step."""
        return {step: FIGURES[name](self.records[step]) for step in sorted(self.records)}

    def known(self, name: str) -> dict[int, int]:
        """Return a figure for each step of the window at which it is known."""
        values = self.series(name)
        return {step: n for step in self.window.steps if (n := values.get(step)) is not None}

    def growth(self, name: str) -> dict[int, int]:
        """Return the growth of a figure since the step before, where both are known."""
        return {
            step: new - old
            for (before, old), (step, new) in pairwise(self.series(name).items())
            if step == before + 1 and old is not None and new is not None
        }


def cache_parts(segments: Sequence[Segment], step: StepRow, kv_cache: int) -> tuple[CachePart, ...]:
    """Return the cache by segment: its bytes in proportion to the tokens of each, which is exact.

    The cache holds the last `kv_after` of the tokens processed so far, with the same number of
    bytes for each. It does not hold the token that the step chose, which was not processed yet.
    """
    n_cached = step.kv_after
    n_processed = n_cached if step.first_pos is None else max(step.first_pos, n_cached)
    lengths = (
        min(segment.stop, n_processed) - max(segment.start, n_processed - n_cached)
        for segment in segments
    )
    return tuple(
        CachePart(escape_unprintable(segment.label), n, round(kv_cache * n / n_cached))
        for segment, n in zip(segments, lengths, strict=True)
        if n > 0
    )


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


def find_leak(data: MemoryData) -> str:
    """Describe growth beyond the KV cache in the window that the memory rule reports, else ""."""
    name = data.main_figure
    records = (data.records[step] for step in data.known(name))
    used = [(FIGURES[name](record) or 0) - record.kv_cache for record in records]
    growth = steady_growth(used)
    return (
        f"{name} without the KV cache grows by {human_bytes(round(growth[0]))} a step"
        if growth
        else ""
    )


def _leak_sentences(data: MemoryData) -> list[str]:
    leak, where = find_leak(data), f"throughout {data.window.format_steps()}"
    return [f"{leak}, {where}: something keeps memory at every step."] if leak else []


def figure_texts(data: MemoryData, name: str) -> tuple[str, str, str]:
    """Return a figure of the current step, its growth, and its median growth per step."""
    current = data.window.current
    return (
        human_bytes(data.series(name).get(current)),
        format_growth(data.growth(name).get(current)),
        format_growth(median_growth(data, name)),
    )


class MemoryPanel(Panel[MemoryData, NoOptions]):
    """Memory figures with their growth, the KV cache by segment, and two timelines."""

    name = "memory"
    title = "Memory"
    help = Help(
        "It shows the memory at the end of the step: the process (RSS), the CUDA allocator on a "
        "CUDA device, the model, and the KV cache, also by segment.",
        "'growth' is the change since the step before and 'median' the median growth over the "
        "steps shown; timelines begin at their lowest value, not at 0; click one to go to a step.",
        "Look for memory that grows much faster than the KV cache, which grows with every token; "
        "a warning appears where that is steady and large, as the finding memory.growth does.",
    )
    depends_on_size = True

    def load(self, source: Source, request: Request[NoOptions]) -> MemoryData:
        """Read the memory of the window of steps that fits the width."""
        reader, place = source.reader, request.place
        window = timeline.load_step_window(reader, place, timeline.column_widths(request.width)[1])
        before = max(window.start - 1, window.first)
        records = memory_range(reader, place.generation, before, window.stop, place.branch)
        if not any(step in records for step in window.steps):
            missing = f"No memory is recorded in {window.format_steps()}."
            raise Missing(missing, hook_hint(source, "memory", "it"))
        branch = branch_of_step(reader, place.generation, window.current, place.branch)
        step = reader.step(place.generation, window.current, branch)
        record, segments = records.get(window.current), load_segments(reader, place)
        parts = cache_parts(segments, step, record.kv_cache) if step and record else ()
        return MemoryData(window, records, step, parts)

    def describe(self, data: MemoryData) -> list[str]:
        """Return a leak if there is one, the figures as a table, the cache by segment, ranges."""
        lines, current = _leak_sentences(data), data.window.current
        if current not in data.records:
            lines.append(f"No memory is recorded at step {current}.")
        is_first = current == data.window.first
        title = "the first one: no growth yet." if is_first else f"growth from step {current - 1}:"
        lines.append(f"Memory at the end of step {current}, {title}")
        rows = [("", "now", "growth", "median growth per step")]
        rows += [(name, *figure_texts(data, name)) for name in data.figures]
        lines += [f"{name:<14}  {now:>9}  {new:>9}  {usual:>22}" for name, now, new, usual in rows]
        ranges = [_describe_range(data, name) for name in data.figures if name != "model"]
        return [*lines, *_describe_cache(data), *ranges]

    def paint(self, data: MemoryData, request: Request[NoOptions], theme: Theme) -> Picture:
        """Draw the figures, then timelines and segments if there is room for them."""
        pen, width, height = Pen(theme, request.width), request.width, request.height
        left_pen, right_pen = map(pen.resize, timeline.column_widths(width))
        is_wide = left_pen.width < width
        sentences = ((sentence, "warn") for sentence in _leak_sentences(data))
        leak = right_pen.paragraphs(sentences)
        left, top, most = _draw_figures(data, left_pen), len(leak), timeline.MAX_PLOT_HEIGHT
        room = height - top
        if not is_wide:
            top, most = top + len(left), 4
            room = min(height - top, max((height - top) * 2 // 3, 6))
        names = [name for name in (data.main_figure, "KV cache") if name in data.figures]
        areas = timeline.stack_timelines(names, width, top, room, most)
        drawn = (_draw_figure_timeline(name, data, area, theme) for name, area in areas.items())
        timelines = [*chain.from_iterable(drawn)]
        if is_wide:
            timelines = [*leak, *timelines]
            left += _draw_cache_parts(data, left_pen, height - len(left))
        else:
            left = [*leak, *left]
            timelines += _draw_cache_parts(data, pen, height - len(left) - len(timelines))
        note, strips = find_leak(data), timeline.draw_beside(left, timelines, height, pen)
        target = timeline.timeline_target(data.window, areas)
        return Picture(strips, note or data.window.format_steps(), bool(note), target)


def _draw_figure_timeline(
    name: str, data: MemoryData, area: timeline.Area, theme: Theme
) -> list[Strip]:
    """Draw a figure over the window, scaled from its lowest value, which the title shows."""
    values = data.known(name)
    low, high = min(values.values(), default=0), max(values.values(), default=0)
    title = [
        (f"{name} ", "title"),
        (f"from {human_bytes(low)} up by {human_bytes(high - low)}", "text"),
        (f"  {data.window.format_steps()}", "muted"),
    ]
    heights = (float(values[n] - low) if n in values else None for n in data.window.steps)
    return timeline.draw_timeline(title, heights, data.window, area, theme)


def _describe_cache(data: MemoryData) -> list[str]:
    if not data.parts or data.step_row is None:
        return []
    n_tokens = sum(part.n_tokens for part in data.parts)
    key_bytes = human_bytes(round(sum(part.n_bytes for part in data.parts) / n_tokens))
    width = max(len(part.label) for part in data.parts)
    lines = [f"KV cache by segment: {data.step_row.kv_after} keys of {key_bytes} each."]
    for part in data.parts:
        tokens = f"{plural(part.n_tokens, 'token'):<{len(str(part.n_tokens)) + 7}}"
        lines.append(f"  {part.label:<{width}}  {tokens:>13}  {human_bytes(part.n_bytes):>8}")
    return lines


def _describe_range(data: MemoryData, name: str) -> str:
    values = data.known(name)
    low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    least, most = (f"{human_bytes(values[step])} (step {step})" for step in (low, high))
    span = human_bytes(values[high] - values[low])
    return f"{name} in {data.window.format_steps()}: {least} to {most}, by {span}."


def _draw_figures(data: MemoryData, pen: Pen) -> list[Strip]:
    name_width = min(max(pen.width - 3 * (_BYTES_WIDTH + 1), 4), 16)
    styles = ("title", "strong", "text", "muted")
    rows = [((f"step {data.window.current}", "now", "growth", "median"), ("muted",) * 4)]
    rows += [((name, *figure_texts(data, name)), styles) for name in data.figures]
    strips = []
    for (name, *figures), (name_style, *figure_styles) in rows:
        cells = (f" {align_right(figure, _BYTES_WIDTH)}" for figure in figures)
        named = (clip_text(name, name_width), name_style)
        strips.append(pen.line(named, *zip(cells, figure_styles, strict=True)))
    return strips


def _draw_cache_parts(data: MemoryData, pen: Pen, room: int) -> list[Strip]:
    """Draw the cache by segment: the largest ones that fit, in order, and the rest in one line."""
    if room < 2 or not data.parts:
        return []
    strips = [pen.line(("KV cache by segment ", "title"), ("(by length)", "muted"))]
    largest = max(part.n_bytes for part in data.parts)
    width = min(max(pen.width // 3, 6), 18)
    for part in _largest_parts(data.parts, room - 1):
        share = part.n_bytes / largest if largest and part in data.parts else 0.0
        figures = f" {align_right(human_bytes(part.n_bytes), _BYTES_WIDTH)} {part.n_tokens:>6} tok "
        length = bar(share, max(pen.width - width - len(figures), 0))
        spans = ((clip_text(part.label, width), "text"), (figures, "muted"), (length, "accent"))
        strips.append(pen.line(*spans))
    return strips


def _largest_parts(parts: tuple[CachePart, ...], room: int) -> Sequence[CachePart]:
    if len(parts) <= room:
        return parts
    ranked = sorted(range(len(parts)), key=lambda index: -parts[index].n_tokens)
    rest = [parts[index] for index in ranked[room - 1 :]]
    n_tokens = sum(part.n_tokens for part in rest)
    others = CachePart(f"{len(rest)} others", n_tokens, sum(part.n_bytes for part in rest))
    return [*(parts[index] for index in sorted(ranked[: room - 1])), others]
