"""From where a step can be reached, and what that costs before it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flexinspect_hooks.travel.caches import can_crop, crop_cache, n_rows_of
from flexinspect_hooks.travel.lines import BranchState
from flexinspect_hooks.travel.parts import RestoreCost


@dataclass(frozen=True, slots=True)
class NearestCache:
    """A cache to begin from, cropped to the rows of the steps up to `step`; None: from nothing."""

    cache: Any
    step: int
    branch: int = 0


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """What is fed: rows of the prompt, bytes of one row in a cache, bytes that caches hold now."""

    n_prompt: int
    row_bytes: int
    cache_bytes: int

    def bytes_with(self, step: int) -> int:
        """Return what caches hold together with one more that reaches up to a step."""
        return self.cache_bytes + self.row_bytes * (self.n_prompt + step)


def find_nearest_cache(
    branch: BranchState, step: int, caches: Sequence[tuple[BranchState, Any]], n_prompt: int
) -> NearestCache:
    """Return what is left of the rows of a step, as many as one cache has.

    `caches` are those that are alive, each with the line that fed it.
    """
    best = NearestCache(None, -1)
    for other, cache in caches:
        last = n_rows_of(cache) - n_prompt
        if last < 0 or other.cache_origin(last) is not branch.cache_origin(step):
            continue
        shared = branch.last_shared_step(other, min(step, last))
        is_better = shared > best.step and shared >= branch.cache_origin(step).fork_step
        if is_better and can_crop(cache, n_prompt + shared):
            best = NearestCache(crop_cache(cache, n_prompt + shared), shared, other.number)
    return best


def restore_cost(
    branch: BranchState, step: int, nearest: NearestCache, sizes: CacheSizes
) -> RestoreCost:
    """Return what it costs to stand behind a step, from the nearest cache on."""
    has_cache = nearest.cache is not None
    first = nearest.step + 1 if has_cache else branch.cache_origin(step).fork_step
    n_forwards = step + 1 - first
    n_rows = step - nearest.step if has_cache else sizes.n_prompt + step
    ms = sum(branch.checkpoint(number).wall_ms for number in range(first, step + 1))
    return RestoreCost(n_rows if n_forwards else 0, n_forwards, sizes.bytes_with(step), ms)


def recompute_cost(branch: BranchState, step: int, sizes: CacheSizes) -> RestoreCost:
    """Return what it costs to feed the whole sequence of a step anew, in one forward."""
    first, n_prompt = branch.cache_origin(step).fork_step, sizes.n_prompt
    ms = branch.checkpoint(first).wall_ms * (n_prompt + step) / (n_prompt + first)
    return RestoreCost(n_prompt + step, 1, sizes.bytes_with(step), ms)
