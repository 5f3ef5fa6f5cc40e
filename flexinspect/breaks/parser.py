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
from flexinspect.breaks.globs import n_wildcards
from flexinspect.breaks.lexer import Token, tokens
from flexinspect.breaks.tree import And, Compare, Expression, Found, Not, Operand, Or, Seen
from flexinspect.breaks.typecheck import comparison, membership
from flexinspect.breaks.values import constant, operand
from flexinspect.breaks.words import COMPARISONS, FINDING, NAMES, SEVERITIES, SIGHTS

DEEPEST = 50
"""Parentheses and "not"s within each other."""

MOST_WILDCARDS = 8
"""In the name of a module: the ways to match it grow with the power of these."""


def parse(text: str, *, finding_ids: Collection[str] | None = None) -> Expression:
    """Return the tree of an expression.

    With `finding_ids`, a `finding` that none of them matches is refused. Raises `ExpressionError`.
    """
    found = tokens(text)
    return Parser(text, found, finding_ids).whole()


class Parser:
    """Reads one expression, token by token; each method leaves off after what it has read."""

    def __init__(
        self, text: str, found: Sequence[Token], finding_ids: Collection[str] | None
    ) -> None:
        self._text, self._tokens, self._at = text, found, 0
        self._depth = 0
        self._finding_ids = finding_ids

    # -- the grammar -----------------------------------------------------------------------------

    def whole(self) -> Expression:
        """Read everything."""
        if self._is_at_end():
            raise self._error("There is no condition here.", hint=_EXAMPLE)
        tree = self.expression()
        if not self._is_at_end():
            raise self._leftover()
        return tree

    def expression(self) -> Expression:
        """Read conditions joined with "or"."""
        parts = self._joined("or", self._either)
        return parts[0] if len(parts) == 1 else Or(_flat(Or, parts))

    def _either(self) -> Expression:
        parts = self._joined("and", self._condition)
        return parts[0] if len(parts) == 1 else And(_flat(And, parts))

    def _joined(self, word: str, read: Callable[[], Expression]) -> list[Expression]:
        parts = [read()]
        while self._takes("word", word):
            parts.append(read())
        return parts

    def _condition(self) -> Expression:
        token = self._here
        if token.sort == "word" and token.value == "not":
            return Not(self._deeper(self._condition))
        if token.sort == "op" and token.value == "(":
            return self._grouped()
        if token.sort == "word" and token.value in SIGHTS:
            return self._seen()
        if token.sort == "word" and token.value == FINDING:
            return self._found()
        return self._comparison()

    def _deeper(self, read: Callable[[], Expression]) -> Expression:
        self._depth += 1
        if self._depth > DEEPEST:
            raise self._error(f"More than {DEEPEST} parentheses and nots within each other.")
        self._at += 1
        inner = read()
        self._depth -= 1
        return inner

    def _grouped(self) -> Expression:
        opening = self._here
        inner = self._deeper(self.expression)
        if not self._takes("op", ")"):
            if self._is_at_end():
                raise self._error("This parenthesis is not closed.", opening)
            raise self._leftover()
        return inner

    # -- conditions ------------------------------------------------------------------------------

    def _seen(self) -> Seen:
        token = self._take()
        if self._here.sort == "op" and self._here.value in COMPARISONS:
            raise self._error(
                f"{token.value} is a condition by itself, and is not compared.", token
            )
        if not self._takes("op", "@"):
            return Seen(token.value)
        if self._here.sort != "glob":
            raise self._error(
                "After @ comes the name of a module, in which * stands for one part.",
                hint=f"For instance {token.value} @ layers.*.self_attn",
            )
        if n_wildcards(self._here.value) > MOST_WILDCARDS:
            raise self._error(f"A module's name takes at most {MOST_WILDCARDS} wildcards.")
        return Seen(token.value, self._take().value)

    def _found(self) -> Found:
        self._at += 1
        if self._here.sort == "glob":
            pattern = self._take()
            self._check_finding(pattern)
            name = pattern.value
        elif self._here.sort == "op" and self._here.value in COMPARISONS:
            name = "*"
        else:
            raise self._error(
                "After finding comes which: the id of a finding, in which * stands for any text.",
                hint="For instance finding mask.*, or finding * >= warning",
            )
        op = self._operator()
        return Found(name) if op is None else Found(name, op, self._severity())

    def _severity(self) -> str:
        token = self._here
        if token.sort not in ("word", "text") or token.value not in SEVERITIES:
            listed = ", ".join(SEVERITIES)
            raise self._error(
                f"A finding is compared with a severity: {listed}.", hint=_near(token, SEVERITIES)
            )
        return self._take().value

    def _check_finding(self, pattern: Token) -> None:
        ids = self._finding_ids
        if ids is None or any(fnmatchcase(one, pattern.value) for one in ids):
            return
        raise self._error(
            "No finding has an id like this.",
            pattern,
            hint=_near(pattern, sorted(ids)) or "flexinspect findings --help lists all ids.",
        )

    def _comparison(self) -> Expression:
        first_token, first = self._here, self._operand()
        is_negated = self._is_not_in()
        if is_negated or self._takes("word", "in"):
            inner = membership(self._text, first_token, first, self._members())
            return Not(inner) if is_negated else inner
        parts: list[Expression] = []
        left_token, left = first_token, first
        while (op := self._operator()) is not None:
            right_token, right = self._here, self._operand()
            comparison(self._text, (left_token, left), op, (right_token, right))
            parts.append(Compare(left, op, right))
            left_token, left = right_token, right
        if not parts:
            raise self._bare(first_token, first)
        return parts[0] if len(parts) == 1 else And(tuple(parts))

    def _is_not_in(self) -> bool:
        if not self._takes("word", "not"):
            return False
        if not self._takes("word", "in"):
            raise self._error("After a value and not comes in.")
        return True

    def _members(self) -> list[tuple[Token, Operand]]:
        """Read what comes after "in": a name, or values in parentheses."""
        opening = self._here
        if not self._takes("op", "("):
            return [(opening, self._operand())]
        found = [(self._here, self._constant())]
        while self._takes("op", ","):
            if (self._here.sort, self._here.value) == ("op", ")"):
                break
            found.append((self._here, self._constant()))
        if not self._takes("op", ")"):
            if self._is_at_end():
                raise self._error("This parenthesis is not closed.", opening)
            raise self._error("Between the values of a list stand commas.")
        return found

    # -- operands --------------------------------------------------------------------------------

    def _operator(self) -> str | None:
        token = self._here
        if token.sort == "op" and token.value in COMPARISONS:
            return self._take().value
        return None

    def _operand(self) -> Operand:
        found, used = operand(self._text, self._tokens, self._at)
        self._at += used
        return found

    def _constant(self) -> Operand:
        found, used = constant(self._text, self._tokens, self._at)
        self._at += used
        return found

    # -- tokens ----------------------------------------------------------------------------------

    @property
    def _here(self) -> Token:
        return self._tokens[self._at]

    def _is_at_end(self) -> bool:
        return self._here.sort == "end"

    def _take(self) -> Token:
        self._at += 1
        return self._tokens[self._at - 1]

    def _takes(self, sort: str, value: str) -> bool:
        is_next = self._here.sort == sort and self._here.value == value
        self._at += is_next
        return is_next

    # -- errors ----------------------------------------------------------------------------------

    def _error(
        self, reason: str, token: Token | None = None, *, hint: str | None = None
    ) -> ExpressionError:
        where = token or self._here
        return ExpressionError(reason, self._text, where.start, where.stop, hint=hint)

    def _leftover(self) -> ExpressionError:
        token = self._here
        if token.value == "@":
            return self._error(f"Only {', '.join(SIGHTS)} are looked for @ modules.")
        if token.value == ")":
            return self._error("This parenthesis was never opened.")
        return self._error(
            "The condition before this is complete: and, or, or the end is expected here.",
            hint=_near(token, ("and", "or")),
        )

    def _bare(self, token: Token, found: Operand) -> ExpressionError:
        return self._error(
            f"{token.value or 'This'} is a value, and no condition by itself.",
            token,
            hint="Compare it, for instance entropy > 3.",
        )


_EXAMPLE = 'For instance entropy > 3 and step > 2, or token == "\\n".'


def _flat(kind: type[And] | type[Or], parts: Sequence[Expression]) -> tuple[Expression, ...]:
    """Take the parts of a chain out of chains of the same kind."""
    flat: list[Expression] = []
    for part in parts:
        if isinstance(part, kind):
            flat += part.parts
        else:
            flat.append(part)
    return tuple(flat)


def _near(token: Token, known: Sequence[str] = NAMES) -> str | None:
    near = difflib.get_close_matches(token.value, known, 1)
    return f"Did you mean {near[0]}?" if near else None
