"""Cache check: cache faults are found at their step and layer, and rounding is tolerated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.planted_leaks import hooked, model_of, only, prompt, serious
from support.tiny import FAMILIES, ids
from torch import Tensor, nn
from transformers import DynamicCache

import flexinspect
from flexinspect.analysis.proof_results import Proof
from flexinspect.core.errors import UsageError
from flexinspect.records.finding import Severity

DIFFERS, SAME = "proof.cache-differs", "proof.cache-same"
NEW = 6


def cache(model: Any, **options: Any) -> Proof:
    options = options if "run" in options else {"new_tokens": NEW, **options}
    proof: Proof = flexinspect.prove("cache", model, prompt(), **options)
    return proof


def stepwise(model: Any, *, after: int = 99, corrupt: Any = None) -> Any:
    """Return a run that decodes with a cache, which `corrupt` changes before step `after`."""

    def run(input_ids: Tensor) -> None:
        kv_cache = DynamicCache(config=model.config)
        for step in range(NEW + 1):
            if step == after:
                corrupt(kv_cache)
            input_ids = model(input_ids, past_key_values=kv_cache).logits[:, -1:].argmax(-1)

    return run


@contextmanager
def changed_arguments(module: nn.Module, change: Any) -> Iterator[None]:
    """While entered, a module's keyword arguments are changed when it gets one row."""

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (args, {**kwargs, **change(kwargs)}) if hidden.shape[1] == 1 else None

    handle = module.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


# -- clean -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_steps_of_a_family_differ_by_rounding_alone(
    family: str, backend: str, dtype: torch.dtype
) -> None:
    proof = cache(model_of(family, backend).to(dtype), every=3)
    assert serious(proof) == []
    steps = proof.facts["steps"]
    assert [step["step"] for step in steps] == list(range(1, NEW + 1))
    assert [step["position"] for step in steps] == list(range(20, 20 + NEW))
    assert all(len(step["difference"]) == 3 for step in steps)
    assert "2 full recomputes" in proof.lines[0]


def test_of_many_steps_the_lines_are_those_that_differ_most() -> None:
    input_ids = torch.tensor([ids(9, 2)])
    proof = flexinspect.prove("cache", model_of(), input_ids, new_tokens=14)
    assert len(proof.facts["steps"]) == 14
    assert proof.lines[0].endswith("full recomputes; the 12 steps that differ most:")
    assert sum(line.startswith("  step ") for line in proof.lines) == 12


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_generate_with_any_cache_can_be_the_run(kind: str) -> None:
    model = model_of()

    def run(input_ids: Tensor) -> None:
        options = {} if kind == "dynamic" else {"cache_implementation": kind}
        model.generate(input_ids, max_new_tokens=NEW, do_sample=False, **options)

    assert serious(cache(model, run=run)) == []


def test_a_left_padded_batch_is_recomputed_with_its_padding() -> None:
    input_ids = torch.tensor([[0] * 4 + list(ids(5, 1)), list(ids(9, 2))])
    real = torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
    model = model_of()
    own = flexinspect.prove("cache", model, input_ids, attention_mask=real, new_tokens=4)
    assert serious(own) == []

    def run(prompt: Tensor) -> None:
        model.generate(prompt, attention_mask=real, max_new_tokens=4, do_sample=False)

    assert serious(flexinspect.prove("cache", model, input_ids, run=run)) == []


def test_restarting_position_ids_are_recomputed_unchanged() -> None:
    positions = [0, *range(1, 7), *range(1, 9), *range(9, 14)]
    assert serious(cache(model_of(), position_ids=positions)) == []


# -- red -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_layer_whose_decode_row_sees_only_the_first_key_is_named(
    layer: int, dtype: torch.dtype
) -> None:
    model = model_of("llama", "sdpa").to(dtype)

    def first_key_alone(kwargs: dict[str, Any]) -> dict[str, Any]:
        n = kwargs["past_key_values"].get_seq_length(2) + 1
        return {"attention_mask": (torch.arange(n) == 0)[None, None, None]}

    with changed_arguments(model.model.layers[layer].self_attn, first_key_alone):
        differs = only(cache(model), DIFFERS)
    assert differs.severity is Severity.ERROR
    assert (differs.step, differs.layer) == (1, layer)
    assert differs.positions == (20,)
    assert "6 of 6 steps differ." in differs.sentence
    assert serious(cache(model)) == []


