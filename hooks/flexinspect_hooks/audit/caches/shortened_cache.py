"""Judges steps that read a cache whose older keys were dropped, such as with attention sinks.

Which keys are left is not known. Usual are some at the beginning and the newest ones, once or
before each step (StreamingLLM, arXiv 2309.17453): each such choice is tried, with the positions of
the text, and with those that the program's forward had.
"""

from __future__ import annotations

import time

import torch
from msgspec import Struct
from torch import Tensor

from flexinspect_hooks.audit.evidence.audited_sequence import AuditedSequence
from flexinspect_hooks.audit.evidence.row_comparison import Divergence, RowComparison
from flexinspect_hooks.audit.forward.forward_edits import ForwardEdit, Scope
from flexinspect_hooks.audit.forward.forward_run import HIDDEN, Run
from flexinspect_hooks.audit.hypotheses.search import Explanation, SearchResult
from flexinspect_hooks.audit.reference.reference_model import ReferenceModel

MAX_CHOICES = 64
"""Choices of keys that are tried."""


class ShortenedResult(Struct, frozen=True):
    """Which keys are left, in words; and the divergence with its fault, None if there is none."""

    kept: str
    largest: float
    divergence: Divergence | None = None
    search: SearchResult | None = None


def explain_shortened(
    reference: ReferenceModel, comparison: RowComparison, deadline: float
) -> ShortenedResult | None:
    """Return under which keys, and positions, the steps after the loss agree; None if under none.

    Steps before the loss must agree as well.
    """
    sequence = comparison.sequence
    if not sequence.losses or sequence.padding or sequence.is_padded or sequence.stopped:
        return None
    before = sequence.losses[0][2]
    least = min(left for _, left, _ in sequence.losses)
    passed = sequence.passed_positions()
    tries: list[Tensor | None] = [None] if passed is None else [None, passed.to(reference.device)]
    for first in sorted(range(least + 1), key=lambda n: (n not in (4, 0, 1), n))[:MAX_CHOICES]:
        masks = _masks(reference, sequence, first)
        for positions in tries:
            if time.perf_counter() > deadline:
                return None
            result = _attempt(reference, comparison, masks, positions, before)
            if result is None:
                continue
            worst, scope_row = result
            kept = _kept(sequence, first)
            if positions is None:
                return ShortenedResult(kept, worst)
            return _positions_fault(reference, comparison, masks, positions, worst, kept, scope_row)
    return None


def _kept(sequence: AuditedSequence, first: int) -> str:
    step, left, before = sequence.losses[0]
    if len(sequence.losses) == 1:
        return f"the cache kept its first {first} and newest {left - first} of {before} keys"
    times = f"{len(sequence.losses)} times from step {step} on"
    return f"{times}, the cache kept its first {first} and its newest keys"


def _masks(reference: ReferenceModel, sequence: AuditedSequence, first: int) -> dict[int, Tensor]:
    n = len(sequence.ids)
    masks = {}
    for layer in reference.blocks:
        mask = reference.own_mask(layer, n).clone()
        for _, left, before in sequence.losses:
            mask[:, before:, first : before - (left - first)] = False
        masks[layer] = mask
    return masks


def _attempt(
    reference: ReferenceModel,
    comparison: RowComparison,
    masks: dict[int, Tensor],
    positions: Tensor | None,
    before: int,
) -> tuple[float, int] | None:
    values = reference.run(
        comparison.sequence.ids,
        _run(reference, comparison, masks, positions, before),
        comparison.logit_rows,
    )
    worst, agree, total = comparison.agreement(values, comparison.steps, None)
    return (worst, before) if total and agree == total else None


def _run(
    reference: ReferenceModel,
    comparison: RowComparison,
    masks: dict[int, Tensor],
    positions: Tensor | None,
    before: int,
) -> Run:
    n = len(comparison.sequence.ids)
    edits = []
    if positions is not None:
        edits = [(_edit(comparison.sequence, positions, before), Scope(before))]
    return Run(torch.arange(n, device=reference.device)[None], masks=masks, edits=edits)


def _edit(sequence: AuditedSequence, positions: Tensor, before: int) -> ForwardEdit:
    first = int(positions[0, before])
    whose = "that the program passed"
    if sequence.has_default_positions:
        whose = "that follow the length of the shortened cache"
    sentence = f"with position ids {whose} (from {first} on, where the text is at {before})"
    return ForwardEdit(
        name="positions.cache-length",
        sentence=sentence,
        positions=lambda _: positions,
        whole_model=True,
    )


def _positions_fault(
    reference: ReferenceModel,
    comparison: RowComparison,
    masks: dict[int, Tensor],
    positions: Tensor,
    worst: float,
    kept: str,
    before: int,
) -> ShortenedResult:
    """Return the result for a program whose positions are not those of the text."""
    right = reference.run(
        comparison.sequence.ids,
        _run(reference, comparison, masks, None, before),
        comparison.logit_rows,
    )
    at = comparison.first(right)
    step = comparison.steps[-1] if at is None else comparison.step_of(at)
    difference = comparison.agreement(right, [step], None)[0]
    layer = min(reference.blocks)
    point = (HIDDEN, layer) if at is None else at.point
    place = Divergence(
        step.evidence.step, point, step.first_row, difference, comparison.limits.get(point, 0.0)
    )
    n_later = len([s for s in comparison.steps if s.evidence.step > step.evidence.step])
    edit = _edit(comparison.sequence, positions, before)
    explanation = Explanation((edit,), None, worst, 1, 1, n_later, n_later)
    return ShortenedResult(
        kept, worst, place, SearchResult(explanation, (edit.name,), 1, is_cut=False)
    )
