"""A sliding window that is counted in positions, over the slots of a cache that drops keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flexinspect.core.text import capitalize
from flexinspect.records import imported
from flexinspect.records.step import StepRecord
from flexinspect.rules.context import format_step_layers
from flexinspect.rules.engine import Findings, Rule, finding_kinds
from flexinspect.rules.masks import mask_views
from flexinspect.rules.masks.mask_views import StepMaskView

WINDOW_SLOTS = "mask.window-slots"


class WindowSlotsRule(Rule):
    """Finds decode rows that see one key less in each step, because slot 0 is not position 0.

    Once a cache has dropped keys, slot 0 holds a later position. A mask that compares slots with
    positions opens the slots from `position - window + 1` on: its first open slot rises by 1 in
    each step, where that of a correct mask stays. A single row may have a smaller window instead,
    so two rows in turn must be of this form.
    """

    name = "window_slots"
    needs = (imported.MASKS,)
    findings = finding_kinds(WINDOW_SLOTS)

    def reset(self) -> None:
        self._last: dict[tuple[int, int], tuple[int, int]] = {}
        """By branch and layer: position and visible keys of the last row of this form."""
        self._reported: set[int] = set()

    def on_step(self, step: StepRecord) -> Findings:
        """Check the row of a decode step whose cache has dropped keys."""
        if step.q_len != 1 or all(call.kv_len >= step.kv_after for call in step.calls):
            return
        windows = {call.layer: call.window for call in step.calls}
        views, _ = mask_views.step_mask_views(step, self.context)
        for view in views:
            if view.first_key_pos:
                yield from self._check(step, view, windows)

    def _check(
        self, step: StepRecord, view: StepMaskView, windows: Mapping[int, int | None]
    ) -> Findings:
        pos, n_keys = view.newest_pos, view.cells.shape[2]
        found: dict[int, list[int]] = {}  # layers by window
        for layer in view.layers:
            # Without a window in the configuration, the cache holds as many keys as the window.
            window = windows[layer] or n_keys
            n_seen = _open_slots(view, pos - window + 1)
            if n_seen is None:
                continue
            before = self._last.get((step.branch, layer))
            self._last[step.branch, layer] = pos, n_seen
            if before == (pos - 1, n_seen + 1) and layer not in self._reported:
                found.setdefault(window, []).append(layer)
        for window, layers in found.items():
            self._reported.update(layers)
            yield self._finding(step, view, window, layers)

    def _finding(self, step: StepRecord, view: StepMaskView, window: int, layers: list[int]) -> Any:
        n_keys, n_seen = view.cells.shape[2], len(view.visible_positions())
        where = capitalize(format_step_layers(layers, step))
        sentence = (
            f"{where}: the newest row sees {n_seen or 'none'} of the {n_keys} keys in the cache, "
            f"and the row before it saw {n_seen + 1}. The mask counts its window of {window} keys "
            f"in positions of the sequence, but the cache holds the last {n_keys} keys only, so "
            f"its slot 0 is position {view.first_key_pos}, and each row sees one key less than "
            "the row before it."
        )
        facts = {
            "window": window,
            "keys": n_keys,
            "seen": n_seen,
            "dropped": view.first_key_pos,
            "mask": view.fingerprint,
        }
        positions = (view.newest_pos,)
        return self.finding(step, WINDOW_SLOTS, sentence, layers, facts, positions=positions)


def _open_slots(view: StepMaskView, first: int) -> int | None:
    """Return how many slots the newest row sees if they are all from `first` on, above 0."""
    row = view.newest_row
    if first <= 0 or not np.array_equal(row, np.arange(len(row)) >= first):
        return None
    return int(np.count_nonzero(row))
