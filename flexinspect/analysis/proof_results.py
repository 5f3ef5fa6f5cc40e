"""What a proof says: findings, the lines that tell what was done, and the facts in numbers.

A proof runs a model and judges what moved. The running is done by the capture side
(`flexinspect.prove`); here are the words, without torch.
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
from flexinspect.rules.engine import FindingKind
from flexinspect.trace.file.writer import RuleReview, append_reviews
from flexinspect.trace.reader import TraceReader, open_trace

PROOF_KINDS = ("isolation", "order", "kernel", "cache")

LEAK, ISOLATED = "proof.leak", "proof.isolated"
UNREAD, UNSTABLE, ORDER = "proof.unread", "proof.unstable", "proof.order"
KERNEL_DIFFERS, KERNEL_SAME = "proof.kernel-differs", "proof.kernel-same"
KERNEL_UNSEEN = "proof.kernel-unseen"
CACHE_DIFFERS, CACHE_SAME = "proof.cache-differs", "proof.cache-same"

_CALLS_QUERY = (
    "SELECT step, layer, path, backend, mask, gate FROM calls "
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
        "a row moved when tokens that it must not see were changed",
        why="What this row computes depends on a segment that it was declared not to see, and "
        "every later layer and token that reads the row carries it on.",
        confirm="Record the same run with flexinspect.watch and look at the executed mask of the "
        "named layer, at the named row; then run the proof again with that layer mended.",
        fix="A leak that is direct is in that layer's own mask (another backend, no mask, spans "
        "off by one); one that comes through other rows ends when these rows, mostly separators, "
        "belong to one segment alone.",
        query=_CALLS_QUERY,
    ),
    ISOLATED: FindingKind(
        Severity.NOTE,
        "no row moved that must not see what was changed",
        why="The isolation is one of behaviour: it holds whatever the code does with its masks.",
        confirm="Plant a leak (a causal mask in one layer, for instance) and see the proof fail.",
        fix="Nothing is to be mended.",
        query=_SEGMENTS_QUERY,
    ),
    UNREAD: FindingKind(
        Severity.NOTE,
        "rows that may see a segment do not move when it is changed",
        why="A segment that the answer's rows never read adds nothing to the answer but time.",
        confirm="Look at the mask panel at the row that chooses the next token: the segment's keys "
        "are closed, or a sliding window ends before them.",
        fix="Open the segment to the rows that should read it, or leave it out of the prompt.",
        query=_SEGMENTS_QUERY,
    ),
    UNSTABLE: FindingKind(
        Severity.NOTE,
        "the same ids gave other hidden states when they were run twice",
        why="What moves less than the run differs from itself cannot be told from chance, so a "
        "leak that small is not seen.",
        confirm="Run the same ids twice and compare the logits bit by bit.",
        fix="Call model.eval(); start every run with an empty cache; on CUDA, "
        "torch.use_deterministic_algorithms(True).",
        query="SELECT key, value FROM run",
    ),
    ORDER: FindingKind(
        Severity.NOTE,
        "how far the next token's logits move when two segments change places",
        why="Segments of equal rights that do not see each other differ only in their distance "
        "from the rows that read both; under rotary positions that changes the answer.",
        confirm="Ask with the paraphrases in another order, and once more with --positions reset.",
        fix="Begin the position ids of every segment at the same number if order must not matter.",
        query="SELECT pos, position_id, segment FROM tokens WHERE generation = {generation}",
    ),
    KERNEL_DIFFERS: FindingKind(
        Severity.ERROR,
        "the kernel's own weights are not those that are drawn",
        why="The picture of this layer's attention is not what ran, so nothing may be concluded "
        "from it; the kernel honoured another mask, scale or score than the one recorded.",
        confirm="Compare the received with the executed mask of the named call, at the named row "
        "and key.",
        fix="Build the block mask anew from the rule that is meant, for these lengths; for a mask "
        "of your own in drawn=, correct the named cell.",
        query=_CALLS_QUERY,
    ),
    KERNEL_SAME: FindingKind(
        Severity.NOTE,
        "the kernel's own weights are those that are drawn",
        why="The pictures of attention of this run show what the kernel did, cell by cell.",
        confirm="Give another mask as drawn= and see the proof name its first cell that differs.",
        fix="Nothing is to be mended.",
        query=_CALLS_QUERY,
    ),
    KERNEL_UNSEEN: FindingKind(
        Severity.NOTE,
        "attention whose weights could not be recovered or compared",
        why="Nothing is proven of these layers, for or against.",
        confirm="Look at the path panel: which function each layer called.",
        fix="Call a kernel that is watched (flex_attention, scaled_dot_product_attention, or a "
        "function registered with transformers), without dropout.",
        query=_CALLS_QUERY,
    ),
    CACHE_DIFFERS: FindingKind(
        Severity.ERROR,
        "a step with the cache differs from a full recompute by more than rounding",
        why="From this step on the model answers another question than without a cache: keys are "
        "missing, wrong, or hidden from the new row.",
        confirm="Look at the step's key counts (cached before, seen by the newest row) and at its "
        "executed mask, against those of the step before.",
        fix="Give a decode row its offset in the mask, hand the cache on to every layer, and go on "
        "with the position ids where the prompt ended.",
        query=_STEPS_QUERY,
    ),
    CACHE_SAME: FindingKind(
        Severity.NOTE,
        "steps with the cache equal a full recompute but for rounding",
        why="The cache holds what it should, and decode rows see what rows of a prompt see.",
        confirm="Mask one key of a decode step by hand and see the proof name step and layer.",
        fix="Nothing is to be mended.",
        query=_STEPS_QUERY,
    ),
}
"""All that a proof may find, with its words."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The outcome of one proof.

    `lines` say what was done and seen, `findings` what follows from it, `facts` the same in
    numbers, ready for JSON; docs/proofs.md names their keys for each kind.
    """

    kind: str
    lines: tuple[str, ...]
    findings: tuple[Finding, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether nothing was found that is an error."""
        return all(finding.severity is not Severity.ERROR for finding in self.findings)

    def __str__(self) -> str:
        said = [
            f"{one.severity}: {escape_unprintable(one.sentence)}"
            for one in sort_by_severity(self.findings)
        ]
        return "\n".join([*map(escape_unprintable, self.lines), *said])

    def add_to(self, trace: str | Path, generation: int | None = None) -> int:
        """Store the findings in a finished trace, and return the generation that has them.

        Without `generation` it is that of the same sample, if the proof is of our own
        generation; the one that was fed the same prompt, if it is of a program; else the first.
        Raises `UsageError` for a generation that is not there, `TraceWriteError` where the trace
        cannot be written to, `TraceError` for none.
        """
        return add_proof(self, Path(trace), generation)

    def as_json(self) -> dict[str, Any]:
        """Return everything for scripts: plain lists, numbers and strings."""
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
    """Return a finding of a proof with the words of its kind."""
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
        why=kind.why,
        confirm=kind.confirm,
        fix=kind.fix,
    )
    places = {
        "generation": finding.generation,
        "branch": finding.branch,
        "step": "step" if step is None else step,
        "layer": "layer" if layer is None else layer,
    }
    return replace(finding, query=kind.query.format(**places))


