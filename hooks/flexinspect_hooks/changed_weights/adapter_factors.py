"""The factors of low-rank adapters that a program has in variables where it writes to parameters.

A function that merges an adapter mostly drops it when it returns, so its variables are read while
it writes. Names of factors are the keys under which dicts, modules and objects have them.
"""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from msgspec import Struct
from torch import Tensor, nn

from flexinspect_hooks.capture.failure_facts import is_library_file
from flexinspect_hooks.python_internals.frame_variables import variables_of

Path = tuple[str, ...]

_BUDGET_S = 0.05
"""CPU time for reading variables, in all; later writes are not looked at."""
_MAX_BYTES = 1 << 28
_MAX_RANK = 256
_MAX_FRAMES, _MAX_DEPTH, _MAX_ITEMS = 8, 3, 1 << 14
_SCALARS = (int, float, str)
_INDEX = re.compile(r"\[\d+\]")
_ROLE = re.compile(r"(?:lora_?)?(a|b|down|up)(?:_?weights?)?s?", re.IGNORECASE)
_SURE_ROLE = re.compile(r"lora_?(a|b|down|up)(?:_?weights?)?s?", re.IGNORECASE)
_NUMBERED = re.compile(r"(?:(?:layer|block|h|l)s?[_-]?)?(\d+)", re.IGNORECASE)
_PLAIN = frozenset(("weight", "default", "lora"))
"""Parts of names that say nothing about which module an adapter is for."""


class Pair(Struct, frozen=True):
    """Two factors with one name: `outer` (n, rank) and `inner` (m, rank).

    `series` is the name without its only number, `number`, and begins with the variable that has
    the factors; `name` is the whole name without the variable. If `is_sure`, the factors are called
    A and B (or down and up) of a LoRA: `inner` is A, which reads the input, and `outer` B.
    """

    series: Path
    number: int
    name: str
    outer: Tensor
    inner: Tensor
    is_sure: bool

    @property
    def leaf(self) -> str:
        """The name of the module, such as q_proj."""
        return self.series[-1] if self.series else ""


class AdapterFactors:
    """Keeps matrices with one small side that the program holds, and their names.

    `is_weight` tells which tensors are parameters of the model, which are no factors.
    """

    def __init__(self, is_weight: Callable[[Tensor], bool]) -> None:
        self._is_weight = is_weight
        self._held: dict[int, tuple[Tensor, set[Path]]] = {}
        self._seen = set[tuple[int, int, int, int]]()
        self._n_bytes, self._spent_s, self._deadline = 0, 0.0, 0.0

    @property
    def is_exhausted(self) -> bool:
        """Whether the time for reading variables is used up."""
        return self._spent_s > _BUDGET_S

    def read_callers(self) -> None:
        """Read the variables of the program's functions that run in this thread."""
        if self.is_exhausted:
            return
        started, frame, n_left = time.thread_time(), sys._getframe(1), _MAX_FRAMES
        caller: FrameType | None = frame
        self._deadline = started + _BUDGET_S - self._spent_s
        while caller is not None and n_left:
            if not _is_library(caller.f_code.co_filename):
                n_left -= 1
                for name, value in variables_of(caller):
                    self._read((name,), value, 0)
            caller = caller.f_back
        self._spent_s += time.thread_time() - started

    def clear(self) -> None:
        """Drop the matrices."""
        self._held.clear()
        self._seen.clear()
        self._n_bytes = 0

    def matrices(self) -> list[Tensor]:
        """Return the matrices."""
        return [one for one, _ in self._held.values()]

    def pairs(self) -> list[Pair]:
        """Return the factors that have a name in common with one number in it."""
        groups: dict[Path, list[tuple[Path, Tensor]]] = {}
        for tensor, paths in self._held.values():
            for path in paths:
                key = tuple(one for one in path if not _says_nothing(one))
                groups.setdefault(key, []).append((path, tensor))
        found: dict[tuple[int, int, Path, int], Pair] = {}
        for key, those in groups.items():
            for first, second in _twos(those):
                if (pair := _pair(key, first, second)) is not None:
                    found[id(first[1]), id(second[1]), pair.series, pair.number] = pair
        return list(found.values())

    def _read(self, path: Path, value: Any, depth: int) -> None:
        kind: Any = type(value)
        if issubclass(kind, Tensor):
            self._keep(path, value)
        elif depth >= _MAX_DEPTH or time.thread_time() > self._deadline:
            return
        elif issubclass(kind, dict):
            self._read_items(path, value, dict.items(value), depth)
        elif kind in (list, tuple):
            self._read_items(path, value, ((f"[{n}]", one) for n, one in enumerate(value)), depth)
        elif issubclass(kind, nn.Module):
            if not hasattr(value, "config"):
                for name, one in value.named_parameters():
                    self._keep((*path, *name.split(".")), one)
        elif _is_own_class(kind):
            held = getattr(value, "__dict__", {})
            self._read_items(path, held, held.items(), depth)

    def _read_items(self, path: Path, container: Any, items: Any, depth: int) -> None:
        if len(container) > _MAX_ITEMS:
            return
        items = list(items)
        if not items or (type(container) is list and type(items[0][1]) in _SCALARS):
            return
        ends = id(items[0][1]), id(items[-1][1])
        mark = id(container), len(items), *ends
        if mark in self._seen:
            return
        for key, one in items:
            if type(one) not in _SCALARS:
                self._read((*path, *_parts(key)), one, depth + 1)
        if all(one in self._held for one in ends):  # so these ids are not those of later objects
            self._seen.add(mark)

    def _keep(self, path: Path, tensor: Tensor) -> None:
        known = self._held.get(id(tensor))
        if known is not None:
            known[1].add(path)
            return
        if tensor.dim() != 2 or tensor.is_meta or not tensor.is_floating_point():
            return
        if self._is_weight(tensor):
            return
        low, high = sorted(tensor.shape)
        if low > _MAX_RANK or not 0 < 2 * low <= high or self._n_bytes + tensor.nbytes > _MAX_BYTES:
            return
        self._n_bytes += tensor.nbytes
        self._held[id(tensor)] = tensor, {path}


