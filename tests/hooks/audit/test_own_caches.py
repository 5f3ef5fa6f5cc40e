"""Programs with keys, masks and padding of their own, which no argument of the model tells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.audits import Audit
from support.ownmasks import attend_by
from support.tiny import ids, make_model
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flexinspect.rules.numerics.audit_findings import REPRODUCED
from flexinspect_hooks.capture.model_layers import attention_layers, has_own_attention


class Keys:
    """The keys and values of each layer, which grow with each forward."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(
        self, attention: Any, hidden_states: Tensor, position_embeddings: Any, **_: Any
    ) -> Any:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        n = hidden_states.shape[1]
        query, key, value = (
            projection(hidden_states).view(1, n, -1, attention.head_dim).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if attention.layer_idx in self.known:
            old = self.known[attention.layer_idx]
            key, value = torch.cat((old[0], key), 2), torch.cat((old[1], value), 2)
        self.known[attention.layer_idx] = key, value
        n_keys = key.shape[2]
        cells = torch.ones(n, n_keys, dtype=torch.bool).tril(n_keys - n)
        out = scaled_dot_product_attention(query, key, value, attn_mask=cells, enable_gqa=True)
        return attention.o_proj(out.transpose(1, 2).reshape(1, n, -1)), None


def test_a_prompt_in_chunks_on_keys_of_the_program_is_one_sequence(
    audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    model, keys = make_model("llama"), Keys()
    layer_of = attention_layers(model)
    assert not has_own_attention(model, layer_of)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return keys.forward(self, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    assert has_own_attention(model, layer_of)

    def program() -> None:
        first, rows = 0, torch.tensor([ids(12, 3)])
        for chunk in (*rows.split(5, 1), rows[:, :1], rows[:, 1:2]):
            places = torch.arange(first, first + chunk.shape[1])[None]
            model(chunk, position_ids=places, use_cache=False)
            first += chunk.shape[1]

    (verdict,), findings, _ = audit(model, program)
    assert findings == []
    assert (verdict.n_steps, verdict.n_rows) == (5, 14)
    assert verdict.choice is None or verdict.choice["total"] < 3  # chunks are no choices


def test_padding_is_read_from_the_position_ids(audit: Audit) -> None:
    model, n_pads = make_model("llama"), 3
    pads = torch.tensor([0, n_pads])

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> Any:
        places = torch.arange(k.shape[2])
        rows = places[-q.shape[2] :]
        cells = (places <= rows[:, None]) & (places >= pads[:, None, None, None])
        cells = cells | (places == rows[:, None])  # a row of padding sees itself
        out = scaled_dot_product_attention(q, k, v, attn_mask=cells, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    from transformers import AttentionInterface

    AttentionInterface.register("padded", attention)
    model.set_attn_implementation("padded")
    rows = torch.tensor([ids(10, 3), (0,) * n_pads + ids(7, 4)])
    places = ((rows != 0).long().cumsum(-1) - 1).clamp_min(0)
    verdicts, findings, _ = audit(model, lambda: model(rows, position_ids=places, use_cache=True))
    assert findings == []
    assert [one.n_rows for one in verdicts] == [10, 7]


def test_a_fault_before_the_attention_is_named_under_a_mask_of_the_program(audit: Audit) -> None:
    """Isolated segments with positions of their own, and norms of the heads after RoPE."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    model, border = make_model("qwen3"), 5

    def isolated(layer: int, rows: Tensor, keys: Tensor) -> Tensor:
        return (keys <= rows) & ((keys >= border) | (rows < border))

    attend_by(model, isolated)

    def forward(self: Any, hidden_states: Tensor, position_embeddings: Any, **_: Any) -> Any:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        shape = (1, hidden_states.shape[1], -1, self.head_dim)
        query, key, value = (
            one(hidden_states).view(shape).transpose(1, 2)
            for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        query, key = self.q_norm(query), self.k_norm(key)
        call = ALL_ATTENTION_FUNCTIONS["own masks"]
        out, _weights = call(self, query, key, value, None, scaling=self.scaling)
        return self.o_proj(out.reshape(*shape[:2], -1)), None

    for layer in model.model.layers:
        own = layer.self_attn
        own.q_norm.weight.data.uniform_(0.4, 1.8)
        own.k_norm.weight.data.uniform_(0.4, 1.8)
        own.forward = forward.__get__(own)
    rows = torch.tensor([ids(12, 3)])
    places = torch.tensor([[*range(border), *range(12 - border)]])
    _, findings, _ = audit(model, lambda: model(rows, position_ids=places, use_cache=True))
    (found,) = findings
    assert found.id == REPRODUCED
    assert "q_norm and k_norm are applied after RoPE" in found.sentence
