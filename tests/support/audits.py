"""Code that calls a model, and the audit of its steps, in the process of a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from flexinspect.records.finding import Finding
from flexinspect.rules.numerics.audit_findings import AUDIT_EVENT, AUDIT_SKIPPED_EVENT
from flexinspect.trace.reader import open_trace
from flexinspect_hooks.audit.evidence.step_evidence import EvidenceStore
from flexinspect_hooks.audit.program_audit import AuditOptions, Verdict
from flexinspect_hooks.audit.session_audit import AuditBudget, audit_session
from flexinspect_hooks.capture.new_trace import create_trace
from flexinspect_hooks.changed_weights.made_weights import MadeWeights
from flexinspect_hooks.loading.tokenizers import IdAdapter
from flexinspect_hooks.user_code.generation_builder import (
    DeclaredPrompt,
    SegmentArgument,
    parse_segments,
)
from flexinspect_hooks.user_code.watch_session import WatchSession
from support.tiny import ids

Audit = Callable[..., tuple[list[Verdict], list[Finding], list[str]]]

KINDS = (AUDIT_EVENT, AUDIT_SKIPPED_EVENT)


def make_audit(folder: Path) -> Audit:
    """Return a function that runs code that calls a model, and audits its steps afterwards."""

    def run(
        model: Any,
        program: Callable[[], object],
        after: Callable[[], object] = lambda: None,
        made: MadeWeights | None = None,
        kinds: str = "audit.",
        segments: Sequence[SegmentArgument] = (),
    ) -> tuple[list[Verdict], list[Finding], list[str]]:
        path = folder / "t.flextrace"
        writer = create_trace(path, (), "advanced", None)
        prompt = DeclaredPrompt(IdAdapter(), parse_segments(segments or None))
        session = WatchSession(model, writer, prompt, level="advanced")
        store = session.context.evidence = EvidenceStore()
        store.weights.find_model = lambda: model
        if made is not None:
            store.weights.moved_of = made.moved_of(model)
        with session, torch.no_grad():
            program()
            session.close("finished", None)
            after()
            budget = AuditBudget(AuditOptions(seconds=600.0))
            verdicts = audit_session(store, session.recorder, session.rule_runner, budget)
        writer.close("finished")
        with open_trace(path) as reader:
            events = [r.event.text for r in reader.events() if r.event.kind in KINDS]
            findings = [one for one in reader.findings() if one.id.startswith(kinds)]
        return verdicts, findings, events

    return run


def decode(model: Any, n: int = 3) -> None:
    """Decode greedily by hand: a prompt of 12 ids, then single ones."""
    rows, past = torch.tensor([ids(12, 3)]), None
    for _ in range(n):
        output = model(rows, past_key_values=past, use_cache=True)
        past, rows = output.past_key_values, output.logits[:, -1:].argmax(-1)
