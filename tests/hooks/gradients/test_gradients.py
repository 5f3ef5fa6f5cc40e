"""Gradients of generated tokens: equal to autograd's own, and the model is not changed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.dense_reference import additive_mask, eager_attention
from support.differentiated import Run, by_name, generated, preset_source
from support.tiny import FAMILIES, make_model
from torch import Tensor, nn

from flexinspect.panels.gradients_panel import gradient_norms
from flexinspect.rules.training.token_gradient_rule import GradientsRule
from flexinspect_hooks.capture.model_layers import attention_layers, decoder_blocks
from flexinspect_hooks.generation.mask_source import UserMaskSource
from flexinspect_hooks.gradients import after_generation as patching
from flexinspect_hooks.gradients.after_generation import (
    GradientPatch,
    GradientSpec,
    dense_attention,
    flex_has_backward,
)
from flexinspect_hooks.gradients.reduction import GradientObserver
from flexinspect_hooks.observers.attention.mask_capture import open_cells


@pytest.fixture(autouse=True)
def _one_thread(two_threads: None) -> None:
    """Threads that wait for each other take longer than matrices of this size."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def run() -> Run:
    return generated(make_model("llama").double())


def plain(run: Run, step: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Differentiate through transformers' eager attention with the same mask as a dense tensor.

    Returns the embeddings, their gradient, and the parameters' gradients.
    """
    model, before = run.model, run.before(step)
    n = len(before.ids)
    cells = run.source.spec.dense(n, n)  # type: ignore[attr-defined]
    parameters = dict(model.named_parameters())
    model.requires_grad_(True)
    try:
        embeddings = model.get_input_embeddings()(torch.tensor([before.ids]))
        with eager_attention(model):
            out = model(
                inputs_embeds=embeddings,
                position_ids=torch.tensor([before.positions]),
                attention_mask=additive_mask(cells, embeddings.dtype, embeddings.device),
                use_cache=False,
            )
        value = torch.log_softmax(out.logits[0, -1].double(), -1)[run.token_ids[step]]
        at_input, *found = torch.autograd.grad(value, [embeddings, *parameters.values()])
    finally:
        model.requires_grad_(False)
    return embeddings[0].detach(), at_input[0], dict(zip(parameters, found, strict=True))


@pytest.mark.parametrize("step", [0, 2])
def test_gradients_equal_those_of_eager_attention(run: Run, step: int) -> None:
    record = run.gradients(step)
    embeddings, at_input, parameters = plain(run, step)
    assert record.matches_recorded
    assert record.path == "dense reference"
    found = by_name(record)
    assert found.keys() == parameters.keys()
    for name, gradient in parameters.items():
        assert found[name].norm == pytest.approx(float(gradient.norm()), rel=1e-5), name
        assert found[name].max == pytest.approx(float(gradient.abs().max()), rel=1e-5), name
    assert record.tokens is not None
    expected = torch.stack([(at_input * embeddings).sum(-1), at_input.norm(dim=-1)])
    np.testing.assert_allclose(record.tokens, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_gradients_equal_finite_differences() -> None:
    """Moving a word's embedding along itself by h moves the log-probability by h x its part."""
    run = generated(make_model("gpt_neox").double())  # whose norms are in float64 too
    record, model, before = run.gradients(1), run.model, run.before(1)
    assert record.tokens is not None
    pos, h = int(np.abs(record.tokens[0]).argmax()), 1e-5

    def moved(by: float) -> float:
        def stretch(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            changed = output.clone()
            changed[0, pos] *= 1 + by
            return changed

        handle = model.get_input_embeddings().register_forward_hook(stretch)
        try:
            with GradientPatch(model, run.source, compiled=False, use_flex=False), torch.no_grad():
                out = model(
                    input_ids=torch.tensor([before.ids]),
                    position_ids=torch.tensor([before.positions]),
                    use_cache=False,
                )
        finally:
            handle.remove()
        return float(torch.log_softmax(out.logits[0, -1], -1)[run.token_ids[1]])

    slope = (moved(h) - moved(-h)) / (2 * h)
    assert float(record.tokens[0, pos]) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_check_passes_for_the_executed_mask_and_fails_for_another(
    family: str, dtype: torch.dtype
) -> None:
    run = generated(make_model(family).to(dtype))
    record = run.gradients(2)
    assert record.matches_recorded, record.logits_error
    assert record.n_unreached == 0
    assert record.tokens is not None
    assert np.isfinite(record.tokens).all()
    other = run.gradients(2, source=preset_source(run.prompt, "causal"))
    assert other.logits_error > 4 * other.tolerance
    assert (other.stats, other.tokens, other.layers) == ((), None, None)
    assert [finding.id for finding in GradientsRule().on_gradients(other)] == [
        "gradient.check-failed"
    ]


def test_restarting_positions_are_not_taken_for_a_packed_batch() -> None:
    run = generated(make_model("llama"), positions="reset")
    assert run.gradients(2).matches_recorded


def test_only_tokens_that_the_newest_row_may_attend_to_have_gradients() -> None:
    def last_six(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & (kv_idx > q_idx - 6)

    source = UserMaskSource(last_six, name="last six", device=torch.device("cpu"))
    run = generated(make_model("llama", num_hidden_layers=1), source=source)
    tokens = run.gradients(1).tokens
    assert tokens is not None
    n = tokens.shape[1]
    assert (tokens[1] > 0).tolist() == [pos >= n - 6 for pos in range(n)]


def test_a_group_of_heads_shares_keys_as_flex_does() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 6, 8) for heads in (6, 2, 2))
    visible = torch.ones(1, 6, 6, dtype=torch.bool).tril()
    wide = [t.repeat_interleave(3, 1) for t in (key, value)]
    expected = nn.functional.scaled_dot_product_attention(query, *wide, attn_mask=visible)
    torch.testing.assert_close(dense_attention(query, key, value, visible=visible), expected)


def test_a_row_without_keys_is_zero_and_its_gradient_too() -> None:
    query, key, value = (torch.randn(1, 1, 3, 4, requires_grad=True) for _ in range(3))
    visible = torch.tensor([[[True, False, False], [False, False, False], [True, True, True]]])
    out = dense_attention(query, key, value, visible=visible, softcap=5.0)
    assert out[0, 0, 1].tolist() == [0.0] * 4
    (at_query,) = torch.autograd.grad(out.sum(), query)
    assert at_query[0, 0, 1].tolist() == [0.0] * 4
    assert at_query.isfinite().all()


def test_a_margin_is_to_the_next_best_token(run: Run) -> None:
    record = run.gradients(1, GradientSpec("margin"))
    logits = run.kept[1].values[:-2]
    assert record.value == pytest.approx(float(logits.topk(2).values @ torch.tensor([1.0, -1.0])))
    assert record.runner_up_id == int(logits.topk(2).indices[1])
    assert record.scale == pytest.approx(math.sqrt(2))


def test_a_token_with_probability_near_one_has_gradients() -> None:
    model = make_model("llama")
    model.lm_head.weight.data.mul_(30)
    run = generated(model.to(torch.float16))
    step = min(run.kept, key=lambda step: run.gradients(step).scale)
    record = run.gradients(step)
    assert record.scale < 1e-4
    assert all(stat.norm > 0 for stat in record.stats)


def test_nothing_of_the_model_is_changed(run: Run) -> None:
    model = generated(make_model("llama")).model
    some = model.model.layers[1].mlp.up_proj.weight.requires_grad_(True)
    some.grad = torch.full_like(some, 7.0)
    before = {name: (p.requires_grad, p.clone()) for name, p in model.named_parameters()}
    hooks = [len(m._forward_hooks) for m in model.modules()]
    backend = model.config._attn_implementation
    generated(model).gradients(0)
    for name, parameter in model.named_parameters():
        requested, value = before[name]
        assert parameter.requires_grad == requested, name
        assert torch.equal(parameter, value), name
        assert not parameter._backward_hooks, name
    assert torch.equal(some.grad, torch.full_like(some, 7.0))
    assert [p.grad for p in model.parameters() if p is not some] == [None] * (len(before) - 1)
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert model.config._attn_implementation == backend


def test_no_parameters_gradient_stays_in_memory(run: Run) -> None:
    blocks = decoder_blocks(run.model, attention_layers(run.model))
    before = run.before(0)
    patch = GradientPatch(run.model, run.source, compiled=False, use_flex=False)
    with patch, GradientObserver(run.model, blocks) as observer:
        out = run.model(
            input_ids=torch.tensor([before.ids]), position_ids=torch.tensor([before.positions])
        )
        grads = torch.autograd.grad(out.logits[0, -1].sum(), observer.parameters)
        seen = observer
    assert len(seen.stats) == len(grads)
    assert {gradient.untyped_storage().nbytes() for gradient in grads} == {8}
    assert all(stat.norm > 0 for stat in seen.stats.values())


def test_a_forward_that_fails_leaves_the_model_as_it_was() -> None:
    run = generated(make_model("llama"))

    def fail(*_: Any) -> None:
        raise RuntimeError("no")

    handle = run.model.model.norm.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        run.gradients(0)
    handle.remove()
    assert not any(p.requires_grad or p._backward_hooks for p in run.model.parameters())
    assert run.gradients(0).matches_recorded


def test_parameters_are_named_by_layer_and_part() -> None:
    parts = {(stat.layer, stat.part) for stat in generated(make_model("llama")).gradients(0).stats}
    inside = {"q", "k", "v", "o", "mlp", "norm"}
    assert {part for layer, part in parts if layer == 1} == inside
    assert {part for layer, part in parts if layer is None} == {"embedding", "norm", "lm_head"}
    fused = {stat.part for stat in generated(make_model("gpt_neox")).gradients(0).stats}
    assert fused == {"embedding", "qkv", "o", "mlp", "norm", "lm_head"}


# -- planted ---------------------------------------------------------------------------------------


def ids_of(run: Run, step: int = 1, **changes: Any) -> dict[str, Any]:
    """Return the findings of the rule for a step, by id."""
    found = GradientsRule().on_gradients(run.gradients(step, GradientSpec(**changes)))
    return {finding.id: finding for finding in found}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_clean_model_has_no_finding(family: str) -> None:
    run = generated(make_model(family))
    assert [ids_of(run, step) for step in (0, 2)] == [{}, {}]


def test_a_layer_with_huge_weights_explodes_and_is_named() -> None:
    model = make_model("llama")
    model.model.layers[1].self_attn.o_proj.weight.data.mul_(1e4)
    finding = ids_of(generated(model))["gradient.exploding"]
    assert finding.layer == 1
    assert finding.evidence["growth"] > 1e3


def test_a_layer_of_zeros_is_dead_and_is_named() -> None:
    model = make_model("llama")
    for parameter in model.model.layers[1].parameters():
        parameter.data.zero_()
    found = ids_of(generated(model))
    assert set(found) == {"gradient.dead"}
    assert found["gradient.dead"].layer == 1
    assert found["gradient.dead"].evidence["n_parameters"] == 7
    assert "of layer 1:" in found["gradient.dead"].sentence


def test_a_gate_of_zero_makes_its_mlp_dead() -> None:
    model = make_model("llama")
    model.model.layers[2].mlp.gate_proj.weight.data.zero_()
    finding = ids_of(generated(model))["gradient.dead"]
    assert (finding.layer, finding.layers) == (2, ())
    assert set(finding.evidence["parameters"]) == {
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.2.mlp.down_proj.weight",
    }


@pytest.mark.parametrize("cut", ["detach", "no_grad"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_layer_that_blocks_gradients_is_named_with_the_layers_it_cuts_off(
    cut: str, at: int
) -> None:
    model = make_model("llama")
    layer = model.model.layers[at]
    inner = layer.forward
    layer.forward = (
        torch.no_grad()(inner)
        if cut == "no_grad"
        else lambda hidden, *args, **kwargs: inner(hidden.detach(), *args, **kwargs)
    )
    run = generated(model)
    record, found = run.gradients(1), ids_of(run)
    n_layers, n_dead = len(model.model.layers), at + (cut == "no_grad")
    assert record.layers is not None
    assert record.layers.shape == (n_layers + 1,)
    assert (record.layers == 0).tolist() == [number <= at for number in range(n_layers + 1)]
    assert record.tokens is not None
    assert not record.tokens.any()
    ends = found["gradient.vanishing"]
    assert ends.layer == at
    assert f"shrinks to 0 from the output of layer {at} back" in ends.sentence
    dead = {stat.layer for stat in record.stats if not stat.norm}
    assert dead == set(range(n_dead))
    assert ("gradient.dead" in found) == bool(n_dead)
    if n_dead:
        assert found["gradient.dead"].evidence["n_parameters"] == 7 * n_dead
    assert record.n_unreached == 9 * n_dead + 1, "and the embeddings"
    rows = gradient_norms(record)[1]
    assert [row.norms[-1] == 0 for row in rows] == [number < at for number in range(n_layers)]


def test_tiny_weights_make_gradients_vanish() -> None:
    model = make_model("llama")
    for parameter in model.model.layers[1].parameters():
        parameter.data.mul_(1e-4)
    finding = ids_of(generated(model))["gradient.vanishing"]
    assert finding.layer == 1
    assert 0 < finding.evidence["largest_norm"] < 1e-6


def test_a_nan_weight_makes_all_gradients_nan_and_the_forward_is_named() -> None:
    model = make_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = math.nan
    found = ids_of(generated(model))
    assert set(found) == {"gradient.nan"}
    assert "the logits are already not finite" in found["gradient.nan"].sentence


class Rooted(nn.Module):
    """An MLP that adds the square root of 0: finite forward, and a gradient of 0 times Inf."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        inner: Tensor = self.inner(hidden)
        nothing = inner * 0
        return inner + nothing.abs().sqrt()


class Scaled(nn.Module):
    """An MLP that adds the square root of a parameter that is 0: its slope there is Inf."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        added: Tensor = self.inner(hidden) + self.scale.sqrt()
        return added


def test_an_infinite_slope_of_one_parameter_is_named() -> None:
    model = make_model("llama")
    model.model.layers[1].mlp = Scaled(model.model.layers[1].mlp)
    finding = ids_of(generated(model))["gradient.inf"]
    assert finding.evidence["parameters"] == ["model.layers.1.mlp.scale"]
    assert (finding.evidence["n_inf"], finding.evidence["n_nan"]) == (1, 0)
    assert finding.sentence.endswith(
        "in 1 of 31 parameters of layer 1; the gradients of the hidden states are finite."
    )


@pytest.fixture
def rooted() -> Run:
    model = make_model("llama")
    model.model.layers[1].mlp = Rooted(model.model.layers[1].mlp)
    return generated(model)


def test_a_nan_only_in_the_backward_begins_in_its_layer(rooted: Run) -> None:
    finding = ids_of(rooted)["gradient.nan"]
    assert finding.layer == 1
    assert "it begins in layer 1: finite at its output, but not at its input" in finding.sentence


def test_anomaly_mode_names_the_line_of_the_forward(rooted: Run) -> None:
    found = ids_of(rooted, detect_anomaly=True)
    assert set(found) == {"gradient.anomaly", "gradient.nan"}
    evidence = found["gradient.anomaly"].evidence
    assert evidence["function"] in ("SqrtBackward0", "MulBackward0", "AbsBackward0")
    assert "return inner + nothing.abs().sqrt()" in evidence["anomaly_message"]
    assert not torch.is_anomaly_enabled()


def test_anomaly_mode_reports_nothing_for_a_clean_model(run: Run) -> None:
    assert run.gradients(1, GradientSpec(detect_anomaly=True)).anomaly is None


# -- FlexAttention's own backward ------------------------------------------------------------------


def test_flex_differentiates_where_it_has_a_backward() -> None:
    assert flex_has_backward(torch.device("cuda"))
    assert not flex_has_backward(torch.device("cpu"))
    assert not flex_has_backward(torch.device("mps"))


def test_the_path_by_flex_gives_the_same_gradients(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU only a check of the device keeps FlexAttention from a backward (torch 2.13)."""
    import torch.nn.attention.flex_attention as flex_module

    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    dense, flex = run.gradients(1), run.gradients(1, GradientSpec(use_flex=True))
    assert (dense.path, flex.path) == ("dense reference", "flex")
    assert flex.matches_recorded
    for name, stat in by_name(flex).items():
        assert stat.norm == pytest.approx(by_name(dense)[name].norm, rel=1e-4), name
    assert not flex_module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG


def test_query_blocks_hold_the_same_cells(run: Run) -> None:
    from flexinspect_hooks.generation.mask_source import ForwardWindow

    block_mask = run.source.block_mask(ForwardWindow(20, 20, 0, 0, 4), None)
    turned = patching.with_query_blocks(block_mask)
    assert block_mask.q_indices is None
    assert turned.q_indices is not None
    before, after = (open_cells(one, 4, compiled=True) for one in (block_mask, turned))
    assert before is not None
    assert after is not None
    assert torch.equal(before, after)
