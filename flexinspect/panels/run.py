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

from flexinspect.panels.base import Help, Panel, Picture, Place, Request
from flexinspect.panels.parts.pipeline import RunFacts, diagram, facts_table
from flexinspect.panels.parts.trainingboxes import stages
from flexinspect.panels.parts.verdict import is_right
from flexinspect.panels.source import Source
from flexinspect.prompts import Segment, SegmentKind
from flexinspect.records import CallRecord
from flexinspect.sizes import human_bytes, human_count
from flexinspect.text import visible
from flexinspect.trace.places import COMPANIONS
from flexinspect.trace.ranges import decode_time, holder, newest_step, step_range
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.rows import BranchRow
from flexinspect.trace.sequences import tokens_of
from flexinspect.trace.values import plain_json
from flexinspect.widgets.lines import line
from flexinspect.widgets.look import Look

_WINDOW = 101
_MOST_TOKENS = 120
_MOST_CELLS = 1 << 24
_MOST_FACTS = 300
_MOST_CHARACTERS = 2000
_DEPTH = 5

_FIRST = ("model", "level", "compiled", "threads", "seed", "versions", "host", "git", "job", "cost")
"""Keys of the manifest that come first; all others follow in their order."""

_SAID = ("argv", "state", "started_at", "ended_at")
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
        size = _size(reader.path)
        base = RunFacts(run, reader.state, str(reader.path), size)
        branches = {row.branch: row for row in reader.branches(place.generation)}
        return _with_generation(source, place, base, branches) if branches else base

    def describe(self, data: RunFacts) -> list[str]:
        """Return the stages in order, then the manifest."""
        said = [f"{box.title.rstrip(' ↻')}: {'; '.join(box.lines)}." for box in stages(data)]
        return [*said, "Manifest:", *(f"{name}: {value}" for name, value in manifest(data))]

    def paint(self, data: RunFacts, request: Request[RunOptions], look: Look) -> Picture:
        """Draw the diagram and the manifest, scrolled by the offset."""
        strips = _strips(data, request.width, look)
        offset = _clamped(request.options.offset, len(strips), request.height)
        shown = strips[offset : offset + request.height]
        stop = offset + len(shown)
        where = f", lines {offset + 1}-{stop} of {len(strips)}" if len(strips) > len(shown) else ""
        alarm = data.state == "failed"
        return Picture(shown, visible(f"{data.state or 'state unknown'}{where}"), alarm=alarm)

    def act(self, action: str, data: RunFacts, request: Request[RunOptions]) -> RunOptions | None:
        """Scroll by a third of the height."""
        if action not in self.actions:
            return None
        n_lines = len(_strips(data, request.width, Look("none")))
        move = max(request.height // 3, 1) * (1 if action == "cursor.down" else -1)
        here = _clamped(request.options.offset, n_lines, request.height)
        offset = _clamped(here + move, n_lines, request.height)
        return RunOptions(offset) if offset != request.options.offset else None


def _strips(data: RunFacts, width: int, look: Look) -> list[Strip]:
    return [
        *diagram(stages(data), width, look),
        line([], width, look.style("text")),
        *facts_table(manifest(data), width, look),
    ]


def _clamped(offset: int, n_lines: int, height: int) -> int:
    return max(0, min(offset, n_lines - height))


# -- reading -------------------------------------------------------------------------------------


def _size(path: Path) -> int:
    total = 0
    for name in ("", *COMPANIONS):
        with suppress(OSError):
            total += path.with_name(path.name + name).stat().st_size
    return total


def _with_generation(
    source: Source, place: Place, base: RunFacts, branches: Mapping[int, BranchRow]
) -> RunFacts:
    reader, generation = source.reader, place.generation
    segments = reader.segments(generation, place.branch) or reader.segments(generation)
    start = max(place.step - _WINDOW // 2, 1)
    decode = step_range(reader, generation, start, start + _WINDOW, place.branch)
    first = reader.steps(generation, 0, limit=1)
    newest = newest_step(reader, generation, place.branch)
    prefill = first[0] if first and first[0].phase == "prefill" else None
    prefill_calls = reader.calls(generation, prefill.step) if prefill else []
    holds = holder(reader, generation, place.step, place.branch)
    calls = reader.calls(generation, place.step, holds) if place.step else []
    if not calls and decode:
        calls = reader.calls(generation, decode[0].step, decode[0].branch)
    mask = _mask_of([*prefill_calls, *calls])
    summary = reader.mask_summary(mask) if mask is not None else None
    about, branch = reader.generation(generation), branches.get(place.branch)
    answer = _answer(reader, place, branch, segments)
    state = about.state if branch is None else branch.state
    return RunFacts(
        *(base.run, base.state, base.path, base.size),
        generation=about,
        branch=branch,
        segments=tuple(segments),
        question=_question(reader, generation, segments),
        answer=answer,
        right=is_right(source, (generation, place.branch), state, answer, about.expected),
        prefill=prefill,
        n_steps=0 if newest is None else newest + 1,
        decode=tuple(step for step in decode if step.phase != "prefill"),
        decode_time=source.keep(
            ("decode time", generation, place.branch, reader.last_step(generation, place.branch)),
            lambda: decode_time(reader, generation, place.branch),
            lambda _: 64,
        ),
        prefill_calls=tuple(prefill_calls),
        calls=tuple(calls),
        mask=summary,
        open_share=_open_share(source, mask) if mask is not None else None,
    )


def _mask_of(calls: Iterable[CallRecord]) -> str | None:
    return next((call.mask for call in calls if call.mask is not None), None)


def _open_share(source: Source, fingerprint: str) -> float | None:
    """Return the open part of a mask's cells, None when they are unknown or very many."""
    about = source.reader.mask_summary(fingerprint)
    if about is None or about.q_len * about.kv_len * about.heads > _MOST_CELLS:
        return None

    def count() -> float | None:
        mask = source.reader.mask(fingerprint)
        if mask is None or mask.cells is None or not mask.cells.size:
            return None
        return float(np.count_nonzero(mask.cells) / mask.cells.size)

    return source.keep(("open share", fingerprint), count, lambda _: 64)


def _question(reader: TraceReader, generation: int, segments: Iterable[Segment]) -> str:
    """Return the first paraphrase as its tokens spell it, or the beginning of the prompt."""
    listed = list(segments)
    found = [s for s in listed if s.kind is SegmentKind.PARAPHRASE] or listed[:1]
    if not found:
        return ""
    tokens = reader.tokens(generation, 0, found[0].start, found[0].stop, limit=_MOST_TOKENS)
    return "".join(token.text for token in tokens).strip()


def _answer(
    reader: TraceReader, place: Place, branch: BranchRow | None, segments: Iterable[Segment]
) -> str:
    """Return the answer, or what an unfinished generation has said so far."""
    if branch is not None and branch.answer:
        return branch.answer
    start = next((s.start for s in segments if s.kind is SegmentKind.GENERATED), None)
    if start is None:
        return ""
    tokens = tokens_of(reader, place.generation, place.branch, start, limit=_MOST_TOKENS)
    return "".join(token.text for token in tokens if not token.special).strip()


# -- the manifest --------------------------------------------------------------------------------


def manifest(facts: RunFacts) -> list[tuple[str, str]]:
    """Return the facts of the run as (name, printable value), nested ones as "model.name"."""
    run = facts.run
    found = [("state", facts.state), ("file", f"{facts.path} ({human_bytes(facts.size)})")]
    argv = run.get("argv")
    if isinstance(argv, list):
        found.append(("command", shlex.join(map(str, argv))))
    for key in ("started_at", "ended_at"):
        if key in run:
            found.append((key, _clock(run[key])))
    keys = [*(key for key in _FIRST if key in run), *(key for key in run if key not in _FIRST)]
    for key in keys:
        if key not in _SAID:
            found += _flat(key, run[key])
    shown = [(visible(name), _printable(value)) for name, value in found[:_MOST_FACTS]]
    more = len(found) - _MOST_FACTS
    return [*shown, ("…", f"{more} more facts")] if more > 0 else shown


def _flat(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value and depth < _DEPTH:
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner, depth + 1)
    elif name == "model.parameters" and isinstance(value, int):
        yield name, f"{value} ({human_count(value)})"
    elif isinstance(value, str):
        yield name, value or '""'
    else:
        yield name, "none" if value is None else plain_json(value)


def _printable(text: str) -> str:
    short = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
    return visible(short)


def _clock(value: Any) -> str:
    with suppress(ValueError, OverflowError, OSError, TypeError):
        return datetime.fromtimestamp(value).astimezone().isoformat(" ", "seconds")
    return plain_json(value)
