"""The attention of a forward that is to be differentiated, under the mask that was executed.

FlexAttention has a backward on CUDA alone; elsewhere the dense reference stands in for it. Both go
through the patch that generation goes through, so that every layer gets what it got then: its mask,
its scale, its soft cap.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex_module
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from flexinspect.errors import MaskError
from flexinspect_hooks.masksource import MaskSource
from flexinspect_hooks.patching import FlexPatch
from flexinspect_hooks.received import open_cells
from flexinspect_hooks.reference import dense_attention

DENSE_REFERENCE = "dense reference"
MAX_CELLS = 1 << 28
"""Cells of a mask, over the heads that differ, that are made dense at most (256 MiB)."""


def flex_has_backward(device: torch.device) -> bool:
    """Say whether FlexAttention can be differentiated on a device (torch 2.11 to 2.15)."""
    return device.type == "cuda"


class GradientPatch(FlexPatch):
    """A `FlexPatch` whose attention can be differentiated; `path` says what it is.

    Without `keeps_weights` the dense attention of each layer is computed again in the backward, so
    that its weights (heads x rows x keys) never lie in memory for more than one layer. Autograd's
    anomaly mode needs them kept, to name the line that made a NaN.
    """

    def __init__(
        self,
        model: nn.Module,
        source: MaskSource,
        *,
        compiled: bool,
        use_flex: bool,
        keeps_weights: bool = False,
    ) -> None:
        super().__init__(model, source, compiled=compiled and use_flex)
        self._executed_compiled = compiled
        self._uses_flex = use_flex
        self._keeps_weights = keeps_weights
        self._dense_masks: dict[tuple[int, int], tuple[BlockMask, Tensor]] = {}

    @property
    def path(self) -> str:
        """What differentiates: the dense reference, or FlexAttention itself."""
        if not self._uses_flex:
            return DENSE_REFERENCE
        return "flex compiled" if self.compiled else "flex"

    def __enter__(self) -> GradientPatch:
        super().__enter__()
        if self._uses_flex:
            # Plain Python FlexAttention, as generation runs it, is not made for a backward.
            flex_module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = False
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self._dense_masks.clear()

    def _make_mask(self, *args: Any, **kwargs: Any) -> BlockMask:
        block_mask = super()._make_mask(*args, **kwargs)
        return with_query_blocks(block_mask) if self._uses_flex else block_mask

    def _flex(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        block_mask: BlockMask | None,
        scaling: float | None,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor | None]:
        if self._uses_flex:
            return super()._flex(query, key, value, block_mask, scaling, softcap)
        visible = self._dense_mask(block_mask, query.shape[1])

        def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return dense_attention(
                query, key, value, visible=visible, scale=scaling, softcap=softcap
            )

        if self._keeps_weights:
            return call(query, key, value), None
        again: Tensor = checkpoint(
            call, query, key, value, use_reentrant=False, preserve_rng_state=False
        )
        return again, None

    def _kernel(self, q_len: int) -> Any:
        return super()._kernel(q_len) if self.compiled else flex_attention

    def _dense_mask(self, block_mask: BlockMask | None, heads: int) -> Tensor:
        """Return the executed cells of a layer type's mask, made once per forward."""
        if block_mask is None:
            raise MaskError("The layer got no mask, and what ran instead is not known.")
        key = (id(block_mask), heads)
        if key not in self._dense_masks:
            n_q, n_kv = block_mask.seq_lengths
            cells = None
            if int(n_q) * int(n_kv) <= MAX_CELLS:
                cells = open_cells(block_mask, heads, compiled=self._executed_compiled)
            if cells is None:
                raise MaskError(f"The mask of {n_q} x {n_kv} cells is too large to be made dense.")
            self._dense_masks[key] = (block_mask, cells)  # with the mask, whose id is then its own
        return self._dense_masks[key][1]


def with_query_blocks(block_mask: BlockMask) -> BlockMask:
    """Return a block mask with the transposed tables too, which a backward walks."""
    return BlockMask.from_kv_blocks(
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
        BLOCK_SIZE=block_mask.BLOCK_SIZE,
        mask_mod=block_mask.mask_mod,
        seq_lengths=block_mask.seq_lengths,
        compute_q_blocks=True,
    )
