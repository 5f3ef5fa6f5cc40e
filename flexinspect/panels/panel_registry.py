"""Loads panels by name, built-in ones and plug-ins alike, and parses their options from text."""

from __future__ import annotations

import types
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec.structs import replace

from flexinspect.core import plugins
from flexinspect.core.errors import FlexInspectError, UsageError
from flexinspect.core.text import did_you_mean
from flexinspect.panels.base import Help, Panel


def panel_names() -> tuple[str, ...]:
    """Return the names of all panels, the built-in ones first in their order; imports none."""
    registered = plugins.names(plugins.PANELS)
    built_in = plugins.BUILT_IN[plugins.PANELS]
    return (
        *(name for name in built_in if name in registered),
        *(name for name in registered if name not in built_in),
    )


def panel_number(name: str) -> int:
    """Return the position of a panel in `panel_names`, from 1."""
    built_in = tuple(plugins.BUILT_IN[plugins.PANELS])
    return (built_in if name in built_in else panel_names()).index(name) + 1


@cache
def load_panel(name: str) -> Panel[Any, Any]:
    """Return the panel with a name; the same instance on every call.

    Raises `UsageError` with the closest name for an unknown one, and `FlexInspectError` for a
    plug-in that cannot be loaded or is not a panel.
    """
    # A built-in panel loads without a search for other packages' panels, which takes a while.
    if name not in plugins.BUILT_IN[plugins.PANELS] and name not in panel_names():
        known = panel_names()
        add = f"To add a panel, register an entry point in the group {plugins.PANELS}."
        raise UsageError(
            f"There is no panel '{name}'; the panels are {', '.join(known) or 'none'}.",
            hint=did_you_mean(name, known, add),
        )
    factory = plugins.load(plugins.PANELS, name)
    if not callable(factory):
        raise _invalid_plugin_error(name, f"it is a {type(factory).__name__}, not a Panel class")
    try:
        panel = plugins.make(plugins.PANELS, name, factory)
    except (Exception, SystemExit) as error:
        why = f"the constructor raised {type(error).__name__}: {error}"
        raise _invalid_plugin_error(name, why) from error
    if not isinstance(panel, Panel):
        why = f"it creates an object of type {type(panel).__name__}, not Panel"
        raise _invalid_plugin_error(name, why)
    for attribute, kind in (("name", str), ("title", str), ("help", Help)):
        if not isinstance(getattr(panel, attribute, None), kind):
            raise _invalid_plugin_error(name, f"it has no {attribute}")
    return panel


def _invalid_plugin_error(name: str, why: str) -> FlexInspectError:
    return FlexInspectError(
        f"The plug-in '{name}' of {plugins.PANELS} is not a panel: {why}.",
        hint="Update or remove the package that provides it; other panels are not affected.",
    )


def option_names(panel: Panel[Any, Any]) -> tuple[str, ...]:
    """Return the names of a panel's options."""
    return getattr(panel.initial_options, "__struct_fields__", ())


def with_options(panel: Panel[Any, Any], values: Mapping[str, str]) -> Any:
    """Return a panel's initial options with `values` parsed and set; unknown names are ignored.

    A value is parsed by the annotation of its field: a bool ("yes", "off"), a number, text, a
    choice of a `Literal` or `Enum`, "none" for an optional field, or comma-separated values for a
    tuple. Raises `UsageError` for an invalid value.
    """
    options = panel.initial_options
    names = [name for name in option_names(panel) if name in values]
    if not names:
        return options
    hints = get_type_hints(type(options))
    changes = {}
    for name in names:
        try:
            changes[name] = _parse_value(values[name], hints[name])
        except ValueError as error:
            raise UsageError(
                f"The option {name} of the panel {panel.name} must be {error}, "
                f"not '{values[name]}' (default: {getattr(options, name)})."
            ) from error
    return replace(options, **changes)


_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True}
_BOOLEANS |= {"false": False, "no": False, "off": False, "0": False}
_SCALARS = {int: "a whole number", float: "a number", str: "text"}


def _parse_value(text: str, kind: Any) -> Any:
    """Parse `text` as a `kind`. The message of a `ValueError` names the expected value."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is bool:
        return _parse_choice(text.lower(), _BOOLEANS, "yes or no")
    if kind in _SCALARS:
        try:
            return kind(text)
        except ValueError:
            raise ValueError(_SCALARS[kind]) from None
    if origin is Literal:
        return _parse_choice(text, {str(choice): choice for choice in arguments})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _parse_choice(text, {str(choice.value): choice for choice in kind})
    if origin in (Union, types.UnionType):
        return _parse_union(text, arguments)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        parts = filter(None, map(str.strip, text.split(",")))
        return tuple(_parse_value(part, arguments[0]) for part in parts)
    raise ValueError("of a type that can be given as text")


def _parse_choice(text: str, choices: Mapping[str, Any], description: str = "") -> Any:
    if text not in choices:
        raise ValueError(description or f"one of {', '.join(choices)}")
    return choices[text]


def _parse_union(text: str, kinds: tuple[Any, ...]) -> Any:
    if type(None) in kinds and text.lower() in ("none", ""):
        return None
    expected = []
    for kind in kinds:
        if kind is not type(None):
            try:
                return _parse_value(text, kind)
            except ValueError as error:
                expected.append(str(error))
    raise ValueError(" or ".join([*expected, "none"] if type(None) in kinds else expected))
