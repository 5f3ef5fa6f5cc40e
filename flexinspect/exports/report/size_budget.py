"""Leaves out what does not fit: of long runs, the attention and the candidates of some steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from flexinspect.core.errors import UsageError
from flexinspect.exports.report.contents import BranchContents
from flexinspect.exports.report.packing import packed_size

Branches = Mapping[tuple[int, int], BranchContents]
BranchesByKey = dict[tuple[int, int], BranchContents]

THINNED = {
    "token_attention": "The attention by token",
    "attention": "The attention by segment",
    "candidates": "The list of likely tokens",
}
"""The parts of which steps are left out, in this order, with their names in sentences."""

MAX_EVERY = 32
"""Of a part at least every step of this many is kept before the next part is thinned, too."""

DROPPED = {**THINNED, "masks": "The mask"}
"""The parts that are left out as a whole if thinning is not enough, in this order."""


def essential_size(branch: BranchContents) -> int:
    """Return the packed size of what is never left out of a branch."""
    return packed_size(replace(branch, **dict.fromkeys(DROPPED)))


def fit_size(
    branches: Branches, max_bytes: int, page_bytes: int = 0
) -> tuple[BranchesByKey, list[str]]:
    """Return branches that fit into a page of `max_bytes`, and what was left out in sentences.

    The rest of the page takes `page_bytes`. Raises `UsageError` if not even the texts and the
    numbers of the steps fit.
    """
    fitting = _Fitting(branches, max_bytes - page_bytes)
    for name in THINNED:
        fitting.thin(name)
    dropped = [title for name, title in DROPPED.items() if fitting.drop(name)]
    if fitting.over > 0:
        needed = f"{(fitting.total + page_bytes) / 1e6:.2f} MB without attention and masks"
        raise UsageError(
            f"The report needs {needed}, more than the {max_bytes / 1e6:g} MB of --max-size.",
            hint="Allow more with --max-size, or choose one generation with --generation N.",
        )
    reason = "is left out, because it does not fit the size of the report"
    left_out = [*_thinned(fitting.branches), *(f"{title} {reason}." for title in dropped)]
    return fitting.branches, left_out


class _Fitting:
    """Branches that are made smaller, and the packed sizes of their parts, each packed once."""

    def __init__(self, branches: Branches, max_bytes: int) -> None:
        self.branches = dict(branches)
        self._max_bytes = max_bytes
        self._essential = sum(map(essential_size, branches.values()))
        self._sizes = {name: self._measure(name) for name in DROPPED}

    @property
    def total(self) -> int:
        """The size of all branches: their parts together, packed one by one."""
        return self._essential + sum(self._sizes.values())

    @property
    def over(self) -> int:
        """By how much they are too large."""
        return self.total - self._max_bytes

    def thin(self, name: str) -> None:
        """Leave out steps of a part until all fits, or until `MAX_EVERY` is reached."""
        every, size = 1, self._sizes[name]
        while self.over > 0 and every < MAX_EVERY and size:
            allowed = max(size - self.over, size / MAX_EVERY)
            # A little more than the sizes ask for: fewer steps compress less well.
            more = min(max(math.ceil(1.05 * size / allowed), 2), math.ceil(MAX_EVERY / every))
            every *= more
            self._change({key: _thin(one, name, more) for key, one in self.branches.items()}, name)
            size = self._sizes[name]

    def drop(self, name: str) -> bool:
        """Leave out a part as a whole if they are too large, and return whether it was."""
        if self.over <= 0 or not self._sizes[name]:
            return False
        self._change({key: _drop(branch, name) for key, branch in self.branches.items()}, name)
        return True

    def _change(self, branches: BranchesByKey, name: str) -> None:
        self.branches = branches
        self._sizes[name] = self._measure(name)

    def _measure(self, name: str) -> int:
        return sum(packed_size(getattr(branch, name)) for branch in self.branches.values())


def _thin(branch: BranchContents, name: str, every: int) -> BranchContents:
    part = getattr(branch, name)
    if part is None:
        return branch
    columns = {
        field: _every_nth(getattr(part, field), every)
        for field in part.__struct_fields__
        if isinstance(getattr(part, field), np.ndarray) or field == "share"
    }
    return _replace(branch, name, replace(part, every=part.every * every, **columns))


def _every_nth(column: Any, every: int) -> Any:
    return column[::every]


def _drop(branch: BranchContents, name: str) -> BranchContents:
    if getattr(branch, name) is None:
        return branch
    reason = "It is left out of this report, because it does not fit its size."
    return replace(_replace(branch, name, None), missing={**branch.missing, name: reason})


def _replace(branch: BranchContents, name: str, part: msgspec.Struct | None) -> BranchContents:
    changed: BranchContents = replace(branch, **{name: part})
    return changed


def _thinned(branches: Branches) -> list[str]:
    """Return a sentence for every part of which steps were left out, here or while reading."""
    sentences = []
    for name, title in THINNED.items():
        parts = [part for one in branches.values() if (part := getattr(one, name)) is not None]
        every = max((part.every for part in parts), default=1)
        if every > 1:
            n_kept = sum(len(part.step) for part in parts)
            sentences.append(
                f"{title} is included for every {_ordinal(every)} step ({n_kept} steps)."
            )
    return sentences


def _ordinal(number: int) -> str:
    is_teen = 10 < number % 100 < 14
    ending = "th" if is_teen else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
