"""Finds a beam search whose cache is not in the order of its tokens.

Its numbers agree with the text in the cache, so no row diverges by itself. It is found by its
tokens: if each step feeds the best continuations of all beams, and some continue another beam than
the one whose keys are in their row, then that row's cache is of another beam. Where the rows of the
cache come from is known from its newest keys, see `beams`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from msgspec import Struct
from torch import Tensor

from flexinspect_hooks.audit.evidence.audited_sequence import row_order
from flexinspect_hooks.audit.evidence.row_comparison import Divergence, RowComparison, relative
from flexinspect_hooks.audit.evidence.step_evidence import StepEvidence
from flexinspect_hooks.audit.forward.forward_edits import ForwardEdit
from flexinspect_hooks.audit.forward.forward_run import HIDDEN, LOGITS, Point, Run
from flexinspect_hooks.audit.hypotheses.search import Explanation, SearchResult
from flexinspect_hooks.audit.reference.reference_model import ReferenceModel

NAME = "cache.beam"
MAX_TEXTS = 256
"""Rows of all steps that are followed: each text needs a forward of the reference."""

Text = tuple[int, ...]


class BeamRow(Struct, frozen=True):
    """A batch row that agrees with the reference, whose logits are in `clean`."""

    comparison: RowComparison
    clean: Mapping[Point, Tensor]
    largest: float


class WrongBeam(Struct, frozen=True):
    """A row of a step that was fed a token of beam `parent`, while its cache is of `cached`."""

    step: int
    row: int
    parent: int
    cached: int


class _Beams(Struct, frozen=True):
    """The steps of a beam search: by step and row, the text in the cache and the token fed.

    `order` are the rows of the step before that the rows of the cache come from.
    """

    texts: list[list[Text]]
    order: list[list[int]]


def find_unordered(
    reference: ReferenceModel, rows: Sequence[BeamRow]
) -> tuple[int, Divergence, SearchResult] | None:
    """Return the first row whose cache is of another beam: its number, the place, the fault.

    `rows` are all rows of a generation. None if they are no beams of one prompt.
    """
    evidence = [step.evidence for step in rows[0].comparison.steps]
    beams = _read_beams(evidence)
    if beams is None:
        return None
    for wrong in simulate(beams.texts, beams.order, _logits(reference, beams)) or ():
        row = rows[wrong.row]
        before, texts = beams.texts[wrong.step - 1], beams.texts[wrong.step]
        ids = (*before[wrong.parent], texts[wrong.row][-1])
        run = Run(torch.arange(len(ids), device=reference.device)[None])
        right = reference.run(ids, run)
        point, difference = _difference(
            row.comparison, evidence[wrong.step], wrong.row, len(ids) - 1, right
        )
        limit = row.comparison.limits.get(point, 0.0)
        if difference > limit:
            at = Divergence(evidence[wrong.step].step, point, len(ids) - 1, difference, limit)
            edit = _edit(wrong, beams)
            found = Explanation((edit,), None, row.largest, 1, 1, 0, 0)
            return wrong.row, at, SearchResult(found, (NAME,), 1, is_cut=False)
    return None


def _read_beams(evidence: Sequence[StepEvidence]) -> _Beams | None:
    """Return the texts of all rows, None if the rows are not those of one prompt."""
    n_rows = max(len(one.ids) if one.ids is not None else 0 for one in evidence)
    if len(evidence) < 3 or n_rows < 2 or n_rows * len(evidence) > MAX_TEXTS:
        return None
    first = evidence[0].ids
    if first is None or evidence[0].kv_before or not bool((first == first[0]).all()):
        return None
    if any(one.ids is None or len(one.ids) != n_rows or one.q_len != 1 for one in evidence[1:]):
        return None
    if evidence[0].padding is not None and not bool((evidence[0].padding != 0).all()):
        return None
    texts: list[list[Text]] = [[tuple(row) for row in first.tolist()]]
    order: list[list[int]] = [[]]
    for step, known in zip(evidence[1:], row_order(evidence)[1:], strict=True):
        assert step.ids is not None
        if known is None and len(texts[-1]) == 1:  # all rows continue the only one
            known = [0] * n_rows
        if known is None:
            return None
        tokens = step.ids[:, -1].tolist()
        texts.append([(*texts[-1][p], token) for p, token in zip(known, tokens, strict=True)])
        order.append(known)
    return _Beams(texts, order)


def _logits(reference: ReferenceModel, beams: _Beams) -> list[Tensor]:
    """Return the reference's logits after each text, (rows, vocabulary) by step."""
    known: dict[Text, Tensor] = {}
    n_prompt = len(beams.texts[0][0])
    for step in reversed(beams.texts):  # the longest texts first: they hold shorter ones
        for text in step:
            if text in known:
                continue
            rows = list(range(n_prompt - 1, len(text)))
            run = Run(torch.arange(len(text), device=reference.device)[None])
            table = reference.run(text, run, rows)[LOGITS, None][0]
            for row, logits in zip(rows, table, strict=True):
                known.setdefault(text[: row + 1], logits)
    return [torch.stack([known[text] for text in step]) for step in beams.texts]


