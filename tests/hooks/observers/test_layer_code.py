"""The user's code that computes the attention of a layer is recorded with its file and line."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.tiny import make_model
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import flexinspect
from flexinspect.trace.queries import attention_source
from flexinspect.trace.reader import open_trace


def patched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def own_attention(*args: Any, **kwargs: Any) -> Any:
    return sdpa_attention_forward(*args, **kwargs)


def sources(model: Any, path: Path, n_layers: int) -> list[str | None]:
    """Record two forward passes; return what is recorded for each layer."""
    ids = torch.arange(5)[None] + 3
    with torch.no_grad(), flexinspect.watch(model, out=path):
        model(ids)
        model(ids)
    with open_trace(path) as reader:
        events = [row.event for row in reader.events() if "layers" in row.event.data]
        assert len(events) == len({event.text for event in events})
        return [attention_source(reader, layer) for layer in range(n_layers)]


def place(function: Any) -> str:
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


def test_a_patched_forward_is_that_of_its_layer(tmp_path: Path) -> None:
    model = make_model("llama")
    layers = model.model.layers
    layers[1].self_attn.forward = partial(patched, layers[1].self_attn)
    found = sources(model, tmp_path / "run.flextrace", len(layers))
    assert found == [place(patched) if n == 1 else None for n in range(len(layers))]


def test_a_registered_function_is_that_of_all_layers(tmp_path: Path) -> None:
    AttentionInterface.register("own", own_attention)
    model = make_model("llama")
    model.set_attn_implementation("own")
    found = sources(model, tmp_path / "run.flextrace", len(model.model.layers))
    assert found == [place(own_attention)] * len(model.model.layers)


def test_code_of_a_library_is_not_recorded(tmp_path: Path) -> None:
    model = make_model("llama")
    found = sources(model, tmp_path / "run.flextrace", len(model.model.layers))
    assert set(found) == {None}
