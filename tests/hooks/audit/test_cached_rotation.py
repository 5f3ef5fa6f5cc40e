"""Keys that are cached without RoPE, or rotated again: the audit says for which positions."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from support.audits import Audit, decode
from support.tiny import make_model
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from flexinspect.rules.numerics.audit_findings import REPRODUCED

N_PROMPT = 12


class Keys:
    """The keys of one layer, kept by a program: `cached` holds what its cache would."""

    def __init__(self, model: Any) -> None:
        self.rotary, self.cached = model.model.rotary_emb, torch.zeros(0)

    def turn(self, keys: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.rotary(keys, positions[None])
        turned: Tensor = apply_rotary_pos_emb(keys, keys, cos, sin)[1]
        return turned

    def add(self, new: Tensor) -> None:
        is_first = new.shape[2] > 1
        self.cached = new if is_first else torch.cat((self.cached, new), 2)


Rule = Callable[[Keys, Tensor, Tensor], Tensor]
"""Takes the layer's keys, the new ones before rotation, and their positions; returns all keys."""


def rotates_once_when_cached(keys: Keys, new: Tensor, now: Tensor) -> Tensor:
    keys.add(keys.turn(new, now))
    return keys.cached


def rotates_all_when_read(keys: Keys, new: Tensor, now: Tensor) -> Tensor:
    keys.add(new)
    return keys.turn(keys.cached, torch.arange(keys.cached.shape[2]))


def rotates_all_for_the_newest(keys: Keys, new: Tensor, now: Tensor) -> Tensor:
    keys.add(new)
    return keys.turn(keys.cached, now)


def never_rotates_in_decode(keys: Keys, new: Tensor, now: Tensor) -> Tensor:
    keys.add(new)
    return keys.turn(new, now) if len(now) > 1 else keys.cached


def rotates_only_the_new_key(keys: Keys, new: Tensor, now: Tensor) -> Tensor:
    keys.add(new)
    return torch.cat((keys.cached[:, :, : -len(now)], keys.turn(new, now)), 2)


def rotates_cached_keys_again(keys: Keys, new: Tensor, now: Tensor) -> Tensor:
    before = keys.cached
    keys.add(keys.turn(new, now))
    return keys.cached if len(now) > 1 else keys.turn(torch.cat((before, new), 2), now)


def rotates_again_in_each_step(keys: Keys, new: Tensor, now: Tensor) -> Tensor:
    keys.add(new)
    keys.cached = keys.turn(keys.cached, torch.arange(keys.cached.shape[2]))
    return keys.cached


def rotates_again_for_the_newest(keys: Keys, new: Tensor, now: Tensor) -> Tensor:
    keys.add(new)
    keys.cached = keys.turn(keys.cached, now)
    return keys.cached


def patch(model: Any, layer: int, rule: Rule) -> None:
    """Let one layer keep its keys by itself, by a rule."""
    keys, attention = Keys(model), model.model.layers[layer].self_attn

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: Any, past_key_values: Any, **_: Any
    ) -> Any:
        q, k, v = (
            part(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        k_now, v = past_key_values.update(k, v, self.layer_idx)
        n, total = k.shape[2], k_now.shape[2]
        q = apply_rotary_pos_emb(q, q, *position_embeddings)[0]
        k = rule(keys, k, torch.arange(total - n, total))
        k, v = (one.repeat_interleave(self.num_key_value_groups, 1) for one in (k, v))
        allowed = torch.ones(n, total, dtype=torch.bool).tril(total - n)
        scores = (q @ k.mT * self.scaling).masked_fill(~allowed, -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.o_proj(out), None

    attention.forward = MethodType(forward, attention)


FAULTS: dict[Rule, str] = {
    rotates_all_for_the_newest: "all keys rotated (RoPE) for the position of the newest token",
    never_rotates_in_decode: "keys that are cached without rotation (RoPE)",
    rotates_only_the_new_key: "only their own key has it",
    rotates_cached_keys_again: "cached keys that are rotated (RoPE) once more",
    rotates_again_in_each_step: "once more, for their own positions",
    rotates_again_for_the_newest: "each decode step rotates (RoPE) all cached keys once more, for "
    "the position of the newest token",
}


@pytest.mark.parametrize("rule", FAULTS)
def test_the_positions_for_which_cached_keys_are_rotated_are_named(
    audit: Audit, rule: Rule
) -> None:
    model = make_model("llama")
    patch(model, 1, rule)
    _, (found,), _ = audit(model, lambda: decode(model, 5))
    assert (found.id, found.layer, found.step) == (REPRODUCED, 1, 1)
    assert FAULTS[rule] in found.sentence
    assert "So are those of the 3 later steps" in found.sentence


@pytest.mark.parametrize("rule", [rotates_once_when_cached, rotates_all_when_read])
def test_keys_that_are_rotated_once_for_their_own_positions_agree(audit: Audit, rule: Rule) -> None:
    model = make_model("llama")
    patch(model, 1, rule)
    verdicts, findings, _ = audit(model, lambda: decode(model, 5))
    assert not findings
    assert [(one.n_steps, one.divergence) for one in verdicts] == [(5, None)]
