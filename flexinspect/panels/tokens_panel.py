"""The tokens panel: the whole sequence, coloured by segment or by the model's uncertainty."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal

from msgspec import Struct, field
from textual.strip import Strip

from flexinspect.core.text import escape_unprintable, plural
from flexinspect.drawing.text_lines import Pen, visible
from flexinspect.drawing.theme import Theme
from flexinspect.drawing.token_cells import display_text, token_style, wrap_cells
from flexinspect.panels import token_window
from flexinspect.panels.base import Help, Navigate, Panel, Picture, Request, TracePlace
from flexinspect.panels.panel_source import Source
from flexinspect.panels.xray import DIRECTIONS, WEIGHTS, Direction, WeightsOf, XRay
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import TokenRecord
from flexinspect.trace.queries import read_tokens
from flexinspect.trace.query_results import GenerationRow

MAX_TEXT_CHARS = 200
"""Characters that are shown of an answer, or of a segment outside of the window."""
PREVIEW_TOKENS = 64
"""Tokens that are read of a segment outside of the window."""
MAX_PREVIEWS = 100
"""Maximum number of segments outside of the window that are read."""


class TokensOptions(Struct, frozen=True):
    """`colour` is the measure that colours generated tokens.

    `xray` dims all tokens but those that the place's token sees, or those that see it. `weights`
    colours those that it sees by their attention weights, of one head, or the mean of the heads of
    the layer or of all layers.
    """

    colour: Literal["probability", "entropy", "segment"] = "probability"
    xray: Direction = "off"
    weights: WeightsOf = "off"


class TokensData(Struct, frozen=True):
    """The window, the generation, its answer so far, and whether it is one of the expected ones.

    `is_correct` is None if no answer is expected or the branch has not finished.
    `previews` are the first tokens of the prompt's segments outside of the window, by number.
    """

    window: token_window.TokenWindow
    generation: GenerationRow
    answer: str
    is_correct: bool | None
    place: TracePlace
    previews: Mapping[int, Sequence[TokenRecord]] = field(default_factory=dict)
    xray: XRay | None = None


class TokensPanel(Panel[TokensData, TokensOptions]):
    """The prompt and the generated text, token by token."""

    name = "tokens"
    title = "Tokens"
    initial_options = TokensOptions()
    needs_tokens = True
    help = Help(
        "It shows the prompt and the generated text token by token, with one colour per segment.",
        "Generated tokens are coloured by the model's uncertainty (v: probability, entropy, "
        "segment); the white one is the token of this step; special tokens are italic, ◌ is a part "
        "of a character.",
        "Look for a segment that begins one token early or late, a doubled BOS, a missing "
        "separator, and the first token at which the answer differs from the expected one.",
    )
    depends_on_size = True
    cycles: ClassVar = {
        "view.measure": ("colour", ("probability", "entropy", "segment")),
        "tokens.xray": ("xray", DIRECTIONS),
        "tokens.weights": ("weights", WEIGHTS),
    }
    actions = tuple(cycles)

    def load(self, source: Source, request: Request[TokensOptions]) -> TokensData:
        """Read the tokens that fit around the place, and their steps."""
        place = request.place
        # Few tokens are shorter than two cells, so half of this many fill the panel.
        reach = max(request.width * request.height // 4, 64)
        window = token_window.load_token_window(source, place, reach)
        row = source.reader.generation(place.generation)
        branch = (place.generation, place.branch)
        answer = token_window.load_answer(source, place)
        return TokensData(
            window=window,
            generation=row,
            answer=answer.text or _partial_answer(source, branch, window),
            is_correct=answer.is_correct,
            place=place,
            previews=_load_previews(source, branch, window),
            xray=_load_xray(source, place, window, request.options),
        )

    def describe(self, data: TokensData) -> list[str]:
        """Return the segments with their texts, then the generated tokens with their numbers.

        "…" stands for tokens outside of the window.
        """
        window = data.window
        nothing = "nothing yet" if data.generation.state == "recording" else "nothing recorded"
        n_segments = sum(segment.start < segment.stop for segment in window.segments)
        summary = f"{plural(window.n_tokens, 'token')} in {plural(n_segments, 'segment')}"
        if not _is_whole(window):
            span = f"positions {window.start} to {window.stop - 1}"
            summary, nothing = f"{summary}; {span} are shown", f"no token of {span}"
        lines = [f"{summary}."]
        lines += [_format_segment(number, segment, data) for number, segment in _prompt(window)]
        generated = [token for token in window.tokens if token.step is not None]
        lines.append("Generated:" if generated else f"Generated: {nothing}.")
        lines += [_format_generated(token, data) for token in generated]
        lines += data.xray.describe() if data.xray is not None else ()
        return [*lines, _format_verdict(data)[0]]

    def paint(self, data: TokensData, request: Request[TokensOptions], theme: Theme) -> Picture:
        """Draw the rows around the current token, then the answer and the expected one."""
        pen, height, current = Pen(theme, request.width), request.height, data.window.current
        xray = data.xray
        footer = [_token_line(data, pen)] if height > 6 else []
        footer = _xray_lines(xray, pen)[: height // 2] if xray else footer
        footer += [pen.line(_format_verdict(data))] if height > 3 else []
        room = height - len(footer)
        rows = wrap_cells(token_window.token_cells(data.window, request.options.colour), pen.width)
        shown = rows[visible(data.window.row_of_current(rows), room, len(rows))]
        style = xray.style if xray is not None else None
        strips = [pen.line(*row.spans(theme, current=current, style=style)) for row in shown]
        strips += [pen.line()] * (room - len(strips))
        extent = "" if _is_whole(data.window) else ", around this step"
        weights = xray.weights if xray else None
        shows = f"X-ray: {xray.direction}" if xray else f"colour: {request.options.colour}"
        shows += f" · {weights.of}" if weights and weights.of else ""
        note = f"{data.window.n_tokens} tokens{extent} · {shows}"

        def target(x: int, y: int) -> Navigate | None:
            return data.window.navigate_to(shown[y].cell_at(x)) if 0 <= y < len(shown) else None

        is_alarm = weights is not None and weights.is_mismatch
        return Picture([*strips, *footer][:height], note, is_alarm, target)


def _xray_lines(xray: XRay, pen: Pen) -> list[Strip]:
    lines = pen.paragraph(xray.summary(), "strong")
    if xray.weights is not None:
        style = "bad" if xray.weights.is_mismatch else "text"
        lines += pen.paragraph(xray.weights.summary(), style)
    return lines


def _is_whole(window: token_window.TokenWindow) -> bool:
    return window.stop - window.start == window.n_tokens


def _prompt(window: token_window.TokenWindow) -> list[tuple[int, Segment]]:
    return [pair for pair in enumerate(window.segments) if pair[1].kind != SegmentKind.GENERATED]


def _partial_answer(
    source: Source, branch: tuple[int, int], window: token_window.TokenWindow
) -> str:
    """Return the beginning of an answer that is still being generated."""
    starts = (s.start for s in window.segments if s.kind == SegmentKind.GENERATED)
    start = next(starts, window.start)
    tokens = read_tokens(source.reader, *branch, start, limit=MAX_TEXT_CHARS)
    text = "".join(t.text for t in tokens if t.step is not None and not t.special).strip()
    cut = bool(tokens) and tokens[-1].pos + 1 < window.n_tokens
    return f"{text}…" if cut else text


def _load_xray(
    source: Source, place: TracePlace, window: token_window.TokenWindow, options: TokensOptions
) -> XRay | None:
    if options.xray == "off":
        return None
    from flexinspect.panels.xray_loading import load_xray  # needs masks and attention

    return load_xray(source, place, window, options.xray, options.weights)


def _load_previews(
    source: Source, branch: tuple[int, int], window: token_window.TokenWindow
) -> dict[int, Sequence[TokenRecord]]:
    """Return the first tokens of the prompt's segments outside of the window."""
    start, stop = window.start, window.stop
    outside = [pair for pair in _prompt(window) if pair[1].stop <= start or pair[1].start >= stop]
    previews: dict[int, Sequence[TokenRecord]] = {}
    for number, segment in outside[:MAX_PREVIEWS]:
        stop = min(segment.stop, segment.start + PREVIEW_TOKENS)
        read = partial(read_tokens, source.reader, *branch, segment.start, stop)
        key = ("beginning", *branch, segment.start, stop)
        previews[number] = source.get_or_create(key, read)
    return previews


