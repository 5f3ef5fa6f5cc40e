"""An edited mask as a `MaskSource` that the model can run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexinspect.masks.algebra import BoolArray, MaskSpec
from flexinspect.masks.edits import MaskPatch, PatchedMask
from flexinspect_hooks.debugger.frames import breakpoints_disabled
from flexinspect_hooks.generation.mask_mods import ForwardWindow, MaskMod, arithmetic_mask_mod
from flexinspect_hooks.generation.mask_source import (
    MaskSource,
    SpecMaskSource,
    UserMaskSource,
    set_identity,
)
from flexinspect_hooks.python_internals.mask_mod_identity import mask_mod_identity

_MAX_REGIONS = 24
"""With more regions than this, the mask_mod is a table look-up instead of comparisons."""


class CustomBaseMask:
    """The user's mask_mod as the base of edits; head 0 represents all heads."""

    def __init__(self, source: UserMaskSource, device: torch.device) -> None:
        self.mask_mod = source.mask_mod
        self.name = source.name
        self._device = device

    def dense(self, n_q: int, n_kv: int | None = None, *, q_offset: int = 0) -> BoolArray:
        """Its cells, bool (n_q, n_kv), for the rows from `q_offset` on."""
        zero = torch.zeros((), dtype=torch.int64, device=self._device)
        last = q_offset + n_q if n_kv is None else n_kv
        over_kv = torch.vmap(self.mask_mod, in_dims=(None, None, None, 0))
        over_q = torch.vmap(over_kv, in_dims=(None, None, 0, None))
        q_idx = torch.arange(q_offset, q_offset + n_q, device=self._device)
        with breakpoints_disabled():
            cells: Tensor = over_q(zero, zero, q_idx, torch.arange(last, device=self._device))
        return np.asarray(cells.cpu())


def editable_mask(source: MaskSource, device: torch.device) -> PatchedMask:
    """The mask of a source, in the form that edits apply to."""
    edited = getattr(source, "edited", None)
    if isinstance(edited, PatchedMask):
        return edited
    if isinstance(source, SpecMaskSource):
        return PatchedMask(source.spec)
    assert isinstance(source, UserMaskSource)
    return PatchedMask(CustomBaseMask(source, device))


def make_mask_source(
    edited: PatchedMask, *, name: str, length: int, device: torch.device, compiled: bool
) -> MaskSource:
    """The source that runs an edited mask over sequences of at most `length` tokens."""
    base = edited.base
    if isinstance(base, MaskSpec) and not edited.patches:
        return SpecMaskSource(base, length=length, device=device, compiled=compiled)
    if isinstance(base, MaskSpec):
        base_mask_mod = _spec_mask_mod(base, length, device, compiled=compiled)
        identity = f"{base}"
    else:
        assert isinstance(base, CustomBaseMask)
        base_mask_mod = base.mask_mod
        identity = f"{base.name}{mask_mod_identity(base.mask_mod)}"
    mask_mod = _patched_mask_mod(base_mask_mod, edited.patches)
    set_identity(mask_mod, f"{identity}{edited.patches}")
    return EditedMask(edited, mask_mod, name=name, device=device)


def declared_mask(source: MaskSource) -> dict[str, Any]:
    """The entries of `GenerationRecord.declared` for the mask of a source."""
    if not isinstance(source, SpecMaskSource):
        return {"rule": source.name}
    spec = source.spec
    return {
        "preset": spec.name,
        "starts": spec.starts,
        "head": spec.prefix_stops,
        "low": spec.local_starts,
    }


class EditedMask(UserMaskSource):
    """Runs a mask_mod with patches on top, in the same way as the user's own mask_mod."""

    def __init__(
        self, edited: PatchedMask, mask_mod: MaskMod, *, name: str, device: torch.device
    ) -> None:
        super().__init__(mask_mod, name=name, device=device)
        self.edited = edited


def _spec_mask_mod(spec: MaskSpec, length: int, device: torch.device, *, compiled: bool) -> MaskMod:
    if not compiled and len(spec.starts) <= _MAX_REGIONS:
        return arithmetic_mask_mod(spec, ForwardWindow(length, length, 0))
    cells = torch.from_numpy(spec.dense(length)).to(device)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cells[q_idx, kv_idx]

    return mask_mod


def _patched_mask_mod(base: MaskMod, patches: Sequence[MaskPatch]) -> MaskMod:
    """A mask_mod with patches on top, in positions: comparisons only, no look-ups."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        is_open = base(b, h, q_idx, kv_idx)
        for patch in patches:
            inside = (q_idx >= patch.row_start) & (q_idx < patch.row_stop)
            inside = inside & (kv_idx >= patch.key_start) & (kv_idx < patch.key_stop)
            is_open = is_open | (inside & (kv_idx <= q_idx)) if patch.is_open else is_open & ~inside
        return is_open

    return mask_mod
