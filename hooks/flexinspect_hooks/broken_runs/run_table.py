"""The functions of all broken runs by catalog name."""

from __future__ import annotations

from typing import Protocol

from flexinspect_hooks.broken_runs import cache, kernels, masks, segments
from flexinspect_hooks.broken_runs.broken_run_setup import BrokenRunSetup


class RunFunction(Protocol):
    """Runs the demo model with one fault, or with the fault repaired, and records a trace."""

    __name__: str

    def __call__(self, setup: BrokenRunSetup, *, repaired: bool) -> None: ...


_FUNCTIONS: tuple[RunFunction, ...] = (
    segments.spans_without_bos,
    segments.two_bos,
    segments.missing_eos,
    segments.order_of_the_wordings,
    masks.orphan_separators,
    masks.leak_through_separators,
    masks.placeholder_mask,
    masks.ticked_picture,
    masks.patch_behind_an_if,
    masks.no_mask_function,
    masks.bool_mask_added,
    masks.padding_of_infinity,
    cache.decode_without_offset,
    cache.mask_one_short,
    cache.empty_cache_slots,
    cache.lost_cache,
    cache.no_cache,
    kernels.silent_fallback,
    kernels.graph_every_step,
    kernels.heads_in_the_mask,
    kernels.not_the_weights,
    kernels.logger_breaks_flex,
)

RUN_FUNCTIONS: dict[str, RunFunction] = {
    function.__name__.replace("_", "-"): function for function in _FUNCTIONS
}
"""Each function under the name of its entry in the catalog."""
