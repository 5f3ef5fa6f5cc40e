"""Modules of the program run alone on the reference's inputs: which are wrong, and how."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from support.audits import Audit, decode
from support.tiny import make_model
from torch import Tensor, nn


def _mean_subtracted(self: Any, rows: Tensor) -> Tensor:
    rows = rows - rows.mean(-1, keepdim=True)
    return self.weight * rows * (rows.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def _epsilon_outside(self: Any, rows: Tensor) -> Tensor:
    return self.weight * rows / (rows.square().mean(-1, keepdim=True).sqrt() + 0.1)


def _other_epsilon(self: Any, rows: Tensor) -> Tensor:
    return self.weight * rows * (rows.square().mean(-1, keepdim=True) + 0.5).rsqrt()


def _cut_neurons(self: Any, rows: Tensor) -> Tensor:
    return self.down_proj((self.act_fn(self.gate_proj(rows)) * self.up_proj(rows)).clamp(-0.1, 0.1))


def _transposed(self: Any, rows: Tensor) -> Tensor:
    return rows @ self.weight


NORM, MLP, OUTPUT = "post_attention_layernorm", "mlp", "self_attn.o_proj"
FORWARDS: dict[str, tuple[str, Callable[..., Tensor], str]] = {
    "mean subtracted": (NORM, _mean_subtracted, "is that of a LayerNorm (the mean is subtracted)"),
    "epsilon outside": (
        NORM,
        _epsilon_outside,
        "has 0.1 added to the root, not an epsilon of 1e-06 under it",
    ),
    "epsilon": (NORM, _other_epsilon, "has an epsilon of 0.5, not 1e-06"),
    "neurons cut": (MLP, _cut_neurons, "the input of down_proj is cut off at -0.1 and 0.1"),
    "transposed": (OUTPUT, _transposed, "is that of its transposed weight"),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_module_with_another_forward_is_named_with_what_it_computes(
    audit: Audit, name: str
) -> None:
    place, forward, words = FORWARDS[name]
    model = make_model("llama")
    module = model.get_submodule(f"model.layers.1.{place}")
    module.forward = MethodType(forward, module)
    _, (finding,), _ = audit(model, lambda: decode(model))
    assert f"Alone, on the right input, model.layers.1.{place} (" in finding.sentence
    assert words in finding.sentence
    assert f"{forward.__name__} at test_module_swap.py:" in finding.sentence


def test_a_norm_of_heads_with_another_forward_is_named(audit: Audit) -> None:
    model = make_model("qwen3")
    module = model.model.layers[1].self_attn.q_norm
    module.forward = MethodType(_mean_subtracted, module)
    _, (finding,), _ = audit(model, lambda: decode(model))
    assert "Alone, on the right input, model.layers.1.self_attn.q_norm (" in finding.sentence
    assert "is that of a LayerNorm (the mean is subtracted)" in finding.sentence


class _NormOfWeight(nn.Module):
    """Multiplies by its weight, where the norms of Gemma multiply by 1 + weight."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.rms_norm(rows, rows.shape[-1:], self.weight, self.eps)


def test_both_norms_of_heads_without_their_1_are_named_together(audit: Audit) -> None:
    model = make_model("gemma3_text")
    attention = model.model.layers[1].self_attn
    for norm in (attention.q_norm, attention.k_norm):
        nn.init.normal_(norm.weight, 0.4, 0.2)
    attention.q_norm, attention.k_norm = map(_NormOfWeight, (attention.q_norm, attention.k_norm))
    _, (finding,), _ = audit(model, lambda: decode(model))
    assert "q_norm and k_norm multiply by their weights, not by 1 + weight" in finding.sentence


def test_a_hook_that_does_nothing_any_more_is_named_where_all_modules_are_right(
    audit: Audit,
) -> None:
    model, calls = make_model("llama"), iter(range(3))

    def steer(module: nn.Module, args: Any, output: Any) -> Any:
        if next(calls, None) is None:
            return output
        return output + 1 if isinstance(output, Tensor) else (output[0] + 1, *output[1:])

    model.model.layers[1].register_forward_hook(steer)
    _, (finding,), _ = audit(model, lambda: decode(model))
    assert "has the same vector added in each row" in finding.sentence
    assert "Each module of it alone is right" in finding.sentence
    assert "model.layers.1 has a forward hook (" in finding.sentence


def test_a_layer_that_weights_its_residuals_is_named_as_a_sum_of_its_parts(audit: Audit) -> None:
    model = make_model("llama")

    def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        rows = hidden_states + attended
        result: Tensor = 0.5 * rows + self.mlp(self.post_attention_layernorm(rows))
        return result

    layer = model.model.layers[1]
    layer.forward = MethodType(forward, layer)
    _, (finding,), _ = audit(model, lambda: decode(model))
    assert (
        "is 0.5 × the layer's input + 0.5 × the attention's output + 1 × the MLP's output"
        in finding.sentence
    )


def test_a_module_is_run_on_the_rows_that_the_diverging_step_had(audit: Audit) -> None:
    model = make_model("llama")
    mlp = model.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda rows: plain(rows) * (1 if rows.shape[1] > 1 else 0.5)
    _, (finding,), _ = audit(model, lambda: decode(model, 6))
    assert finding.step == 1
    assert "model.layers.1.mlp (LlamaMLP) is wrong: its output is 0.5 times" in finding.sentence


def test_no_module_of_a_plain_generation_is_wrong(audit: Audit) -> None:
    model = make_model("llama")
    _, findings, _ = audit(model, lambda: decode(model))
    assert findings == []
    assert torch.is_grad_enabled()
