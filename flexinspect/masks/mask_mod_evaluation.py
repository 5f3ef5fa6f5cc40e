"""Evaluates the source text of a mask_mod for one cell, sub-expression by sub-expression.

Code of a trace is never run. An interpreter of the operations that mask_mods consist of works on
the values that were recorded. What it does not know has an unknown value, with the reason.
"""

from __future__ import annotations

import ast
import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import accumulate, groupby
from typing import Any

from msgspec import Struct

INDEX_NAMES = ("b", "h", "q_idx", "kv_idx")
_MAX_EVALUATED, _MAX_CALLS = 20_000, 32


class RecordedTensor(Struct, frozen=True):
    """A recorded tensor of at least one dimension: runs of equal elements, in row-major order.

    `stops` are the ends of the runs; without them the elements were not recorded.
    """

    shape: tuple[int, ...]
    values: tuple[Any, ...] = ()
    stops: tuple[int, ...] = ()
    offset: int = 0


class SourceText(Struct, frozen=True):
    """The source text of a function, and the file and line where it begins."""

    source: str
    name: str
    line: int
    text: str


class Line(Struct, frozen=True):
    """An executed statement: its line, counted from 1 in its file, and how its value came about.

    `steps` are its expression with more and more values in place, the last one is the value;
    `lookups` are elements of tensors that it read, such as "SEG[9] = 2".
    """

    number: int
    steps: tuple[str, ...]
    lookups: tuple[str, ...] = ()


class DecidingTerm(Struct, frozen=True):
    """A comparison, or another expression without `&`, `|` or `~`, that decided the cell."""

    source: str
    number: int
    text: str
    with_values: str
    value: bool


class CalledFunction(Struct, frozen=True):
    """A function that was evaluated: its text, the values of its arguments and its lines."""

    text: SourceText
    arguments: Mapping[str, str]
    lines: tuple[Line, ...]


class Evaluation(Struct, frozen=True):
    """What a mask_mod returns for a cell: open (True), closed (False), or unknown (None).

    `functions` are those that were called, the mask_mod first. `terms` decided the result. `reason`
    says why a value is unknown.
    """

    is_open: bool | None
    functions: tuple[CalledFunction, ...]
    terms: tuple[DecidingTerm, ...]
    reason: str


def evaluate(
    code: Mapping[str, Any], sources: Mapping[str, SourceText], indices: Sequence[int]
) -> Evaluation:
    """Evaluate a recorded mask_mod (`MaskRecord.mask_mod_code`) for (b, h, q_idx, kv_idx).

    `sources` are the recorded source texts, by file and line.
    """
    run = _Run(sources)
    value: Any = UNKNOWN
    try:
        value = run.call(_decode(code), list(indices), {})
    except _UnsupportedError as error:
        run.note(error)
    except (TypeError, ValueError, AttributeError, LookupError, RecursionError):
        run.note(_UnsupportedError("what was recorded of it is damaged"))
    frames = run.frames
    functions = tuple(
        CalledFunction(frame.text, frame.arguments, tuple(frame.lines)) for frame in frames
    )
    terms = dict.fromkeys(frames[0].deciders()) if isinstance(value, bool) else ()
    is_open = value if isinstance(value, bool) else None
    reason = "" if is_open is not None else run.reason
    if is_open is None and not reason:
        reason = f"it returned {_show(value)}" if value is not UNKNOWN else "its value is unknown"
    return Evaluation(is_open, functions, tuple(terms), reason)


# -- values ---------------------------------------------------------------------------------------


class _Unknown:
    def __repr__(self) -> str:
        return "?"


UNKNOWN = _Unknown()


class _Function(Struct, frozen=True, eq=False):
    source: str
    variables: Mapping[str, Any]


class _Local(Struct, frozen=True, eq=False):
    """A function that is defined inside of another one."""

    node: ast.FunctionDef | ast.Lambda
    frame: _Frame


class _Object(Struct, frozen=True, eq=False):
    fields: Mapping[str, Any]


class _Operation(Struct, frozen=True, eq=False):
    """A function of torch, Python or a method, by its name; `owner` is the object of a method."""

    name: str
    owner: tuple[Any, ...] = ()


class _UnsupportedError(Exception):
    """An expression that is not evaluated; the message is the reason, "" if it is known already."""


