"""Audits the sessions of a run when they end, and records what was found as events."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from msgspec.structs import replace

from flexinspect.core.errors import FlexInspectError, summarize_error
from flexinspect.core.text import plural, print_message
from flexinspect.records.finding import Severity
from flexinspect.records.step import EventRecord
from flexinspect.rules.cache.assembled_cache import ORIGINS_EVENT
from flexinspect.rules.engine import RuleRunner, as_consequence
from flexinspect.rules.numerics.audit_findings import (
    AUDIT_EVENT,
    AUDIT_SKIPPED_EVENT,
    AUDITED_EVENT,
    CHOICE_EVENT,
    finding_id,
)
from flexinspect.rules.numerics.changed_weights import REPLACED_EVENT, SCALES_EVENT
from flexinspect.trace.reader import open_trace
from flexinspect_hooks.audit.caches.assembled_caches import origin_facts
from flexinspect_hooks.audit.evidence.step_evidence import EvidenceStore
from flexinspect_hooks.audit.explanations.nan_origin import explain_nonfinite
from flexinspect_hooks.audit.explanations.quantized_scales import wrong_scales
from flexinspect_hooks.audit.forward.forward_run import LOGITS
from flexinspect_hooks.audit.one_cause import causes_of, failed_checks_of, rows_of_one_cause
from flexinspect_hooks.audit.program_audit import (
    AuditOptions,
    ProgramAudit,
    Report,
    Verdict,
    verdict_data,
)
from flexinspect_hooks.capture.recorder import Recorder
from flexinspect_hooks.loading.library_output import quiet_libraries
from flexinspect_hooks.python_internals.default_device import cpu_by_default

SHARE = 0.2
"""The part of the run's time that audits may take, if that is more than the budget in seconds."""


PRINT_AFTER_S = 2.0
"""An audit that takes longer says from time to time what it does."""


