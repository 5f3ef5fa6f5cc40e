"""Rewinding a running generation: equal bits, other tokens, bounded memory."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.journeys import (
    N_PROMPT,
    Trip,
    fresh_run,
    one_thread,
    other_token,
    prompt_of,
    rule_source,
    travelling,
)
from support.tiny import FAMILIES, make_model
from transformers.cache_utils import LinearAttentionLayer

from flexinspect.core.errors import UsageError
from flexinspect.records.job import SamplingOptions
from flexinspect_hooks.rewind.cache_shelf import (
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
def trip(small: Any) -> Iterator[Trip]:
    """A sampled generation of 10 tokens at its end."""
    with travelling(small, prompt_of(10)) as trip:
        trip.go()
        yield trip


# -- restore ---------------------------------------------------------------------------------------


def test_sampling_goes_on_with_equal_bits_from_20_restored_steps(llama: Any) -> None:
    with travelling(llama, prompt_of(32)) as trip:
        tokens = trip.go()
        assert len(set(tokens)) > 8  # it does sample
        pick = random.Random(0)
        for _ in range(20):
            step = pick.randrange(31)
            done = trip.journey.restore(0, step)
            assert done.cost.n_rows == 0
            assert done.reasons == ()
            trip.seen.clear()
            assert trip.go(3) == tokens[: min(step + 4, 32)]
            for number, logits in trip.seen.items():
                assert torch.equal(logits, trip.notes.logits[0, number])
        assert len(trip.journey.branches) == 1
        assert len(trip.notes.logits) == 32


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_restored_with_equal_bits(
    family: str, family_model: Callable[[str], Any]
) -> None:
    with travelling(family_model(family), prompt_of(6)) as trip:
        tokens = trip.go()
        done = trip.journey.restore(0, 1)
        slides = "sliding_window" in FAMILIES[family]
        # Keys that a sliding window has dropped are computed again, in the same way.
        assert (done.cost.n_forwards, done.cost.n_rows) == ((2, N_PROMPT + 1) if slides else (0, 0))
        assert done.reasons == ()
        trip.seen.clear()
        assert trip.go() == tokens
        assert sorted(trip.seen) == [2, 3, 4, 5]
        assert all(torch.equal(row, trip.notes.logits[0, n]) for n, row in trip.seen.items())


def test_layers_that_write_in_place_are_computed_again() -> None:
    hybrid = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    with travelling(make_model("lfm2", **hybrid), prompt_of(6)) as trip:
        tokens, end = trip.go(), trip.decoder.cache
        assert type(end.layers[0]) is LinearAttentionLayer
        assert trip.journey.restore(0, 5).cost.n_forwards == 6
        assert cache_bytes([end]) > row_bytes(end) * n_rows_of(end)  # its states count
        trip.journey.restore(0, 2)
        trip.seen.clear()
        assert trip.go() == tokens
        assert all(torch.equal(row, trip.notes.logits[0, n]) for n, row in trip.seen.items())
        trip.journey.fork(0, 3, [other_token(trip, 3)])
        forked = trip.go()
        trip.journey.restore(1, 4)
        assert trip.go() == forked
        assert len(trip.journey.branches) == 2


def test_a_sliding_window_that_has_dropped_nothing_is_cropped() -> None:
    model = make_model("mistral", sliding_window=64)
    with travelling(model, prompt_of(4)) as trip:
        tokens = trip.go()
        assert trip.journey.restore(0, 1).cost.n_forwards == 0
        assert trip.go() == tokens
        assert trip.notes.n_dropped == 2


def test_greedy_decoding_is_restored_too(small: Any) -> None:
    with travelling(small, prompt_of(5), sampling=SamplingOptions()) as trip:
        tokens = trip.go()
        trip.journey.restore(0, 0)
        assert trip.go() == tokens


def test_a_generation_goes_on_past_what_is_recorded_after_a_restore(small: Any) -> None:
    whole, _ = fresh_run(small, prompt_of(8), rule_source(prompt_of(8)), {})
    with travelling(small, prompt_of(8)) as trip:
        trip.go(5)
        trip.journey.restore(0, 1)
        assert trip.journey.is_replaying
        assert trip.go() == whole
        assert sorted(trip.notes.logits) == [(0, step) for step in range(8)]
        assert trip.notes.n_dropped == 3
        assert trip.notes.ends == [(0, "finished", "length")]


def test_a_restored_generation_ends_once_in_the_trace(trip: Trip) -> None:
    trip.journey.restore(0, 9)
    assert trip.journey.is_over
    trip.journey.restore(0, 4)
    trip.go()
    assert trip.notes.ends == [(0, "finished", "length")]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda model: model.lm_head.weight.mul_(1.01), "The weights of the model have changed."),
        (lambda model: model.train(), "The model is now in training mode."),
    ],
)
def test_a_replayed_step_that_differs_begins_a_branch_with_the_reason(
    spoil: Callable[[Any], object], why: str
) -> None:
    model = make_model("llama", attention_dropout=0.0)
    with travelling(model, prompt_of(5)) as trip:
        trip.go()
        trip.journey.restore(0, 1)
        spoil(model)
        if why.startswith("The model is now"):
            with torch.no_grad():
                model.lm_head.weight.data = model.lm_head.weight.data * 1.01
        stored = trip.journey._cache_store.items()[0][1]
        while len(trip.journey.branches) == 1:
            trip.journey.advance()
        assert [cache for _, cache in trip.journey._cache_store.items()] == [stored]  # as recorded
        trip.go()
        assert [branch_state.fork_step for branch_state in trip.journey.branches] == [0, 2]
        (change,) = trip.notes.begun
        assert change["kind"] == "replay"
        assert why in change["why"]
        ((_, text),) = [told for told in trip.notes.told if told[0] == "replay-differs"]
        assert "Step 2 differs from its recording." in text
        assert (1, "finished", "length") in trip.notes.ends
        assert {step for branch, step in trip.notes.logits if branch == 1} == {2, 3, 4}


def test_a_replayed_prefix_reports_a_changed_number_of_threads() -> None:
    model = make_model("mistral")
    torch.set_num_threads(2)
    with travelling(model, prompt_of(4)) as trip:
        trip.go()
        torch.set_num_threads(1)
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        why = trip.journey.restore(0, 2).reasons
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
def test_an_unknown_step_is_refused(trip: Trip, branch: int, step: int, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        trip.journey.restore(branch, step)


# -- fork ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 6])
def test_a_fork_equals_a_fresh_run_made_with_its_token(trip: Trip, small: Any, step: int) -> None:
    token = other_token(trip, step)
    branch_state = trip.journey.fork(0, step, [token])
    tokens = trip.go()
    fresh, logits = fresh_run(small, prompt_of(10), rule_source(prompt_of(10)), {step: token})
    assert tokens == fresh
    assert tokens[step] == token
    for number in range(step, 10):
        assert torch.equal(trip.notes.logits[branch_state.number, number], logits[number])


def test_a_fork_may_take_several_tokens(trip: Trip, small: Any) -> None:
    trip.journey.fork(0, 3, [11, 12, 13])
    forced = {3: 11, 4: 12, 5: 13}
    fresh, _ = fresh_run(small, prompt_of(10), rule_source(prompt_of(10)), forced)
    assert trip.go() == fresh
    assert fresh[3:6] == [11, 12, 13]


def test_branches_of_branches_are_restored_with_equal_bits(trip: Trip) -> None:
    trip.journey.fork(0, 3, [other_token(trip, 3)])
    first = trip.go()
    trip.journey.fork(1, 6, [other_token(trip, 6)])
    second = trip.go()
    assert first[:6] == second[:6]
    assert first[6] != second[6]
    for branch, tokens in ((1, first), (2, second), (0, None)):
        trip.journey.restore(branch, 1)
        trip.seen.clear()
        assert tokens is None or trip.go() == tokens
        branch_state = trip.journey.branches[branch]
        for step, row in trip.seen.items():
            assert torch.equal(row, trip.notes.logits[branch_state.owner(step).number, step])
    assert len(trip.journey.branches) == 3


def test_a_fork_before_the_fork_belongs_to_the_parent(trip: Trip) -> None:
    trip.journey.fork(0, 5, [other_token(trip, 5)])
    trip.go()
    branch_state = trip.journey.fork(1, 2, [other_token(trip, 2)])
    assert branch_state.parent is trip.journey.branches[0]


def test_the_tokens_of_a_branch_are_its_parents_before_the_fork(trip: Trip) -> None:
    base = trip.journey.branches[0].token_ids(10)
    one = trip.journey.fork(0, 6, [other_token(trip, 6)])
    trip.go()
    two = trip.journey.fork(one.number, 8, [(one.checkpoint(8).token_id + 7) % 290 + 3])
    trip.go()
    for n_steps in (0, 3, 6, 8, 10):
        assert two.token_ids(n_steps) == [two.checkpoint(step).token_id for step in range(n_steps)]
    assert two.token_ids(6) == base[:6]
    with pytest.raises(IndexError):
        two.token_ids(11)


def test_a_fork_to_the_chosen_token_is_refused(trip: Trip) -> None:
    chosen = trip.journey.branches[0].checkpoint(2).token_id
    with pytest.raises(UsageError, match="Step 2 chose that token already"):
        trip.journey.fork(0, 2, [chosen])


@pytest.mark.parametrize("token_id", [-1, "first outside", 10**20])
def test_an_unknown_token_is_refused_before_anything_changes(trip: Trip, token_id: Any) -> None:
    model: Any = trip.journey._model
    n_tokens = model.get_input_embeddings().num_embeddings
    token_id = n_tokens if token_id == "first outside" else token_id
    step = trip.journey.step
    message = f"Token {token_id} does not exist; this model has tokens 0 to {n_tokens - 1}."
    with pytest.raises(UsageError, match=re.escape(message)):
        trip.journey.fork(0, 2, [5, token_id])
    assert (len(trip.journey.branches), trip.journey.step) == (1, step)
    assert trip.notes.begun == []


def test_an_unfinished_branch_can_be_continued_and_ends_as_interrupted(
    trip: Trip, small: Any
) -> None:
    token = other_token(trip, 4)
    trip.journey.fork(0, 4, [token])
    trip.go(2)
    trip.journey.restore(0, 3)
    trip.journey.restore(1, 5)
    fresh, _ = fresh_run(small, prompt_of(10), rule_source(prompt_of(10)), {4: token})
    trip.go(2)
    assert trip.decoder.token_ids == fresh[:8]
    trip.journey.restore(0, 3)
    trip.journey.close("finished", "")
    assert trip.notes.ends == [(0, "finished", "length"), (1, "interrupted", "left at step 7")]


def test_memory_stays_bounded_over_50_forks(small: Any) -> None:
    with travelling(small, prompt_of(8)) as trip:
        trip.go()
        one = trip.journey.cache_bytes()
        for number in range(50):
            trip.journey.fork(0, 1 + number % 6, [3 + number])
            trip.go(2)
            assert trip.journey.cache_bytes() <= (MAX_STORED_CACHES + 1) * one
        assert len(trip.journey.branches) == 51
        assert trip.journey.restore_cost(0, 5).n_rows == 0  # the cache of branch 0 is never dropped


def test_the_cost_of_a_step_is_known_before(family_model: Callable[[str], Any]) -> None:
    with travelling(family_model("mistral"), prompt_of(5)) as trip:
        trip.go()
        cost = trip.journey.restore_cost(0, 3)
        assert (cost.n_forwards, cost.n_rows) == (4, N_PROMPT + 3)
        marks = trip.journey.branches[0].checkpoints[:4]
        assert cost.ms == pytest.approx(sum(mark.wall_ms for mark in marks))
        assert cost.n_bytes > 0
        assert trip.journey.step == 4  # asking costs nothing
