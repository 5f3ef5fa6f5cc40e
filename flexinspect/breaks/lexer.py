"""From text to tokens. Every character is part of a token, between two, or an error."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from flexinspect.breaks.errors import ExpressionError

MAX_EXPRESSION_LENGTH = 2000
"""Characters of the longest expression."""

TokenKind = Literal["word", "number", "text", "op", "glob", "end"]


@dataclass(frozen=True, slots=True)
class ExpressionToken:
    """A piece of the text, from `start` to `stop`; `value` is what it says.

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
    "!": ("What must not hold is written with the word not", "!"),
}
_ESCAPE = re.compile(r"\\(?:([ntr0\\\"'])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
_SIMPLE_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\", '"': '"', "'": "'"}


def tokenize(text: str) -> list[ExpressionToken]:
    """Return the tokens of an expression, the last of which is its end.

    Raises `ExpressionError`.
    """
    _check_text(text)
    found: list[ExpressionToken] = []
    at = _skip_space(text, 0)
    while at < len(text):
        found.append(_next_token(text, at, found[-1] if found else None))
        at = _skip_space(text, found[-1].stop)
    return [*found, ExpressionToken("end", "", len(text.rstrip()), len(text.rstrip()))]


def _check_text(text: str) -> None:
    if len(text) > MAX_EXPRESSION_LENGTH:
        raise ExpressionError(
            f"A breakpoint has at most {MAX_EXPRESSION_LENGTH} characters, and this one has {len(text)}.",
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
    said, sign = _OPERATOR_HINTS.get(text[at], ("", ""))
    if not said:
        return ExpressionError("This character has no meaning here.", text, at, at + 1)
    stop = at + 2 if text[at : at + 2] == sign * 2 else at + 1
    return ExpressionError(f"{said}.", text, at, stop)


def _read_text(text: str, start: int) -> ExpressionToken:
    """Read a text between quotes of one kind."""
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
            hint=r"Known are \n \t \r \0 \\ \" \' \xHH \uHHHH \UHHHHHHHH.",
        )
    if found[1]:
        return _SIMPLE_ESCAPES[found[1]], found.end()
    code = int(found[2] or found[3] or found[4], 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise ExpressionError("There is no such character.", text, at, found.end())
    return chr(code), found.end()
