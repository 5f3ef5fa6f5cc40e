"""What is wrong with an expression, with a mark under the place."""

from __future__ import annotations

from unicodedata import east_asian_width

from flexinspect.errors import UsageError


class ExpressionError(UsageError):
    """An expression that cannot be read; `start` and `stop` are the place in `text`.

    `reason` is the sentence alone, as an input field shows it below itself.
    """

    def __init__(
        self, reason: str, text: str, start: int, stop: int, *, hint: str | None = None
    ) -> None:
        shown = f"  {_printable(text)}"
        super().__init__(f"{reason}\n{shown}\n{_underline(text, start, stop)}", hint=hint)
        self.reason = reason
        self.text = text
        self.start, self.stop = start, stop

    def with_location(self, where: str) -> ExpressionError:
        """Return the same error, which says where the expression stands."""
        reason = f"{where}: {self.reason}"
        return ExpressionError(reason, self.text, self.start, self.stop, hint=self.hint)


def _printable(text: str) -> str:
    """Return the text in one line, each character of it in place of itself."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{MIDDLE DOT}" for c in text)


def _underline(text: str, start: int, stop: int) -> str:
    before = sum(map(_cell_width, text[:start]))
    return f"  {' ' * before}{'^' * max(sum(map(_cell_width, text[start:stop])), 1)}"


def _cell_width(character: str) -> int:
    return 2 if east_asian_width(character) in "WF" else 1
