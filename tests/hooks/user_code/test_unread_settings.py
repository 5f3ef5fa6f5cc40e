"""Settings of a configuration that the model does not follow are named; others are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.planting import of, planted
from support.tiny import ids, make_model
from torch import nn

from flexinspect_hooks.user_code.unread_settings import unmet_settings


def tied(family: str = "llama", **options: Any) -> Any:
    return make_model(family, tie_word_embeddings=True, **options)


def assign(model: Any) -> None:
    name, table = "model.embed_tokens.weight", model.model.embed_tokens.weight
    model.load_state_dict({name: torch.randn_like(table)}, strict=False, assign=True)


def replace(model: Any) -> None:
    model.set_input_embeddings(nn.Embedding.from_pretrained(model.lm_head.weight.detach() * 1.5))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("untie", [assign, replace])
def test_a_head_that_is_no_longer_the_table_is_named(
    family: str, untie: Callable[[Any], None]
) -> None:
    model = tied(family)
    untie(model)
    (found,) = unmet_settings(model)
    assert (found["what"], found["head"]) == ("config.untied-head", "lm_head.weight")
    assert found["difference"] > 0.3


def tie_again(model: Any) -> None:
    assign(model)
    model.tie_weights()


def copy_in_bfloat16(model: Any) -> None:
    head = model.lm_head.weight.detach().bfloat16()
    model.lm_head.weight = nn.Parameter(head.float())


def say_so(model: Any) -> None:
    assign(model)
    model.config.tie_word_embeddings = False


@pytest.mark.parametrize("change", [lambda model: None, tie_again, copy_in_bfloat16, say_so])
def test_heads_that_are_the_table_or_are_meant_to_be_another_are_left_alone(
    change: Callable[[Any], None],
) -> None:
    model = tied()
    change(model)
    assert list(unmet_settings(model)) == []


def test_models_without_a_head_or_a_configuration_are_left_alone() -> None:
    assert list(unmet_settings(nn.Linear(2, 2))) == []
    assert list(unmet_settings(tied().model)) == []


def with_base(family: str, base: float) -> Any:
    model: Any = make_model(family)
    config = type(model.config)(**model.config.to_dict())
    config.rope_theta = base
    return type(model)(config).eval()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_base_of_rope_beside_the_parameters_is_named(family: str) -> None:
    (found,) = unmet_settings(with_base(family, 1e7))
    assert (found["what"], found["given"]) == ("config.unread-rope", 1e7)
    assert list(unmet_settings(with_base(family, found["used"]))) == []


def test_a_base_that_is_passed_is_used() -> None:
    model = make_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e7})
    assert list(unmet_settings(model)) == []


def test_the_findings_are_reported_once(tmp_path: Path) -> None:
    model = with_base("llama", 1e7)
    prompt = torch.tensor([ids(5, 3)])

    def run() -> None:
        for _ in range(2):
            model.generate(prompt, max_new_tokens=2, do_sample=False)

    (finding,) = of(planted(tmp_path, model, run), "config.unread-rope")
    assert (
        "The configuration has rope_theta = 1e+07, but the model is made from" in finding.sentence
    )
