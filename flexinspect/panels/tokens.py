"""Panel: the whole sequence as words, coloured by segment or by how sure the model was."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from textual.strip import Strip

from flexinspect.answers import matches
from flexinspect.panels.base import Go, Help, Panel, Picture, Place, Request
from flexinspect.panels.parts.sequence import Window, load_window, segment_at, words
from flexinspect.panels.source import Source
from flexinspect.records import TokenRecord
from flexinspect.text import visible
from flexinspect.trace.rows import GenerationRow
from flexinspect.widgets.lines import Span, line
from flexinspect.widgets.look import Look
from flexinspect.widgets.tokencells import Row, shown, word_style, wrap

Colour = Literal["probability", "entropy", "segment"]
COLOURS: tuple[Colour, ...] = ("probability", "entropy", "segment")
MOST_SHOWN = 200
"""Characters of an answer that are shown in its line."""


@dataclass(frozen=True, slots=True)
class TokensOptions:
    """`colour` of the generated tokens."""

    colour: Colour = "probability"


@dataclass(frozen=True, slots=True)
class TokensData:
    """The window, the generation, its answer so far, and whether that is one of the expected.

    `right` is None while it is not known: nothing was expected, or the generation goes on.
    """

    window: Window
    generation: GenerationRow
    answer: str
    right: bool | None
    place: Place


class TokensPanel(Panel[TokensData, TokensOptions]):
    """The sequence that was fed and made, token by token."""

    name = "tokens"
    title = "Tokens"
    help = Help(
        "The whole sequence that the model saw and made, a piece per token, a colour per segment.",
        "Generated tokens are coloured by how unsure the model was (v: probability, entropy, "
        "segment); the white one is the token of this step; special tokens are italic.",
        "A segment that begins one token early or late, a doubled BOS, a missing separator, "
        "and the first token where the answer turns away from what was expected.",
    )
    sized = True
    actions = ("view.measure",)

    def options(self) -> TokensOptions:
        """Return the options at the start."""
        return TokensOptions()

    def load(self, source: Source, request: Request[TokensOptions]) -> TokensData:
        """Read the tokens that fit around the place, and their steps."""
        place = request.place
        # Few tokens are shorter than two cells, so half of this many fill the panel.
        window = load_window(source, place, max(request.width * request.height // 4, 64))
        row = source.reader.generation(place.generation)
        answer = row.answer or _so_far(window)
        return TokensData(window, row, answer, _is_right(source, row), place)

    def describe(self, data: TokensData) -> list[str]:
        """Return segments with their texts, then the generated tokens with their numbers."""
        window = data.window
        lines = [f"{window.n_tokens} tokens in {len(window.segments)} segments."]
        for segment in window.segments:
            inside = [t for t in window.tokens if segment.start <= t.pos < segment.stop]
            stop = min(segment.stop, window.n_tokens)
            text = "".join(_shown(token) for token in inside if token.step is None)
            if segment.kind != "generated":
                lines.append(f"{segment.label} [{segment.start}, {stop}): {text}")
        lines.append("Generated:")
        lines += [_generated_line(token, data) for token in window.tokens if token.step is not None]
        return [*lines, _verdict(data)[0]]

    def paint(self, data: TokensData, request: Request[TokensOptions], look: Look) -> Picture:
        """Draw the rows around the current token, then the answer beside the expected one."""
        width, height = request.width, request.height
        rows = _laid_out(data.window, request)
        foot = [_verdict_line(data, width, look)] if height > 3 else []
        if height > 6:
            foot.insert(0, _token_line(data, width, look))
        top = _top(rows, data.window.current, height - len(foot))
        text = look.style("text")
        strips = [
            line(row.spans(look, current=data.window.current, marked=frozenset()), width, text)
            for row in rows[top : top + height - len(foot)]
        ]
        strips += [line([], width, text)] * (height - len(foot) - len(strips))
        return Picture([*strips, *foot][:height], _note(data, request))

    def act(
        self, action: str, data: TokensData, request: Request[TokensOptions]
    ) -> TokensOptions | None:
        """`view.measure`: colour by the next measure."""
        if action != "view.measure":
            return None
        following = (COLOURS.index(request.options.colour) + 1) % len(COLOURS)
        return replace(request.options, colour=COLOURS[following])

    def point(
        self, x: int, y: int, data: TokensData, request: Request[TokensOptions], *, click: bool
    ) -> Go | None:
        """Click a token: go to the step that chose it, or look at a token of the prompt."""
        if not click:
            return None
        rows = _laid_out(data.window, request)
        feet = (request.height > 3) + (request.height > 6)
        index = _top(rows, data.window.current, request.height - feet) + y
        word = rows[index].at(x) if 0 <= index < len(rows) and y < request.height - feet else None
        if word is None:
            return None
        token = data.window.token(word.pos)
        if token is None:
            return None
        if token.step is not None:
            return Go(step=token.step)
        return Go(step=0, pos=token.pos)


def _laid_out(window: Window, request: Request[TokensOptions]) -> list[Row]:
    return wrap(words(window, request.options.colour), request.width)


def _top(rows: list[Row], current: int | None, height: int) -> int:
    """Return the first row to draw, so that the current one is on screen, about its middle."""
    at = next(
        (i for i, row in enumerate(rows) if any(word.pos == current for word in row.words)),
        len(rows) - 1,
    )
    return max(0, min(at - height // 2, len(rows) - height))


def _so_far(window: Window) -> str:
    chosen = [t for t in window.tokens if t.step is not None and not t.special]
    return "".join(token.text for token in chosen).strip()


def _shown(token: TokenRecord) -> str:
    return shown(token.token, token.text, special=token.special)[0]


def _generated_line(token: TokenRecord, data: TokensData) -> str:
    step = data.window.step_of(token)
    parts = [f"  step {token.step}: {_shown(token)} at position {token.pos}"]
    if step is not None and step.chosen_logprob is not None:
        parts.append(f"probability {math.exp(min(step.chosen_logprob, 0)):.4f}")
    if step is not None and step.entropy is not None:
        parts.append(f"entropy {step.entropy:.3f}")
    if step is not None and step.chosen_rank:
        parts.append(f"rank {step.chosen_rank + 1}")
    return ", ".join(parts)


def _verdict(data: TokensData) -> tuple[str, str]:
    """Return the answer beside the expected one, and the style that says if they agree."""
    row = data.generation
    answer = visible(data.answer[:MOST_SHOWN]) or "(nothing yet)"
    answer += "…" if len(data.answer) > MOST_SHOWN else ""
    if not row.expected:
        return f"answer: {answer}; nothing was expected", "text"
    wanted = " | ".join(visible(text) for text in row.expected[:3])
    if data.right is None:
        return f"answer so far: {answer}; expected: {wanted}", "muted"
    said, style = ("right", "good") if data.right else ("wrong", "bad")
    return f"answer: {answer}; expected: {wanted} ({said})", style


def _is_right(source: Source, row: GenerationRow) -> bool | None:
    """Compare a finished answer with the expected ones, once: it may be very long."""
    if not row.expected or row.state == "recording":
        return None
    key = ("right", row.generation, row.state)
    return source.keep(key, lambda: matches(row.answer, row.expected), lambda _: 64)


def _verdict_line(data: TokensData, width: int, look: Look) -> Strip:
    text, style = _verdict(data)
    return line([(text, look.style(style))], width, look.style("text"))


def _token_line(data: TokensData, width: int, look: Look) -> Strip:
    """Return what is known of the current token in one line."""
    window, text = data.window, look.style("text")
    token = None if window.current is None else window.token(window.current)
    if token is None:
        return line([("this step chose no token", look.style("muted"))], width, text)
    segment = segment_at(window.segments, token.pos)
    word = words(window, "segment")[token.pos - window.start]
    spans: list[Span] = [
        (word.text, word_style(word, look)),
        (f" {token.pos}", look.style("strong")),
        (f" id {token.token_id}", text),
        (f" {visible(segment.label)}" if segment else "", look.style("muted")),
    ]
    if token.position_id != token.pos:
        spans.append((f" position id {token.position_id}", look.style("accent")))
    step = window.step_of(token)
    if step is not None and step.chosen_logprob is not None:
        spans.append((f" p {math.exp(min(step.chosen_logprob, 0)):.3f}", text))
    return line(spans, width, text)


def _note(data: TokensData, request: Request[TokensOptions]) -> str:
    whole = data.window.stop - data.window.start == data.window.n_tokens
    shown_now = "" if whole else ", around this step"
    return f"{data.window.n_tokens} tokens{shown_now} · colour: {request.options.colour}"
