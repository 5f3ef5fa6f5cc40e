"""Finds tokens of the text that the attention mask hides, because their id is that of the padding.

`ids != pad` makes a correct mask only if the padding token is in no text. Where it is the EOS as
well, it also hides the EOS that ends a document or a turn in the middle of the prompt. `generate`
makes such a mask by itself where it receives none and the padding's id is in the prompt.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flexinspect.core.text import format_numbers, is_or_are, plural, printable
from flexinspect.masks.mask_presets import BoolArray
from flexinspect.records import imported
from flexinspect.records.prompt import declared_tokenizer
from flexinspect.records.step import StepRecord
from flexinspect.rules.context import step_array
from flexinspect.rules.engine import Findings, Rule, finding_kinds
from flexinspect.rules.masks.padding_as_text import read_ids
from flexinspect.rules.text.generate_options import GENERATE_EVENT, as_ids

TEXT_AS_PADDING = "mask.text-as-padding"
_MAX_COLUMNS = 6  # that a sentence lists


class TextAsPaddingRule(Rule):
    """Compares the received attention mask with `ids != t`, for each special token t."""

    name = "text_as_padding"
    needs = (imported.BATCHES, imported.EVENTS)
    streams = ("inputs.mask", "inputs.ids")
    findings = finding_kinds(TEXT_AS_PADDING)

    def on_step(self, step: StepRecord) -> Findings:
        """Check the mask of a first forward."""
        if step.step or step.kv_before or step.q_len < 3:
            return
        mask = step_array(step, "inputs.mask")
        if mask is None or mask.all():
            return
        ids, kept = read_ids(step, self.context), np.asarray(mask, np.bool_)
        if ids is None or ids.shape != kept.shape:
            return
        facts, made_by = declared_tokenizer(self.context.generation.declared), _inferred_from(step)
        # Pieces of a text may be padded alone, so the padding's own id counts only where `generate`
        # made the mask, which knows nothing of pieces.
        for token in (made_by, *facts.eos, facts.bos):
            # A mask that hides this token wherever it is, and nothing else, was made by its id.
            if token is not None and np.array_equal(kept, ids != token):
                yield from self._check_holes(step, kept, token, is_inferred=token == made_by)
                return

    def _check_holes(
        self, step: StepRecord, kept: BoolArray, token: int, *, is_inferred: bool
    ) -> Findings:
        holes = {row: _single_holes(one) for row, one in enumerate(kept)}
        rows = [row for row, columns in holes.items() if len(columns)]
        if rows:
            columns = holes[rows[0]].tolist()
            why = f"it was made by ids != {token}"
            if is_inferred:
                why = (
                    "generate received no attention_mask and made it by ids != pad_token_id "
                    f"({token})"
                )
            yield self._finding(step, token, rows, columns, why, len(kept))

    def _finding(
        self,
        step: StepRecord,
        token: int,
        rows: list[int],
        columns: list[int],
        why: str,
        batch: int,
    ) -> Any:
        known = (t for t in self.context.generation.tokens if t.token_id == token)
        name = printable(next((t.token for t in known), ""))
        named = f' "{name}"' if name and name != str(token) else ""
        subject = "the prompt" if batch == 1 else f"batch row {rows[0]} of {batch}"
        listed = format_numbers("column", columns[:_MAX_COLUMNS])
        more = len(columns) - _MAX_COLUMNS
        sentence = (
            f"The attention mask hides {plural(len(columns), 'token')}{named} (id {token}) in the "
            f"middle of {subject}, at {listed}{f' and {more} more' if more > 0 else ''}: it is 0 "
            f"exactly where the id is {token}, so {why}, and "
            f"{'a token' if len(columns) == 1 else 'tokens'} of the text "
            f"{is_or_are(len(columns))} taken for padding"
        )
        if len(rows) > 1:
            sentence += f" (as in {plural(len(rows) - 1, 'other row')})"
        evidence = {"rows": rows, "columns": columns, "token": token}
        positions = columns if rows[0] == 0 else ()  # other rows have other tokens
        return self.finding(
            step, TEXT_AS_PADDING, f"{sentence}.", evidence=evidence, positions=positions
        )


def _inferred_from(step: StepRecord) -> int | None:
    """Return the padding's id from which `generate` made the mask, None if it received one."""
    for event in step.events:
        if event.kind == GENERATE_EVENT and not event.data.get("has_mask"):
            options = event.data["options"]
            token, ends = options.get("pad_token_id"), as_ids(options.get("eos_token_id"))
            # generate makes no mask where the padding is an EOS, see _prepare_attention_mask.
            return token if isinstance(token, int) and token not in ends else None
    return None


def _single_holes(kept: BoolArray) -> npt.NDArray[np.int64]:
    """Return the hidden positions between two kept ones; none if a longer gap is among them.

    A longer gap is padding inside a sequence, such as that of pieces that were padded alone.
    """
    seen = np.flatnonzero(kept)
    gaps = np.diff(seen) - 1
    if not gaps.any() or gaps.max() > 1:
        return np.empty(0, np.int64)
    return np.asarray(seen[:-1][gaps == 1] + 1, np.int64)