@functools.lru_cache(maxsize=1024)
def _is_library(file: str) -> bool:
    return is_library_file(file) or "flexinspect_hooks" in file or file.startswith("<frozen")


@functools.lru_cache(maxsize=1024)
def _is_own_class(kind: Any) -> bool:
    """Whether a class is one of the program."""
    module = sys.modules.get(str(getattr(kind, "__module__", "")))
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and not _is_library(file)


# -- names -----------------------------------------------------------------------------------------


def _twos(those: list[tuple[Path, Tensor]]) -> Iterator[list[tuple[Path, Tensor]]]:
    """Yield the tensors of one name by twos: all, or those of one dtype, if some were cast.

    Yields nothing where it is not clear which belong together.
    """
    if len(those) == 2:
        yield those
        return
    for dtype in dict.fromkeys(one.dtype for _, one in those):
        if len(same := [one for one in those if one[1].dtype is dtype]) == 2:
            yield same


def _parts(key: Any) -> Iterator[str]:
    if isinstance(key, str):
        yield from key.split(".")
    elif isinstance(key, tuple):
        for one in key:
            yield from _parts(one)
    elif isinstance(key, int):
        yield str(key)
    else:
        yield "?"


def _says_nothing(part: str) -> bool:
    return part in _PLAIN or bool(_INDEX.fullmatch(part) or _ROLE.fullmatch(part))


def _pair(key: Path, first: tuple[Path, Tensor], second: tuple[Path, Tensor]) -> Pair | None:
    variables = {path[0] for path, _ in (first, second)}
    # The variable itself, if it is in the key, is no part of the name.
    name = key[1:] if len(variables) == 1 and key[:1] == (*variables,) else key
    numbers = [(n, found) for n, part in enumerate(name) if (found := _NUMBERED.fullmatch(part))]
    common = set(first[1].shape) & set(second[1].shape)
    if len(numbers) != 1 or not common:
        return None
    ((place, found),) = numbers
    both = [one.detach() for _, one in (first, second)]
    tall = [one if one.shape[1] == min(common) else one.T for one in both]
    roles = [_role(path) for path, _ in (first, second)]
    if roles[0] == "inner" or roles[1] == "outer":
        tall.reverse()
    stem = f"{found[0][: found.start(1)]}*"
    series = (min(variables), *name[:place], stem, *name[place + 1 :])
    is_sure = set(roles) == {"inner", "outer"}
    return Pair(series, int(found[1]), ".".join(name), tall[0], tall[1], is_sure)


def _role(path: Path) -> str:
    """Return whether a factor gives the outputs or reads the input; empty if its name is silent."""
    found = next((one for part in path if (one := _SURE_ROLE.fullmatch(part))), None)
    return "" if found is None else "inner" if found[1].lower() in ("a", "down") else "outer"


def layer_name(parameter: str) -> tuple[str, int, str] | None:
    """Return a parameter's name with `*` for its only number, the number, and the module's name."""
    parts = parameter.split(".")
    numbers = [n for n, part in enumerate(parts) if part.isdecimal()]
    if len(numbers) != 1 or len(parts) < 2:
        return None
    (place,) = numbers
    name = ".".join((*parts[:place], "*", *parts[place + 1 :]))
    return name, int(parts[place]), parts[-2]
