"""The outputs of selected modules are stored as they were, at level extreme alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import make_model
from torch import Tensor

import flexinspect
from flexinspect.core.errors import UsageError
from flexinspect.trace.reader import TraceReader, open_trace

IDS = torch.tensor([[1, 40, 77, 12, 205], [1, 9, 8, 7, 6]])


def stored(reader: TraceReader, step: int = 0) -> dict[tuple[str, int | None], str]:
    arrays = reader.arrays(0, step)
    return {(a.stream, a.layer): a.dtype for a in arrays if a.stream.startswith("module.")}


def watched(model: Any, out: Path, *select: str, level: str = "extreme", **options: Any) -> Tensor:
    with flexinspect.watch(model, out=out, level=level, select=select, **options):
        result: Tensor = model(IDS).logits
    return result


def test_outputs_are_those_of_the_modules_of_batch_row_0(tmp_path: Path) -> None:
    model, out = make_model("llama"), tmp_path / "a.flextrace"
    kept: dict[str, Tensor] = {}
    for name in ("model.layers.1.mlp.up_proj", "model.norm"):
        module = model.get_submodule(name)
        module.register_forward_hook(lambda m, a, o, name=name: kept.update({name: o.clone()}))
    watched(model, out, "module=layers.1.mlp.* op=Linear", "model.norm")
    with open_trace(out) as reader:
        assert stored(reader) == {
            ("module.mlp.gate_proj", 1): "float32",
            ("module.mlp.up_proj", 1): "float32",
            ("module.mlp.down_proj", 1): "float32",
            ("module.model.norm", None): "float32",
        }
        up = reader.array(0, 0, "module.mlp.up_proj", 1)
        norm = reader.array(0, 0, "module.model.norm", None)
    assert up is not None
    assert norm is not None
    assert np.array_equal(up, kept["model.layers.1.mlp.up_proj"][0].numpy())
    assert np.array_equal(norm, kept["model.norm"][0].numpy())


def test_layers_limit_what_is_selected(tmp_path: Path) -> None:
    out = tmp_path / "a.flextrace"
    watched(make_model("llama"), out, "op=LlamaMLP", "lm_head", layers=[2])
    with open_trace(out) as reader:
        assert set(stored(reader)) == {("module.mlp", 2), ("module.lm_head", None)}


def test_a_dtype_selects_by_the_output(tmp_path: Path) -> None:
    model = make_model("llama").bfloat16()
    model.lm_head.float()
    model.lm_head.forward = lambda x: torch.nn.functional.linear(x.float(), model.lm_head.weight)
    out = tmp_path / "a.flextrace"
    watched(model, out, "op=Linear module=layers.0.** dtype=bfloat16", "lm_head dtype=bfloat16")
    with open_trace(out) as reader:
        found = stored(reader)
        values = reader.array(0, 0, "module.mlp.up_proj", 0)
    assert set(found.values()) == {"bfloat16"}
    assert ("module.lm_head", None) not in found
    assert values is not None
    assert values.dtype == np.float32  # widened by the reader


def test_a_module_that_returns_several_values_stores_its_first_tensor(tmp_path: Path) -> None:
    out = tmp_path / "a.flextrace"
    watched(make_model("llama"), out, "op=LlamaAttention module=layers.0.self_attn")
    with open_trace(out) as reader:
        array = reader.array(0, 0, "module.self_attn", 0)
    assert array is not None
    assert array.shape == (5, 48)


@pytest.mark.parametrize("level", ["basic", "advanced"])
def test_lower_levels_store_nothing_and_results_are_the_same(level: str, tmp_path: Path) -> None:
    model, out = make_model("llama"), tmp_path / "a.flextrace"
    plain = model(IDS).logits
    assert torch.equal(watched(model, out, "op=Linear", level=level), plain)
    with open_trace(out) as reader:
        assert stored(reader) == {}


def test_no_hook_is_left_and_none_is_installed_without_a_selector(tmp_path: Path) -> None:
    model = make_model("llama")
    mlp = model.model.layers[0].mlp.up_proj
    with flexinspect.watch(model, out=tmp_path / "a.flextrace", level="extreme"):
        assert not mlp._forward_hooks
    with flexinspect.watch(
        model, out=tmp_path / "b.flextrace", level="extreme", select=["op=Linear"]
    ):
        assert mlp._forward_hooks
    assert not mlp._forward_hooks


def test_a_selector_that_matches_nothing_is_refused_with_the_classes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'op=Liner' matches no module") as caught:
        flexinspect.watch(make_model("llama"), out=tmp_path / "a", select=["op=Liner"])
    assert "Linear" in str(caught.value.hint)
