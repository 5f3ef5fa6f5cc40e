"""Lets a program pickle and copy its models while flexinspect hooks are installed in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from flexinspect_hooks.python_internals.patching import patch
from flexinspect_hooks.python_internals.torch_private import MODULE_HOOKS


def hide_hooks() -> Callable[[], None]:
    """Leave flexinspect hooks out of every module that is pickled or copied.

    They refer to threads and files, which cannot be pickled. A class that defines its own
    `__getstate__` keeps it. Returns a function that restores `nn.Module.__getstate__`.
    """
    original: Any = nn.Module.__getstate__

    def getstate(module: nn.Module) -> Any:
        state = original(module)
        return _without_own_hooks(state) if isinstance(state, dict) else state

    return patch(nn.Module, "__getstate__", getstate)


def _without_own_hooks(state: dict[str, Any]) -> dict[str, Any]:
    for attribute, flag_attributes in MODULE_HOOKS.items():
        own_ids = {key for key, hook in state.get(attribute, {}).items() if _is_own_hook(hook)}
        for name in (attribute, *flag_attributes) if own_ids else ():
            hooks = state.get(name, {})
            others = {key: hook for key, hook in hooks.items() if key not in own_ids}
            state = {**state, name: type(hooks)(others)}
    return state


def _is_own_hook(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("flexinspect_hooks.")
