"""Masks as rules over positions: presets, the masks of the literature, and their composition.

A rule compares vectors over rows with vectors over keys and never builds an integer per cell, so
that a mask of any size is evaluated at the speed of a comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from flexinspect.core.errors import MaskError
from flexinspect.masks.cell_mask import CellMask
from flexinspect.masks.mask_presets import BoolArray, IntArray, MaskSpec, Segments, preset
from flexinspect.records.prompt import generated_start

Rule = Callable[[IntArray, IntArray], BoolArray]
"""From positions of rows (rows, 1) and of keys (1, keys) to cells that broadcast to both."""


class RuleMask(Struct, frozen=True):
    """A mask that is one rule, the same for all heads."""

    name: str
    rule: Rule
    n_heads: int = 1

    def cells(self, q_idx: IntArray, kv_idx: IntArray, head: int = 0) -> BoolArray:
        """Return which keys each row attends to, bool (rows, keys)."""
        cells = self.rule(q_idx[:, None], kv_idx[None])
        shape = (len(q_idx), len(kv_idx))
        return cells if cells.shape == shape else np.broadcast_to(cells, shape)


class ArrayMask(Struct, frozen=True):
    """A mask from an array, bool (heads, rows, keys); cells outside of it are closed."""

    name: str
    array: BoolArray

    @property
    def n_heads(self) -> int:
        """The number of heads with a mask of their own."""
        return len(self.array)

    def cells(self, q_idx: IntArray, kv_idx: IntArray, head: int = 0) -> BoolArray:
        """Return which keys each row attends to, bool (rows, keys)."""
        _, n_rows, n_keys = self.array.shape
        inside = ((q_idx >= 0) & (q_idx < n_rows))[:, None] & ((kv_idx >= 0) & (kv_idx < n_keys))
        at = np.ix_(np.clip(q_idx, 0, n_rows - 1), np.clip(kv_idx, 0, n_keys - 1))
        cells: BoolArray = self.array[min(head, self.n_heads - 1)][at] & inside
        return cells


# -- composition ----------------------------------------------------------------------------------


class CombinedMask(Struct, frozen=True):
    """The cells that all masks open ("and") or that any of them opens ("or")."""

    operation: Literal["and", "or"]
    parts: tuple[CellMask, ...]

    @property
    def name(self) -> str:
        """The expression of the mask."""
        return f" {self.operation} ".join(map(_operand_name, self.parts))

    @property
    def n_heads(self) -> int:
        """The number of heads with a mask of their own."""
        return max(part.n_heads for part in self.parts)

    def cells(self, q_idx: IntArray, kv_idx: IntArray, head: int = 0) -> BoolArray:
        """Return which keys each row attends to, bool (rows, keys)."""
        combine = np.logical_and if self.operation == "and" else np.logical_or
        cells = self.parts[0].cells(q_idx, kv_idx, head)
        for part in self.parts[1:]:
            cells = combine(cells, part.cells(q_idx, kv_idx, head))
        return cells


class NegatedMask(Struct, frozen=True):
    """The cells that a mask closes."""

    part: CellMask

    @property
    def name(self) -> str:
        """The expression of the mask."""
        return f"not {_operand_name(self.part)}"

    @property
    def n_heads(self) -> int:
        """The number of heads with a mask of their own."""
        return self.part.n_heads

    def cells(self, q_idx: IntArray, kv_idx: IntArray, head: int = 0) -> BoolArray:
        """Return which keys each row attends to, bool (rows, keys)."""
        return np.logical_not(self.part.cells(q_idx, kv_idx, head))


class ShiftedMask(Struct, frozen=True):
    """A mask moved by `keys` to the right and by `rows` down; cells from outside are closed."""

    part: CellMask
    keys: int
    rows: int = 0

    @property
    def name(self) -> str:
        """The expression of the mask."""
        rows = f", {self.rows}" if self.rows else ""
        return f"shift({self.part.name}, {self.keys}{rows})"

    @property
    def n_heads(self) -> int:
        """The number of heads with a mask of their own."""
        return self.part.n_heads

    def cells(self, q_idx: IntArray, kv_idx: IntArray, head: int = 0) -> BoolArray:
        """Return which keys each row attends to, bool (rows, keys)."""
        rows, keys = q_idx - np.int32(self.rows), kv_idx - np.int32(self.keys)
        cells = self.part.cells(np.maximum(rows, 0), np.maximum(keys, 0), head)
        if rows.min(initial=0) >= 0 and keys.min(initial=0) >= 0:
            return cells
        inside: BoolArray = cells & (rows >= 0)[:, None] & (keys >= 0)
        return inside


class PerHeadMask(Struct, frozen=True):
    """A mask of its own for each head."""

    parts: tuple[CellMask, ...]

    @property
    def name(self) -> str:
        """The expression of the mask."""
        return f"per-head({', '.join(part.name for part in self.parts)})"

    @property
    def n_heads(self) -> int:
        """The number of heads with a mask of their own."""
        return len(self.parts)

    def cells(self, q_idx: IntArray, kv_idx: IntArray, head: int = 0) -> BoolArray:
        """Return which keys each row attends to, bool (rows, keys)."""
        return self.parts[min(head, len(self.parts) - 1)].cells(q_idx, kv_idx, head)


def _operand_name(mask: CellMask) -> str:
    return f"({mask.name})" if isinstance(mask, CombinedMask) else mask.name


def difference_masks(mask: CellMask, declared: CellMask) -> tuple[CellMask, CellMask]:
    """Return the lost cells (declared open, closed in `mask`) and the leaked ones, as masks."""
    lost = CombinedMask("and", (declared, NegatedMask(mask)))
    return lost, CombinedMask("and", (mask, NegatedMask(declared)))


# -- the elementary masks -------------------------------------------------------------------------


def spec_mask(spec: MaskSpec) -> RuleMask:
    """Return a mask in normal form as a rule."""

    def rule(q: IntArray, kv: IntArray) -> BoolArray:
        prefix_stops, local_starts = (column.astype(np.int32) for column in spec.intervals(q))
        cells: BoolArray = kv >= local_starts
        cells |= kv < prefix_stops
        cells &= kv <= q
        return cells

    return RuleMask(spec.name, rule)


def preset_mask(name: str, segments: Segments) -> RuleMask:
    """Return the mask of a preset for these segments. Raises `MaskError` without segments."""
    if not segments:
        raise MaskError(f"The mask '{name}' needs segments.", hint="Name a preset such as small.")
    return spec_mask(preset(name, segments))


def full(segments: Segments) -> RuleMask:
    """Every row attends to every key."""
    return RuleMask("full", lambda q, kv: np.ones((1, 1), np.bool_))


def causal(segments: Segments) -> RuleMask:
    """Every row attends to itself and to all positions before it."""
    return RuleMask("causal", lambda q, kv: kv <= q)


def prefix_lm(segments: Segments, prefix: int | None = None) -> RuleMask:
    """Every row attends to the prefix (default: the prompt), and to all positions before it."""
    stop = _prompt_length(segments) if prefix is None else prefix
    return RuleMask(f"prefix-lm({stop})", lambda q, kv: (kv <= q) | (kv < stop))


def sliding_window(segments: Segments, size: int) -> RuleMask:
    """Every row attends to itself and to the `size` - 1 positions before it."""
    rule: Rule = lambda q, kv: (kv <= q) & (kv > q - np.int32(size))  # noqa: E731
    return RuleMask(f"sliding-window({size})", rule)


def document_packing(segments: Segments, *lengths: int) -> RuleMask:
    """Causal inside of each document; the last length repeats (default: segments)."""
    name = f"document-packing({', '.join(map(str, lengths))})" if lengths else "document-packing"
    if lengths:
        number = _documents_of_lengths(lengths)
    else:
        owners = np.array([segment.owner for segment in segments] or [0], np.int32)
        starts = np.array([segment.start for segment in segments] or [0], np.int32)
        number = lambda at: owners[np.searchsorted(starts, at, side="right") - 1]  # noqa: E731
    return RuleMask(name, lambda q, kv: (kv <= q) & (number(q) == number(kv)))


def _documents_of_lengths(lengths: tuple[int, ...]) -> Callable[[IntArray], IntArray]:
    stops = np.cumsum(lengths, dtype=np.int64)

    def number(at: IntArray) -> IntArray:
        repeated = np.maximum(at - stops[-1], 0) // lengths[-1]
        found: IntArray = (np.searchsorted(stops, at, side="right") + repeated).astype(np.int32)
        return found

    return number


def dilated(segments: Segments, stride: int) -> RuleMask:
    """Every row attends to itself and to each position a multiple of `stride` before it."""
    rule: Rule = lambda q, kv: (kv <= q) & (kv % stride == q % stride)  # noqa: E731
    return RuleMask(f"dilated({stride})", rule)


def global_tokens(segments: Segments, count: int) -> RuleMask:
    """The first `count` tokens attend to all, and all attend to them (Longformer)."""
    return RuleMask(f"global-tokens({count})", lambda q, kv: (kv < count) | (q < count))


def causal_block(segments: Segments, size: int) -> RuleMask:
    """Every row attends to its own block of `size` positions and to all blocks before it."""
    return RuleMask(f"causal-block({size})", lambda q, kv: kv // size <= q // size)


def tree_attention(segments: Segments, branching: int, start: int | None = None) -> RuleMask:
    """Rows from `start` on (default: the prompt's end) are a tree of drafted tokens.

    The tree is complete, with its nodes breadth first and `branching` children each: every node
    attends to the prompt, to its ancestors and to itself. This is the mask that verifies drafted
    tokens (SpecInfer, https://arxiv.org/abs/2305.09781).
    """
    root = np.int32(_prompt_length(segments) if start is None else start)

    def rule(q: IntArray, kv: IntArray) -> BoolArray:
        if branching == 1:  # a chain
            return kv <= q
        cells: BoolArray = (kv <= q) & (kv < root)
        node = np.where(q >= root, q - root, -1)
        while (node >= 0).any():
            cells |= (kv == node + root) & (node >= 0)
            node = np.where(node > 0, (node - 1) // branching, -1).astype(np.int32)
        return cells

    return RuleMask(f"tree-attention({branching}, {root})", rule)


def _prompt_length(segments: Segments) -> int:
    return generated_start(segments) or 0


ELEMENTARY: dict[str, Callable[..., RuleMask]] = {
    "full": full,
    "causal": causal,
    "prefix-lm": prefix_lm,
    "sliding-window": sliding_window,
    "document-packing": document_packing,
    "dilated": dilated,
    "global-tokens": global_tokens,
    "causal-block": causal_block,
    "tree-attention": tree_attention,
}
"""The elementary masks by name: functions of the segments and of numbers."""


def dense(mask: CellMask, n_rows: int, n_keys: int, head: int = 0) -> npt.NDArray[np.bool_]:
    """Return all cells of a mask, bool (n_rows, n_keys)."""
    rows, keys = (np.arange(n, dtype=np.int32) for n in (n_rows, n_keys))
    return np.array(mask.cells(rows, keys, head))
