"""Letting a program pickle and copy its models while hooks of ours are in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

_HOOKS = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
}
"""Where a module keeps its hooks, and what it keeps of each beside them."""


def hide_hooks() -> Callable[[], None]:
    """Leave hooks of ours out of whatever is pickled or copied; returns what ends that.

    They hold threads and files, which no pickle takes. A class with a `__getstate__` of its own
    keeps it.
    """
    cls: Any = nn.Module
    own, original = vars(cls).get("__getstate__"), cls.__getstate__

    def getstate(module: nn.Module) -> Any:
        state = original(module)
        return _without_own_hooks(state) if isinstance(state, dict) else state

    def remove() -> None:
        if own is not None:
            cls.__getstate__ = own
        else:
            del cls.__getstate__

    cls.__getstate__ = getstate
    return remove


def _without_own_hooks(state: dict[str, Any]) -> dict[str, Any]:
    for name, beside in _HOOKS.items():
        ours = {key for key, hook in state.get(name, {}).items() if _is_own_hook(hook)}
        for each in (name, *beside) if ours else ():
            hooks = state[each]
            left = {key: hook for key, hook in hooks.items() if key not in ours}
            state = {**state, each: type(hooks)(left)}
    return state


def _is_own_hook(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("flexinspect_hooks.")