def _decode(value: Any) -> Any:
    """Return a recorded value; see docs/trace-format.md."""
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "variables" in value:
        variables = {name: _decode(each) for name, each in value["variables"].items()}
        return _Function(str(value.get("source", "")), variables)
    if "fields" in value:
        return _Object({name: _decode(each) for name, each in value["fields"].items()})
    if "module" in value or "builtin" in value:
        return _Operation(str(value.get("module") or value.get("builtin")))
    if "shape" in value:
        stops = tuple(accumulate(value.get("counts", ())))
        table = RecordedTensor(tuple(value["shape"]), tuple(value.get("values", ())), stops)
        if table.shape:
            return table
        return _element(table) if stops else UNKNOWN
    return UNKNOWN


def _element(table: RecordedTensor) -> Any:
    return table.values[bisect_right(table.stops, table.offset)]


def _index(table: Any, index: Any, name: str) -> Any:
    """Return `table[index]` for indices of single elements, and slices of sequences."""
    if isinstance(table, list | tuple):
        return table[index]
    if not isinstance(table, RecordedTensor):
        raise _UnsupportedError("" if table is UNKNOWN else f"{name} cannot be indexed")
    if not table.stops:
        shape = " x ".join(map(str, table.shape))
        raise _UnsupportedError(f"the elements of {name} ({shape}) were not recorded")
    for one in index if isinstance(index, tuple) else (index,):
        if type(one) is not int:
            raise _UnsupportedError("" if one is UNKNOWN else f"{name} has an index {_show(one)}")
        if not isinstance(table, RecordedTensor):
            raise _UnsupportedError(f"{name} has too many indices")
        size = table.shape[0]
        if not -size <= one < size:
            raise _UnsupportedError(f"index {one} is out of range: {name} has {size} elements")
        stride = math.prod(table.shape[1:])
        table = RecordedTensor(
            table.shape[1:], table.values, table.stops, table.offset + one % size * stride
        )
        table = table if table.shape else _element(table)
    return table


def _show(value: Any) -> str:
    if isinstance(value, _Operation | _Function | _Local):
        return "a function"
    if isinstance(value, RecordedTensor):
        return f"a tensor of shape {value.shape}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, bool | int | float)


# -- operations -----------------------------------------------------------------------------------


def _invert(value: Any) -> Any:
    return not value if isinstance(value, bool) else ~value


def _filled(number: int) -> Callable[..., Any]:
    def fill(*_: Any, dtype: Any = None, **__: Any) -> Any:
        return bool(number) if isinstance(dtype, _Operation) and dtype.name == "bool" else number

    return fill


def _where(condition: Any, first: Any, second: Any) -> Any:
    return first if condition else second


