"""Panels come through entry points; options are read by the annotations of their fields."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import EntryPoint
from typing import Any, Literal

import pytest

from flexinspect.core import plugins
from flexinspect.core.errors import FlexInspectError, UsageError
from flexinspect.core.plugins import PANELS
from flexinspect.panels import panel_registry
from flexinspect.panels.base import Help, NoOptions, Panel


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Options:
    zoom: int = 1
    share: float = 0.5
    blocks: bool = False
    name: str = "a"
    view: Literal["declared", "executed"] = "declared"
    colour: Colour = Colour.RED
    layer: int | None = None
    rows: tuple[int, ...] = ()
    table: dict[str, int] | None = None


class Mine(Panel[None, Options]):
    name = "mine"
    title = "Mine"
    help = Help("a", "b", "c")

    def options(self) -> Options:
        return Options()


class Bare(Panel[None, NoOptions]):
    name = "bare"
    title = "Bare"
    help = Help("a", "b", "c")

    def options(self) -> NoOptions:
        return NoOptions()


class Untitled(Panel[None, NoOptions]):
    name = "untitled"


def broken() -> Panel[None, NoOptions]:
    raise OSError("no such device")


def here(name: str, what: str) -> EntryPoint:
    return EntryPoint(name, f"{__name__}:{what}", PANELS)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    points = [
        *(here(name, "Mine") for name in ("zebra", "mask", "mine", "tokens")),
        *(here("broken", "broken"), here("number", "PANELS"), here("options", "Options")),
        *(here("untitled", "Untitled"), EntryPoint("gone", "no_such_module_here:X", PANELS)),
    ]
    monkeypatch.setattr(plugins, "registered", lambda group: points)
    panel_registry.load_panel.cache_clear()
    yield
    panel_registry.load_panel.cache_clear()


def test_the_built_in_panels_come_first_in_their_order_then_the_others_sorted() -> None:
    names = panel_registry.panel_names()
    assert names[:2] == ("tokens", "mask")
    assert list(names[2:]) == sorted(names[2:])
    assert names[-1] == "zebra"


def test_the_package_registers_the_panels_that_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    built_in = tuple(plugins.BUILT_IN[PANELS])
    assert panel_registry.panel_names()[: len(built_in)] == built_in


def test_a_panel_is_made_once() -> None:
    panel = panel_registry.load_panel("mine")
    assert isinstance(panel, Mine)
    assert panel_registry.load_panel("mine") is panel


def test_an_unknown_name_is_a_sentence_with_the_nearest_one() -> None:
    with pytest.raises(UsageError) as caught:
        panel_registry.load_panel("tokns")
    assert caught.value.message.startswith("There is no panel 'tokns'; the panels are tokens, mask")
    assert caught.value.hint == "Did you mean tokens?"


def test_a_name_like_no_other_is_told_how_to_add_a_panel() -> None:
    with pytest.raises(UsageError) as caught:
        panel_registry.load_panel("qqq")
    assert PANELS in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gone", "could not be loaded: ModuleNotFoundError"),
        ("broken", "making one failed with OSError: no such device"),
        ("number", "it is str, not a class of panels"),
        ("options", "it makes Options, not a Panel"),
        ("untitled", "it has no title"),
    ],
)
def test_what_is_no_panel_is_a_sentence(name: str, why: str) -> None:
    with pytest.raises(FlexInspectError) as caught:
        panel_registry.load_panel(name)
    assert why in caught.value.message
    assert not isinstance(caught.value, UsageError)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("zoom", "-3", -3),
        ("share", "1e-3", 1e-3),
        ("blocks", "Yes", True),
        ("blocks", "off", False),
        ("name", "a=b c", "a=b c"),
        ("view", "executed", "executed"),
        ("colour", "blue", Colour.BLUE),
        ("layer", "7", 7),
        ("layer", "none", None),
        ("rows", "1, 2,5", (1, 2, 5)),
        ("rows", "", ()),
    ],
)
def test_an_option_is_read_by_its_annotation(key: str, text: str, value: Any) -> None:
    options = panel_registry.with_options(Mine(), {key: text})
    assert getattr(options, key) == value
    assert type(getattr(options, key)) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("zoom", "1.5", "is a whole number; '1.5' is none (now: 1)"),
        ("share", "half", "is a number;"),
        ("blocks", "maybe", "is yes or no;"),
        ("view", "drawn", "is one of declared, executed;"),
        ("colour", "green", "is one of red, blue;"),
        ("layer", "top", "is a whole number or none;"),
        ("rows", "1,x", "is a whole number;"),
        ("table", "x", "is not one that can be given as text"),
    ],
)
def test_a_value_that_does_not_fit_is_a_sentence(key: str, text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        panel_registry.with_options(Mine(), {key: text})
    assert caught.value.message.startswith(f"The option {key} of the panel mine ")
    assert said in caught.value.message


def test_options_of_other_panels_are_passed_by() -> None:
    assert panel_registry.option_names(Bare()) == ()
    assert panel_registry.with_options(Bare(), {"zoom": "x"}) == NoOptions()
    assert panel_registry.with_options(Mine(), {"other": "x", "zoom": "2"}) == Options(zoom=2)
