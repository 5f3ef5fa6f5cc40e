"""The console that commands print their results on."""

from __future__ import annotations

from typing import Any

from rich.console import Console


class Output(Console):
    """Rich's console on stdout without markup, so that the user's text is printed unchanged.

    Raises `BrokenPipeError` when the reader of stdout has gone (`| head`); Rich itself would end
    the process with exit code 1.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, **options)

    def on_broken_pipe(self) -> None:
        """Raise the error, which the command line handles for every kind of output."""
        raise BrokenPipeError
