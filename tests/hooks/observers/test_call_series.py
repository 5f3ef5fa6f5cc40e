"""Decode steps that repeat the calls before give the records that each step would give alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import ids, make_model
from torch import nn
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import flexinspect
from flexinspect_hooks.observers.attention.call_series import CallSeries
from flexinspect_hooks.step_writer.mask_records import SOURCE_EVENT

N_STEPS = 7
CHANGED_AT = 4

Change = Callable[[Any, dict[str, Any]], None]


def decode(model: Any, change: Change) -> None:
    """Decode greedily with a cache, and call `change(model, arguments)` before one step."""
    cache, inputs = DynamicCache(config=model.config), torch.tensor([ids(9, 3)])
    for number in range(N_STEPS):
        arguments: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
        if number >= CHANGED_AT:
            change(model, arguments)
        logits = model(inputs, **arguments).logits
        inputs = logits[:, -1:].argmax(-1)


def nothing(model: Any, arguments: dict[str, Any]) -> None:
    pass


def add_mask(model: Any, arguments: dict[str, Any]) -> None:
    n_keys = arguments["past_key_values"].get_seq_length() + 1
    mask = torch.ones(1, 1, 1, n_keys, dtype=torch.bool)
    mask[..., 2] = False
    arguments["attention_mask"] = mask


def set_causal(model: Any, arguments: dict[str, Any]) -> None:
    model.model.layers[1].self_attn.is_causal = False


def set_scale(model: Any, arguments: dict[str, Any]) -> None:
    model.model.layers[2].self_attn.scaling = 0.25


def switch_backend(model: Any, arguments: dict[str, Any]) -> None:
    model.set_attn_implementation("eager")


def drop_keys(model: Any, arguments: dict[str, Any]) -> None:
    layer = arguments["past_key_values"].layers[1]
    layer.keys, layer.values = layer.keys[:, :, :5], layer.values[:, :, :5]


def records(path: Path, change: Change, level: str) -> Any:
    model = make_model("llama")
    with torch.no_grad(), flexinspect.watch(model, out=path, level=level) as watched:
        decode(model, change)
    with watched.reader() as reader:
        return [(list(reader.calls(0, step)), reader.arrays(0, step)) for step in range(N_STEPS)]


@pytest.mark.parametrize("level", ["basic", "advanced"])
@pytest.mark.parametrize(
    "change", [nothing, add_mask, set_causal, set_scale, switch_backend, drop_keys]
)
def test_records_of_a_series_are_those_of_single_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, level: str
) -> None:
    answers: list[bool] = []
    original = CallSeries.continues

    def noted(self: CallSeries, refs: Any) -> bool:
        answers.append(original(self, refs))
        return answers[-1]

    monkeypatch.setattr(CallSeries, "continues", noted)
    found = records(tmp_path / "series.flextrace", change, level)
    assert answers[:2] == [False, False]
    assert answers[2] is True
    assert answers[CHANGED_AT] is (change is nothing)
    monkeypatch.setattr(CallSeries, "continues", lambda self, refs: False)
    assert found == records(tmp_path / "single.flextrace", change, level)


def test_a_forward_that_is_patched_within_a_series_is_named(tmp_path: Path) -> None:
    def patch(model: Any, arguments: dict[str, Any]) -> None:
        module = model.model.layers[1].self_attn
        own = type(module).forward

        def patched(*args: Any, **kwargs: Any) -> Any:
            return own(module, *args, **kwargs)

        module.forward = patched

    model = make_model("llama")
    path = tmp_path / "t.flextrace"
    with torch.no_grad(), flexinspect.watch(model, out=path, level="basic") as watched:
        decode(model, patch)
    with watched.reader() as reader:
        events = [row.event for row in reader.events() if row.event.kind == SOURCE_EVENT]
    assert [(event.step, event.data["layers"]) for event in events] == [(CHANGED_AT, [1])]


def test_a_class_that_is_patched_within_a_series_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def patch(model: Any, arguments: dict[str, Any]) -> None:
        kind = type(model.model.layers[0].self_attn)
        own = kind.forward

        def patched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return own(self, *args, **kwargs)

        if own.__code__ is not patched.__code__:
            monkeypatch.setattr(kind, "forward", patched)

    model = make_model("llama")
    path = tmp_path / "t.flextrace"
    with torch.no_grad(), flexinspect.watch(model, out=path, level="basic") as watched:
        decode(model, patch)
    with watched.reader() as reader:
        events = [row.event for row in reader.events() if row.event.kind == SOURCE_EVENT]
    assert [(event.step, event.data["layers"]) for event in events] == [(CHANGED_AT, [0, 1, 2])]


def test_a_function_that_replaces_sdpa_within_a_series_is_recorded(tmp_path: Path) -> None:
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def mine(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    def register(model: Any, arguments: dict[str, Any]) -> None:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = mine

    model = make_model("llama")
    path = tmp_path / "t.flextrace"
    try:
        with torch.no_grad(), flexinspect.watch(model, out=path, level="basic") as watched:
            decode(model, register)
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]  # the registry keeps what is set on it apart
    with watched.reader() as reader:
        events = [row.event for row in reader.events() if row.event.kind == SOURCE_EVENT]
    assert [(event.step, event.data["layers"]) for event in events] == [(CHANGED_AT, [0, 1, 2])]


def test_a_scale_that_is_a_tensor_ends_the_series_and_not_the_forward(tmp_path: Path) -> None:
    def set_scale_per_head(model: Any, arguments: dict[str, Any]) -> None:
        model.model.layers[1].self_attn.scaling = torch.full((4, 1, 1), 0.25)

    model, path = make_model("llama"), tmp_path / "t.flextrace"
    model.set_attn_implementation("eager")
    with torch.no_grad(), flexinspect.watch(model, out=path, level="basic") as watched:
        decode(model, set_scale_per_head)
    with watched.reader() as reader:
        assert [len(list(reader.calls(0, step))) for step in range(N_STEPS)] == [3] * N_STEPS


def own_attention(
    module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
) -> Any:
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)


@pytest.mark.parametrize("backend", ["sdpa", "eager", "own"])
def test_what_recording_takes_in_the_layers_is_part_of_the_stated_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(CallSeries, "compare", lambda *_: time.sleep(0.002))
    if backend == "own":
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "own", own_attention)
    model = make_model("llama")
    model.set_attn_implementation(backend)
    with torch.no_grad(), flexinspect.watch(model, out=tmp_path / "a.flextrace") as watched:
        decode(model, nothing)
    with watched.reader() as reader:
        cost = reader.run()["cost"]
    assert cost["capture_s"] > 0.002 * N_STEPS * len(model.model.layers)


def test_rows_are_reduced_from_the_step_on_at_which_the_level_rises_in_a_series(
    tmp_path: Path,
) -> None:
    model = make_model("llama")
    path = tmp_path / "rising.flextrace"
    with torch.no_grad(), flexinspect.watch(model, out=path, level="basic") as watched:
        session = watched._session

        def rise(model: Any, arguments: dict[str, Any]) -> None:
            session.level = "advanced"

        decode(model, rise)
    with watched.reader() as reader:
        for step in range(N_STEPS):
            errors = [call.lse_error for call in reader.calls(0, step)]
            assert [one is not None for one in errors] == [step >= CHANGED_AT] * len(errors)
