"""The syntax tree of breakpoint expressions, its text form, and the error of an invalid expression.

`parse(to_text(tree)) == tree` for every tree that `parse` returns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from unicodedata import east_asian_width

from flexinspect.breakpoints.names import EMPTY_ROW, FALLBACK, PER_LAYER_NAMES
from flexinspect.core.errors import UsageError
from flexinspect.core.text import escape_unprintable


class ExpressionError(UsageError):
    """An invalid expression; the message underlines `text[start:stop]`.

    `reason` is the message without the underlined text, as an input field shows it.
    """

    def __init__(
        self, reason: str, text: str, start: int, stop: int, *, hint: str | None = None
    ) -> None:
        shown = f"  {_printable(text)}"
        super().__init__(f"{reason}\n{shown}\n{_underline(text, start, stop)}", hint=hint)
        self.reason = reason
        self.text = text
        self.start, self.stop = start, stop

    def with_location(self, where: str) -> ExpressionError:
        """Return the same error with the location of the expression, such as "file:line"."""
        reason = f"{where}: {self.reason}"
        return ExpressionError(reason, self.text, self.start, self.stop, hint=self.hint)


def _printable(text: str) -> str:
    """Return the text in one line of as many characters, with unprintable ones replaced."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{MIDDLE DOT}" for c in text)


def _underline(text: str, start: int, stop: int) -> str:
    before = sum(map(_cell_width, text[:start]))
    return f"  {' ' * before}{'^' * max(sum(map(_cell_width, text[start:stop])), 1)}"


def _cell_width(character: str) -> int:
    return 2 if east_asian_width(character) in "WF" else 1


@dataclass(frozen=True, slots=True)
class Number:
    """A number; with a unit it is an amount of memory."""

    value: float
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """A text in quotes."""

    value: str


@dataclass(frozen=True, slots=True)
class Name:
    """A name of `VALUE_NAMES`."""

    name: str


Operand = Number | Text | Name


@dataclass(frozen=True, slots=True)
class Compare:
    """A comparison of two operands; `in` has a list, or a name that is a text, on its right."""

    left: Operand
    op: str
    right: Operand | tuple[Number | Text, ...]


@dataclass(frozen=True, slots=True)
class ObservationCondition:
    """One of `OBSERVATIONS`, anywhere or at modules whose names match."""

    kind: str
    module_pattern: str | None = None


@dataclass(frozen=True, slots=True)
class FindingCondition:
    """A new finding whose id matches `pattern`, and whose severity satisfies `op`."""

    pattern: str
    op: str | None = None
    severity: str | None = None


@dataclass(frozen=True, slots=True)
class Not:
    """Negation."""

    inner: Expression


