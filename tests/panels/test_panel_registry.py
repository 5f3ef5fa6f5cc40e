"""Loading panels from entry points, and parsing options by the annotations of their fields."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from importlib.metadata import EntryPoint
from typing import Any, Literal

import pytest
from msgspec import Struct

from flexinspect.core import plugins
from flexinspect.core.errors import FlexInspectError, UsageError
from flexinspect.core.plugins import PANELS
from flexinspect.panels import panel_registry
from flexinspect.panels.base import Help, NoOptions, Panel


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Options(Struct, frozen=True):
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
    initial_options = Options()


class Bare(Panel[None, NoOptions]):
    name = "bare"
    title = "Bare"
    help = Help("a", "b", "c")
    initial_options = NoOptions()


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


def test_the_package_registers_the_listed_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    built_in = tuple(plugins.BUILT_IN[PANELS])
    assert panel_registry.panel_names()[: len(built_in)] == built_in


def test_a_panel_is_created_once() -> None:
    panel = panel_registry.load_panel("mine")
    assert isinstance(panel, Mine)
    assert panel_registry.load_panel("mine") is panel


def test_an_unknown_name_is_an_error_with_the_closest_name() -> None:
    with pytest.raises(UsageError) as caught:
        panel_registry.load_panel("tokns")
    assert caught.value.message.startswith("There is no panel 'tokns'; the panels are tokens, mask")
    assert caught.value.hint == "Did you mean tokens?"


def test_an_unknown_name_without_a_close_match_has_a_hint_on_adding_panels() -> None:
    with pytest.raises(UsageError) as caught:
        panel_registry.load_panel("qqq")
    assert PANELS in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gone", "could not be loaded: ModuleNotFoundError"),
        ("broken", "the constructor raised OSError: no such device"),
        ("number", "it is a str, not a Panel class"),
        ("options", "it creates an object of type Options, not Panel"),
        ("untitled", "it has no title"),
    ],
)
def test_an_invalid_plugin_is_an_error_with_the_reason(name: str, why: str) -> None:
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
def test_an_option_is_parsed_by_its_annotation(key: str, text: str, value: Any) -> None:
    options = panel_registry.with_options(Mine(), {key: text})
    assert getattr(options, key) == value
    assert type(getattr(options, key)) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("zoom", "1.5", "must be a whole number, not '1.5' (default: 1)"),
        ("share", "half", "must be a number,"),
        ("blocks", "maybe", "must be yes or no,"),
        ("view", "drawn", "must be one of declared, executed,"),
        ("colour", "green", "must be one of red, blue,"),
        ("layer", "top", "must be a whole number or none,"),
        ("rows", "1,x", "must be a whole number,"),
        ("table", "x", "must be of a type that can be given as text"),
    ],
)
def test_an_invalid_value_is_a_usage_error(key: str, text: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        panel_registry.with_options(Mine(), {key: text})
    assert caught.value.message.startswith(f"The option {key} of the panel mine ")
    assert expected in caught.value.message


def test_options_of_other_panels_are_ignored() -> None:
    assert panel_registry.option_names(Bare()) == ()
    assert panel_registry.with_options(Bare(), {"zoom": "x"}) == NoOptions()
    assert panel_registry.with_options(Mine(), {"other": "x", "zoom": "2"}) == Options(zoom=2)
