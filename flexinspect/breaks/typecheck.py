"""What may be compared with what."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from flexinspect.breaks.errors import ExpressionError
from flexinspect.breaks.lexer import Token
from flexinspect.breaks.tree import Contains, Member, Name, Number, Operand, Text, written
from flexinspect.breaks.words import WORDS, Kind

Placed = tuple[Token, Operand]


def comparison(text: str, left: Placed, op: str, right: Placed) -> None:
    """Raise `ExpressionError` unless both sides can be compared so."""
    if not isinstance(left[1], Name) and not isinstance(right[1], Name):
        raise _error(text, left[0], right[0], "Neither side of this comparison is a name.")
    kinds = _kind(left[1]), _kind(right[1])
    if not _agree(left[1], right[1]):
        said = f"{_words(left)} is {kinds[0]}, and {_words(right)} is {kinds[1]}."
        raise _error(text, left[0], right[0], said)
    if Kind.TEXT in kinds and op not in ("==", "!="):
        said = "Texts are equal (==) or not (!=); none is larger than another."
        raise _error(text, left[0], right[0], said)
    for name, value in ((left, right), (right, left)):
        _check_choice(text, name[1], value)


def membership(
    text: str, token: Token, first: Operand, members: Sequence[Placed]
) -> Member | Contains:
    """Return what `first in members` says. Raises `ExpressionError`."""
    if len(members) == 1 and isinstance(members[0][1], Name):
        return _contained(text, (token, first), members[0])
    if not isinstance(first, Name):
        raise _error(text, token, token, "Before in stands a name, and after it a list.")
    values: list[Number | Text] = []
    for member in members:
        value = member[1]
        assert not isinstance(value, Name)
        if not _agree(first, value):
            said = f"{first.name} is {_kind(first)}, and {_words(member)} is {_kind(value)}."
            raise _error(text, member[0], member[0], said)
        _check_choice(text, first, member)
        values.append(value)
    return Member(first, tuple(values))


def _contained(text: str, part: Placed, whole: Placed) -> Contains:
    name = whole[1]
    assert isinstance(name, Name)
    if not isinstance(part[1], Text) or WORDS[name.name].kind is not Kind.TEXT:
        said = f"Only a written text can be in {name.name}, and only if that is a text."
        raise _error(text, part[0], whole[0], said)
    return Contains(part[1], name)


def _kind(value: Operand) -> Kind:
    if isinstance(value, Name):
        return WORDS[value.name].kind
    if isinstance(value, Text):
        return Kind.TEXT
    return Kind.BYTES if value.unit else Kind.NUMBER


def _agree(left: Operand, right: Operand) -> bool:
    """Say whether two kinds go together: a number without unit may be bytes."""
    kinds = {_kind(left), _kind(right)}
    if len(kinds) == 1:
        return True
    plain = any(isinstance(side, Number) and not side.unit for side in (left, right))
    return kinds == {Kind.NUMBER, Kind.BYTES} and plain


def _check_choice(text: str, name: Operand, value: Placed) -> None:
    """Refuse a text that a name never is."""
    written = value[1]
    if not isinstance(name, Name) or not isinstance(written, Text):
        return
    choices = WORDS[name.name].choices
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


def _words(placed: Placed) -> str:
    value = placed[1]
    return value.name if isinstance(value, Name) else written(value)


def _error(text: str, first: Token, last: Token, reason: str) -> ExpressionError:
    return ExpressionError(reason, text, first.start, last.stop)
