"""Finds rules of layers that were made in a loop and all see the last value of its variable.

A function looks its free variables up when it runs. Functions made in a loop share the variable, so
that after the loop all of them see its last value. It is found where several function objects of
the same code, in masks or score_mods of several layers, share the cell of a variable that a loop
around this code assigns. This is read from the source, as a linter does it; what runs is not
changed. A score_mod may reach its function through an attribute of the layer, or through a list.
The forwards that a program gave to its attention modules are compared as well.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Sequence
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexinspect_hooks.debugger.python_mods import are_mods_debugged
from flexinspect_hooks.observers.attention.call_references import AttentionCall
from flexinspect_hooks.step_writer.attention_records import LateBinding

_MASK_MOD, _SCORE_MOD, _FORWARD = "mask_mod", "score_mod", "forward"
_MAX_DEPTH = 3
_MAX_ITEMS = 512  # of a list or dict that may hold the functions of the layers
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


class _Rules(NamedTuple):
    """Function objects of the same code, and the layers whose masks or score_mods use them."""

    functions: dict[int, FunctionType]
    layers: set[int]
    of: str


def find_late_bindings(refs: Sequence[AttentionCall]) -> tuple[LateBinding, ...]:
    """Return the variables that rules of several layers share although a loop made each."""
    by_code: dict[int, _Rules] = {}
    for ref in refs:
        mask_mod = ref.mask.mask_mod if isinstance(ref.mask, BlockMask) else None
        for of, rule in ((_MASK_MOD, mask_mod), (_SCORE_MOD, _score_mod(ref))):
            for function in _functions_in(rule, _MAX_DEPTH):
                rules = by_code.setdefault(id(function.__code__), _Rules({}, set(), of))
                rules.functions[id(function)] = function
                rules.layers.add(ref.layer)
        forward = vars(ref.module).get("forward")
        if isinstance(forward, FunctionType):
            rules = by_code.setdefault(id(forward.__code__), _Rules({}, set(), _FORWARD))
            rules.functions[id(forward)] = forward
            rules.layers.add(ref.layer)
    return tuple(one for rules in by_code.values() for one in _shared_variables(rules))


def _score_mod(ref: AttentionCall) -> Any:
    arguments = getattr(ref.kernel, "arguments", None)
    return arguments.get("score_mod") if arguments else None


def _shared_variables(rules: _Rules) -> Iterator[LateBinding]:
    functions = list(rules.functions.values())
    if len(functions) < 2 or len(rules.layers) < 2:
        return
    code = functions[0].__code__
    is_score = rules.of != _MASK_MOD
    for name in _loop_variables(functions[0], is_score):
        cells = [_cell(function, name) for function in functions]
        if cells[0] is None or any(cell is not cells[0] for cell in cells):
            continue
        if is_score and not _may_differ(functions[0], name, len(functions)):
            continue
        place = f"{code.co_filename}:{code.co_firstlineno}"
        value = _text(functions[0], name)
        yield LateBinding(name, value, place, tuple(sorted(rules.layers)), rules.of)


def _may_differ(function: FunctionType, name: str, n: int) -> bool:
    """Whether a score_mod would give other scores in other passes of its loop, or a forward may.

    It is tried with the numbers of the passes, 0 to n - 1, where the variable is such a number. An
    object that the loop took, such as a layer, is no reason: its attributes may be equal.
    """
    cell = _cell(function, name)
    value = _contents(cell) if isinstance(cell, CellType) else cell.get(name)
    if isinstance(value, float | str | Tensor) or not isinstance(value, int):
        return isinstance(value, float | str | Tensor)
    parameters = function.__code__.co_argcount
    if not isinstance(cell, CellType) or parameters != 5 or value != n - 1 or are_mods_debugged():
        return True
    at = function.__code__.co_freevars.index(name)
    scores = []
    for number in range(n):
        closure = list(function.__closure__ or ())
        closure[at] = CellType(number)
        tried = FunctionType(
            *(function.__code__, function.__globals__, function.__name__),
            *(function.__defaults__, tuple(closure)),
        )
        tried.__kwdefaults__ = function.__kwdefaults__
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                scores.append(torch.stack([tried(*cell) for cell in _samples()]))
        except Exception:  # the user's code may need more than samples
            return True
    return any(not torch.equal(one, scores[0]) for one in scores[1:])


def _samples() -> Iterator[tuple[Tensor, ...]]:
    """Yield score, batch, head, row and key of some cells."""
    for score, head, row, key in ((1.0, 0, 3, 1), (-0.5, 0, 2, 2), (2.0, 1, 5, 0)):
        yield tuple(torch.tensor(n, device="cpu") for n in (score, 0, head, row, key))


def _functions_in(function: Any, depth: int) -> Iterator[FunctionType]:
    """Yield a function of Python and those that it reaches: see `_reached`."""
    while isinstance(function, partial):
        function = function.func
    if not isinstance(function, FunctionType):
        return
    yield function
    for one in _reached(function) if depth else ():
        yield from _functions_in(one, depth - 1)


def _reached(function: FunctionType) -> Iterator[Any]:
    """Yield what a function may call.

    That is what its closure holds, global lists and dicts that it names, and attributes that it
    names of an object in its closure, such as the layer's module.
    """
    names = function.__code__.co_names
    held = [_contents(cell) for cell in function.__closure__ or ()]
    namespace = function.__globals__
    held += [namespace[name] for name in names if isinstance(namespace.get(name), list | dict)]
    for one in held:
        yield from _items(one)
        attributes = getattr(one, "__dict__", None)
        if isinstance(attributes, dict) and not isinstance(one, FunctionType | ModuleType):
            for name in names:
                yield from _items(attributes.get(name))


def _items(value: Any) -> Iterator[Any]:
    """Yield a value, or those of a list or dict that may hold one for each layer."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        yield from (one for one in value[:_MAX_ITEMS] if isinstance(one, FunctionType | partial))
    else:
        yield value


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


def _loop_variables(function: FunctionType, is_score: bool) -> list[str]:
    """Return the variables of a function that a loop around its definition assigns.

    Those of a score_mod or a forward must depend on more than attributes of what the loop takes:
    attributes of layers may be equal.
    """
    code = function.__code__
    lines = linecache.getlines(code.co_filename)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return []
    used = {*code.co_freevars, *code.co_names}
    return sorted(used & _assigned_around(tree, code.co_firstlineno, set(), is_score))


def _assigned_around(node: ast.AST, line: int, assigned: set[str], is_score: bool) -> set[str]:
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
            inside = assigned | _dependent(_names(child.target), child.body, is_score)
        elif isinstance(child, _COMPREHENSIONS):
            inside = assigned.union(*(_names(one.target) for one in child.generators))
        found |= _assigned_around(child, line, inside, is_score)
    return found


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _dependent(names: set[str], body: Sequence[ast.stmt], is_score: bool) -> set[str]:
    """Return the targets of a loop, and what its body assigns from them."""
    known = set(names)
    for statement in body:
        if not isinstance(statement, ast.Assign):
            continue
        used = _names_themselves(statement.value) if is_score else _names(statement.value)
        if used & known:
            known |= {name for one in statement.targets for name in _names(one)}
    return known


def _names_themselves(node: ast.AST) -> set[str]:
    """Return the names in an expression of which it does not only read an attribute."""
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return set()
    return set().union(*map(_names_themselves, ast.iter_child_nodes(node)))
