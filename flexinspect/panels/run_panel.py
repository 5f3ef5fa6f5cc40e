"""The run panel: the stages from input to text as a diagram with numbers, and the manifest."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace
from rich.cells import cell_len, chop_cells, set_cell_size
from textual.strip import Strip

from flexinspect.core.text import escape_unprintable, format_numbers, plural, truncate
from flexinspect.drawing.text_lines import NamedSpan, Pen, clip_text
from flexinspect.drawing.theme import Theme
from flexinspect.inputs.model_sizes import human_bytes, human_count
from flexinspect.panels import base
from flexinspect.panels.base import Picture, Request
from flexinspect.panels.panel_source import Source
from flexinspect.panels.token_window import is_answer_correct
from flexinspect.records.prompt import Segment, SegmentKind, generated_start
from flexinspect.records.step import UNKNOWN_PATH, CallRecord, MaskRecord
from flexinspect.trace import queries
from flexinspect.trace.codec import plain_json
from flexinspect.trace.file.location import COMPANION_SUFFIXES
from flexinspect.trace.queries import question_text, read_tokens
from flexinspect.trace.query_results import BranchRow, GenerationRow, StepRow
from flexinspect.trace.reader import TraceReader

_MIN_BOX_WIDTH = 25
_BOX_GAP = 3
_MAX_SEGMENTS = 7
_MAX_BOX_LINES = 9
_MAX_LINE_CHARS = 1000
"""Maximum characters of a line of a box before it is wrapped."""
_MAX_ANSWER_CHARS = 240
"""Maximum characters of an answer in its box, so that the verdict below it is visible."""


class RunFacts(Struct, frozen=True):
    """The facts of the diagram and the manifest; facts that are not recorded are empty or None.

    `decode_time` is the number of the branch's newest decode steps and their milliseconds;
    `n_steps` counts all steps. `calls` are those of the current step, or of one near it.
    `open_share` is the share of open cells of `mask`. `is_correct` says whether the answer is one
    of the expected ones, None if unknown.
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
    decode_time: tuple[int, float] = (0, 0.0)
    prefill_calls: tuple[CallRecord, ...] = ()
    calls: tuple[CallRecord, ...] = ()
    mask: MaskRecord | None = None
    open_share: float | None = None

    def fact(self, *keys: str) -> Any:
        """Return a fact of the manifest at nested keys, None if a key is missing."""
        value: Any = self.run
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


class Box(Struct, frozen=True):
    """A stage of the diagram: its title, its lines, and the name of the title's style."""

    title: str
    lines: tuple[str, ...] = field(default=())
    style: str = "title"


def generation_stages(facts: RunFacts) -> list[Box]:
    """Return the stages of a generation, in order, with printable text."""
    prefill, lines = facts.prefill, []
    if prefill is not None:
        ms = prefill.wall_ms
        lines = [
            f"{prefill.q_len} tokens in {ms:.1f} ms" if math.isfinite(ms) else "",
            f"{prefill.q_len * 1e3 / ms:.0f} tokens/s" if ms > 0 else "",
            f"cache {prefill.kv_before} → {prefill.kv_after}",
        ]
    return [
        make_box("input", _input_lines(facts)),
        make_box("concatenation", _concatenation_lines(facts)),
        make_box("mask", _mask_lines(facts)),
        make_box("patch", _patch_lines(facts)),
        make_box("prefill", lines),
        make_box("decode loop ↻", _decode_lines(facts)),
        make_box("text", *_text_lines(facts)),
    ]


def make_box(title: str, lines: Iterable[str], style: str = "title") -> Box:
    """Return a stage with printable lines; empty lines are left out."""
    shown = (truncate(text, _MAX_LINE_CHARS).strip() for text in lines if text)
    return Box(title, tuple(map(escape_unprintable, shown)) or ("not recorded",), style)


def _input_lines(facts: RunFacts) -> list[str]:
    sample_id = facts.generation.sample_id if facts.generation else ""
    source = "typed prompts" if facts.fact("job", "prompts") else facts.fact("job", "dataset")
    n = sum(segment.kind is SegmentKind.PARAPHRASE for segment in facts.segments)
    return [
        f"{source or ''} {sample_id}",
        plural(n, "paraphrase") if facts.segments else "",
        f"“{facts.question}”" if facts.question else "",
    ]


