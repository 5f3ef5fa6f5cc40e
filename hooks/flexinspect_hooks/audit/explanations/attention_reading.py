"""Reads from the output of an attention which heads and keys it used, and with which weights.

The output of a head is a sum of the values of its keys. Where a row has no more keys than a head
has channels, that sum has one solution: the weights that the program's attention must have had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from flexinspect_hooks.audit.evidence.difference_shape import positions_text

_MAX_KEYS = 256
_MAX_HEADS = 64
_SEEN = 1e-3
"""A weight from which a key counts as read."""
_EXACT = 2e-3


class HeadOutputs(Struct, frozen=True):
    """The attention of a layer: what the program gave, and what it was made from, in float64.

    `ours` and `theirs` are (rows, heads, size), of the rows at `positions`. `query` (heads, n,
    size), `key` and `value` (kv heads, n, size) are those of the reference. `allowed` (1 or heads,
    n, n) is its mask, and `scale` multiplies the scores.
    """

    ours: Tensor
    theirs: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    allowed: Tensor
    scale: float
    positions: tuple[int, ...]
    limit: float

    def is_plain(self) -> bool:
        """Whether softmax of the scaled scores gives the right output: not with a cap or sinks."""
        groups = self.query.shape[0] // self.key.shape[0]
        heads = range(self.query.shape[0])
        made = torch.stack([self.output(h, h // groups, h // groups) for h in heads], 1)
        return _near(made, self.theirs, self.limit)

    def weights(self, head: int, key_head: int) -> Tensor:
        """Return the softmax (rows, n) of a query head with a key head."""
        rows = list(self.positions)
        scores = self.query[head, rows] @ self.key[key_head].T * self.scale
        mask = self.allowed[head if self.allowed.shape[0] > 1 else 0, rows]
        return scores.masked_fill(~mask, -math.inf).softmax(-1)

    def output(self, head: int, key_head: int, value_head: int) -> Tensor:
        """Return the attention (rows, size) of one query head with a key and a value head."""
        return self.weights(head, key_head) @ self.value[value_head]


def _near(one: Tensor, other: Tensor, limit: float) -> bool:
    gap = (one - other).norm() / other.norm().clamp_min(1e-30)
    return bool(gap <= max(16 * limit, 1e-5))


def read_attention(given: HeadOutputs) -> str:
    """Return how the attention of the program was made, in a sentence; empty if it is not known."""
    n, heads = given.key.shape[1], given.query.shape[0]
    if n > _MAX_KEYS or heads > _MAX_HEADS or heads % given.key.shape[0] or not given.is_plain():
        return ""
    return _head_map(given) or _read_weights(given)


def _head_map(given: HeadOutputs) -> str:
    """Say which query, key and value head each head used, if that alone explains the output.

    The mean of all key or value heads counts as one more head.
    """
    heads, kv_heads = given.query.shape[0], given.key.shape[0]
    pools = [torch.cat((one, one.mean(0, keepdim=True))) for one in (given.key, given.value)]
    wide = replace(given, key=pools[0], value=pools[1])
    groups, limit = heads // kv_heads, max(16 * given.limit, 1e-5)
    found: dict[int, tuple[int, int, int]] = {}
    for query in range(heads):
        for key in range(kv_heads + 1):
            weights = wide.weights(query, key)
            for value in range(kv_heads + 1):
                made = weights @ wide.value[value]
                gap = (given.ours - made[:, None]).norm(dim=(0, 2))
                near = gap <= limit * made.norm().clamp_min(1e-30)
                for head in near.nonzero().flatten().tolist():
                    own = (head, head // groups, head // groups)
                    if head not in found or (query, key, value) == own:
                        found[head] = (query, key, value)
    if len(found) < heads:
        return ""
    wrong = [text for head in sorted(found) if (text := _used(head, found[head], groups, kv_heads))]
    if not wrong:
        return ""
    right = heads - len(wrong)
    rest = f"; the other {right} heads are right" if right else ""
    return f"The output is that of other heads: {', '.join(wrong[:8])}{rest}."


def _used(head: int, used: tuple[int, int, int], groups: int, kv_heads: int) -> str:
    """Return which heads a head used where they are not its own, empty if they are."""
    query, key, value = used
    its = head // groups

    def named(kind: str, number: int) -> str:
        if number == kv_heads:
            return f"the mean of all {kind} heads"
        return f"{kind} head {number}, not {its}"

    parts = [f"the query of head {query}"] if query != head else []
    if key == value != its:
        parts.append(named("key and value", key))
    else:
        parts += [named("key", key)] if key != its else []
        parts += [named("value", value)] if value != its else []
    return f"head {head} uses {' and '.join(parts)}" if parts else ""


# -- weights ---------------------------------------------------------------------------------------


class _Weights(Struct, frozen=True):
    """The weights of some heads, (heads, rows, keys): those of the program, and the right ones.

    `scores` are the scaled scores, also of keys that the mask closes.
    """

    ours: Tensor
    right: Tensor
    scores: Tensor
    heads: tuple[int, ...]
    positions: tuple[int, ...]

    def explained_by(self, candidate: Tensor) -> bool:
        """Whether other weights are those of the program."""
        return bool((self.ours - candidate).abs().max() < _EXACT)


def _read_weights(given: HeadOutputs) -> str:
    solved = _solve(given)
    if solved is None:
        return ""
    for test in _TESTS:
        if text := test(solved):
            which = ""
            if len(solved.heads) < given.query.shape[0]:
                heads = ", ".join(map(str, solved.heads[:8]))
                which = f" (in {'head' if len(solved.heads) == 1 else 'heads'} {heads} only)"
            return f"The weights of its softmax{which}, solved from the output: {text}."
    return ""


def _solve(given: HeadOutputs) -> _Weights | None:
    """Return the weights of heads that differ, for rows with a single solution."""
    size, groups = given.value.shape[-1], given.query.shape[0] // given.key.shape[0]
    rows = [k for k, place in enumerate(given.positions) if place < size]
    if not rows:
        return None
    # Of a prompt the keys of later rows are known as well; a row of a decode step has none.
    stop = max(given.positions[k] for k in rows) + 1
    gap = (given.ours - given.theirs)[rows].norm(dim=-1)
    wrong = (gap / given.theirs[rows].norm(dim=-1).clamp_min(1e-30)).amax(0) > given.limit
    ours, right, scores, heads = [], [], [], []
    for head in wrong.nonzero().flatten().tolist():
        values = given.value[head // groups, :stop]
        target = given.ours[rows, head]
        if torch.linalg.matrix_rank(values) < stop:
            return None
        solution = torch.linalg.lstsq(values.T, target.T).solution.T
        if not _near(solution @ values, target, 1e-4):
            return None  # values of its own, or keys that are not in the text
        ours.append(solution)
        right.append(given.weights(head, head // groups)[rows, :stop])
        places = [given.positions[k] for k in rows]
        products = given.query[head, places] @ given.key[head // groups, :stop].T
        scores.append(products * given.scale)
        heads.append(head)
    if not ours:
        return None
    where = tuple(given.positions[k] for k in rows)
    return _Weights(torch.stack(ours), torch.stack(right), torch.stack(scores), tuple(heads), where)


def _uniform(found: _Weights) -> str:
    seen = found.ours > _SEEN
    even = seen / seen.sum(-1, keepdim=True).clamp_min(1)
    if found.explained_by(even) and bool((seen.sum(-1) > 1).any()):
        return "all keys that a row reads have the same weight, so the scores have no effect"
    return ""


def _whole_factor(found: _Weights) -> str:
    total = found.ours.sum(-1, keepdim=True)
    if not found.explained_by(found.right * total) or bool(((total - 1).abs() < _EXACT).all()):
        return ""
    low, high = float(total.min()), float(total.max())
    if max(abs(low), abs(high)) < _EXACT:
        return "they are all zero, and so is the output"
    if high - low < _EXACT:
        return f"they are {low:.3g} times the right ones"
    return (
        f"they are the right ones, but add up to {low:.2g} to {high:.2g} in a row: the rest "
        "goes to keys that are not in the text, such as padding, or to no key"
    )


def _scaled_scores(found: _Weights) -> str:
    """Say by which factor the scores are scaled: the logarithms of the weights are then, too."""
    seen = (found.ours > _SEEN) & (found.right > _SEEN)
    if int(seen.sum()) < 6:
        return ""
    ours, right = found.ours.clamp_min(1e-12).log(), found.right.clamp_min(1e-12).log()
    n = seen.sum(-1, keepdim=True).clamp_min(1)
    centred = [
        torch.where(seen, one - torch.where(seen, one, 0).sum(-1, keepdim=True) / n, 0)
        for one in (ours, right)
    ]
    factor = float((centred[0] * centred[1]).sum() / centred[1].square().sum().clamp_min(1e-30))
    powered = torch.where(found.right > 0, found.right, 0).pow(max(factor, 1e-6))
    powered = torch.where(found.right > 0, powered, 0)
    if abs(factor - 1) < 0.01 or not found.explained_by(powered / powered.sum(-1, keepdim=True)):
        return ""
    return f"they are those of scores that are {factor:.3g} times the right ones"


def _over_rows(found: _Weights) -> str:
    """Say if the softmax was taken over the rows: each key's weights add up to 1."""
    total = found.ours.sum(-2)
    rows_add_up = bool(((found.ours.sum(-1) - 1).abs() < _EXACT).all())
    if rows_add_up or len(found.positions) < 3:
        return ""
    if bool(((total - 1).abs() < 0.01).all()):
        return "those of each key add up to 1, so the softmax is over the rows, not over the keys"
    return ""


