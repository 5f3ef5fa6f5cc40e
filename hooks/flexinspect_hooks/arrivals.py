"""Being told when a module has been imported, without importing it: it may come late, or never."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Call = Callable[[], None]

_OURS = "flexinspect_hooks."


class _Here(threading.local):
    """Of one thread: how many of our modules are half imported, and what arrived meanwhile.

    Two instances ask each other for modules that both watch: who is `asking` finds nothing itself.
    """

    def __init__(self) -> None:
        self.asking = False
        self.depth = 0
        self.late: list[str] = []


class Arrivals:
    """While installed, calls a function for each named module, right after its body has run.

    The import that brought the module goes on when the function returns. `coming` is called with a
    name when its import begins. What they raise is given to `failed` and stops nothing. What one of
    our own modules brings has arrived when that module is whole: the functions import them, too.
    """

    def __init__(
        self,
        calls: Mapping[str, Call],
        *,
        coming: Callable[[str], None],
        failed: Callable[[str, Exception], None],
    ) -> None:
        self._calls = dict(calls)
        self._coming, self._failed = coming, failed
        self._here = _Here()

    def install(self) -> None:
        """Begin; modules that are there already have arrived."""
        for name in [name for name in self._calls if name in sys.modules]:
            self._arrived(name)
        if self._calls:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """End; nothing stays behind."""
        self._calls.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module that is waited for as all others would, and watch its body run."""
        if (name not in self._calls and not name.startswith(_OURS)) or self._here.asking:
            return None
        self._here.asking = True
        try:
            return self._found(name, path, target)
        finally:
            self._here.asking = False

    def _found(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in tuple(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None
            if finder is not self and find is not None:
                spec = find(name, path, target)
            if spec is not None:
                watch = self._watch if name in self._calls else self._watch_ours
                watch(name, spec.loader)
                return spec
        return None

    def _watch(self, name: str, loader: Any) -> None:
        run = getattr(loader, "exec_module", None)
        if run is None:
            return
        self._safely(name, lambda: self._coming(name))

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # the loader's own again
            run(module)
            self._arrived(name)

        loader.exec_module = exec_module

    def _watch_ours(self, name: str, loader: Any) -> None:
        run, here = getattr(loader, "exec_module", None), self._here
        if run is None:
            return

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            here.depth += 1
            try:
                run(module)
            finally:
                here.depth -= 1
                late, here.late = ([], here.late) if here.depth else (here.late, [])
                for each in late:
                    self._arrived(each)

        loader.exec_module = exec_module

    def _arrived(self, name: str) -> None:
        if self._here.depth:
            self._here.late.append(name)
            return
        call = self._calls.pop(name, None)
        if call is not None:
            self._safely(name, call)
        if not self._calls:
            self.remove()

    def _safely(self, name: str, call: Call) -> None:
        try:
            call()
        except Exception as error:
            self._failed(name, error)
