"""A mask as a small picture in text: what a debugger's pane has room for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from flexinspect_hooks.debugging.presentation import torch_modes_disabled, unwrap_tensor

MAX_ROWS, MAX_COLS = 24, 48
"""Cells of a picture, at most."""

OPEN_CELL, PARTIAL_CELL, CLOSED_CELL = "█", "▒", "·"


def is_mask(tensor: Tensor) -> bool:
    """Say whether a tensor has the form of a mask: booleans, of two dimensions or more."""
    return tensor.dtype == torch.bool and tensor.dim() >= 2


def render_mask(mask: Tensor) -> list[str]:
    """Return the first batch and head of a boolean mask, row by row; at most ROWS by COLS cells.

    A larger one is sampled: each cell shows one of the mask's.
    """
    with torch_modes_disabled():
        plane = unwrap_tensor(mask)
        while plane.dim() > 2:
            plane = plane[0]
        rows, cols = (
            _sample_positions(plane.shape[0], MAX_ROWS),
            _sample_positions(plane.shape[1], MAX_COLS),
        )
        seen = plane[rows.to(plane.device)][:, cols.to(plane.device)].cpu().tolist()
        return ["".join(OPEN_CELL if one else CLOSED_CELL for one in row) for row in seen]


def render_blocks(mask: BlockMask) -> list[str]:
    """Return the block tables of batch 0 and head 0: full, partial and closed blocks."""
    with torch_modes_disabled():
        n_rows, n_cols = mask.kv_num_blocks.shape[-1], mask.kv_indices.shape[-1]
        cells = [[CLOSED_CELL] * n_cols for _ in range(min(n_rows, MAX_ROWS))]
        tables = [(mask.kv_num_blocks, mask.kv_indices, PARTIAL_CELL)]
        if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
            tables.append((mask.full_kv_num_blocks, mask.full_kv_indices, OPEN_CELL))
        for numbers, indices, sign in tables:
            found = indices[0, 0, :MAX_ROWS].tolist()
            for row, number in enumerate(numbers[0, 0, :MAX_ROWS].tolist()):
                for col in found[row][:number]:
                    cells[row][col] = sign
        return ["".join(row[:MAX_COLS]) for row in cells]


def render_mask_mod(mask: BlockMask) -> list[str]:
    """Return what the rule says of batch 0 and head 0, sampled as above. It runs the rule."""
    with torch_modes_disabled():
        q_len, kv_len = mask.shape[-2:]
        device = mask.kv_num_blocks.device
        rows, cols = (
            _sample_positions(q_len, MAX_ROWS).to(device),
            _sample_positions(kv_len, MAX_COLS).to(device),
        )

        def sampled(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return mask.mask_mod(b, h, rows[q_idx], cols[kv_idx])

        return render_mask(create_mask(sampled, 1, 1, len(rows), len(cols), device=str(device)))


def _sample_positions(length: int, most: int) -> Tensor:
    """Return at most this many positions of a length, evenly."""
    n = min(length, most)
    return torch.linspace(0, max(length - 1, 0), n, dtype=torch.float64).round().long()
