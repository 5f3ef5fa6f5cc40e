"""Settings of a configuration that the model does not follow: a tied head, the base of RoPE."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect.rules.numerics.unmet_configuration import ROPE, UNTIED

_MAX_ROUNDING = 0.02
"""Relative difference of two copies of a table, of which one has another dtype."""
_MAX_ROWS = 256


def unmet_settings(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the data of an event for each setting that the model does not follow."""
    for find in (_untied_head, _unread_rope):
        with suppress(Exception):  # a model, and a configuration, may be of any kind
            facts = find(model)
            if facts is not None:
                yield facts


def _untied_head(model: Any) -> dict[str, Any] | None:
    """Return facts about a head that should be the embedding table, and has other values.

    `load_state_dict(assign=True)` replaces the parameter of the one and not of the other.
    """
    if not model.config.get_text_config(decoder=True).tie_word_embeddings:
        return None
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if head is table or head.data_ptr() == table.data_ptr() or not _are_tables(table, head):
        return None
    rows = torch.linspace(0, len(table) - 1, min(len(table), _MAX_ROWS), device=table.device)
    one, other = (t.detach()[rows.round().long().to(t.device)].float().cpu() for t in (table, head))
    difference = float((other - one).norm() / one.norm().clamp_min(1e-30))
    if not difference > _MAX_ROUNDING:
        return None
    names = {id(one): name for name, one in model.named_parameters(remove_duplicate=False)}
    known = {"head": names.get(id(head), "the head"), "table": names.get(id(table), "the table")}
    return {"what": UNTIED, **known, "difference": difference}


def _are_tables(table: Any, head: Any) -> bool:
    both = (table, head)
    is_plain = all(isinstance(one, Tensor) and not one.is_meta for one in both)
    return is_plain and table.shape == head.shape and all(t.is_floating_point() for t in both)


def _unread_rope(model: Any) -> dict[str, Any] | None:
    """Return facts about a base that is set beside `rope_parameters`, which the model reads."""
    config = model.config.get_text_config(decoder=True)
    given, parameters = vars(config).get("rope_theta"), vars(config).get("rope_parameters")
    used = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    if not isinstance(given, int | float) or not isinstance(used, int | float) or given == used:
        return None
    return {"what": ROPE, "name": "rope_theta", "given": float(given), "used": float(used)}
