"""The weights of a model as each generation ran with them, also where they cannot be held."""

from __future__ import annotations

import pytest
import torch
from support.tiny import make_model

from flexinspect.core.errors import FlexInspectError
from flexinspect_hooks.audit.forward import held_weights
from flexinspect_hooks.audit.forward.held_weights import HeldWeights


@pytest.fixture
def without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_weights, "MAX_HELD_SHARE", 0.0)


@pytest.mark.usefixtures("without_room")
def test_weights_too_large_to_be_held_are_those_of_the_living_model() -> None:
    model, weights = make_model("llama"), HeldWeights()
    weights.note(0, model)
    with pytest.raises(FlexInspectError, match="deleted the model"):
        weights.of(0)
    weights.find_model = lambda: model
    found = weights.of(0)
    known = [one.data_ptr() for one in model.parameters()]
    assert [one.data_ptr() for one in found.parameters] == known


@pytest.mark.usefixtures("without_room")
def test_weights_too_large_to_be_held_must_not_have_been_modified() -> None:
    model, weights = make_model("llama"), HeldWeights()
    weights.note(0, model)
    weights.find_model = lambda: model
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    with pytest.raises(FlexInspectError, match="modified"):
        weights.of(0)
