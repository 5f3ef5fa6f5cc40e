"""The state of a program's own modules in each step: the flags, numbers and names that they read.

A program switches an adapter on and off by such values: `module.enabled`, a scaling, the name of
the active adapter. The audit runs later and calls the same modules, so it must give them the state
that they had in each step. Held are attributes of modules, of their classes and of objects in them,
and global variables that their methods read. The modules themselves are not kept alive.
"""

from __future__ import annotations

import copy
import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from types import CodeType, FunctionType
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn

from flexinspect_hooks.audit.forward.program_modules import is_of_program

MAX_CHANGES = 32
"""Changes that are read in one generation: modules that count their calls change in each step."""
_MAX_ITEMS = 16
_PLAIN = (bool, int, float, str, type(None))
_LIBRARIES = ("builtins.", "collections.", "torch.", "transformers.", "typing.", "enum.")
_OF_TORCH = frozenset(vars(nn.Module()))
_ABSENT, _UNKNOWN = object(), object()


class Holder(Struct, frozen=True, eq=False):
    """Something with values: a module, an object in it, its class, or a method, for its globals.

    `owner` is the name of the module, empty for what others may have, too, and `names` are those of
    the values. `target` returns None if it is gone.
    """

    owner: str
    target: Callable[[], Any]
    names: tuple[str, ...]

    def table(self) -> Any:
        """Return the values by name, an empty mapping if the target is gone."""
        target = self.target()
        if target is None:
            return {}
        return target.__globals__ if isinstance(target, FunctionType) else vars(target)

    def values(self) -> list[Any]:
        """Return the values of now."""
        table = self.table()
        return [table.get(name, _ABSENT) for name in self.names]

    def put(self, name: str, value: Any) -> None:
        """Set a value, or remove it."""
        target, table = self.target(), self.table()
        if isinstance(target, type):
            setattr(target, name, value)
        elif value is _ABSENT:
            table.pop(name, None)
        else:
            table[name] = value


class ModuleState(Struct, frozen=True, eq=False):
    """The values of all holders, as of one step."""

    holders: tuple[Holder, ...]
    values: tuple[list[Any], ...]

    def table(self) -> dict[tuple[int, str], tuple[Holder, Any]]:
        """Return holder and value by target and name."""
        return {
            (id(holder.target()), name): (holder, value)
            for holder, values in zip(self.holders, self.values, strict=True)
            for name, value in zip(holder.names, values, strict=True)
        }


class _Check(Struct, frozen=True, eq=False):
    """Compares the values of a holder with those that are known, which runs before each step."""

    table: Callable[[], Any]
    get: Callable[[Any], Any]
    known: Any
    absent: frozenset[str]

    def is_unchanged(self) -> bool:
        table = self.table()
        return bool(self.get(table) == self.known) and self.absent.isdisjoint(table)


def _check(holder: Holder, values: Sequence[Any]) -> _Check:
    known = {
        name: value
        for name, value in zip(holder.names, values, strict=True)
        if value is not _ABSENT and value is not _UNKNOWN
    }
    get = itemgetter(*known) if known else lambda table: ()
    absent = [name for name, value in zip(holder.names, values, strict=True) if value is _ABSENT]
    return _Check(holder.table, get, get(known), frozenset(absent))


