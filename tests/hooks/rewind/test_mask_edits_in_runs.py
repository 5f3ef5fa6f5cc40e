"""Edited masks in a running generation: a branch equals a separate run with its mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.branching import (
    BranchingRun,
    branching_run,
    fresh_run,
    one_thread,
    other_token,
    preset_source,
    prompt_of,
    user_source,
)
from support.tiny import make_model
from torch import Tensor

from flexinspect.core.errors import MaskError
from flexinspect.masks import edits


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def small() -> Any:
    """A model whose logits are as large as those of trained ones: up to about 8."""
    return make_model("llama", initializer_range=0.3)


@pytest.fixture
def run(small: Any) -> Iterator[BranchingRun]:
    """A sampled generation of 10 tokens at its end."""
    with branching_run(small, prompt_of(10)) as run:
        run.advance()
        yield run


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
    run: BranchingRun, small: Any, text: str, recomputes: bool
) -> None:
    step, before = 4, list(run.decoder.token_ids[:4])
    branch = run.branching.edit_mask(0, step, [edits.parse_edit(text)])
    assert branch.recomputed is recomputes
    tokens = run.advance()
    fresh, logits = fresh_run(small, prompt_of(10), branch.source, dict(enumerate(before)))
    assert tokens == fresh
    for number in range(step, 10):
        mine = run.recorder.logits[branch.number, number]
        assert agree(mine, logits[number]) if recomputes else torch.equal(mine, logits[number])
    assert not torch.equal(logits[5 if "35" not in text else 6], run.recorder.logits[0, 6])


def test_an_edit_differs_only_by_the_rounding_of_a_single_row() -> None:
    """A matrix product of one row sums in another order than of many; negligible in float64."""
    model, prompt = make_model("llama").double(), prompt_of(8)
    with branching_run(model, prompt) as run:
        before = run.advance()[:4]
        branch = run.branching.edit_mask(0, 4, [edits.parse_edit("preset causal")])
        tokens = run.advance()
        fresh, logits = fresh_run(model, prompt, branch.source, dict(enumerate(before)))
        assert tokens == fresh
        assert all(agree(run.recorder.logits[1, n], logits[n], 1e-14) for n in range(4, 8))


@pytest.mark.parametrize("text", ["drop paraphrase 1", "cell 33 3 close"])
def test_an_edit_of_a_user_mask_mod_equals_a_fresh_run(small: Any, text: str) -> None:
    prompt = prompt_of(6)
    with branching_run(small, prompt, user_source()) as run:
        before = run.advance()[:3]
        branch = run.branching.edit_mask(0, 3, [edits.parse_edit(text)])
        assert branch.recomputed is text.startswith("drop")
        tokens = run.advance()
        fresh, logits = fresh_run(small, prompt, branch.source, dict(enumerate(before)))
        assert tokens == fresh
        mine = run.recorder.logits[1, 5]
        assert agree(mine, logits[5])


def test_edits_of_a_sliding_model_equal_a_fresh_run(family_model: Callable[[str], Any]) -> None:
    model, prompt = family_model("mistral"), prompt_of(6)
    with branching_run(model, prompt) as run:
        before = run.advance()[:3]
        for text in ("preset causal", "cell 32 31 close"):
            branch = run.branching.edit_mask(0, 3, [edits.parse_edit(text)])
            tokens = run.advance()
            fresh, logits = fresh_run(model, prompt, branch.source, dict(enumerate(before)))
            assert tokens == fresh
            mine = run.recorder.logits[branch.number, 5]
            assert agree(mine, logits[5])


def test_a_recomputed_branch_is_restored_and_forked_with_equal_bits(run: BranchingRun) -> None:
    run.branching.edit_mask(0, 4, [edits.parse_edit("preset causal")])
    tokens = run.advance()
    run.branching.restore(1, 2)  # before the edit, under the mask of the base
    assert run.advance() == tokens
    run.branching.restore(1, 6)
    assert run.advance() == tokens
    fork = run.branching.fork(1, 4, [other_token(run, 4)])
    assert fork.change["recomputed"] is True  # offline rules need to know what was prompt then
    forked = run.advance()
    assert forked[:4] == tokens[:4]
    for branch in (0, 2):
        run.branching.restore(branch, 4)
        run.advance()
    assert len(run.branching.branches) == 3
    assert not [event for event in run.recorder.events if event[0] == "replay-differs"]


def test_an_edit_of_later_rows_at_a_recomputed_step_equals_a_fresh_run(
    run: BranchingRun, small: Any
) -> None:
    before = list(run.decoder.token_ids[:4])
    run.branching.edit_mask(0, 4, [edits.parse_edit("preset causal")])
    run.advance()
    again = [edits.parse_edit("cell 33 3 close")]
    cost, n_changed = run.branching.edit_cost(1, 4, again)
    assert (cost.n_rows, cost.n_forwards, n_changed) == (34, 1, 0)
    branch = run.branching.edit_mask(1, 4, again)
    assert (branch.recomputed, branch.change["recomputed"]) == (True, True)
    assert "no computed row changes, but all keys" in branch.describe()
    tokens = run.advance()
    fresh, logits = fresh_run(small, prompt_of(10), branch.source, dict(enumerate(before)))
    assert tokens == fresh
    for number in range(4, 10):
        assert agree(run.recorder.logits[2, number], logits[number])


def test_a_recomputed_step_that_differs_is_recomputed_as_a_whole() -> None:
    model, forced = make_model("llama", initializer_range=0.3), [7, 8, 9]
    with branching_run(model, prompt_of(10)) as run:
        run.advance()
        run.branching.edit_mask(0, 4, [edits.parse_edit("preset causal")])
        run.advance(2)
        run.branching.fork(1, 4, forced)
        run.advance()
        run.branching.restore(2, 3)
        with torch.no_grad():
            model.lm_head.weight.mul_(1.01)
        tokens = run.advance()
        branch = run.branching.current_branch
        assert (branch.number, branch.fork_step, branch.recomputed) == (3, 4, True)
        assert branch.change["recomputed"] is True
        assert tokens[4:7] == forced
        first = run.seen[4]
        run.branching.restore(3, 3)
        assert run.advance() == tokens
        assert torch.equal(run.seen[4], first)
        assert len(run.branching.branches) == 4


def test_an_edit_at_the_prompt_runs_it_under_the_edited_mask(run: BranchingRun, small: Any) -> None:
    branch = run.branching.edit_mask(0, 0, [edits.parse_edit("preset document")])
    tokens = run.advance()
    fresh, logits = fresh_run(small, prompt_of(10), preset_source(prompt_of(10), "document"), {})
    assert tokens == fresh
    assert torch.equal(run.recorder.logits[branch.number, 0], logits[0])


def test_an_invalid_edit_changes_nothing(run: BranchingRun) -> None:
    with pytest.raises(MaskError, match="does not change"):
        run.branching.edit_mask(0, 4, [edits.parse_edit("preset segment-isolation")])
    assert len(run.branching.branches) == 1
    assert run.branching.is_over
