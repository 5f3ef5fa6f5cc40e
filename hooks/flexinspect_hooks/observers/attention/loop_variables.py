"""Finds rules of layers that were made in a loop and all see the last value of its variable.

A function looks its free variables up when it runs. Functions made in a loop share the variable, so
that after the loop all of them see its last value. It is found where several function objects of
the same code, in masks of several layers, share the cell of a variable that a loop around this code
assigns. This is read from the source, as a linter does it; what runs is not changed.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Sequence
from functools import partial
from types import CellType, FunctionType
from typing import Any, NamedTuple

from torch.nn.attention.flex_attention import BlockMask

from flexinspect_hooks.capture.hook import StepDraft
from flexinspect_hooks.observers.attention.call_references import AttentionCall

LATE_BINDING = "late-binding"
_MAX_DEPTH = 3
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


class LateBinding(NamedTuple):
    """A variable that rules of several layers share, its value, and where they were made."""

    variable: str
    value: str
    source: str
    layers: tuple[int, ...]


class _Rules(NamedTuple):
    """Function objects of the same code, and the layers whose masks use them."""

    functions: dict[int, FunctionType]
    layers: set[int]


def find_late_bindings(refs: Sequence[AttentionCall]) -> tuple[LateBinding, ...]:
    """Return the variables that rules of several layers share although a loop made each."""
    by_code: dict[int, _Rules] = {}
    for ref in refs:
        mask_mod = ref.mask.mask_mod if isinstance(ref.mask, BlockMask) else None
        for function in _functions_in(mask_mod, _MAX_DEPTH):
            rules = by_code.setdefault(id(function.__code__), _Rules({}, set()))
            rules.functions[id(function)] = function
            rules.layers.add(ref.layer)
    found = []
    for rules in by_code.values():
        functions = list(rules.functions.values())
        if len(functions) < 2 or len(rules.layers) < 2:
            continue
        code = functions[0].__code__
        for name in _loop_variables(functions[0]):
            cells = [_cell(function, name) for function in functions]
            if cells[0] is not None and all(cell is cells[0] for cell in cells):
                place = f"{code.co_filename}:{code.co_firstlineno}"
                value = _text(functions[0], name)
                found.append(LateBinding(name, value, place, tuple(sorted(rules.layers))))
    return tuple(found)


def record_late_bindings(found: Sequence[LateBinding], draft: StepDraft) -> None:
    """Record an event for each variable (writer thread)."""
    for one in found:
        text = f"Rules made in a loop ({one.source}) share its variable {one.variable}."
        draft.add_event(LATE_BINDING, text, {**one._asdict(), "layers": list(one.layers)})


def _functions_in(function: Any, depth: int) -> Iterator[FunctionType]:
    """Yield a function of Python and those in its closure."""
    while isinstance(function, partial):
        function = function.func
    if not isinstance(function, FunctionType):
        return
    yield function
    for cell in function.__closure__ or () if depth else ():
        yield from _functions_in(_contents(cell), depth - 1)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _cell(function: FunctionType, name: str) -> Any:
    """Return what holds a variable: its cell, or the module's namespace."""
    code = function.__code__
    if name in code.co_freevars:
        return (function.__closure__ or ())[code.co_freevars.index(name)]
    return function.__globals__ if name in code.co_names else None


def _text(function: FunctionType, name: str) -> str:
    cell = _cell(function, name)
    value = _contents(cell) if isinstance(cell, CellType) else cell.get(name)
    return repr(value) if isinstance(value, int | float | str) else type(value).__name__


def _loop_variables(function: FunctionType) -> list[str]:
    """Return the variables of a function that a loop around its definition assigns."""
    code = function.__code__
    lines = linecache.getlines(code.co_filename)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return []
    used = {*code.co_freevars, *code.co_names}
    return sorted(used & _assigned_around(tree, code.co_firstlineno, set()))


def _assigned_around(node: ast.AST, line: int, assigned: set[str]) -> set[str]:
    """Return the names that loops around the functions at a line assign, in the same scope."""
    found: set[str] = set()
    for child in ast.iter_child_nodes(node):
        inside = assigned
        if isinstance(child, _FUNCTIONS):
            if child.lineno == line:
                found |= assigned
            inside = set()  # a scope of its own
        elif isinstance(child, ast.ClassDef):
            inside = set()
        elif isinstance(child, ast.For | ast.AsyncFor):
            inside = assigned | _dependent(_names(child.target), child.body)
        elif isinstance(child, _COMPREHENSIONS):
            inside = assigned.union(*(_names(one.target) for one in child.generators))
        found |= _assigned_around(child, line, inside)
    return found


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _dependent(names: set[str], body: Sequence[ast.stmt]) -> set[str]:
    """Return the targets of a loop, and what its body assigns from them."""
    known = set(names)
    for statement in body:
        if isinstance(statement, ast.Assign) and _names(statement.value) & known:
            known |= {name for one in statement.targets for name in _names(one)}
    return known