class PrintedProgress:
    """Prints what a long audit does, on stderr, at most every `PRINT_AFTER_S` seconds."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def __call__(self, what: str, fraction: float | None) -> None:
        """Report a step of the audit."""
        now = time.perf_counter()
        if now - self._last >= PRINT_AFTER_S:
            self._last = now
            share = "" if fraction is None else f", {fraction:.0%}"
            print_message(f"audit: {what}{share} …")


class AuditBudget:
    """The time that the audits of a run may take; it is shared by all models of the run."""

    def __init__(self, options: AuditOptions) -> None:
        self.options = options
        self._started = time.perf_counter()
        self.used_s = 0.0

    def deadline(self) -> float:
        """Return the time of `time.perf_counter` at which an audit that begins now must end."""
        now = time.perf_counter()
        allowed = max(self.options.seconds, SHARE * (now - self._started))
        return now + max(allowed - self.used_s, 0.0)


@cpu_by_default()
def audit_session(
    store: EvidenceStore,
    recorder: Recorder,
    rules: RuleRunner,
    budget: AuditBudget,
    report: Report = lambda what, fraction: None,
) -> list[Verdict]:
    """Audit the kept steps of one model, record events, and drop the steps.

    Whatever fails in it becomes an event: the program's run is over and must end as it did.
    """
    if not store.steps and not store.problem and not store.skipped:
        return []
    recorder.drain()
    started, verdicts = time.perf_counter(), list[Verdict]()

    def put(kind: str, text: str, generation: int | None, step: int | None, data: Any) -> None:
        recorder.put_event(EventRecord(kind, text, time.time(), generation, step, data), rules)

    first = next(iter(store.steps), 0)
    store.is_busy = True
    try:
        with suppress(Exception), torch.random.fork_rng(devices=[]):
            explain_nonfinite(store, recorder)
        for kind, text, data in _wrong_modules(store):
            put(kind, text, first, None, data)
        with suppress(Exception):
            root, deadline = store.weights.of(max(store.steps)).root(), budget.deadline()
            for data in origin_facts(store, root, deadline):
                text = "The program put a cache together from rows of earlier steps."
                put(ORIGINS_EVENT, text, data["generation"], data["step"], data)
        if store.problem:
            raise FlexInspectError(store.problem)
        verdicts = _verdicts(store, recorder, budget, report)
        same = rows_of_one_cause(verdicts)
        for text, generation, data in unjudged_events(verdicts):
            put(AUDIT_EVENT, text, generation, None, data)
        for verdict in (one for one in verdicts if one.n_steps):
            step = verdict.divergence.step if verdict.divergence is not None else None
            data = verdict_data(verdict) | {"ms": round(1e3 * verdict.seconds, 1)}
            data["causes"] = _link_findings(recorder, verdict, finding_id(data))
            data["follows"] = same.get((verdict.generation, verdict.batch))
            put(AUDIT_EVENT, describe_verdict(verdict), verdict.generation, step, data)
            if verdict.choice is not None:
                at = verdict.choice["wrong"][0]
                text = "The program did not choose the best token in each step."
                chosen = verdict.choice | {"batch": verdict.batch}
                generation = int(chosen.get("generation", verdict.generation))
                put(CHOICE_EVENT, text, generation, at, chosen)
        put(AUDITED_EVENT, summarize_verdicts(verdicts), None, None, {})
    except Exception as error:  # a model may be of any kind
        text = f"The steps were not audited: {_reason(error)}"
        put(AUDIT_SKIPPED_EVENT, text, first, None, {"reason": _reason(error)})
    finally:
        budget.used_s += time.perf_counter() - started
        store.clear()
        store.is_busy = False
    return verdicts


def _wrong_modules(store: EvidenceStore) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield kind, text and data of an event for each module that is unlike what it replaces."""
    with suppress(Exception), torch.random.fork_rng(devices=[]):
        for facts in wrong_scales(store.weights.of(max(store.steps)).root()):
            yield SCALES_EVENT, "A quantised module uses its scales for another axis.", facts
    with suppress(Exception), torch.random.fork_rng(devices=[]):
        held = store.weights.of(max(store.steps))
        root: Any = held.root()
        root.config = held.config
        for what, facts in store.replaced_weights(root):
            text = "A module of the program is unlike the weight that was in its place."
            yield REPLACED_EVENT, text, {"what": what, **facts}


def _verdicts(
    store: EvidenceStore, recorder: Recorder, budget: AuditBudget, report: Report
) -> list[Verdict]:
    reader = open_trace(recorder.path) if recorder.path is not None else None
    try:
        # The program may go on: its random numbers stay the same, and nothing is printed into it.
        with torch.random.fork_rng(devices=[]), quiet_libraries(lambda what, data: None):
            deadline = budget.deadline()
            audit = ProgramAudit(store, reader, budget.options, deadline=deadline, report=report)
            return audit.run()
    finally:
        if reader is not None:
            reader.close()


def _link_findings(recorder: Recorder, verdict: Verdict, own: str) -> list[str]:
    """Link a divergence with the findings of the run; return the ids of those that caused it.

    The first cause becomes as severe as the divergence. Failed checks of attention become notes
    that follow from it, or from `own`, the id of the finding of the divergence.
    """
    if verdict.divergence is None or recorder.path is None:
        return []
    with open_trace(recorder.path) as reader:
        causes, failed = causes_of(reader, verdict), failed_checks_of(reader, verdict)
    if causes and causes[0].severity is not Severity.ERROR:
        recorder.explain_finding(replace(causes[0], severity=Severity.ERROR))
    for check in failed:
        recorder.explain_finding(as_consequence(check, causes[0].id if causes else own))
    return [one.id for one in causes]


