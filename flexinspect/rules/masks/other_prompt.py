"""Finds a mask that was made for the prompt of an earlier generation and served again.

A cache of masks is filled by the length of the prompt, and is not emptied where a generation fails.
The same mask for two prompts is no fault by itself: it must also contradict what this generation
declares, or the values that its own later masks are made from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from flexinspect.core.text import plural, printable
from flexinspect.records import imported
from flexinspect.records.step import MaskRecord, StepRecord
from flexinspect.rules.engine import Findings, Rule, finding_kinds

OTHER_PROMPT = "mask.other-prompt"
_MAX_KEPT = 32  # generations


class _Served(Struct, frozen=True):
    """The mask of a prompt: its generation and tokens, and the mask that was declared for it."""

    generation: int
    ids: tuple[int, ...]
    mask: MaskRecord
    declared: npt.NDArray[np.bool_] | None
    was_built: bool


class OtherPromptRule(Rule):
    """Compares the mask of each prompt with those of earlier prompts of the same length."""

    name = "other_prompt"
    needs = (imported.MASKS,)
    findings = finding_kinds(OTHER_PROMPT)

    def __init__(self) -> None:
        self._served: list[_Served] = []

    def reset(self) -> None:
        self._again: tuple[_Served, _Served] | None = None  # of an earlier generation, and of this

    def on_step(self, step: StepRecord) -> Findings:
        """Look for the mask of a prompt among earlier ones, and compare later masks with it."""
        if step.branch:
            return
        if step.step == 0 and not step.kv_before and step.calls:
            yield from self._check_prompt(step)
        elif self._again is not None and step.masks:
            yield from self._check_later(step)

    def _check_prompt(self, step: StepRecord) -> Findings:
        mask = self.context.mask(step.calls[0].mask)
        ids = tuple(token.token_id for token in self.context.generation.tokens)
        if mask is None or mask.cells is None or mask.kind != "block" or len(ids) != step.q_len:
            return
        number = self.context.generation.generation
        now = _Served(number, ids, mask, self._declared(len(ids)), bool(step.builds))
        for before in reversed(self._served):
            is_same = before.mask.fingerprint == mask.fingerprint or _is_equal(before.mask, mask)
            if is_same and before.ids != ids and not now.was_built and before.was_built:
                self._again = before, now
                break
        self._served = [*self._served[-_MAX_KEPT:], now]
        if self._again is not None and self._is_declared_for(*self._again):
            why = "its cells are those declared there, not those declared here"
            yield self._finding(step, why, *self._again)

    def _declared(self, n: int) -> npt.NDArray[np.bool_] | None:
        spec = self.context.declared_spec
        return None if spec is None else spec.dense(n)

    def _is_declared_for(self, before: _Served, now: _Served) -> bool:
        cells = now.mask.cells
        if cells is None or before.declared is None or now.declared is None:
            return False
        shapes = {before.declared.shape, now.declared.shape, cells.shape[1:]}
        if len(shapes) > 1:
            return False
        here, there = (bool((cells == one).all()) for one in (now.declared, before.declared))
        return there and not here

    def _check_later(self, step: StepRecord) -> Findings:
        assert self._again is not None
        before, now = self._again
        if any(call.mask == now.mask.fingerprint for call in step.calls) or not step.builds:
            return
        later = self.context.mask(step.calls[0].mask) if step.calls else None
        if later is None or later.mask_mod_source != now.mask.mask_mod_source:
            return
        self._again = None
        own, other = _captured(later), _captured(now.mask)
        for name in own.keys() & other.keys():
            n = min(len(own[name]), len(other[name]))
            if n > 1 and not np.array_equal(own[name][:n], other[name][:n]):
                at = int(np.flatnonzero(own[name][:n] != other[name][:n])[0])
                yield self._finding(
                    step,
                    f"its mask_mod reads `{printable(name)}` with {other[name][at]:g} at {at}, and "
                    f"that of step {step.step} has {own[name][at]:g} there",
                    *(before, now),
                )
                return

    def _finding(self, step: StepRecord, why: str, before: _Served, now: _Served) -> Any:
        sentence = (
            f"The prompt of generation {now.generation} ran under the mask that was built for the "
            f"prompt of generation {before.generation}: no mask was built for these "
            f"{plural(len(now.ids), 'token')}, and {why}."
        )
        evidence = {"generation": before.generation, "fingerprint": now.mask.fingerprint}
        layers = {call.layer for call in step.calls}
        return self.finding(step, OTHER_PROMPT, sentence, layers, evidence)


def _is_equal(one: MaskRecord, other: MaskRecord) -> bool:
    if one.mask_mod_source != other.mask_mod_source or one.cells is None or other.cells is None:
        return False
    return bool(np.array_equal(one.cells, other.cells))


def _captured(mask: MaskRecord) -> dict[str, npt.NDArray[Any]]:
    """Return the 1D tensors that a mask_mod reads, by name."""
    variables: Mapping[str, Any] = (mask.mask_mod_code or {}).get("variables", {})
    found = {}
    for name, value in variables.items():
        shape: Sequence[int] = value.get("shape", ()) if isinstance(value, dict) else ()
        if len(shape) == 1 and "values" in value:
            found[name] = np.repeat(value["values"], value["counts"])
    return found
