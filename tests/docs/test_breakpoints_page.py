"""What docs/breakpoints.md shows is what is read, and all that is read is there."""

from __future__ import annotations

import re

import pytest
from support.paths import DOCS

from flexinspect.breakpoints.grammar import (
    OBSERVATIONS,
    OPTION_HELP,
    UNITS,
    VALUE_NAMES,
    ExpressionError,
)
from flexinspect.breakpoints.store import BreakpointStore

PAGE = (DOCS / "breakpoints.md").read_text()


def test_every_condition_of_the_page_is_read() -> None:
    (block,) = re.findall(r"## Conditions\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    store = BreakpointStore()
    for line in block.splitlines():
        store.add(line)
    assert len(store.list()) > 10
    for condition in re.findall(r'^\w+ = "(.*)"$', PAGE, re.MULTILINE):
        store.add(condition)


def test_every_name_option_and_unit_is_on_the_page() -> None:
    for name in (*VALUE_NAMES, *OBSERVATIONS):
        assert f"`{name}`" in PAGE, name
    for option in OPTION_HELP:
        assert f"`[{option}" in PAGE, option
    assert ", ".join(unit for unit in UNITS if unit != "KB") in PAGE


def test_the_error_of_the_page_is_the_one_that_is_raised() -> None:
    with pytest.raises(ExpressionError) as caught:
        BreakpointStore().add("step > 2 and entropi > 3")
    message = caught.value.with_location("--break").sentence()
    assert f"flexinspect: {message}\n```" in PAGE
