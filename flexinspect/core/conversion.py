"""Plain data (from JSON or TOML) as typed objects, with a sentence for data of another form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from flexinspect.core.environment import read_text
from flexinspect.core.errors import FlexInspectError, UsageError
from flexinspect.core.parsing import parse_json, parse_toml
from flexinspect.core.text import did_you_mean

T = TypeVar("T")


def convert(kind: type[T], data: Any, where: str, error: type[FlexInspectError] = UsageError) -> T:
    """Return data as an object of type `kind`; msgspec checks types, bounds and fields.

    Raises `error` with the invalid field, and with the known values or fields where they are few.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as invalid:
        reason, _, path = str(invalid).partition(" - at ")
        names = re.findall(r"\.(\w+)", path)
        place = f" in {'.'.join(names)}" if names else ""
        wrong = re.search(r"unknown field `(.*)`|enum value '(.*)'", reason)
        known = _known_values(kind, names) if wrong else ()
        listed = f" (known: {', '.join(known)})" if known else ""
        unknown = next((name for name in wrong.groups() if name is not None), "") if wrong else ""
        hint = did_you_mean(unknown, known) if unknown else ""
        raise error(f"{where} is not valid{place}: {reason}{listed}.", hint=hint) from invalid
    except UnicodeEncodeError as invalid:
        what = f"{where} is not valid: a text in it has half of a surrogate pair."
        raise error(what, hint="Save the file as UTF-8.") from invalid


def read_data(file: Path, what: str) -> Any:
    """Return the data of a TOML file, or of a JSON file, whose name ends in .json.

    Raises `UsageError` for a file that cannot be read or is neither; `what` names it.
    """
    text, is_json = read_text(file, what), file.suffix.lower() == ".json"
    try:
        return parse_json(text) if is_json else parse_toml(text)
    except ValueError as error:
        form, reason = "JSON" if is_json else "TOML", re.sub(r"\s+", " ", str(error))
        hint = f"A {what} is TOML, or JSON in a file whose name ends in .json."
        raise UsageError(f"{file} is not valid {form} ({reason}).", hint=hint) from error


def _known_values(kind: Any, path: Sequence[str]) -> Sequence[str]:
    """Return the values of the field at a path of names, or the fields of the object there."""
    for name in path:
        hint = get_type_hints(kind)[name]
        kind = next((one for one in get_args(hint) if hasattr(one, "__struct_fields__")), hint)
    literals = next((get_args(one) for one in get_args(kind) if get_args(one)), get_args(kind))
    return literals or kind.__struct_fields__


def parse_step_number(text: str) -> int | None:
    """Return the number that was typed, None for a word (or a number too large for a step)."""
    typed = text.strip()
    return int(typed) if typed.isascii() and typed.isdecimal() and len(typed) < 16 else None


_HTML_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


def script_json(value: Any) -> str:
    """Return JSON that may stand in a `<script>`: no text in it ends the script or opens a comment.

    Not even `</script>` or `<!--` does, because `<`, `>` and `&` are escaped.
    """
    return msgspec.json.encode(value).decode("utf-8").translate(_HTML_ESCAPES)
