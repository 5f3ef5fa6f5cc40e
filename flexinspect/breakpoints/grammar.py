"""Tokenizer and parser of breakpoint expressions.

    expression  = either, { "or", either } ;
    either      = condition, { "and", condition } ;
    condition   = "not", condition | "(", expression, ")" | observation | finding | comparison ;

The whole grammar is in docs/breakpoints.md. Invalid text raises `ExpressionError`, which points at
the place; the text never runs as Python.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from flexinspect.breakpoints.names import (
    ALL_NAMES,
    COMPARISONS,
    FINDING,
    KEYWORDS,
    OBSERVATIONS,
    SEVERITIES,
    UNITS,
    VALUE_NAMES,
    ValueKind,
)
from flexinspect.breakpoints.syntax_tree import (
    And,
    Compare,
    Contains,
    Expression,
    ExpressionError,
    FindingCondition,
    Member,
    Name,
    Not,
    Number,
    ObservationCondition,
    Operand,
    Or,
    Text,
    count_wildcards,
    operand_text,
)

MAX_EXPRESSION_LENGTH = 2000
"""Length of the longest expression, in characters."""

TokenKind = Literal["word", "number", "text", "op", "glob", "end"]


@dataclass(frozen=True, slots=True)
class ExpressionToken:
    """A token, from `start` to `stop` in the text.

    A glob is a name with wildcards, which follows `@` or `finding`.
    """

    kind: TokenKind
    value: str
    start: int
    stop: int


_SPACE = re.compile(r"\s*")
_IDENTIFIER = re.compile(r"[^\W\d]\w*(?:-[^\W\d]\w*)*")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:_\d+)*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_OPERATOR = re.compile(r"==|!=|<=|>=|<|>|@|\(|\)|\[|\]|,")
_GLOB = re.compile(r"(?:(?!!=)[^\s()\"',@<>=])+")
_OPERATOR_HINTS = {
    "=": ("A comparison is written with two signs: ==", "="),
    "&": ("Conditions are joined with the word and", "&"),
    "|": ("Conditions are joined with the word or", "|"),
    "!": ("Negation is written with the word not", "!"),
}
_ESCAPE = re.compile(r"\\(?:([ntr0\\\"'])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
_SIMPLE_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\", '"': '"', "'": "'"}


def tokenize(text: str) -> list[ExpressionToken]:
    """Return the tokens of an expression, the last of which is its end.

    Raises `ExpressionError`.
    """
    _check_text(text)
    tokens: list[ExpressionToken] = []
    at = _skip_space(text, 0)
    while at < len(text):
        tokens.append(_next_token(text, at, tokens[-1] if tokens else None))
        at = _skip_space(text, tokens[-1].stop)
    return [*tokens, ExpressionToken("end", "", len(text.rstrip()), len(text.rstrip()))]


def _check_text(text: str) -> None:
    if len(text) > MAX_EXPRESSION_LENGTH:
        raise ExpressionError(
            f"A breakpoint has at most {MAX_EXPRESSION_LENGTH} characters, and this one has "
            f"{len(text)}.",
            f"{text[:60]}…",
            60,
            61,
        )
    for at, character in enumerate(text):
        if "\ud800" <= character <= "\udfff":
            raise ExpressionError("This character is not valid UTF-8.", text, at, at + 1)


def _skip_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _next_token(text: str, at: int, before: ExpressionToken | None) -> ExpressionToken:
    if before is not None and _precedes_glob(before) and (glob := _GLOB.match(text, at)):
        return ExpressionToken("glob", glob[0], at, glob.end())
    if text[at] in "\"'":
        return _read_text(text, at)
    patterns: tuple[tuple[TokenKind, re.Pattern[str]], ...] = (
        ("word", _IDENTIFIER),
        ("number", _NUMBER),
        ("op", _OPERATOR),
    )
    for sort, pattern in patterns:
        if piece := pattern.match(text, at):
            return ExpressionToken(sort, piece[0], at, piece.end())
    raise _unexpected_character(text, at)


def _precedes_glob(token: ExpressionToken) -> bool:
    return (token.kind, token.value) in (("op", "@"), ("word", "finding"))


def _unexpected_character(text: str, at: int) -> ExpressionError:
    hint, sign = _OPERATOR_HINTS.get(text[at], ("", ""))
    if not hint:
        return ExpressionError("This character has no meaning here.", text, at, at + 1)
    stop = at + 2 if text[at : at + 2] == sign * 2 else at + 1
    return ExpressionError(f"{hint}.", text, at, stop)


def _read_text(text: str, start: int) -> ExpressionToken:
    """Read a text in single or double quotes."""
    quote, at, parts = text[start], start + 1, []
    while at < len(text) and text[at] != quote:
        if text[at] == "\\":
            character, at = _read_escape(text, at)
            parts.append(character)
        else:
            parts.append(text[at])
            at += 1
    if at >= len(text):
        raise ExpressionError(
            f"This text has no end: the closing {quote} is missing.", text, start, len(text)
        )
    return ExpressionToken("text", "".join(parts), start, at + 1)


def _read_escape(text: str, at: int) -> tuple[str, int]:
    found = _ESCAPE.match(text, at)
    if found is None:
        raise ExpressionError(
            "This escape is unknown.",
            text,
            at,
            min(at + 2, len(text)),
            hint=r"The escapes are \n \t \r \0 \\ \" \' \xHH \uHHHH \UHHHHHHHH.",
        )
    if found[1]:
        return _SIMPLE_ESCAPES[found[1]], found.end()
    code = int(found[2] or found[3] or found[4], 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise ExpressionError("This character does not exist.", text, at, found.end())
    return chr(code), found.end()


_MAX_EXACT_DIGITS = 15
"""Digits that a float holds exactly."""


def read_operand(text: str, tokens: Sequence[ExpressionToken], at: int) -> tuple[Operand, int]:
    """Return the operand at a token and its number of tokens. Raises `ExpressionError`."""
    token = tokens[at]
    if token.kind == "word" and token.value in VALUE_NAMES:
        return Name(token.value), 1
    if token.kind == "word":
        raise _unknown_name(text, token)
    return read_constant(text, tokens, at)


def read_constant(text: str, tokens: Sequence[ExpressionToken], at: int) -> tuple[Operand, int]:
    """Return the constant at a token and its number of tokens. Raises `ExpressionError`."""
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
            f"{unit.value} is not a unit of memory.",
            text,
            unit.start,
            unit.stop,
            hint=f"Did you mean {near[0]}?" if near else f"The units are {known}.",
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
        raise ExpressionError("This is not a number.", text, token.start, token.stop)
    return value


def _expected_text(token: ExpressionToken) -> str:
    if token.kind == "end":
        return "The expression ends where a name or a value is expected."
    return "A name or a value is expected here."


def _unknown_name(text: str, token: ExpressionToken) -> ExpressionError:
    if token.value in KEYWORDS or token.value in OBSERVATIONS or token.value == FINDING:
        reason = f"A name or a value is expected here, not {token.value}."
        return ExpressionError(reason, text, token.start, token.stop)
    near = _nearest_name(token.value)
    hint = f"Did you mean {near}?" if near else f"The names are {', '.join(ALL_NAMES)}."
    reason = f"{token.value} is not a known name."
    return ExpressionError(reason, text, token.start, token.stop, hint=hint)


def _nearest_name(word: str) -> str | None:
    if any(word in VALUE_NAMES[name].choices for name in VALUE_NAMES):
        return f'"{word}", in quotes'
    near = difflib.get_close_matches(word.lower().replace("_", "-"), ALL_NAMES, 1, 0.6)
    near = near or difflib.get_close_matches(word.lower(), ALL_NAMES, 1, 0.6)
    return near[0] if near else None


PlacedOperand = tuple[ExpressionToken, Operand]


def check_comparison(text: str, left: PlacedOperand, op: str, right: PlacedOperand) -> None:
    """Raise `ExpressionError` unless `op` can compare the two sides."""
    if not isinstance(left[1], Name) and not isinstance(right[1], Name):
        raise _span_error(text, left[0], right[0], "Neither side of this comparison is a name.")
    kinds = _operand_kind(left[1]), _operand_kind(right[1])
    if not _are_comparable(left[1], right[1]):
        reason = f"{_placed_text(left)} is {kinds[0]}, and {_placed_text(right)} is {kinds[1]}."
        raise _span_error(text, left[0], right[0], reason)
    if ValueKind.TEXT in kinds and op not in ("==", "!="):
        reason = "Texts can only be compared with == and !=."
        raise _span_error(text, left[0], right[0], reason)
    for name, value in ((left, right), (right, left)):
        _check_choice(text, name[1], value)


def check_membership(
    text: str, token: ExpressionToken, first: Operand, members: Sequence[PlacedOperand]
) -> Member | Contains:
    """Return the condition `first in members`. Raises `ExpressionError`."""
    if len(members) == 1 and isinstance(members[0][1], Name):
        return _check_contains(text, (token, first), members[0])
    if not isinstance(first, Name):
        raise _span_error(text, token, token, "A name is expected before in, and a list after it.")
    values: list[Number | Text] = []
    for member in members:
        value = member[1]
        assert not isinstance(value, Name)
        if not _are_comparable(first, value):
            reason = (
                f"{first.name} is {_operand_kind(first)}, and {_placed_text(member)} is "
                f"{_operand_kind(value)}."
            )
            raise _span_error(text, member[0], member[0], reason)
        _check_choice(text, first, member)
        values.append(value)
    return Member(first, tuple(values))


def _check_contains(text: str, part: PlacedOperand, whole: PlacedOperand) -> Contains:
    name = whole[1]
    assert isinstance(name, Name)
    if not isinstance(part[1], Text) or VALUE_NAMES[name.name].kind is not ValueKind.TEXT:
        reason = f"in {name.name} needs a text in quotes before it, and a name that is a text."
        raise _span_error(text, part[0], whole[0], reason)
    return Contains(part[1], name)


def _operand_kind(value: Operand) -> ValueKind:
    if isinstance(value, Name):
        return VALUE_NAMES[value.name].kind
    if isinstance(value, Text):
        return ValueKind.TEXT
    return ValueKind.BYTES if value.unit else ValueKind.NUMBER


def _are_comparable(left: Operand, right: Operand) -> bool:
    """Return whether two operands can be compared; a number without unit may be bytes."""
    kinds = {_operand_kind(left), _operand_kind(right)}
    if len(kinds) == 1:
        return True
    plain = any(isinstance(side, Number) and not side.unit for side in (left, right))
    return kinds == {ValueKind.NUMBER, ValueKind.BYTES} and plain


def _check_choice(text: str, name: Operand, value: PlacedOperand) -> None:
    """Refuse a text that is not one of the name's choices."""
    written = value[1]
    if not isinstance(name, Name) or not isinstance(written, Text):
        return
    choices = VALUE_NAMES[name.name].choices
    if not choices or written.value in choices:
        return
    near = difflib.get_close_matches(written.value, choices, 1)
    listed = ", ".join(f'"{choice}"' for choice in choices)
    raise ExpressionError(
        f"{name.name} is never this; it is one of {listed}.",
        text,
        value[0].start,
        value[0].stop,
        hint=f'Did you mean "{near[0]}"?' if near else None,
    )


