"""Collects the contents of a report from a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import PurePath
from typing import Any, TypeVar

from msgspec import Struct

from flexinspect.analysis.branch_comparison import describe_change
from flexinspect.analysis.reports.collect import (
    FindingFilter,
    collect_report,
)
from flexinspect.core.environment import is_recorder_alive
from flexinspect.core.errors import TraceError, UsageError
from flexinspect.core.text import plural, printable
from flexinspect.exports.report import branch_columns, contents
from flexinspect.exports.report.attention_shares import (
    NO_ATTENTION,
    NO_TOKEN_ATTENTION,
    read_attention,
)
from flexinspect.exports.report.branch_columns import BranchSpan, branch_span
from flexinspect.exports.report.mask_planes import read_masks
from flexinspect.exports.report.size_budget import essential_size
from flexinspect.exports.report.training_columns import training_columns
from flexinspect.panels.base import Missing, TracePlace, import_hint, training_facts
from flexinspect.panels.findings_of_place import FindingSummary
from flexinspect.panels.findings_panel import describe_coverage, load_coverage
from flexinspect.panels.panel_source import Source
from flexinspect.panels.run_panel import RunFacts, manifest_rows
from flexinspect.panels.token_window import Answer, load_answer
from flexinspect.records.finding import Severity
from flexinspect.records.imported import imported_facts
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.trace.query_results import BranchRow, GenerationRow
from flexinspect.trace.reader import TraceReader

DEFAULT_MAX_BYTES = 5_000_000
MAX_LISTED_FINDINGS = 40
"""Findings of one kind that the page lists; it says how many there are."""

MAX_KINDS = 200
T = TypeVar("T")

DAMAGED = "It is damaged in the trace and could not be read."
RAW_PER_PACKED = 3
"""Bytes of attention that are read for each byte of the page; more would not fit once packed."""


class ReportRequest(Struct, frozen=True):
    """What to put into a report; `generation` None means all, an empty `title` the trace's name."""

    title: str = ""
    generation: int | None = None
    max_bytes: int = DEFAULT_MAX_BYTES


Progress = Callable[[int, int], None]
"""Receives the number of steps that are done, and of all steps."""


def collect_contents(
    source: Source, request: ReportRequest, progress: Progress
) -> contents.ReportContents:
    """Read everything that the page shows. Raises `UsageError` for an unknown generation."""
    reader = source.reader
    chosen = _choose_generations(reader, request.generation)
    collector = _Collector(source, request, chosen, progress)
    heads = collector.read()
    findings, verdict = _read_findings(reader, request.generation)
    coverage = () if findings else describe_coverage(load_coverage(reader))
    return contents.ReportContents(
        title=request.title or reader.path.stem,
        trace=reader.path.name,
        subtitle=_subtitle(reader, heads),
        verdict=verdict,
        findings=findings,
        verified=tuple((printable(text), style == "muted") for text, style in coverage),
        manifest=_manifest(source, chosen),
        generations=tuple(heads),
        branches=collector.branches,
        left_out=tuple(dict.fromkeys(collector.left_out)),
        notes=_state_notes(reader),
    )


def _choose_generations(reader: TraceReader, wanted: int | None) -> list[GenerationRow]:
    rows = reader.generations()
    if wanted is None:
        return rows
    if chosen := [row for row in rows if row.generation == wanted]:
        return chosen
    known = f"It has the generations 0 to {len(rows) - 1}." if rows else "It has none."
    raise UsageError(f"The trace has no generation {wanted}.", hint=known)


def _subtitle(reader: TraceReader, heads: Sequence[contents.GenerationHead]) -> str:
    run = reader.run()
    model = run.get("model")
    named = model.get("name") if isinstance(model, Mapping) else model
    started = run.get("started_at")
    parts = [PurePath(str(named or "")).name, f"level {run['level']}" if run.get("level") else ""]
    if isinstance(started, int | float):
        did = "recorded" if imported_facts(run) is None else "imported"
        parts.append(f"{did} {_format_day(started)}")
    parts += [reader.state, plural(len(heads), "generation") if len(heads) > 1 else ""]
    return printable(" · ".join(filter(None, parts)))


