"""Compare the branches of a generation: the tree, tokens side by side, distributions, masks.

Everything is read from a trace. A branch is read with its parents' steps before the fork. The
`basis` of two compared distributions is "all logits" if both steps have the stream `logits.row`
(level extreme), otherwise "candidates": the tokens that both steps list among their top-k, with all
other tokens merged into one. Merging outcomes can only lower a KL divergence, so the latter is a
lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from flexinspect.records.step import Candidate, TokenRecord
from flexinspect.trace import queries
from flexinspect.trace.query_results import BranchRow
from flexinspect.trace.reader import TraceReader

LOGITS_STREAM = "logits.row"  # the stream with all logits of a step

Basis = Literal["all logits", "candidates"]


class BranchNode(NamedTuple):
    """A branch in the tree, `depth` levels below the base.

    `children` are the numbers of its forks, `change_text` says how it differs from its parent, and
    `n_steps` counts its own steps.
    """

    row: BranchRow
    depth: int
    children: tuple[int, ...]
    change_text: str
    n_steps: int


def branch_tree(reader: TraceReader, generation: int) -> list[BranchNode]:
    """Return all branches, each followed by its forks, in order. Raises `TraceError`."""
    rows = {row.branch: row for row in reader.branches(generation)}
    children: dict[int | None, list[int]] = {}
    for row in rows.values():
        parent = row.parent if row.parent in rows and row.parent != row.branch else None
        children.setdefault(parent, []).append(row.branch)

    def walk(branch: int, depth: int) -> Iterator[BranchNode]:
        row, forks = rows[branch], tuple(children.get(branch, ()))
        n_steps = reader.n_steps(generation, branch)
        yield BranchNode(row, depth, forks, describe_change(row.change), n_steps)
        for fork in forks:
            yield from walk(fork, depth + 1)

    return [node for branch in children.get(None, ()) for node in walk(branch, 0)]


def describe_change(change: Mapping[str, Any]) -> str:
    """Return how a branch differs from its parent, in a few words; empty for the base."""
    match change.get("kind"):
        case "token":
            token, instead = (
                repr(str(change[key])) if key in change else f"token {change.get(other)}"
                for key, other in (("text", "token_id"), ("instead_text", "instead_id"))
            )
            return f"{token} instead of {instead}"
        case "mask":
            edits = change.get("edits")
            text = "; ".join(map(str, edits)) if isinstance(edits, list) else "an edited mask"
            return text + (", all keys recomputed" if change.get("recomputed") else "")
        case "replay":
            return "the replayed step differed from the recorded one"
    return ""


class TokenPair(NamedTuple):
    """The tokens of two branches at one position; None where a branch is shorter."""

    pos: int
    one: TokenRecord | None
    other: TokenRecord | None

    @property
    def is_same(self) -> bool:
        """Whether both branches have the same token."""
        one, other = self.one, self.other
        return one is not None and other is not None and one.token_id == other.token_id


def token_pairs(
    reader: TraceReader, generation: int, one: int, other: int, start: int = 0, stop: int = 1 << 62
) -> list[TokenPair]:
    """Return the tokens of two branches at the positions `start <= pos < stop`, in order."""
    left, right = (
        {token.pos: token for token in queries.read_tokens(reader, generation, branch, start, stop)}
        for branch in (one, other)
    )
    return [TokenPair(p, left.get(p), right.get(p)) for p in sorted(left.keys() | right.keys())]


def common_steps(reader: TraceReader, generation: int, one: int, other: int) -> int:
    """Return the number of steps that two branches share before their forks."""
    left, right = (
        {(number, first) for number, first, _ in queries.lineage(reader, generation, branch)}
        for branch in (one, other)
    )
    return min((first for _, first in left ^ right), default=1 << 62)


def first_difference(reader: TraceReader, generation: int, one: int, other: int) -> int | None:
    """Return the first step that chose another token in `other`, None if there is none.

    A branch that ends earlier differs at the first step that it does not have.
    """
    start = common_steps(reader, generation, one, other)
    ends = [queries.step_bounds(reader, generation, branch) for branch in (one, other)]
    lasts = [end[1] for end in ends if end is not None]
    if len(lasts) < 2 or start > max(lasts):
        return None
    left, right = (
        queries.chosen_tokens(reader, generation, start, 1 << 62, each) for each in (one, other)
    )
    steps = sorted(left.keys() | right.keys())
    return next((step for step in steps if left.get(step) != right.get(step)), None)


class StepChange(NamedTuple):
    """How the distribution of a step differs in another branch.

    `kl` is the KL divergence of `other` from `one` in nats, sum p_one * ln(p_one / p_other), over
    the tokens of the `basis`. `changes` are (token id, text, logit in one, logit in other), largest
    change first; logits are those before any logits processor.
    """

    step: int
    basis: Basis
    kl: float
    changes: tuple[tuple[int, str, float, float], ...]

    @property
    def largest(self) -> float:
        """The largest absolute change of a logit; 0 without known changes."""
        return max((abs(b - a) for _, _, a, b in self.changes), default=0.0)


def step_change(
    reader: TraceReader, generation: int, step: int, one: int, other: int
) -> StepChange | None:
    """Return how a step's distribution differs between branches, None if a branch has none."""
    return side_change(step, (reader, generation, one), (reader, generation, other))


