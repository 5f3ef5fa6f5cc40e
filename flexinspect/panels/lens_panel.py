"""The logit lens panel: what each layer would choose, if it were the last one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from msgspec import Struct

from flexinspect.core.text import escape_unprintable, plural
from flexinspect.drawing import plots
from flexinspect.drawing.text_lines import NamedSpan, Pen, align_right, clip_text, visible
from flexinspect.drawing.theme import Theme
from flexinspect.panels.base import (
    Help,
    Missing,
    Navigate,
    NoOptions,
    Panel,
    Picture,
    Request,
    import_hint,
)
from flexinspect.panels.panel_source import Source
from flexinspect.records.step import LENS_EVENT, SPARSE_LENS_EVENT, LensRecord
from flexinspect.trace.queries import branch_of_step, newest_events
from flexinspect.trace.reader import TraceReader

MAX_ERROR = 0.05
"""Difference of log-probabilities up to which the lens is that of the model: bfloat16 rounds."""
_TOKEN_WIDTH, _SHARE_WIDTH, _BAR_WIDTH = 14, 8, 8
_LEVEL_HINT = "Record it with --level extreme; --layers chooses the layers."


class LensData(Struct, frozen=True):
    """The lens of each layer of a step, and the text of the token that the step chose, if known."""

    step: int
    layers: tuple[LensRecord, ...]
    chosen: str | None

    @property
    def error(self) -> float | None:
        """How far the lens of the last layer is from the model's logits, None if unknown."""
        return next((one.error for one in reversed(self.layers) if one.error is not None), None)

    @property
    def settled(self) -> int | None:
        """The first layer from which on every layer has the chosen token as its best one."""
        first = None
        for one in reversed(self.layers):
            if one.chosen_rank != 0:
                break
            first = one.layer
        return first

    @property
    def is_of_the_model(self) -> bool:
        """Whether the lens of the last layer is not known to differ from the model."""
        return self.error is None or self.error <= MAX_ERROR


class LensPanel(Panel[LensData, NoOptions]):
    """The most likely tokens of each layer, best first, with their probabilities."""

    name = "lens"
    title = "Logit lens"
    needs_tokens = True
    help = Help(
        "It shows which tokens each layer would choose: its output, read through the final norm "
        "and the output head (level extreme).",
        "Layers go down; each has the rank and the probability (a bar) of the token that was "
        "chosen, which is marked by *, and its best tokens; click a layer to go there.",
        "Look for the layer in which the answer appears, or in which a right one is lost; a check "
        "above 0.05 means that the model reads its last layer in another way.",
    )

    def load(self, source: Source, request: Request[NoOptions]) -> LensData:
        """Read the lens of the step. Raises `Missing` with the reason if there is none."""
        reader, place = source.reader, request.place
        branch = branch_of_step(reader, place.generation, place.step, place.branch)
        layers = tuple(reader.lens(place.generation, place.step, branch))
        if not layers:
            hint = import_hint(source) or _missing_hint(reader)
            raise Missing(f"No logit lens is recorded at step {place.step}.", hint)
        tokens = reader.step_tokens(place.generation, place.step, branch)
        return LensData(place.step, layers, tokens[0].text if tokens else None)

    def describe(self, data: LensData) -> list[str]:
        """Return where the answer appears, the check, and a table of the layers."""
        lines = [_summary(data), *_check_lines(data), ""]
        lines.append(f"{'layer':>5}  {'rank':>5}  {'probability':>11}  best tokens")
        for one in data.layers:
            rank, probability = _chosen_cells(one)
            best = "  ".join(f"{text} {share}" for text, share, _ in _candidates(one, quoted=True))
            lines.append(f"{one.layer:>5}  {rank:>5}  {probability:>11}  {best}")
        return lines

    def paint(self, data: LensData, request: Request[NoOptions], theme: Theme) -> Picture:
        """Draw a line per layer: rank and bar of the chosen token, then the best tokens."""
        pen = Pen(theme, request.width)
        strips = [pen.line((_summary(data), "text" if data.is_of_the_model else "warn"))]
        columns = _LensColumns.that_fit(request.width)
        strips.append(pen.line((columns.heading(), "muted")))
        layers = [one.layer for one in data.layers]
        current = layers.index(request.place.layer) if request.place.layer in layers else 0
        room = max(request.height - len(strips), 0)
        shown = data.layers[visible(current, room, len(layers))]
        for one in shown:
            is_current = one.layer == request.place.layer
            strips.append(pen.line(*_layer_spans(one, columns, is_current=is_current)))
        note = "" if data.error is None else f"check {plots.format_number(data.error)}"

        def target(x: int, y: int) -> Navigate | None:
            row = y - 2
            return Navigate(layer=shown[row].layer) if 0 <= row < len(shown) else None

        return Picture(strips[: request.height], note, not data.is_of_the_model, target)


def _missing_hint(reader: TraceReader) -> str:
    """Return why a step has no lens: the last event about it, or the level."""
    kinds = (LENS_EVENT, SPARSE_LENS_EVENT)
    found = [row for kind in kinds for row in newest_events(reader, kind, 0, 1)]
    newest = max(found, key=lambda row: row.id, default=None)
    return _LEVEL_HINT if newest is None else escape_unprintable(newest.event.text)


