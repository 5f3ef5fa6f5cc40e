"""Makes records of steps, runs the live rules on them, and writes both into the trace.

A `StepWriter` starts no thread. Its methods must be called from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from flexinspect.core.errors import TraceWriteError
from flexinspect.records import step as step_records
from flexinspect.records.finding import Finding
from flexinspect.rules.engine import RuleResults, RuleRunner
from flexinspect.rules.run_failures import failure_finding
from flexinspect.trace.file.writer import NO_MEMORY, TraceWriter
from flexinspect.trace.replay import replay_parents_from_path
from flexinspect_hooks.step_writer.size_limit import SizeLimit
from flexinspect_hooks.step_writer.step_draft import StepDraft, StepFacts, StepRecords
from flexinspect_hooks.step_writer.values import Values


class ReducedStep(Struct):
    """A step whose values are numpy arrays.

    `kept` has for each hook what makes its records, and what its `reduce` returned.
    """

    facts: StepFacts
    kept: tuple[tuple[StepRecords, Any], ...]
    values: Values
    tokens: tuple[step_records.TokenRecord, ...] = ()


SingleRecord = step_records.GenerationEnd | step_records.EventRecord | step_records.GradientRecord
"""A record that is written by itself, not as part of a step."""


class StepWriter:
    """Writes steps and single records into `sink`.

    If making the records of a hook raises, `report_error` is called with the object that makes
    them, the exception and the step, and the hook has no further records. `report_lost` is called
    with an object whose values come from tensors that were modified before they were read.

    After a `failure` nothing is written. A record that cannot be stored is listed in `refused`, and
    does not end the recording.
    """

    def __init__(
        self,
        sink: TraceWriter,
        report_error: Callable[[StepRecords, Exception, StepFacts], None],
        report_lost: Callable[[StepRecords], None],
    ) -> None:
        self._sink, self._report_error, self._report_lost = sink, report_error, report_lost
        self._rule_runners: dict[tuple[int, int], RuleRunner] = {}
        self._rule_names: set[str] = set()
        self._rule_memory: dict[str, Any] = {}
        self._failed: list[StepRecords] = []
        self.failure: TraceWriteError | None = None
        self.refused: list[str] = []
        """Errors of records that could not be stored, in order, where recording continued."""
        self.n_steps = 0
        self.evaluator: Any = None
        """The `BreakpointEvaluator` of what was written; None without one."""
        self.size_limit: SizeLimit | None = None

    @property
    def path(self) -> Path | None:
        """The trace file, None if the sink does not write one."""
        return getattr(self._sink, "recording_path", None)

    def guard(self, write: Callable[[], object]) -> None:
        """Call a function that writes. An exception becomes the `failure`, or is `refused`."""
        try:
            write()
        except TraceWriteError as error:
            # A single record that could not be stored does not end the recording.
            self.failure = error if getattr(self._sink, "failed", True) else None
            self.refused += [error.message, *error.others]
        except MemoryError:
            hint = "The steps in the trace are correct; the generation itself continues."
            self.failure = TraceWriteError(f"Recording stopped: {NO_MEMORY}.", hint=hint)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            self.failure = TraceWriteError(f"Recording stopped at an internal error: {message}")

    # -- generations ------------------------------------------------------------------------------

    def begin_generation(self, record: step_records.GenerationRecord) -> None:
        """Write a generation; `begin_rules` follows before its first step."""
        self._sink.begin_generation(record)

    def begin_rules(self, record: step_records.GenerationRecord, rules: RuleRunner) -> None:
        """Set the rules that run on each step of a generation before it is written."""
        self._rule_runners[record.generation, 0] = rules
        rules.share_memory(self._rule_memory)
        if not self._rule_names.issuperset(rules.names):
            # Stored, so that offline checks skip the rules that ran live.
            self._rule_names.update(rules.names)
            self._sink.update_run(rules=sorted(self._rule_names))
        for event in rules.on_generation_start(record):
            self._sink.write_event(event)

    def begin_branch(
        self,
        record: step_records.BranchRecord,
        generation: step_records.GenerationRecord,
        rules: RuleRunner,
    ) -> None:
        """Write a branch, given as of the fork; its parents' steps are replayed to `rules`."""
        place = (record.generation, record.branch, record.parent, record.fork_step)
        self._sink.begin_branch(*place, record.change, record.segments)
        events = [*rules.on_generation_start(generation)]
        if self.path is not None and not record.recomputed:
            events += replay_parents_from_path(self.path, *place[:2], rules)
        self._rule_runners[record.generation, record.branch] = rules
        for event in events:
            self._sink.write_event(event)

    # -- single records ---------------------------------------------------------------------------

    def write(self, item: SingleRecord | Callable[[], SingleRecord | None]) -> None:
        """Write a record, or the one that a function returns, if it returns one."""
        if self.failure is not None:
            return
        found = item() if callable(item) else item
        if isinstance(found, step_records.GenerationEnd):
            key = (found.generation, found.branch)
            if (rules := self._rule_runners.pop(key, None)) is not None:
                self._write_results(rules.on_generation_end())
            self._sink.end_generation(found)
        elif isinstance(found, step_records.GradientRecord):
            self._sink.write_gradients(found)
            if (rules := self._rule_runners.get((found.generation, found.branch))) is not None:
                results = rules.on_record(found)
                self._write_results(results)
                if results.repeats:
                    place = (found.generation, found.branch, found.step)
                    self._sink.write_repeats(place, results.repeats)
        elif found is not None:
            self.write_event(found, None)

    def write_event(self, event: step_records.EventRecord, rules: RuleRunner | None) -> None:
        """Write an event. The rules of its generation run on it, or `rules` if none is open."""
        self._sink.write_event(event)
        if event.generation is not None:
            branches = (key for key in reversed(self._rule_runners) if key[0] == event.generation)
            newest = next(branches, None)
            rules = rules if newest is None else self._rule_runners[newest]
        if rules is not None:
            self._write_results(rules.on_record(event))
        elif (finding := failure_finding(event)) is not None:
            self._sink.write_findings([finding])

    def run_rules(self, event: step_records.EventRecord, rules: RuleRunner) -> None:
        """Run rules on an event that is not written."""
        self._write_results(rules.on_record(event))

    def explain_finding(self, finding: Finding) -> None:
        """Write the new severity, sentence and evidence of a finding that was written."""
        self._sink.explain_finding(finding)

    def _write_results(self, results: RuleResults) -> None:
        """Write findings that do not belong to a step, and events of rules that failed."""
        if findings := results.findings:
            self._sink.write_findings(findings)
            if self.evaluator is not None:
                self.evaluator.evaluate_findings(findings, findings[0].generation)
        for event in results.events:
            self._sink.write_event(event)

    # -- steps ------------------------------------------------------------------------------------

    def write_steps(self, steps: Sequence[ReducedStep]) -> None:
        """Write steps in one transaction."""
        if self.failure is not None:
            return
        records, error = self._records(steps), None
        if self.size_limit is not None:
            records = self._thinned(self.size_limit, records)
            if not records:
                return
        try:
            self._sink.write_steps(records)
        except TraceWriteError as raised:
            records, error = [records[index] for index in raised.stored], raised
        self.n_steps += len(records)
        if self.evaluator is not None:
            for record in records:
                self.evaluator.evaluate(record)
        if error is not None:
            raise error

    def report_failed(self, maker: StepRecords, error: Exception, step: StepFacts) -> None:
        """Report that the values or the records of a hook failed; it has no further records."""
        self._failed.append(maker)
        self._report_error(maker, error, step)

    def _thinned(
        self, limit: SizeLimit, records: list[step_records.StepRecord]
    ) -> list[step_records.StepRecord]:
        """Return what a size limit leaves of some steps, and write the events of its changes."""
        kept = limit.thin(records)
        while limit.events:
            self._sink.write_event(limit.events.pop(0))
        return kept

    def _records(self, steps: Sequence[ReducedStep]) -> list[step_records.StepRecord]:
        """Turn steps into records, one kind of work after the other.

        Work on a single step finds its code and tables evicted from the CPU caches: the rules cost
        four times as much between the matrix products of two steps as in a row.
        """
        drafts = [StepDraft(step.facts, tokens=step.tokens) for step in steps]
        for number in range(max(len(step.kept) for step in steps)):
            for step, draft in zip(steps, drafts, strict=True):
                # In order, because later hooks read the records of earlier ones.
                for maker, kept in step.kept[number : number + 1]:
                    self._make(maker, kept, step, draft)
        records = []
        for draft in drafts:
            record = draft.assemble()
            rules = self._rule_runners.get((record.generation, record.branch))
            records.append(record if rules is None else rules.on_step(record))
        return records

    def _make(self, maker: StepRecords, kept: Any, step: ReducedStep, draft: StepDraft) -> None:
        if self._failed and maker in self._failed:  # at an earlier step, after this one was queued
            return
        try:
            maker.record(step.facts, kept, step.values, draft)
        except Exception as error:
            self.report_failed(maker, error, step.facts)
        if draft.are_values_lost:
            draft.are_values_lost = False
            self._report_lost(maker)
