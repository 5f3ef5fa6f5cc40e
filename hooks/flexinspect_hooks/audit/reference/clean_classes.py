"""Imports the modeling code of transformers again, so that no patch of the program is in it.

A module of transformers is executed a second time under another name. Its classes and functions
are new objects: what the program replaced in the original module, or in the classes, is not in
them. Functions of the copy may be replaced without an effect on the program.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from flexinspect.core.errors import FlexInspectError

_PACKAGE = "transformers.models."
_MARK = "_flexinspect_"
ORIGINALS = "_flexinspect_originals"
"""The name under which a copied module keeps its own functions, after some were replaced."""


def import_again(name: str) -> ModuleType:
    """Return a second copy of a module of transformers; each module is copied once per process.

    Raises `FlexInspectError` if the module has no source file.
    """
    package, _, last = name.rpartition(".")
    copy_name = f"{package}.{_MARK}{last}"
    known = sys.modules.get(copy_name)
    if known is not None:
        return known
    found = importlib.util.find_spec(name)
    if found is None or not found.origin:
        raise FlexInspectError(f"The source of {name} was not found.")
    spec = importlib.util.spec_from_file_location(copy_name, found.origin)
    if spec is None or spec.loader is None:
        raise FlexInspectError(f"{name} cannot be imported again.")
    module = importlib.util.module_from_spec(spec)
    # Registered, because decorators of transformers look up the module of a class by its name.
    sys.modules[copy_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[copy_name]
        raise
    return module


def architecture_class(model_class: type) -> type | None:
    """Return the class of transformers that a model's class is, or derives from; else None."""
    for one in model_class.__mro__:
        module = one.__module__
        if module.startswith(_PACKAGE) and ".modeling_" in module and _MARK not in module:
            return one
    return None


def clean_class(model_class: type) -> tuple[type, ModuleType]:
    """Return the untouched class of an architecture, and the module that holds it.

    Raises `FlexInspectError` for a model that is not one of transformers.
    """
    original = architecture_class(model_class)
    if original is None:
        what = f"{model_class.__name__} is not an architecture of transformers"
        raise FlexInspectError(f"{what}, so there is no untouched implementation to compare with.")
    module = import_again(original.__module__)
    return getattr(module, original.__name__), module


def replaced_names(model_class: type) -> list[str]:
    """Return the functions and methods of the architecture's module that the program replaced."""
    original = architecture_class(model_class)
    if original is None:
        return []
    live, clean = sys.modules[original.__module__], import_again(original.__module__)
    return sorted(_differing(live, clean))


def _differing(live: ModuleType, clean: ModuleType) -> Iterator[str]:
    for name, value in vars(clean).get(ORIGINALS, vars(clean)).items():
        if name.startswith("_flexinspect"):
            continue
        ours, theirs = _code(value), _code(getattr(live, name, None))
        is_own = getattr(value, "__module__", None) == clean.__name__
        if is_own and ours is not None and not _is_same(ours, theirs):
            yield name
        if not (is_own and isinstance(value, type)):
            continue
        for method, function in vars(value).items():
            mine = _code(function)
            other = _code(vars(getattr(live, name, object)).get(method))
            if mine is not None and not _is_same(mine, other):
                yield f"{name}.{method}"


def _code(value: Any) -> Any:
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value.__code__ if isinstance(value, FunctionType) else None


def _is_same(one: Any, other: Any) -> bool:
    # Not `==`: constants that are code objects compare by their file positions too.
    return other is not None and one.co_code == other.co_code and one.co_names == other.co_names
