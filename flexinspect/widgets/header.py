"""The header line: what runs, where in it we are, what capture costs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from textual.strip import Strip

from flexinspect.widgets.lines import Span, line
from flexinspect.widgets.look import Theme

SEPARATOR = " · "


def header(parts: Sequence[tuple[str, str, int]], width: int, theme: Theme) -> Strip:
    """Return (text, style name, importance) parts as one line.

    While they do not fit, the least important one (the highest number) is left out.
    """
    kept = [part for part in parts if part[0]]
    while len(kept) > 1 and _length(kept) > width:
        kept.remove(max(kept, key=lambda part: part[2]))
    spans: list[Span] = []
    for text, style, _ in kept:
        if spans:
            spans.append((SEPARATOR, theme.style("muted")))
        spans.append((text, theme.style(style)))
    return line(spans, width, theme.style("text"))


def _length(parts: Sequence[tuple[str, str, int]]) -> int:
    return sum(cell_len(text) for text, _, _ in parts) + len(SEPARATOR) * (len(parts) - 1)
