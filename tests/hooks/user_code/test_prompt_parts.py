"""Lists of token ids that a program holds are found in its prompt."""

from __future__ import annotations

import time
from collections import UserDict
from typing import Any

import torch

from flexinspect_hooks.user_code import prompt_parts
from flexinspect_hooks.user_code.prompt_parts import MIN_IDS


def parts_of(ids: list[int], n_pads: int = 0) -> list[tuple[str, int, int]]:
    """Return the parts that the function which calls this one holds."""
    found = prompt_parts.prompt_parts(ids, n_pads)
    return [(one.name, one.start, one.stop) for one in found]


def test_lists_tensors_and_encodings_are_found_by_name_and_place() -> None:
    questions = [[5, 6, 7, 8], [9, 10, 11]]
    context = torch.tensor([[20, 21, 22]])
    encodings = {"last": UserDict(input_ids=(30, 31, 32))}
    whole = [1, *context[0].tolist(), *questions[0], *questions[1], 30, 31, 32]
    assert parts_of(whole) == [
        ("context", 1, 4),
        ("questions[0]", 4, 8),
        ("questions[1]", 8, 11),
        ("encodings['last']['input_ids']", 11, 14),
    ]
    assert ("questions[0]", 6, 10) in parts_of([0, 0, *whole], 2)
    assert len(context[0]) == MIN_IDS
    assert encodings


def test_lists_that_are_elsewhere_twice_too_short_or_the_prompt_itself_are_no_parts() -> None:
    question, other, word, twice = [5, 6, 7], [7, 6, 5], [9, 10], [11, 12, 13]
    numbers, flags = [0.5, 1.5, 2.5], [True, False, True]
    whole = [*question, *word, *twice, *twice]
    assert parts_of(whole) == [("question", 0, 3)]
    assert other, (numbers, flags)


def test_keys_that_may_be_texts_of_the_user_are_not_quoted() -> None:
    answers: Any = {"What is it?": [5, 6, 7], 4: [8, 9, 10]}
    assert parts_of([1, 5, 6, 7, 8, 9, 10]) == [("answers[...]", 1, 4), ("answers[4]", 4, 7)]
    assert answers


def test_many_and_long_variables_take_a_few_milliseconds() -> None:
    repeated = [7] * 30_000
    heaps = [[[7] * 20_000 for _ in range(50)] for _ in range(20)]
    numbers = [[[0.5] * 256] * 256] * 256
    started = time.thread_time()
    parts_of(repeated)
    assert time.thread_time() - started < 0.2
    assert heaps, numbers


class Unreadable(UserDict[str, Any]):
    """A mapping of the program that cannot be read."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not now")

    @data.setter
    def data(self, value: Any) -> None:
        pass


def test_variables_that_cannot_be_read_leave_no_parts_and_raise_nothing() -> None:
    broken, question = Unreadable(), [5, 6, 7]
    assert parts_of([1, *question]) == []
    assert broken is not None
