"""Text from a model or a trace, made safe for a terminal."""

from __future__ import annotations


def escape_unprintable(text: str) -> str:
    """Return `text` with everything that is not printable escaped as in Python, backslashes too.

    Nothing that came from a model can move the cursor, colour the screen or end a line.
    """
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(_escape_char(char) for char in text)


def _escape_char(char: str) -> str:
    if char.isprintable() and char != "\\":
        return char
    return char.encode("unicode_escape").decode()
