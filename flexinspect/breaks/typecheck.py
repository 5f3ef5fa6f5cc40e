"""What may be compared with what."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from flexinspect.breaks.errors import ExpressionError
from flexinspect.breaks.lexer import ExpressionToken
from flexinspect.breaks.tree import Contains, Member, Name, Number, Operand, Text, operand_text
from flexinspect.breaks.words import VALUE_NAMES, ValueKind

PlacedOperand = tuple[ExpressionToken, Operand]


def check_comparison(text: str, left: PlacedOperand, op: str, right: PlacedOperand) -> None:
    """Raise `ExpressionError` unless both sides can be compared so."""
    if not isinstance(left[1], Name) and not isinstance(right[1], Name):
        raise _span_error(text, left[0], right[0], "Neither side of this comparison is a name.")
    kinds = _operand_kind(left[1]), _operand_kind(right[1])
    if not _are_comparable(left[1], right[1]):
        said = f"{_placed_text(left)} is {kinds[0]}, and {_placed_text(right)} is {kinds[1]}."
        raise _span_error(text, left[0], right[0], said)
    if ValueKind.TEXT in kinds and op not in ("==", "!="):
        said = "Texts are equal (==) or not (!=); none is larger than another."
        raise _span_error(text, left[0], right[0], said)
    for name, value in ((left, right), (right, left)):
        _check_choice(text, name[1], value)


def check_membership(
    text: str, token: ExpressionToken, first: Operand, members: Sequence[PlacedOperand]
) -> Member | Contains:
    """Return what `first in members` says. Raises `ExpressionError`."""
    if len(members) == 1 and isinstance(members[0][1], Name):
        return _check_contains(text, (token, first), members[0])
    if not isinstance(first, Name):
        raise _span_error(text, token, token, "Before in stands a name, and after it a list.")
    values: list[Number | Text] = []
    for member in members:
        value = member[1]
        assert not isinstance(value, Name)
        if not _are_comparable(first, value):
            said = f"{first.name} is {_operand_kind(first)}, and {_placed_text(member)} is {_operand_kind(value)}."
            raise _span_error(text, member[0], member[0], said)
        _check_choice(text, first, member)
        values.append(value)
    return Member(first, tuple(values))


def _check_contains(text: str, part: PlacedOperand, whole: PlacedOperand) -> Contains:
    name = whole[1]
    assert isinstance(name, Name)
    if not isinstance(part[1], Text) or VALUE_NAMES[name.name].kind is not ValueKind.TEXT:
        said = f"Only a written text can be in {name.name}, and only if that is a text."
        raise _span_error(text, part[0], whole[0], said)
    return Contains(part[1], name)


def _operand_kind(value: Operand) -> ValueKind:
    if isinstance(value, Name):
        return VALUE_NAMES[value.name].kind
    if isinstance(value, Text):
        return ValueKind.TEXT
    return ValueKind.BYTES if value.unit else ValueKind.NUMBER


def _are_comparable(left: Operand, right: Operand) -> bool:
    """Say whether two kinds go together: a number without unit may be bytes."""
    kinds = {_operand_kind(left), _operand_kind(right)}
    if len(kinds) == 1:
        return True
    plain = any(isinstance(side, Number) and not side.unit for side in (left, right))
    return kinds == {ValueKind.NUMBER, ValueKind.BYTES} and plain


def _check_choice(text: str, name: Operand, value: PlacedOperand) -> None:
    """Refuse a text that a name never is."""
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
