"""Branches of a generation: their tree, and one of them beside the branch it left, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexinspect.compare.steps import MaskDifference, StepDifference, compare_steps
from flexinspect.records import LogitsRecord, MaskRecord, StepRecord
from flexinspect.text import visible
from flexinspect.trace.ranges import holder, step_bounds
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.rows import BranchRow

FindMask = Callable[[str], MaskRecord | None]


@dataclass(frozen=True, slots=True)
class Node:
    """A branch in the tree, `depth` forks below branch 0."""

    row: BranchRow
    depth: int


@dataclass(frozen=True, slots=True)
class SideBySide:
    """One step of a branch beside the same step of its base.

    `texts` are what base and branch chose, None where one has no such step. `kl` is a lower bound
    of KL(base || branch) in nats, None without logits in both; `difference` is the rest, None when
    one of the two has no such step.
    """

    step: int
    texts: tuple[str | None, str | None]
    kl: float | None = None
    difference: StepDifference | None = None

    @property
    def is_parted(self) -> bool:
        """Whether the two chose different tokens."""
        return self.difference is not None and self.difference.is_parted


def tree(rows: Sequence[BranchRow]) -> list[Node]:
    """Return the branches as a tree, each right before those that left it."""
    children: dict[int | None, list[BranchRow]] = {}
    for row in rows:
        children.setdefault(row.parent, []).append(row)
    found: list[Node] = []
    waiting = [Node(row, 0) for row in reversed(children.get(None, []))]
    while waiting:
        node = waiting.pop()
        found.append(node)
        below = children.pop(node.row.branch, [])  # once: a damaged file cannot lead in a circle
        waiting += [Node(row, node.depth + 1) for row in reversed(below)]
    return found


def change_words(row: BranchRow) -> str:
    """Return in a few words what made a branch differ from the one it left."""
    change: Mapping[str, Any] = row.change
    kind = change.get("kind")
    if kind == "token":
        one, other = (visible(str(change.get(key, "?"))) for key in ("instead_text", "text"))
        return f"“{other}” instead of “{one}”"
    if kind == "mask":
        edits = change.get("edits")
        said = ", ".join(map(str, edits)) if isinstance(edits, list) else str(edits)
        how = "recomputed" if change.get("recomputed") else "cache kept"
        return f"{visible(said)} ({how})"
    if kind == "replay":
        return "a restored state went on differently"
    return visible(str(kind)) if kind else ""


def kl_bound(base: LogitsRecord | None, other: LogitsRecord | None) -> float | None:
    """Return a lower bound of KL(base || other) in nats, from the candidates of both.

    Tokens that both recorded count one by one, and all the rest as one: merging outcomes never
    raises the divergence (Cover & Thomas, Elements of Information Theory, theorem 2.7.1).
    """
    if base is None or other is None:
        return None
    p, q = (
        {c.token_id: math.exp(min(c.logprob, 0.0)) for c in record.candidates}
        for record in (base, other)
    )
    both = p.keys() & q.keys()
    pairs = [(p[token], q[token]) for token in both]
    pairs.append((1 - sum(a for a, _ in pairs), 1 - sum(b for _, b in pairs)))
    if any(math.isnan(value) for pair in pairs for value in pair):
        return None
    terms = [a * math.log(a / max(b, 1e-12)) for a, b in pairs if a > 1e-12]
    return max(sum(terms), 0.0)


def fork_of(row: BranchRow) -> int:
    """Return the first own step of a branch."""
    return row.fork_step or 0


def side_by_side(
    reader: TraceReader, row: BranchRow, start: int, stop: int, find_mask: FindMask
) -> list[SideBySide]:
    """Return the steps `start <= step < stop` of a branch beside those of its base."""
    generation, base = row.generation, row.parent or 0
    return [
        compare_places(reader, generation, (base, row.branch), step, find_mask)
        for step in range(max(start, fork_of(row)), stop)
    ]


def last_step(reader: TraceReader, row: BranchRow) -> int | None:
    """Return the last step of a branch or of its base, whichever goes further."""
    found = (
        step_bounds(reader, row.generation, branch) for branch in (row.branch, row.parent or 0)
    )
    return max((bounds[1] for bounds in found if bounds is not None), default=None)


def compare_places(
    reader: TraceReader,
    generation: int,
    branches: tuple[int, int],
    step: int,
    find_mask: FindMask,
) -> SideBySide:
    """Return one step of two branches side by side."""
    base, own = (_narrow(reader, generation, branch, step) for branch in branches)
    texts = (_text(reader, generation, base), _text(reader, generation, own))
    if base is None or own is None:
        return SideBySide(step, texts)
    difference = compare_steps(base, own, (find_mask, find_mask))
    return SideBySide(step, texts, kl_bound(base.logits, own.logits), difference)


def _narrow(reader: TraceReader, generation: int, branch: int, step: int) -> StepRecord | None:
    """Return what a comparison needs of a step, without its arrays."""
    where = holder(reader, generation, step, branch)
    about = reader.step(generation, step, where)
    if about is None:
        return None
    key = (generation, step, where)
    return StepRecord(
        *(generation, step, about.phase, about.q_len, about.kv_before, about.kv_after),
        *(about.started_at, about.wall_ms, about.capture_ms, where),
        logits=reader.logits(*key),
        inputs=reader.inputs(*key),
        calls=tuple(reader.calls(*key)),
    )


def _text(reader: TraceReader, generation: int, step: StepRecord | None) -> str | None:
    if step is None:
        return None
    tokens = reader.step_tokens(generation, step.step, step.branch)
    return tokens[-1].text if tokens else "?"


def mask_words(found: Sequence[MaskDifference]) -> str:
    """Return how masks differ in a few words: "3 cells", "all layers"; empty for none."""
    if not found:
        return ""
    one = found[0]
    if one.cells is None:
        return "another shape"
    return f"{one.cells} cell{'s' if one.cells != 1 else ''}"
