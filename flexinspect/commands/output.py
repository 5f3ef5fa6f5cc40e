"""What commands print on stdout in words and tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console


class Output(Console):
    """Rich's console on stdout, without markup, so that text of the user's is printed as it is.

    Raises `BrokenPipeError` when whoever read stdout has gone (`| head`); Rich itself would end the
    process with exit code 1.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, **options)

    def on_broken_pipe(self) -> None:
        """Let the command line end quietly, as for everything else that it prints."""
        raise BrokenPipeError