def _divide(first: Any, second: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return first // second
    return int(first / second) if rounding_mode == "trunc" else first / second


def _convert(value: Any, *targets: Any, **named: Any) -> Any:
    for target in (*targets, *named.values()):
        kind = _KINDS.get(target.name) if isinstance(target, _Operation) else None
        value = value if kind is None else kind(value)
    return value


def _clamp(value: Any, min: Any = None, max: Any = None) -> Any:  # noqa: A002  # as in torch
    value = value if min is None or value >= min else min
    return value if max is None or value <= max else max


_KINDS: Mapping[str, Callable[[Any], Any]] = {
    "bool": bool,
    **dict.fromkeys(("int", "long", "int32", "int64", "short", "int16", "int8"), int),
    **dict.fromkeys(("float", "double", "float32", "float64", "half"), float),
}
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.Invert: _invert,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FILLS = ("ones", "ones_like", "new_ones", "zeros", "zeros_like", "new_zeros")
_AND, _OR, _NOT = ("logical_and", "bitwise_and"), ("logical_or", "bitwise_or"), "logical_not"
_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "neg", "pow")},
    **dict.fromkeys(_AND, operator.and_),
    **dict.fromkeys(_OR, operator.or_),
    **dict.fromkeys(("logical_xor", "bitwise_xor"), operator.xor),
    **dict.fromkeys((_NOT, "bitwise_not"), _invert),
    **_KINDS,
    **{name: _filled(int("ones" in name)) for name in _FILLS},
    **dict.fromkeys(("to", "type", "tensor", "as_tensor"), _convert),
    **dict.fromkeys(("item", "clone", "detach", "contiguous"), lambda value: value),
    "less": operator.lt,
    "less_equal": operator.le,
    "greater_equal": operator.ge,
    "greater": operator.gt,
    "where": _where,
    "div": _divide,
    "divide": _divide,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "clamp": _clamp,
    "clip": _clamp,
    "abs": abs,
    "minimum": min,
    "maximum": max,
    "min": min,
    "max": max,
    "floor": math.floor,
    "ceil": math.ceil,
    "len": lambda value: value.shape[0] if isinstance(value, RecordedTensor) else len(value),
    "range": lambda *bounds: list(range(*bounds)),
    "zip": lambda *lists: [list(items) for items in zip(*lists, strict=False)],
    "enumerate": lambda items, start=0: [[n, item] for n, item in enumerate(items, start)],
    "reversed": lambda items: items[::-1],
    "tuple": list,
    "list": list,
    "sum": sum,
    "all": all,
    "any": any,
}


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _Run:
    """One evaluation: the frames of the functions that were called, and the first reason."""

    def __init__(self, sources: Mapping[str, SourceText]) -> None:
        self.sources, self.frames = sources, list[_Frame]()
        self.reason = ""
        self._n_evaluated = 0
        self._nodes: dict[str, ast.FunctionDef | ast.Lambda] = {}

    def note(self, error: _UnsupportedError) -> None:
        """Keep the first reason."""
        self.reason = self.reason or str(error)

    def count(self) -> None:
        """Count an evaluated expression. Raises `_UnsupportedError` when there are too many."""
        self._n_evaluated += 1
        if self._n_evaluated > _MAX_EVALUATED:
            raise _UnsupportedError(f"it has more than {_MAX_EVALUATED} operations")

    def call(self, function: Any, arguments: list[Any], named: Mapping[str, Any]) -> Any:
        """Return the value of a function, unknown if it has no source text."""
        if isinstance(function, _Local):
            text, node, names = function.frame.text, function.node, function.frame.names
        else:
            text, node = self._parse(function)
            names = function.variables
        if len(self.frames) >= _MAX_CALLS:
            raise _UnsupportedError(f"it calls more than {_MAX_CALLS} functions")
        frame = _Frame(self, text, node, names)
        self.frames.append(frame)
        return frame.run(arguments, named)

    def _parse(self, function: _Function) -> tuple[SourceText, ast.FunctionDef | ast.Lambda]:
        text = self.sources.get(function.source)
        if text is None:
            place = f" of {function.source}" if function.source else ""
            raise _UnsupportedError(f"the source text{place} was not recorded")
        if function.source not in self._nodes:
            self._nodes[function.source] = parse_function(text.text)
        return text, self._nodes[function.source]


def parse_function(text: str) -> ast.FunctionDef | ast.Lambda:
    """Return the function in a source text. Raises `_UnsupportedError`."""
    try:
        tree = ast.parse(text if not text.startswith("lambda") else f"({text})")
    except (SyntaxError, ValueError, RecursionError) as error:
        raise _UnsupportedError("its source text cannot be parsed") from error
    for statement in tree.body:
        found = statement.value if isinstance(statement, ast.Expr) else statement
        if isinstance(found, ast.FunctionDef | ast.Lambda):
            return found
    raise _UnsupportedError("its source text has no function")