def unjudged_events(verdicts: Sequence[Verdict]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield text, generation and data of one event for all generations with the same reason."""
    by_reason: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if not verdict.n_steps:
            reason = "; ".join(verdict.not_judged)
            by_reason.setdefault(re.sub(r"\d+", "#", reason), []).append(verdict)
    for same in by_reason.values():
        numbers = list(dict.fromkeys(verdict.generation for verdict in same))
        first = describe_verdict(same[0])
        more = f" The same holds for {plural(len(numbers) - 1, 'more generation')}."
        text = first if len(numbers) == 1 else first + more
        yield text, numbers[0], verdict_data(same[0]) | {"generations": numbers}


def _reason(error: Exception) -> str:
    return error.message if isinstance(error, FlexInspectError) else summarize_error(error)


def summarize_verdicts(verdicts: Sequence[Verdict]) -> str:
    """Return what was judged of a model in one sentence, and that something was not."""
    if len(verdicts) == 1:
        return describe_verdict(verdicts[0])
    n_steps = sum(one.n_steps for one in verdicts)
    if not n_steps:
        return (
            f"No step of {plural(len(verdicts), 'sequence')} was compared with the untouched "
            "implementation (flexinspect audit TRACE lists why)."
        )
    n_differ = sum(one.divergence is not None for one in verdicts)
    judged = [one for one in verdicts if one.n_steps]
    text = (
        f"{plural(n_steps, 'step')} of {plural(len(judged), 'sequence')} were compared with the "
        "untouched implementation: "
    )
    text += (
        f"{n_differ} of the sequences differ."
        if n_differ > 1
        else ("1 of the sequences differs." if n_differ else "none differs.")
    )
    text += _not_judged("judged only in part", [one for one in judged if one.not_judged])
    return text + _not_judged("not judged", [one for one in verdicts if not one.n_steps])


def _not_judged(how: str, verdicts: Sequence[Verdict]) -> str:
    """Say which sequences were not judged, or in part, and why the first one was not."""
    if not verdicts:
        return ""
    first, n = verdicts[0], len(verdicts)
    which = _where(first)
    if n > 1:
        which = (
            f"{plural(n, 'sequence')} were {how}, the first one is {which[:1].lower()}{which[1:]}"
        )
    else:
        which = f"{which} was {how}"
    comma = ", and not" if first.n_steps else ""
    reason = f"{comma}: {first.not_judged[0]}" if first.not_judged else ""
    more = " (flexinspect audit TRACE lists all)" if n > 1 or len(first.not_judged) > 1 else ""
    return f" {which}{reason}{more}."


def _where(verdict: Verdict) -> str:
    """Return the generation and the batch row of a verdict, as the beginning of a sentence."""
    where = f"Generation {verdict.generation}"
    return where + (f", batch row {verdict.batch}" if verdict.batch else "")


def describe_verdict(verdict: Verdict) -> str:
    """Return what was judged and what was not, in a sentence or two."""
    where = _where(verdict)
    rest = f" Not judged: {'; '.join(verdict.not_judged)}." if verdict.not_judged else ""
    if verdict.notes:
        rest = f" Taken for granted: {'; '.join(verdict.notes)}.{rest}"
    if not verdict.n_steps:
        return f"{where}: no step was judged.{rest}"
    judged = f"{plural(verdict.n_steps, 'step')}, {plural(verdict.n_rows, 'row')}"
    if verdict.divergence is not None:
        name, layer = verdict.divergence.point
        at = "" if layer is None else f" of layer {layer}"
        verb = "differ" if name == LOGITS else "differs"
        return (
            f"{where}: {judged} compared with the untouched implementation; the {name}{at} "
            f"{verb} from step {verdict.divergence.step} on.{rest}"
        )
    under = {
        "declared": ", under the declared mask",
        "executed": ", under the mask that was executed (none was declared, so it is not judged)",
    }.get(verdict.mask_kind, "")
    return (
        f"{where}: {judged} agree with the untouched implementation{under}; the largest "
        f"difference is {verdict.largest:.1g} of a row's norm.{rest}"
    )