def _format_segment(number: int, segment: Segment, data: TokensData) -> str:
    """Format a segment with its text in the window, or else its first tokens."""
    window = data.window
    stop = min(segment.stop, window.n_tokens)
    start, end = max(segment.start, window.start), min(stop, window.stop)
    if start < end:
        inside = (window.token(pos) for pos in range(start, end))
        text = "".join(_display_text(token) for token in inside if token and token.step is None)
    else:
        tokens = data.previews.get(number, ())
        whole = "".join(_display_text(token) for token in tokens)
        text = whole[:MAX_TEXT_CHARS]
        start = segment.start
        end = start + len(tokens) if text == whole else start
    before = "…" if start > segment.start else ""
    after = "…" if end < stop else ""
    return f"{escape_unprintable(segment.label)} [{segment.start}, {stop}): {before}{text}{after}"


def _display_text(token: TokenRecord) -> str:
    return display_text(token.token, token.text, special=token.special)[0]


def _format_generated(token: TokenRecord, data: TokensData) -> str:
    step = data.window.step_of(token)
    text = f"  step {token.step}: {_display_text(token)} at position {token.pos}"
    if step is None:
        return text
    if step.chosen_logprob is not None:
        text += f", probability {math.exp(min(step.chosen_logprob, 0)):.4f}"
    if step.entropy is not None:
        text += f", entropy {step.entropy:.3f}"
    return f"{text}, rank {step.chosen_rank}" if (step.chosen_rank or 0) > 0 else text


