"""A sliding window of another size in decode steps than in the prompt."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexinspect.core.text import capitalize
from flexinspect.masks.mask_presets import BoolArray
from flexinspect.records import imported
from flexinspect.records.step import StepRecord
from flexinspect.rules.context import format_step_layers
from flexinspect.rules.engine import Findings, Rule, finding_kinds
from flexinspect.rules.masks import mask_views
from flexinspect.rules.masks.mask_views import StepMaskView

FINDING = "mask.window-uneven"
_MIN_ROWS = 4
"""Rows of a prompt that must see a whole window."""


class DecodeWindowRule(Rule):
    """Compares the number of keys that prompt rows and decode rows see.

    It looks at layers in which each row of the prompt sees itself and the keys right before it, up
    to a fixed number, and reports two decode steps in turn that see another number of keys. Masks
    with sinks or segments are not of this form.
    """

    name = "decode_window"
    needs = (imported.MASKS,)
    findings = finding_kinds(FINDING)

    def reset(self) -> None:
        self._windows: dict[int, int] = {}  # by layer
        self._seen: dict[tuple[int, ...], int] = {}  # by layers, keys that the last decode row saw
        self._reported: set[int] = set()

    def on_step(self, step: StepRecord) -> Findings:
        """Note the windows of the prompt, and compare those of decode rows."""
        if step.kv_before and not self._windows:
            return
        views, _ = mask_views.step_mask_views(step, self.context)
        if not step.kv_before:
            for view in views:
                size = _prompt_window(view)
                if size is not None:
                    self._windows.update(dict.fromkeys(view.layers, size))
        elif step.q_len == 1:
            for view in views:
                yield from self._check(step, view)

    def _check(self, step: StepRecord, view: StepMaskView) -> Findings:
        keys = view.visible_positions()
        n, before = len(keys), self._seen.get(view.layers, -1)
        is_window = mask_views.is_sliding_window(keys, view.newest_pos, before)
        self._seen[view.layers] = n
        layers = [
            layer
            for layer in view.layers
            if layer not in self._reported and self._windows.get(layer, n) != n
        ]
        if not is_window or not layers:
            return
        self._reported.update(layers)
        size = self._windows[layers[0]]
        where = format_step_layers(layers, step)
        sentence = (
            f"{capitalize(where)}: each row of the prompt sees at most {size} keys, itself "
            f"included, but the rows of decode steps see {n}: the window is "
            f"{abs(n - size)} {'larger' if n > size else 'smaller'} there."
        )
        facts: dict[str, Any] = {"prompt": size, "decode": n, "mask": view.fingerprint}
        positions = (view.newest_pos,)
        yield self.finding(step, FINDING, sentence, layers, facts, positions=positions)


def _prompt_window(view: StepMaskView) -> int | None:
    """Return how many keys the rows of a prompt see, None if they see no sliding window."""
    cells: BoolArray = np.logical_or.reduce(view.cells)
    n, n_keys = cells.shape
    size = int(np.count_nonzero(cells[-1]))
    if n != n_keys or n < size + _MIN_ROWS or not size:
        return None
    distance = np.arange(n)[:, None] - np.arange(n)
    return size if np.array_equal(cells, (distance >= 0) & (distance < size)) else None
