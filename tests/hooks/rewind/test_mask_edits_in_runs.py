"""Edited masks in a running generation: a branch equals a separate run with its mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.journeys import (
    Trip,
    fresh_run,
    one_thread,
    other_token,
    own_source,
    prompt_of,
    rule_source,
    travelling,
)
from support.tiny import make_model
from torch import Tensor

from flexinspect.core.errors import MaskError
from flexinspect.masks import edits
from flexinspect_hooks.rewind.branching_decoder import describe_branch


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def small() -> Any:
    """A model whose logits are as large as those of trained ones: up to about 8."""
    return make_model("llama", initializer_range=0.3)


@pytest.fixture
def trip(small: Any) -> Iterator[Trip]:
    """A sampled generation of 10 tokens at its end."""
    with travelling(small, prompt_of(10)) as trip:
        trip.go()
        yield trip


def agree(mine: Tensor, fresh: Tensor, to: float = 1e-5) -> bool:
    """Whether logits agree relative to their scale, the largest of them, as rounding does."""
    return bool((mine - fresh).abs().max() <= to * fresh.abs().max())


EDITS = [
    ("preset causal", True),
    ("drop paraphrase 2", True),
    ("join paraphrase 1 and paraphrase 3", True),
    ("let paraphrase 3 see paraphrase 1", True),
    ("let cue not see paraphrase 1", True),
    ("cell 20 6", True),
    ("cell 33 3", False),
    ("row 20", True),
    ("row 35", False),
]


@pytest.mark.parametrize(("text", "recomputes"), EDITS)
def test_an_edit_equals_a_fresh_run_under_its_mask(
    trip: Trip, small: Any, text: str, recomputes: bool
) -> None:
    step, before = 4, list(trip.decoder.token_ids[:4])
    branch = trip.journey.edit_mask(0, step, [edits.parse_edit(text)])
    assert branch.recomputed is recomputes
    tokens = trip.go()
    fresh, logits = fresh_run(small, prompt_of(10), branch.source, dict(enumerate(before)))
    assert tokens == fresh
    for number in range(step, 10):
        mine = trip.notes.logits[branch.number, number]
        assert agree(mine, logits[number]) if recomputes else torch.equal(mine, logits[number])
    assert not torch.equal(logits[5 if "35" not in text else 6], trip.notes.logits[0, 6])


def test_an_edit_differs_only_by_the_rounding_of_a_single_row() -> None:
    """A matrix product of one row sums in another order than of many; negligible in float64."""
    model, prompt = make_model("llama").double(), prompt_of(8)
    with travelling(model, prompt) as trip:
        before = trip.go()[:4]
        branch = trip.journey.edit_mask(0, 4, [edits.parse_edit("preset causal")])
        tokens = trip.go()
        fresh, logits = fresh_run(model, prompt, branch.source, dict(enumerate(before)))
        assert tokens == fresh
        assert all(agree(trip.notes.logits[1, n], logits[n], 1e-14) for n in range(4, 8))


@pytest.mark.parametrize("text", ["drop paraphrase 1", "cell 33 3 close"])
def test_an_edit_of_a_user_mask_mod_equals_a_fresh_run(small: Any, text: str) -> None:
    prompt = prompt_of(6)
    with travelling(small, prompt, own_source()) as trip:
        before = trip.go()[:3]
        branch = trip.journey.edit_mask(0, 3, [edits.parse_edit(text)])
        assert branch.recomputed is text.startswith("drop")
        tokens = trip.go()
        fresh, logits = fresh_run(small, prompt, branch.source, dict(enumerate(before)))
        assert tokens == fresh
        mine = trip.notes.logits[1, 5]
        assert agree(mine, logits[5])


def test_edits_of_a_sliding_model_equal_a_fresh_run(family_model: Callable[[str], Any]) -> None:
    model, prompt = family_model("mistral"), prompt_of(6)
    with travelling(model, prompt) as trip:
        before = trip.go()[:3]
        for text in ("preset causal", "cell 32 31 close"):
            branch = trip.journey.edit_mask(0, 3, [edits.parse_edit(text)])
            tokens = trip.go()
            fresh, logits = fresh_run(model, prompt, branch.source, dict(enumerate(before)))
            assert tokens == fresh
            mine = trip.notes.logits[branch.number, 5]
            assert agree(mine, logits[5])


def test_a_recomputed_branch_is_restored_and_forked_with_equal_bits(trip: Trip) -> None:
    trip.journey.edit_mask(0, 4, [edits.parse_edit("preset causal")])
    tokens = trip.go()
    trip.journey.restore(1, 2)  # before the edit, under the mask of the base
    assert trip.go() == tokens
    trip.journey.restore(1, 6)
    assert trip.go() == tokens
    fork = trip.journey.fork(1, 4, [other_token(trip, 4)])
    assert fork.change["recomputed"] is True  # offline rules need to know what was prompt then
    forked = trip.go()
    assert forked[:4] == tokens[:4]
    for branch in (0, 2):
        trip.journey.restore(branch, 4)
        trip.go()
    assert len(trip.journey.branches) == 3
    assert not [told for told in trip.notes.told if told[0] == "replay-differs"]


def test_an_edit_of_later_rows_at_a_recomputed_step_equals_a_fresh_run(
    trip: Trip, small: Any
) -> None:
    before = list(trip.decoder.token_ids[:4])
    trip.journey.edit_mask(0, 4, [edits.parse_edit("preset causal")])
    trip.go()
    again = [edits.parse_edit("cell 33 3 close")]
    cost, n_changed = trip.journey.edit_cost(1, 4, again)
    assert (cost.n_rows, cost.n_forwards, n_changed) == (34, 1, 0)
    branch = trip.journey.edit_mask(1, 4, again)
    assert (branch.recomputed, branch.change["recomputed"]) == (True, True)
    assert "no computed row changes, but all keys" in describe_branch(branch)
    tokens = trip.go()
    fresh, logits = fresh_run(small, prompt_of(10), branch.source, dict(enumerate(before)))
    assert tokens == fresh
    for number in range(4, 10):
        assert agree(trip.notes.logits[2, number], logits[number])


def test_a_recomputed_step_that_differs_is_recomputed_as_a_whole() -> None:
    model, forced = make_model("llama", initializer_range=0.3), [7, 8, 9]
    with travelling(model, prompt_of(10)) as trip:
        trip.go()
        trip.journey.edit_mask(0, 4, [edits.parse_edit("preset causal")])
        trip.go(2)
        trip.journey.fork(1, 4, forced)
        trip.go()
        trip.journey.restore(2, 3)
        with torch.no_grad():
            model.lm_head.weight.mul_(1.01)
        tokens = trip.go()
        branch = trip.journey.current_branch
        assert (branch.number, branch.fork_step, branch.recomputed) == (3, 4, True)
        assert branch.change["recomputed"] is True
        assert tokens[4:7] == forced
        first = trip.seen[4]
        trip.journey.restore(3, 3)
        assert trip.go() == tokens
        assert torch.equal(trip.seen[4], first)
        assert len(trip.journey.branches) == 4


def test_an_edit_at_the_prompt_runs_it_under_the_edited_mask(trip: Trip, small: Any) -> None:
    branch = trip.journey.edit_mask(0, 0, [edits.parse_edit("preset document")])
    tokens = trip.go()
    fresh, logits = fresh_run(small, prompt_of(10), rule_source(prompt_of(10), "document"), {})
    assert tokens == fresh
    assert torch.equal(trip.notes.logits[branch.number, 0], logits[0])


def test_an_invalid_edit_changes_nothing(trip: Trip) -> None:
    with pytest.raises(MaskError, match="changes nothing"):
        trip.journey.edit_mask(0, 4, [edits.parse_edit("preset segment-isolation")])
    assert len(trip.journey.branches) == 1
    assert trip.journey.is_over
