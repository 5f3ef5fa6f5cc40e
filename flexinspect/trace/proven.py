"""Storing what a proof found in a trace of the same run."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flexinspect.errors import UsageError
from flexinspect.findings import Finding
from flexinspect.trace.append import RuleReview, append_reviews
from flexinspect.trace.reader import TraceReader, open_trace

if TYPE_CHECKING:
    from flexinspect.proofs import Proof


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
