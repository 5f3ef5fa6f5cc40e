"""A difference that is the same vector in all rows is a bias; the heads that have it are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.audits import Audit, decode
from support.tiny import make_model
from transformers.models.qwen2 import modeling_qwen2


def rolled(q: Any, k: Any, v: Any) -> Any:
    return q.roll(1, 0), k, v


def missing(q: Any, k: Any, v: Any) -> Any:
    return q, k * torch.tensor([[0], [1]]), v


def doubled(q: Any, k: Any, v: Any) -> Any:
    return q, k, v * 2


def crossed(q: Any, k: Any, v: Any) -> Any:
    return q, v, k


def unknown(q: Any, k: Any, v: Any) -> Any:
    return q + 1, k, v


def right(q: Any, k: Any, v: Any) -> Any:
    return q, k, v


CASES: dict[Callable[..., Any], tuple[str, ...]] = {
    rolled: ("query head 0 has that of query head 3, query head 1 has that of query head 0",),
    missing: ("is not: key head 0 has no bias.",),
    doubled: ("value head 0 has its bias twice, value head 1 has its bias twice",),
    crossed: ("key head 1 has that of value head 1", "value head 0 has that of key head 0"),
    unknown: ("query head 2 has a bias of no head",),
    right: (),
}


def attend(module: Any, hidden_states: Any, position_embeddings: Any, cache: Any) -> Any:
    """Attend as Qwen2 does, with the biases (heads, size) of `module.changed`."""
    states = []
    layers = (module.q_proj, module.k_proj, module.v_proj)
    for layer, bias in zip(layers, module.changed, strict=True):
        rows = hidden_states @ layer.weight.T + bias.flatten()
        states.append(rows.view(*rows.shape[:-1], *bias.shape).transpose(1, 2))
    query, key = modeling_qwen2.apply_rotary_pos_emb(*states[:2], *position_embeddings)
    key, value = cache.update(key, states[2], module.layer_idx)
    is_causal = query.shape[2] > 1
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, enable_gqa=True
    )
    return module.o_proj(output.transpose(1, 2).flatten(2)), None


@pytest.mark.parametrize("change", CASES)
def test_heads_that_have_another_bias_are_named(audit: Audit, change: Callable[..., Any]) -> None:
    model = make_model("qwen2")
    torch.manual_seed(1)
    module = model.model.layers[1].self_attn
    layers = (module.q_proj, module.k_proj, module.v_proj)
    with torch.no_grad():
        for layer in layers:
            layer.bias.normal_(0, 0.5)
    size = module.head_dim
    module.changed = change(*(layer.bias.detach().view(-1, size) for layer in layers))
    module.forward = lambda hidden_states, position_embeddings, past_key_values, **_: attend(
        module, hidden_states, position_embeddings, past_key_values
    )
    verdicts, findings, events = audit(model, lambda: decode(model, 2))
    assert [one.n_steps for one in verdicts] == [2], events
    words = CASES[change]
    assert len(findings) == bool(words), [one.sentence for one in findings]
    for text in words:
        assert text in findings[0].sentence
