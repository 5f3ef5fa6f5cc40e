"""An edited mask as a source of block masks: from now on the model runs under it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexinspect.maskedits import EditedRule, Patch
from flexinspect.masks import BoolArray, MaskRule
from flexinspect_hooks.debugging.unseen import unseen
from flexinspect_hooks.maskmods import MaskMod, Window, arithmetic_mask_mod
from flexinspect_hooks.masksource import MaskSource, OwnMask, RuleMask, mark
from flexinspect_hooks.ruleidentity import rule_parameters

_MAX_REGIONS = 24
"""More regions than this are looked up in a table instead of being compared."""


class OwnGround:
    """A rule of the user's as something to lay edits on; head 0 stands for all."""

    def __init__(self, source: OwnMask, device: torch.device) -> None:
        self.mask_mod = source.mask_mod
        self.name = source.name
        self._device = device

    def dense(self, n_q: int, n_kv: int | None = None, *, q_offset: int = 0) -> BoolArray:
        """Return its cells, bool (n_q, n_kv), for the rows from `q_offset` on."""
        zero = torch.zeros((), dtype=torch.int64, device=self._device)
        last = q_offset + n_q if n_kv is None else n_kv
        over_kv = torch.vmap(self.mask_mod, in_dims=(None, None, None, 0))
        over_q = torch.vmap(over_kv, in_dims=(None, None, 0, None))
        q_idx = torch.arange(q_offset, q_offset + n_q, device=self._device)
        with unseen():
            cells: Tensor = over_q(zero, zero, q_idx, torch.arange(last, device=self._device))
        return np.asarray(cells.cpu())


def rule_of(source: MaskSource, device: torch.device) -> EditedRule:
    """Return what edits of a source start from."""
    edited = getattr(source, "edited", None)
    if isinstance(edited, EditedRule):
        return edited
    if isinstance(source, RuleMask):
        return EditedRule(source.rule)
    assert isinstance(source, OwnMask)
    return EditedRule(OwnGround(source, device))


def source_of(
    rule: EditedRule, *, name: str, length: int, device: torch.device, compiled: bool
) -> MaskSource:
    """Return what runs an edited rule over sequences of at most `length` tokens."""
    ground = rule.ground
    if isinstance(ground, MaskRule) and not rule.patches:
        return RuleMask(ground, length=length, device=device, compiled=compiled)
    if isinstance(ground, MaskRule):
        under = _in_positions(ground, length, device, compiled=compiled)
        identity = f"{ground}"
    else:
        assert isinstance(ground, OwnGround)
        under, identity = ground.mask_mod, f"{ground.name}{rule_parameters(ground.mask_mod)}"
    over = _patched(under, rule.patches)
    mark(over, f"{identity}{rule.patches}")
    return EditedMask(rule, over, name=name, device=device)


def declared_of(source: MaskSource) -> dict[str, Any]:
    """Return what a declaration says of a source's mask."""
    if not isinstance(source, RuleMask):
        return {"rule": source.name}
    rule = source.rule
    return {"preset": rule.name, "starts": rule.starts, "head": rule.head, "low": rule.low}


class EditedMask(OwnMask):
    """Runs a rule with patches over it, as an own rule is run."""

    def __init__(
        self, rule: EditedRule, mask_mod: MaskMod, *, name: str, device: torch.device
    ) -> None:
        super().__init__(mask_mod, name=name, device=device)
        self.edited = rule


def _in_positions(rule: MaskRule, length: int, device: torch.device, *, compiled: bool) -> MaskMod:
    if not compiled and len(rule.starts) <= _MAX_REGIONS:
        return arithmetic_mask_mod(rule, Window(length, length, 0))
    cells = torch.from_numpy(rule.dense(length)).to(device)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cells[q_idx, kv_idx]

    return mask_mod


def _patched(under: MaskMod, patches: Sequence[Patch]) -> MaskMod:
    """Return a rule with patches over it, in positions: comparisons alone, no look-ups."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        is_open = under(b, h, q_idx, kv_idx)
        for patch in patches:
            inside = (q_idx >= patch.row_start) & (q_idx < patch.row_stop)
            inside = inside & (kv_idx >= patch.key_start) & (kv_idx < patch.key_stop)
            is_open = is_open | (inside & (kv_idx <= q_idx)) if patch.is_open else is_open & ~inside
        return is_open

    return mask_mod
