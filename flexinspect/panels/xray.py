"""The X-ray of a token in the text: which tokens it attends to, or which attend to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from msgspec import Struct
from msgspec.structs import replace
from rich.style import Style

from flexinspect.core.text import format_ranges
from flexinspect.drawing.theme import Theme
from flexinspect.drawing.token_cells import TokenCell, display_text, token_style
from flexinspect.panels.base import TracePlace
from flexinspect.panels.panel_source import Source
from flexinspect.panels.token_window import TokenWindow
from flexinspect.records.step import TokenRecord

if TYPE_CHECKING:
    from flexinspect.panels.xray_weights import RowWeights

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


def _name(token: TokenRecord) -> str:
    text, _ = display_text(token.token, token.text, special=token.special)
    return text.strip() or text


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
            parts = [f"{subject} is seen by {self.n_open} of {self.n_keys} rows around it"]
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


def load_xray(
    source: Source,
    place: TracePlace,
    window: TokenWindow,
    direction: Direction,
    weights: WeightsOf = "off",
) -> XRay | None:
    """Return the X-ray of the place's token, None without recorded cells of its row.

    A token that was selected by its position has the row of this position; a token that the step
    chose has the newest row of the step, which predicted it. Raises `TraceError`.
    """
    if direction == "off":
        return None
    # Most of the time the X-ray is off, and needs neither numpy nor masks.
    from flexinspect.masks.viewport import CLOSED, LEAKED, LOST, OPEN, UNKNOWN
    from flexinspect.panels.mask import cell_states

    view = cell_states.load_mask_view(source, place)
    if view is None:
        return None
    names: dict[int, State] = {
        OPEN: "open",
        CLOSED: "closed",
        LEAKED: "leaked",
        LOST: "lost",
        UNKNOWN: "unknown",
    }
    rows = view.rows_of_step(place.step)
    newest = rows[-1] if rows else None
    row = newest if place.pos is None else cell_states.find_row(view, place.pos)
    if row is None:
        return None
    pos = int(view.positions[row])
    if direction == "sees":
        states = cell_states.row_states(view, row)[window.start : window.stop]
        positions = range(window.start, window.start + len(states))
        n_open, n_keys = view.row_count(row), max(pos + 1, view.row_count(row))
    else:
        is_near = (view.positions >= window.start) & (view.positions < window.stop)
        inside = is_near.nonzero()[0].tolist()
        near = range(inside[0], inside[-1] + 1) if inside else range(0)
        states = cell_states.column_states(view, pos, near)
        positions = view.positions[near.start : near.stop].tolist()
        n_open, n_keys = sum(names[s] in ("open", "leaked") for s in states.tolist()), len(near)
    token = window.token(pos)
    found = XRay(
        direction,
        pos,
        "" if token is None else _name(token),
        {at: names[state] for at, state in zip(positions, states.tolist(), strict=True)},
        n_open,
        n_keys,
    )
    if weights == "off":
        return found
    from flexinspect.panels.xray_weights import ONLY_SEES, RowWeights, load_weights

    if direction != "sees":
        return replace(found, weights=RowWeights(reason=ONLY_SEES))
    step = view.part_of(row).step_at(row).step
    return replace(found, weights=load_weights(source, place, window, step, pos, weights))
