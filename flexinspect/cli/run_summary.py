"""The result of a run: what `flexinspect run` prints at its end, also as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from flexinspect.analysis.summary import declare_command
from flexinspect.cli.output import stdout_console
from flexinspect.core.environment import command_path
from flexinspect.core.text import escape_unprintable, plural, truncate
from flexinspect.inputs.model_sizes import human_bytes
from flexinspect.inputs.samples import judge_answer
from flexinspect.records.finding import Finding, Severity, sort_by_severity
from flexinspect.records.step import EventRecord
from flexinspect.records.training_step import CALLS_EVENT, PARAMETERS_EVENT
from flexinspect.trace.queries import question_text
from flexinspect.trace.query_results import GenerationRow
from flexinspect.trace.reader import TraceReader, open_trace

_SHOWN_ANSWERS = 3
_SHOWN_FINDINGS = 5
_SHOWN_GENERATIONS = 4
NO_NOTES = (
    *("phase", "error", "source", "recompute-check", "audit", "evaluation", "training-check"),
    *(CALLS_EVENT, PARAMETERS_EVENT, "generate", "kernel-options"),
    *("kept-state", "penalty-sign", "processor-rows", "stopping-rows"),
    *("cache-origins", "sampled-otherwise", "choice-scores"),
)
"""Kinds of events that are no notes of a summary."""
_MAX_FINDINGS = 200
MAX_QUESTION_CHARS = 120  # a prompt may have thousands; --json and the trace have all
_MAX_ANSWER_CHARS = 300  # limit of an answer's printed length


def summarize_run(path: Path) -> dict[str, Any]:
    """Return the result of a run that has ended, with the keys of `run --json`.

    `bytes` is the size of the trace, `cost` what capture took. Raises `TraceError` when the trace
    could not be read.
    """
    with open_trace(path) as reader:
        run, events = reader.run(), reader.events()
        findings = (row.finding for row in reader.finding_rows(limit=_MAX_FINDINGS))
        return {
            "trace": str(path),
            "state": reader.state,
            "bytes": path.stat().st_size,
            **{name: run.get(name) for name in ("model", "level", "cost")},
            "is_own": run.get("job") is not None,
            "generations": [_summarize_generation(row, reader) for row in reader.generations()],
            "notes": [r.event.text for r in events if r.event.kind not in NO_NOTES],
            "own_traces": [own for r in events if (own := _own_trace(r.event)) is not None],
            "findings": sort_by_severity(findings),
        }


def _own_trace(event: EventRecord) -> str | None:
    """Return the trace that the program records by itself, if an event says so."""
    return event.data.get("path") if event.kind == "own-trace" else None


def _summarize_generation(row: GenerationRow, reader: TraceReader) -> dict[str, Any]:
    """Return the result of a generation; see `judge_answer` for `correct`."""
    if "training" in row.declared:
        return _summarize_training(row, reader)
    steps = reader.steps(row.generation)
    decode_ms = sum(step.wall_ms for step in steps[1:])
    answer = row.answer
    if not answer and (segments := reader.segments(row.generation)):  # it did not end
        tokens = reader.tokens(row.generation, start=segments[-1].start)
        answer = "".join(token.text for token in tokens if not token.special).strip()
    return {
        "generation": row.generation,
        "sample_id": row.sample_id,
        "question": question_text(reader, row.generation),
        "answer": answer,
        "expected": row.expected,
        "correct": judge_answer(row.state, answer, row.expected),
        "state": row.state,
        "stop_reason": row.stop_reason,
        "tokens": len(steps),
        "tokens_per_s": round((len(steps) - 1) / (decode_ms / 1e3), 2) if decode_ms else None,
    }


def _summarize_training(row: GenerationRow, reader: TraceReader) -> dict[str, Any]:
    """Return the result of a training with the same keys; it has no tokens."""
    answer, last = row.answer, reader.last_step(row.generation)
    ends = (reader.training_step(row.generation, n) for n in (0, last or 0))
    losses = [step.loss for step in ends if step is not None and step.has_loss]
    if answer and len(losses) == 2:
        answer += f", loss {losses[0]:.4g} to {losses[1]:.4g}"
    return {
        "generation": row.generation,
        "sample_id": row.sample_id,
        "question": row.sample_id,
        "answer": answer,
        "expected": row.expected,
        "correct": None,
        "state": row.state,
        "stop_reason": row.stop_reason,
        "tokens": 0,
        "tokens_per_s": None,
        "is_training": True,
    }


def print_summary(
    summary: Mapping[str, Any], console: Console | None = None, *, limit: int | None = None
) -> None:
    """Print the last `limit` answers (None: all), the cost, findings, and the next command.

    With `traces`, the files of a run by several workers, `trace` is their folder.
    """
    generations, findings = summary["generations"], summary["findings"]
    with_text = [each for each in generations if each["question"] or each["answer"]]
    n_earlier = max(len(with_text) - limit, 0) if limit is not None else 0
    earlier = f"      {n_earlier} generations before these, in the interface"
    lines: list[str | Text] = [earlier] if n_earlier else []
    lines += map(_answer_text, with_text[n_earlier:])
    if n_empty := len(generations) - len(with_text):
        lines.append(f"{plural(n_empty, 'generation')} without tokens")
    if line := _cost_line(summary):
        lines.append(line)
    alike = _alike(findings)
    lines += [finding_text(same[0], _places(same)) for same in alike[:_SHOWN_FINDINGS]]
    if more := sum(map(len, alike[_SHOWN_FINDINGS:])):
        lines.append(f"      and {plural(more, 'more finding')}, in the interface")
    place, files = Path(summary["trace"]), summary.get("traces", ())
    trace = Path(files[0]) if files else place
    if command := declare_command(findings[:_SHOWN_FINDINGS], trace):
        lines.append(f"fix   {command}")
    size, state = human_bytes(summary["bytes"]), summary["state"]
    counted = f"{plural(len(files), 'trace')} in " if files else "trace "
    lines.append(f"{counted}{escape_unprintable(str(place))} ({size}, {state})")
    lines += _next_lines(trace, summary)
    console = console or stdout_console()
    for each_line in lines:
        console.print(each_line, soft_wrap=True)


def _next_lines(trace: Path, summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield commands that help now, with what each is for; the first opens the trace."""
    path, findings = command_path(trace), summary["findings"]
    has_step = any(one["tokens"] or one.get("is_training") for one in summary["generations"])
    if not summary["generations"] and (own := summary.get("own_traces")):
        path, has_step = own[-1], True  # this trace has no steps, and that of the program has
    what_for = "step through it" if has_step else "what was recorded: no step"
    steps = [(f"flexinspect open {path}", what_for)]
    if findings:
        steps.append((f"flexinspect explain {findings[0].id}", "the first finding, and its fix"))
    if summary["generations"]:
        is_training = all(one.get("is_training") for one in summary["generations"])
        what = "training" if is_training else "mask --picture"
        panel = f"flexinspect show {path} --panel {what}"
        steps.append((panel, "a panel without the interface"))
    if summary["is_own"] and summary["generations"]:
        verbose = "flexinspect run --max-samples 1 --verbose"
        steps.append((verbose, "one sample, each step in detail"))
        steps.append(("flexinspect prove isolation", "test the mask by experiment"))
    width = max(len(command) for command, _ in steps)
    for number, (command, text) in enumerate(steps):
        yield f"{'' if number else 'next':<6}{command:<{width}}  # {text}"