def _cut(found: _Weights) -> str:
    """Say if small weights were set to zero, with or without raising the others."""
    gone = (found.ours.abs() < _SEEN / 2) & (found.right > _SEEN)
    left = found.right.masked_fill(gone, 0)
    if not bool(gone.any()):
        return ""
    largest = float(found.right[gone].max())
    smallest = float(found.right[~gone & (found.right > _SEEN)].min())
    if largest > smallest:
        return ""
    if found.explained_by(left):
        return f"those below {largest:.2g} are zero, and the others are not raised in their place"
    if found.explained_by(left / left.sum(-1, keepdim=True).clamp_min(1e-9)):
        return f"those below {largest:.2g} are zero, and the others are raised to add up to 1"
    return ""


def _other_keys(found: _Weights) -> str:
    """Say which keys are read that should not be, and which are not that should be."""
    seen = found.ours > _SEEN
    extra, missing = seen & (found.right <= 0), ~seen & (found.right > 4 * _SEEN)
    scores = found.scores.masked_fill(~(seen | ((found.right > 0) & ~missing)), -math.inf)
    is_softmax = found.explained_by(scores.softmax(-1).nan_to_num())
    parts = [
        *_cells(found, extra, "reads", "read"),
        *_cells(found, missing, "does not read", "do not read"),
    ]
    if not parts or not (is_softmax or _is_pattern(extra) or _is_pattern(missing)):
        return ""
    kind = "they are those of another mask: " if is_softmax else ""
    return kind + "; ".join(parts)


