"""Notices hooks of the program that a compiled model does not run.

torch.compile does not guard on hooks (`torch._dynamo.config.skip_nnmodule_hook_guards`): a hook
that is registered after a graph was made never fires while that graph runs, without any message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.hooks import RemovableHandle

Report = Callable[[Mapping[str, Any]], None]

_KINDS = ("_forward_hooks", "_forward_pre_hooks")


class _Registered(NamedTuple):
    """A hook in its module, which has the `name` in the model."""

    name: str
    module: nn.Module
    kind: str
    key: int


class CompiledHooks:
    """Checks the calls of compiled models; only after new hooks does it look at the modules."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[nn.Module, tuple[int, set[int]]] = WeakKeyDictionary()
        """By model: the number of hooks ever registered, and the keys that need no check."""

    @contextmanager
    def check(self, model: nn.Module, report: Report) -> Iterator[None]:
        """Report hooks that were registered since the first call and do not fire in this one."""
        n_ever = _n_ever_registered()
        known = self._known.get(model)
        if known is not None and known[0] == n_ever:
            yield
            return
        hooks = list(_hooks_of(model))
        if known is None:
            self._known[model] = n_ever, {hook.key for hook in hooks}
            yield
            return
        new = [hook for hook in hooks if hook.key not in known[1]]
        fired: set[int] = set()
        restores = [_count(hook, fired) for hook in new]
        try:
            yield
        finally:
            for restore in restores:
                restore()
        self._known[model] = n_ever, known[1] | {hook.key for hook in hooks}
        for hook in new:
            if hook.key not in fired:
                report(_facts(hook))


def _n_ever_registered() -> int:
    return int(getattr(RemovableHandle, "next_id", 0))


def _hooks_of(model: nn.Module) -> Iterator[_Registered]:
    for name, module in model.named_modules():
        for kind in _KINDS:
            for key, hook in getattr(module, kind, {}).items():
                if not str(getattr(hook, "__module__", "")).startswith("flexinspect_hooks."):
                    yield _Registered(name, module, kind, key)


def _count(hook: _Registered, fired: set[int]) -> Callable[[], None]:
    """Note when a hook fires, until the function that is returned is called."""
    table = getattr(hook.module, hook.kind)
    original = table[hook.key]

    def counted(*args: Any, **kwargs: Any) -> Any:
        fired.add(hook.key)
        return original(*args, **kwargs)

    table[hook.key] = counted

    def restore() -> None:
        if table.get(hook.key) is counted:
            table[hook.key] = original

    return restore


def _facts(hook: _Registered) -> dict[str, Any]:
    function = getattr(hook.module, hook.kind).get(hook.key)
    code = getattr(function, "__code__", None)
    return {
        "module": hook.name,
        "hook": getattr(function, "__qualname__", type(function).__name__),
        "file": "" if code is None else code.co_filename,
        "line": 0 if code is None else code.co_firstlineno,
    }
