"""What commands show on a terminal's stderr while they work: a bar, or a line that changes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flexinspect.core.text import escape_unprintable

if TYPE_CHECKING:
    from tqdm import tqdm


def open_bar(text: str, **options: Any) -> tqdm[Any]:
    """Return a bar that appears on a terminal after a second, and goes when it is closed.

    `options` are those of tqdm, such as the unit.
    """
    from tqdm import tqdm

    return tqdm(desc=text, delay=1.0, disable=None, leave=False, **options)


@contextmanager
def progress_bar(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar while the body runs; it calls the function with how much is done, of how much."""
    with open_bar(text) as bar:

        def update(n_done: int, total: int) -> None:
            bar.total = total
            bar.update(n_done - bar.n)

        yield update


@contextmanager
def share_bar(text: str) -> Iterator[Callable[[float], None]]:
    """Show a bar while the body runs; it calls the function with the share that is done."""
    with open_bar(text, total=100, bar_format="{desc}: {percentage:3.0f}%|{bar}|") as bar:

        def update(share: float) -> None:
            bar.update(round(100 * share) - bar.n)

        yield update


class ProgressLine:
    """A line on stderr that says what takes so long, and is wiped before the next one."""

    def __init__(self, *, is_shown: bool = True) -> None:
        self.is_shown = is_shown and sys.stderr.isatty()
        self._width = 0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_error: object) -> None:
        self.clear()

    def show(self, text: str) -> None:
        """Show a text in place of the last one."""
        if self.is_shown:
            self.clear()
            line = f"{escape_unprintable(text)} …"
            self._width = len(line)
            print(line, end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Wipe the line."""
        if self._width:
            print("\r" + " " * self._width, end="\r", file=sys.stderr, flush=True)
            self._width = 0
