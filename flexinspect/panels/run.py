"""The run panel: the way from input to text as a diagram with its numbers, and the manifest."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from textual.strip import Strip

from flexinspect.panels.base import Help, Panel, Picture, Request, TracePlace
from flexinspect.panels.parts.pipeline import RunFacts, draw_diagram, draw_facts_table
from flexinspect.panels.parts.trainingboxes import run_stages
from flexinspect.panels.parts.verdict import is_answer_correct
from flexinspect.panels.source import Source
from flexinspect.prompts import Segment, SegmentKind
from flexinspect.records import CallRecord
from flexinspect.sizes import human_bytes, human_count
from flexinspect.text import escape_unprintable
from flexinspect.trace.places import COMPANION_SUFFIXES
from flexinspect.trace.ranges import branch_of_step, decode_phase_time, newest_step, step_range
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.rows import BranchRow
from flexinspect.trace.sequences import read_tokens
from flexinspect.trace.values import plain_json
from flexinspect.widgets.lines import line
from flexinspect.widgets.look import Theme

_WINDOW_STEPS = 101
_MAX_TOKENS = 120
_MAX_CELLS = 1 << 24
_MAX_FACTS = 300
_MAX_VALUE_CHARS = 2000
_MAX_DEPTH = 5

_FIRST_KEYS = (
    "model",
    "level",
    "compiled",
    "threads",
    "seed",
    "versions",
    "host",
    "git",
    "job",
    "cost",
)
"""Keys of the manifest that come first; all others follow in their order."""

_FORMATTED_KEYS = ("argv", "state", "started_at", "ended_at")
"""Keys that are shown in words of their own."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """`offset` is the number of lines that are scrolled away at the top."""

    offset: int = 0


class RunPanel(Panel[RunFacts, RunOptions]):
    """The pipeline of the current generation, and below it everything the manifest says."""

    name: ClassVar[str] = "run"
    title: ClassVar[str] = "Run"
    help: ClassVar[Help] = Help(
        "It shows how this generation went from its sample to its answer, with the real numbers "
        "of each stage, and below that the manifest of the run.",
        "Follow the arrows from input to text; scroll to the manifest with shift+down and back "
        "with shift+up.",
        "Look whether the segments and the mask are those you meant, whether the patch says "
        "FlexAttention, and whether the answer is the expected one.",
    )
    actions: ClassVar[tuple[str, ...]] = ("cursor.up", "cursor.down")

    def options(self) -> RunOptions:
        """Return the options: not scrolled."""
        return RunOptions()

    def load(self, source: Source, request: Request[RunOptions]) -> RunFacts:
        """Read the manifest and the facts of one generation; nothing that grows with its length."""
        reader, place = source.reader, request.place
        # Of several models, the one of this generation.
        run = {**reader.run(), "model": reader.model(place.generation)}
        size = _trace_size(reader.path)
        base = RunFacts(run, reader.state, str(reader.path), size)
        branches = {row.branch: row for row in reader.branches(place.generation)}
        return _load_generation_facts(source, place, base, branches) if branches else base

    def describe(self, data: RunFacts) -> list[str]:
        """Return the stages in order, then the manifest."""
        lines = [f"{box.title.rstrip(' ↻')}: {'; '.join(box.lines)}." for box in run_stages(data)]
        return [*lines, "Manifest:", *(f"{name}: {value}" for name, value in manifest_rows(data))]

    def paint(self, data: RunFacts, request: Request[RunOptions], theme: Theme) -> Picture:
        """Draw the diagram and the manifest, scrolled by the offset."""
        strips = _draw_all(data, request.width, theme)
        offset = _clamp_offset(request.options.offset, len(strips), request.height)
        shown = strips[offset : offset + request.height]
        stop = offset + len(shown)
        where = f", lines {offset + 1}-{stop} of {len(strips)}" if len(strips) > len(shown) else ""
        alarm = data.state == "failed"
        return Picture(
            shown, escape_unprintable(f"{data.state or 'state unknown'}{where}"), alarm=alarm
        )

    def on_action(
        self, action: str, data: RunFacts, request: Request[RunOptions]
    ) -> RunOptions | None:
        """Scroll by a third of the height."""
        if action not in self.actions:
            return None
        n_lines = len(_draw_all(data, request.width, Theme("none")))
        move = max(request.height // 3, 1) * (1 if action == "cursor.down" else -1)
        here = _clamp_offset(request.options.offset, n_lines, request.height)
        offset = _clamp_offset(here + move, n_lines, request.height)
        return RunOptions(offset) if offset != request.options.offset else None


def _draw_all(data: RunFacts, width: int, theme: Theme) -> list[Strip]:
    return [
        *draw_diagram(run_stages(data), width, theme),
        line([], width, theme.style("text")),
        *draw_facts_table(manifest_rows(data), width, theme),
    ]


def _clamp_offset(offset: int, n_lines: int, height: int) -> int:
    return max(0, min(offset, n_lines - height))


# -- reading -------------------------------------------------------------------------------------


def _trace_size(path: Path) -> int:
    total = 0
    for name in ("", *COMPANION_SUFFIXES):
        with suppress(OSError):
            total += path.with_name(path.name + name).stat().st_size
    return total


def _load_generation_facts(
    source: Source, place: TracePlace, base: RunFacts, branches: Mapping[int, BranchRow]
) -> RunFacts:
    reader, generation = source.reader, place.generation
    segments = reader.segments(generation, place.branch) or reader.segments(generation)
    start = max(place.step - _WINDOW_STEPS // 2, 1)
    decode = step_range(reader, generation, start, start + _WINDOW_STEPS, place.branch)
    first = reader.steps(generation, 0, limit=1)
    newest = newest_step(reader, generation, place.branch)
    prefill = first[0] if first and first[0].phase == "prefill" else None
    prefill_calls = reader.calls(generation, prefill.step) if prefill else []
    holds = branch_of_step(reader, generation, place.step, place.branch)
    calls = reader.calls(generation, place.step, holds) if place.step else []
    if not calls and decode:
        calls = reader.calls(generation, decode[0].step, decode[0].branch)
    mask = _first_mask([*prefill_calls, *calls])
    summary = reader.mask_summary(mask) if mask is not None else None
    about, branch = reader.generation(generation), branches.get(place.branch)
    answer = _load_answer(reader, place, branch, segments)
    state = about.state if branch is None else branch.state
    return RunFacts(
        *(base.run, base.state, base.path, base.size),
        generation=about,
        branch=branch,
        segments=tuple(segments),
        question=_load_question(reader, generation, segments),
        answer=answer,
        is_correct=is_answer_correct(
            source, (generation, place.branch), state, answer, about.expected
        ),
        prefill=prefill,
        n_steps=0 if newest is None else newest + 1,
        decode=tuple(step for step in decode if step.phase != "prefill"),
        decode_time=source.get_or_create(
            ("decode time", generation, place.branch, reader.last_step(generation, place.branch)),
            lambda: decode_phase_time(reader, generation, place.branch),
            lambda _: 64,
        ),
        prefill_calls=tuple(prefill_calls),
        calls=tuple(calls),
        mask=summary,
        open_share=_load_open_share(source, mask) if mask is not None else None,
    )


def _first_mask(calls: Iterable[CallRecord]) -> str | None:
    return next((call.mask for call in calls if call.mask is not None), None)


def _load_open_share(source: Source, fingerprint: str) -> float | None:
    """Return the open part of a mask's cells, None when they are unknown or very many."""
    about = source.reader.mask_summary(fingerprint)
    if about is None or about.q_len * about.kv_len * about.heads > _MAX_CELLS:
        return None

    def count() -> float | None:
        mask = source.reader.mask(fingerprint)
        if mask is None or mask.cells is None or not mask.cells.size:
            return None
        return float(np.count_nonzero(mask.cells) / mask.cells.size)

    return source.get_or_create(("open share", fingerprint), count, lambda _: 64)