def _concatenation_lines(facts: RunFacts) -> list[str]:
    prompt = [s for s in facts.segments if s.kind is not SegmentKind.GENERATED]
    if not prompt:
        return []
    positions = facts.generation.positions if facts.generation else ""
    pieces = [s for s in prompt if s.kind is not SegmentKind.SEPARATOR]
    named = [f"{s.label} [{s.start}, {s.stop})" for s in pieces]
    if (more := len(pieces) - _MAX_SEGMENTS) > 0:
        named[_MAX_SEGMENTS - 1 : -1] = [f"… {more} more"]
    n_between = len(prompt) - len(pieces)
    return [
        f"{plural(prompt[-1].stop, 'token')} in {plural(len(prompt), 'segment')}",
        f"positions {positions}" if positions else "",
        *named,
        f"and {plural(n_between, 'separator')}" if n_between else "",
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
    paths = {name: _format_paths(calls) for name, calls in parts if calls}
    lines = [f"{name}: {text}" for name, text in paths.items()]
    if len({*paths.values()}) == 1:
        lines = [*paths.values()][:1]
    backends = dict.fromkeys(call.backend for call in (*facts.prefill_calls, *facts.calls))
    compiled = facts.fact("compiled")
    return [
        *lines,
        f"backend {', '.join(backends)}" if any(backends) else "",
        "" if compiled is None else "compiled" if compiled else "not compiled",
    ]


def _format_paths(calls: Sequence[CallRecord]) -> str:
    layers: dict[str, set[int]] = {}
    for call in calls:
        layers.setdefault(call.path, set()).add(call.layer)
    layers = {"kernel not recorded" if p == UNKNOWN_PATH else p: n for p, n in layers.items()}
    named = ((path, format_numbers("layer", sorted(layers[path]))) for path in sorted(layers))
    return "; ".join(map(", ".join, named))


def _decode_lines(facts: RunFacts) -> list[str]:
    n_decode = max(facts.n_steps - (facts.prefill is not None), 0)
    n_timed, total_ms = facts.decode_time
    ratio = facts.fact("cost", "ratio")
    lines = [plural(n_decode, "step")]
    if n_timed and math.isfinite(total_ms) and total_ms > 0:
        newest = f" in the last {n_timed} steps" if n_decode > queries.MAX_TIMED_STEPS else ""
        lines.append(f"{total_ms / n_timed:.1f} ms per step{newest}")
        lines.append(f"{1e3 * n_timed / total_ms:.1f} tokens/s")
    if isinstance(ratio, int | float):
        lines.append(f"overhead {100 * ratio:.1f} % of the model's time")
    return lines


def _text_lines(facts: RunFacts) -> tuple[list[str], str]:
    about, branch = facts.generation, facts.branch
    if about is None:
        return [], "title"
    answer, expected = truncate(facts.answer, _MAX_ANSWER_CHARS), about.expected
    is_recording = branch is not None and branch.state == "recording"
    lines = [f"“{answer}”" if answer else "nothing yet" if is_recording else "(nothing)"]
    style = "title"
    if expected:
        named = (truncate(text, _MAX_ANSWER_CHARS // 4) for text in expected[:4])
        lines.append(f"expected {' | '.join(named)}")
        if facts.is_correct is not None:
            lines.append("✓ correct" if facts.is_correct else "✗ not an expected answer")
            style = "good" if facts.is_correct else "bad"
    return [*lines, _format_state(branch)], style


def _format_state(branch: BranchRow | None) -> str:
    return ", ".join(filter(None, (branch.state, branch.stop_reason))) if branch else ""


# -- drawing -------------------------------------------------------------------------------------


def draw_diagram(stages: Sequence[Box], pen: Pen) -> list[Strip]:
    """Draw the boxes from left to right, in as many rows as they need."""
    per_row = max(1, min(len(stages), (pen.width + _BOX_GAP) // (_MIN_BOX_WIDTH + _BOX_GAP)))
    n_rows = -(-len(stages) // per_row)
    per_row = -(-len(stages) // n_rows)  # rows of equal length
    each = max((pen.width - _BOX_GAP * (per_row - 1)) // per_row, 1)
    strips: list[Strip] = []
    for start in range(0, len(stages), per_row):
        row = stages[start : start + per_row]
        strips += _draw_box_row(row, each, pen)
        if start + per_row < len(stages):  # a line from the last box to the first one below it
            first, last = each // 2, (len(row) - 1) * (each + _BOX_GAP) + each // 2
            text = "▼" if first == last else f"▼{'─' * (last - first - 1)}╯"
            strips.append(pen.line((" " * first + text, "muted")))
    return strips


def _draw_box_row(row: Sequence[Box], box: int, pen: Pen) -> list[Strip]:
    texts = [_wrap_lines(stage.lines, box - 4) for stage in row]
    height = max(map(len, texts))
    lines: list[list[NamedSpan]] = [[] for _ in range(height + 2)]
    for index, (stage, text) in enumerate(zip(row, texts, strict=True)):
        if index:
            for number, spans in enumerate(lines):
                spans.append(("──▶" if number == 1 else " " * _BOX_GAP, "muted"))
        title = clip_text(f" {stage.title} ", min(cell_len(stage.title) + 2, max(box - 3, 0)))
        rest = "─" * (box - 3 - cell_len(title))
        lines[0] += [("╭─", "muted"), (title, stage.style), (f"{rest}╮", "muted")]
        for number in range(height):
            shown = clip_text(text[number] if number < len(text) else "", max(box - 4, 0))
            lines[number + 1] += [("│ ", "muted"), (shown, "text"), (" │", "muted")]
        lines[-1].append((f"╰{'─' * (box - 2)}╯", "muted"))
    return [pen.line(*spans) for spans in lines]


def _wrap_lines(texts: Iterable[str], width: int) -> list[str]:
    rows: list[str] = []
    most = 2 * _MAX_BOX_LINES * max(width, 8)
    for text in (truncate(text, most) for text in texts):
        for row in textwrap.wrap(text, max(width, 8), break_on_hyphens=False) or [""]:
            rows += chop_cells(row, width) if cell_len(row) > width > 1 else [row]
    return rows if len(rows) <= _MAX_BOX_LINES * 2 else [*rows[: _MAX_BOX_LINES * 2 - 1], "…"]


def _draw_facts(facts: Sequence[tuple[str, str]], pen: Pen) -> list[Strip]:
    longest = max((cell_len(name) for name, _ in facts), default=0)
    label = min(longest + 2, max(pen.width // 3, 10), max(pen.width - 1, 0))
    strips = []
    for name, value in facts:
        head = clip_text(name, max(label - 1, 0))
        for row in _wrap_lines([value], max(pen.width - label, 1)) or [""]:
            strips.append(pen.line((set_cell_size(head, label), "muted"), (row, "text")))
            head = ""
    return strips


_WINDOW_STEPS = 101
_MAX_TOKENS = 120
_MAX_CELLS = 1 << 24
_MAX_FACTS = 300
_MAX_VALUE_CHARS = 2000
_MAX_DEPTH = 5

_FIRST_KEYS = (
    *("model", "level", "compiled", "threads", "seed"),
    *("versions", "host", "git", "job", "cost"),
)
"""Keys of the manifest that are shown first; all others follow in their order."""

_FORMATTED_KEYS = ("argv", "state", "started_at", "ended_at")
"""Keys that are formatted separately."""


class RunOptions(Struct, frozen=True):
    """`offset` is the number of lines above the visible ones."""

    offset: int = 0


class RunPanel(base.Panel[RunFacts, RunOptions]):
    """The stages of the current generation, and below them the manifest."""

    name = "run"
    title = "Run"
    initial_options = RunOptions()
    help = base.Help(
        "It shows the stages of this generation from the sample to the answer, with the recorded "
        "numbers of each stage, and below them the manifest of the run.",
        "Follow the arrows from input to text; scroll to the manifest with shift+down and back "
        "with shift+up.",
        "Check that the segments and the mask are the intended ones, that the patch shows "
        "FlexAttention, and that the answer is the expected one.",
    )
    actions = ("cursor.up", "cursor.down")

    def load(self, source: Source, request: Request[RunOptions]) -> RunFacts:
        """Read the manifest and the facts of one generation, independent of its length."""
        reader, place = source.reader, request.place
        # A trace may have several models; show the one of this generation.
        run = {**reader.run(), "model": reader.model(place.generation)}
        size = 0
        for suffix in ("", *COMPANION_SUFFIXES):
            with suppress(OSError):
                size += reader.path.with_name(reader.path.name + suffix).stat().st_size
        common = RunFacts(run, reader.state, str(reader.path), size)
        branches = {row.branch: row for row in reader.branches(place.generation)}
        return _load_generation_facts(source, place, common, branches) if branches else common

    def describe(self, data: RunFacts) -> list[str]:
        """Return the stages in order, then the manifest."""
        lines = [f"{box.title.rstrip(' ↻')}: {'; '.join(box.lines)}." for box in run_stages(data)]
        return [*lines, "Manifest:", *(f"{name}: {value}" for name, value in manifest_rows(data))]

    def paint(self, data: RunFacts, request: Request[RunOptions], theme: Theme) -> Picture:
        """Draw the diagram and the manifest, scrolled by the offset."""
        strips = _draw_all(data, Pen(theme, request.width))
        offset = _clamp_offset(request.options.offset, len(strips), request.height)
        shown = strips[offset : offset + request.height]
        note = data.state or "state unknown"
        if len(strips) > len(shown):
            note += f", lines {offset + 1}-{offset + len(shown)} of {len(strips)}"
        return Picture(shown, escape_unprintable(note), alarm=data.state == "failed")

    def on_action(
        self, action: str, data: RunFacts, request: Request[RunOptions]
    ) -> RunOptions | None:
        """Scroll by a third of the height."""
        if action not in self.actions:
            return None
        n_lines = len(_draw_all(data, Pen(Theme("none"), request.width)))
        move = max(request.height // 3, 1) * base.CURSOR_MOVES[action][0]
        here = _clamp_offset(request.options.offset, n_lines, request.height)
        offset = _clamp_offset(here + move, n_lines, request.height)
        return RunOptions(offset) if offset != request.options.offset else None


def _draw_all(data: RunFacts, pen: Pen) -> list[Strip]:
    diagram = draw_diagram(run_stages(data), pen)
    return [*diagram, pen.line(), *_draw_facts(manifest_rows(data), pen)]


def _clamp_offset(offset: int, n_lines: int, height: int) -> int:
    return max(0, min(offset, n_lines - height))


# -- reading -------------------------------------------------------------------------------------


def _load_generation_facts(
    source: Source, place: base.TracePlace, common: RunFacts, branches: Mapping[int, BranchRow]
) -> RunFacts:
    reader, own = source.reader, (place.generation, place.branch)
    generation, number = own
    segments = reader.segments(*own) or reader.segments(generation)
    first = reader.steps(generation, 0, limit=1)
    newest = queries.newest_step(reader, *own)
    prefill = first[0] if first and first[0].phase == "prefill" else None
    prefill_calls = reader.calls(generation, prefill.step) if prefill else []
    owner = queries.branch_of_step(reader, generation, place.step, number)
    calls = reader.calls(generation, place.step, owner) if place.step else []
    if not calls:
        start = max(place.step - _WINDOW_STEPS // 2, 1)
        near = queries.step_range(reader, generation, start, start + _WINDOW_STEPS, number)
        calls = reader.calls(generation, near[0].step, near[0].branch) if near else []
    name = next((call.mask for call in (*prefill_calls, *calls) if call.mask is not None), None)
    mask = reader.mask_summary(name) if name is not None else None
    row, branch = reader.generation(generation), branches.get(number)
    answer = _load_answer(reader, place, branch, segments)
    time_key = ("decode time", *own, reader.last_step(*own))
    return replace(
        common,
        generation=row,
        branch=branch,
        segments=tuple(segments),
        question=question_text(reader, generation, limit=_MAX_TOKENS),
        answer=answer,
        is_correct=is_answer_correct(source, own, (branch or row).state, answer, row.expected),
        prefill=prefill,
        n_steps=0 if newest is None else newest + 1,
        decode_time=source.get_or_create(
            time_key, partial(queries.decode_phase_time, reader, *own)
        ),
        prefill_calls=tuple(prefill_calls),
        calls=tuple(calls),
        mask=mask,
        open_share=_load_open_share(source, mask) if mask is not None else None,
    )


def _load_open_share(source: Source, summary: MaskRecord) -> float | None:
    """Return the share of a mask's cells that are open, None if they are unknown or too many."""

    def count() -> float | None:
        mask = source.reader.mask(summary.fingerprint)
        if mask is None or mask.cells is None or not mask.cells.size:
            return None
        return float(np.count_nonzero(mask.cells) / mask.cells.size)

    if summary.q_len * summary.kv_len * summary.heads > _MAX_CELLS:
        return None
    return source.get_or_create(("open share", summary.fingerprint), count)


def _load_answer(
    reader: TraceReader,
    place: base.TracePlace,
    branch: BranchRow | None,
    segments: Iterable[Segment],
) -> str:
    """Return the answer, or the generated text so far of an unfinished generation."""
    if branch is not None and branch.answer:
        return branch.answer
    start = generated_start(segments)
    if start is None:
        return ""
    tokens = read_tokens(reader, place.generation, place.branch, start, limit=_MAX_TOKENS)
    return "".join(token.text for token in tokens if not token.special).strip()


# -- the manifest --------------------------------------------------------------------------------


def manifest_rows(facts: RunFacts) -> list[tuple[str, str]]:
    """Return the facts of the run as (name, printable value), nested ones as "model.name"."""
    run = facts.run
    found = [("state", facts.state), ("file", f"{facts.path} ({human_bytes(facts.size)})")]
    argv = run.get("argv")
    if isinstance(argv, list):
        found.append(("command", shlex.join(map(str, argv))))
    for key in ("started_at", "ended_at"):
        if key in run:
            found.append((key, _format_time(run[key])))
    for key in dict.fromkeys((*_FIRST_KEYS, *run)):
        if key in run and key not in _FORMATTED_KEYS:
            found += _flatten(key, run[key])
    shown = [
        (escape_unprintable(name), escape_unprintable(truncate(value, _MAX_VALUE_CHARS)))
        for name, value in found[:_MAX_FACTS]
    ]
    more = len(found) - _MAX_FACTS
    return [*shown, ("…", f"{more} more facts")] if more > 0 else shown


def _flatten(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value and depth < _MAX_DEPTH:
        for key, inner in value.items():
            yield from _flatten(f"{name}.{key}", inner, depth + 1)
    elif name == "model.parameters" and isinstance(value, int):
        yield name, f"{value} ({human_count(value)})"
    elif isinstance(value, str):
        yield name, value or '""'
    else:
        yield name, "none" if value is None else plain_json(value)


def _format_time(value: Any) -> str:
    with suppress(ValueError, OverflowError, OSError, TypeError):
        return datetime.fromtimestamp(value).astimezone().isoformat(" ", "seconds")
    return plain_json(value)


def run_stages(facts: RunFacts) -> list[Box]:
    """Return the stages of a generation, or of a training run, in order, with printable text."""
    training = facts.generation.declared.get("training") if facts.generation else None
    if not isinstance(training, Mapping):
        return generation_stages(facts)
    values, parameters = training.get("values"), training.get("parameters")
    named, placement = training.get("groups"), base.format_placement(training)
    groups = f" in {len(named)} groups" if isinstance(named, list) else ""
    model = [
        str(facts.fact("model", "class") or ""),
        f"{human_count(values)} weights are trained" if base.is_count(values) else "",
        f"{parameters} parameters{groups}" if base.is_count(parameters) else "",
        f"on {placement}" if placement else "",
    ]
    ratio, level = facts.fact("cost", "ratio"), facts.fact("level")
    loop = [
        plural(facts.n_steps, "step"),
        f"level {level}" if level else "",
        f"capture {100 * ratio:.1f} % of it" if isinstance(ratio, int | float) else "",
    ]
    wrong = facts.fact("training", "anomaly_steps")
    outcome = [
        _format_state(facts.branch),
        f"{plural(wrong, 'step')} with anomalies" if base.is_count(wrong) else "",
    ]
    return [
        make_box("model", model),
        make_box("optimizer", [str(training.get("optimizer") or "none: steps are reported")]),
        make_box("training loop ↻", loop),
        make_box("outcome", outcome),
    ]
