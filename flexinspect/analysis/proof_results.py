"""The results of proofs: findings, lines of text, and the facts as numbers.

A proof runs a model and judges what changed. The capture side (`flexinspect.prove`) runs it; this
module holds the finding kinds and the result, without torch.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flexinspect.core.errors import UsageError
from flexinspect.core.text import escape_unprintable
from flexinspect.records.finding import Finding, Severity, sort_by_severity
from flexinspect.rules.engine import FindingKind, fill_from_kind
from flexinspect.trace.file.writer import RuleReview, append_reviews
from flexinspect.trace.reader import TraceReader, open_trace

PROOF_KINDS = ("isolation", "order", "kernel", "cache")

LEAK, ISOLATED = "proof.leak", "proof.isolated"
UNREAD, UNSTABLE, ORDER = "proof.unread", "proof.unstable", "proof.order"
KERNEL_DIFFERS, KERNEL_SAME = "proof.kernel-differs", "proof.kernel-same"
KERNEL_UNSEEN = "proof.kernel-unseen"
CACHE_DIFFERS, CACHE_SAME = "proof.cache-differs", "proof.cache-same"

_CALLS_QUERY = (
    "SELECT step, layer, path, backend, mask, lse_error FROM calls "
    "WHERE generation = {generation} AND step = {step} AND layer = {layer}"
)
_STEPS_QUERY = (
    "SELECT step, q_len, kv_before, kv_after FROM steps "
    "WHERE generation = {generation} AND step <= {step} ORDER BY step DESC LIMIT 2"
)
_SEGMENTS_QUERY = "SELECT start, stop, label, kind FROM segments WHERE generation = {generation}"

PROOF_FINDINGS: Mapping[str, FindingKind] = {
    LEAK: FindingKind(
        Severity.ERROR,
        "a row changes when tokens that it must not attend to are changed",
        why="The output of this row depends on a segment that it was declared not to attend to, "
        "and every later layer and token that attends to the row propagates it.",
        confirm="Record the same run with flexinspect.watch and check the executed mask of the "
        "named layer, at the named row; then repeat the proof with that layer fixed.",
        fix="A direct leak is in that layer's own mask (another backend, no mask, spans off by "
        "one). A leak through other rows, mostly separators, ends when these rows belong to only "
        "one segment.",
        query=_CALLS_QUERY,
    ),
    ISOLATED: FindingKind(
        Severity.NOTE,
        "no row changes that must not attend to the changed tokens",
        why="The isolation is one of behaviour: it holds whatever the code does with its masks.",
        confirm="Add a leak (for instance a causal mask in one layer) and check that the proof "
        "fails.",
        fix="No action needed.",
        query=_SEGMENTS_QUERY,
    ),
    UNREAD: FindingKind(
        Severity.NOTE,
        "rows that may attend to a segment do not change when it is changed",
        why="A segment that no row of the answer attends to only costs time.",
        confirm="Check the row that chooses the next token in the mask panel: the segment's keys "
        "are closed, or a sliding window ends before them.",
        fix="Open the segment to the rows that should attend to it, or remove it from the prompt.",
        query=_SEGMENTS_QUERY,
    ),
    UNSTABLE: FindingKind(
        Severity.NOTE,
        "the same ids gave different hidden states in two runs",
        why="A change smaller than the difference between two equal runs cannot be distinguished "
        "from chance, so a leak that small is not detected.",
        confirm="Run the same ids twice and compare the logits bit by bit.",
        fix="Call model.eval(); start every run with an empty cache; on CUDA, "
        "torch.use_deterministic_algorithms(True).",
        query="SELECT key, value FROM run",
    ),
    ORDER: FindingKind(
        Severity.NOTE,
        "how much the next token's logits change when two segments are swapped",
        why="Equivalent segments that do not attend to each other differ only in their distance "
        "from the rows that attend to both; under rotary positions that changes the answer.",
        confirm="Run with the paraphrases in another order, and once more with --positions reset.",
        fix="Start the position ids of every segment at the same number if order must not matter.",
        query="SELECT pos, position_id, segment FROM tokens WHERE generation = {generation}",
    ),
    KERNEL_DIFFERS: FindingKind(
        Severity.ERROR,
        "the kernel's own weights are not the displayed ones",
        why="The displayed attention of this layer is not what ran, so no conclusion can be drawn "
        "from it; the kernel used another mask, scale or score than the recorded one.",
        confirm="Compare the received with the executed mask of the named call, at the named row "
        "and key.",
        fix="Rebuild the block mask from the intended mask_mod, for these lengths; for your own "
        "mask in drawn=, correct the named cell.",
        query=_CALLS_QUERY,
    ),
    KERNEL_SAME: FindingKind(
        Severity.NOTE,
        "the kernel's own weights are the displayed ones",
        why="The displayed attention of this run is what the kernel computed, cell by cell.",
        confirm="Pass another mask as drawn= and check that the proof names its first cell that "
        "differs.",
        fix="No action needed.",
        query=_CALLS_QUERY,
    ),
    KERNEL_UNSEEN: FindingKind(
        Severity.NOTE,
        "attention whose weights could not be recovered or compared",
        why="The proof says nothing about these layers.",
        confirm="Check in the path panel which function each layer called.",
        fix="Call a kernel that is observed (flex_attention, scaled_dot_product_attention, or a "
        "function registered with transformers), without dropout.",
        query=_CALLS_QUERY,
    ),
    CACHE_DIFFERS: FindingKind(
        Severity.ERROR,
        "a step with the cache differs from a full recompute by more than rounding",
        why="From this step on the model computes something else than without a cache: keys are "
        "missing, wrong, or closed for the new row.",
        confirm="Compare the step's key counts (cached before, open for the newest row) and its "
        "executed mask with those of the step before.",
        fix="Use the offset of a decode row in the mask, pass the cache to every layer, and "
        "continue the position ids where the prompt ended.",
        query=_STEPS_QUERY,
    ),
    CACHE_SAME: FindingKind(
        Severity.NOTE,
        "steps with the cache equal a full recompute but for rounding",
        why="The cache is correct, and decode rows attend to the keys that prompt rows attend to.",
        confirm="Close one key of a decode step by hand and check that the proof names step and "
        "layer.",
        fix="No action needed.",
        query=_STEPS_QUERY,
    ),
}
"""All kinds of findings of proofs, with their texts."""


@dataclass(frozen=True, slots=True)
class Proof:
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
        sentences = [
            f"{finding.severity}: {escape_unprintable(finding.sentence)}"
            for finding in sort_by_severity(self.findings)
        ]
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
        findings = [asdict(one) for one in sort_by_severity(self.findings)]
        return {
            "proof": self.kind,
            "holds": self.holds,
            "lines": list(self.lines),
            "findings": findings,
            "facts": dict(self.facts),
        }


def proof_finding(
    finding_id: str,
    sentence: str,
    *,
    severity: Severity | None = None,
    step: int | None = None,
    layer: int | None = None,
    head: int | None = None,
    positions: Sequence[int] = (),
    evidence: Mapping[str, Any] | None = None,
    layers: Sequence[int] = (),
) -> Finding:
    """Return a finding of a proof with the texts of its kind."""
    kind = PROOF_FINDINGS[finding_id]
    finding = Finding(
        finding_id,
        severity or kind.severity,
        sentence,
        step=step,
        layer=layer,
        head=head,
        positions=tuple(positions),
        evidence=evidence or {},
        layers=tuple(layers),
    )
    return fill_from_kind(kind, finding)


def format_amount(value: float) -> str:
    """Return a number for a sentence: "0.24", "3.1", "2e-07"."""
    if value == 0 or value != value or 100 <= value < 10_000:
        return f"{value:.0f}"
    return f"{value:.2g}" if 1e-3 <= value < 100 else f"{value:.0e}"


def _with_generation(finding: Finding, generation: int) -> Finding:
    before, now = f"generation = {finding.generation}", f"generation = {generation}"
    query = finding.query.replace(before, now)
    return replace(finding, generation=generation, query=query)


def _proved_generation(reader: TraceReader, proof: Proof, numbers: list[int]) -> int:
    """Return the generation that a proof belongs to, the first one if that is unknown."""
    sample = proof.facts.get("sample")
    if sample is None:
        return _same_prompt_generation(reader, str(proof.facts.get("fed", "")), numbers)
    for row in reader.generations():
        if row.sample_id == sample:
            return row.generation
    raise UsageError(
        f"{reader.path} has no generation of sample {sample!r}, so its proof is not stored.",
        hint="Use the trace of a run with the same data and --max-samples.",
    )


def _same_prompt_generation(reader: TraceReader, prompt_hash: str, numbers: list[int]) -> int:
    """Return the first generation with the prompt of the proof, else the first generation."""
    for number in numbers if prompt_hash else ():
        ids = [token.token_id for token in reader.tokens(number) if token.step is None]
        joined = ",".join(map(str, ids)).encode()
        if hashlib.blake2b(joined, digest_size=8).hexdigest() == prompt_hash:
            return number
    return numbers[0]
