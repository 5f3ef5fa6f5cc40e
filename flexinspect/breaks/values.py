"""Operands: names, and values as they are written."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence

from flexinspect.breaks.errors import ExpressionError
from flexinspect.breaks.lexer import ExpressionToken
from flexinspect.breaks.tree import Name, Number, Operand, Text
from flexinspect.breaks.words import ALL_NAMES, FINDING, KEYWORDS, OBSERVATIONS, UNITS, VALUE_NAMES

_MAX_EXACT_DIGITS = 15
"""Digits that a float holds exactly."""


def read_operand(text: str, tokens: Sequence[ExpressionToken], at: int) -> tuple[Operand, int]:
    """Return the operand at a token, and how many tokens it takes. Raises `ExpressionError`."""
    token = tokens[at]
    if token.kind == "word" and token.value in VALUE_NAMES:
        return Name(token.value), 1
    if token.kind == "word":
        raise _unknown_name(text, token)
    return read_constant(text, tokens, at)


def read_constant(text: str, tokens: Sequence[ExpressionToken], at: int) -> tuple[Operand, int]:
    """Return the written value at a token, and how many tokens it takes."""
    token = tokens[at]
    if token.kind == "text":
        return Text(token.value), 1
    if token.kind != "number":
        raise ExpressionError(
            _expected_text(token), text, token.start, max(token.stop, token.start + 1)
        )
    value, unit = _parse_number(text, token), tokens[at + 1]
    if unit.kind != "word" or unit.value in (*KEYWORDS, *VALUE_NAMES, *OBSERVATIONS):
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


def _parse_number(text: str, token: ExpressionToken) -> float:
    written = token.value.replace("_", "")
    digits = written.lstrip("+-")
    if digits.isdecimal() and len(digits) <= _MAX_EXACT_DIGITS:
        return int(written)
    try:
        value = float(written)
    except ValueError:
        value = math.inf
    if math.isinf(value):
        raise ExpressionError("This is no number.", text, token.start, token.stop)
    return value


def _expected_text(token: ExpressionToken) -> str:
    if token.kind == "end":
        return "The expression ends where a name or a value is expected."
    return "A name or a value is expected here."


def _unknown_name(text: str, token: ExpressionToken) -> ExpressionError:
    if token.value in KEYWORDS or token.value in OBSERVATIONS or token.value == FINDING:
        reason = f"A name or a value is expected here, and {token.value} is none."
        return ExpressionError(reason, text, token.start, token.stop)
    near = _nearest_name(token.value)
    hint = f"Did you mean {near}?" if near else f"Known are {', '.join(ALL_NAMES)}."
    reason = f"{token.value} is no name that a breakpoint knows."
    return ExpressionError(reason, text, token.start, token.stop, hint=hint)


def _nearest_name(word: str) -> str | None:
    if any(word in VALUE_NAMES[name].choices for name in VALUE_NAMES):
        return f'"{word}", in quotes'
    near = difflib.get_close_matches(word.lower().replace("_", "-"), ALL_NAMES, 1, 0.6)
    near = near or difflib.get_close_matches(word.lower(), ALL_NAMES, 1, 0.6)
    return near[0] if near else None
