"""From where a step can be reached, and what that costs before it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flexinspect_hooks.travel.caches import can_crop, cropped, n_rows_of
from flexinspect_hooks.travel.lines import Line
from flexinspect_hooks.travel.parts import Price


@dataclass(frozen=True, slots=True)
class Nearest:
    """A cache to begin from, cropped to the rows of the steps up to `step`; None: from nothing."""

    cache: Any
    step: int
    branch: int = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is fed: rows of the prompt, bytes of one row in a cache, bytes that caches hold now."""

    n_prompt: int
    row_bytes: int
    held_bytes: int

    def bytes_with(self, step: int) -> int:
        """Return what caches hold together with one more that reaches up to a step."""
        return self.held_bytes + self.row_bytes * (self.n_prompt + step)


def nearest(line: Line, step: int, caches: Sequence[tuple[Line, Any]], n_prompt: int) -> Nearest:
    """Return what is left of the rows of a step, as many as one cache has.

    `caches` are those that are alive, each with the line that fed it.
    """
    best = Nearest(None, -1)
    for other, cache in caches:
        last = n_rows_of(cache) - n_prompt
        if last < 0 or other.origin(last) is not line.origin(step):
            continue
        shared = line.shared(other, min(step, last))
        is_better = shared > best.step and shared >= line.origin(step).fork_step
        if is_better and can_crop(cache, n_prompt + shared):
            best = Nearest(cropped(cache, n_prompt + shared), shared, other.branch)
    return best


def restore_price(line: Line, step: int, near: Nearest, sizes: Sizes) -> Price:
    """Return what it costs to stand behind a step, from the nearest cache on."""
    has_cache = near.cache is not None
    first = near.step + 1 if has_cache else line.origin(step).fork_step
    n_forwards = step + 1 - first
    n_rows = step - near.step if has_cache else sizes.n_prompt + step
    ms = sum(line.mark(number).wall_ms for number in range(first, step + 1))
    return Price(n_rows if n_forwards else 0, n_forwards, sizes.bytes_with(step), ms)


def whole_price(line: Line, step: int, sizes: Sizes) -> Price:
    """Return what it costs to feed the whole sequence of a step anew, in one forward."""
    first, n_prompt = line.origin(step).fork_step, sizes.n_prompt
    ms = line.mark(first).wall_ms * (n_prompt + step) / (n_prompt + first)
    return Price(n_prompt + step, 1, sizes.bytes_with(step), ms)
