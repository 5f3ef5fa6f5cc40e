"""The way from a sample to its answer as boxes, with the numbers of one generation."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rich.cells import cell_len, chop_cells, set_cell_size
from textual.strip import Strip

from flexinspect.prompts import Segment, SegmentKind
from flexinspect.records import CallRecord, MaskRecord
from flexinspect.text import escape_unprintable
from flexinspect.trace.callranges import format_ranges
from flexinspect.trace.rows import BranchRow, GenerationRow, StepRow
from flexinspect.widgets.lines import Span, clip_text, line
from flexinspect.widgets.look import Theme

_MIN_BOX_WIDTH = 25
_BOX_GAP = 3
_MAX_SEGMENTS = 7
_MAX_BOX_LINES = 9
_MAX_LINE_CHARS = 1000
"""Characters of a line of a box that are looked at."""
_MAX_ANSWER_CHARS = 240
"""Characters of an answer that are shown in its box; the verdict stands below them."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the diagram and the manifest are made from; whatever is not recorded is empty or None.

    `decode` is a window of decode steps around the place, `decode_time` their number and
    milliseconds in the whole branch; `n_steps` counts all steps; `calls` are
    those of the current step, or of the nearest one that has any; `open_share` is the part of the
    cells of `mask` that are open. `right` says whether the answer is one of those expected, None
    while that is not known.
    """

    run: Mapping[str, Any]
    state: str
    path: str
    size: int
    generation: GenerationRow | None = None
    branch: BranchRow | None = None
    segments: tuple[Segment, ...] = ()
    question: str = ""
    answer: str = ""
    is_correct: bool | None = None
    prefill: StepRow | None = None
    n_steps: int = 0
    decode: tuple[StepRow, ...] = ()
    decode_time: tuple[int, float] = (0, 0.0)
    prefill_calls: tuple[CallRecord, ...] = ()
    calls: tuple[CallRecord, ...] = ()
    mask: MaskRecord | None = None
    open_share: float | None = None

    def fact(self, *keys: str) -> Any:
        """Return a fact of the manifest at nested keys, None where anything is missing."""
        value: Any = self.run
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


@dataclass(frozen=True, slots=True)
class Box:
    """A stage: its title, what is known of it, and the name of the title's style."""

    title: str
    lines: tuple[str, ...] = field(default=())
    style: str = "title"


def generation_stages(facts: RunFacts) -> list[Box]:
    """Return the stages of a generation, in order, with printable text."""
    stages = (
        ("input", _input_lines(facts)),
        ("concatenation", _concatenation_lines(facts)),
        ("mask", _mask_lines(facts)),
        ("patch", _patch_lines(facts)),
        ("prefill", _prefill_lines(facts)),
        ("decode loop ↻", _decode_lines(facts)),
    )
    lines, style = _text_lines(facts)
    return [
        *(make_box(title, box_lines) for title, box_lines in stages),
        make_box("text", lines, style),
    ]


def make_box(title: str, lines: Iterable[str], style: str = "title") -> Box:
    """Return a stage whose lines may be drawn; empty ones are left out."""
    return Box(title, _printable_lines(lines), style)


