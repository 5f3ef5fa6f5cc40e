"""From tokens to a tree, with every name and type checked.

    expression  = either, { "or", either } ;
    either      = condition, { "and", condition } ;
    condition   = "not", condition | "(", expression, ")" | seen | found | comparison ;

The whole grammar is in docs/breakpoints.md. What cannot be read raises `ExpressionError`, which
points at the place; nothing of the text is ever run.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase

from flexinspect.breaks.errors import ExpressionError
from flexinspect.breaks.globs import count_wildcards
from flexinspect.breaks.lexer import ExpressionToken, tokenize
from flexinspect.breaks.tree import (
    And,
    Compare,
    Expression,
    FindingCondition,
    Not,
    ObservationCondition,
    Operand,
    Or,
)
from flexinspect.breaks.typecheck import check_comparison, check_membership
from flexinspect.breaks.values import read_constant, read_operand
from flexinspect.breaks.words import ALL_NAMES, COMPARISONS, FINDING, OBSERVATIONS, SEVERITIES

MAX_DEPTH = 50
"""Parentheses and "not"s within each other."""

MAX_WILDCARDS = 8
"""In the name of a module: the ways to match it grow with the power of these."""


def parse(text: str, *, finding_ids: Collection[str] | None = None) -> Expression:
    """Return the tree of an expression.

    With `finding_ids`, a `finding` that none of them matches is refused. Raises `ExpressionError`.
    """
    found = tokenize(text)
    return Parser(text, found, finding_ids).parse()


class Parser:
    """Reads one expression, token by token; each method leaves off after what it has read."""

    def __init__(
        self, text: str, tokens: Sequence[ExpressionToken], finding_ids: Collection[str] | None
    ) -> None:
        self._text, self._tokens, self._at = text, tokens, 0
        self._depth = 0
        self._finding_ids = finding_ids

    # -- the grammar -----------------------------------------------------------------------------

    def parse(self) -> Expression:
        """Read everything."""
        if self._is_at_end():
            raise self._error("There is no condition here.", hint=_EXAMPLE)
        tree = self.expression()
        if not self._is_at_end():
            raise self._trailing_error()
        return tree

    def expression(self) -> Expression:
        """Read conditions joined with "or"."""
        parts = self._chain("or", self._conjunction)
        return parts[0] if len(parts) == 1 else Or(_flatten(Or, parts))

    def _conjunction(self) -> Expression:
        parts = self._chain("and", self._condition)
        return parts[0] if len(parts) == 1 else And(_flatten(And, parts))

    def _chain(self, word: str, read: Callable[[], Expression]) -> list[Expression]:
        parts = [read()]
        while self._accept("word", word):
            parts.append(read())
        return parts

    def _condition(self) -> Expression:
        token = self._current
        if token.kind == "word" and token.value == "not":
            return Not(self._nested(self._condition))
        if token.kind == "op" and token.value == "(":
            return self._grouped()
        if token.kind == "word" and token.value in OBSERVATIONS:
            return self._observation()
        if token.kind == "word" and token.value == FINDING:
            return self._finding()
        return self._comparison()

    def _nested(self, read: Callable[[], Expression]) -> Expression:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"More than {MAX_DEPTH} parentheses and nots within each other.")
        self._at += 1
        inner = read()
        self._depth -= 1
        return inner

    def _grouped(self) -> Expression:
        opening = self._current
        inner = self._nested(self.expression)
        if not self._accept("op", ")"):
            if self._is_at_end():
                raise self._error("This parenthesis is not closed.", opening)
            raise self._trailing_error()
        return inner

    # -- conditions ------------------------------------------------------------------------------

    def _observation(self) -> ObservationCondition:
        token = self._advance()
        if self._current.kind == "op" and self._current.value in COMPARISONS:
            raise self._error(
                f"{token.value} is a condition by itself, and is not compared.", token
            )
        if not self._accept("op", "@"):
            return ObservationCondition(token.value)
        if self._current.kind != "glob":
            raise self._error(
                "After @ comes the name of a module, in which * stands for one part.",
                hint=f"For instance {token.value} @ layers.*.self_attn",
            )
        if count_wildcards(self._current.value) > MAX_WILDCARDS:
            raise self._error(f"A module's name takes at most {MAX_WILDCARDS} wildcards.")
        return ObservationCondition(token.value, self._advance().value)

    def _finding(self) -> FindingCondition:
        self._at += 1
        if self._current.kind == "glob":
            pattern = self._advance()
            self._check_finding(pattern)
            name = pattern.value
        elif self._current.kind == "op" and self._current.value in COMPARISONS:
            name = "*"
        else:
            raise self._error(
                "After finding comes which: the id of a finding, in which * stands for any text.",
                hint="For instance finding mask.*, or finding * >= warning",
            )
        op = self._operator()
        return (
            FindingCondition(name) if op is None else FindingCondition(name, op, self._severity())
        )

    def _severity(self) -> str:
        token = self._current
        if token.kind not in ("word", "text") or token.value not in SEVERITIES:
            listed = ", ".join(SEVERITIES)
            raise self._error(
                f"A finding is compared with a severity: {listed}.",
                hint=_suggest(token, SEVERITIES),
            )
        return self._advance().value

    def _check_finding(self, pattern: ExpressionToken) -> None:
        ids = self._finding_ids
        if ids is None or any(fnmatchcase(one, pattern.value) for one in ids):
            return
        raise self._error(
            "No finding has an id like this.",
            pattern,
            hint=_suggest(pattern, sorted(ids)) or "flexinspect findings --help lists all ids.",
        )

    def _comparison(self) -> Expression:
        first_token, first = self._current, self._operand()
        is_negated = self._accept_not_in()
        if is_negated or self._accept("word", "in"):
            inner = check_membership(self._text, first_token, first, self._members())
            return Not(inner) if is_negated else inner
        parts: list[Expression] = []
        left_token, left = first_token, first
        while (op := self._operator()) is not None:
            right_token, right = self._current, self._operand()
            check_comparison(self._text, (left_token, left), op, (right_token, right))
            parts.append(Compare(left, op, right))
            left_token, left = right_token, right
        if not parts:
            raise self._bare_value_error(first_token, first)
        return parts[0] if len(parts) == 1 else And(tuple(parts))

    def _accept_not_in(self) -> bool:
        if not self._accept("word", "not"):
            return False
        if not self._accept("word", "in"):
            raise self._error("After a value and not comes in.")
        return True

    def _members(self) -> list[tuple[ExpressionToken, Operand]]:
        """Read what comes after "in": a name, or values in parentheses."""
        opening = self._current
        if not self._accept("op", "("):
            return [(opening, self._operand())]
        found = [(self._current, self._constant())]
        while self._accept("op", ","):
            if (self._current.kind, self._current.value) == ("op", ")"):
                break
            found.append((self._current, self._constant()))
        if not self._accept("op", ")"):
            if self._is_at_end():
                raise self._error("This parenthesis is not closed.", opening)
            raise self._error("Between the values of a list stand commas.")
        return found

    # -- operands --------------------------------------------------------------------------------

    def _operator(self) -> str | None:
        token = self._current
        if token.kind == "op" and token.value in COMPARISONS:
            return self._advance().value
        return None

    def _operand(self) -> Operand:
        found, used = read_operand(self._text, self._tokens, self._at)
        self._at += used
        return found

    def _constant(self) -> Operand:
        found, used = read_constant(self._text, self._tokens, self._at)
        self._at += used
        return found

    # -- tokens ----------------------------------------------------------------------------------

    @property
    def _current(self) -> ExpressionToken:
        return self._tokens[self._at]

    def _is_at_end(self) -> bool:
        return self._current.kind == "end"

    def _advance(self) -> ExpressionToken:
        self._at += 1
        return self._tokens[self._at - 1]

    def _accept(self, kind: str, value: str) -> bool:
        is_next = self._current.kind == kind and self._current.value == value
        self._at += is_next
        return is_next

    # -- errors ----------------------------------------------------------------------------------

    def _error(
        self, reason: str, token: ExpressionToken | None = None, *, hint: str | None = None
    ) -> ExpressionError:
        where = token or self._current
        return ExpressionError(reason, self._text, where.start, where.stop, hint=hint)

    def _trailing_error(self) -> ExpressionError:
        token = self._current
        if token.value == "@":
            return self._error(f"Only {', '.join(OBSERVATIONS)} are looked for @ modules.")
        if token.value == ")":
            return self._error("This parenthesis was never opened.")
        return self._error(
            "The condition before this is complete: and, or, or the end is expected here.",
            hint=_suggest(token, ("and", "or")),
        )

    def _bare_value_error(self, token: ExpressionToken, found: Operand) -> ExpressionError:
        return self._error(
            f"{token.value or 'This'} is a value, and no condition by itself.",
            token,
            hint="Compare it, for instance entropy > 3.",
        )


_EXAMPLE = 'For instance entropy > 3 and step > 2, or token == "\\n".'


def _flatten(kind: type[And] | type[Or], parts: Sequence[Expression]) -> tuple[Expression, ...]:
    """Take the parts of a chain out of chains of the same kind."""
    flat: list[Expression] = []
    for part in parts:
        if isinstance(part, kind):
            flat += part.parts
        else:
            flat.append(part)
    return tuple(flat)


def _suggest(token: ExpressionToken, known: Sequence[str] = ALL_NAMES) -> str | None:
    near = difflib.get_close_matches(token.value, known, 1)
    return f"Did you mean {near[0]}?" if near else None
