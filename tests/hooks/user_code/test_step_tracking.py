"""Forwards are assigned to generations and steps from their inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from flexinspect_hooks.user_code.step_tracking import (
    KEYS_REMOVED,
    OTHER_CACHE,
    OWN_CACHE,
    SEVERAL_ROWS,
    UNKNOWN_CACHE,
    CacheOwners,
    StepPlace,
    StepTracker,
)

ForwardInput = tuple[int, int, Callable[[], Sequence[int] | None]]


def never() -> Sequence[int]:
    raise AssertionError("the ids of a forward on a filled cache must not be waited for")


def forward_input(
    ids: Sequence[int] | None, cached: int = 0, n_rows: int | None = None
) -> ForwardInput:
    rows = n_rows if n_rows is not None else len(ids or ())
    return rows, cached, never if cached else lambda: ids


def places(*forwards: ForwardInput) -> list[StepPlace]:
    following = StepTracker()
    return [following.locate(*one) for one in forwards]


def where(found: Sequence[StepPlace]) -> list[tuple[int, int]]:
    return [(place.generation, place.step) for place in found]


def test_a_prompt_and_its_decode_forwards_are_one_generation() -> None:
    found = places(forward_input([5, 6, 7]), forward_input([8], 3), forward_input([9], 4))
    assert where(found) == [(0, 0), (0, 1), (0, 2)]
    assert [(p.begins_generation, p.pos, p.n_new, p.is_chosen) for p in found] == [
        (True, 0, 3, False),
        (False, 3, 1, True),
        (False, 4, 1, True),
    ]


def test_the_whole_sequence_with_one_more_token_continues_the_generation() -> None:
    found = places(forward_input([5, 6]), forward_input([5, 6, 7]), forward_input([5, 6, 7, 8]))
    assert where(found) == [(0, 0), (0, 1), (0, 2)]
    assert [(p.pos, p.n_new, p.is_chosen) for p in found[1:]] == [(2, 1, True), (3, 1, True)]


@pytest.mark.parametrize(
    "second",
    [[5, 6], [5, 9, 7], [5, 6, 7, 8], [5], [9]],
    ids=["the same", "another prefix", "two tokens more", "shorter", "another"],
)
def test_any_other_whole_sequence_begins_a_generation(second: list[int]) -> None:
    found = places(forward_input([5, 6]), forward_input(second))
    assert where(found) == [(0, 0), (1, 0)]
    assert found[1].n_new == len(second)


def test_a_prompt_that_extends_a_cached_generation_begins_another() -> None:
    found = places(
        forward_input([5, 6]),
        forward_input([7], 2),
        forward_input([5, 6, 7, 8]),
        forward_input([5, 6, 7, 8, 9]),
    )
    assert where(found) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    extended = places(forward_input([5, 6]), forward_input([7], 2), forward_input([5, 6, 7]))
    assert where(extended)[2] == (1, 0)


def test_a_first_token_without_a_cache_and_then_with_one_is_one_generation() -> None:
    found = places(forward_input([5, 6]), forward_input([5, 6, 7]), forward_input([8], 3))
    assert where(found) == [(0, 0), (0, 1), (0, 2)]
    assert found[2].is_chosen


def test_several_rows_on_a_cache_are_recorded_as_input() -> None:
    found = places(forward_input([5, 6]), forward_input([7, 8, 9], 2), forward_input([4], 5))
    assert where(found) == [(0, 0), (0, 1), (0, 2)]
    assert (found[1].pos, found[1].n_new, found[1].is_chosen, found[1].note) == (
        *(2, 3, False),
        SEVERAL_ROWS,
    )
    assert found[2].is_chosen


def test_a_cache_of_another_length_begins_a_generation_with_a_note() -> None:
    found = places(
        forward_input([5, 6]),
        forward_input([7], 9),
        forward_input([7], 10),
        forward_input([3, 4], 1),
    )
    assert where(found) == [(0, 0), (1, 0), (1, 1), (2, 0)]
    assert [place.note for place in found] == ["", UNKNOWN_CACHE, "", UNKNOWN_CACHE]
    assert (found[1].pos, found[3].pos) == (9, 1)


def test_a_token_behind_the_keys_of_its_own_shortened_cache_continues_the_generation() -> None:
    """A program removes keys before each token, or once."""
    each, once = StepTracker(), StepTracker()
    for following in (each, once):
        following.locate(*forward_input([5, 6, 7, 8]))
    found = [each.locate(1, 3, never, 0, lambda: 4)]
    found += [each.locate(1, 3, never, 0) for _ in range(2)]
    found += [each.locate(1, 2, never, 0), each.locate(2, 3, never, 0)]
    assert where(found) == [(0, step) for step in range(1, 6)]
    assert [(p.pos, p.n_new, p.is_chosen) for p in found] == [
        *((pos, 1, True) for pos in range(4, 8)),
        (8, 2, False),
    ]
    assert [place.note for place in found] == [KEYS_REMOVED, "", "", "", SEVERAL_ROWS]
    later = [once.locate(1, cached, never, 0, lambda: 4) for cached in (2, 3, 4)]
    assert [(p.generation, p.pos, p.note) for p in later] == [
        (0, 4, KEYS_REMOVED),
        (0, 5, ""),
        (0, 6, ""),
    ]


@pytest.mark.parametrize("position", [None, 2, 1], ids=["no position", "back", "with padding"])
def test_a_token_after_a_step_back_begins_a_generation(position: int | None) -> None:
    following = StepTracker()
    following.locate(*forward_input([5, 6, 7, 8]))
    place = following.locate(1, 2, never, 0, lambda: position)
    assert (place.generation, place.note) == (1, UNKNOWN_CACHE)


def test_keys_that_a_call_of_generate_removes_need_no_position() -> None:
    following = StepTracker()
    following.begin_generate(4)
    following.locate(*forward_input([5, 6, 7, 8]))
    place = following.locate(1, 2, never, 0)
    assert (place.generation, place.pos, place.is_chosen) == (0, 4, True)
    assert place.note == KEYS_REMOVED


def test_a_row_whose_position_follows_the_text_continues_it_on_a_cache_of_the_program() -> None:
    following = StepTracker()
    following.locate(*forward_input([5, 6, 7]))
    found = [
        following.locate(1, 0, lambda: [8], None, lambda n=n: n, lambda: True) for n in (3, 4, 5)
    ]
    assert where(found) == [(0, 1), (0, 2), (0, 3)]
    assert [(one.pos, one.is_chosen, one.has_own_cache) for one in found] == [
        (3, True, True),
        (4, True, True),
        (5, True, True),
    ]
    assert [one.note for one in found] == [OWN_CACHE, "", ""]
    plain = StepTracker()
    plain.locate(*forward_input([5, 6, 7]))
    assert plain.locate(1, 0, lambda: [8], None, lambda: 3).begins_generation


@pytest.mark.parametrize("position", [None, 0, 2, 4])
def test_a_row_at_any_other_position_is_a_prompt_of_its_own(position: int | None) -> None:
    following = StepTracker()
    following.locate(*forward_input([5, 6, 7]))
    place = following.locate(1, 0, lambda: [8], None, lambda: position, lambda: True)
    assert place.begins_generation
    assert not place.has_own_cache


def test_two_caches_of_one_length_are_distinguished() -> None:
    """Two interleaved prompts of one length do not mix their tokens."""
    following = StepTracker()
    found = [following.locate(*one) for one in (forward_input([5, 6]), forward_input([7, 8]))]
    found.append(following.locate(1, 2, never, owner=0))
    assert where(found) == [(0, 0), (1, 0), (2, 0)]
    assert (found[2].is_chosen, found[2].note, found[2].owner) == (False, OTHER_CACHE, 0)
    assert following.locate(1, 3, never, owner=2).is_chosen
    assert following.locate(1, 4, never).is_chosen, "a copy of the cache is as good"


def test_a_cache_is_known_as_long_as_it_lives_and_keeps_nothing_alive() -> None:
    class Cache:
        pass

    owners, cache = CacheOwners(), Cache()
    assert owners.owner_of(cache) is None
    owners.set_owner(cache, 3)
    owners.set_owner((1, 2), 4)
    assert (owners.owner_of(cache), owners.owner_of((1, 2)), owners.owner_of(None)) == (
        3,
        None,
        None,
    )
    for number in range(1000):
        owners.set_owner(Cache(), number)
    assert owners.owner_of(Cache()) is None
    assert len(owners._known) <= 256


def test_embeddings_have_no_ids_and_still_count() -> None:
    found = places(
        forward_input(None, n_rows=4), forward_input([7], 4), forward_input(None, n_rows=4)
    )
    assert where(found) == [(0, 0), (0, 1), (1, 0)]


def test_a_call_of_generate_is_one_generation_even_after_a_sequence_it_extends() -> None:
    following = StepTracker()
    first = following.locate(*forward_input([5, 6]))
    following.begin_generate(3)
    second = following.locate(*forward_input([5, 6, 7]))
    following.end()
    third = following.locate(*forward_input([5, 6, 7, 8]))
    assert where([first, second, third]) == [(0, 0), (1, 0), (2, 0)]


def test_a_prompt_in_chunks_of_generate_chooses_nothing_before_its_end() -> None:
    following = StepTracker()
    following.begin_generate(5)
    found = [
        following.locate(*one)
        for one in (forward_input([1, 2]), forward_input([3, 4], 2), forward_input([5], 4))
    ]
    found.append(following.locate(*forward_input([6], 5)))
    assert where(found) == [(0, step) for step in range(4)]
    assert [place.is_chosen for place in found] == [False, False, False, True]
    assert [place.note for place in found] == ["", SEVERAL_ROWS, SEVERAL_ROWS, ""]


def test_a_call_that_is_not_followed_has_steps_without_tokens() -> None:
    following = StepTracker()
    following.begin_generate(2, followed=False)
    found = [
        following.locate(*one)
        for one in (forward_input([1, 2]), forward_input([3, 4], 2), forward_input([3], 1))
    ]
    assert where(found) == [(0, 0), (0, 1), (0, 2)]
    assert [(place.n_new, place.is_chosen) for place in found[1:]] == [(0, False)] * 2


def test_a_forward_that_failed_may_be_tried_again() -> None:
    following = StepTracker()
    following.locate(*forward_input([1, 2]))
    failed = following.locate(*forward_input([3], 2))
    following.undo()
    again = following.locate(*forward_input([3], 2))
    assert failed == again
    assert again.is_chosen


def test_a_prompt_that_failed_keeps_its_number() -> None:
    following = StepTracker()
    following.locate(*forward_input([1, 2]))
    following.undo()
    assert following.locate(*forward_input([1, 2])).generation == 1


def test_no_forward_of_any_kind_is_lost_or_counted_twice() -> None:
    following = StepTracker()
    forwards: list[Any] = [
        forward_input([1, 2]),
        forward_input([3], 2),
        forward_input([9, 9, 9]),
        forward_input([4], 3),
        forward_input([4], 4),
    ]
    found = [following.locate(*one) for one in forwards]
    assert len(set(where(found))) == len(forwards)


def test_chunks_of_a_prompt_continue_it_on_a_cache_of_the_program() -> None:
    following = StepTracker()
    following.locate(*forward_input([5, 6, 7]))
    chunk = following.locate(2, 0, lambda: [8, 9], None, lambda: 4, lambda: True)
    token = following.locate(1, 0, lambda: [4], None, lambda: 5, lambda: True)
    assert (chunk.generation, chunk.step, chunk.pos, chunk.n_new) == (0, 1, 3, 2)
    assert (chunk.is_chosen, chunk.note, chunk.has_own_cache) == (False, SEVERAL_ROWS, True)
    assert (token.pos, token.is_chosen) == (5, True)


def test_rows_at_other_positions_are_a_prompt_of_their_own() -> None:
    following = StepTracker()
    following.locate(*forward_input([5, 6, 7]))
    assert following.locate(2, 0, lambda: [8, 9], None, lambda: 1, lambda: True).begins_generation