class StateReader:
    """Reads the state of a model's own modules at the beginning of each step."""

    def __init__(self) -> None:
        self._state: ModuleState | None = None
        self._modules = tuple[weakref.ref[nn.Module], ...]()
        self._n_changes = 0
        self._checks = list[_Check]()

    @property
    def is_begun(self) -> bool:
        """Whether the modules of a model are known."""
        return self._state is not None

    def begin(self, model: nn.Module, others: Collection[int]) -> ModuleState:
        """Return the state at the first step of a generation.

        Modules with one of `others` (by id) in them are no parts of a layer, and not read.
        """
        self._n_changes = 0
        found = {
            name: module
            for name, module in model.named_modules()
            if is_of_program(module) and not any(id(one) in others for one in module.modules())
        }
        known = [reference() for reference in self._modules]
        is_same = len(known) == len(found) and all(map(_is, known, found.values()))
        if self._state is None or not is_same:
            self._modules = tuple(map(weakref.ref, found.values()))
            holders = tuple(_holders(found))
            self._set(ModuleState(holders, tuple(_frozen(one.values()) for one in holders)))
        return self.read()

    def read(self) -> ModuleState:
        """Return the state of now: the same object as before if nothing changed."""
        state = self._state
        assert state is not None
        if self._n_changes > MAX_CHANGES or self._is_unchanged():
            return state
        values = [
            known if _is_equal(now := holder.values(), known) else _frozen(now)
            for holder, known in zip(state.holders, state.values, strict=True)
        ]
        if not all(map(_is_equal, values, state.values)):
            self._n_changes += 1
            state = ModuleState(state.holders, tuple(values))
            self._set(state)
        return state

    def _set(self, state: ModuleState) -> None:
        self._state = state
        self._checks = list(map(_check, state.holders, state.values))

    def _is_unchanged(self) -> bool:
        try:
            return all(one.is_unchanged() for one in self._checks)
        except Exception:  # a value is gone, or is of a kind that cannot be compared
            return False


def _is(one: object, other: object) -> bool:
    return one is other


def _is_equal(one: list[Any], other: list[Any]) -> bool:
    try:
        return one == other
    except Exception:  # arrays have no truth value
        return False


def _holders(modules: Mapping[str, nn.Module]) -> Iterator[Holder]:
    """Yield what the forwards of modules read, each once."""
    known = set[int]()

    def holder(owner: str, target: Any, names: Iterable[str]) -> Iterator[Holder]:
        chosen = tuple(names)
        if id(target) not in known and chosen:
            known.add(id(target))
            yield Holder(owner, _reference(target), chosen)

    of_classes: dict[type, list[str]] = {}
    for name, module in modules.items():
        own = {*_plain_names(vars(module))} - _OF_TORCH
        for cls in type(module).__mro__:
            if cls not in of_classes:
                of_classes[cls] = [] if _is_of_library(cls) else _plain_names(vars(cls))
            own.update(of_classes[cls])  # it may become an attribute of the module
        yield from holder(name, module, sorted(own))
        for value in vars(module).values():
            yield from holder("", value, _names_inside(value))
    for cls, names in of_classes.items():
        yield from holder("", cls, names)
        methods = () if _is_of_library(cls) else filter(_is_function, vars(cls).values())
        for method in methods:
            table = method.__globals__
            read = [one for one in _names_read(method.__code__) if one in table]
            yield from holder("", method, [one for one in read if _is_plain(table[one])])
            for value in (table[one] for one in read):
                yield from holder("", value, _names_inside(value))


