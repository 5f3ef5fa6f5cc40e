"""`flexinspect audit TRACE`: judges the steps of a finished trace by their digests.

The model is made again from what the trace names, and runs as the reference over the tokens that
were fed. Faults that are put into it must give the digests.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct, field

from flexinspect.core.errors import FlexInspectError
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import EventRecord, GenerationRecord
from flexinspect.rules.engine import RuleRunner
from flexinspect.rules.numerics.audit_findings import AUDIT_EVENT, AuditRule
from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect.trace.replay import is_standalone
from flexinspect.trace.schema import GENERATIONS
from flexinspect_hooks.audit.evidence.step_evidence import EvidenceStore
from flexinspect_hooks.audit.evidence.trace_evidence import read_recorded_steps
from flexinspect_hooks.audit.forward.weights import snapshot
from flexinspect_hooks.audit.one_cause import causes_of, rows_of_one_cause
from flexinspect_hooks.audit.program_audit import (
    AuditOptions,
    ProgramAudit,
    Report,
    Verdict,
    verdict_data,
)
from flexinspect_hooks.audit.session_audit import describe_verdict, unjudged_events
from flexinspect_hooks.audit.trace_model import (
    load_recorded_model,
    model_source,
    weights_problem,
)
from flexinspect_hooks.loading.library_output import quiet_libraries

UNKNOWN_WEIGHTS = (
    "the trace has no samples of the weights, so whether they are those of the run is not known"
)
ONLY_LOGITS = "the trace has no digests, so only the logits of the best tokens are compared"


class TraceAudit(Struct):
    """What was found: events as at the end of a run, findings, and why models were not judged."""

    events: list[EventRecord] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    problems: list[FlexInspectError] = field(default_factory=list)


def audit_trace(
    path: str | Path,
    *,
    model: str | None = None,
    seconds: float = 120.0,
    dtype: str = "float32",
    report: Report = lambda what, fraction: None,
) -> TraceAudit:
    """Judge the steps of a trace, with the weights of `model` instead of those that it names.

    Raises `TraceError` if the trace cannot be read.
    """
    options = AuditOptions(seconds, dtype)
    with open_trace(path) as reader:
        auditor = _Auditor(reader, options, model, report)
        by_model: dict[str, list[int]] = {}
        for row in reader.generations():
            if not is_standalone(row):
                by_model.setdefault(row.model, []).append(row.generation)
        for name, generations in by_model.items():
            try:
                auditor.judge(name, generations)
            except FlexInspectError as error:
                auditor.found.problems.append(error)
    return auditor.found


class _Auditor:
    """Judges the generations of a trace, one model after the other."""

    def __init__(
        self, reader: TraceReader, options: AuditOptions, model: str | None, report: Report
    ) -> None:
        self._reader, self._options, self._model = reader, options, model
        self._report, self._deadline = report, time.perf_counter() + options.seconds
        self.found = TraceAudit()

    def judge(self, name: str, generations: Sequence[int]) -> None:
        """Judge generations of one model. Raises `FlexInspectError` if it cannot be made again."""
        reader = self._reader
        recorded = {number: read_recorded_steps(reader, number) for number in generations}
        if not any(one.steps for one in recorded.values()):
            why = next((f": {one.problem}" for one in recorded.values() if one.problem), "")
            raise FlexInspectError(f"The trace has no steps that can be judged{why}.")
        run, facts = reader.run(), reader.model(generations[0])
        source = model_source(run, facts, self._model)
        self._report(f"loading {source.name}", None)
        loaded = load_recorded_model(run, facts, source, lambda what, data: None)
        if getattr(loaded.config, "is_encoder_decoder", False):
            raise FlexInspectError(
                f"The trace does not have what the encoder of {source.name} read.",
                hint="flexinspect audit SCRIPT audits the steps of the program itself.",
            )
        store, verdicts = EvidenceStore(), list[Verdict]()
        notes: dict[int, list[str]] = {}
        for generation, one in recorded.items():
            problem, is_known = weights_problem(reader, generation, name, loaded)
            if problem or not one.steps:
                verdicts.append(Verdict(generation, 0, not_judged=[problem or one.problem]))
                continue
            if one.problem:
                store.skipped[generation] = one.problem
            store.steps[generation] = one.steps
            notes[generation] = [] if is_known else [UNKNOWN_WEIGHTS]
            notes[generation] += [] if one.has_digests else [ONLY_LOGITS]
        store.weights.hold(snapshot(loaded))
        verdicts += self._compare(store) if store.steps else []
        for verdict in verdicts:
            verdict.notes += notes.get(verdict.generation, []) if verdict.n_steps else []
        for event in _events(reader, verdicts):
            self.found.events.append(event)
            self.found.findings += _findings(reader, event)

    def _compare(self, store: EvidenceStore) -> list[Verdict]:
        with quiet_libraries(lambda what, data: None):
            audit = ProgramAudit(
                store,
                self._reader,
                self._options,
                deadline=self._deadline,
                report=self._report,
            )
            return audit.run()


def _events(reader: TraceReader, verdicts: Sequence[Verdict]) -> Iterator[EventRecord]:
    for text, generation, data in unjudged_events(verdicts):
        yield EventRecord(AUDIT_EVENT, text, time.time(), generation, None, data)
    same = rows_of_one_cause(verdicts)
    for verdict in (one for one in verdicts if one.n_steps):
        step = verdict.divergence.step if verdict.divergence is not None else None
        facts = verdict_data(verdict) | {"ms": round(1e3 * verdict.seconds, 1)}
        facts["causes"] = [
            one.id for one in causes_of(reader, verdict) if one.severity is Severity.ERROR
        ]  # a finding that is stored already does not become more severe here
        facts["follows"] = same.get((verdict.generation, verdict.batch))
        text = describe_verdict(verdict)
        yield EventRecord(AUDIT_EVENT, text, time.time(), verdict.generation, step, facts)


def _findings(reader: TraceReader, event: EventRecord) -> Sequence[Finding]:
    """Return the findings of an event, by the rule that judges it at the end of a run."""
    assert event.generation is not None
    row, runner = reader.generation(event.generation), RuleRunner([AuditRule()])
    runner.on_generation_start(
        GenerationRecord(
            **{name: getattr(row, name) for name in GENERATIONS.names},
            segments=tuple(reader.segments(row.generation)),
            tokens=tuple(reader.tokens(row.generation)),
        )
    )
    return runner.on_record(event).findings
