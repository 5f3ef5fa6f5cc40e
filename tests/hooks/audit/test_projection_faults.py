"""Planted faults of projections, norms, heads, MLPs and experts; and their repaired twins."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from support.audits import Audit, decode
from support.tiny import make_model
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

Plant = Callable[[Any, bool], None]


def patch(module: Any, forward: Callable[..., Any]) -> None:
    """Replace the forward of one module."""
    module.forward = MethodType(forward, module)


def audited(audit: Audit, model: Any) -> list[str]:
    """Return the findings of an audit that judged both steps of a loop."""
    verdicts, findings, events = audit(model, lambda: decode(model, 2))
    assert [one.n_steps for one in verdicts] == [2], events
    assert [one.not_judged for one in verdicts] == [[]], events
    return [f"{one.id} {one.sentence}" for one in findings]


@pytest.mark.parametrize("tiled", [None, "key", "value"])
def test_heads_of_keys_or_values_alone_that_are_tiled_are_named(
    audit: Audit, tiled: str | None
) -> None:
    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        both = {"key": k, "value": v}
        for name, states in both.items():
            is_tiled = name == tiled
            both[name] = states.repeat(1, 2, 1, 1) if is_tiled else states.repeat_interleave(2, 1)
        output = functional.scaled_dot_product_attention(
            q, *both.values(), is_causal=len(q[0, 0]) > 1
        )
        return output.transpose(1, 2).contiguous(), None

    model = make_model("llama")
    AttentionInterface.register("tiled", attend)
    try:
        model.set_attn_implementation("tiled")
        found = audited(audit, model)
    finally:
        del AttentionInterface._global_mapping["tiled"]
    if tiled is None:
        assert not found
    else:
        assert f"whose {tiled} heads are tiled, not repeated one by one" in found[0]


def neurons(model: Any, broken: bool) -> None:
    def sliced(self: Any, rows: Any) -> Any:
        size = self.intermediate_size - self.intermediate_size % 32 * broken
        gate, up = (one(rows)[..., :size] for one in (self.gate_proj, self.up_proj))
        return functional.linear(self.act_fn(gate) * up, self.down_proj.weight[:, :size])

    patch(model.model.layers[1].mlp, sliced)


def fused_activation(model: Any, broken: bool) -> None:
    def other(self: Any, rows: Any) -> Any:
        gate, up = self.gate_up_proj(rows).chunk(2, -1)
        return self.down_proj((functional.gelu if broken else functional.silu)(gate) * up)

    patch(model.model.layers[1].mlp, other)


def exchanged(model: Any, broken: bool) -> None:
    def other(self: Any, rows: Any) -> Any:
        gate, up = self.gate_proj(rows), self.up_proj(rows)
        return self.down_proj(self.act_fn(up) * gate if broken else self.act_fn(gate) * up)

    patch(model.model.layers[0].mlp, other)


def plain_activation(model: Any, broken: bool) -> None:
    def other(self: Any, rows: Any) -> Any:
        approximate = "none" if broken else "tanh"
        return self.c_proj(functional.gelu(self.c_fc(rows), approximate=approximate))

    patch(model.transformer.h[1].mlp, other)


def by_head(model: Any, broken: bool) -> None:
    projection = model.gpt_neox.layers[1].attention.query_key_value
    plain = projection.forward

    def other(self: Any, rows: Any) -> Any:
        given = plain(rows)
        parts = given.view(*given.shape[:-1], 3, 4, 12).transpose(-3, -2)
        return parts.flatten(-3) if broken else given

    patch(projection, other)


def by_group(model: Any, broken: bool) -> None:
    projection = model.model.layers[1].self_attn.qkv_proj
    plain = projection.forward

    def other(self: Any, rows: Any) -> Any:
        given = plain(rows)
        groups = given.view(*given.shape[:-1], 2, 4, 12)
        parts = (groups[..., :2, :], groups[..., 2:3, :], groups[..., 3:, :])
        return torch.cat([one.flatten(-3) for one in parts], -1) if broken else given

    patch(projection, other)


def values_first(model: Any, broken: bool) -> None:
    projection = model.transformer.h[1].attn.c_attn
    plain = projection.forward

    def other(self: Any, rows: Any) -> Any:
        first, second, third = plain(rows).chunk(3, -1)
        return torch.cat((second, third, first) if broken else (first, second, third), -1)

    patch(projection, other)


def norm_by_head(model: Any, broken: bool) -> None:
    def other(self: Any, rows: Any) -> Any:
        parts = rows.view(*rows.shape[:-1], -1, 12) if broken else rows
        squares = parts.pow(2).mean(-1, keepdim=True) + self.variance_epsilon
        return self.weight * (parts * squares.rsqrt()).view(rows.shape)

    for name in ("q_norm", "k_norm"):
        patch(getattr(model.model.layers[1].self_attn, name), other)


def norm_of_all_heads(model: Any, broken: bool) -> None:
    def other(self: Any, rows: Any) -> Any:
        squares = rows.pow(2).mean((-2, -1) if broken else -1, keepdim=True)
        return self.weight * rows * (squares + self.variance_epsilon).rsqrt()

    patch(model.model.layers[1].self_attn.k_norm, other)


def keys_by_q_norm(model: Any, broken: bool) -> None:
    attention = model.model.layers[1].self_attn
    normalise = type(attention.k_norm).forward

    def other(self: Any, rows: Any) -> Any:
        return normalise(attention.q_norm if broken else self, rows)

    patch(attention.k_norm, other)


def one_after_the_other(model: Any, broken: bool) -> None:
    for layer in model.gpt_neox.layers:
        layer.use_parallel_residual = not broken


def one_after_the_other_in_one_layer(model: Any, broken: bool) -> None:
    def forward(self: Any, rows: Any, **options: Any) -> Any:
        attended, _ = self.attention(self.input_layernorm(rows), **options)
        read = rows + attended if broken else rows
        return rows + attended + self.mlp(self.post_attention_layernorm(read))

    patch(model.gpt_neox.layers[1], forward)


def route(change: Callable[[Any, Any, bool], Any]) -> Plant:
    def plant(model: Any, broken: bool) -> None:
        router = model.model.layers[1].mlp.gate

        def other(self: Any, rows: Any) -> Any:
            scores = functional.linear(rows, self.weight)
            return scores, *change(self, scores.softmax(-1), broken)

        patch(router, other)

    return plant


@route
def dropped(router: Any, scores: Any, broken: bool) -> Any:
    weights, chosen = scores.topk(2, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    return weights.masked_fill((chosen == 3) & broken, 0), chosen


@route
def unnormalised(router: Any, scores: Any, broken: bool) -> Any:
    weights, chosen = scores.topk(2, -1)
    return weights if broken else weights / weights.sum(-1, keepdim=True), chosen


@route
def normalised(router: Any, scores: Any, broken: bool) -> Any:
    weights, chosen = scores.topk(2, -1)
    return weights / weights.sum(-1, keepdim=True) if broken else weights, chosen


@route
def one_less(router: Any, scores: Any, broken: bool) -> Any:
    weights, chosen = scores.topk(1 if broken else 2, -1)
    return weights / weights.sum(-1, keepdim=True), chosen


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "norm_topk_prob": False,
}
PLANTED: dict[str, tuple[str, dict[str, Any], Plant, str]] = {
    "neurons": (
        "llama",
        {"intermediate_size": 100},
        neurons,
        "the last 4 of 100 neurons of mlp are missing",
    ),
    "activation": ("phi3", {}, fused_activation, "whose mlp has GELU as activation"),
    "plain activation": ("gpt2", {}, plain_activation, "whose mlp has GELU as activation"),
    "gate": ("llama", {}, exchanged, "its gate and up projection exchanged"),
    "by head": ("gpt_neox", {}, by_head, "is split as (3, 4 heads, 12), not as (4 heads, 3, 12)"),
    "by group": ("phi3", {}, by_group, "is split as (2 groups, 2 + 2 heads, 12), not as all"),
    "order": ("gpt2", {}, values_first, "c_attn is split in the order v, q, k, not q, k, v"),
    "norm by head": ("olmo2", {}, norm_by_head, "q_norm and k_norm normalise over each head"),
    "norm of all": ("qwen3", {}, norm_of_all_heads, "k_norm normalises over all heads"),
    "swapped norm": ("qwen3", {}, keys_by_q_norm, "keys are normalised by q_norm, not by k_norm"),
    "residual order": (
        "gpt_neox",
        {},
        one_after_the_other,
        "whose MLP reads the sum of the residual and the attention",
    ),
    "residual order of a layer": (
        "gpt_neox",
        {},
        one_after_the_other_in_one_layer,
        "whose MLP in this layer alone reads the sum of the residual and the attention",
    ),
    "expert": ("mixtral", EXPERTS, dropped, "expert 3 of mlp is dropped after the choice"),
    "raw weights": ("mixtral", EXPERTS, unnormalised, "does not normalise the weights"),
    "normalised": ("qwen3_moe", QWEN_MOE, normalised, "normalises the weights of the chosen"),
    "one less": ("mixtral", EXPERTS, one_less, "mlp chooses 1 of the experts, not 2"),
}


@pytest.mark.parametrize("broken", [True, False])
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named_and_its_twin_agrees(
    audit: Audit, name: str, broken: bool
) -> None:
    family, options, plant, words = PLANTED[name]
    model = make_model(family, **options)
    torch.manual_seed(1)
    for key, weight in model.named_parameters():
        if "norm" in key:
            weight.data = torch.rand_like(weight) + 0.5
    plant(model, broken)
    found = audited(audit, model)
    if not broken:
        assert not found
    else:
        assert len(found) == 1
        assert found[0].startswith("audit.reproduced")
        assert words in found[0]


@pytest.mark.parametrize("cap", [1.0, 2.0])
def test_a_soft_cap_of_another_value_is_named(audit: Audit, cap: float) -> None:
    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
        scores = cap * (q @ k.mT * options["scaling"] / cap).tanh()
        scores = scores + mask if mask is not None else scores
        return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), None

    model = make_model(
        "gemma2", attn_logit_softcapping=2.0, final_logit_softcapping=1.0, query_pre_attn_scalar=1
    )
    AttentionInterface.register("capped", attend)
    AttentionMaskInterface.register("capped", eager_mask)
    try:
        model.set_attn_implementation("capped")
        found = audited(audit, model)
    finally:
        del AttentionInterface._global_mapping["capped"]
        del AttentionMaskInterface._global_mapping["capped"]
    if cap == 2.0:
        assert not found
    else:
        assert "whose scores are capped at 1, that of the logits, not at 2" in found[0]


@pytest.mark.parametrize("broken", [True, False])
def test_a_head_that_is_switched_off_does_not_hide_the_fault_of_the_others(
    audit: Audit, broken: bool
) -> None:
    model = make_model("gpt_neox")
    by_head(model, broken)
    # Layer 1 has a fused projection in a wrong layout and, on purpose, no head 2.
    attention = model.gpt_neox.layers[1].attention
    attend = AttentionInterface().get_interface("sdpa", None)

    def gated(module: Any, *args: Any, **options: Any) -> Any:
        rows, weights = attend(module, *args, **options)
        if module is attention:
            rows = rows.clone()
            rows[..., 2, :] = 0
        return rows, weights

    AttentionInterface.register("gated", gated)
    try:
        model.set_attn_implementation("gated")
        (found,) = audited(audit, model)
    finally:
        del AttentionInterface._global_mapping["gated"]
    assert found.startswith("audit.unexplained")
    forward = "a forward in which query_key_value is split as (3, 4 heads, 12)"
    words = f"But 3 of 4 heads agree with {forward if broken else 'the correct forward'}"
    assert words in found
    assert "; head 2 does not." in found
