"""Progress of a run on stderr, and its result: answers, speed, cost, findings, next command."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flexinspect.cli.output import Output
from flexinspect.core.text import escape_unprintable, plural
from flexinspect.inputs.datasets import is_correct_answer
from flexinspect.inputs.model_sizes import human_bytes, human_count
from flexinspect.records.finding import Finding, Severity, sort_by_severity
from flexinspect.records.step import EventRecord, TokenRecord
from flexinspect.trace.query_results import GenerationRow, StepRow
from flexinspect.trace.reader import TraceReader, open_trace

_SHOWN_ANSWERS = 3
_SHOWN_FINDINGS = 5
_MAX_FINDINGS = 200
_MAX_ANSWER_CHARS = 300
"""Limit of an answer's printed length."""


@dataclass(frozen=True, slots=True)
class GenerationSummary:
    """Result of a generation; `correct` is None without an expected answer."""

    generation: int
    sample_id: str
    question: str
    answer: str
    expected: tuple[str, ...]
    correct: bool | None
    state: str
    stop_reason: str
    tokens: int
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Result of a finished or interrupted run; `size` is that of the trace in bytes."""

    trace: Path
    state: str
    size: int
    run: Mapping[str, Any]
    answers: tuple[GenerationSummary, ...]
    notes: tuple[str, ...]
    findings: tuple[Finding, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the summary as JSON-compatible data."""
        return {
            "trace": str(self.trace),
            "state": self.state,
            "bytes": self.size,
            "model": self.run.get("model"),
            "level": self.run.get("level"),
            "cost": self.run.get("cost"),
            "generations": [asdict(answer) for answer in self.answers],
            "notes": list(self.notes),
            "findings": [_finding_json(finding) for finding in self.findings],
        }


def summarize_run(path: Path) -> RunSummary:
    """Return the summary of a trace. Raises `TraceError` when it could not be read."""
    with open_trace(path) as reader:
        rows = reader.generations()
        return RunSummary(
            trace=path,
            state=reader.state,
            size=path.stat().st_size,
            run=reader.run(),
            answers=tuple(_generation_summary(row, reader) for row in rows),
            notes=tuple(
                row.event.text
                for row in reader.events()
                if row.event.kind not in ("phase", "error")
            ),
            findings=sort_by_severity(
                row.finding for row in reader.finding_rows(limit=_MAX_FINDINGS)
            ),
        )


def _finding_json(finding: Finding) -> dict[str, Any]:
    facts = asdict(finding)
    return {**facts, "severity": str(finding.severity), "evidence": dict(finding.evidence)}


def _generation_summary(row: GenerationRow, reader: TraceReader) -> GenerationSummary:
    steps = reader.steps(row.generation)
    decode_ms = sum(step.wall_ms for step in steps[1:])
    answer = row.answer or _partial_answer(row, reader)
    return GenerationSummary(
        generation=row.generation,
        sample_id=row.sample_id,
        question=first_question(row, reader),
        answer=answer,
        expected=row.expected,
        correct=is_correct_answer(answer, row.expected) if row.expected else None,
        state=row.state,
        stop_reason=row.stop_reason,
        tokens=len(steps),
        tokens_per_s=round((len(steps) - 1) / (decode_ms / 1e3), 2) if decode_ms else None,
    )


def _partial_answer(row: GenerationRow, reader: TraceReader) -> str:
    """Return the text of a generation that did not end."""
    last = next(iter(reader.segments(row.generation)[::-1]), None)
    tokens = [] if last is None else reader.tokens(row.generation, start=last.start)
    return "".join(token.text for token in tokens if not token.special).strip()


def print_summary(
    summary: RunSummary, console: Console | None = None, *, limit: int | None = None
) -> None:
    """Print the answers and those expected, the cost of capture, findings, and the next command.

    Prints on stdout unless `console` is given, and at most the last `limit` answers.
    """
    console = console or Output()
    with_text = [answer for answer in summary.answers if answer.question or answer.answer]
    n_more = len(with_text) - limit if limit is not None else 0
    if n_more > 0:
        console.print(f"      {n_more} generations before these, in the interface", soft_wrap=True)
    for answer in with_text[max(n_more, 0) :]:
        console.print(_answer_text(answer), soft_wrap=True)
    if n_empty := len(summary.answers) - len(with_text):
        console.print(f"{plural(n_empty, 'generation')} without tokens")
    console.print(_cost_line(summary), soft_wrap=True)
    for finding in summary.findings[:_SHOWN_FINDINGS]:
        console.print(_finding_text(finding), soft_wrap=True)
    if len(summary.findings) > _SHOWN_FINDINGS:
        more = len(summary.findings) - _SHOWN_FINDINGS
        console.print(f"      and {more} more findings, in the interface", soft_wrap=True)
    where = escape_unprintable(str(summary.trace))
    console.print(f"trace {where} ({human_bytes(summary.size)}, {summary.state})", soft_wrap=True)
    name = escape_unprintable(shlex.quote(_relative_path(summary.trace)))
    console.print(f"next  flexinspect open {name}", soft_wrap=True)


