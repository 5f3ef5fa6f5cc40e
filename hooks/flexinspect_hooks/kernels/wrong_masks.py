"""The masks that kernels apply by mistake, each with its class, from the simplest on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from msgspec import Struct
from torch import Tensor

from flexinspect_hooks.kernels.problem import Problem

_BLOCKS = (16, 32, 64, 128)


class MaskFault(Struct, frozen=True):
    """A wrong mask: bool, broadcastable to (batch, heads, rows, keys)."""

    kind: str
    sentence: str
    cells: Tensor


def mask_faults(problem: Problem) -> Iterator[MaskFault]:
    """Yield the wrong masks that differ from the problem's."""
    cells = problem.cells
    for fault in (*_whole(cells), *_single_keys(cells), *_shifted(cells), *_blocks(problem)):
        if not torch.equal(fault.cells.expand_as(cells), cells):
            yield fault


def _whole(cells: Tensor) -> Iterator[MaskFault]:
    yield MaskFault("mask-inverted", "The mask is inverted: closed keys are used.", ~cells)
    ignored = torch.ones_like(cells)
    yield MaskFault("mask-ignored", "The mask is ignored: every key is used.", ignored)
    if cells.shape[-1] == cells.shape[-2]:
        yield MaskFault("mask-transposed", "Rows and keys of the mask are exchanged.", cells.mT)
        causal = ignored.tril()
        text = "The mask is ignored, and the plain causal mask is used."
        yield MaskFault("mask-ignored", text, causal)
    if cells.shape[1] > 1:
        text = "All heads use the mask of head 0."
        yield MaskFault("mask-of-head-0", text, cells[:, :1].expand_as(cells))
    if cells.shape[0] > 1:
        text = "The whole batch uses the mask of batch row 0."
        yield MaskFault("mask-of-batch-0", text, cells[:1].expand_as(cells))


def _single_keys(cells: Tensor) -> Iterator[MaskFault]:
    n_keys = cells.shape[-1]
    for kind, key in (("last", n_keys - 1), ("first", 0)):
        without = cells.clone()
        without[..., key] = False
        text = f"The {kind} key ({key}) is never used."
        yield MaskFault(f"{kind}-key-dropped", text, without)
    position = torch.arange(n_keys, device=cells.device)
    last = torch.where(cells, position, -1).amax(-1, keepdim=True)
    text = "The last open key of each row is not used (< in place of <=)."
    yield MaskFault("border-off-by-one", text, cells & (position != last))
    text = "Each row uses one key after its last open one (<= in place of <)."
    yield MaskFault("border-off-by-one", text, cells | (position == last + 1))


def _shifted(cells: Tensor) -> Iterator[MaskFault]:
    for shift, word in ((1, "later"), (-1, "earlier")):
        moved = cells.roll(shift, -1)
        moved[..., 0 if shift > 0 else -1] = False
        yield MaskFault("mask-shifted", f"The mask is one key {word} than it must be.", moved)
    rows, keys = cells.shape[-2:]
    if rows != keys:
        text = "The causal mask begins at the first key, not at the last (no offset of the rows)."
        top_left = torch.ones_like(cells).tril()
        yield MaskFault("causal-offset", text, top_left)


def _blocks(problem: Problem) -> Iterator[MaskFault]:
    """Faults at the borders of blocks of keys, for the sizes that kernels use."""
    cells, n_keys = problem.cells, problem.config.kv_len
    sizes = dict.fromkeys([problem.config.block_size, *_BLOCKS])
    key = torch.arange(n_keys, device=cells.device)
    row = torch.arange(cells.shape[-2], device=cells.device)[:, None]
    row = row + n_keys - problem.config.q_len
    for size in (size for size in sizes if size < n_keys):
        of = f"of each block of {size} keys"
        faults = {
            f"The last key {of} is not used.": cells & (key % size != size - 1),
            f"The first key {of} is not used.": cells & (key % size != 0),
            f"The first key {of} after block 0 is not used.": cells
            & ((key % size != 0) | (key == 0)),
            f"The last block of {size} keys is not used.": cells
            & (key < (n_keys - 1) // size * size),
            f"Keys after the last whole block of {size} are not used.": cells
            & (key < n_keys // size * size),
            f"Rows that end a block of {size} use the first key of the next one.": cells
            | ((key == row + 1) & (key % size == 0)),
            f"Rows that begin a block of {size} do not use its first key.": cells
            & ~((key == row) & (key % size == 0)),
            f"Blocks of {size} on the diagonal are not masked.": cells
            | (key // size == row // size),
            f"Blocks of {size} on the diagonal are not used.": cells & (key // size != row // size),
            f"Keys before the first block of {size} of a row's end are not used.": cells
            & (key >= row // size * size),
        }
        for sentence, wrong in faults.items():
            yield MaskFault("block-border", sentence, wrong)
    yield from _partial_blocks(problem)


def _partial_blocks(problem: Problem) -> Iterator[MaskFault]:
    """The mask by whole blocks of the BlockMask, and the mask without its partial blocks."""
    cells, size = problem.cells, problem.config.block_size
    rows, keys = cells.shape[-2:]
    padded = torch.nn.functional.pad(cells, (0, -keys % size, 0, -rows % size))
    shape = (*padded.shape[:2], padded.shape[2] // size, size, padded.shape[3] // size, size)
    counts = padded.reshape(shape).sum((-3, -1))
    for kind, chosen in (
        ("computed without the mask", counts > 0),
        ("not used", counts == size**2),
    ):
        spread = chosen.repeat_interleave(size, -2).repeat_interleave(size, -1)[..., :rows, :keys]
        wrong = spread if kind != "not used" else cells & spread
        yield MaskFault("partial-blocks", f"Partial blocks of {size} are {kind}.", wrong)
