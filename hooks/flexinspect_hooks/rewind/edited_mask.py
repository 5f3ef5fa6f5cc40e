"""An edited mask as a `MaskSource` that the model can run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexinspect.masks.algebra import MaskSpec, spec_entries
from flexinspect.masks.edits import MaskPatch, PatchedMask
from flexinspect_hooks.generation.mask_source import (
    ForwardWindow,
    MaskMod,
    MaskSource,
    SpecMaskSource,
    UserMaskSource,
    set_identity,
)
from flexinspect_hooks.python_internals.mask_mod_identity import mask_mod_identity


def editable_mask(source: MaskSource) -> PatchedMask:
    """The mask of a source, in the form that edits apply to; head 0 represents all heads."""
    edited = getattr(source, "edited", None)
    if isinstance(edited, PatchedMask):
        return edited
    if isinstance(source, SpecMaskSource):
        return PatchedMask(source.spec)
    assert isinstance(source, UserMaskSource)
    return PatchedMask(source)


def make_mask_source(
    edited: PatchedMask, *, name: str, length: int, device: torch.device, compiled: bool
) -> MaskSource:
    """The source that runs an edited mask over sequences of at most `length` tokens."""
    base = edited.base
    if isinstance(base, MaskSpec):
        source = SpecMaskSource(base, length=length, device=device, compiled=compiled)
        if not edited.patches:
            return source
        base_mask_mod = source.mask_mod(ForwardWindow(length, length, 0))
        identity = f"{base}"
    else:
        assert isinstance(base, UserMaskSource)
        base_mask_mod = base.mask_mod
        identity = f"{base.name}{mask_mod_identity(base.mask_mod)}"
    mask_mod = _patched_mask_mod(base_mask_mod, edited.patches)
    set_identity(mask_mod, f"{identity}{edited.patches}")
    return EditedMask(edited, mask_mod, name=name, device=device)


def declared_mask(source: MaskSource) -> dict[str, Any]:
    """The entries of `GenerationRecord.declared` for the mask of a source."""
    if not isinstance(source, SpecMaskSource):
        return {"mask_mod": source.name}
    return spec_entries(source.spec)


class EditedMask(UserMaskSource):
    """Runs a mask_mod with patches on top, in the same way as the user's own mask_mod."""

    def __init__(
        self, edited: PatchedMask, mask_mod: MaskMod, *, name: str, device: torch.device
    ) -> None:
        super().__init__(mask_mod, name=name, device=device)
        self.edited = edited


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
