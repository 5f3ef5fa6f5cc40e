"""Printing the results of commands: JSON, escaped lines, and Rich's consoles."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import asdict

from flexinspect.core.errors import FlexInspectError
from flexinspect.core.text import escape_unprintable

if TYPE_CHECKING:
    from rich.console import Console
    from textual.strip import Strip

    from flexinspect.drawing.theme import Theme


def print_json(value: Any) -> None:
    """Print a value as strict JSON: NaN and infinities become strings, as do other types."""
    is_utf8 = str(sys.stdout.encoding).lower() in ("utf-8", "utf8")
    print(json.dumps(_strict(value), ensure_ascii=not is_utf8, indent=2, default=str))


def _strict(value: Any) -> Any:
    if isinstance(value, Struct):
        value = asdict(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, list | tuple) else value


def print_lines(lines: Iterable[str]) -> None:
    """Print lines with unprintable characters escaped."""
    for line in lines:
        print(escape_unprintable(line))


@contextmanager
def errors_as_json(enabled: bool, **empty_result: Any) -> Iterator[None]:
    """Print an error of the body as JSON too, after the keys of an empty result; raise it again."""
    try:
        yield
    except FlexInspectError as error:
        if enabled:
            facts = {"exit_code": error.exit_code, "error": error.message, "hint": error.hint}
            print_json({**empty_result, **facts})
        raise


def stdout_console() -> Console:
    """Return Rich's console on stdout without markup, so that the user's text stays unchanged.

    It raises `BrokenPipeError` when the reader of stdout has gone (`| head`), which the command
    line handles for every kind of output; Rich itself would end the process with exit code 1.
    """
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Output(highlight=False, markup=False)


def stderr_console() -> Console:
    """Return Rich's console on stderr without markup."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False)


def print_strips(strips: Iterable[Strip]) -> None:
    """Print a picture with the colours of the terminal, as plain text elsewhere."""
    console = _picture_console()
    for strip in strips:
        print(strip.render(console) if console.is_terminal else strip.text.rstrip())


def terminal_theme() -> Theme:
    """Return the theme for pictures on stdout, with as many colours as the terminal has."""
    from flexinspect.drawing.theme import Theme

    system = _picture_console().color_system
    return Theme("none" if system is None else "truecolor" if system == "truecolor" else "256")


def _picture_console() -> Console:
    """Return Rich's console on stdout, which respects NO_COLOR and FORCE_COLOR."""
    from rich.console import Console

    console = Console(file=sys.stdout)
    return Console(file=sys.stdout, color_system=None) if console.no_color else console