def _placed_text(placed: PlacedOperand) -> str:
    value = placed[1]
    return value.name if isinstance(value, Name) else operand_text(value)


def _span_error(
    text: str, first: ExpressionToken, last: ExpressionToken, reason: str
) -> ExpressionError:
    return ExpressionError(reason, text, first.start, last.stop)


MAX_DEPTH = 50
"""Largest nesting of parentheses and "not"s."""

MAX_WILDCARDS = 8
"""Most wildcards in a module name: the cost of a match grows exponentially with them."""


def parse(text: str, *, finding_ids: Collection[str] | None = None) -> Expression:
    """Parse an expression. Raises `ExpressionError`.

    With `finding_ids`, a `finding` pattern that matches none of them is refused.
    """
    return Parser(text, tokenize(text), finding_ids).parse()


class Parser:
    """Recursive-descent parser of one expression; each method consumes the tokens that it reads."""

    def __init__(
        self, text: str, tokens: Sequence[ExpressionToken], finding_ids: Collection[str] | None
    ) -> None:
        self._text, self._tokens, self._at = text, tokens, 0
        self._depth = 0
        self._finding_ids = finding_ids

    # -- the grammar -----------------------------------------------------------------------------

    def parse(self) -> Expression:
        """Parse the whole text."""
        if self._is_at_end():
            raise self._error("There is no condition here.", hint=_EXAMPLE)
        tree = self.expression()
        if not self._is_at_end():
            raise self._trailing_error()
        return tree

    def expression(self) -> Expression:
        """Parse conditions joined with "or"."""
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
            raise self._error(f"More than {MAX_DEPTH} nested parentheses and nots.")
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
                f"{token.value} is a complete condition and cannot be compared.", token
            )
        if not self._accept("op", "@"):
            return ObservationCondition(token.value)
        if self._current.kind != "glob":
            raise self._error(
                "A module name is expected after @; * matches one part of it.",
                hint=f"For example {token.value} @ layers.*.self_attn",
            )
        if count_wildcards(self._current.value) > MAX_WILDCARDS:
            raise self._error(f"A module name has at most {MAX_WILDCARDS} wildcards.")
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
                "The id of a finding is expected after finding; * matches any text.",
                hint="For example finding mask.*, or finding * >= warning",
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
        if ids is None or any(fnmatchcase(finding_id, pattern.value) for finding_id in ids):
            return
        raise self._error(
            "No finding id matches this.",
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
            raise self._bare_value_error(first_token)
        return parts[0] if len(parts) == 1 else And(tuple(parts))

    def _accept_not_in(self) -> bool:
        if not self._accept("word", "not"):
            return False
        if not self._accept("word", "in"):
            raise self._error("in is expected after a value and not.")
        return True

    def _members(self) -> list[tuple[ExpressionToken, Operand]]:
        """Parse the right side of "in": a name, or constants in parentheses."""
        opening = self._current
        if not self._accept("op", "("):
            return [(opening, self._operand())]
        members = [(self._current, self._constant())]
        while self._accept("op", ","):
            if (self._current.kind, self._current.value) == ("op", ")"):
                break
            members.append((self._current, self._constant()))
        if not self._accept("op", ")"):
            if self._is_at_end():
                raise self._error("This parenthesis is not closed.", opening)
            raise self._error("The values of a list are separated by commas.")
        return members

    # -- operands --------------------------------------------------------------------------------

    def _operator(self) -> str | None:
        token = self._current
        if token.kind == "op" and token.value in COMPARISONS:
            return self._advance().value
        return None

    def _operand(self) -> Operand:
        operand, n_tokens = read_operand(self._text, self._tokens, self._at)
        self._at += n_tokens
        return operand

    def _constant(self) -> Operand:
        constant, n_tokens = read_constant(self._text, self._tokens, self._at)
        self._at += n_tokens
        return constant

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
            return self._error(f"Only {', '.join(OBSERVATIONS)} can be followed by @.")
        if token.value == ")":
            return self._error("This parenthesis was never opened.")
        return self._error(
            "The condition before this is complete: and, or, or the end is expected here.",
            hint=_suggest(token, ("and", "or")),
        )

    def _bare_value_error(self, token: ExpressionToken) -> ExpressionError:
        return self._error(
            f"{token.value or 'This'} is a value, not a condition.",
            token,
            hint="Compare it, for example entropy > 3.",
        )


_EXAMPLE = 'For example entropy > 3 and step > 2, or token == "\\n".'


def _flatten(kind: type[And] | type[Or], parts: Sequence[Expression]) -> tuple[Expression, ...]:
    """Flatten nested chains of the same kind."""
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
