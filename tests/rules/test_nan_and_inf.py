"""NaN and Inf planted in real tiny models: the layer, the first row, and the part of the layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.cases import ran_case
from support.planting import of, one, planted, serious
from support.tiny import ids, make_model
from torch import Tensor
from transformers import DynamicCache

from flexinspect.records.finding import Severity
from flexinspect.trace.reader import TraceReader, open_trace

INPUT_IDS = torch.tensor([ids(14, 3)])
N = INPUT_IDS.shape[1]


def greedy(
    model: Any, n: int = 6, input_ids: Tensor = INPUT_IDS, **options: Any
) -> Callable[[], Any]:
    options = {"do_sample": False, "max_new_tokens": n, **options}
    return lambda: model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **options)


def corrupt(module: Any, at_call: int, change: Callable[[Tensor], None]) -> Any:
    """Change a module's output in place of a copy, in one call; returns the handle."""
    calls: list[int] = []

    def hook(module: Any, args: Any, output: Any) -> Any:
        calls.append(1)
        if len(calls) != at_call:
            return output
        whole = output if isinstance(output, Tensor) else output[0]
        changed = whole.clone()
        change(changed)
        return changed if isinstance(output, Tensor) else (changed, *output[1:])

    return module.register_forward_hook(hook)


def test_a_nan_embedding_is_distinguished_from_the_layer_that_reads_it(tmp_path: Path) -> None:
    model = make_model("llama")
    model.model.embed_tokens.weight.data[int(INPUT_IDS[0, 6])] = torch.nan
    found = planted(tmp_path, model, greedy(model, 1))
    finding = one(found, "numbers.nan")
    # SDPA multiplies closed values by 0, so the rows before the nonfinite one are NaN as well.
    assert (finding.layer, finding.step, finding.positions) == (0, 0, (0,))
    assert finding.evidence["part"] == "embedding or first norm"
    assert "in step 0 (of its 14 rows the first is position 0" in finding.sentence
    assert serious(found) == [finding]


def test_a_nan_embedding_of_a_generated_token_is_named(tmp_path: Path) -> None:
    model = make_model("llama")
    third = int(greedy(model, 3)()[0, -1])
    assert third not in INPUT_IDS
    model.model.embed_tokens.weight.data[third] = torch.nan
    finding = one(planted(tmp_path, model, greedy(model)), "numbers.nan")
    assert (finding.layer, finding.step, finding.positions) == (0, 3, (N + 2,))
    assert finding.sentence.endswith(
        "the queries or keys of its newest row are already not finite, in every head, so check "
        f'the embedding of position {N + 2} "{third} " and the first norm.'
    )


