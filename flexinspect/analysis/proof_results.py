"""The results of proofs: findings, lines of text, and the facts as numbers.

A proof runs a model and judges what changed. The capture side (`flexinspect.prove`) runs it; this
module holds the finding kinds and the result, without torch.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from flexinspect.core.errors import UsageError
from flexinspect.core.text import escape_unprintable
from flexinspect.records.finding import Finding, Severity, sort_by_severity
from flexinspect.rules.engine import fill_from_kind, finding_kinds
from flexinspect.trace.file.writer import RuleReview, append_reviews
from flexinspect.trace.reader import TraceReader, open_trace

PROOF_KINDS = ("isolation", "order", "kernel", "cache")

LEAK, ISOLATED = "proof.leak", "proof.isolated"
AS_DECLARED, MIXED = "proof.as-declared", "proof.paraphrases-mixed"
UNREAD, UNSTABLE, ORDER = "proof.unread", "proof.unstable", "proof.order"
KERNEL_DIFFERS, KERNEL_SAME = "proof.kernel-differs", "proof.kernel-same"
KERNEL_UNSEEN = "proof.kernel-unseen"
CACHE_DIFFERS, CACHE_SAME = "proof.cache-differs", "proof.cache-same"

PROOF_FINDINGS = finding_kinds(
    *(LEAK, ISOLATED, AS_DECLARED, MIXED, UNREAD, UNSTABLE, ORDER),
    *(KERNEL_DIFFERS, KERNEL_SAME, KERNEL_UNSEEN, CACHE_DIFFERS, CACHE_SAME),
)
"""All kinds of findings of proofs, with their texts."""


class Proof(Struct, frozen=True):
    """The result of one proof.

    `lines` describe what was done and observed, `findings` are the conclusions, and `facts` the
    numbers, ready for JSON; docs/proofs.md lists their keys for each kind of proof.
    """

    kind: str
    lines: tuple[str, ...]
    findings: tuple[Finding, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether no finding is an error."""
        return all(finding.severity is not Severity.ERROR for finding in self.findings)

    def __str__(self) -> str:
        findings = sort_by_severity(self.findings)
        sentences = [f"{one.severity}: {escape_unprintable(one.sentence)}" for one in findings]
        return "\n".join([*map(escape_unprintable, self.lines), *sentences])

    def add_to(self, trace: str | Path, generation: int | None = None) -> int:
        """Store the findings in a finished trace, and return the generation that has them.

        Without `generation` it is the generation of the same sample for a proof of the ensemble
        generation, the one with the same prompt for a proof of a program, otherwise the first one.
        Raises `UsageError` for a generation that the trace does not have, `TraceWriteError` when
        the trace cannot be written to, and `TraceError` when it is not a trace.
        """
        path = Path(trace)
        with open_trace(path) as reader:
            numbers = [row.generation for row in reader.generations()]
            if not numbers or (generation is not None and generation not in numbers):
                which = "generation" if generation is None else f"generation {generation}"
                raise UsageError(f"{path} has no {which} to add a proof to.")
            if generation is None:
                generation = _proved_generation(reader, self, numbers)
        at = time.time()
        findings = tuple(_with_generation(one, generation) for one in self.findings)
        # A proof may be repeated after a fix, so each review needs its own name.
        name = f"prove {self.kind} at {at:.3f}"
        append_reviews(path, [RuleReview(name, generation, findings, events=(), at=at, wall_ms=0)])
        return generation

    def as_json(self) -> dict[str, Any]:
        """Return the proof as plain lists, numbers and strings, for scripts."""
        return {
            "proof": self.kind,
            "holds": self.holds,
            "lines": list(self.lines),
            "findings": [asdict(one) for one in sort_by_severity(self.findings)],
            "facts": dict(self.facts),
        }


def proof_finding(
    finding_id: str,
    sentence: str,
    *,
    severity: Severity | None = None,
    layers: Sequence[int] = (),
    **fields: Any,
) -> Finding:
    """Return a finding of a proof with the texts of its kind; `fields` are others of `Finding`."""
    kind = PROOF_FINDINGS[finding_id]
    fields["layers"] = tuple(layers)
    return fill_from_kind(kind, Finding(finding_id, severity or kind.severity, sentence, **fields))


def format_amount(value: float) -> str:
    """Return a number for a sentence: "0.24", "3.1", "2e-07"."""
    if value == 0 or value != value or 100 <= value < 10_000:
        return f"{value:.0f}"
    return f"{value:.2g}" if 1e-3 <= value < 100 else f"{value:.0e}"


def _with_generation(finding: Finding, generation: int) -> Finding:
    before, now = f"generation = {finding.generation}", f"generation = {generation}"
    return replace(finding, generation=generation, query=finding.query.replace(before, now))


def _proved_generation(reader: TraceReader, proof: Proof, numbers: list[int]) -> int:
    """Return the generation that a proof belongs to, the first one if that is unknown."""
    sample, prompt_hash = proof.facts.get("sample"), proof.facts.get("prompt_hash")
    if sample is not None:
        for row in reader.generations():
            if row.sample_id == sample:
                return row.generation
        what = f"{reader.path} has no generation of sample {sample!r}, so its proof is not stored."
        raise UsageError(what, hint="Use the trace of a run with the same data and --max-samples.")
    for number in numbers if prompt_hash else ():
        ids = [token.token_id for token in reader.tokens(number) if token.step is None]
        joined = ",".join(map(str, ids)).encode()
        if hashlib.blake2b(joined, digest_size=8).hexdigest() == prompt_hash:
            return number
    return numbers[0]
