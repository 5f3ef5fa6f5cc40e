"""The mask that a FlexAttention kernel applies, from a mask_mod and its block tables, in numpy."""

from __future__ import annotations

from flexinspect.masks.key_blocks import BlockTables
from flexinspect.masks.mask_presets import BoolArray


def expand_blocks(blocks: BoolArray, n_q: int, n_kv: int, size: tuple[int, int]) -> BoolArray:
    """Expand a bool array over blocks to a mask of shape (n_q, n_kv)."""
    return blocks.repeat(size[0], axis=0).repeat(size[1], axis=1)[:n_q, :n_kv]


def executed_mask(
    mask_mod_cells: BoolArray, tables: BlockTables, size: tuple[int, int], *, compiled: bool
) -> BoolArray:
    """Return the mask that the kernel applies, of the shape of `mask_mod_cells` (n_q, n_kv).

    Uncompiled FlexAttention evaluates the `mask_mod` on every cell. Compiled FlexAttention computes
    (partial block and `mask_mod`) or full block, and never visits other blocks. Tested against both
    kernels; see the sources of `torch.nn.attention.flex_attention`.
    """
    if not compiled:
        return mask_mod_cells
    n_q, n_kv = mask_mod_cells.shape
    partial = expand_blocks(tables.partial, n_q, n_kv, size)
    full = expand_blocks(tables.full, n_q, n_kv, size)
    return (partial & mask_mod_cells) | full