class _Frame:
    """A called function: its variables, the value of each expression, and its executed lines."""

    def __init__(
        self,
        run: _Run,
        text: SourceText,
        node: ast.FunctionDef | ast.Lambda,
        names: Mapping[str, Any],
    ) -> None:
        self._run, self.text, self.node = run, text, node
        self.names = dict(names)
        self.arguments: dict[str, str] = {}
        self.lines: list[Line] = []
        self._values: dict[ast.AST, Any] = {}
        self._deciders: dict[str, list[DecidingTerm]] = {}
        self._callees: dict[ast.AST, _Frame] = {}
        self._returned: ast.expr | None = None
        self._lookups: list[str] = []

    def run(self, arguments: list[Any], named: Mapping[str, Any]) -> Any:
        """Return the value for these arguments."""
        parameters = self.node.args
        bound = [each.arg for each in (*parameters.posonlyargs, *parameters.args)]
        if bound and bound[0] in self.names and len(bound) == len(arguments) + 1:
            bound = bound[1:]  # the object of a method
        values = dict(zip(bound, arguments, strict=False)) | dict(named)
        self.names |= values
        self.arguments = {name: _show(value) for name, value in values.items() if _is_scalar(value)}
        if isinstance(self.node, ast.Lambda):
            return self._return(self.node.body)
        try:
            self._execute(self.node.body)
        except _Return as returned:
            return returned.value
        except _UnsupportedError as error:
            self._run.note(error)
            return UNKNOWN
        return None

    # -- statements -------------------------------------------------------------------------------

    def _execute(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            match statement:
                case ast.Return(value=ast.expr() as value):
                    raise _Return(self._return(value))
                case ast.Assign(targets=[target], value=value):
                    self._assign(target, self._record(value), value)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self._assign(target, self._record(value), value)
                case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
                    left = ast.copy_location(ast.Name(name, ast.Load()), target)
                    whole = ast.copy_location(ast.BinOp(left, op, value), statement)
                    self._assign(target, self._record(whole), whole)
                case ast.If(test=test, body=body, orelse=orelse):
                    value = self._record(test)
                    if value is UNKNOWN:
                        raise _UnsupportedError("")
                    self._execute(body if value else orelse)
                case ast.For(target=target, iter=items, body=body, orelse=[]):
                    for item in self._sequence(items):
                        self._assign(target, item, None)
                        self._execute(body)
                case ast.FunctionDef(name=name):
                    self.names[name] = _Local(statement, self)
                case ast.Expr() | ast.Pass() | ast.Assert():
                    pass
                case _:
                    kind = type(statement).__name__.lower()
                    raise _UnsupportedError(f"'{kind}' in line {self._line(statement)}")

    def _return(self, value: ast.expr) -> Any:
        self._returned = value
        return self._record(value)

    def _sequence(self, node: ast.expr) -> Sequence[Any]:
        items = self._evaluate(node)
        if not isinstance(items, list | tuple):
            raise _UnsupportedError(f"the loop in line {self._line(node)}")
        return items

    def _assign(self, target: ast.expr, value: Any, node: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            terms = [] if node is None else [*self._deciders_of(node)]  # of the names before
            self.names[target.id], self._deciders[target.id] = value, terms
            return
        if not isinstance(target, ast.Tuple | ast.List):
            raise _UnsupportedError(f"the assignment in line {self._line(target)}")
        nodes: Sequence[ast.expr | None] = [None] * len(target.elts)
        if isinstance(node, ast.Tuple) and len(node.elts) == len(target.elts):
            nodes = node.elts
        values = value if isinstance(value, list | tuple) else [UNKNOWN] * len(target.elts)
        for one, item, own in zip(target.elts, values, nodes, strict=True):
            self._assign(one, item, own)

    def _record(self, node: ast.expr) -> Any:
        """Return the value of the expression of a statement, and record its line."""
        self._lookups = []
        value = self._evaluate(node)
        texts = [ast.unparse(self._with_values(node, level)) for level in (0, 1)]
        texts += [_show(value)] if _is_scalar(value) else []
        steps = [text for text, _ in groupby((ast.unparse(node), *texts))][1:]
        lookups = tuple(dict.fromkeys(self._lookups))
        if steps or lookups:
            self.lines.append(Line(self._line(node), tuple(steps), lookups))
        return value

    def _line(self, node: ast.AST) -> int:
        return self.text.line + getattr(node, "end_lineno", 1) - 1

    # -- expressions ------------------------------------------------------------------------------

    def _evaluate(self, node: ast.expr) -> Any:
        try:
            self._run.count()
            value = self._value(node)
        except _UnsupportedError as error:
            self._run.note(error)
            value = UNKNOWN
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            self._run.note(_UnsupportedError(f"{ast.unparse(node)}: {error}"))
            value = UNKNOWN
        self._values[node] = value
        return value

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._name(name)
            case ast.Attribute(value=owner, attr=name):
                return self._attribute(self._evaluate(owner), name, node)
            case ast.BinOp(left=left, op=op, right=right):
                return self._binary(op, self._evaluate(left), self._evaluate(right))
            case ast.BoolOp(op=ast.And(), values=parts):
                return reduce(_and, map(self._evaluate, parts))
            case ast.BoolOp(op=ast.Or(), values=parts):
                return reduce(_or, map(self._evaluate, parts))
            case ast.UnaryOp(op=op, operand=operand):
                return _UNARY[type(op)](*self._known(self._evaluate(operand)))
            case ast.Compare(left=left, ops=ops, comparators=others):
                values = self._known(*map(self._evaluate, (left, *others)))
                pairs = zip(ops, values, values[1:], strict=False)
                return all(_COMPARISONS[type(op)](a, b) for op, a, b in pairs)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                (chosen,) = self._known(self._evaluate(test))
                return self._evaluate(body if chosen else orelse)
            case ast.Subscript(value=table, slice=index):
                return self._subscript(node, self._evaluate(table), self._evaluate(index))
            case ast.Slice(lower=lower, upper=upper, step=step):
                bounds = (lower, upper, step)
                return slice(*(None if each is None else self._evaluate(each) for each in bounds))
            case ast.Tuple(elts=items):
                return tuple(map(self._evaluate, items))
            case ast.List(elts=items):
                return [*map(self._evaluate, items)]
            case ast.Lambda():
                return _Local(node, self)
            case ast.Call(func=function, args=arguments, keywords=keywords):
                return self._call(node, function, arguments, keywords)
        kind = type(node).__name__
        raise _UnsupportedError(f"'{ast.unparse(node)}' in line {self._line(node)} ({kind})")

    def _name(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        if name in _OPERATIONS:
            return _Operation(name)
        raise _UnsupportedError(f"the variable {name} was not recorded")

    def _attribute(self, owner: Any, name: str, node: ast.expr) -> Any:
        if isinstance(owner, _Object) and name in owner.fields:
            return owner.fields[name]
        if isinstance(owner, _Operation) and not owner.owner:
            return _Operation(name)  # of a module
        if isinstance(owner, RecordedTensor) and name == "shape":
            return list(owner.shape)
        if isinstance(owner, RecordedTensor) or _is_scalar(owner):
            return _Operation(name, (owner,))
        raise _UnsupportedError("" if owner is UNKNOWN else f"{ast.unparse(node)} was not recorded")

    def _binary(self, op: ast.operator, left: Any, right: Any) -> Any:
        if isinstance(op, ast.BitAnd) and UNKNOWN in (left, right):
            return _and(left, right)
        if isinstance(op, ast.BitOr) and UNKNOWN in (left, right):
            return _or(left, right)
        return _BINARY[type(op)](*self._known(left, right))

    def _subscript(self, node: ast.Subscript, table: Any, index: Any) -> Any:
        name = ast.unparse(node.value)
        value = _index(table, index, name)
        if isinstance(table, RecordedTensor) and _is_scalar(value):
            inside = index if isinstance(index, tuple) else (index,)
            self._lookups.append(f"{name}[{', '.join(map(str, inside))}] = {_show(value)}")
        return value

    def _call(
        self,
        node: ast.Call,
        function: ast.expr,
        arguments: Sequence[ast.expr],
        keywords: Sequence[ast.keyword],
    ) -> Any:
        target = self._evaluate(function)
        values = [self._evaluate(each) for each in arguments]
        named = {str(each.arg): self._evaluate(each.value) for each in keywords}
        if isinstance(target, _Function | _Local):
            n_frames = len(self._run.frames)
            value = self._run.call(target, values, named)
            self._callees[node] = self._run.frames[n_frames]
            return value
        if not isinstance(target, _Operation) or target.name not in _OPERATIONS:
            text = ast.unparse(function)
            raise _UnsupportedError("" if target is UNKNOWN else f"{text}() is not evaluated")
        values = [*target.owner, *values]
        if target.name in (*_AND, *_OR) and UNKNOWN in values:
            return (_and if target.name in _AND else _or)(*values)
        named = {name: value for name, value in named.items() if name != "device"}
        return _OPERATIONS[target.name](*self._known(*values), **named)

    @staticmethod
    def _known(*values: Any) -> tuple[Any, ...]:
        if any(value is UNKNOWN for value in values):
            raise _UnsupportedError("")
        if any(isinstance(value, RecordedTensor) for value in values):
            raise _UnsupportedError("an operation on a whole tensor")
        return values

    # -- what decided, and how it is shown --------------------------------------------------------

    def deciders(self) -> Iterator[DecidingTerm]:
        """Yield the terms that decided the returned value."""
        if self._returned is not None:
            yield from self._deciders_of(self._returned)

    def _deciders_of(self, node: ast.expr) -> Iterator[DecidingTerm]:
        value = self._values.get(node, UNKNOWN)
        if not isinstance(value, bool):
            return
        parts, deciding = _operands(node)
        if choice := _choice(node):
            yield from self._deciders_of(choice[0])
            yield from self._deciders_of(choice[1 if self._values[choice[0]] else 2])
        elif parts:
            is_decided_alone = deciding is not None and value is deciding
            for part in parts:
                if not is_decided_alone or self._values[part] is deciding:
                    yield from self._deciders_of(part)
        elif isinstance(node, ast.Name) and node.id in self._deciders:
            yield from self._deciders[node.id]
        elif node in self._callees:
            yield from self._callees[node].deciders()
        elif not isinstance(node, ast.Constant) and _called_name(node) not in _FILLS:
            text, with_values = ast.unparse(node), ast.unparse(self._with_values(node, 0))
            yield DecidingTerm(self.text.source, self._line(node), text, with_values, value)

    def _with_values(self, node: ast.expr, level: int, *, is_top: bool = True) -> ast.expr:
        """Return an expression with numbers in place of what has one; at level 1 also True, False.

        The operators that combine conditions stay, and so does the expression itself.
        """
        value = self._values.get(node, UNKNOWN)
        is_combined = bool(_operands(node)[0])
        if not is_combined and not is_top and _is_scalar(value):
            keeps = isinstance(node, ast.Compare) and level == 0
            if not keeps:
                return ast.Constant(value)
        if not is_combined and is_top and level == 1 and isinstance(value, bool):
            return ast.Constant(value)
        match node:
            case ast.BinOp(left=left, op=op, right=right):
                return ast.BinOp(self._inner(left, level), op, self._inner(right, level))
            case ast.BoolOp(op=op, values=parts):
                return ast.BoolOp(op, [self._inner(part, level) for part in parts])
            case ast.UnaryOp(op=op, operand=operand):
                return ast.UnaryOp(op, self._inner(operand, level))
            case ast.Compare(left=left, ops=ops, comparators=others):
                return ast.Compare(
                    self._inner(left, level), ops, [self._inner(each, level) for each in others]
                )
            case ast.Call(func=function, args=arguments, keywords=keywords):
                values = [self._inner(each, level) for each in arguments]
                return ast.Call(function, values, keywords)
            case ast.Subscript(value=table, slice=index):
                return ast.Subscript(table, self._inner(index, level), ast.Load())
            case ast.Tuple(elts=items):
                return ast.Tuple([self._inner(each, level) for each in items], ast.Load())
        return ast.Constant(value) if _is_scalar(value) else node

    def _inner(self, node: ast.expr, level: int) -> ast.expr:
        return self._with_values(node, level, is_top=False)


def _and(left: Any, right: Any) -> Any:
    if left is False or right is False:
        return False
    return UNKNOWN if UNKNOWN in (left, right) else left & right


def _or(left: Any, right: Any) -> Any:
    if left is True or right is True:
        return True
    return UNKNOWN if UNKNOWN in (left, right) else left | right


def _called_name(node: ast.expr) -> str:
    """Return the last name of a called function or method, "" for another expression."""
    function = node.func if isinstance(node, ast.Call) else None
    return str(getattr(function, "attr", getattr(function, "id", "")))


def _choice(node: ast.expr) -> Sequence[ast.expr]:
    """Return the condition and both choices of a conditional expression, () for another one."""
    if isinstance(node, ast.IfExp):
        return node.test, node.body, node.orelse
    is_where = isinstance(node, ast.Call) and _called_name(node) == "where"
    return node.args if is_where and len(node.args) == 3 else ()  # type: ignore[attr-defined]


def _operands(node: ast.expr) -> tuple[Sequence[ast.expr], bool | None]:
    """Return the conditions that an expression combines, and the value of one that decides alone.

    False decides a conjunction, True a disjunction; None: every operand decides.
    """
    match node:
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return (left, right), False
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return (left, right), True
        case ast.BinOp(left=left, op=ast.BitXor(), right=right):
            return (left, right), None
        case ast.BoolOp(op=op, values=parts):
            return parts, isinstance(op, ast.Or)
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            return (operand,), None
        case ast.Call(func=ast.Attribute(value=owner), args=arguments):
            if (name := _called_name(node)) in (*_AND, *_OR):
                whole = [owner, *arguments] if len(arguments) == 1 else arguments  # a method
                return whole, name in _OR
    return (), None
