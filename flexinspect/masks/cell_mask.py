"""The protocol of masks that are drawn, analysed and verified cell by cell."""

from __future__ import annotations

from typing import Protocol

from flexinspect.masks.mask_presets import BoolArray, IntArray


class CellMask(Protocol):
    """A mask over positions that gives any part of its cells, so that it never needs to be whole.

    `n_heads` is 1 if all heads have the same mask.
    """

    @property
    def name(self) -> str:
        """The name in titles and messages."""

    @property
    def n_heads(self) -> int:
        """The number of heads with a mask of their own."""

    def cells(self, q_idx: IntArray, kv_idx: IntArray, head: int = 0) -> BoolArray:
        """Return which keys each row attends to, bool (rows, keys); the positions are 1-D."""
