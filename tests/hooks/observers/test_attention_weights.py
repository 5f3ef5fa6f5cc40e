"""The attention weights that a forward returns are checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import ids, make_model

import flexinspect
from flexinspect.records.step import EventRecord


def weight_events(model: Any, out: Path) -> list[EventRecord]:
    """Return the events about the weights that a forward of two sequences returns."""
    input_ids = torch.tensor([ids(6, 1), ids(6, 2)])
    with flexinspect.watch(model, out=out) as trace:
        model(input_ids, output_attentions=True, use_cache=False)
    with trace.reader() as reader:
        return [row.event for row in reader.events() if row.event.kind == "not-attention-weights"]


def returning(change: Any) -> Any:
    """Return an eager model whose layer 1 returns something else as its weights."""
    model = make_model("llama", num_hidden_layers=2)
    model.set_attn_implementation("eager")
    inner = model.model.layers[1].self_attn
    original = inner.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output, weights = original(*args, **kwargs)
        return output, change(output, weights)

    inner.forward = forward
    return model


def test_correct_weights_cause_no_event(tmp_path: Path) -> None:
    assert weight_events(returning(lambda output, weights: weights), tmp_path / "a.flextrace") == []


def test_layers_that_return_none_cause_no_event(tmp_path: Path) -> None:
    assert weight_events(returning(lambda output, weights: None), tmp_path / "a.flextrace") == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda output, weights: output,
            (
                "as attention weights a tensor (2, 6, 48), whose rows do not sum to 1; weights "
                "would be (2, 4, 6, 6)."
            ),
        ),
        (
            lambda output, weights: weights[:, :, :, 1:],
            (
                "as attention weights a tensor (2, 4, 6, 5), whose rows do not sum to 1; weights "
                "would be (2, 4, 6, 6)."
            ),
        ),
        (
            lambda output, weights: weights * 1.5,
            "attention weights whose newest row does not sum to 1: it is 0.5 off.",
        ),
        (
            lambda output, weights: weights * torch.nan,
            "attention weights whose newest row does not sum to 1: it is nan off.",
        ),
    ],
    ids=["output", "keys", "sum", "nan"],
)
def test_a_tensor_that_cannot_be_weights_is_an_event_with_its_layer(
    change: Any, problem: str, tmp_path: Path
) -> None:
    (event,) = weight_events(returning(change), tmp_path / "a.flextrace")
    assert event.text == f"Layer 1 returned {problem}"
    assert (event.generation, event.step, event.data["layer"]) == (0, 0, 1)