def _format_day(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):
        return "at an unknown time"


def _state_notes(reader: TraceReader) -> tuple[str, ...]:
    match reader.state:
        case "recording":
            if is_recorder_alive(reader.run()):
                return ("The trace was still being recorded when this report was made.",)
            return ("The process that recorded the trace ended without finishing it.",)
        case "failed":
            return ("The run failed; its steps up to the failure are here.",)
        case "interrupted":
            return ("The run was interrupted; its steps up to then are here.",)
    return ()


def _manifest(source: Source, chosen: Sequence[GenerationRow]) -> tuple[tuple[str, str], ...]:
    reader = source.reader
    run = {**reader.run(), "model": reader.model(chosen[0].generation if chosen else 0)}
    size = reader.path.stat().st_size
    return tuple(manifest_rows(RunFacts(run, reader.state, str(reader.path), size)))


# -- findings -------------------------------------------------------------------------------------


def _read_findings(
    reader: TraceReader, generation: int | None
) -> tuple[tuple[contents.FindingEntry, ...], str]:
    """Return the findings by kind, worst first, and their number by severity."""
    report = collect_report(reader, FindingFilter(generation), ())
    texts = dict(zip(map(id, report.findings), report.position_texts, strict=True))
    errors, warnings, notes = map(report.count, Severity)
    counts = FindingSummary(errors, warnings, notes).counts()
    entries = tuple(
        contents.FindingEntry(
            group.describe_extent(),
            group.findings[:MAX_LISTED_FINDINGS],
            tuple((pos, printable(text)) for pos, text in texts[id(group.findings[0])]),
        )
        for group in report.groups()[:MAX_KINDS]
    )
    return entries, counts


# -- generations ----------------------------------------------------------------------------------


