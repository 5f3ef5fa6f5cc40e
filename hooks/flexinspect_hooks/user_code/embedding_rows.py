"""Rows of `inputs_embeds` that are rows of the embedding table, past a module that changes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

RAW_EMBEDDINGS_EVENT = "raw-embeddings"
_N_COLUMNS = 4  # that choose the rows of the table to compare in full
_MAX_ROWS, _MAX_MATCHES = 4096, 16384


@torch.no_grad()
def raw_embedding_facts(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return which rows of a forward's `inputs_embeds` lack what the embedding module does.

    Those of batch row 0 that equal a row of its weight exactly, if the module gives another vector
    for that token. `factor` is the scale that it applies, None if it is none. The result is None
    for modules that only look up, and without such rows. It waits for the device.
    """
    given = arguments.get("inputs_embeds")
    get = getattr(model, "get_input_embeddings", None)
    if not isinstance(given, Tensor) or given.dim() != 3 or get is None:
        return None
    module = get()
    if not isinstance(module, nn.Embedding) or type(module).forward is nn.Embedding.forward:
        return None
    rows, table = given[0], module.weight
    is_plain = type(table) in (Tensor, nn.Parameter) and table.dtype == rows.dtype
    if not is_plain or table.device != rows.device or table.is_meta or len(rows) > _MAX_ROWS:
        return None
    if rows.shape[1] != table.shape[1]:
        return None
    positions, ids = _find_rows(rows, table)
    if not len(ids):
        return None
    raw, made = table[ids].float(), type(module).forward(module, ids).float()
    changed = (raw - made).abs().amax(1) > 1e-3 * raw.abs().amax(1)
    if not changed.any():
        return None
    raw, made = raw[changed], made[changed]
    factor = float((raw * made).sum() / (raw * raw).sum())
    is_scale = torch.allclose(made, factor * raw, rtol=0.02, atol=1e-6)
    return {
        "positions": positions[changed].tolist(),
        "ids": ids[changed].tolist(),
        "rows": len(rows),
        "factor": factor if is_scale else None,
        "module": type(module).__name__,
    }


def _find_rows(rows: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices of rows, (rows, width), and of the equal ones of a table, (tokens, width).

    Rows of zeros are left out: a scale does not change them.
    """
    kept = torch.ones(len(table), dtype=torch.bool, device=table.device)
    for column in range(min(_N_COLUMNS, table.shape[1])):
        kept &= torch.isin(table[:, column], rows[:, column])
    tokens, nonzero = kept.nonzero()[:, 0], rows.any(1)
    none = tokens[:0]
    if not len(tokens) or len(tokens) > _MAX_MATCHES:
        return none, none
    same = nonzero[:, None] & (rows[:, None, 0] == table[None, tokens, 0])
    for column in range(1, min(_N_COLUMNS, table.shape[1])):
        same &= rows[:, None, column] == table[None, tokens, column]
    first = same.int().argmax(1)  # equal rows of the table give equal vectors
    found = same.any(1).nonzero()[:, 0]
    ids = tokens[first[found]]
    is_equal = (rows[found] == table[ids]).all(1)
    return found[is_equal], ids[is_equal]