def test_a_layer_that_receives_no_cache_is_named() -> None:
    model = model_of()
    with changed_arguments(
        model.model.layers[1].self_attn, lambda kwargs: {"past_key_values": None}
    ):
        differs = only(cache(model), DIFFERS)
    assert (differs.step, differs.layer, differs.layers) == (1, 1, (1, 2))


@pytest.mark.parametrize("step", [1, 3, 6])
@pytest.mark.parametrize("every", [1, 4])
def test_a_cache_corrupted_at_a_step_differs_from_that_step_on(step: int, every: int) -> None:
    model = model_of()

    def corrupt(kv_cache: DynamicCache) -> None:
        kv_cache.layers[1].keys[:, :, 5] = 0

    differs = only(
        cache(model, run=stepwise(model, after=step, corrupt=corrupt), every=every), DIFFERS
    )
    assert (differs.step, differs.layer) == (step, 1)
    assert differs.positions == (19 + step,)
    assert differs.evidence["steps_that_differ"] == list(range(step, NEW + 1))


def test_values_that_are_shifted_by_one_in_the_cache_are_found() -> None:
    model = model_of()

    def run(input_ids: Tensor) -> None:
        kv_cache = DynamicCache(config=model.config)
        first = model(input_ids, past_key_values=kv_cache).logits[:, -1:].argmax(-1)
        kv_cache.layers[2].values = kv_cache.layers[2].values.roll(1, 2)
        model(first, past_key_values=kv_cache)

    differs = only(cache(model, run=run), DIFFERS)
    assert (differs.step, differs.layer) == (1, 2)


def test_position_ids_that_are_one_off_in_steps_are_found() -> None:
    model = model_of()

    def late(kwargs: dict[str, Any]) -> dict[str, Any]:
        cos, sin = model.model.rotary_emb(torch.zeros(1, 1, 1), torch.tensor([[24]]))
        return {"position_embeddings": (cos, sin)}

    with changed_arguments(model.model.layers[1], late):
        differs = only(cache(model), DIFFERS)
    assert (differs.step, differs.layer) == (1, 1)


def test_prompt_rows_that_attend_to_the_future_are_reported_first() -> None:
    model = model_of()
    with hooked(model.model.layers[1], lambda out: out + out.mean(1, keepdim=True)):
        differs = only(cache(model), DIFFERS)
    assert (differs.step, differs.layer) == (0, 1)
    assert differs.sentence.endswith("so they see the future.")


# -- what is refused -------------------------------------------------------------------------------


def test_a_run_without_steps_or_without_a_cache_is_refused() -> None:
    model = model_of()

    def without_cache(input_ids: Tensor) -> None:
        for _ in range(3):
            token = model(input_ids, use_cache=False).logits[:, -1:].argmax(-1)
            input_ids = torch.cat((input_ids, token), 1)

    with pytest.raises(UsageError, match="no step after the prompt"):
        cache(model, run=lambda input_ids: model(input_ids))
    with pytest.raises(UsageError, match="does not use a cache"):
        cache(model, run=without_cache)
    with pytest.raises(UsageError, match="every= must be 1 or more"):
        cache(model, every=0)


def test_the_user_can_pass_recompute() -> None:
    model = model_of()
    lengths: list[int] = []

    def recompute(whole: Tensor) -> None:
        lengths.append(whole.shape[1])
        model(whole, use_cache=False)

    proof = flexinspect.prove("cache", model, prompt(), new_tokens=4, recompute=recompute, every=2)
    assert serious(proof) == []
    assert lengths == [20, 20, 22, 24]  # the prompt twice, to see whether the model repeats itself
    assert "4 steps are the same in all 3 layers" in only(proof, SAME).sentence


def test_a_model_that_does_not_repeat_itself_is_not_judged() -> None:
    """Dropout changes every forward, which no cache is to blame for."""
    model = model_of("llama", attention_dropout=0.2).train()
    finding = only(cache(model), "proof.unstable")
    assert (finding.severity, finding.layer) == (Severity.ERROR, 0)
    assert "run twice without a cache" in finding.sentence
    assert finding.sentence.endswith("The model is in training mode.")
    assert only(cache(model.eval()), SAME)
