"""Panel: the whole sequence as words, coloured by segment or by how sure the model was."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from textual.strip import Strip

from flexinspect.panels.base import Go, Help, Panel, Picture, Place, Request
from flexinspect.panels.parts.sequence import Window, load_window, segment_at, words
from flexinspect.panels.parts.verdict import is_right
from flexinspect.panels.source import Source
from flexinspect.prompts import Segment, SegmentKind
from flexinspect.records import TokenRecord
from flexinspect.text import visible
from flexinspect.trace.rows import GenerationRow
from flexinspect.trace.sequences import tokens_of
from flexinspect.widgets.lines import Span, line
from flexinspect.widgets.look import Look
from flexinspect.widgets.tokencells import Row, shown, word_style, wrap

Colour = Literal["probability", "entropy", "segment"]
COLOURS: tuple[Colour, ...] = ("probability", "entropy", "segment")
MOST_SHOWN = 200
"""Characters of an answer, or of a segment out of sight, that are shown in its line."""
BEGINNING = 64
"""Tokens that are read of a segment out of sight."""
MOST_SEGMENTS = 100
"""Segments out of sight that are read at most."""


@dataclass(frozen=True, slots=True)
class TokensOptions:
    """`colour` of the generated tokens."""

    colour: Colour = "probability"


@dataclass(frozen=True, slots=True)
class TokensData:
    """The window, the generation, its answer so far, and whether that is one of the expected.

    `right` is None while it is not known: nothing was expected, or the generation goes on.
    `beginnings` are the first tokens of the segments of the prompt that the window leaves out.
    """

    window: Window
    generation: GenerationRow
    answer: str
    right: bool | None
    place: Place
    beginnings: Mapping[int, Sequence[TokenRecord]] = field(default_factory=dict)


class TokensPanel(Panel[TokensData, TokensOptions]):
    """The sequence that was fed and made, token by token."""

    name = "tokens"
    title = "Tokens"
    needs_tokens = True
    help = Help(
        "The whole sequence that the model saw and made, a piece per token, a colour per segment.",
        "Generated tokens are coloured by how unsure the model was (v: probability, entropy, "
        "segment); the white one is the token of this step; special tokens are italic, ◌ is a part "
        "of a character.",
        "Look for a segment that begins one token early or late, a doubled BOS, a missing "
        "separator, and the first token where the answer turns away from what was expected.",
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
        where = (place.generation, place.branch)
        state, told = _outcome(source, where, row)
        right = is_right(source, where, state, told, row.expected)
        answer = told or _so_far(source, where, window)
        return TokensData(window, row, answer, right, place, _beginnings(source, where, window))

    def describe(self, data: TokensData) -> list[str]:
        """Return segments with their texts, then the generated tokens with their numbers.

        Of a sequence that is not loaded whole, "…" stands for what is left out.
        """
        window = data.window
        about = f"{window.n_tokens} tokens in {len(window.segments)} segments"
        if not _is_whole(window):
            about += f"; positions {window.start} to {window.stop - 1} are shown"
        lines = [f"{about}."]
        for number, segment in enumerate(window.segments):
            if segment.kind != SegmentKind.GENERATED:
                lines.append(_segment_line(number, segment, data))
        chosen = [token for token in window.tokens if token.step is not None]
        lines.append("Generated:" if chosen else f"Generated: {_no_token(window)}.")
        lines += [_generated_line(token, data) for token in chosen]
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


def _is_whole(window: Window) -> bool:
    return window.stop - window.start == window.n_tokens


def _outcome(source: Source, where: tuple[int, int], row: GenerationRow) -> tuple[str, str]:
    """Return the state and the answer of a branch; a generation's own are those of branch 0."""
    generation, branch = where
    forks = source.reader.branches(generation) if branch else []
    mine = next((fork for fork in forks if fork.branch == branch), None)
    return (mine.state, mine.answer) if mine else (row.state, row.answer)


def _so_far(source: Source, where: tuple[int, int], window: Window) -> str:
    """Return the beginning of an answer that is still being made."""
    segments = (s.start for s in window.segments if s.kind == SegmentKind.GENERATED)
    start = next(segments, window.start)
    found = tokens_of(source.reader, *where, start, limit=MOST_SHOWN)
    text = "".join(t.text for t in found if t.step is not None and not t.special).strip()
    cut = bool(found) and found[-1].pos + 1 < window.n_tokens
    return f"{text}…" if cut else text


def _beginnings(
    source: Source, where: tuple[int, int], window: Window
) -> dict[int, Sequence[TokenRecord]]:
    """Return the first tokens of the segments of the prompt that lie outside of the window."""
    prompt = [s for s in enumerate(window.segments) if s[1].kind != SegmentKind.GENERATED]
    outside = [s for s in prompt if s[1].stop <= window.start or s[1].start >= window.stop]
    found: dict[int, Sequence[TokenRecord]] = {}
    for number, segment in outside[:MOST_SEGMENTS]:
        stop = min(segment.stop, segment.start + BEGINNING)
        read = partial(tokens_of, source.reader, *where, segment.start, stop)
        key = ("beginning", *where, segment.start, stop)
        found[number] = source.keep(key, read, lambda tokens: 512 * (1 + len(tokens)))
    return found


def _segment_line(number: int, segment: Segment, data: TokensData) -> str:
    """Return a segment with its text: what the window has of it, else how it begins."""
    window = data.window
    stop = min(segment.stop, window.n_tokens)
    start, end = max(segment.start, window.start), min(stop, window.stop)
    if start < end:
        inside = (window.token(pos) for pos in range(start, end))
        text = "".join(_shown(token) for token in inside if token and token.step is None)
    else:
        tokens = data.beginnings.get(number, ())
        whole = "".join(_shown(token) for token in tokens)
        text = whole[:MOST_SHOWN]
        start = segment.start
        end = start + len(tokens) if text == whole else start
    before = "…" if start > segment.start else ""
    after = "…" if end < stop else ""
    return f"{visible(segment.label)} [{segment.start}, {stop}): {before}{text}{after}"


def _no_token(window: Window) -> str:
    if _is_whole(window):
        return "nothing yet"
    return f"no token of positions {window.start} to {window.stop - 1}"


def _shown(token: TokenRecord) -> str:
    return shown(token.token, token.text, special=token.special)[0]


def _generated_line(token: TokenRecord, data: TokensData) -> str:
    step = data.window.step_of(token)
    parts = [f"  step {token.step}: {_shown(token)} at position {token.pos}"]
    if step is not None and step.chosen_logprob is not None:
        parts.append(f"probability {math.exp(min(step.chosen_logprob, 0)):.4f}")
    if step is not None and step.entropy is not None:
        parts.append(f"entropy {step.entropy:.3f}")
    if step is not None and step.chosen_rank is not None and step.chosen_rank > 0:
        parts.append(f"rank {step.chosen_rank}")
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
    shown_now = "" if _is_whole(data.window) else ", around this step"
    return f"{data.window.n_tokens} tokens{shown_now} · colour: {request.options.colour}"
