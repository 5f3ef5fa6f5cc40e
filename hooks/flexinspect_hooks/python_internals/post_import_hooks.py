"""Calls functions when modules are imported, without importing them itself."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Callback = Callable[[], None]

_OWN_PREFIX = "flexinspect_hooks."


class _ImportState(threading.local):
    """Per thread: how many flexinspect modules are being imported, and names waiting for them.

    Two instances search each other for modules that both watch. `is_searching` ends the recursion:
    an instance that searches finds nothing itself.
    """

    def __init__(self) -> None:
        self.is_searching = False
        self.depth = 0
        self.pending: list[str] = []


class PostImportHooks:
    """While installed, calls a function for each named module, right after its body has run.

    The import continues when the function returns. `on_import_begin` is called with the name of a
    module when its import begins. Exceptions of both go to `on_error` and do not stop the import.
    For a module that a flexinspect module imports, the call waits until the flexinspect module is
    fully imported, because the functions import flexinspect modules too.
    """

    def __init__(
        self,
        callbacks: Mapping[str, Callback],
        *,
        on_import_begin: Callable[[str], None],
        on_error: Callable[[str, Exception], None],
    ) -> None:
        self._callbacks = dict(callbacks)
        self._on_import_begin, self._on_error = on_import_begin, on_error
        self._state = _ImportState()

    def install(self) -> None:
        """Start watching. Functions of modules that are imported already are called now."""
        for name in [name for name in self._callbacks if name in sys.modules]:
            self._on_imported(name)
        if self._callbacks:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Stop watching and leave `sys.meta_path` as it was."""
        self._callbacks.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a watched module with the other finders, and wrap its loader."""
        is_known = name in self._callbacks or name.startswith(_OWN_PREFIX)
        if not is_known or self._state.is_searching:
            return None
        self._state.is_searching = True
        try:
            for finder in tuple(sys.meta_path):
                find = getattr(finder, "find_spec", None)
                if finder is self or find is None:
                    continue
                spec: ModuleSpec | None = find(name, path, target)
                if spec is not None:
                    self._wrap_loader(name, spec.loader)
                    return spec
            return None
        finally:
            self._state.is_searching = False

    def _wrap_loader(self, name: str, loader: Any) -> None:
        run, state = getattr(loader, "exec_module", None), self._state
        if run is None:
            return
        if is_watched := name in self._callbacks:
            self._call_safely(name, lambda: self._on_import_begin(name))

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # restores the loader's own method
            if is_watched:
                run(module)
                self._on_imported(name)
                return
            state.depth += 1
            try:
                run(module)
            finally:
                state.depth -= 1
                if not state.depth:
                    ready, state.pending = state.pending, []
                    for imported in ready:
                        self._on_imported(imported)

        loader.exec_module = exec_module

    def _on_imported(self, name: str) -> None:
        if self._state.depth:
            self._state.pending.append(name)
            return
        callback = self._callbacks.pop(name, None)
        if callback is not None:
            self._call_safely(name, callback)
        if not self._callbacks:
            self.remove()

    def _call_safely(self, name: str, callback: Callback) -> None:
        try:
            callback()
        except Exception as error:
            self._on_error(name, error)