class _Collector:
    """Reads the branches of the chosen generations as long as they fit the size of the report."""

    def __init__(
        self,
        source: Source,
        request: ReportRequest,
        chosen: Sequence[GenerationRow],
        progress: Progress,
    ) -> None:
        self.branches: dict[tuple[int, int], contents.BranchContents] = {}
        self.left_out: list[str] = []
        self._source, self._request, self._chosen = source, request, chosen
        self._progress = progress
        reader = source.reader
        self._rows = {row.generation: reader.branches(row.generation) for row in chosen}
        self._spans = {
            (row.generation, branch.branch): branch_span(source, row.generation, branch.branch)
            for row in chosen
            for branch in self._rows[row.generation]
        }
        self._n_steps = sum(span.stop - span.start for span in self._spans.values())
        self._done = 0

    def read(self) -> list[contents.GenerationHead]:
        """Read all branches, and return their generations in words."""
        heads: list[contents.GenerationHead] = []
        size = 0
        for row in self._chosen:
            segments: list[Segment] = []
            own = {}
            for branch in self._rows[row.generation]:
                key = row.generation, branch.branch
                found, segments_of = self._read_branch(self._spans[key])
                own[key] = found
                segments = segments or segments_of
            size += sum(map(essential_size, own.values()))
            if heads and size > self._request.max_bytes:
                first, last = row.generation, self._chosen[-1].generation
                which = f"generations {first} to {last}" if last > first else f"generation {first}"
                self.left_out.append(
                    f"The {which} are left out, because they do not fit the size of the report."
                    if last > first
                    else f"The {which} is left out, because it does not fit the report's size."
                )
                break
            self.branches |= own
            heads.append(self._head(row, segments))
        return heads

    def _read_branch(self, span: BranchSpan) -> tuple[contents.BranchContents, list[Segment]]:
        reader, n_steps = self._source.reader, span.stop - span.start
        segments = branch_columns.read_segments(span)
        columns: dict[str, Any] = {
            "tokens": branch_columns.token_columns(span),
            "segments": branch_columns.segment_parts(segments),
            "steps": branch_columns.step_columns(
                reader.steps(span.generation, span.branch, span.start, span.stop)
            ),
            "memory": branch_columns.memory_columns(span),
            "training": training_columns(span),
        }
        missing: dict[str, str] = {}
        if columns["memory"] is None:
            missing["memory"] = import_hint(self._source, "No memory is recorded.")
        if columns["training"] is None and n_steps:
            columns |= self._read_generated(span, segments, missing)
        self._done += n_steps
        self._progress(self._done, self._n_steps)
        return contents.BranchContents(**columns, missing=missing), segments

    def _read_generated(
        self, span: BranchSpan, segments: Sequence[Segment], missing: dict[str, str]
    ) -> dict[str, Any]:
        """Read what only generated tokens have; `missing` gets the reasons for missing parts."""

        def advance(n_steps: int) -> None:
            self._progress(self._done + n_steps, self._n_steps)

        room = RAW_PER_PACKED * self._request.max_bytes // max(len(self._spans), 1)
        attention = self._try(lambda: read_attention(span, segments, room, advance))
        masks = self._try(
            lambda: read_masks(span, segments, lambda: advance(span.stop - span.start))
        )
        self.left_out += masks.left_out if masks is not None else ()
        found = {
            "candidates": self._try(lambda: branch_columns.candidate_columns(span)),
            "paths": self._try(lambda: branch_columns.path_columns(span)),
            "attention": attention and attention.by_segment,
            "token_attention": attention and attention.by_token,
            "masks": masks and masks.columns,
        }
        hint = import_hint(self._source)
        reasons = {
            "candidates": hint or "No logits are recorded for these steps.",
            "paths": hint or "No attention call is recorded.",
            "attention": (hint or NO_ATTENTION) if attention else DAMAGED,
            "token_attention": (hint or NO_TOKEN_ATTENTION) if attention else DAMAGED,
            "masks": (hint or masks.missing) if masks is not None else DAMAGED,
        }
        missing.update((name, reasons[name]) for name, part in found.items() if part is None)
        return found

    def _try(self, read: Callable[[], T]) -> T | None:
        """Read a part; None if it is damaged, which the report then says."""
        try:
            return read()
        except TraceError as error:
            self.left_out.append(printable(error.message))
        except Missing as error:  # a step between the first and the last
            self.left_out.append(printable(error.reason))
        return None

    def _head(self, row: GenerationRow, segments: Sequence[Segment]) -> contents.GenerationHead:
        source, reader = self._source, self._source.reader
        rows = self._rows[row.generation]
        is_training = training_facts(source, row.generation) is not None
        return contents.GenerationHead(
            generation=row.generation,
            sample_id=printable(row.sample_id),
            model=printable(row.model),
            mask=printable(row.mask),
            is_training=is_training,
            expected=tuple(map(printable, row.expected)),
            prompt=() if is_training else _prompt_texts(reader, row.generation, segments),
            branches=tuple(
                _branch_head(branch, load_answer(source, TracePlace(row.generation, branch.branch)))
                for branch in rows
            ),
        )


def _branch_head(row: BranchRow, answer: Answer) -> contents.BranchHead:
    state = ", ".join(filter(None, (row.state, row.stop_reason)))
    return contents.BranchHead(
        branch=row.branch,
        parent=row.parent,
        fork_step=row.fork_step,
        change=printable(describe_change(row.change) or ""),
        state=printable(state),
        answer=printable_lines(answer.text),
        is_correct=answer.is_correct,
    )


def _prompt_texts(
    reader: TraceReader, generation: int, segments: Sequence[Segment]
) -> tuple[tuple[str, int, str], ...]:
    """Return label, first position and text of the segments of the prompt, or of all of it."""
    tokens = [token for token in reader.tokens(generation) if token.step is None]
    if not tokens:
        return ()
    if not segments:
        return (("prompt", tokens[0].pos, printable_lines(_text(tokens))),)
    return tuple(
        (printable(one.label), one.start, printable_lines(_text(own)))
        for one in segments
        if one.kind is not SegmentKind.GENERATED
        and (own := [token for token in tokens if one.start <= token.pos < one.stop])
    )


def _text(tokens: Sequence[Any]) -> str:
    return "".join(token.text or (token.token if token.special else "") for token in tokens)


def printable_lines(text: str) -> str:
    """Return text whose lines are printable; line breaks stay."""
    return "\n".join(map(printable, text.split("\n")))