def _is_pattern(cells: Tensor) -> bool:
    """Whether cells (heads, rows, keys) lie in one key, or at one distance, of several rows."""
    pairs = cells.any(0).nonzero().tolist()
    rows, keys = {row for row, _ in pairs}, {key for _, key in pairs}
    distances = {row - key for row, key in pairs}
    return len(rows) > 2 and (len(keys) == 1 or len(distances) == 1)


def _cells(found: _Weights, cells: Tensor, one: str, many: str) -> Iterator[str]:
    """Yield which rows read keys, or do not, in (heads, rows, keys), by their pattern.

    `one` and `many` are the verb for one row and for several.
    """
    pairs = [(found.positions[row], key) for row, key in cells.any(0).nonzero().tolist()]
    if not pairs:
        return
    rows, keys = (sorted({pair[n] for pair in pairs}) for n in (0, 1))
    distances = {row - key for row, key in pairs}
    what = f"keys at {positions_text(keys)}"
    if len(keys) == 1:
        what = f"the key of position {keys[0]}"
    elif len(distances) == 1:
        what = _distance_text(distances.pop())
    if len(rows) == 1:
        yield f"the row at position {rows[0]} {one} {what}"
    else:
        yield f"{len(rows)} rows ({positions_text(rows)}) {many} {what}"


def _distance_text(distance: int) -> str:
    if distance == 0:
        return "their own key"
    return f"the key {abs(distance)} {'before' if distance > 0 else 'after'} their own"


def _moved_keys(found: _Weights) -> str:
    """Say if each weight is given to the value of another key at a fixed distance."""
    for shift in (1, -1, 2, -2):
        if found.explained_by(found.right.roll(shift, -1)):
            side = "after" if shift > 0 else "before"
            return f"each goes to the value {abs(shift)} {side} its key"
    return ""


def _distance_bias(found: _Weights) -> str:
    """Say if a bias that grows with the distance was added to the scores."""
    seen = (found.ours > _SEEN) & (found.right > _SEEN)
    if int(seen.sum()) < 8:
        return ""
    rows = torch.tensor(found.positions, dtype=torch.float64)[:, None]
    distance = rows - torch.arange(found.ours.shape[-1], dtype=torch.float64)[None]
    shift = found.ours.clamp_min(1e-12).log() - found.right.clamp_min(1e-12).log()
    slopes = []
    for head in range(len(found.heads)):
        pairs = [
            (distance[row][mask], shift[head, row][mask])
            for row, mask in enumerate(seen[head])
            if int(mask.sum()) > 1
        ]
        if not pairs:
            return ""
        x = torch.cat([one - one.mean() for one, _ in pairs])
        y = torch.cat([one - one.mean() for _, one in pairs])
        slopes.append(float((x * y).sum() / x.square().sum().clamp_min(1e-30)))
    bias = torch.tensor(slopes)[:, None, None] * distance
    made = (found.scores + bias).masked_fill(found.right <= 0, -math.inf).softmax(-1)
    if not found.explained_by(made.nan_to_num()):
        return ""
    listed = ", ".join(f"{one:.3g}" for one in slopes[:8])
    return f"a bias of {listed} for each position of distance is added to the scores (by head)"


_TESTS: tuple[Callable[[_Weights], str], ...] = (
    _uniform,
    _over_rows,
    _whole_factor,
    _scaled_scores,
    _cut,
    _moved_keys,
    _distance_bias,
    _other_keys,
)