def simulate(
    texts: Sequence[Sequence[Text]], order: Sequence[Sequence[int]], logits: Sequence[Tensor]
) -> list[WrongBeam] | None:
    """Simulate a beam search; return the rows whose cache is not that of their token's beam.

    `texts[n][row]` ends with the token that is fed in step n, whose cache continues row
    `order[n][row]` of the step before, and `logits[n]` (rows, vocabulary) are those after it.
    Returns None if some step does not feed the best continuations, so that it is no beam search.
    """
    n_rows = len(texts[-1])
    scores = torch.full((len(texts[0]),), -torch.inf, dtype=torch.float64)
    scores[0] = 0.0  # all rows have the same text at first
    wrong: list[WrongBeam] = []
    for step in range(1, len(texts)):
        table = scores[:, None] + logits[step - 1].double().cpu().log_softmax(-1)
        size = table.shape[1]
        best, places = (one.tolist() for one in table.flatten().topk(n_rows))
        left = [(at // size, at % size, score) for at, score in zip(places, best, strict=True)]
        scores = torch.full((n_rows,), -torch.inf, dtype=torch.float64)
        before = texts[step - 1]
        for row in sorted(range(n_rows), key=lambda r: not _fits(left, texts[step][r], before)):
            token, cached = texts[step][row][-1], order[step][row]
            same = [one for one in left if one[1] == token]
            if not same:
                return None
            own = [one for one in same if before[one[0]] == texts[step][row][:-1]]
            chosen = (own or same)[0]
            left.remove(chosen)
            scores[row] = chosen[2]
            if not own:
                wrong.append(WrongBeam(step, row, chosen[0], cached))
    return wrong


def _fits(left: Sequence[tuple[int, int, float]], text: Text, before: Sequence[Text]) -> bool:
    """Whether a row's token continues the text in its cache; such rows choose first."""
    return any(token == text[-1] and before[parent] == text[:-1] for parent, token, _ in left)


def _difference(
    comparison: RowComparison,
    evidence: StepEvidence,
    row: int,
    position: int,
    values: Mapping[Point, Tensor],
) -> tuple[Point, float]:
    """Return the first layer whose newest hidden state differs, and by how much."""
    place, worst = (HIDDEN, 0), 0.0
    for point, kept in evidence.values.items():
        if point[0] != HIDDEN or point not in values or row >= len(kept):
            continue
        ours, theirs = kept[row][-1:], values[point][0][position : position + 1]
        difference = float(relative(ours, theirs.to(ours.device)).max())
        if difference > comparison.limits.get(point, 0.0):
            return point, difference
        worst = max(worst, difference)
    return place, worst


def _edit(wrong: WrongBeam, beams: _Beams) -> ForwardEdit:
    """Return the fault as an edit, which has a name and a sentence and changes nothing."""
    order, n_rows = beams.order[wrong.step], len(beams.order[wrong.step])
    is_same = all(one == list(range(n_rows)) for one in beams.order[2:])
    why = "the cache was not reordered"
    if not is_same:
        rows = ", ".join(map(str, order))
        why = (
            f"its cache row is that of row {wrong.cached} of the step before (the rows of the "
            f"cache come from rows {rows}), so the cache and the tokens are in another order"
        )
    sentence = (
        f"in which the cache row is from another beam: row {wrong.row} was fed a token that "
        f"continues row {wrong.parent}, and {why}"
    )
    return ForwardEdit(name=NAME, sentence=sentence)