def _format_verdict(data: TokensData) -> tuple[str, str]:
    """Return the answer with the expected one, and a style that shows whether they agree."""
    row = data.generation
    answer = escape_unprintable(data.answer[:MAX_TEXT_CHARS]) or (
        "(nothing yet)" if row.state == "recording" else "(nothing recorded)"
    )
    answer += "…" if len(data.answer) > MAX_TEXT_CHARS else ""
    if not row.expected:
        return f"answer: {answer}; no expected answer", "text"
    expected = " | ".join(escape_unprintable(text) for text in row.expected[:3])
    if data.is_correct is None:
        return f"answer so far: {answer}; expected: {expected}", "muted"
    verdict, style = ("right", "good") if data.is_correct else ("wrong", "bad")
    return f"answer: {answer}; expected: {expected} ({verdict})", style


def _token_line(data: TokensData, pen: Pen) -> Strip:
    window = data.window
    token = None if window.current is None else window.token(window.current)
    if token is None:
        return pen.line(("no token that this step chose is recorded", "muted"))
    segment, step = token_window.segment_at(window.segments, token.pos), window.step_of(token)
    cells = token_window.token_cells(window, "segment")
    cell = next(each for each in cells if each.pos == token.pos)
    position_id, logprob = token.position_id, step.chosen_logprob if step else None
    return pen.line(
        (cell.text, token_style(cell, pen.theme)),
        (f" {token.pos}", "strong"),
        (f" id {token.token_id}", "text"),
        (f" {escape_unprintable(segment.label)}" if segment else "", "muted"),
        (f" position id {position_id}" if position_id != token.pos else "", "accent"),
        ("" if logprob is None else f" p {math.exp(min(logprob, 0)):.3f}", "text"),
    )
