"""Finds padding that the model reads as text, because no attention mask closes it.

Where the padding token is also the EOS, neither `generate` nor another rule can tell it from text;
sequences of a batch that begin with different numbers of it can.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flexinspect.core.text import plural, printable
from flexinspect.records import imported
from flexinspect.records.prompt import declared_tokenizer
from flexinspect.records.step import StepRecord
from flexinspect.rules.context import RuleContext, step_array
from flexinspect.rules.engine import Findings, Rule, finding_kinds

PADDING_AS_TEXT = "mask.padding-as-text"
_MIN_PADS = 2  # one EOS may begin a text of its own


class PaddingAsTextRule(Rule):
    """Counts padding tokens of the prompt that the received attention mask does not close."""

    name = "padding_as_text"
    needs = (imported.BATCHES,)
    streams = ("inputs.mask", "inputs.ids")
    findings = finding_kinds(PADDING_AS_TEXT)

    def on_step(self, step: StepRecord) -> Findings:
        """Check the tokens of a first forward."""
        if step.step or step.kv_before or step.q_len < 2:
            return
        facts = declared_tokenizer(self.context.generation.declared)
        mask, ids = step_array(step, "inputs.mask"), read_ids(step, self.context)
        if facts.pad is None or ids is None or (mask is None and self.context.pad_id is not None):
            return  # without a mask and with a padding token of its own, another rule reports it
        if any(call.kv_len != step.q_len for call in step.calls):
            return
        is_pad = ids == facts.pad
        if mask is not None and mask.shape == is_pad.shape:
            is_pad &= np.asarray(mask, np.bool_)
        n_left, n_right = _leading(is_pad), _leading(is_pad[:, ::-1])
        for side, counts in (("begins", n_left), ("ends", n_right)):
            n_others = counts.min() if len(counts) > 1 else 0
            rows = np.flatnonzero(counts - n_others >= _MIN_PADS)
            if len(rows) and counts.max() < step.q_len and self._is_plain(step):
                yield self._finding(step, side, rows, counts, has_mask=mask is not None)
                return

    def _is_plain(self, step: StepRecord) -> bool:
        """Whether the padding is read: a mask of the program may close it."""
        for call in step.calls[:1]:
            mask = self.context.mask(call.mask)
            # That of another kernel follows the table of which positions are padding.
            has_table = step_array(step, "inputs.mask") is not None
            if mask is None or (has_table and mask.kind != "block"):
                continue
            cells = mask.cells
            if cells is not None and not bool(cells[0, -1].all()):
                return False
        return bool(step.calls)

    def _finding(
        self,
        step: StepRecord,
        side: str,
        rows: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        *,
        has_mask: bool,
    ) -> Any:
        facts, row = declared_tokenizer(self.context.generation.declared), int(rows[0])
        tokens = self.context.generation.tokens
        name = next((t.token for t in tokens if t.token_id == facts.pad), "")
        named = f' "{printable(name)}"' if name else ""
        which = "the attention mask is 1 there" if has_mask else "there is no attention mask"
        subject = "The prompt" if len(counts) == 1 else f"Batch row {row} of {len(counts)}"
        sentence = (
            f"{subject} {side} with {plural(int(counts[row]), 'padding token')}{named} (id "
            f"{facts.pad}) that the model reads as text: {which}"
        )
        if facts.pad in facts.eos:
            sentence += ", and as the padding is also the EOS, generate cannot tell it from text"
        evidence = {"rows": rows.tolist(), "padding": counts[rows].tolist(), "pad": facts.pad}
        return self.finding(step, PADDING_AS_TEXT, f"{sentence}.", evidence=evidence)


def read_ids(step: StepRecord, context: RuleContext) -> npt.NDArray[np.int64] | None:
    """Return the token ids of a first forward, int (batch, positions), or None."""
    table = step_array(step, "inputs.ids")
    if table is not None:
        return np.asarray(table, np.int64)
    ids = np.array([[token.token_id for token in context.generation.tokens]], np.int64)
    return ids if ids.shape[1] == step.q_len else None


def _leading(flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return how many flags each row, bool (batch, positions), begins with."""
    counts: npt.NDArray[np.int64] = np.pad(flags, ((0, 0), (0, 1))).argmin(axis=1)
    return counts