def _load_question(reader: TraceReader, generation: int, segments: Iterable[Segment]) -> str:
    """Return the first paraphrase as its tokens spell it, or the beginning of the prompt."""
    listed = list(segments)
    found = [s for s in listed if s.kind is SegmentKind.PARAPHRASE] or listed[:1]
    if not found:
        return ""
    tokens = reader.tokens(generation, 0, found[0].start, found[0].stop, limit=_MAX_TOKENS)
    return "".join(token.text for token in tokens).strip()


def _load_answer(
    reader: TraceReader, place: TracePlace, branch: BranchRow | None, segments: Iterable[Segment]
) -> str:
    """Return the answer, or what an unfinished generation has said so far."""
    if branch is not None and branch.answer:
        return branch.answer
    start = next((s.start for s in segments if s.kind is SegmentKind.GENERATED), None)
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
    keys = [
        *(key for key in _FIRST_KEYS if key in run),
        *(key for key in run if key not in _FIRST_KEYS),
    ]
    for key in keys:
        if key not in _FORMATTED_KEYS:
            found += _flatten(key, run[key])
    shown = [
        (escape_unprintable(name), _shorten_value(value)) for name, value in found[:_MAX_FACTS]
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


def _shorten_value(text: str) -> str:
    short = text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}…"
    return escape_unprintable(short)


def _format_time(value: Any) -> str:
    with suppress(ValueError, OverflowError, OSError, TypeError):
        return datetime.fromtimestamp(value).astimezone().isoformat(" ", "seconds")
    return plain_json(value)
