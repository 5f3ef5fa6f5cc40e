"""Lists of token ids in the variables of the program that are parts of a prompt, such as questions.

A program that makes a prompt of several texts mostly still has their ids when it calls the model.
Where its mask cuts the prompt inside of one of these lists, it has counted positions wrongly.
"""

from __future__ import annotations

import sys
import time
from collections import UserDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from flexinspect.records.prompt import PromptPart
from flexinspect_hooks.debugger.frames import is_user_frame
from flexinspect_hooks.python_internals.frame_variables import variables_of

MIN_IDS = 3
"""A shorter list may be in a prompt by chance."""
_BUDGET_S = 0.003
"""CPU time for each prompt, after which no further list is looked for."""
_MAX_FRAMES, _MAX_DEPTH, _MAX_ITEMS, _MAX_PARTS, _MAX_TRIES = 8, 3, 256, 64, 64


def prompt_parts(ids: Sequence[int], n_pads: int = 0) -> tuple[PromptPart, ...]:
    """Return the lists of the program that are at one place of a prompt each, by position.

    The program's functions that run in this thread are searched, from the innermost one on. A list
    that is the whole prompt, or that is at several places of it, is left out.
    """
    text, deadline = list(ids)[n_pads:], time.thread_time() + _BUDGET_S
    found: dict[tuple[int, int], str] = {}
    try:
        for name, part in _variables(len(text), deadline):
            if len(found) >= _MAX_PARTS or time.thread_time() > deadline:
                break
            places = [*islice(_places(part, text), 2)]
            if len(places) == 1:
                start = n_pads + places[0]
                found.setdefault((start, start + len(part)), name)
    except Exception:  # other threads and classes of the program change what is read here
        return ()
    return tuple(PromptPart(name, *span) for span, name in sorted(found.items()))


def _places(part: list[int], text: list[int]) -> Iterator[int]:
    """Yield where a text has all ids of a part in succession."""
    at, stop = -1, len(text) - len(part) + 1
    for _ in range(_MAX_TRIES):
        try:
            at = text.index(part[0], at + 1, stop)
        except ValueError:
            return
        if text[at : at + len(part)] == part:
            yield at


def _variables(n_ids: int, deadline: float) -> Iterator[tuple[str, list[int]]]:
    """Yield the lists of `MIN_IDS` to `n_ids` - 1 integers with their names, until the deadline."""
    frame, n_left = sys._getframe(1), _MAX_FRAMES
    caller = frame.f_back
    while caller is not None and n_left:
        if is_user_frame(caller):
            n_left -= 1
            for name, value in variables_of(caller):
                if name.startswith("__"):
                    continue
                yield from _lists(name, value, n_ids, deadline, 0)
        caller = caller.f_back


def _lists(
    name: str, value: Any, n_ids: int, deadline: float, depth: int
) -> Iterator[tuple[str, list[int]]]:
    if type(value) is Tensor:
        row = value[0] if value.dim() == 2 and len(value) == 1 else value
        is_whole = value.device.type == "cpu" and not (
            value.is_floating_point() or value.is_complex()
        )
        if is_whole and row.dim() == 1 and MIN_IDS <= len(row) < n_ids:
            yield name, row.tolist()
        return
    if isinstance(value, UserDict):  # such as a `BatchEncoding`
        value = value.data
    if type(value) in (list, tuple) and value and type(value[0]) is int:
        if MIN_IDS <= len(value) < n_ids and all(type(one) is int for one in value):
            yield name, list(value)
    elif type(value) in (list, tuple, dict) and depth < _MAX_DEPTH and len(value) <= _MAX_ITEMS:
        if time.thread_time() > deadline:
            return
        items = value.items() if type(value) is dict else enumerate(value)
        for key, one in list(items):
            # A key may be a text of the user's, which a redacted trace would show.
            is_name = isinstance(key, str) and key.isidentifier()
            at = repr(key) if is_name or type(key) is int else "..."
            yield from _lists(f"{name}[{at}]", one, n_ids, deadline, depth + 1)
