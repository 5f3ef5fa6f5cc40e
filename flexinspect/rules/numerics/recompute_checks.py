"""The rule for `run --check-every`: steps that differ from a recompute without cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace

from flexinspect.core.text import format_layers
from flexinspect.records import imported
from flexinspect.records.finding import Finding
from flexinspect.records.step import EventRecord
from flexinspect.rules.engine import Findings, Rule, finding_kinds

CHECK_EVENT = "recompute-check"
"""The kind of the event of a recomputed step. Its `data` is described in docs/trace-format.md."""
CHECK_FAILED_EVENT = "recompute-check-failed"

CACHE_DIFFERS, KERNEL_DIFFERS = "cache.recompute", "numbers.kernel"


class RecomputeRule(Rule):
    """Reports layers whose rows differ from those of a recompute by more than rounding.

    If the kernel differs without a cache too, the kernel is at fault, otherwise the cache.
    """

    name = "recompute"
    needs = (imported.EVENTS,)
    findings = finding_kinds(CACHE_DIFFERS, KERNEL_DIFFERS)

    def on_event(self, event: EventRecord) -> Findings:
        """Judge a recomputed step."""
        if event.kind == CHECK_EVENT:
            errors, limits = (np.asarray(event.data[key]) for key in ("errors", "limits"))
            beyond = np.flatnonzero(~(errors <= limits))
            if len(beyond):
                yield self._finding(event, int(beyond[0]), beyond.tolist())

    def _finding(self, event: EventRecord, first: int, beyond: list[int]) -> Finding:
        data = event.data
        layers = [int(data["layers"][index]) for index in beyond]
        error, limit = float(data["errors"][first]), float(data["limits"][first])
        without = data.get("without_cache")
        is_kernel = data["rows"] > 1 or (without is not None and not without[first] <= limit)
        id_ = KERNEL_DIFFERS if is_kernel else CACHE_DIFFERS
        cause = self._cause(data, first, is_kernel=is_kernel)
        which = format_layers(layers, len(data["layers"]))
        more = f" (in all: {which})" if len(layers) > 1 else ""
        sentence = (
            f"Step {event.step} differs from a recompute of the whole sequence from layer "
            f"{layers[0]} on{more}, by {error:.2g} of the row's norm, where rounding explains "
            f"{limit:.2g}: {cause}."
        )
        evidence = {"difference": error, "limit": limit, "without_cache": None}
        if without is not None:
            evidence["without_cache"] = float(without[first])
        found = self.finding(event, id_, sentence, layers, evidence, series=which)
        return replace(found, branch=int(data["branch"]))

    def _cause(self, data: Any, first: int, *, is_kernel: bool) -> str:
        if not is_kernel:
            without = data.get("without_cache")
            same = "" if without is None else f" ({float(without[first]):.2g} apart)"
            return f"without the cache the kernel and the {data['kernel']} agree{same}"
        return f"the kernel ({data['of']}) and the {data['kernel']} differ without a cache too"
