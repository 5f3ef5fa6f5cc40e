"""What breakpoints ask of tensors while the model runs. Each check waits for the device.

Nothing here is called unless a breakpoint that needs it is switched on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flexinspect.breaks.words import NAN
from flexinspect_hooks.callrefs import AttentionCall

_MAX_NAMED_ROWS = 4
"""Rows that a sentence names."""

_MAX_DEPTH = 3


def describe_bad_values(kind: str, output: Any) -> str:
    """Say how many NaNs, or infinities, are among a module's outputs, and in which rows.

    Empty when there is none. Rows are those of batch 0 of (batch, rows, ...).
    """
    for tensor in _float_tensors(output):
        flags = torch.isnan(tensor) if kind == NAN else torch.isinf(tensor)
        n = int(flags.sum())
        if n:
            values = "value" if n == 1 else "values"
            word = "NaN" if kind == NAN else "infinite"
            return f"{n} {word} {values}{_describe_rows(flags)}"
    return ""


def _float_tensors(output: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif depth < _MAX_DEPTH and isinstance(output, tuple | list | dict):
        for one in output.values() if isinstance(output, dict) else output:
            yield from _float_tensors(one, depth + 1)


def _describe_rows(flags: Tensor) -> str:
    if flags.dim() != 3:
        return ""
    rows = torch.nonzero(flags[0].any(-1)).flatten().tolist()
    return f" in {format_rows(rows)}" if rows else " (in another row of the batch)"


def format_rows(rows: list[int]) -> str:
    """Return "row 3", "rows 3, 4, 5" or "rows 3, 4, 5, 6 and 12 more"."""
    named = ", ".join(map(str, rows[:_MAX_NAMED_ROWS]))
    more = f" and {len(rows) - _MAX_NAMED_ROWS} more" if len(rows) > _MAX_NAMED_ROWS else ""
    return f"row{'s' if len(rows) > 1 else ''} {named}{more}"


def empty_rows(call: AttentionCall) -> list[int]:
    """Return the rows of an attention call's batch 0 that saw no key, in any of its heads.

    By the kernel's own row LSE where there is one, else by a dense mask, else by an output of
    exact zeros, which is what FlexAttention gives such a row.
    """
    if call.lse is not None:
        closed = torch.isneginf(call.lse[0]).any(0)
    elif isinstance(call.mask, Tensor):
        closed = _masked_rows(call.mask)
    elif call.path.startswith("flex"):
        closed = (call.output[0] == 0).all(-1).any(-1)
    else:
        return []
    rows: list[int] = torch.nonzero(closed).flatten().tolist()
    return rows


def _masked_rows(mask: Tensor) -> Tensor:
    """Return which rows of a dense mask (..., rows, keys) are closed in every cell of a head."""
    while mask.dim() > 3:
        mask = mask[0]
    if mask.dtype == torch.bool:
        closed = ~mask.any(-1)
    elif mask.is_floating_point():
        closed = (mask <= torch.finfo(mask.dtype).min).all(-1)
    else:
        return torch.zeros(mask.shape[-2], dtype=torch.bool, device=mask.device)
    return closed.any(0) if closed.dim() > 1 else closed