def _finding_text(finding: Finding) -> Text:
    style = {Severity.ERROR: "red", Severity.WARNING: "yellow"}.get(finding.severity, "")
    text = Text(f"{finding.severity}: ", style=style)
    text.append(escape_unprintable(finding.sentence))
    text.append(f"  [{finding.id}]", style="dim")
    return text


def _answer_text(answer: GenerationSummary) -> Text:
    mark, style = {True: ("✓", "green"), False: ("✗", "red"), None: ("·", "")}[answer.correct]
    text = Text(f"{mark} ", style=style)
    text.append(escape_unprintable(answer.question), style="bold")
    text.append("  →  ")
    shown = escape_unprintable(answer.answer[:_MAX_ANSWER_CHARS]) + (
        "…" if len(answer.answer) > _MAX_ANSWER_CHARS else ""
    )
    text.append(shown or "(nothing)", style=style)
    if answer.expected:
        shown = " | ".join(answer.expected[:_SHOWN_ANSWERS])
        more = len(answer.expected) - _SHOWN_ANSWERS
        text.append(f"  expected: {escape_unprintable(shown)}", style="dim")
        text.append(f" (+{more} more)" if more > 0 else "", style="dim")
    if answer.state != "finished":
        text.append(f"  [{answer.state}]", style="yellow")
    return text


def _cost_line(summary: RunSummary) -> str:
    tokens = sum(answer.tokens for answer in summary.answers)
    rates = [a.tokens_per_s for a in summary.answers if a.tokens_per_s]
    parts = [plural(tokens, "token")]
    if rates:
        parts.append(f"{sum(rates) / len(rates):.1f} tokens/s")
    cost = summary.run.get("cost")
    if isinstance(cost, Mapping) and cost.get("steps"):
        ratio = 100 * float(cost["ratio"])
        took = f"{ratio:.1f} %" if ratio < 1000 else "longer than the model"
        parts.append(f"capture at level {summary.run.get('level')} took {took}")
    return "      " + ", ".join(parts)


