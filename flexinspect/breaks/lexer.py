"""From text to tokens. Every character is part of a token, between two, or an error."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from flexinspect.breaks.errors import ExpressionError

LONGEST = 2000
"""Characters of the longest expression."""

Sort = Literal["word", "number", "text", "op", "glob", "end"]


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of the text, from `start` to `stop`; `value` is what it says.

    A glob is a name with wildcards, which follows `@` or `finding`.
    """

    sort: Sort
    value: str
    start: int
    stop: int


_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[^\W\d]\w*(?:-[^\W\d]\w*)*")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:_\d+)*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_OPERATOR = re.compile(r"==|!=|<=|>=|<|>|@|\(|\)|\[|\]|,")
_GLOB = re.compile(r"(?:(?!!=)[^\s()\"',@<>=])+")
_INSTEAD = {
    "=": ("A comparison is written with two signs: ==", "="),
    "&": ("Conditions are joined with the word and", "&"),
    "|": ("Conditions are joined with the word or", "|"),
    "!": ("What must not hold is written with the word not", "!"),
}
_ESCAPE = re.compile(r"\\(?:([ntr0\\\"'])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
_PLAIN = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\", '"': '"', "'": "'"}


def tokens(text: str) -> list[Token]:
    """Return the tokens of an expression, the last of which is its end.

    Raises `ExpressionError`.
    """
    _check_text(text)
    found: list[Token] = []
    at = _skip(text, 0)
    while at < len(text):
        found.append(_next(text, at, found[-1] if found else None))
        at = _skip(text, found[-1].stop)
    return [*found, Token("end", "", len(text.rstrip()), len(text.rstrip()))]


def _check_text(text: str) -> None:
    if len(text) > LONGEST:
        raise ExpressionError(
            f"A breakpoint has at most {LONGEST} characters, and this one has {len(text)}.",
            f"{text[:60]}…",
            60,
            61,
        )
    for at, character in enumerate(text):
        if "\ud800" <= character <= "\udfff":
            raise ExpressionError("This character is not valid UTF-8.", text, at, at + 1)


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _next(text: str, at: int, before: Token | None) -> Token:
    if before is not None and _wants_glob(before) and (glob := _GLOB.match(text, at)):
        return Token("glob", glob[0], at, glob.end())
    if text[at] in "\"'":
        return _text(text, at)
    patterns: tuple[tuple[Sort, re.Pattern[str]], ...] = (
        ("word", _WORD),
        ("number", _NUMBER),
        ("op", _OPERATOR),
    )
    for sort, pattern in patterns:
        if piece := pattern.match(text, at):
            return Token(sort, piece[0], at, piece.end())
    raise _strange(text, at)


def _wants_glob(token: Token) -> bool:
    return (token.sort, token.value) in (("op", "@"), ("word", "finding"))


def _strange(text: str, at: int) -> ExpressionError:
    said, sign = _INSTEAD.get(text[at], ("", ""))
    if not said:
        return ExpressionError("This character has no meaning here.", text, at, at + 1)
    stop = at + 2 if text[at : at + 2] == sign * 2 else at + 1
    return ExpressionError(f"{said}.", text, at, stop)


def _text(text: str, start: int) -> Token:
    """Read a text between quotes of one kind."""
    quote, at, parts = text[start], start + 1, []
    while at < len(text) and text[at] != quote:
        if text[at] == "\\":
            character, at = _escape(text, at)
            parts.append(character)
        else:
            parts.append(text[at])
            at += 1
    if at >= len(text):
        raise ExpressionError(
            f"This text has no end: the closing {quote} is missing.", text, start, len(text)
        )
    return Token("text", "".join(parts), start, at + 1)


def _escape(text: str, at: int) -> tuple[str, int]:
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
        return _PLAIN[found[1]], found.end()
    code = int(found[2] or found[3] or found[4], 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise ExpressionError("There is no such character.", text, at, found.end())
    return chr(code), found.end()
