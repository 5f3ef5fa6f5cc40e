"""Being told when a module has been imported, without importing it: it may come late, or never."""

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
    """Of one thread: how many of our modules are half imported, and what arrived meanwhile.

    Two instances ask each other for modules that both watch: who is `asking` finds nothing itself.
    """

    def __init__(self) -> None:
        self.is_searching = False
        self.depth = 0
        self.pending: list[str] = []


class PostImportHooks:
    """While installed, calls a function for each named module, right after its body has run.

    The import that brought the module goes on when the function returns. `coming` is called with a
    name when its import begins. What they raise is given to `failed` and stops nothing. What one of
    our own modules brings has arrived when that module is whole: the functions import them, too.
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
        """Begin; modules that are there already have arrived."""
        for name in [name for name in self._callbacks if name in sys.modules]:
            self._on_imported(name)
        if self._callbacks:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """End; nothing stays behind."""
        self._callbacks.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module that is waited for as all others would, and watch its body run."""
        if (
            name not in self._callbacks and not name.startswith(_OWN_PREFIX)
        ) or self._state.is_searching:
            return None
        self._state.is_searching = True
        try:
            return self._find_watched_spec(name, path, target)
        finally:
            self._state.is_searching = False

    def _find_watched_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in tuple(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None
            if finder is not self and find is not None:
                spec = find(name, path, target)
            if spec is not None:
                watch = self._wrap_loader if name in self._callbacks else self._wrap_own_loader
                watch(name, spec.loader)
                return spec
        return None

    def _wrap_loader(self, name: str, loader: Any) -> None:
        run = getattr(loader, "exec_module", None)
        if run is None:
            return
        self._call_safely(name, lambda: self._on_import_begin(name))

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # the loader's own again
            run(module)
            self._on_imported(name)

        loader.exec_module = exec_module

    def _wrap_own_loader(self, name: str, loader: Any) -> None:
        run, here = getattr(loader, "exec_module", None), self._state
        if run is None:
            return

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            here.depth += 1
            try:
                run(module)
            finally:
                here.depth -= 1
                late, here.pending = ([], here.pending) if here.depth else (here.pending, [])
                for each in late:
                    self._on_imported(each)

        loader.exec_module = exec_module

    def _on_imported(self, name: str) -> None:
        if self._state.depth:
            self._state.pending.append(name)
            return
        call = self._callbacks.pop(name, None)
        if call is not None:
            self._call_safely(name, call)
        if not self._callbacks:
            self.remove()

    def _call_safely(self, name: str, call: Callback) -> None:
        try:
            call()
        except Exception as error:
            self._on_error(name, error)