def _printable_lines(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(
        escape_unprintable(_truncate(text, _MAX_LINE_CHARS).strip()) for text in lines if text
    ) or ("not recorded",)


def _truncate(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def _input_lines(facts: RunFacts) -> list[str]:
    about = facts.generation
    source = "typed prompts" if facts.fact("job", "prompts") else facts.fact("job", "dataset")
    n = sum(segment.kind is SegmentKind.PARAPHRASE for segment in facts.segments)
    return [
        f"{source or ''} {about.sample_id if about else ''}",
        f"{n} paraphrase{'' if n == 1 else 's'}" if facts.segments else "",
        f"“{facts.question}”" if facts.question else "",
    ]


def _concatenation_lines(facts: RunFacts) -> list[str]:
    prompt = [s for s in facts.segments if s.kind is not SegmentKind.GENERATED]
    if not prompt:
        return []
    n_tokens, positions = prompt[-1].stop, facts.generation.positions if facts.generation else ""
    pieces = [s for s in prompt if s.kind is not SegmentKind.SEPARATOR]
    more = len(pieces) - _MAX_SEGMENTS
    head = pieces if more <= 0 else [*pieces[: _MAX_SEGMENTS - 1], pieces[-1]]
    named = [f"{s.label} [{s.start}, {s.stop})" for s in head]
    if more > 0:
        named.insert(-1, f"… {more} more")
    n_between = len(prompt) - len(pieces)
    return [
        f"{n_tokens} tokens in {len(prompt)} segments",
        f"positions {positions}" if positions else "",
        *named,
        f"and {n_between} separator{'' if n_between == 1 else 's'}" if n_between else "",
    ]


def _mask_lines(facts: RunFacts) -> list[str]:
    mask, about = facts.mask, facts.generation
    lines = [about.mask if about else ""]
    separators = about.declared.get("separators") if about else None
    if separators:
        lines.append(f"separators {separators}")
    if mask is None:
        return lines
    block = f", block {mask.block_q}x{mask.block_kv}" if mask.block_q is not None else ""
    lines.append(f"{mask.fingerprint[:8]} ({mask.kind}), {mask.q_len}x{mask.kv_len}{block}")
    if facts.open_share is not None:
        lines.append(f"{100 * facts.open_share:.1f} % of its cells open")
    return lines


def _patch_lines(facts: RunFacts) -> list[str]:
    parts = (("prefill", facts.prefill_calls), ("decode", facts.calls))
    paths = [(name, _format_paths(calls)) for name, calls in parts if calls]
    same = len({text for _, text in paths}) == 1
    lines = [paths[0][1]] if same and paths else [f"{name}: {text}" for name, text in paths]
    backends = dict.fromkeys(call.backend for call in (*facts.prefill_calls, *facts.calls))
    compiled = facts.fact("compiled")
    return [
        *lines,
        f"backend {', '.join(backends)}" if backends else "",
        "" if compiled is None else "compiled" if compiled else "not compiled",
    ]


def _format_paths(calls: Sequence[CallRecord]) -> str:
    ordered = sorted({(call.path, call.layer) for call in calls})
    parts = []
    for path, run in groupby(ordered, key=lambda pair: pair[0]):
        layers = [layer for _, layer in run]
        parts.append(f"{path}, layer{'s' if len(layers) > 1 else ''} {format_ranges(layers)}")
    return "; ".join(parts)


def _prefill_lines(facts: RunFacts) -> list[str]:
    step = facts.prefill
    if step is None:
        return []
    return [
        f"{step.q_len} tokens in {step.wall_ms:.1f} ms" if math.isfinite(step.wall_ms) else "",
        f"{step.q_len * 1e3 / step.wall_ms:.0f} tokens/s" if step.wall_ms > 0 else "",
        f"cache {step.kv_before} → {step.kv_after}",
    ]


def _decode_lines(facts: RunFacts) -> list[str]:
    n_decode = max(facts.n_steps - (facts.prefill is not None), 0)
    n_timed, total_ms = facts.decode_time
    ratio = facts.fact("cost", "ratio")
    lines = [f"{n_decode} step{'' if n_decode == 1 else 's'}"]
    if n_timed and math.isfinite(total_ms) and total_ms > 0:
        lines.append(f"{total_ms / n_timed:.1f} ms per step")
        lines.append(f"{1e3 * n_timed / total_ms:.1f} tokens/s")
    if isinstance(ratio, int | float):
        lines.append(f"capture {100 * ratio:.1f} % of the whole run")
    return lines


def _text_lines(facts: RunFacts) -> tuple[list[str], str]:
    about, branch = facts.generation, facts.branch
    if about is None:
        return [], "title"
    answer, expected = _truncate(facts.answer, _MAX_ANSWER_CHARS), about.expected
    lines = [f"“{answer}”" if answer else "nothing yet" if _is_recording(branch) else "(nothing)"]
    style = "title"
    if expected:
        named = (_truncate(text, _MAX_ANSWER_CHARS // 4) for text in expected[:4])
        lines.append(f"expected {' | '.join(named)}")
        if facts.is_correct is not None:
            lines.append("✓ correct" if facts.is_correct else "✗ not among those expected")
            style = "good" if facts.is_correct else "bad"
    if branch is not None:
        reason = f", {branch.stop_reason}" if branch.stop_reason else ""
        lines.append(f"{branch.state}{reason}")
    return lines, style


def _is_recording(branch: BranchRow | None) -> bool:
    return branch is not None and branch.state == "recording"


# -- drawing -------------------------------------------------------------------------------------


def draw_diagram(stages: Sequence[Box], width: int, theme: Theme) -> list[Strip]:
    """Return the boxes from left to right, in as many rows as they need, one below the other."""
    per_row = max(1, min(len(stages), (width + _BOX_GAP) // (_MIN_BOX_WIDTH + _BOX_GAP)))
    n_rows = -(-len(stages) // per_row)
    per_row = -(-len(stages) // n_rows)  # rows of equal length
    each = max((width - _BOX_GAP * (per_row - 1)) // per_row, 1)
    strips: list[Strip] = []
    for start in range(0, len(stages), per_row):
        row = stages[start : start + per_row]
        strips += _draw_box_row(row, each, width, theme)
        if start + per_row < len(stages):
            strips.append(_draw_connector(len(row), each, width, theme))
    return strips


def _draw_box_row(row: Sequence[Box], box: int, width: int, theme: Theme) -> list[Strip]:
    texts = [_wrap_lines(stage.lines, box - 4) for stage in row]
    height = max(map(len, texts))
    edge, body = theme.style("muted"), theme.style("text")
    lines: list[list[Span]] = [[] for _ in range(height + 2)]
    for index, (stage, text) in enumerate(zip(row, texts, strict=True)):
        if index:
            for number, spans_ in enumerate(lines):
                spans_.append(("──▶" if number == 1 else " " * _BOX_GAP, edge))
        title = clip_text(f" {stage.title} ", min(cell_len(stage.title) + 2, max(box - 3, 0)))
        rest = "─" * (box - 3 - cell_len(title))
        lines[0] += [("╭─", edge), (title, theme.style(stage.style)), (f"{rest}╮", edge)]
        for number in range(height):
            shown = clip_text(text[number] if number < len(text) else "", max(box - 4, 0))
            lines[number + 1] += [("│ ", edge), (shown, body), (" │", edge)]
        lines[-1].append((f"╰{'─' * (box - 2)}╯", edge))
    return [line(spans_, width, body) for spans_ in lines]


def _draw_connector(n_boxes: int, box: int, width: int, theme: Theme) -> Strip:
    """Return the line that leads from the end of a row of boxes to the start of the next."""
    first, last = box // 2, (n_boxes - 1) * (box + _BOX_GAP) + box // 2
    text = "▼" if first == last else f"▼{'─' * (last - first - 1)}╯"
    return line([(" " * first + text, theme.style("muted"))], width, theme.style("text"))


def _wrap_lines(texts: Iterable[str], width: int) -> list[str]:
    rows: list[str] = []
    most = 2 * _MAX_BOX_LINES * max(width, 8)
    for text in (_truncate(text, most) for text in texts):
        for row in textwrap.wrap(text, max(width, 8), break_on_hyphens=False) or [""]:
            rows += chop_cells(row, width) if cell_len(row) > width > 1 else [row]
    return rows if len(rows) <= _MAX_BOX_LINES * 2 else [*rows[: _MAX_BOX_LINES * 2 - 1], "…"]


def draw_facts_table(pairs: Iterable[tuple[str, str]], width: int, theme: Theme) -> list[Strip]:
    """Return names and values, one below the other, long values wrapped under themselves."""
    listed = list(pairs)
    longest = max((cell_len(name) for name, _ in listed), default=0)
    label = min(longest + 2, max(width // 3, 10), max(width - 1, 0))
    muted, plain = theme.style("muted"), theme.style("text")
    strips = []
    for name, value in listed:
        rows = _wrap_lines([value], max(width - label, 1)) or [""]
        for number, row in enumerate(rows):
            head = clip_text("" if number else name, max(label - 1, 0))
            shown = set_cell_size(head, label)
            strips.append(line([(shown, muted), (row, plain)], width, plain))
    return strips
