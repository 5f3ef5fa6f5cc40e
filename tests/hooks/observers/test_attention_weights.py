"""What a forward returns as attention weights is held against what weights are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import ids, make_model

import flexinspect
from flexinspect.records.step import EventRecord


def told(model: Any, out: Path) -> list[EventRecord]:
    """Return what is said of the weights that a forward of two sequences returns."""
    fed = torch.tensor([ids(6, 1), ids(6, 2)])
    with flexinspect.watch(model, out=out) as trace:
        model(fed, output_attentions=True, use_cache=False)
    with trace.reader() as reader:
        return [row.event for row in reader.events() if row.event.kind == "no-weights"]


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


def test_weights_that_are_weights_are_passed_over(tmp_path: Path) -> None:
    assert told(returning(lambda output, weights: weights), tmp_path / "a.flextrace") == []


def test_layers_that_return_none_are_passed_over(tmp_path: Path) -> None:
    assert told(returning(lambda output, weights: None), tmp_path / "a.flextrace") == []


@pytest.mark.parametrize(
    ("change", "words"),
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
def test_what_is_no_weights_is_told_with_its_layer(change: Any, words: str, tmp_path: Path) -> None:
    (event,) = told(returning(change), tmp_path / "a.flextrace")
    assert event.text == f"Layer 1 returned {words}"
    assert (event.generation, event.step, event.data["layer"]) == (0, 0, 1)
