"""The rule for padding inside of a prompt that the prompt's mask closes and a later mask opens.

Pieces of a prompt that are padded to one length have runs of one token between them. The mask of
the prompt closes these keys, and that of the answer has to close them, too.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np

from flexinspect.core.text import plural
from flexinspect.masks.mask_presets import BoolArray
from flexinspect.records import imported
from flexinspect.records.step import StepRecord
from flexinspect.rules.engine import Findings, Rule, finding_kinds
from flexinspect.rules.masks import mask_views
from flexinspect.rules.masks.mask_views import StepMaskView

OPENED = "mask.hidden-keys-opened"
MIN_RUN = 2
"""The last token of an isolated segment has no reader in the prompt either; two in a row do."""


class HiddenKeysRule(Rule):
    """Looks in later steps for keys that the prompt's mask closes to all rows but their own.

    Only runs of one repeated token count, as padding is. It needs cells, which are recorded from
    level advanced on.
    """

    name = "hidden_keys"
    needs = (imported.MASKS,)
    findings = finding_kinds(OPENED)

    def reset(self) -> None:
        self._hidden: dict[int, np.ndarray[tuple[int], np.dtype[np.intp]]] = {}
        """By layer, the positions of the hidden keys."""

    def on_step(self, step: StepRecord) -> Findings:
        """Find the hidden keys of the first step, and a later step that opens them."""
        if not step.calls:
            return
        views, are_known = mask_views.step_mask_views(step, self.context)
        if not step.step and not step.kv_before:
            for view in views if are_known else ():
                hidden = self._padding_among(_unread_keys(view))
                if len(hidden):
                    self._hidden.update(dict.fromkeys(view.layers, hidden))
        elif self._hidden:
            yield from self._opened(step, views)

    def _padding_among(self, is_unread: BoolArray) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        """Return the positions of unread keys in runs of one token, which is nowhere read."""
        tokens = [self.context.token(pos) for pos in range(len(is_unread))]
        ids = [None if token is None else token.token_id for token in tokens]
        read = {one for one, unread in zip(ids, is_unread.tolist(), strict=True) if not unread}
        found: list[int] = []
        for (token, unread), run in groupby(range(len(ids)), lambda i: (ids[i], is_unread[i])):
            places = [*run]
            if unread and token is not None and token not in read and len(places) >= MIN_RUN:
                found += places
        return np.array(found, np.intp)

    def _opened(self, step: StepRecord, views: list[StepMaskView]) -> Findings:
        layers, keys = [], set[int]()
        for view in views:
            seen = view.visible_positions()
            for layer in view.layers:
                opened = np.intersect1d(self._hidden.get(layer, seen[:0]), seen)
                if len(opened):
                    layers.append(layer)
                    keys.update(opened.tolist())
        if not keys:
            return
        self._hidden = {}
        positions = sorted(keys)
        sentence = (
            f"The newest row of step {step.step} sees {plural(len(keys), 'key')} of the prompt "
            "that the mask of the prompt closes to all other rows: "
            f"{self.context.format_rows(np.array(positions)).replace('row', 'key', 1)}, all of one "
            f"token ({self.context.format_position(positions[0])}), as padding is. The mask of "
            "the later steps has to close them, too."
        )
        facts = {"keys": len(keys), "layers": len(layers)}
        yield self.finding(step, OPENED, sentence, layers, facts, positions=positions)


def _unread_keys(view: StepMaskView) -> BoolArray:
    """Return the keys that no row but their own sees, if the mask has all rows and keys."""
    cells = view.cells.any(axis=0)
    n_rows, n_keys = cells.shape
    if view.first_key_pos or n_rows != n_keys:
        return np.zeros(n_keys, np.bool_)
    seen: BoolArray = cells & ~np.eye(n_rows, dtype=np.bool_)
    return np.asarray(~seen.any(axis=0))