Side = tuple[TraceReader, int, int]
"""A branch of any trace: its reader, generation and branch."""


def side_change(step: int, one: Side, other: Side) -> StepChange | None:
    """Return how a step's distribution differs between two sides, None if a side has none."""
    places = [
        (reader, (generation, step, queries.branch_of_step(reader, generation, step, branch)))
        for reader, generation, branch in (one, other)
    ]
    left, right = (reader.candidates(*place) for reader, place in places)
    if not left or not right:
        return None
    rows = [
        reader.array(generation, at, LOGITS_STREAM, None, branch)
        for reader, (generation, at, branch) in places
    ]
    if rows[0] is not None and rows[1] is not None and rows[0].shape == rows[1].shape:
        return _change_from_logits(step, rows[0], rows[1], [*left, *right])
    return _change_from_candidates(step, left, right)


def _change_from_logits(
    step: int, one: npt.NDArray[Any], other: npt.NDArray[Any], listed: Sequence[Candidate]
) -> StepChange:
    wide = (row.astype(np.float64) for row in (one, other))
    p, q = (row - np.logaddexp.reduce(row) for row in wide)
    kept = ~np.isneginf(p)
    kl = float((np.exp(p[kept]) * (p[kept] - q[kept])).sum())
    texts = {candidate.token_id: candidate.text for candidate in listed}
    known = ((i, text, float(one[i]), float(other[i])) for i, text in texts.items())
    return StepChange(step, "all logits", max(kl, 0.0), _sort_by_change(known))


def _change_from_candidates(
    step: int, one: Sequence[Candidate], other: Sequence[Candidate]
) -> StepChange:
    known = {candidate.token_id: candidate for candidate in other}
    pairs = [(each, known[each.token_id]) for each in one if each.token_id in known]
    kl = sum(math.exp(a.logprob) * (a.logprob - b.logprob) for a, b in pairs)
    rest = [1 - sum(math.exp(pair[side].logprob) for pair in pairs) for side in (0, 1)]
    if rest[0] > 1e-12:
        kl += rest[0] * math.log(rest[0] / max(rest[1], 1e-12))
    changes = ((a.token_id, a.text, a.logit, b.logit) for a, b in pairs)
    kl = max(kl, _unlisted_bound(one, other), 0.0)
    return StepChange(step, "candidates", kl, _sort_by_change(changes))


def _unlisted_bound(one: Sequence[Candidate], other: Sequence[Candidate]) -> float:
    """Return a lower bound of the KL if `other` does not list likely tokens of `one`.

    A token that `other` does not list is at most as likely as the last of its highest ranks. The
    tokens that neither lists are one token, by the log sum inequality
    (https://en.wikipedia.org/wiki/Log_sum_inequality).
    """
    by_rank = {each.rank: each.logprob for each in other}
    ranks = next((rank for rank in range(len(by_rank) + 1) if rank not in by_rank), 0)
    if not ranks:
        return 0.0
    listed = {each.token_id: each.logprob for each in other}
    last = by_rank[ranks - 1]
    bounds = [(each.logprob, listed.get(each.token_id, last)) for each in one]
    kl = sum(math.exp(p) * (p - q) for p, q in bounds)
    shared = sum(math.exp(q) for each in one if (q := listed.get(each.token_id)) is not None)
    rest, other_rest = 1 - sum(math.exp(p) for p, _ in bounds), 1 - shared
    return kl + (rest * math.log(rest / max(other_rest, 1e-12)) if rest > 1e-12 else 0.0)


def _sort_by_change(
    changes: Iterator[tuple[int, str, float, float]],
) -> tuple[tuple[int, str, float, float], ...]:
    return tuple(sorted(changes, key=lambda change: (-abs(change[3] - change[2]), change[0])))


