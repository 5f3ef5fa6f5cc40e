"""Modules of the user's, which `package.module:name` names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from flexinspect.errors import MaskError


def check_mask_mod_spec(spec: str) -> None:
    """Refuse a "package.module:function" whose module is nowhere; nothing is imported.

    Raises `MaskError`. Whether the function is there shows when the module is loaded.
    """
    module, _, function = spec.partition(":")
    if function and module_exists(module):
        return
    what = f"there is no module {module}" if function and module else "a part of the name is empty"
    raise MaskError(
        f"--mask {spec} cannot be loaded: {what}.",
        hint="Write --mask package.module:function, importable from the current folder.",
    )


def module_exists(module: str) -> bool:
    """Say whether a module could be imported, here or from the current folder, without doing it."""
    places: Sequence[str] | None = None
    parts = module.split(".")
    for n in range(1, len(parts) + 1):
        name = ".".join(parts[:n])
        spec = _find_spec(name, places) if parts[n - 1] and (n == 1 or places is not None) else None
        if spec is None:
            return module in sys.modules  # made by its package when that was imported
        places = spec.submodule_search_locations
    return True


def _find_spec(name: str, places: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, places)
        if spec is not None:
            return spec
    return PathFinder.find_spec(name, [str(Path.cwd())]) if places is None else None
