"""Fixtures of the capture side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.tiny import make_model, make_pieces

from flexinspect.records.prompt import Prompt, compose_prompt


@pytest.fixture(scope="session")
def family_model() -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def get(family: str) -> Any:
        if family not in made:
            made[family] = make_model(family)
        return made[family]

    return get


@pytest.fixture
def llama() -> Any:
    return make_model("llama")


@pytest.fixture
def prompt() -> Prompt:
    return compose_prompt(make_pieces(), max_new_tokens=8)