MAX_LISTED_CELLS = 256  # cells that a `MaskChange` lists at most; all of them are counted


class MaskChange(NamedTuple):
    """How the executed mask of a layer differs between two branches.

    Compared are the `n_rows` rows that both branches computed up to `step`. `opened` are cells,
    as positions (row, key) of the sequence, that are open in `other` and closed in `one`; `closed`
    are the reverse. Each lists at most `MAX_LISTED_CELLS`; `n_opened` and `n_closed` count all.
    """

    step: int
    layer: int
    n_rows: int
    n_opened: int
    n_closed: int
    opened: tuple[tuple[int, int], ...]
    closed: tuple[tuple[int, int], ...]


class MaskRows(NamedTuple):
    """The known rows of one head's executed mask: `cells` bool (n, n), `known` bool (n)."""

    layer: int
    cells: npt.NDArray[np.bool_]
    known: npt.NDArray[np.bool_]


class StepMask(NamedTuple):
    """The executed mask of one head in one step: `cells` bool (rows, keys).

    `row` and `key` are the positions in the sequence of the first row and key.
    """

    layer: int
    row: int
    key: int
    cells: npt.NDArray[np.bool_]


FindStepMask = Callable[[int, int], StepMask | None]
"""Finds the mask of a branch's own step: `find(branch, step)`."""


def mask_change(
    reader: TraceReader,
    generation: int,
    step: int,
    one: int,
    other: int,
    *,
    layer: int | None = None,
    head: int = 0,
    find: FindStepMask | None = None,
) -> MaskChange | None:
    """Return how the executed mask of a layer (None: the first) differs in another branch.

    None if a branch has no call of the layer, or no cells were recorded (level basic). For repeated
    calls, pass a `find` that caches the results of `step_mask`.
    """
    find = find or (lambda owner, at: step_mask(reader, generation, at, owner, layer, head))
    left, right = (mask_rows(reader, generation, step, each, find) for each in (one, other))
    if left is None or right is None:
        return None
    n = min(len(left.known), len(right.known))
    both = left.known[:n] & right.known[:n]
    a, b = (rows.cells[:n, :n] & both[:, None] for rows in (left, right))
    opened, closed = np.argwhere(b & ~a), np.argwhere(a & ~b)
    return MaskChange(
        step=step,
        layer=left.layer,
        n_rows=int(both.sum()),
        n_opened=len(opened),
        n_closed=len(closed),
        opened=tuple((int(row), int(key)) for row, key in opened[:MAX_LISTED_CELLS]),
        closed=tuple((int(row), int(key)) for row, key in closed[:MAX_LISTED_CELLS]),
    )


def mask_rows(
    reader: TraceReader, generation: int, step: int, branch: int, find: FindStepMask
) -> MaskRows | None:
    """Return the executed mask of all rows up to a step, None if none of its cells is known."""
    row = reader.step(generation, step, queries.branch_of_step(reader, generation, step, branch))
    if row is None:
        return None
    cells = np.zeros((row.kv_after, row.kv_after), np.bool_)
    known = np.zeros(row.kv_after, np.bool_)
    found_layer = None
    for owner, first, stop in reversed(queries.visible_lineage(reader, generation, branch, step)):
        for at in range(first, step + 1 if stop is None else min(stop, step + 1)):
            mask = find(owner, at)
            if mask is None:
                continue
            found_layer = mask.layer
            stop_row, stop_key = mask.row + len(mask.cells), mask.key + mask.cells.shape[1]
            if max(stop_row, stop_key) <= len(known):
                cells[mask.row : stop_row, mask.key : stop_key] = mask.cells
                known[mask.row : stop_row] = True
    return None if found_layer is None else MaskRows(found_layer, cells, known)


def step_mask(
    reader: TraceReader, generation: int, step: int, branch: int, layer: int | None, head: int
) -> StepMask | None:
    """Return the executed mask of a layer (None: the first) in a step, None if it is unknown."""
    row = reader.step(generation, step, branch)
    calls = [] if row is None else reader.calls(generation, step, branch)
    call = next((call for call in calls if layer in (None, call.layer)), None)
    mask = None if call is None or call.mask is None else reader.mask(call.mask)
    if row is None or call is None or mask is None or mask.cells is None:
        return None
    cells = mask.cells[min(max(head, 0), len(mask.cells) - 1)].copy()
    # Equal masks of several steps are one record, so the offsets come from the step.
    return StepMask(call.layer, row.kv_before, max(row.kv_after - mask.kv_len, 0), cells)
