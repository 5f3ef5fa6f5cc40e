"""The gradients panel: which paraphrase made this token, and which layers it went through."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from textual.strip import Strip

from flexinspect.panels.base import Help, Navigate, Panel, Picture, Request
from flexinspect.panels.parts import gradientspaint as draw
from flexinspect.panels.parts.gradientsdata import (
    GradientsData,
    describe_gradients,
    load_gradients,
    merge_separators,
)
from flexinspect.panels.source import Source
from flexinspect.widgets.lines import line, wrap_paragraph
from flexinspect.widgets.look import Theme

_MAX_CAVEAT_LINES = 4


@dataclass(frozen=True, slots=True)
class GradientsOptions:
    """`side`: who made the token (segments, tokens), or where in the model its gradient goes.

    `by` colours tokens: gradient times input, or the gradient's norm.
    """

    side: Literal["who", "where"] = "who"
    by: Literal["input", "norm"] = "input"


class GradientsPanel(Panel[GradientsData, GradientsOptions]):
    """The gradient of the step's token, at the words before it and at the model's parameters."""

    name: ClassVar[str] = "gradients"
    needs_tokens: ClassVar[bool] = True
    title: ClassVar[str] = "Gradients"
    help: ClassVar[Help] = Help(
        "The gradient of this token's log-probability (or margin): at each word before it, summed "
        "per paraphrase, and per layer and group of parameters.",
        "m flips between who (orange words speak for the token, blue ones against it; v: gradient "
        "times input, or its norm) and where (norms, light is high, red or ! is NaN, Inf or 0); "
        "the gate says whether the forward that was differentiated is the one that ran.",
        "Look for a paraphrase that speaks against the others, for an answer that the cue alone "
        "makes, and for layers with gradients of 0, NaN, or a hundred times their neighbours'.",
    )
    depends_on_size: ClassVar[bool] = True
    actions: ClassVar[tuple[str, ...]] = ("view.flip", "view.measure")

    def options(self) -> GradientsOptions:
        """Return who made the token, by gradient times input."""
        return GradientsOptions()

    def load(self, source: Source, request: Request[GradientsOptions]) -> GradientsData:
        """Read the gradients of the place's step, and the tokens that fit."""
        reach = max(request.width * request.height // 4, 64)
        return load_gradients(source, request.place, reach)

    def describe(self, data: GradientsData) -> list[str]:
        """Return the gate, segments, strongest tokens, norms, and what is wrong, in words."""
        return describe_gradients(data)

    def paint(
        self, data: GradientsData, request: Request[GradientsOptions], theme: Theme
    ) -> Picture:
        """Draw one of the two sides; behind a red gate only that it is red."""
        width, height = request.width, request.height
        strips = draw.draw_header(data, width, theme)
        if not data.record.matches_recorded:
            words = "Nothing is drawn: these would be the gradients of something else."
            strips += wrap_paragraph(words, width, theme.style("text"))
            return Picture(strips[:height], "not what ran", alarm=True)
        if request.options.side == "where":
            strips += draw.draw_norms(data, width, height - len(strips), theme)
        else:
            strips += _draw_attribution(data, request, height - len(strips), theme)
        return Picture(
            strips[:height], _format_note(data, request.options), alarm=bool(data.findings)
        )

    def on_action(
        self, action: str, data: GradientsData, request: Request[GradientsOptions]
    ) -> GradientsOptions | None:
        """`view.flip`: the other side; `view.measure`: colour tokens by the other measure."""
        options = request.options
        if action == "view.flip":
            return replace(options, side="where" if options.side == "who" else "who")
        if action == "view.measure":
            return replace(options, by="norm" if options.by == "input" else "input")
        return None

    def on_mouse(
        self,
        x: int,
        y: int,
        data: GradientsData,
        request: Request[GradientsOptions],
        *,
        click: bool,
    ) -> Navigate | None:
        """Click a layer: go to it. Click a word: go to its step, or look at it in the prompt."""
        if not click or not data.record.matches_recorded:
            return None
        top = len(draw.draw_header(data, request.width, Theme("none")))
        if request.options.side == "where":
            first = draw.first_visible_layer(data, request.height - top - 2)
            at = y - top - 1 + first
            rows = data.rows if at >= first else ()
            return Navigate(layer=rows[at].layer) if at < len(rows) else None
        return _navigate_to_token(x, y - top - _share_bars_height(data) - 1, data, request, top)


def _share_bars_height(data: GradientsData) -> int:
    return len(merge_separators(data.shares)) + 1


def _navigate_to_token(
    x: int, y: int, data: GradientsData, request: Request[GradientsOptions], top: int
) -> Navigate | None:
    room = _tokens_height(data, request, request.height - top)
    rows = draw.layout_rows(data, request.width)
    at = y + draw.first_visible_row(rows, data, room)
    word = rows[at].cell_at(x) if 0 <= y < room and at < len(rows) else None
    token = None if word is None else data.window.token(word.pos)
    if token is None:
        return None
    return Navigate(step=0, pos=token.pos) if token.step is None else Navigate(step=token.step)


def _tokens_height(data: GradientsData, request: Request[GradientsOptions], height: int) -> int:
    """Return the lines that words get: what bars and the caveat leave, and one line between."""
    n_words = len(_draw_caveat(request.width, height, Theme("none")))
    return max(height - _share_bars_height(data) - 1 - n_words, 0)


def _draw_caveat(width: int, height: int, theme: Theme) -> list[Strip]:
    strips = draw.draw_caveat(width, theme)
    return strips if len(strips) <= _MAX_CAVEAT_LINES and height > 12 else strips[:1]


def _draw_attribution(
    data: GradientsData, request: Request[GradientsOptions], height: int, theme: Theme
) -> list[Strip]:
    width = request.width
    strips = draw.draw_share_bars(data, width, theme)
    strips.append(line([], width, theme.style("text")))
    room = _tokens_height(data, request, height)
    by_norm = request.options.by == "norm"
    strips += draw.draw_tokens(data, width, room, theme, by_norm=by_norm) if room else []
    blank = max(height - len(strips) - len(_draw_caveat(width, height, theme)), 0)
    strips += [line([], width, theme.style("text"))] * blank
    return [*strips, *_draw_caveat(width, height, theme)]


def _format_note(data: GradientsData, options: GradientsOptions) -> str:
    what = "norms per layer" if options.side == "where" else f"by {options.by}"
    return f"{what} · gate {data.record.gate:.0e} · {data.record.wall_ms:.0f} ms"