def _reference(target: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(target)
    except TypeError:  # such as a `SimpleNamespace`
        return lambda: target


def _is_of_library(cls: type) -> bool:
    return f"{cls.__module__}.".startswith(_LIBRARIES)


def _is_function(value: object) -> bool:
    return isinstance(value, FunctionType)


def _names_read(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _names_read(one)


def _names_inside(value: Any) -> list[str]:
    """Return names of plain values in an object of a class of the program."""
    cls = type(value)
    is_own = not isinstance(value, nn.Module | Tensor | type) and not _is_of_library(cls)
    return _plain_names(vars(value)) if is_own and hasattr(value, "__dict__") else []


def _plain_names(table: Mapping[str, Any]) -> list[str]:
    return [name for name, one in table.items() if not name.startswith("__") and _is_plain(one)]


def _is_plain(value: Any, depth: int = 2) -> bool:
    if type(value) in _PLAIN:
        return True
    if type(value) not in (list, tuple, set, dict) or len(value) > _MAX_ITEMS or not depth:
        return False
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return all(_is_plain(one, depth - 1) for one in items)


def _frozen(values: list[Any]) -> list[Any]:
    """Return copies of plain values, which the program may change in place."""
    return [
        one
        if type(one) in _PLAIN or one is _ABSENT
        else (copy.deepcopy(one) if _is_plain(one) else _UNKNOWN)
        for one in values
    ]


# -- in the audit ----------------------------------------------------------------------------------


class Change(Struct, frozen=True):
    """A value of `owner` (a module's name, empty for none alone) that became another one.

    `slot` is its number.
    """

    slot: int
    owner: str
    name: str
    before: Any
    after: Any


class RowStates(Struct, frozen=True, eq=False):
    """The states of the program's modules by rows of the text.

    `slots` are the values that vary, or are others now, and `settings` one row of them for each
    part of the text. The parts begin at the rows `starts`.
    """

    slots: tuple[tuple[Holder, str], ...]
    starts: tuple[int, ...]
    settings: tuple[tuple[Any, ...], ...]

    def part_of(self, row: int) -> int:
        """Return the number of the part that a row is in."""
        return max(bisect_right(self.starts, row) - 1, 0)

    @property
    def only_first(self) -> RowStates:
        """The same as if the first state had stayed."""
        return RowStates(self.slots, self.starts[:1], self.settings[:1])

    def changes(self, part: int) -> list[Change]:
        """Return what changed between a part and the one before it."""
        pairs = zip(self.slots, self.settings[part - 1], self.settings[part], strict=True)
        return [
            Change(slot, holder.owner, name, before, after)
            for slot, ((holder, name), before, after) in enumerate(pairs)
            if not _is_equal([before], [after])
        ]

    @contextmanager
    def set(self, part: int, only: int | None = None) -> Iterator[None]:
        """Give the modules the state of a part inside of the block, or the value of one slot."""
        with ExitStack() as stack:
            for slot, (holder, name) in enumerate(self.slots):
                value = self.settings[part][slot]
                if value is not _UNKNOWN and only in (None, slot):
                    now = holder.table().get(name, _ABSENT)
                    stack.callback(holder.put, name, now)
                    holder.put(name, value)
            yield

    @contextmanager
    def set_by_rows(
        self, modules: Iterable[nn.Module], n: int, some_rows: Sequence[int]
    ) -> Iterator[None]:
        """Let modules compute each row in the state of its part.

        They get rows (1, n, size), or only `some_rows` of them.
        """
        if len(self.starts) == 1:
            with self.set(0):
                yield
            return
        with ExitStack() as stack:
            for module in modules:
                table = vars(module)
                if "forward" in table:
                    stack.callback(table.__setitem__, "forward", table["forward"])
                else:
                    stack.callback(table.pop, "forward")
                table["forward"] = self._by_rows(module.forward, n, sorted(some_rows))
            yield

    def _by_rows(self, forward: Callable[..., Any], n: int, some: Sequence[int]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            rows = args[0] if args else None
            is_rows = isinstance(rows, Tensor) and rows.dim() == 3
            n_rows = rows.shape[1] if isinstance(rows, Tensor) and is_rows else 0
            if n_rows not in (n, len(some)):
                with self.set(0):
                    return forward(*args, **kwargs)
            places = range(n) if n_rows == n else some
            parts = [self.part_of(place) for place in places]
            outputs = []
            for part in sorted(set(parts)):
                first, length = parts.index(part), parts.count(part)
                with self.set(part):
                    given = args[0].narrow(1, first, length)
                    outputs.append(forward(given, *args[1:], **kwargs))
            return torch.cat(outputs, 1)

        return call


def row_states(steps: Sequence[Any]) -> RowStates | None:
    """Return the states in which steps (`AuditedStep`) ran; None if they are those of now."""
    states = [step.evidence.state for step in steps]
    if not states or any(one is None for one in states):
        return None
    tables = {id(one): one.table() for one in states}
    slots: dict[tuple[int, str], Holder] = {}
    for table in tables.values():
        for key, (holder, value) in table.items():
            now = holder.table().get(key[1], _ABSENT)
            first = next((each[key][1] for each in tables.values() if key in each), value)
            if not _is_equal([now], [value]) or not _is_equal([first], [value]):
                slots.setdefault(key, holder)
    if not slots:
        return None
    starts, settings = list[int](), list[tuple[Any, ...]]()
    for step, state in zip(steps, states, strict=True):
        table = tables[id(state)]
        setting = tuple(table[key][1] if key in table else _UNKNOWN for key in slots)
        if not settings or not _is_equal([setting], [settings[-1]]):
            starts.append(step.first_row)
            settings.append(setting)
    places = tuple((holder, name) for (_, name), holder in slots.items())
    return RowStates(places, tuple(starts), tuple(settings))
