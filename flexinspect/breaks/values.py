"""Operands: names, and values as they are written."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence

from flexinspect.breaks.errors import ExpressionError
from flexinspect.breaks.lexer import Token
from flexinspect.breaks.tree import Name, Number, Operand, Text
from flexinspect.breaks.words import FINDING, KEYWORDS, NAMES, SIGHTS, UNITS, WORDS

_LONGEST_WHOLE = 15
"""Digits that a float holds exactly."""


def operand(text: str, tokens: Sequence[Token], at: int) -> tuple[Operand, int]:
    """Return the operand at a token, and how many tokens it takes. Raises `ExpressionError`."""
    token = tokens[at]
    if token.sort == "word" and token.value in WORDS:
        return Name(token.value), 1
    if token.sort == "word":
        raise _unknown(text, token)
    return constant(text, tokens, at)


def constant(text: str, tokens: Sequence[Token], at: int) -> tuple[Operand, int]:
    """Return the written value at a token, and how many tokens it takes."""
    token = tokens[at]
    if token.sort == "text":
        return Text(token.value), 1
    if token.sort != "number":
        raise ExpressionError(_expected(token), text, token.start, max(token.stop, token.start + 1))
    value, unit = _number(text, token), tokens[at + 1]
    if unit.sort != "word" or unit.value in (*KEYWORDS, *WORDS, *SIGHTS):
        return Number(value), 1
    if unit.value not in UNITS:
        known = ", ".join(UNITS)
        near = difflib.get_close_matches(unit.value, UNITS, 1)
        raise ExpressionError(
            f"{unit.value} is no unit of memory.",
            text,
            unit.start,
            unit.stop,
            hint=f"Did you mean {near[0]}?" if near else f"Known are {known}.",
        )
    return Number(value, unit.value), 2


def _number(text: str, token: Token) -> float:
    written = token.value.replace("_", "")
    digits = written.lstrip("+-")
    if digits.isdecimal() and len(digits) <= _LONGEST_WHOLE:
        return int(written)
    try:
        value = float(written)
    except ValueError:
        value = math.inf
    if math.isinf(value):
        raise ExpressionError("This is no number.", text, token.start, token.stop)
    return value


def _expected(token: Token) -> str:
    if token.sort == "end":
        return "The expression ends where a name or a value is expected."
    return "A name or a value is expected here."


def _unknown(text: str, token: Token) -> ExpressionError:
    if token.value in KEYWORDS or token.value in SIGHTS or token.value == FINDING:
        reason = f"A name or a value is expected here, and {token.value} is none."
        return ExpressionError(reason, text, token.start, token.stop)
    near = _nearest(token.value)
    hint = f"Did you mean {near}?" if near else f"Known are {', '.join(NAMES)}."
    reason = f"{token.value} is no name that a breakpoint knows."
    return ExpressionError(reason, text, token.start, token.stop, hint=hint)


def _nearest(word: str) -> str | None:
    if any(word in WORDS[name].choices for name in WORDS):
        return f'"{word}", in quotes'
    near = difflib.get_close_matches(word.lower().replace("_", "-"), NAMES, 1, 0.6)
    near = near or difflib.get_close_matches(word.lower(), NAMES, 1, 0.6)
    return near[0] if near else None
