"""Whether a callable of the program may be called once more without the program noticing.

Its state is read before and after a call: its attributes, what its closure holds, and globals that
its code names. A callable is not called again if it holds a model or an object of an unknown kind,
or if its code names something that prints, writes or sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from flexinspect_hooks.python_internals.torch_private import tensor_version

_MAX_DEPTH, _MAX_ITEMS = 6, 1 << 14
_PLAIN = (bool, int, float, complex, str, bytes, type(None), range, slice)
_FIXED = (type, ModuleType, BuiltinFunctionType)
_KNOWN = ("torch", "transformers", "tokenizers", "re", "numpy", "math", "builtins", "functools")
_EFFECTS = frozenset(
    (
        *("print", "open", "input", "exec", "eval", "write", "writelines", "flush", "dump", "save"),
        *("log", "debug", "info", "warning", "warn", "error", "exception", "critical", "emit"),
        *("send", "sendall", "post", "put", "put_nowait", "publish", "record", "submit", "urlopen"),
        *("system", "run", "Popen", "sleep", "set_trace", "breakpoint", "add_scalar", "tqdm"),
        *("next", "__next__", "generate", "forward", "step"),
    )
)


class UnknownStateError(Exception):
    """The state of a callable cannot be read, or calling it may have an effect elsewhere."""


def state_of(called: Any) -> Any:
    """Return a value that is equal as long as the state of a callable is.

    Raises `UnknownStateError` if calling it again might be noticed.
    """
    reader = _Reader()
    state = reader.read(called, 0)
    if isinstance(called, FunctionType | MethodType):
        return state
    own = type(called).__call__
    return state, reader.read(own, 0) if isinstance(own, FunctionType) else None


def code_state_of(called: Any) -> Any:
    """Return a value that is equal as long as all that the code of a callable names is.

    This is the part of its state that a copy shares with it: globals, defaults, and what methods
    close over. Raises `UnknownStateError` as `state_of` does.
    """
    found = _read_all(called)
    # Read anew, so that what the callable itself holds is not left out as seen.
    shared = _Reader()
    return [
        *(shared.read_shared(one, is_copied=is_copied) for one, is_copied in found.functions()),
        *(shared.read(value, 0) for value in found.class_values),
    ]


def _read_all(called: Any) -> _Reader:
    found = _Reader()
    found.read(called, 0)
    return found


def names_of(called: Any) -> frozenset[str]:
    """Return the names that the code of a callable uses, that of its own helpers included."""
    functions = _read_all(called).functions()
    codes = (code for function, _ in functions for code in _codes(function.__code__))
    return frozenset(name for code in codes for name in code.co_names)


class _Reader:
    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._n_items = 0
        self._functions: list[FunctionType] = []
        self.class_values: list[Any] = []
        """Values that classes of the program hold, and their instances share."""
        self._n_outer = 0  # methods and functions through whose names the reading came here
        self._shared: set[int] = set()  # ids of functions that a copy of the callable does not copy

    def functions(self) -> list[tuple[FunctionType, bool]]:
        """Return the functions of the program that were read, and whether a copy has its own."""
        return [(one, id(one) not in self._shared) for one in self._functions]

    def read_shared(self, function: FunctionType, *, is_copied: bool) -> Any:
        """Read what a function names, and what it closes over unless it is copied with that."""
        names = {name for code in _codes(function.__code__) for name in code.co_names}
        held = list(_named(function, names))
        if not is_copied:
            held += [cell.cell_contents for cell in function.__closure__ or ()]
        return id(function.__code__), [self.read(one, 1) for one in held]

    def read(self, value: Any, depth: int) -> Any:
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, Tensor):
            return id(value), tensor_version(value)
        if isinstance(value, _FIXED):
            return id(value)
        if id(value) in self._seen:
            return "seen"
        self._seen.add(id(value))
        self._n_items += 1
        if depth > _MAX_DEPTH or self._n_items > _MAX_ITEMS or isinstance(value, nn.Module):
            raise UnknownStateError
        if isinstance(value, FunctionType):
            return self._function(value, depth)
        if isinstance(value, MethodType):
            self._n_outer += 1  # a copy of a method has the same function
            function = self.read(value.__func__, depth + 1)
            self._n_outer -= 1
            return function, self.read(value.__self__, depth + 1)
        return self._items(value, depth)

    def _items(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict | list | tuple | set | frozenset | deque):
            if len(value) > _MAX_ITEMS:
                raise UnknownStateError
            if isinstance(value, dict):
                return [
                    (self.read(k, depth + 1), self.read(v, depth + 1)) for k, v in value.items()
                ]
            return type(value).__name__, [self.read(one, depth + 1) for one in value]
        kind = type(value)
        module = kind.__module__.partition(".")[0]
        if kind.__name__ in ("Generator", "Random", "RandomState") or hasattr(kind, "__next__"):
            raise UnknownStateError
        attributes = getattr(value, "__dict__", None)
        if attributes is None:
            if module not in _KNOWN:
                raise UnknownStateError
            return id(value)
        if module in _KNOWN and "logits" not in kind.__module__:
            return id(value)
        return id(value), self.read(attributes, depth + 1), self._methods(kind, depth)

    def _methods(self, kind: type, depth: int) -> list[Any]:
        """Read the functions of a class of the program, which its `__call__` may use."""
        classes = [one for one in kind.__mro__ if one.__module__.partition(".")[0] not in _KNOWN]
        found = list[Any]()
        for one in classes:
            for name, member in vars(one).items():
                function = getattr(member, "__func__", member)
                if isinstance(function, FunctionType) and name != "__init__":
                    self._n_outer += 1
                    found.append(self.read(function, depth + 1))
                    self._n_outer -= 1
                elif isinstance(member, dict | list | set | deque | Tensor):
                    self.class_values.append(member)
                    found.append(self.read(member, depth + 1))
        return found

    def _function(self, function: FunctionType, depth: int) -> Any:
        if function.__module__ and function.__module__.partition(".")[0] in _KNOWN:
            return id(function)
        names = set[str]()
        for code in _codes(function.__code__):
            names.update(code.co_names)
        if names & _EFFECTS:
            raise UnknownStateError
        self._functions.append(function)
        if self._n_outer:
            self._shared.add(id(function))
        closed = [self.read(cell.cell_contents, depth + 1) for cell in function.__closure__ or ()]
        self._n_outer += 1
        named = [self.read(one, depth + 1) for one in _named(function, names)]
        self._n_outer -= 1
        return id(function.__code__), closed, named


def _named(function: FunctionType, names: set[str]) -> Iterator[Any]:
    """Yield what a function finds by name outside of its closure, and its defaults."""
    space = function.__globals__
    yield from (space[name] for name in sorted(names) if name in space)
    yield from (function.__defaults__, function.__kwdefaults__, function.__dict__)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)
