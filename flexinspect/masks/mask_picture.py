"""A mask reduced to the size of a picture, without losing a cell, a border or an empty row."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from flexinspect.masks.mask_presets import BoolArray, IntArray
from flexinspect.masks.viewport import States
from flexinspect.records.prompt import Segment


class MaskPicture(Struct, frozen=True):
    """A mask in as many cells as a picture has: each stands for a range of rows and one of keys.

    Range n of the rows is `row_edges[n]` to `row_edges[n + 1] - 1`, the same for keys; a picture of
    full size has ranges of one position. `states` is uint8 (row ranges, key ranges) with the states
    of `flexinspect.masks.viewport`: `CLOSED` and `OPEN` only if all cells of the ranges are.
    `empty_rows` marks the row ranges with a row that attends to no key, `unseen_keys` the key
    ranges with a key that no row attends to. `first_generated` is the position of the first
    generated token, None without generated tokens. `words` are token texts by position.
    """

    title: str
    states: States
    row_edges: IntArray
    key_edges: IntArray
    empty_rows: BoolArray
    unseen_keys: BoolArray
    segments: tuple[Segment, ...] = ()
    first_generated: int | None = None
    words: Mapping[int, str] = field(default_factory=dict)

    @property
    def is_sampled(self) -> bool:
        """Whether a cell of the picture stands for more than one cell of the mask."""
        n_rows, n_keys = self.states.shape
        return bool(self.row_edges[-1] - self.row_edges[0] > n_rows) or bool(
            self.key_edges[-1] - self.key_edges[0] > n_keys
        )
