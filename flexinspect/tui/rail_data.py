"""What the side rail lists: the answers of a trace, the branches of one of them, other traces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from msgspec import Struct, field

from flexinspect.core.errors import ControlError
from flexinspect.core.text import escape_unprintable
from flexinspect.panels.base import TracePlace
from flexinspect.panels.panel_source import Source
from flexinspect.panels.token_window import is_answer_correct
from flexinspect.trace import queries
from flexinspect.trace.query_results import BranchRow
from flexinspect.trace.reader import TraceReader
from flexinspect.tui.saved_state import known_traces

MAX_QUESTION_TOKENS = 16


class Row(NamedTuple):
    """A row: the text of a heading, the number of an answer or branch, or the path of a trace."""

    kind: Literal["heading", "answer", "branch", "capture", "trace"]
    key: Any


def row_of_place(place: TracePlace) -> Row:
    """Return the row of a place: its branch, or the answer for branch 0."""
    return Row("branch", place.branch) if place.branch else Row("answer", place.generation)


class Outline(Struct, frozen=True):
    """All rows, as (kind, keys) of each section, so that 100 000 answers need no row each."""

    sections: tuple[tuple[Any, Sequence[Any]], ...] = ()

    def __len__(self) -> int:
        return sum(len(keys) for _, keys in self.sections)

    def row(self, index: int) -> Row:
        """Return a row. Raises `IndexError`."""
        for kind, keys in self.sections:
            if index < len(keys):
                return Row(kind, keys[index])
            index -= len(keys)
        raise IndexError(index)

    def index(self, row: Row) -> int | None:
        """Return where a row is, None if it is not listed."""
        start = 0
        for kind, keys in self.sections:
            if kind == row.kind and row.key in keys:
                return start + keys.index(row.key)
            start += len(keys)
        return None

    def move(self, index: int, by: int) -> int:
        """Return the row to select `by` rows further: the nearest one that is no heading."""
        last, step = len(self) - 1, 1 if by > 0 else -1
        target = min(max(index + by, 0), last)
        ahead = range(target, last + 1 if step > 0 else -1, step)
        behind = range(target, -1 if step > 0 else last + 1, -step)
        free = (at for at in (*ahead, *behind) if self.row(at).kind != "heading")
        return next(free, index)


class OtherTraces(Struct, frozen=True):
    """Running captures by the path of their trace, and recent traces, the newest first."""

    captures: Mapping[Path, str] = field(default_factory=dict)
    traces: tuple[Path, ...] = ()


def list_other_traces(current: Path | None, own_pid: int | None) -> OtherTraces:
    """Return the captures of this machine and the recent traces, without the current one.

    `own_pid` is the process of the current one, whose trace may not be open yet.
    """
    from flexinspect.control.discovery import running

    captures: dict[Path, str] = {}
    with suppress(ControlError):  # there is no folder for captures
        captures = {
            Path(one.trace): f"{escape_unprintable(one.title or one.kind)}, process {one.pid}"
            for one in running()
            if one.pid != own_pid and (current is None or not one.is_recording(current))
        }
    left_out = {*captures, *([] if current is None else [current.absolute()])}
    return OtherTraces(captures, tuple(path for path in known_traces() if path not in left_out))


class RailRequest(NamedTuple):
    """What to load: the rows from `top` on, or moved so that the row `cursor` is visible."""

    place: TracePlace
    version: int
    others: OtherTraces
    cursor: Row
    top: int
    height: int


class AnswerLine(NamedTuple):
    """An answer, or the question of one without text; `problems` are its errors and warnings."""

    text: str
    is_correct: bool | None
    problems: tuple[int, int]


class RailData(Struct, frozen=True):
    """The visible rows, from row `top` on, with what they show."""

    outline: Outline
    top: int
    rows: tuple[Row, ...]
    answers: Mapping[int, AnswerLine]
    branches: Mapping[int, BranchRow]
    captures: Mapping[Path, str]


def load_rail(source: Source | None, name: str, request: RailRequest) -> RailData:
    """Read what the visible rows show; `name` is that of the trace. Raises `TraceError`."""
    if source is None:
        return _make_data(_make_outline(name, 0, 0, (), request.others), request)
    reader, generation = source.reader, request.place.generation
    with reader.snapshot():
        n = queries.n_generations(reader)
        # SQLite reads whole rows of branches, with answers that may be megabytes.
        forks = source.get_newest(
            ("rail.forks", generation), request.version, lambda: _load_forks(reader, generation)
        )
        outline = _make_outline(name, n, generation, tuple(forks), request.others)
        return _make_data(outline, request, forks, source)


def _load_forks(reader: TraceReader, generation: int) -> dict[int, BranchRow]:
    return {row.branch: row for row in reader.branches(generation) if row.parent is not None}


def _make_outline(
    name: str, n_answers: int, generation: int, forks: Sequence[int], others: OtherTraces
) -> Outline:
    """Return the rows of all sections; the forks are below the answer that they belong to."""
    sections: list[tuple[str, Sequence[Any]]] = [
        ("heading", (name,)),
        ("answer", range(min(generation + 1, n_answers))),
        ("branch", forks),
        ("answer", range(generation + 1, n_answers)),
    ]
    if others.captures:
        sections += [("heading", ("", "Running now")), ("capture", tuple(others.captures))]
    if others.traces:
        sections += [("heading", ("", "Recent traces")), ("trace", others.traces)]
    return Outline(tuple(sections))


def _make_data(
    outline: Outline,
    request: RailRequest,
    forks: Mapping[int, BranchRow] | None = None,
    source: Source | None = None,
) -> RailData:
    at, height, top = outline.index(request.cursor) or 0, max(request.height, 1), request.top
    if not top - 1 <= at <= top + height:
        top = at - height // 2  # a jump
    top = min(max(top, at - height + 2), at - 1, len(outline) - height)  # a row of context
    top = max(top, 0)
    rows = tuple(outline.row(index) for index in range(top, min(top + height, len(outline))))
    numbers = [row.key for row in rows if row.kind == "answer"]
    answers = {}
    if source is not None and numbers:
        span = (numbers[0], numbers[-1] + 1)
        answers = source.get_newest(
            ("rail.answers",), (span, request.version), lambda: dict(_load_answers(source, *span))
        )
    return RailData(outline, top, rows, answers, forks or {}, request.others.captures)


def _load_answers(source: Source, start: int, stop: int) -> Iterator[tuple[int, AnswerLine]]:
    """Yield the generations `start <= generation < stop` with their lines."""
    counter = queries.findings_counter(source.reader)
    problems = source.get_or_create(
        ("problems", counter, start, stop),
        lambda: queries.problem_counts(source.reader, start, stop),
    )
    for row in queries.generation_range(source.reader, start, stop):
        number, answer, is_correct = row.generation, " ".join(row.answer.split()), None
        if answer:
            text = f"“{answer}”"
            is_correct = is_answer_correct(source, (number, 0), row.state, answer, row.expected)
        else:
            question = queries.question_text(source.reader, number, limit=MAX_QUESTION_TOKENS)
            text = " ".join(question.split()) or row.sample_id
        counts = problems.get(number, (0, 0))
        yield number, AnswerLine(escape_unprintable(text), is_correct, counts)


def describe_fork(row: BranchRow) -> str:
    """Return where a branch leaves its parent, and the token or the mask that it takes there."""
    change = row.change
    what = {"mask": "another mask", "replay": "replayed"}.get(str(change.get("kind")), "")
    if change.get("kind") == "token":
        what = f"“{change['text']}”" if "text" in change else f"token id {change.get('token_id')}"
    answer = " ".join(row.answer.split())
    parts = [f"token {(row.fork_step or 0) + 1}: {what}", f"“{answer}”" if answer else ""]
    return escape_unprintable(" → ".join(filter(None, parts)))
