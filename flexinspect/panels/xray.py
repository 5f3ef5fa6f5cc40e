"""The X-ray of a token in the text: which tokens it attends to, or which attend to it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace
from rich.style import Style

from flexinspect.core.text import format_ranges, format_share
from flexinspect.drawing.theme import Theme
from flexinspect.drawing.token_cells import TokenCell, token_style

Direction = Literal["off", "sees", "seen by"]
DIRECTIONS: tuple[Direction, ...] = ("off", "sees", "seen by")

WeightsOf = Literal["off", "head", "layer", "mean"]
"""Whose attention weights the tokens that are seen have: those of the place's head, the mean of the
heads of its layer, or of all stored layers."""
WEIGHTS: tuple[WeightsOf, ...] = ("off", "head", "layer", "mean")

State = Literal["open", "closed", "leaked", "lost", "unknown"]
SIGNS: Mapping[State, str] = {"open": "━", "leaked": "✖", "lost": "□", "unknown": "?"}
"""The signs below tokens, which also mark them without colours; closed ones have none."""

MAX_RANGES_CHARS = 200
WEIGHT_SIGNS = "▁▂▃▄▅▆▇█"
"""The signs of weights on a logarithmic scale: the last one is the heaviest token of the row, the
first one a tenth of an even share or less."""


class RowWeights(Struct, frozen=True):
    """The attention weights of a row, of the heads that `of` names, and how they were checked.

    `by_pos` has those of the window's tokens, `heaviest` (position, text, weight) the largest
    ones of the whole row, in descending order. `even` is the weight of every token if all had the
    same. Without weights, `reason` is a sentence; `is_mismatch` says that they are not what ran.
    """

    of: str = ""
    check: str = ""
    even: float = 1.0
    by_pos: Mapping[int, float] = {}
    heaviest: Sequence[tuple[int, str, float]] = ()
    reason: str = ""
    is_mismatch: bool = False

    def level(self, pos: int) -> int | None:
        """Return the index of a token's sign in `WEIGHT_SIGNS`, None without a weight."""
        weight, last = self.by_pos.get(pos), len(WEIGHT_SIGNS) - 1
        if weight is None or not self.heaviest:
            return None
        low, high = self.even / 10, self.heaviest[0][2]
        return round(last * math.log(max(weight, low) / low) / math.log(high / low))

    def summary(self) -> str:
        """Return one line: the check, then the heaviest tokens with their weights."""
        if self.reason:
            return f"{self.of}: {self.reason}" if self.of else self.reason
        tokens = ", ".join(f"“{text.strip() or text}” {own:.2g}" for _, text, own in self.heaviest)
        return f"{self.of} ({self.check}): {tokens}"

    def describe(self) -> Iterator[str]:
        """Yield lines of text: the check, then a line for each of the heaviest tokens."""
        if self.reason:
            yield self.summary()
            return
        yield f"Attention of {self.of} ({self.check}), the heaviest tokens:"
        for pos, text, weight in self.heaviest:
            yield f"  {format_share(weight):>8}  {pos:>6} '{text}'"


class XRay(Struct, frozen=True):
    """What a token sees, or what sees it, within a window of tokens.

    `pos` is the position of its row, `name` its text; `states` are those of the other positions.
    `n_open` of `n_keys` keys are open to the row, anywhere in the sequence. A position without a
    state was never an input of the model.
    """

    direction: Direction
    pos: int
    name: str
    states: Mapping[int, State]
    n_open: int
    n_keys: int
    weights: RowWeights | None = None

    def positions(self, state: State) -> list[int]:
        """Return the positions of the window in a state."""
        return [pos for pos, own in self.states.items() if own == state]

    def summary(self) -> str:
        """Return one line: what the token sees, and how that differs from the declared mask."""
        subject = f"row {self.pos} “{self.name}”"
        if self.direction == "sees":
            parts = [f"{subject} sees {self.n_open} of {self.n_keys} tokens"]
        else:
            parts = [f"{subject}: {self.n_open} of {self.n_keys} rows see it"]
        n_leaked, n_lost = len(self.positions("leaked")), len(self.positions("lost"))
        parts += [f"✖ {n_leaked} leaked, should be closed"] if n_leaked else []
        parts += [f"□ {n_lost} lost, should be open"] if n_lost else []
        return " · ".join(parts)

    def describe(self) -> Iterator[str]:
        """Yield lines of text: the summary, then the positions in each state."""
        yield f"{self.summary()}."
        for state in ("open", "leaked", "lost"):
            positions = self.positions(state)
            if positions:
                yield f"  {state}: {format_ranges(positions)[:MAX_RANGES_CHARS]}"
        if self.weights is not None:
            yield from self.weights.describe()

    def style(self, cell: TokenCell, theme: Theme, *, current: bool) -> Style:
        """Return the style of a token: lit if it is seen, by its weight if it has one, else dim."""
        level = None if self.weights is None else self.weights.level(cell.pos)
        if level is not None:
            cell = replace(cell, heat=level / (len(WEIGHT_SIGNS) - 1))
        match self.states.get(cell.pos, "closed"):
            case "open":
                return token_style(cell, theme, current=current)
            case "leaked":
                return theme.style("bad") + Style(reverse=True)
            case "lost":
                return theme.style("warn") + Style(underline=True, strike=theme.no_color)
            case _:
                return theme.style("strong" if current else "muted")
