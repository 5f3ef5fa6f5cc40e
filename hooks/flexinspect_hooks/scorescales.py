"""By what a `score_mod` multiplies scores, where it does nothing else but add to them.

It is called on a few scores, in Python: a rule that multiplies by a constant, with or without a
bias of the place, gives lines of one slope. Whatever else it does (a cap, a factor of the place or
of the head, a mask) makes slopes that differ, and then nothing is known of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexinspect_hooks.callrefs import AttentionCall
from flexinspect_hooks.debugging.rules import are_mods_debugged

_SCORES = (-40.0, 2.0, 300.0)
"""Large enough for a cap to bend them."""


def has_score_mod(ref: AttentionCall) -> bool:
    """Say whether the call is one of FlexAttention with a `score_mod`."""
    return _score_mod_of(ref) is not None


def score_mod_slopes(refs: Sequence[AttentionCall]) -> list[Tensor | None]:
    """Return for each call float32 (slopes): by what its `score_mod` multiplies some scores.

    None where that is not known: the rule raised, or a debugger would stop in it.
    """
    known: dict[int, Tensor | None] = {}
    found: list[Tensor | None] = []
    for ref in refs:
        rule = _score_mod_of(ref)
        if rule is not None and id(rule) not in known:
            known[id(rule)] = None if are_mods_debugged() else _evaluate_slopes(rule, ref)
        found.append(ref.query.new_ones(1).float() if rule is None else known[id(rule)])
    return found


def _score_mod_of(ref: AttentionCall) -> Callable[..., Any] | None:
    return None if ref.kernel is None else ref.kernel.arguments.get("score_mod")


def _evaluate_slopes(score_mod: Callable[..., Any], ref: AttentionCall) -> Tensor | None:
    scores = torch.tensor(_SCORES, device=ref.query.device)
    places = torch.tensor(_sample_cells(ref), device=ref.query.device)
    try:
        with torch.no_grad():
            made = torch.stack([score_mod(score, *at) for at in places for score in scores])
    except Exception:  # the user's own rule; what it is called with here is no call of its kernel
        return None
    return (made.float().view(len(places), len(scores)).diff() / scores.diff()).flatten()


def _sample_cells(ref: AttentionCall) -> tuple[tuple[int, int, int, int], ...]:
    """Return (batch, head, q_idx, kv_idx) of cells that a causal rule leaves open."""
    batch, heads, q_len, _ = ref.query.shape
    last_q, last_kv = q_len - 1, ref.key.shape[2] - 1
    return (
        (0, 0, last_q, last_kv),
        (batch - 1, heads - 1, last_q, 0),
        (0, heads - 1, last_q // 2, 0),
    )