def format_amount(value: float) -> str:
    """Return a size in a sentence: "0.24", "3.1", "2e-07"."""
    if value == 0 or value != value:
        return f"{value:.0f}"
    if 100 <= value < 10_000:
        return f"{value:.0f}"
    return f"{value:.2g}" if 1e-3 <= value < 100 else f"{value:.0e}"


def add_proof(proof: Proof, path: Path, generation: int | None = None) -> int:
    """Store a proof's findings; see `Proof.add_to`."""
    with open_trace(path) as reader:
        numbers = [about.generation for about in reader.generations()]
        if not numbers or (generation is not None and generation not in numbers):
            which = "generation" if generation is None else f"generation {generation}"
            raise UsageError(f"{path} has no {which} to add a proof to.")
        if generation is None:
            generation = _proved_generation(reader, proof, numbers)
    at = time.time()
    findings = tuple(_with_generation(one, generation) for one in proof.findings)
    # A proof may be made again, after a repair: each has a name of its own.
    append_reviews(
        path, [RuleReview(f"prove {proof.kind} at {at:.3f}", generation, findings, (), at, 0.0)]
    )
    return generation


def _with_generation(finding: Finding, generation: int) -> Finding:
    before, now = f"generation = {finding.generation}", f"generation = {generation}"
    query = finding.query.replace(before, now)
    return replace(finding, generation=generation, query=query)


def _proved_generation(reader: TraceReader, proof: Proof, numbers: list[int]) -> int:
    """Return the generation that a proof is of; the first, if it does not say."""
    sample = proof.facts.get("sample")
    if sample is None:
        return _same_prompt_generation(reader, str(proof.facts.get("fed", "")), numbers)
    for about in reader.generations():
        if about.sample_id == sample:
            return about.generation
    raise UsageError(
        f"{reader.path} has no generation of sample {sample!r}, so its proof is not stored.",
        hint="Name a trace of a run with the same data and --max-samples.",
    )


def _same_prompt_generation(reader: TraceReader, prompt_hash: str, numbers: list[int]) -> int:
    """Return the first generation with the prompt that the proof was made on, else the first."""
    for number in numbers:
        ids = [token.token_id for token in reader.tokens(number) if token.step is None]
        listed = ",".join(map(str, ids))
        if (
            prompt_hash
            and hashlib.blake2b(listed.encode(), digest_size=8).hexdigest() == prompt_hash
        ):
            return number
    return numbers[0]
