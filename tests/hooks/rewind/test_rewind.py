"""Rewinding a running generation: equal bits, other tokens, bounded memory."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.branching import (
    N_PROMPT,
    BranchingRun,
    branching_run,
    fresh_run,
    one_thread,
    other_token,
    preset_source,
    prompt_of,
)
from support.tiny import FAMILIES, make_model
from transformers.cache_utils import LinearAttentionLayer

from flexinspect.core.errors import UsageError
from flexinspect.records.job import SamplingOptions
from flexinspect_hooks.rewind.branch_state import (
    MAX_STORED_CACHES,
    cache_bytes,
    n_rows_of,
    row_bytes,
)


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


# -- restore ---------------------------------------------------------------------------------------


def test_sampling_continues_with_equal_bits_from_20_restored_steps(llama: Any) -> None:
    with branching_run(llama, prompt_of(32)) as run:
        tokens = run.advance()
        assert len(set(tokens)) > 8  # it does sample
        rng = random.Random(0)
        for _ in range(20):
            step = rng.randrange(31)
            done = run.branching.restore(0, step)
            assert done.cost.n_rows == 0
            assert done.reasons == ()
            run.seen.clear()
            assert run.advance(3) == tokens[: min(step + 4, 32)]
            for number, logits in run.seen.items():
                assert torch.equal(logits, run.recorder.logits[0, number])
        assert len(run.branching.branches) == 1
        assert len(run.recorder.logits) == 32


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_restored_with_equal_bits(
    family: str, family_model: Callable[[str], Any]
) -> None:
    with branching_run(family_model(family), prompt_of(6)) as run:
        tokens = run.advance()
        done = run.branching.restore(0, 1)
        slides = "sliding_window" in FAMILIES[family]
        # Keys that a sliding window has dropped are computed again, in the same way.
        assert (done.cost.n_forwards, done.cost.n_rows) == ((2, N_PROMPT + 1) if slides else (0, 0))
        assert done.reasons == ()
        run.seen.clear()
        assert run.advance() == tokens
        assert sorted(run.seen) == [2, 3, 4, 5]
        assert all(torch.equal(row, run.recorder.logits[0, n]) for n, row in run.seen.items())


def test_layers_that_write_in_place_are_computed_again() -> None:
    hybrid = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    with branching_run(make_model("lfm2", **hybrid), prompt_of(6)) as run:
        tokens, end = run.advance(), run.decoder.cache
        assert type(end.layers[0]) is LinearAttentionLayer
        assert run.branching.restore(0, 5).cost.n_forwards == 6
        assert cache_bytes([end]) > row_bytes(end) * n_rows_of(end)  # its states count
        run.branching.restore(0, 2)
        run.seen.clear()
        assert run.advance() == tokens
        assert all(torch.equal(row, run.recorder.logits[0, n]) for n, row in run.seen.items())
        run.branching.fork(0, 3, [other_token(run, 3)])
        forked = run.advance()
        run.branching.restore(1, 4)
        assert run.advance() == forked
        assert len(run.branching.branches) == 2


def test_a_sliding_window_that_has_dropped_nothing_is_cropped() -> None:
    model = make_model("mistral", sliding_window=64)
    with branching_run(model, prompt_of(4)) as run:
        tokens = run.advance()
        assert run.branching.restore(0, 1).cost.n_forwards == 0
        assert run.advance() == tokens
        assert run.recorder.n_dropped == 2


def test_greedy_decoding_is_restored_too(small: Any) -> None:
    with branching_run(small, prompt_of(5), sampling=SamplingOptions()) as run:
        tokens = run.advance()
        run.branching.restore(0, 0)
        assert run.advance() == tokens


def test_a_generation_continues_past_what_is_recorded_after_a_restore(small: Any) -> None:
    whole, _ = fresh_run(small, prompt_of(8), preset_source(prompt_of(8)), {})
    with branching_run(small, prompt_of(8)) as run:
        run.advance(5)
        run.branching.restore(0, 1)
        assert run.decoder.step < run.branching.current_branch.n_steps
        assert run.advance() == whole
        assert sorted(run.recorder.logits) == [(0, step) for step in range(8)]
        assert run.recorder.n_dropped == 3
        assert run.recorder.ends == [(0, "finished", "length")]


def test_a_restored_generation_ends_once_in_the_trace(run: BranchingRun) -> None:
    run.branching.restore(0, 9)
    assert run.branching.is_over
    run.branching.restore(0, 4)
    run.advance()
    assert run.recorder.ends == [(0, "finished", "length")]


@pytest.mark.parametrize(
    ("corrupt", "why"),
    [
        (lambda model: model.lm_head.weight.mul_(1.01), "The weights of the model have changed."),
        (lambda model: model.train(), "The model is now in training mode."),
    ],
)
def test_a_replayed_step_that_differs_begins_a_branch_with_the_reason(
    corrupt: Callable[[Any], object], why: str
) -> None:
    model = make_model("llama", attention_dropout=0.0)
    with branching_run(model, prompt_of(5)) as run:
        run.advance()
        run.branching.restore(0, 1)
        corrupt(model)
        if why.startswith("The model is now"):
            with torch.no_grad():
                model.lm_head.weight.data = model.lm_head.weight.data * 1.01
        (stored,) = run.branching._cache_store.values()
        while len(run.branching.branches) == 1:
            run.branching.advance()
        assert list(run.branching._cache_store.values()) == [stored]  # as recorded
        run.advance()
        assert [branch_state.fork_step for branch_state in run.branching.branches] == [0, 2]
        (change,) = run.recorder.changes
        assert change["kind"] == "replay"
        assert why in change["why"]
        ((_, text),) = [event for event in run.recorder.events if event[0] == "replay-differs"]
        assert "Step 2 differs from its recording." in text
        assert (1, "finished", "length") in run.recorder.ends
        assert {step for branch, step in run.recorder.logits if branch == 1} == {2, 3, 4}


def test_a_replayed_prefix_reports_a_changed_number_of_threads() -> None:
    model = make_model("mistral")
    torch.set_num_threads(2)
    with branching_run(model, prompt_of(4)) as run:
        run.advance()
        torch.set_num_threads(1)
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        why = run.branching.restore(0, 2).reasons
        assert why[0] == "Step 0 differs from its recording."
        assert "torch ran on 2 threads and now runs on 1." in why
        assert "The weights of the model have changed." in why


@pytest.mark.parametrize(
    ("branch", "step", "message"),
    [
        (0, 10, "Branch 0 has no step 10; its steps go from 0 to 9."),
        (0, -1, "Branch 0 has no step -1; its steps go from 0 to 9."),
        (1, 0, "There is no branch 1; there are 1, numbered from 0."),
    ],
)
def test_an_unknown_step_is_refused(
    run: BranchingRun, branch: int, step: int, message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        run.branching.restore(branch, step)


# -- fork ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 6])
def test_a_fork_equals_a_fresh_run_made_with_its_token(
    run: BranchingRun, small: Any, step: int
) -> None:
    token = other_token(run, step)
    branch_state = run.branching.fork(0, step, [token])
    tokens = run.advance()
    fresh, logits = fresh_run(small, prompt_of(10), preset_source(prompt_of(10)), {step: token})
    assert tokens == fresh
    assert tokens[step] == token
    for number in range(step, 10):
        assert torch.equal(run.recorder.logits[branch_state.number, number], logits[number])


def test_a_fork_may_take_several_tokens(run: BranchingRun, small: Any) -> None:
    run.branching.fork(0, 3, [11, 12, 13])
    forced = {3: 11, 4: 12, 5: 13}
    fresh, _ = fresh_run(small, prompt_of(10), preset_source(prompt_of(10)), forced)
    assert run.advance() == fresh
    assert fresh[3:6] == [11, 12, 13]


def test_branches_of_branches_are_restored_with_equal_bits(run: BranchingRun) -> None:
    run.branching.fork(0, 3, [other_token(run, 3)])
    first = run.advance()
    run.branching.fork(1, 6, [other_token(run, 6)])
    second = run.advance()
    assert first[:6] == second[:6]
    assert first[6] != second[6]
    for branch, tokens in ((1, first), (2, second), (0, None)):
        run.branching.restore(branch, 1)
        run.seen.clear()
        assert tokens is None or run.advance() == tokens
        branch_state = run.branching.branches[branch]
        for step, row in run.seen.items():
            assert torch.equal(row, run.recorder.logits[branch_state.owner(step).number, step])
    assert len(run.branching.branches) == 3


def test_a_fork_before_the_fork_belongs_to_the_parent(run: BranchingRun) -> None:
    run.branching.fork(0, 5, [other_token(run, 5)])
    run.advance()
    branch_state = run.branching.fork(1, 2, [other_token(run, 2)])
    assert branch_state.parent is run.branching.branches[0]


def test_the_tokens_of_a_branch_are_its_parents_before_the_fork(run: BranchingRun) -> None:
    base = run.branching.branches[0].token_ids(10)
    one = run.branching.fork(0, 6, [other_token(run, 6)])
    run.advance()
    two = run.branching.fork(one.number, 8, [(one.checkpoint(8).token_id + 7) % 290 + 3])
    run.advance()
    for n_steps in (0, 3, 6, 8, 10):
        assert two.token_ids(n_steps) == [two.checkpoint(step).token_id for step in range(n_steps)]
    assert two.token_ids(6) == base[:6]
    with pytest.raises(IndexError):
        two.token_ids(11)


def test_a_fork_to_the_chosen_token_is_refused(run: BranchingRun) -> None:
    chosen = run.branching.branches[0].checkpoint(2).token_id
    with pytest.raises(UsageError, match="Step 2 chose that token already"):
        run.branching.fork(0, 2, [chosen])


@pytest.mark.parametrize("token_id", [-1, "first outside", 10**20])
def test_an_unknown_token_is_refused_before_anything_changes(
    run: BranchingRun, token_id: Any
) -> None:
    model: Any = run.branching._model
    n_tokens = model.get_input_embeddings().num_embeddings
    token_id = n_tokens if token_id == "first outside" else token_id
    step = run.branching.step
    message = f"Token {token_id} does not exist; this model has tokens 0 to {n_tokens - 1}."
    with pytest.raises(UsageError, match=re.escape(message)):
        run.branching.fork(0, 2, [5, token_id])
    assert (len(run.branching.branches), run.branching.step) == (1, step)
    assert run.recorder.changes == []


def test_an_unfinished_branch_can_be_continued_and_ends_as_interrupted(
    run: BranchingRun, small: Any
) -> None:
    token = other_token(run, 4)
    run.branching.fork(0, 4, [token])
    run.advance(2)
    run.branching.restore(0, 3)
    run.branching.restore(1, 5)
    fresh, _ = fresh_run(small, prompt_of(10), preset_source(prompt_of(10)), {4: token})
    run.advance(2)
    assert run.decoder.token_ids == fresh[:8]
    run.branching.restore(0, 3)
    run.branching.close("finished", "")
    assert run.recorder.ends == [(0, "finished", "length"), (1, "interrupted", "left at step 7")]


def test_memory_stays_bounded_over_50_forks(small: Any) -> None:
    with branching_run(small, prompt_of(8)) as run:
        run.advance()
        one = run.branching.cache_bytes()
        for number in range(50):
            run.branching.fork(0, 1 + number % 6, [3 + number])
            run.advance(2)
            assert run.branching.cache_bytes() <= (MAX_STORED_CACHES + 1) * one
        assert len(run.branching.branches) == 51
        assert (
            run.branching.restore_cost(0, 5).n_rows == 0
        )  # the cache of branch 0 is never dropped


def test_the_cost_of_a_step_is_known_before(family_model: Callable[[str], Any]) -> None:
    with branching_run(family_model("mistral"), prompt_of(5)) as run:
        run.advance()
        cost = run.branching.restore_cost(0, 3)
        assert (cost.n_forwards, cost.n_rows) == (4, N_PROMPT + 3)
        marks = run.branching.branches[0].checkpoints[:4]
        assert cost.ms == pytest.approx(sum(mark.wall_ms for mark in marks))
        assert cost.n_bytes > 0
        assert run.branching.step == 4  # asking costs nothing