@dataclass(frozen=True, slots=True)
class And:
    """Conjunction; no part is an `And`."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """Disjunction; no part is an `Or`."""

    parts: tuple[Expression, ...]


Expression = Compare | ObservationCondition | FindingCondition | Not | And | Or
Leaf = Compare | ObservationCondition | FindingCondition


def to_text(tree: Expression) -> str:
    """Return an expression as text, without redundant parentheses."""
    if isinstance(tree, Or):
        return " or ".join(to_text(part) for part in tree.parts)
    if isinstance(tree, And):
        return " and ".join(_parenthesized(part, Or) for part in tree.parts)
    if isinstance(tree, Not):
        return f"not {_parenthesized(tree.inner, Or, And)}"
    return _leaf_text(tree)


def _parenthesized(tree: Expression, *looser_types: type) -> str:
    return f"({to_text(tree)})" if isinstance(tree, looser_types) else to_text(tree)


def _leaf_text(leaf: Leaf) -> str:
    if isinstance(leaf, Compare):
        return f"{operand_text(leaf.left)} {leaf.op} {operand_text(leaf.right)}"
    if isinstance(leaf, ObservationCondition):
        return leaf.kind if leaf.module_pattern is None else f"{leaf.kind} @ {leaf.module_pattern}"
    return f"finding {leaf.pattern}" + (f" {leaf.op} {leaf.severity}" if leaf.op else "")


def operand_text(operand: Operand | tuple[Number | Text, ...]) -> str:
    """Return an operand as text."""
    if isinstance(operand, tuple):
        return f"({', '.join(map(operand_text, operand))})"
    if isinstance(operand, Name):
        return operand.name
    if isinstance(operand, Text):
        return quote(operand.value)
    return f"{operand.value!r} {operand.unit}" if operand.unit else repr(operand.value)


def quote(text: str) -> str:
    """Return a text in double quotes, with escapes for unprintable characters."""
    escaped = escape_unprintable(text).replace('"', r"\"")
    return f'"{escaped}"'


def leaves(tree: Expression) -> Iterator[Leaf]:
    """Yield the conditions of an expression, from left to right."""
    if isinstance(tree, And | Or):
        for part in tree.parts:
            yield from leaves(part)
    elif isinstance(tree, Not):
        yield from leaves(tree.inner)
    else:
        yield tree


def value_names_in(tree: Expression) -> tuple[str, ...]:
    """Return the value names in an expression, each once."""
    parts = (
        getattr(leaf, part, None) for leaf in leaves(tree) for part in ("left", "right", "name")
    )
    return tuple(dict.fromkeys(part.name for part in parts if isinstance(part, Name)))


def is_per_layer(tree: Expression) -> bool:
    """Return whether an expression is evaluated per layer: it has a name with a value per layer."""
    return not set(PER_LAYER_NAMES).isdisjoint(value_names_in(tree))


def observations_in(tree: Expression) -> tuple[ObservationCondition, ...]:
    """Return the observations in an expression, each once."""
    observations = (leaf for leaf in leaves(tree) if isinstance(leaf, ObservationCondition))
    return tuple(dict.fromkeys(observations))


def has_finding(tree: Expression) -> bool:
    """Return whether an expression has a `finding` condition."""
    return any(isinstance(leaf, FindingCondition) for leaf in leaves(tree))


def needs_calls(tree: Expression) -> bool:
    """Return whether an expression is evaluated at each attention call while the model runs."""
    return is_per_layer(tree) or any(s.kind in (EMPTY_ROW, FALLBACK) for s in observations_in(tree))


_GLOB_PARTS = re.compile(r"\*{2,}|\*|\?|\[!?[^\[\]]+\]|.", re.DOTALL)
_WILDCARDS = {"*": r"[^.]*", "?": r"[^.]"}


def matches_module(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a module's name, or the last parts of it.

    `*` matches one part (`layers.*.self_attn`) or a piece of one, `**` any number of parts, `[0-3]`
    one of these characters.
    """
    return _compile_glob(pattern).fullmatch(name) is not None


def count_wildcards(pattern: str) -> int:
    """Return the number of wildcards in a module pattern."""
    return sum(len(piece) > 1 or piece in _WILDCARDS for piece in _GLOB_PARTS.findall(pattern))


@lru_cache(maxsize=256)
def _compile_glob(pattern: str) -> re.Pattern[str]:
    body = "".join(map(_glob_part_regex, _GLOB_PARTS.findall(pattern)))
    try:
        return re.compile(rf"(?:.*\.)?(?:{body})", re.DOTALL)
    except re.error:  # an invalid range such as [z-a]: match it literally
        return re.compile(rf"(?:.*\.)?{re.escape(pattern)}", re.DOTALL)


def _glob_part_regex(piece: str) -> str:
    if piece.startswith("**"):
        return ".*"
    if piece in _WILDCARDS:
        return _WILDCARDS[piece]
    if len(piece) > 1:
        inside = piece[1:-1].replace("\\", "\\\\")
        return f"[^{inside[1:]}]" if inside.startswith("!") else f"[{inside}]"
    return re.escape(piece)