def _alike(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Return findings that say the same in one list, such as those of two generations."""
    same: dict[tuple[str, str, str], list[Finding]] = {}
    for one in findings:
        same.setdefault((one.severity, one.id, one.sentence), []).append(one)
    return list(same.values())


def _places(same: Sequence[Finding]) -> str:
    """Return the generations of findings that say the same, empty for one."""
    if len(same) == 1:
        return ""
    numbers = sorted({one.generation for one in same})
    if len(numbers) < len(same):
        return f" ({len(same)} times)"
    listed = ", ".join(map(str, numbers[:_SHOWN_GENERATIONS]))
    return f" (generations {listed}{', …' if len(numbers) > _SHOWN_GENERATIONS else ''})"


def finding_text(finding: Finding, places: str = "") -> Text:
    """Return the line of a finding: its severity in colour, its sentence, `places` and its id."""
    style = {Severity.ERROR: "red", Severity.WARNING: "yellow"}.get(finding.severity, "")
    label, id_ = (f"{finding.severity}: ", style), (f"  [{finding.id}]", "dim")
    return Text.assemble(label, escape_unprintable(finding.sentence + places), id_)


def _answer_text(generation: Mapping[str, Any]) -> Text:
    marks = {True: ("✓", "green"), False: ("✗", "red"), None: ("·", "")}
    mark, style = marks[generation["correct"]]
    answer, expected = generation["answer"], generation["expected"]
    shown = escape_unprintable(truncate(answer, _MAX_ANSWER_CHARS))
    asked = truncate(generation["question"], MAX_QUESTION_CHARS)
    question = (escape_unprintable(asked), "bold")
    text = Text.assemble(f"{mark} ", question, "  →  ", shown or "(nothing)", style=style)
    if expected:
        shown = escape_unprintable(" | ".join(expected[:_SHOWN_ANSWERS]))
        n_more = len(expected) - _SHOWN_ANSWERS
        text.append(f"  expected: {shown}" + (f" (+{n_more} more)" if n_more > 0 else ""), "dim")
    if generation["state"] != "finished":
        text.append(f"  [{generation['state']}]", style="yellow")
    return text


_SHORT_RUN = 0.25
"""A share of capture from which the line says of what: such runs are short."""


def _share(ratio: float, total_s: float) -> str:
    if ratio >= 10:
        return "longer than the model"
    share = f"{100 * ratio:.1f} %"
    if ratio < _SHORT_RUN or not total_s:
        return share
    return f"{share} of the {total_s / (1 + ratio):.2f} s that the steps take without it"


def _cost_line(summary: Mapping[str, Any]) -> str:
    generations, cost = summary["generations"], summary["cost"]
    n_tokens = sum(each["tokens"] for each in generations)
    is_training = bool(generations) and all(one.get("is_training") for one in generations)
    parts = [] if is_training else [plural(n_tokens, "token")]
    if rates := [each["tokens_per_s"] for each in generations if each["tokens_per_s"]]:
        parts.append(f"{sum(rates) / len(rates):.1f} tokens/s")
    if isinstance(cost, Mapping) and cost.get("steps"):
        took = _share(float(cost["ratio"]), float(cost.get("total_s", 0.0)))
        parts.append(f"capture at level {summary['level']} took {took}")
        if cost.get("checks"):
            share = 100 * cost["checks_s"] / max(cost["total_s"] + cost["checks_s"], 1e-9)
            checks = f"{plural(cost['checks'], 'recompute')} of --check-every"
            parts.append(f"{checks} took {cost['checks_s']:.2f} s, {share:.0f} % of the time")
    return "      " + ", ".join(parts) if parts else ""
