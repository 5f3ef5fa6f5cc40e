"""A float mask whose values are so near to 0 that the keys which it should exclude are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flexinspect.core.text import capitalize, plural
from flexinspect.records import imported
from flexinspect.records.step import CallRecord, StepRecord
from flexinspect.rules.context import format_step_layers
from flexinspect.rules.engine import Findings, Rule, finding_kinds
from flexinspect.rules.masks import mask_views

WEAK_EXCLUSION = "mask.weak-exclusion"
LOWEST = -15.0
"""A key with this added keeps 3e-7 of its weight, which is the rounding of float32."""

MIN_KEYS = 4
"""A bias by distance has several values in a row of so many keys, but may have one in fewer."""


class WeakExclusionRule(Rule):
    """Finds float masks that add 0 to some open cells and one small negative value to the others.

    A mask excludes keys by a value such as -inf or -1e9. Masks with many values (ALiBi, relative
    positions) are meant, and so is a score_mod.
    """

    name = "weak_exclusion"
    needs = (imported.MASKS,)
    findings = finding_kinds(WEAK_EXCLUSION)

    def reset(self) -> None:
        self._reported: set[int] = set()  # layers

    def on_step(self, step: StepRecord) -> Findings:
        """Look at what the float masks of a step add to open cells."""
        for fingerprint, calls in mask_views.calls_by_mask(step).items():
            mask = self.context.mask(fingerprint)
            added = None if mask is None else mask.added
            if added is None or mask is None or mask.kv_len < MIN_KEYS:
                continue
            new = [call for call in calls if call.layer not in self._reported]
            if new and added["lowest"] > LOWEST:
                self._reported.update(call.layer for call in new)
                yield self._finding(step, new, added)

    def _finding(self, step: StepRecord, calls: list[CallRecord], added: Mapping[str, Any]) -> Any:
        _, row, key = added["first"]
        positions = step.kv_before + row, max(step.kv_after - calls[0].kv_len, 0) + key
        sees = " sees ".join(map(self.context.format_position, positions))
        layers = mask_views.layers_of(calls)
        where = capitalize(format_step_layers(layers, step))
        value, cells = _values_text(added), plural(added["cells"], "cell")
        sentence = (
            f"{where}: the float mask adds {value} to {cells}, and 0 to the other open ones. Only "
            "-inf, or a value like -1e9, excludes a key: these keys are read with "
            f"{100 * math.exp(added['lowest']):.3g} % of their weight; first: {sees}."
        )
        return self.finding(
            step, WEAK_EXCLUSION, sentence, layers, dict(added), positions=positions
        )


def _values_text(added: Mapping[str, Any]) -> str:
    lowest, highest = (f"{added[name]:g}" for name in ("lowest", "highest"))
    return lowest if lowest == highest else f"{lowest} to {highest}"
