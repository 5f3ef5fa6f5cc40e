"""Position ids of proposals that are verified as a tree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from support.planting import of, planted, serious
from support.tiny import ids as prompt_ids
from support.tiny import make_model
from support.traces import sample_generation, sample_step
from transformers import DynamicCache

from flexinspect.masks.mask_presets import BoolArray
from flexinspect.records.finding import Finding
from flexinspect.records.step import CallRecord, InputsRecord, MaskRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.prompt.tree_positions import TreePositionsRule, find_parents

PARENT = (-1, 0, 1, 0, 3)
PAST = 6


def tree_of(parents: tuple[int, ...]) -> BoolArray:
    rows = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            rows[node] |= rows[parent]
    return rows


def look(
    parents: tuple[int, ...], positions: tuple[tuple[int, int], ...], kept: int
) -> list[Finding]:
    """Return the findings of a forward over a tree, and of one after it, in a new generation."""
    rule, found = TreePositionsRule(), list[Finding]()
    n = len(parents)
    tree = np.concatenate((np.ones((n, PAST), np.bool_), tree_of(parents)), axis=1)
    one = np.ones((1, PAST + kept + 1), np.bool_)
    forwards = ((tree, positions), (one, ((PAST + kept, 1),)))
    for number, (cells, ids) in enumerate(forwards):
        n_rows, n_keys = cells.shape
        context = RuleContext()
        context.start_generation(
            replace(sample_generation(number), generation=number, segments=(), declared={})
        )
        rule.on_generation_start(context)
        mask = MaskRecord("m", "block", 1, 1, n_rows, n_keys, n_keys - n_rows, cells=cells[None])
        call = CallRecord(0, "sdpa", "", "m", 1, 2, 2, n_rows, n_keys, 8, "float32", None)
        step = replace(
            sample_step(0),
            q_len=n_rows,
            kv_before=n_keys - n_rows,
            kv_after=n_keys,
            masks=(mask,),
            calls=(call,),
            inputs=InputsRecord(1, ids),
        )
        context.add_step(step)
        found += rule.on_step(step)
    return found


def test_nodes_with_the_positions_of_their_places_are_reported() -> None:
    (finding,) = look(PARENT, ((PAST, 5),), kept=2)
    assert finding.id == "positions.tree"
    assert finding.evidence["nodes"] == [3, 4]
    assert "verified 5 nodes as a tree, of which 2 are kept" in finding.sentence
    assert "node 3 follows node 0, but has the position id 9, not 7" in finding.sentence


def test_nodes_of_several_roots_are_reported() -> None:
    (finding,) = look((-1, 0, -1, 2), ((PAST, 4),), kept=1)
    assert "node 2 follows the cached text, but has the position id 8, not 6" in finding.sentence


@pytest.mark.parametrize(
    ("parents", "positions", "kept"),
    [
        (PARENT, ((PAST, 3), (PAST + 1, 2)), 2),
        ((-1, 0, -1, 2), ((PAST, 2), (PAST, 2)), 1),
        ((-1, 0, 1, 2, 3), ((PAST, 5),), 2),
        # Segments of a text that is read in chunks, all of whose keys are kept.
        (PARENT, ((PAST, 5),), 5),
    ],
    ids=["depths", "several roots", "a chain", "segments"],
)
def test_nodes_with_the_positions_of_their_depth_and_segments_are_clean(
    parents: tuple[int, ...], positions: tuple[tuple[int, int], ...], kept: int
) -> None:
    assert look(parents, positions, kept) == []


def test_parents_of_what_is_no_tree_are_not_known() -> None:
    assert find_parents(tree_of(PARENT)[None]) == list(PARENT)
    window = np.tri(5, dtype=np.bool_) & ~np.tri(5, k=-2, dtype=np.bool_)
    for cells in (np.tri(5, dtype=np.bool_), window, np.ones((5, 5), np.bool_)):
        assert find_parents(cells[None]) is None


@pytest.mark.parametrize("is_right", [False, True])
def test_a_loop_that_verifies_two_branches(tmp_path: Path, is_right: bool) -> None:
    model, text = make_model("llama"), prompt_ids(8, 3)
    tree, past = torch.from_numpy(tree_of(PARENT)), 8
    depths = tree.sum(-1) - 1

    def run() -> None:
        cache = DynamicCache(config=model.config)
        model(torch.tensor([text]), past_key_values=cache)
        for n_before in (past, past + 1):
            allowed = torch.cat([torch.ones(5, n_before, dtype=torch.bool), tree], 1)
            mask = torch.zeros(1, 1, 5, n_before + 5).masked_fill(~allowed, -1e9)
            places = n_before + (depths if is_right else torch.arange(5))
            model(
                torch.tensor([[5, 9, 12, 7, 3]]),
                attention_mask=mask,
                position_ids=places[None],
                past_key_values=cache,
            )
            cache.crop(-4)

    found = planted(tmp_path, model, run)
    assert len(of(found, "positions.tree")) == (not is_right)
    if is_right:
        assert serious(found) == []
