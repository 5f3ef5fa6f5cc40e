"""Tokenizer and parser of breakpoint expressions.

    expression  = either, { "or", either } ;
    either      = condition, { "and", condition } ;
    condition   = "not", condition | "(", expression, ")" | observation | finding | comparison ;

The whole grammar is in docs/breakpoints.md. Invalid text raises `ExpressionError`, which points at
the place; the text never runs as Python.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, NoReturn

from flexinspect.breakpoints import names
from flexinspect.breakpoints.syntax_tree import (
    And,
    Compare,
    Expression,
    ExpressionError,
    FindingCondition,
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
from flexinspect.core.text import did_you_mean

MAX_EXPRESSION_LENGTH = 2000  # length of the longest expression, in characters
MAX_DEPTH = 50  # largest nesting of parentheses and "not"s
MAX_WILDCARDS = 8  # in a module name: the cost of a match grows exponentially with them
_MAX_EXACT_DIGITS = 15  # digits that a float holds exactly


def parse(text: str, *, finding_ids: Collection[str] | None = None) -> Expression:
    """Parse an expression. Raises `ExpressionError`.

    With `finding_ids`, a `finding` pattern that matches none of them is refused.
    """
    return _Parser(text, finding_ids).parse()


# -- tokens ----------------------------------------------------------------------------------------


class _Token(NamedTuple):
    """A token, from `start` to `stop` in the text.

    A glob is a name with wildcards, which follows `@` or `finding`.
    """

    kind: Literal["word", "number", "text", "op", "glob", "end"]
    value: str
    start: int
    stop: int


_GLOB = re.compile(r"(?:(?!!=)[^\s()\"',@<>=])+")
_TOKEN = re.compile(
    r"""(?P<word>[^\W\d]\w*(?:-[^\W\d]\w*)*)
    |(?P<number>[+-]?(?:\d+(?:_\d+)*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)
    |(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<op>==|!=|<=|>=|<|>|@|\(|\)|\[|\]|,)""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\(?:[ntr0\\\"']|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|(.|$))", re.S
)
_OPERATOR_HINTS = {
    "=": "A comparison is written with two signs: ==.",
    "&": "Conditions are joined with the word and.",
    "|": "Conditions are joined with the word or.",
    "!": "Negation is written with the word not.",
}


def _tokenize(text: str) -> list[_Token]:
    """Return the tokens of an expression, the last of which is its end."""
    if len(text) > MAX_EXPRESSION_LENGTH:
        reason = f"A breakpoint has at most {MAX_EXPRESSION_LENGTH} characters, and this one has "
        raise ExpressionError(f"{reason}{len(text)}.", f"{text[:60]}…", 60, 61)
    if surrogate := re.search("[\ud800-\udfff]", text):
        raise ExpressionError("This character is not valid UTF-8.", text, *surrogate.span())
    tokens: list[_Token] = []
    at, end = _skip_space(text, 0), len(text.rstrip())
    while at < len(text):
        tokens.append(_next_token(text, at, tokens[-1].value if tokens else ""))
        at = _skip_space(text, tokens[-1].stop)
    return [*tokens, _Token("end", "", end, end)]


def _skip_space(text: str, at: int) -> int:
    return len(text) - len(text[at:].lstrip())


def _next_token(text: str, at: int, before: str) -> _Token:
    if before in ("@", names.FINDING) and (glob := _GLOB.match(text, at)):
        return _Token("glob", glob[0], at, glob.end())
    match = _TOKEN.match(text, at)
    if match is None:
        raise _unexpected_character(text, at)
    kind, value = match.lastgroup, match[0]
    if kind == "text":
        value = _ESCAPE.sub(lambda escape: _unescape(text, at + 1, escape), value[1:-1])
    return _Token(kind, value, at, match.end())  # type: ignore[arg-type]  # a group of _TOKEN


def _unexpected_character(text: str, at: int) -> ExpressionError:
    sign, stop = text[at], at + 1
    reason = _OPERATOR_HINTS.get(sign, "This character has no meaning here.")
    if sign in "\"'":
        reason, stop = f"This text has no end: the closing {sign} is missing.", len(text)
    elif sign in _OPERATOR_HINTS and text.startswith(sign * 2, at):
        stop += 1
    return ExpressionError(reason, text, at, stop)


def _unescape(text: str, start: int, escape: re.Match[str]) -> str:
    """Return the character of an escape in the text in quotes that begins at `start`."""
    place = start + escape.start(), start + escape.end()
    if escape[1] is not None:
        hint = r"The escapes are \n \t \r \0 \\ \" \' \xHH \uHHHH \UHHHHHHHH."
        raise ExpressionError("This escape is unknown.", text, *place, hint=hint)
    try:
        character = codecs.decode(escape[0], "unicode_escape")
        character.encode()  # fails for half of a surrogate pair
    except UnicodeError:
        raise ExpressionError("This character does not exist.", text, *place) from None
    return character


# -- the parser ------------------------------------------------------------------------------------


class _Placed(NamedTuple):
    """An operand and its first token."""

    token: _Token
    operand: Operand


class _Parser:
    """Recursive-descent parser of one expression; each method consumes the tokens that it reads."""

    def __init__(self, text: str, finding_ids: Collection[str] | None) -> None:
        self._text, self._finding_ids = text, finding_ids
        self._tokens, self._at, self._depth = _tokenize(text), 0, 0

    def parse(self) -> Expression:
        """Parse the whole text."""
        if self._is_at_end():
            hint = 'For example entropy > 3 and step > 2, or token == "\\n".'
            self._refuse("There is no condition here.", hint=hint)
        tree = self._expression()
        if not self._is_at_end():
            self._refuse_rest()
        return tree

    def _expression(self) -> Expression:
        return self._chain("or", Or, lambda: self._chain("and", And, self._condition))

    def _chain(
        self, word: str, kind: type[And] | type[Or], read: Callable[[], Expression]
    ) -> Expression:
        """Parse conditions joined with a word; a part of the same kind is merged into the chain."""
        first = read()
        parts = [first]
        while self._accept(word):
            parts.append(read())
        if len(parts) == 1:
            return first
        nested = (part.parts if isinstance(part, kind) else (part,) for part in parts)
        return kind(tuple(condition for conditions in nested for condition in conditions))

    def _condition(self) -> Expression:
        opening = self._current
        if self._accept("not"):
            return Not(self._nested(self._condition))
        if self._accept("("):
            inner = self._nested(self._expression)
            self._close(opening, self._refuse_rest)
            return inner
        if opening.kind == "word" and opening.value in names.OBSERVATIONS:
            return self._observation()
        return self._finding() if self._accept(names.FINDING) else self._comparison()

    def _nested(self, read: Callable[[], Expression]) -> Expression:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            opening = self._tokens[self._at - 1]
            self._refuse(f"More than {MAX_DEPTH} nested parentheses and nots.", opening)
        inner = read()
        self._depth -= 1
        return inner

    def _close(self, opening: _Token, refuse: Callable[[], NoReturn]) -> None:
        """Parse a closing parenthesis; call `refuse` for anything else but the end."""
        if self._accept(")"):
            return
        if self._is_at_end():
            self._refuse("This parenthesis is not closed.", opening)
        refuse()

    def _observation(self) -> ObservationCondition:
        token = self._advance()
        if self._is_operator():
            self._refuse(f"{token.value} is a complete condition and cannot be compared.", token)
        if not self._accept("@"):
            return ObservationCondition(token.value)
        if self._current.kind != "glob":
            self._refuse(
                "A module name is expected after @; * matches one part of it.",
                hint=f"For example {token.value} @ layers.*.self_attn",
            )
        if count_wildcards(self._current.value) > MAX_WILDCARDS:
            self._refuse(f"A module name has at most {MAX_WILDCARDS} wildcards.")
        return ObservationCondition(token.value, self._advance().value)

    def _finding(self) -> FindingCondition:
        pattern, ids = "*", self._finding_ids
        if self._current.kind == "glob":
            pattern = self._current.value
            if ids is not None and not any(fnmatchcase(id_, pattern) for id_ in ids):
                other = "flexinspect findings --help lists all ids."
                hint = did_you_mean(pattern, sorted(ids), other)
                self._refuse("No finding id matches this.", hint=hint)
            self._advance()
        elif not self._is_operator():
            self._refuse(
                "The id of a finding is expected after finding; * matches any text.",
                hint="For example finding mask.*, or finding * >= warning",
            )
        if not self._is_operator():
            return FindingCondition(pattern)
        op, severity = self._advance().value, self._current
        if severity.kind not in ("word", "text") or severity.value not in names.SEVERITIES:
            reason = f"A finding is compared with a severity: {', '.join(names.SEVERITIES)}."
            self._refuse(reason, hint=did_you_mean(severity.value, names.SEVERITIES))
        return FindingCondition(pattern, op, self._advance().value)

    def _comparison(self) -> Expression:
        left = first = self._operand()
        is_negated = self._accept("not")
        if self._accept("in"):
            inner = self._membership(left)
            return Not(inner) if is_negated else inner
        if is_negated:
            self._refuse("in is expected after a value and not.")
        parts: list[Compare] = []
        while self._is_operator():
            op, right = self._advance().value, self._operand()
            self._check_comparison(left, op, right)
            parts.append(Compare(left.operand, op, right.operand))
            left = right
        if not parts:
            self._refuse(
                f"{first.token.value or 'This'} is a value, not a condition.",
                first.token,
                hint="Compare it, for example entropy > 3.",
            )
        return parts[0] if len(parts) == 1 else And(tuple(parts))

    def _membership(self, first: _Placed) -> Compare:
        """Parse the right side of "in": a name, or constants in parentheses."""
        opening = self._current
        if not self._accept("("):
            whole = self._operand()
            if isinstance(whole.operand, Name):
                if (
                    not isinstance(first.operand, Text)
                    or _kind(whole.operand) is not names.ValueKind.TEXT
                ):
                    reason = f"in {whole.operand.name} needs a text in quotes before it, and a name"
                    self._refuse(f"{reason} that is a text.", first.token, whole.token)
                return Compare(first.operand, "in", whole.operand)
            members = [whole]
        else:
            members = [self._constant()]
            while self._accept(",") and not self._is(")"):
                members.append(self._constant())
            reason = "The values of a list are separated by commas."
            self._close(opening, lambda: self._refuse(reason))
        name, values = first.operand, [member.operand for member in members]
        if not isinstance(name, Name):
            self._refuse("A name is expected before in, and a list after it.", first.token)
        for member in members:
            if not _are_comparable(name, member.operand):
                self._refuse(_describe_kinds(name, member.operand), member.token)
            self._check_choice(name, member)
        return Compare(name, "in", tuple(one for one in values if not isinstance(one, Name)))

    def _check_comparison(self, left: _Placed, op: str, right: _Placed) -> None:
        one, other, reason = left.operand, right.operand, ""
        if not isinstance(one, Name) and not isinstance(other, Name):
            reason = "Neither side of this comparison is a name."
        elif not _are_comparable(one, other):
            reason = _describe_kinds(one, other)
        elif _kind(one) is names.ValueKind.TEXT and op not in ("==", "!="):
            reason = "Texts can only be compared with == and !=."
        if reason:
            self._refuse(reason, left.token, right.token)
        self._check_choice(one, right)
        self._check_choice(other, left)

    def _check_choice(self, name: Operand, value: _Placed) -> None:
        """Refuse a text that is not one of the name's choices."""
        if not isinstance(name, Name) or not isinstance(value.operand, Text):
            return
        choices, written = names.VALUE_NAMES[name.name].choices, value.operand.value
        if choices and written not in choices:
            quoted = [f'"{choice}"' for choice in choices]
            reason = f"{name.name} is never this; it is one of {', '.join(quoted)}."
            self._refuse(reason, value.token, hint=did_you_mean(f'"{written}"', quoted))

    def _operand(self) -> _Placed:
        token = self._current
        if token.kind != "word":
            return self._constant()
        if token.value not in names.VALUE_NAMES:
            self._refuse_name(token.value)
        return _Placed(self._advance(), Name(token.value))

    def _constant(self) -> _Placed:
        token = self._current
        if token.kind == "text":
            return _Placed(self._advance(), Text(token.value))
        if self._is_at_end():
            self._refuse("The expression ends where a name or a value is expected.")
        if token.kind != "number":
            self._refuse("A name or a value is expected here.")
        number = self._parse_number(self._advance())
        unit = self._current
        if unit.kind != "word" or unit.value in (
            *names.KEYWORDS,
            *names.VALUE_NAMES,
            *names.OBSERVATIONS,
        ):
            return _Placed(token, Number(number))
        if unit.value not in names.UNITS:
            hint = did_you_mean(unit.value, names.UNITS, f"The units are {', '.join(names.UNITS)}.")
            self._refuse(f"{unit.value} is not a unit of memory.", hint=hint)
        return _Placed(token, Number(number, self._advance().value))

    def _parse_number(self, token: _Token) -> float:
        written = token.value.replace("_", "")
        digits = written.lstrip("+-")
        if digits.isdecimal() and len(digits) <= _MAX_EXACT_DIGITS:
            return int(written)
        value = float(written)
        if math.isinf(value):
            self._refuse("This is not a number.", token)
        return value

    @property
    def _current(self) -> _Token:
        return self._tokens[self._at]

    def _is_at_end(self) -> bool:
        return self._current.kind == "end"

    def _advance(self) -> _Token:
        self._at += 1
        return self._tokens[self._at - 1]

    def _is(self, value: str) -> bool:
        return self._current.kind in ("word", "op") and self._current.value == value

    def _is_operator(self) -> bool:
        return self._current.kind == "op" and self._current.value in names.COMPARISONS

    def _accept(self, value: str) -> bool:
        is_next = self._is(value)
        self._at += is_next
        return is_next

    def _refuse(
        self, reason: str, first: _Token | None = None, last: _Token | None = None, hint: str = ""
    ) -> NoReturn:
        """Raise an error that underlines the tokens from `first` (default: this one) to `last`."""
        first = first or self._current
        stop = (last or first).stop
        raise ExpressionError(reason, self._text, first.start, stop, hint=hint)

    def _refuse_rest(self) -> NoReturn:
        """Refuse the token after a complete condition."""
        if self._is("@"):
            self._refuse(f"Only {', '.join(names.OBSERVATIONS)} can be followed by @.")
        if self._is(")"):
            self._refuse("This parenthesis was never opened.")
        self._refuse(
            "The condition before this is complete: and, or, or the end is expected here.",
            hint=did_you_mean(self._current.value, ("and", "or")),
        )

    def _refuse_name(self, word: str) -> NoReturn:
        if word in (*names.KEYWORDS, *names.OBSERVATIONS, names.FINDING):
            self._refuse(f"A name or a value is expected here, not {word}.")
        hint = f'Did you mean "{word}", in quotes?'
        if not any(word in name.choices for name in names.VALUE_NAMES.values()):
            known = f"The names are {', '.join(names.ALL_NAMES)}."
            dashed = word.lower().replace("_", "-")
            hint = did_you_mean(
                dashed, names.ALL_NAMES, did_you_mean(word.lower(), names.ALL_NAMES, known)
            )
        self._refuse(f"{word} is not a known name.", hint=hint)


def _kind(operand: Operand) -> names.ValueKind:
    if isinstance(operand, Name):
        return names.VALUE_NAMES[operand.name].kind
    if isinstance(operand, Text):
        return names.ValueKind.TEXT
    return names.ValueKind.BYTES if operand.unit else names.ValueKind.NUMBER


def _are_comparable(left: Operand, right: Operand) -> bool:
    """Return whether two operands can be compared; a number without unit may be bytes."""
    kinds = {_kind(left), _kind(right)}
    has_plain_number = any(isinstance(side, Number) and not side.unit for side in (left, right))
    return len(kinds) == 1 or (
        kinds == {names.ValueKind.NUMBER, names.ValueKind.BYTES} and has_plain_number
    )


def _describe_kinds(*operands: Operand) -> str:
    return f"{', and '.join(f'{operand_text(one)} is {_kind(one)}' for one in operands)}."
