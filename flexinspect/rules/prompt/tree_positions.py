"""Checks the position ids of proposals that are verified as a tree, in one forward.

Each node of the tree sees the cached text and its ancestors. In the text it stands behind its
parent, whatever its place in the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flexinspect.core.text import format_numbers
from flexinspect.masks.mask_presets import BoolArray
from flexinspect.records import imported
from flexinspect.records.finding import Finding
from flexinspect.records.step import StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import Findings, Rule, finding_kinds
from flexinspect.rules.masks import mask_views

TREE = "positions.tree"
_MAX_NODES = 256


class _Nodes(NamedTuple):
    """Nodes of a step whose position ids are not those of their depth."""

    generation: int
    step: int
    kv_after: int
    n_nodes: int
    wrong: tuple[tuple[int, int, int, int], ...]
    """Of each such node its number, its parent, its position id, and that of its depth."""

    def n_kept(self, step: StepRecord) -> int:
        """The nodes that the cache still has at the beginning of the next forward."""
        return max(self.n_nodes - (self.kv_after - step.kv_before), 0)


class TreePositionsRule(Rule):
    """Finds nodes of a tree with the position of their place in the input.

    Rows may have such ids on purpose, as segments of a prompt do. They are proposals if some of
    their keys are gone when the next forward of the model begins.
    """

    name = "tree_positions"
    needs = (imported.MASKS, imported.POSITIONS)
    findings = finding_kinds(TREE)

    def __init__(self) -> None:
        self._waiting: dict[str, _Nodes] = {}  # by model
        self._reported: set[str] = set()

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin a generation; the last step of the model may be in an earlier one."""
        super().on_generation_start(context)
        self._model = context.generation.model

    def on_step(self, step: StepRecord) -> Findings:
        """Look at the nodes of a step, and at the cache that is left of those before."""
        waiting = self._waiting.pop(self._model, None)
        if self._model in self._reported:
            return
        if waiting is not None and 0 < step.kv_before < waiting.kv_after:
            self._reported.add(self._model)
            yield self._finding(step, waiting)
        if step.branch or not step.kv_before or not 2 < step.q_len <= _MAX_NODES:
            return
        nodes = self._wrong_nodes(step)
        if nodes:
            place = self.context.generation.generation, step.step
            self._waiting[self._model] = _Nodes(*place, step.kv_after, step.q_len, nodes)

    def _wrong_nodes(self, step: StepRecord) -> tuple[tuple[int, int, int, int], ...]:
        ids = step.inputs.position_ids if step.inputs is not None else []
        if len(ids) != step.q_len:
            return ()
        found = set[tuple[tuple[int, int, int, int], ...]]()
        for view in mask_views.step_mask_views(step, self.context)[0]:
            cells = view.cells
            if view.first_key_pos or cells.shape[1:] != (step.q_len, step.kv_after):
                return ()
            parents = find_parents(cells[:, :, step.kv_before :])
            if parents is None or not cells[:, :, : step.kv_before].all():
                return ()
            found.add(_misplaced(parents, ids))
        return found.pop() if len(found) == 1 else ()

    def _finding(self, step: StepRecord, nodes: _Nodes) -> Finding:
        node, parent, is_now, right = nodes.wrong[0]
        numbers = [one[0] for one in nodes.wrong]
        behind = f"node {parent}" if parent >= 0 else "the cached text"
        sentence = (
            f"The forward before this one (generation {nodes.generation}, step {nodes.step}) "
            f"verified {nodes.n_nodes} nodes as a tree, of which {nodes.n_kept(step)} are kept. "
            f"{len(numbers)} of them ({format_numbers('node', numbers)}) do not have the position "
            f"of their depth: node {node} follows {behind}, but has the position id {is_now}, not "
            f"{right}: its place in the input, not in its branch. The keys of such nodes stay in "
            "the cache with these positions once they are accepted."
        )
        evidence = {"nodes": numbers, "n_nodes": nodes.n_nodes, "of_step": nodes.step}
        evidence |= {"of_generation": nodes.generation, "position": is_now, "right": right}
        return self.finding(step, TREE, sentence, evidence=evidence)


def find_parents(cells: BoolArray) -> list[int] | None:
    """Return the parent of each node, -1 without one, of bool (heads, nodes, nodes).

    Each node has to see itself, and else exactly what its parent sees. None if the nodes are no
    such tree, or one without branches.
    """
    if not (cells == cells[:1]).all():
        return None
    rows = cells[0]
    if not rows.diagonal().all() or np.triu(rows, 1).any():
        return None
    parents = []
    for node, row in enumerate(rows):
        seen = np.flatnonzero(row[:node])
        parent = int(seen[-1]) if len(seen) else -1
        if parent >= 0 and not np.array_equal(rows[parent, :node], row[:node]):
            return None
        parents.append(parent)
    is_chain = parents == list(range(-1, len(parents) - 1))
    return None if is_chain else parents


def _misplaced(parents: Sequence[int], ids: Sequence[int]) -> tuple[tuple[int, int, int, int], ...]:
    """Return the first nodes of branches, and all others, whose id is not that of their depth."""
    depths = list[int]()
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    right = [ids[0] - depths[0] + depth for depth in depths]
    pairs = enumerate(zip(parents, ids, right, strict=True))
    return tuple((n, parent, own, wanted) for n, (parent, own, wanted) in pairs if own != wanted)
