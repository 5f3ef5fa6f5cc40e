"""Kernel check: the weights that a kernel used are recovered, and one wrong cell is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.dense_reference import attention_row
from support.planted_leaks import ROWS, SPANS, isolated, mask_for, model_of, only, prompt, serious
from support.tiny import FAMILIES, ids
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

import flexinspect
from flexinspect.analysis.proof_results import Proof
from flexinspect.core.errors import UsageError
from flexinspect.records.finding import Severity
from flexinspect_hooks.observers.attention import mask_capture
from flexinspect_hooks.observers.attention.call_references import AttentionCall
from flexinspect_hooks.observers.attention.kernel_calls import SDPA, KernelCall

DIFFERS, SAME, UNSEEN = "proof.kernel-differs", "proof.kernel-same", "proof.kernel-unseen"
Own = Callable[..., tuple[Tensor, None]]


def kernel(model: Any, input_ids: Any = None, **options: Any) -> Proof:
    input_ids = prompt() if input_ids is None else input_ids
    proof: Proof = flexinspect.prove("kernel", model, input_ids, segments=SPANS, **options)
    return proof


def generated(model: Any, **kwargs: Any) -> Callable[[Tensor], Any]:
    return lambda input_ids: model.generate(input_ids, max_new_tokens=3, do_sample=False, **kwargs)


@pytest.fixture
def own_name() -> Iterator[Callable[[Own], str]]:
    """Register an attention function under a name, for the length of a test."""
    names: list[str] = []

    def register(function: Own) -> str:
        names.append(f"own_{len(names)}")
        AttentionInterface.register(names[-1], function)
        return names[-1]

    yield register
    for name in names:
        AttentionInterface._global_mapping.pop(name, None)


def flex_with(cells: np.ndarray, compiled: bool = False, **kernel_given: Any) -> Own:
    """Return an attention function that calls flex with cells (heads or 1, n, n)."""
    allowed = torch.from_numpy(cells if cells.ndim == 3 else cells[None])
    call = torch.compile(flex_attention) if compiled else flex_attention

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **kwargs: Any) -> Any:
        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return allowed[h if len(allowed) > 1 else 0, q_idx + k.shape[2] - q.shape[2], kv_idx]

        n_heads = len(allowed) if len(allowed) > 1 else None
        mask = create_block_mask(mask_mod, None, n_heads, q.shape[2], k.shape[2], device="cpu")
        scale = kwargs["scaling"]
        out = call(q, k, v, block_mask=mask, scale=scale, enable_gqa=True, **kernel_given)
        return out.transpose(1, 2).contiguous(), None

    return attend


# -- what is recovered -----------------------------------------------------------------------------


def test_the_weights_recovered_are_those_of_the_softmax_to_the_last_cell() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 9, 8, generator=generator)
    key, value = (torch.randn(1, 2, 9, 8, generator=generator) for _ in range(2))
    kwargs = {"query": query, "key": key, "value": value, "is_causal": True, "enable_gqa": True}
    call = KernelCall(SDPA, kwargs, compiled=False)
    ref = AttentionCall(
        *(0, "direct", "sdpa", torch.nn.Identity(), query, key, value, (None,), {}, value),
        kernel=call,
    )
    from flexinspect_hooks.proofs.kernel_weights import _kernel_weights

    parts = dict(_kernel_weights(ref))
    assert list(parts) == [0, 8]  # nine keys, eight at a time
    weights = torch.cat(list(parts.values()), -1)
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    expected = attention_row(query[0], key[0], scale=8**-0.5, visible=visible)
    torch.testing.assert_close(weights.double(), expected, atol=1e-6, rtol=0)
    assert torch.equal(weights != 0, visible.expand_as(weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_weights_of_every_family_equal_the_kernel_in_prefill_and_decode(
    family: str, backend: str, dtype: torch.dtype
) -> None:
    model = model_of(family, backend).to(dtype)
    proof = kernel(model, run=generated(model))
    assert serious(proof) == []
    assert [call["layer"] for call in proof.facts["calls"]] == [0, 1, 2] * 3
    paths = {call["path"] for call in proof.facts["calls"]}
    assert paths == {model.config._attn_implementation}
    worst = only(proof, SAME).evidence["largest_difference"]
    assert worst < (1e-4 if dtype is torch.float32 else 0.1)


def test_drawn_weights_of_a_user_mask_equal_the_kernel_on_every_path(own_name: Any) -> None:
    cells = isolated()
    for backend in ("eager", "sdpa"):
        model = model_of("llama", backend)
        assert serious(kernel(model, attention_mask=mask_for(model, cells))) == []
    by_head = np.stack([cells, np.tri(ROWS, dtype=np.bool_), cells, cells])
    for allowed in (cells, by_head):
        model = model_of()
        model.set_attn_implementation(own_name(flex_with(allowed)))
        proof = kernel(model)
        assert serious(proof) == []
        assert {call["path"] for call in proof.facts["calls"]} == {"flex uncompiled"}


def test_a_left_padded_batch_is_compared_except_rows_without_keys() -> None:
    input_ids = torch.tensor([[0] * 4 + list(ids(5, 1)), list(ids(9, 2))])
    real = torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
    for backend in ("eager", "sdpa"):
        model = model_of("llama", backend)
        proof = flexinspect.prove(
            *("kernel", model, input_ids),
            run=generated(model, attention_mask=real),
            attention_mask=real,
        )
        assert serious(proof) == []
        assert only(proof, SAME).evidence["largest_difference"] < 1e-4


def test_an_added_bool_mask_is_open_everywhere() -> None:
    model = model_of("llama", "eager")
    causal = torch.ones(1, 1, ROWS, ROWS, dtype=torch.bool).tril()
    assert serious(kernel(model, attention_mask=causal)) == []
    differs = only(
        kernel(model, attention_mask=causal, drawn=np.tri(ROWS, dtype=np.bool_)), DIFFERS
    )
    assert differs.positions == (0, 1)
    assert "and a closed cell is drawn" in differs.sentence


def test_an_attention_bias_is_part_of_the_scores() -> None:
    model = model_of("llama", "eager")
    distance = torch.arange(ROWS)[None] - torch.arange(ROWS)[:, None]
    bias = torch.where(distance <= 0, 0.3 * distance, torch.finfo(torch.float32).min)
    assert serious(kernel(model, attention_mask=bias[None, None])) == []


def test_a_patched_forward_that_calls_the_kernel_itself_is_seen() -> None:
    model = model_of()
    allowed = torch.from_numpy(isolated())

    def forward(hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        own = model.model.layers[1].self_attn
        shape = (*hidden_states.shape[:2], -1, own.head_dim)
        q, k, v = (
            project(hidden_states).view(shape).transpose(1, 2)
            for project in (own.q_proj, own.k_proj, own.v_proj)
        )
        out = scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
        return own.o_proj(out.transpose(1, 2).flatten(2)), None

    model.model.layers[1].self_attn.forward = forward
    proof = kernel(model)
    assert serious(proof) == []
    assert [call["layer"] for call in proof.facts["calls"]] == [0, 1, 2]
    differs = only(kernel(model, drawn=np.tri(ROWS, dtype=np.bool_)), DIFFERS)
    assert differs.layer == 1


@pytest.mark.slow
def test_a_compiled_kernel_is_drawn_by_its_tables_and_its_mask_mod(own_name: Any) -> None:
    cells = isolated()
    model = model_of("llama", num_hidden_layers=1)
    model.set_attn_implementation(own_name(flex_with(cells, compiled=True)))
    proof = kernel(model)
    assert serious(proof) == []
    assert [call["path"] for call in proof.facts["calls"]] == ["flex compiled"]
    wrong = cells.copy()
    wrong[12, 3] = True
    assert only(kernel(model, drawn=wrong), DIFFERS).positions == (12, 3)


# -- red -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "key", "is_open"), [(12, 3, True), (12, 10, False), (19, 0, False)]
)
def test_one_wrong_cell_in_the_drawn_mask_is_named(row: int, key: int, is_open: bool) -> None:
    model = model_of()
    cells = isolated()
    drawn = cells.copy()
    drawn[row, key] = is_open
    assert drawn[row, key] != cells[row, key]
    differs = only(kernel(model, attention_mask=mask_for(model, cells), drawn=drawn), DIFFERS)
    assert differs.severity is Severity.ERROR
    assert (differs.step, differs.layer, differs.head) == (0, 0, 0)
    assert differs.positions == (row, key)
    assert differs.layers == (0, 1, 2)
    assert f"of the weight of position {row} " in differs.sentence
    assert "4 cells of that layer are open in one and closed in the other" in differs.sentence
    assert differs.evidence["cells_open_in_one"] == 12


def test_one_wrong_cell_of_one_head_names_that_head() -> None:
    model = model_of("qwen2", "eager")
    drawn = np.repeat(np.tri(ROWS, dtype=np.bool_)[None], 4, axis=0)
    drawn[2, 15, 4] = False
    differs = only(kernel(model, drawn=drawn), DIFFERS)
    assert (differs.head, differs.positions) == (2, (15, 4))
    assert "1 cell of that layer is open in one and closed in the other" in differs.sentence


def test_one_cell_recorded_wrongly_as_executed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = mask_capture._executed

    def lying(ref: Any, mask: Any, indices: Any) -> Tensor | None:
        cells = honest(ref, mask, indices)
        if cells is None or ref.layer != 2:
            return cells
        cells = cells.clone()
        cells[:, 11, 6] = False
        return cells

    monkeypatch.setattr(mask_capture, "_executed", lying)
    differs = only(kernel(model_of()), DIFFERS)
    assert (differs.layer, differs.positions, differs.layers) == (2, (11, 6), ())


def test_a_kernel_that_changes_its_queries_differs_in_weights_and_in_no_cell(own_name: Any) -> None:
    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **kwargs: Any) -> Any:
        weights = torch.softmax(1.1 * sharpness * (q @ k.repeat_interleave(2, 1).mT), -1)
        return (weights @ v.repeat_interleave(2, 1)).transpose(1, 2).contiguous(), None

    model = model_of()
    sharpness = model.model.layers[0].self_attn.scaling
    model.set_attn_implementation(own_name(attend))
    differs = only(kernel(model), DIFFERS)
    assert differs.evidence["cells_open_in_one"] == 0
    assert "weights of that layer differ by more than rounding" in differs.sentence


def test_a_decode_row_without_offset_differs_from_the_declared_mask(own_name: Any) -> None:
    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **kwargs: Any) -> Any:
        mask = create_block_mask(
            lambda b, h, q_idx, kv_idx: kv_idx <= q_idx, None, None, q.shape[2], k.shape[2], "cpu"
        )
        out = flex_attention(q, k, v, block_mask=mask, scale=kwargs["scaling"], enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    model = model_of()
    model.set_attn_implementation(own_name(attend))
    run = generated(model)
    assert serious(kernel(model, run=run)) == []
    meant = np.tri(ROWS + 3, dtype=np.bool_)
    differs = only(kernel(model, run=run, drawn=meant), DIFFERS)
    assert (differs.step, differs.layer, differs.positions) == (1, 0, (ROWS, 1))


# -- what is not compared --------------------------------------------------------------------------


def test_under_a_score_mod_only_closed_cells_are_compared(own_name: Any) -> None:
    cells = isolated()

    def steep(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + 0.1 * (kv_idx - q_idx)

    model = model_of()
    model.set_attn_implementation(own_name(flex_with(cells, score_mod=steep)))
    proof = kernel(model)
    assert serious(proof) == []
    assert "only closed cells compared, because a score_mod changes the scores" in str(proof)
    drawn = cells.copy()
    drawn[12, 10] = False
    assert only(kernel(model, drawn=drawn), DIFFERS).positions == (12, 10)


def test_dropout_and_layers_without_a_kernel_call_are_reported_as_not_compared() -> None:
    model = model_of("llama", "eager")
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    proof = kernel(model)
    assert (
        only(proof, UNSEEN).sentence == "Not compared: all 3 layers, because the call has dropout."
    )
    model = model_of()
    model.model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    proof = kernel(model)
    assert "2 of 3 layers" in only(proof, UNSEEN).sentence
    assert "layers 0, 2" in only(proof, SAME).sentence


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drawn": np.ones((3, 3))}, "drawn= must be bool"),
        ({"drawn": np.tri(9, dtype=np.bool_)}, "drawn= is (1, 9, 9), but the call has 4 heads"),
        ({"run": lambda input_ids: None}, "No attention call was seen in this run."),
    ],
)
def test_an_unsuitable_drawn_mask_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        kernel(model_of(), **options)
    assert message in error.value.message


def test_the_model_is_left_as_it_was() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = model_of()
    before = dict(ALL_ATTENTION_FUNCTIONS.__dict__), scaled_dot_product_attention
    kernel(model)
    flexinspect.prove("isolation", model, prompt(), segments=SPANS, mask="causal")
    flexinspect.prove("cache", model, prompt(), new_tokens=2)
    after = dict(ALL_ATTENTION_FUNCTIONS.__dict__), torch.nn.functional.scaled_dot_product_attention
    assert before == after
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