def _relative_path(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


class RunProgress:
    """Receives the events of a run. This base class keeps the state; its subclasses display it."""

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        self.console = console
        self.verbose = verbose
        self.phase = ""
        self.fraction: float | None = None
        self.text = ""
        self.n_tokens = 0
        self.wall_ms = 0.0
        self.capture_ms = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Do nothing: this class holds no resources."""

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Draw nothing while the body runs and another program uses the terminal."""
        yield

    def print_line(self, text: str) -> None:
        """Print a line."""
        self.console.print(escape_unprintable(text))

    def on_event(self, event: EventRecord) -> None:
        """Handle an event: a phase moves the bar, anything else is printed."""
        if event.kind != "phase":
            if event.kind == "breakpoint" and not event.text.startswith("paused"):
                self.print_line(event.text)
            elif event.kind not in ("error", "breakpoint"):
                self.print_line(f"{event.kind}: {event.text}")
            return
        fraction = event.data.get("fraction")
        self.fraction = float(fraction) if isinstance(fraction, (int, float)) else None
        if event.text == "plan":
            self.print_line(plan_line(event))
        elif event.text == "note":
            self.print_line(str(event.data.get("text", "")))
        elif event.text != self.phase:
            self.phase = event.text
            self.on_phase()

    def on_phase(self) -> None:
        """Called when the phase has changed."""

    def on_generation_start(self, generation: GenerationRow, reader: TraceReader) -> None:
        """Called when a generation has started."""
        self.text, self.n_tokens, self.wall_ms, self.capture_ms = "", 0, 0.0, 0.0
        question = first_question(generation, reader)
        self.print_line(f"generation {generation.generation}: {question}")

    def on_step(self, step: StepRow, tokens: list[TokenRecord], reader: TraceReader) -> None:
        """Called when a step has been stored in the trace."""
        self.n_tokens += len(tokens)
        self.text += "".join(token.text for token in tokens if not token.special)
        self.capture_ms += step.capture_ms
        if step.step:
            self.wall_ms += step.wall_ms
        if self.verbose:
            for line in step_lines(step, tokens, reader):
                self.print_line(line)

    def on_generation_end(self, generation: GenerationRow) -> None:
        """Called when a generation has ended."""

    def rate(self) -> str:
        """Return "12.3 tokens/s, capture 0.4 ms/step" of this generation; empty at its start."""
        if self.n_tokens < 2 or not self.wall_ms:
            return ""
        speed = (self.n_tokens - 1) / (self.wall_ms / 1e3)
        return f"{speed:.1f} tokens/s, capture {self.capture_ms / self.n_tokens:.2f} ms/step"


class PlainProgress(RunProgress):
    """Lines for a pipe or a file: phases and questions without bars; nothing when quiet."""

    def __init__(self, console: Console, *, verbose: bool = False, quiet: bool = False) -> None:
        super().__init__(console, verbose=verbose)
        self._quiet = quiet

    def print_line(self, text: str) -> None:
        """Print a line unless quiet."""
        if not self._quiet:
            self.console.print(escape_unprintable(text), soft_wrap=True)

    def on_phase(self) -> None:
        """Print the name of the phase."""
        self.print_line(f"{self.phase} …")


class TerminalProgress(RunProgress):
    """A few live lines on a terminal, redrawn only when something changed."""

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        super().__init__(console, verbose=verbose)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._drawn_at = 0.0

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, trace)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Remove the live lines while the body runs."""
        self._live.stop()
        try:
            yield
        finally:
            self._live.start()

    def on_event(self, event: EventRecord) -> None:
        """Handle the event and redraw."""
        super().on_event(event)
        self._draw(now=True)

    def on_step(self, step: StepRow, tokens: list[TokenRecord], reader: TraceReader) -> None:
        """Handle the step and redraw, at most ten times per second."""
        super().on_step(step, tokens, reader)
        self._draw()

    def on_generation_end(self, generation: GenerationRow) -> None:
        """Draw the last tokens."""
        self._draw(now=True)

    def _draw(self, *, now: bool = False) -> None:
        if now or time.monotonic() - self._drawn_at > 0.1:
            self._drawn_at = time.monotonic()
            self._live.update(self._render(), refresh=True)

    def _render(self) -> RenderableType:
        lines: list[RenderableType] = []
        bar = Table.grid(padding=(0, 1))
        row: list[RenderableType] = [Text(self.phase, style="bold")]
        if self.fraction is not None:
            row.append(ProgressBar(total=1.0, completed=self.fraction, width=30))
        bar.add_row(*row)
        lines.append(bar)
        if self.n_tokens:
            # Only the end: text taller than the window cannot be redrawn in place.
            newest = escape_unprintable(self.text)[-2 * self.console.width :]
            lines.append(Text("  " + newest, style="green", overflow="fold"))
            lines.append(Text(f"  token {self.n_tokens}  {self.rate()}", style="dim"))
        return Group(*lines)


def plan_line(event: EventRecord) -> str:
    """Return which model is going to be loaded, from where, and the memory it needs."""
    data = event.data
    count = human_count(data.get("parameters"))
    needs = human_bytes(data.get("total"))
    free = human_bytes(data.get("available"))
    return (
        f"{data.get('name')}: {count} parameters in {data.get('dtype')} on {data.get('device')}, "
        f"from {data.get('place')}; needs {needs} of {free} free"
    )


def first_question(generation: GenerationRow, reader: TraceReader) -> str:
    """Return the text of a prompt's first paraphrase, decoded from its tokens."""
    segments = reader.segments(generation.generation)
    first = next((s for s in segments if s.kind == "paraphrase"), next(iter(segments), None))
    if first is None:
        return ""
    tokens = reader.tokens(generation.generation, start=first.start, stop=first.stop)
    return "".join(token.text for token in tokens).strip()


def step_lines(step: StepRow, tokens: list[TokenRecord], reader: TraceReader) -> list[str]:
    """Return the lines of a step: lengths, kernel paths, shapes, masks, candidates."""
    calls = reader.calls(step.generation, step.step)
    lengths = f"q {step.q_len}, kv {step.kv_before} → {step.kv_after}"
    lines = [f"  step {step.step} {step.phase}: {lengths}, {step.wall_ms:.1f} ms"]
    if calls:
        call = calls[0]
        paths = ", ".join(sorted({call.path for call in calls}))
        masks = ", ".join(sorted({call.mask or "none" for call in calls}))
        shape = f"q {call.batch}×{call.q_heads}×{call.q_len}×{call.head_dim}"
        shape += f", k {call.batch}×{call.kv_heads}×{call.kv_len}×{call.head_dim}"
        lines.append(f"    {len(calls)} layers {paths}; {shape} {call.dtype}; mask {masks}")
    logits = reader.logits(step.generation, step.step)
    if logits is not None:
        best = "  ".join(f"{c.text!r} {c.logprob:.2f}" for c in logits.candidates[:4])
        lines.append(f"    entropy {logits.entropy:.3f}, margin {logits.margin:.2f}: {best}")
    return lines