@pytest.mark.parametrize(
    ("family", "layer", "name", "part"),
    [
        ("llama", 1, "k_proj", "queries or keys"),
        ("qwen2", 2, "q_proj", "queries or keys"),
        ("mistral", 1, "v_proj", "values"),
        ("gemma2", 2, "v_proj", "values"),
        ("qwen3", 0, "v_proj", "values"),
    ],
)
def test_projections_of_attention_are_distinguished(
    family: str, layer: int, name: str, part: str, tmp_path: Path
) -> None:
    model = make_model(family)
    getattr(model.model.layers[layer].self_attn, name).weight.data[1, 1] = torch.nan
    finding = one(planted(tmp_path, model, greedy(model, 3)), "numbers.nan")
    assert (finding.layer, finding.step, finding.evidence["part"]) == (layer, 0, part)


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_neox"])
def test_an_mlp_is_distinguished_from_the_attention_before_it(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    layers = model.gpt_neox.layers if family == "gpt_neox" else model.model.layers
    handle = corrupt(layers[1].mlp, 4, lambda out: out[0, -1, :3].fill_(torch.nan))
    found = planted(tmp_path, model, greedy(model))
    handle.remove()
    finding = one(found, "numbers.nan")
    assert (finding.step, finding.layer, finding.positions) == (3, 1, (N + 2,))
    assert finding.evidence["part"] == "after attention"
    assert "the output projection, the MLP or a norm" in finding.sentence
    assert finding.evidence["n_nan"] >= 3


def test_scores_that_overflow_are_named_as_scores_or_what_makes_them(tmp_path: Path) -> None:
    model = make_model("llama")
    for name in ("q_proj", "k_proj"):
        getattr(model.model.layers[2].self_attn, name).weight.data *= 1e19
    finding = one(planted(tmp_path, model, greedy(model, 2)), "numbers.nan")
    assert finding.layer == 2
    assert finding.evidence["part"] in ("scores", "queries or keys")


def test_a_row_that_sees_nothing_is_named_where_eager_attention_makes_nan_of_it(
    tmp_path: Path,
) -> None:
    model = make_model("llama", layers=2)
    model.set_attn_implementation("eager")
    closed = torch.full((1, 1, N, N), -torch.inf).triu(1)
    closed[..., -1, :] = -torch.inf
    finding = one(
        planted(tmp_path, model, lambda: model(INPUT_IDS, attention_mask=closed)), "numbers.nan"
    )
    assert (finding.layer, finding.positions) == (0, (N - 1,))
    assert finding.evidence["part"] == "row without keys"


def test_a_batch_is_checked_by_its_first_row(tmp_path: Path) -> None:
    model = make_model("llama")
    model.model.embed_tokens.weight.data[7] = torch.nan
    input_ids = torch.cat([INPUT_IDS, torch.full_like(INPUT_IDS, 7)])
    assert serious(planted(tmp_path, model, lambda: model(input_ids))) == []
    found = planted(tmp_path, model, lambda: model(input_ids.flip(0)), name="flipped")
    assert one(found, "numbers.nan").evidence["first_row"] == 0


def test_nonfinite_logits_come_with_the_query_that_finds_them(tmp_path: Path) -> None:
    model = make_model("qwen2")
    model.lm_head.weight.data[17] = torch.nan
    finding = one(planted(tmp_path, model, greedy(model, 2)), "numbers.nan")
    assert finding.layer is None
    with open_trace(tmp_path / "planted.flextrace") as reader:
        assert [tuple(row) for row in rows_of(reader, finding.query)] == [(0, 1, 0)]


def rows_of(reader: TraceReader, query: str) -> list[Any]:
    return list(reader._query(query, ()))


def test_the_query_of_a_producing_layer_returns_it_and_the_layers_after_it(tmp_path: Path) -> None:
    model = make_model("llama")
    model.model.layers[1].mlp.down_proj.weight.data[3, 3] = torch.nan
    finding = one(planted(tmp_path, model, greedy(model, 2)), "numbers.nan")
    with open_trace(tmp_path / "planted.flextrace") as reader:
        assert [row[0] for row in rows_of(reader, finding.query)] == [1, 2]


# -- correct runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["basic", "extreme"])
def test_a_clean_run_is_clean_at_every_level(level: str, tmp_path: Path) -> None:
    model = make_model("llama")
    assert serious(planted(tmp_path, model, greedy(model, 12), level=level)) == []


def test_a_padded_batch_whose_first_row_ends_early_is_clean(tmp_path: Path) -> None:
    """Row 0 receives padding from then on, whose embedding is zero."""
    model = make_model("llama")
    input_ids = torch.cat([INPUT_IDS, INPUT_IDS.roll(3, 1)])
    input_ids[1, :4] = 0
    first = greedy(model, 1)()[0, -1].item()
    assert (
        serious(
            planted(
                tmp_path,
                model,
                lambda: model.generate(
                    input_ids,
                    attention_mask=(input_ids != 0).long(),
                    max_new_tokens=24,
                    do_sample=False,
                    eos_token_id=first,
                    pad_token_id=0,
                ),
            )
        )
        == []
    )


@pytest.mark.parametrize("std", [0.02, 0.002])
def test_small_random_weights_are_clean(std: float, tmp_path: Path) -> None:
    model = make_model("llama", initializer_range=std)
    assert serious(planted(tmp_path, model, greedy(model, 24))) == []


def test_a_loop_without_a_cache_and_one_with_chunks_are_clean(tmp_path: Path) -> None:
    model = make_model("llama")

    def run() -> None:
        input_ids = INPUT_IDS
        for _ in range(8):
            input_ids = torch.cat(
                (input_ids, model(input_ids, use_cache=False).logits[:, -1:].argmax(-1)), 1
            )
        cache = DynamicCache(config=model.config)
        model(INPUT_IDS[:, :7], past_key_values=cache)
        model(INPUT_IDS[:, 7:], past_key_values=cache)

    found = serious(planted(tmp_path, model, run))
    assert {finding.id for finding in found} <= {"cache.not-used"}


# -- the cases -------------------------------------------------------------------------------------


def case(name: str) -> Path:
    ran, out = ran_case(name)
    assert ran.code == 0, ran
    return out


def test_nan_in_masked_keys_is_harmless_and_in_masked_values_is_not() -> None:
    with open_trace(case("c7_nan_in_masked_keys")) as reader:
        finding = one(reader.findings(), "numbers.nan")
        assert [row[0] for row in rows_of(reader, finding.query)] == [0]
    assert (finding.id, finding.severity) == ("numbers.nan", Severity.ERROR)
    assert (finding.generation, finding.positions) == (1, (15,))
    assert finding.sentence == (
        "The output of the newest of 4 rows of the call (flex uncompiled) is NaN; its scores are "
        "finite, so NaN is among the values (4 keys of 16 are closed to the newest row, but 0 "
        "times NaN is NaN)."
    )


def test_rounding_alone_is_no_alarm() -> None:
    with open_trace(case("n02_bfloat16")) as reader:
        assert serious(reader.findings()) == []
        assert of(reader.findings(), "attention.dtype-differs") == []
        skipped = ("text.near-tie", "same-prompt.rounding")
        clean = [replace(f, sentence="") for f in reader.findings() if f.id not in skipped]
    assert clean == []
