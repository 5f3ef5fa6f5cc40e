"""What the memory panel knows: bytes at the end of each step, growth, the cache by segment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from flexinspect.panels.base import Missing, TracePlace
from flexinspect.panels.parts.windows import StepWindow, load_step_window
from flexinspect.prompts import Segment
from flexinspect.records import MemoryRecord
from flexinspect.sizes import human_bytes
from flexinspect.text import escape_unprintable
from flexinspect.trace.callranges import lineage
from flexinspect.trace.ranges import branch_of_step, memory_range
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
