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


class _Reader:
    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._n_items = 0

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
            return self.read(value.__func__, depth + 1), self.read(value.__self__, depth + 1)
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
                    found.append(self.read(function, depth + 1))
        return found

    def _function(self, function: FunctionType, depth: int) -> Any:
        if function.__module__ and function.__module__.partition(".")[0] in _KNOWN:
            return id(function)
        names = set[str]()
        for code in _codes(function.__code__):
            names.update(code.co_names)
        if names & _EFFECTS:
            raise UnknownStateError
        space = function.__globals__
        held = [cell.cell_contents for cell in function.__closure__ or ()]
        held += [space[name] for name in sorted(names) if name in space]
        held += [function.__defaults__, function.__kwdefaults__]
        return id(function.__code__), [self.read(one, depth + 1) for one in held]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)
