"""The trace has the inputs of each step: position ids, all rows of a batch, lengths per layer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import ids, make_model
from torch import Tensor
from transformers import DynamicCache

import flexinspect
from flexinspect.masks import mask_presets
from flexinspect.records.prompt import Prompt
from flexinspect.records.step import (
    GenerationEnd,
    GenerationRecord,
    InputsRecord,
    StepRecord,
    TokenRecord,
)
from flexinspect_hooks.generation.decoding import Choice, generate
from flexinspect_hooks.generation.flex_patch import FlexPatch
from flexinspect_hooks.generation.mask_source import SpecMaskSource
from flexinspect_hooks.observers.inputs_hook import InputsHook
from flexinspect_hooks.sessions.capture_session import CaptureSession
from flexinspect_hooks.user_code.watch_trace import Watch

Out = Callable[..., Watch]


def input_ids(n: int, seed: int = 3) -> Tensor:
    return torch.tensor([ids(n, seed)])


def tokens(model: Any, prompt: Tensor, n: int, **options: Any) -> Tensor:
    options = {"attention_mask": torch.ones_like(prompt), **options}
    found: Tensor = model.generate(prompt, max_new_tokens=n, do_sample=False, **options)
    return found


def inputs_of(watched: Watch) -> list[list[InputsRecord | None]]:
    """Return the inputs of every step of every generation."""
    with watched.reader() as reader:
        numbers = [row.generation for row in reader.generations()]
        return [[reader.inputs(n, s.step) for s in reader.steps(n)] for n in numbers]


@pytest.fixture
def watch(tmp_path: Path) -> Out:
    return lambda model: flexinspect.watch(model, out=tmp_path / "own.flextrace")


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static", "disable_compile": True}])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_neox"])
def test_positions_and_lengths_of_a_generation(
    family: str, cache: dict[str, Any], family_model: Callable[[str], Any], watch: Out
) -> None:
    """Mistral's cache slides: it counts all keys so far, not those it still has."""
    model = family_model(family)
    with watch(model) as trace:
        tokens(model, input_ids(12), 3, **cache)
    assert inputs_of(trace) == [
        [
            InputsRecord(1, ((0, 12),), (0, 0, 0), (12, 12, 12)),
            InputsRecord(1, ((12, 1),), (12, 12, 12), (13, 13, 13)),
            InputsRecord(1, ((13, 1),), (13, 13, 13), (14, 14, 14)),
        ]
    ]