def _summary(data: LensData) -> str:
    token = "the chosen token" if data.chosen is None else _quote(data.chosen)
    if all(one.chosen_rank < 0 for one in data.layers):
        return f"Step {data.step}: the chosen token is among the best {_depth(data)} of no layer."
    if data.settled is None:
        return f"Step {data.step}: {token} is not the best token of the last layer."
    if data.settled == data.layers[0].layer:
        return f"Step {data.step}: {token} is the best token of all {_n_layers(data)}."
    return f"Step {data.step}: {token} is the best token from layer {data.settled} on."


def _n_layers(data: LensData) -> str:
    return plural(len(data.layers), "recorded layer")


def _depth(data: LensData) -> int:
    return max((len(one.token_ids) for one in data.layers), default=0)


def _check_lines(data: LensData) -> list[str]:
    if data.error is None:
        return ["The check is missing: the lens of the last layer was not compared with the model."]
    last = data.layers[-1].layer
    error = plots.format_number(data.error)
    if data.is_of_the_model:
        return [f"Check: the lens of layer {last} differs from the model's logits by {error}."]
    differs = f"The lens of layer {last} differs from the model's log-probabilities by {error}: "
    return [f"{differs}the model reads its last layer in another way, and chooses otherwise."]


def _chosen_cells(one: LensRecord) -> tuple[str, str]:
    if one.chosen_rank < 0:
        return "-", "-"
    return str(one.chosen_rank), _share(one.chosen_logprob)


def _share(logprob: float) -> str:
    return plots.format_number(math.exp(logprob)) if logprob <= 1e-3 else "nan"


def _candidates(one: LensRecord, *, quoted: bool = False) -> Iterator[tuple[str, str, bool]]:
    """Yield text, probability and whether it was chosen, of the best tokens of a layer."""
    for rank, (id_, text, logprob) in enumerate(
        zip(one.token_ids, one.texts, one.logprobs, strict=True)
    ):
        is_chosen = rank == one.chosen_rank
        label = _quote(text, id_) if quoted else _label(text, id_)
        yield ("*" if is_chosen else "") + label, _share(logprob), is_chosen


def _quote(text: str, token_id: int | None = None) -> str:
    return f'"{escape_unprintable(text)}"' if text or token_id is None else f"token {token_id}"


def _label(text: str, token_id: int) -> str:
    """Return a token without quotes: a leading space as a dot, its id if it has no text."""
    if not text:
        return f"id {token_id}"
    return "·" + escape_unprintable(text[1:]) if text[0] == " " else escape_unprintable(text)


class _LensColumns(Struct, frozen=True):
    """The columns of a picture: a narrow one has no bar and no probabilities, but tokens.

    `room` is the width of all tokens, `token` that of one without its probability.
    """

    has_rank: bool
    has_bar: bool
    has_shares: bool
    room: int
    token: int

    @classmethod
    def that_fit(cls, width: int) -> _LensColumns:
        """Return the columns for a width in cells: at least one token, whatever else goes."""
        layer, rank, bar = 6, 6, _BAR_WIDTH + 1
        if width >= layer + rank + bar + _TOKEN_WIDTH + _SHARE_WIDTH:
            return cls(True, True, True, width - layer - rank - bar, _TOKEN_WIDTH)
        if width >= layer + rank + _TOKEN_WIDTH:
            room = width - layer - rank
            # Two tokens side by side say more than the end of a long one.
            token = room // 2 - 1 if room > _TOKEN_WIDTH + 8 else _TOKEN_WIDTH
            return cls(True, False, False, room, min(token, _TOKEN_WIDTH))
        return cls(False, False, False, width - layer, max(min(width - layer, _TOKEN_WIDTH), 1))

    def heading(self) -> str:
        """Return the titles of the columns."""
        rank, bar = f"{'rank':>5} " if self.has_rank else "", " " * (_BAR_WIDTH + 1)
        return f"{'layer':>5} {rank}{bar if self.has_bar else ''}best tokens"


def _layer_spans(
    one: LensRecord, columns: _LensColumns, *, is_current: bool
) -> Sequence[NamedSpan]:
    rank, _ = _chosen_cells(one)
    known = one.chosen_rank >= 0 and one.chosen_logprob == one.chosen_logprob
    length = plots.bar(math.exp(one.chosen_logprob), _BAR_WIDTH) if known else " " * _BAR_WIDTH
    spans: list[NamedSpan] = [(f"{one.layer:>5} ", "title" if is_current else "muted")]
    if columns.has_rank:
        spans.append((f"{rank:>5} ", "good" if one.chosen_rank == 0 else "text"))
    if columns.has_bar:
        spans.append((f"{length:<{_BAR_WIDTH}} ", "accent"))
    left, each = columns.room, columns.token + (_SHARE_WIDTH if columns.has_shares else 1)
    for text, share, is_chosen in _candidates(one):
        if left < each - (not columns.has_shares):
            break
        spans.append((clip_text(text, columns.token), "chosen" if is_chosen else "text"))
        end = align_right(share, _SHARE_WIDTH - 1) + " " if columns.has_shares else " "
        spans.append((end, "muted"))
        left -= each
    return spans
