"""Plug-ins by entry point, at three grains: list names, load one, load all.

The built-in hooks, panels, rules and exports are registered in the package's own metadata and come
through this door like anybody else's. Listing names imports nothing.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from flexinspect.errors import FlexInspectError


def names(group: str) -> tuple[str, ...]:
    """Return the names registered in a group, sorted, without importing any of them."""
    return tuple(sorted(point.name for point in entry_points(group=group)))


def load(group: str, name: str) -> Any:
    """Load one plug-in. Raises `FlexInspectError` when it is not there or does not import."""
    for point in entry_points(group=group):
        if point.name == name:
            return _import(point)
    known = ", ".join(names(group)) or "none"
    raise FlexInspectError(
        f"No plug-in '{name}' is registered in {group} (registered: {known}).",
        hint="Install the package that offers it, or reinstall flexinspect.",
    )


def load_all(group: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Load every plug-in of a group: (name to object, name to the sentence of its failure)."""
    loaded: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        try:
            loaded[point.name] = _import(point)
        except FlexInspectError as error:
            failed[point.name] = error.message
    return loaded, failed


def _import(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:
        raise FlexInspectError(
            f"The plug-in '{point.name}' ({point.value}) did not load: "
            f"{type(error).__name__}: {error}"
        ) from error
