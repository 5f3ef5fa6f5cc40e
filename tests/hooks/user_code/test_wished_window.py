"""A window that a configuration asks for and no layer has is reported; others are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.planting import of, planted
from support.tiny import COMMON, ids
from transformers import AutoConfig, AutoModelForCausalLM

from flexinspect_hooks.user_code.wished_window import unused_window

WISHES = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


def model_of(family: str, given: dict[str, Any], later: dict[str, Any]) -> Any:
    """Return a model of a configuration whose fields `later` are set after it was made."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **COMMON, **given)
    for name, value in later.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_that_is_set_after_the_configuration_was_made_is_in_no_layer(family: str) -> None:
    found = unused_window(model_of(family, {}, WISHES))
    assert found is not None
    assert (found["window"], found["layers"]) == (8, [1, 2])


@pytest.mark.parametrize(
    ("given", "later"),
    [
        (WISHES, {}),
        ({}, {}),
        ({}, WISHES | {"use_sliding_window": False}),
        ({}, WISHES | {"max_window_layers": 3}),
        (WISHES | {"max_window_layers": 3}, {}),
        ({}, WISHES | {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}),
    ],
    ids=["passed", "no window", "not used", "later in no layer", "in no layer", "layer_types"],
)
def test_other_configurations_are_left_alone(given: dict[str, Any], later: dict[str, Any]) -> None:
    assert unused_window(model_of("qwen2", given, later)) is None


def test_models_without_such_fields_are_left_alone() -> None:
    assert unused_window(model_of("llama", {}, {})) is None
    assert unused_window(model_of("mistral", {"sliding_window": 8}, {})) is None
    assert unused_window(torch.nn.Linear(2, 2)) is None


@pytest.mark.parametrize(("n", "expected"), [(12, 1), (4, 0)])
def test_the_finding_waits_for_a_text_that_is_longer_than_the_window(
    tmp_path: Path, n: int, expected: int
) -> None:
    model = model_of("qwen2", {}, WISHES)
    prompt = torch.tensor([ids(n, 3)])
    run = lambda: model.generate(prompt, max_new_tokens=3, do_sample=False)  # noqa: E731
    found = of(planted(tmp_path, model, run), "mask.unused-window")
    assert len(found) == expected
    assert all("layers 1-2 attend to the whole text" in one.sentence for one in found)
