"""Finds a beam search that does not reorder its cache.

Its numbers agree with the text in the cache, so no row diverges by itself. It is found by its
tokens: if each step feeds the best continuations of all beams, and some continue another beam than
the one whose keys are in their row, then that row's cache is of another beam.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from msgspec import Struct
from torch import Tensor

from flexinspect_hooks.audit.fed_sequence import FedStep, row_order
from flexinspect_hooks.audit.forward_edits import ForwardEdit
from flexinspect_hooks.audit.forward_run import HIDDEN, LOGITS, Point, Run
from flexinspect_hooks.audit.reference_model import ReferenceModel
from flexinspect_hooks.audit.row_comparison import Divergence, RowComparison, relative
from flexinspect_hooks.audit.search import Explanation, SearchResult

NAME = "cache.beam"


class BeamRow(Struct, frozen=True):
    """A batch row that agrees with the reference, whose logits are in `clean`."""

    comparison: RowComparison
    clean: Mapping[Point, Tensor]
    largest: float


class WrongBeam(Struct, frozen=True):
    """A row of a step that was fed a token of beam `parent`, while its cache is of another."""

    step: int
    row: int
    parent: int


def find_unordered(
    reference: ReferenceModel, rows: Sequence[BeamRow]
) -> tuple[int, Divergence, SearchResult] | None:
    """Return the first row whose cache is of another beam: its number, the place, the fault.

    `rows` are all rows of a generation. None if they are no beams of one prompt.
    """
    known = _tokens_and_logits(rows)
    for wrong in simulate(*known) or () if known is not None else ():
        row = rows[wrong.row]
        step = row.comparison.steps[wrong.step]
        parent = rows[wrong.parent].comparison.sequence
        position = int(step.positions[-1])
        ids = (*parent.ids[:position], row.comparison.sequence.ids[position])
        run = Run(torch.arange(len(ids), device=reference.device)[None])
        point, difference = _difference(row.comparison, step, reference.run(ids, run))
        limit = row.comparison.limits.get(point, 0.0)
        if difference > limit:
            at = Divergence(step.evidence.step, point, position, difference, limit)
            edit = _edit(wrong)
            found = Explanation((edit,), None, row.largest, 1, 1, 0, 0)
            return wrong.row, at, SearchResult(found, (NAME,), 1, is_cut=False)
    return None


def _tokens_and_logits(rows: Sequence[BeamRow]) -> tuple[list[list[int]], list[Tensor]] | None:
    """Return the tokens that each step but the first was fed, and the logits of the step before.

    None unless the rows have one prompt and each keeps its place in the cache.
    """
    sequences = [row.comparison.sequence for row in rows]
    steps = rows[0].comparison.steps
    evidence = [step.evidence for step in steps]
    if len({one.ids[: one.n_prompt] for one in sequences}) > 1 or len(steps) < 3:
        return None
    if any(len(row.comparison.steps) != len(steps) for row in rows):
        return None
    if any(one.ids is None or len(one.ids) != len(rows) for one in evidence[1:]):
        return None
    order = row_order(evidence)
    if any(known != list(range(len(rows))) for known in order[2:]):
        return None
    if any(len(step.positions) != 1 for step in steps[1:]):
        return None
    tokens, logits = [], []
    for before, step in pairwise(steps):
        last = int(before.positions[-1])
        if any(last not in row.comparison.logit_rows for row in rows):
            return None
        tokens.append([one.ids[int(step.positions[-1])] for one in sequences])
        at = rows[0].comparison.logit_rows.index(last)
        logits.append(torch.stack([row.clean[LOGITS, None][0, at] for row in rows]))
    return tokens, logits


def simulate(tokens: Sequence[Sequence[int]], logits: Sequence[Tensor]) -> list[WrongBeam] | None:
    """Simulate a beam search whose cache is never reordered; return its wrong rows.

    `tokens[n][row]` is fed in step n + 1, and `logits[n]` (rows, vocabulary) are those of step n.
    Returns None if some step does not feed the best continuations, so that it is no beam search.
    """
    n_rows = len(tokens[0])
    if n_rows < 2:
        return None
    scores = torch.full((n_rows,), -torch.inf, dtype=torch.float64)
    scores[0] = 0.0  # all rows have the same text at first
    wrong: list[WrongBeam] = []
    for step, (fed, row_logits) in enumerate(zip(tokens, logits, strict=True), 1):
        table = scores[:, None] + row_logits.double().cpu().log_softmax(-1)
        size = table.shape[1]
        best, places = (one.tolist() for one in table.flatten().topk(n_rows))
        left = [(at // size, at % size, score) for at, score in zip(places, best, strict=True)]
        for row, token in enumerate(fed):
            chosen = next((one for one in left if one[1] == token), None)
            if chosen is None:
                return None
            left.remove(chosen)
            scores[row] = chosen[2]
            if chosen[0] != row and step > 1:
                wrong.append(WrongBeam(step, row, chosen[0]))
    return wrong


def _difference(
    comparison: RowComparison, step: FedStep, values: Mapping[Point, Tensor]
) -> tuple[Point, float]:
    """Return the first layer whose newest hidden state differs, and by how much."""
    place, worst = (HIDDEN, 0), 0.0
    for point, kept in step.evidence.values.items():
        if point[0] != HIDDEN or point not in values or step.row >= len(kept):
            continue
        ours, theirs = kept[step.row][-1:], values[point][0][-1:]
        difference = float(relative(ours, theirs.to(ours.device)).max())
        if difference > comparison.limits.get(point, 0.0):
            return point, difference
        worst = max(worst, difference)
    return place, worst


def _edit(wrong: WrongBeam) -> ForwardEdit:
    """Return the fault as an edit, which has a name and a sentence and changes nothing."""
    sentence = (
        f"in which the cache row is from another beam: row {wrong.row} was fed a token that "
        f"continues row {wrong.parent}, and the cache was not reordered"
    )
    return ForwardEdit(name=NAME, sentence=sentence)