def test_every_row_of_a_batch_is_recorded(llama: Any, watch: Out) -> None:
    prompt = torch.tensor([[0, 0, 11, 12, 13], [21, 22, 23, 24, 25]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    with watch(llama) as trace:
        mine = tokens(llama, prompt, 2, attention_mask=mask)
    with trace.reader() as reader:
        first, second = (
            [reader.array(0, step, f"inputs.{name}") for name in ("ids", "positions", "mask")]
            for step in (0, 1)
        )
        inputs = reader.inputs(0, 0)
    assert inputs is not None
    assert (inputs.batch, inputs.position_ids) == (2, [0, 0, 0, 1, 2])
    for found, expected in zip(first, (prompt, None, mask.bool()), strict=True):
        assert found is not None
        assert expected is None or np.array_equal(found, expected.numpy())
    assert np.array_equal(first[1], [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])
    assert np.array_equal(second[0], mine[:, 5:6].numpy())
    assert np.array_equal(second[1], [[3], [5]])
    assert second[2] is None


def test_positions_that_start_again_are_runs(llama: Any, watch: Out) -> None:
    positions = [0, 1, 2, 0, 1, 2, 7]
    with watch(llama) as trace:
        llama(input_ids(7), position_ids=torch.tensor([positions]), use_cache=False)
    ((inputs,),) = inputs_of(trace)
    assert inputs == InputsRecord(1, ((0, 3), (0, 3), (7, 1)))
    assert inputs.position_ids == positions


def lose_the_cache(model: Any, layer: int) -> None:
    """Patch a layer's attention with the former name of the cache argument."""
    inner = model.model.layers[layer].self_attn
    original = inner.forward

    def forward(hidden_states: Tensor, past_key_value: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("past_key_values", None)
        return original(hidden_states, past_key_values=past_key_value, **kwargs)

    inner.forward = forward


def test_the_length_of_a_layer_that_lost_its_cache_is_recorded_in_every_step(watch: Out) -> None:
    model = make_model("llama")
    lose_the_cache(model, 0)
    with watch(model) as trace:
        tokens(model, input_ids(5), 3)
    ((_, *later),) = inputs_of(trace)
    assert later == [
        InputsRecord(1, ((5, 1),), (0, 5, 5), (0, 6, 6)),
        InputsRecord(1, ((6, 1),), (0, 6, 6), (0, 7, 7)),
    ]


def test_positions_are_those_that_the_model_made_of_a_lost_cache(watch: Out) -> None:
    model = make_model("llama")
    lose_the_cache(model, 0)
    cache = DynamicCache(config=model.config)
    with watch(model) as trace:
        for part in (input_ids(5), input_ids(1)):
            model(part, past_key_values=cache)
    first, second = inputs_of(trace)[0]
    assert (first, second) == (
        InputsRecord(1, ((0, 5),), (0, 0, 0), (0, 5, 5)),
        InputsRecord(1, ((0, 1),), (0, 5, 5), (0, 6, 6)),
    )


def test_a_cache_that_the_forward_made_itself_is_counted(llama: Any, watch: Out) -> None:
    with watch(llama) as trace:
        llama(input_ids(4))
        llama(inputs_embeds=torch.ones(2, 3, 48), use_cache=False)
    assert inputs_of(trace) == [
        [InputsRecord(1, ((0, 4),), (), (4, 4, 4))],
        [InputsRecord(2, ((0, 3),))],
    ]


def test_ids_that_a_loop_overwrites_are_recorded_as_passed(llama: Any, watch: Out) -> None:
    batch = torch.cat([input_ids(4, 1), input_ids(4, 2)])
    kept = batch.clone()
    with watch(llama) as trace:
        llama(batch, use_cache=False)
        batch.fill_(5)
    with trace.reader() as reader:
        assert np.array_equal(reader.array(0, 0, "inputs.ids"), kept.numpy())


@pytest.mark.parametrize("does_fail", [False, True])
def test_no_cache_is_kept_alive(does_fail: bool, watch: Out) -> None:
    model = make_model("llama")
    cache = DynamicCache(config=model.config)
    reference = weakref.ref(cache)

    def stop(*args: Any) -> None:
        if does_fail:
            raise RuntimeError("stop")

    handle = model.model.layers[2].register_forward_hook(stop)
    with watch(model):
        try:
            model(input_ids(4), past_key_values=cache)
        except RuntimeError as error:
            error.__traceback__ = None
        del cache
        gc.collect()
        assert reference() is None
    handle.remove()


@pytest.mark.parametrize("n_rows", [1, 6])
def test_the_first_row_with_nan_is_named(n_rows: int, watch: Out) -> None:
    model, row = make_model("llama"), n_rows // 2

    def corrupt(module: Any, args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[0, row:, 3] = torch.nan
        return output

    model.model.layers[1].register_forward_hook(corrupt)
    with watch(model) as trace:
        model(input_ids(n_rows), use_cache=False)
    with trace.reader() as reader:
        stats = [(s.layer, s.n_nan, s.bad_row) for s in reader.layer_stats(0, 0)]
    # A NaN in the values passes every mask: 0 times NaN is NaN.
    assert stats == [(0, 0, None), (1, n_rows - row, row), (2, n_rows * 48, 0)]


class Steps:
    """A sink that keeps steps."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def begin_generation(self, record: GenerationRecord) -> None: ...
    def write_event(self, record: Any) -> None: ...
    def write_findings(self, findings: Any) -> None: ...
    def update_run(self, **facts: Any) -> None: ...
    def end_generation(self, record: GenerationEnd) -> None: ...
    def write_steps(self, records: Sequence[StepRecord]) -> None:
        self.steps += records


def test_no_model_is_kept_alive() -> None:
    model = make_model("llama")
    reference = weakref.ref(model)
    with CaptureSession(model, Steps(), hooks=[InputsHook()]):
        gc.disable()
        try:
            del model
            assert reference() is None
        finally:
            gc.enable()


def test_inputs_of_the_built_in_generation_are_recorded_too(llama: Any, prompt: Prompt) -> None:
    spec, n = mask_presets.preset("segment-isolation", prompt.segments), len(prompt.ids)
    source = SpecMaskSource(spec, length=128, device=torch.device("cpu"), compiled=False)
    sink = Steps()
    with CaptureSession(llama, sink, hooks=[InputsHook()]) as session:
        record = GenerationRecord(0, "s", "m", "contiguous", prompt.segments, ())
        session.begin_generation(record)

        def chose(choice: Choice) -> None:
            place = n + choice.step
            token = TokenRecord(place, choice.token_id, "", "", place, 6, step=choice.step)
            session.on_token_chosen(token, choice.scores)

        with FlexPatch(llama, source):
            generate(llama, prompt, max_new_tokens=2, on_choice=chose)
    assert [step.inputs for step in sink.steps] == [
        InputsRecord(1, ((0, n),), (0,) * 3, (n,) * 3),
        InputsRecord(1, ((n, 1),), (n,) * 3, (n + 1,) * 3),
    ]
