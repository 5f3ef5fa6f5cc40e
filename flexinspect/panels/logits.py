"""The logits panel: why this token won, how sure the model was, and how that went on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from textual.strip import Strip

from flexinspect.panels.base import Help, Missing, Navigate, NoOptions, Panel, Picture, Request
from flexinspect.panels.parts.logitswords import (
    UNITS,
    LogitsData,
    describe_bad_logits,
    describe_logits,
    find_bin,
    format_chosen,
    format_rank,
    is_filtered,
    probability,
    token_label,
)
from flexinspect.panels.parts.windows import (
    COLUMN_GAP,
    MIN_TWO_COLUMN_WIDTH,
    Area,
    draw_timeline,
    draw_two_columns,
    drop_cut_span,
    left_width,
    load_step_window,
    navigate_to_step,
    timeline_columns,
)
from flexinspect.panels.source import Source
from flexinspect.records import UNKNOWN, Candidate
from flexinspect.trace.ranges import branch_of_step, step_range
from flexinspect.widgets.lines import Span, align_right, clip_text, line
from flexinspect.widgets.look import Theme
from flexinspect.widgets.plots import bar, format_number, timeline

_MAX_PLOT_HEIGHT = 8
"""Lines that a timeline or the histogram takes at most, its title included."""

_NUMBER_WIDTH = 7


class LogitsPanel(Panel[LogitsData, NoOptions]):
    """Bars of the best tokens, and timelines of entropy, margin and rank."""

    name: ClassVar[str] = "logits"
    title: ClassVar[str] = "Logits"
    needs_tokens: ClassVar[bool] = True
    help: ClassVar[Help] = Help(
        "It shows the most likely tokens of this step, which one was chosen, and the entropy, the "
        "margin and the rank of the choice over the steps.",
        "A bar is a probability and * is the chosen token; with sampling, 'after' is what the "
        "processors left and 'filtered' is a token that they took out; click a timeline to go "
        "to its step.",
        "Look for a step where the entropy jumps or the margin falls near 0: there the answer "
        "could have turned.",
    )
    depends_on_size: ClassVar[bool] = True

    def options(self) -> NoOptions:
        """Return the options; there are none."""
        return NoOptions()

    def load(self, source: Source, request: Request[NoOptions]) -> LogitsData:
        """Read the distribution of the step, and the narrow facts of the window's steps."""
        reader, place = source.reader, request.place
        window = load_step_window(reader, place, timeline_columns(request.width))
        branch = branch_of_step(reader, place.generation, place.step, place.branch)
        record = reader.logits(place.generation, place.step, branch)
        if record is None:
            raise Missing(
                f"No logits are recorded at step {place.step}.",
                "The logits hook records them at every level; 'flexinspect dump' shows whether it "
                "was switched off.",
            )
        rows = step_range(reader, place.generation, window.start, window.stop, place.branch)
        tokens = reader.step_tokens(place.generation, place.step, branch)
        text = next((one.text for one in tokens if one.token_id == record.chosen_id), None)
        return LogitsData(place.step, record, text, window, {row.step: row for row in rows})

    def describe(self, data: LogitsData) -> list[str]:
        """Return the choice, the candidates as a table, and the timelines in words."""
        return describe_logits(data)

    def paint(self, data: LogitsData, request: Request[NoOptions], theme: Theme) -> Picture:
        """Draw the candidates, and as many timelines as there is room for."""
        layout = logits_layout(data, request.width, request.height)
        left = _draw_candidates(data, layout, theme)
        lines = [
            strip
            for name in layout.timelines
            for strip in _draw_titled_timeline(data, layout, name, theme)
        ]
        if layout.beside:
            strips = draw_two_columns(left, lines, request.width, request.height, theme)
        else:
            strips = [*left, *lines]
        problem = describe_bad_logits(data)
        return Picture(strips[: request.height], problem or _format_note(data), alarm=bool(problem))

    def on_mouse(
        self, x: int, y: int, data: LogitsData, request: Request[NoOptions], *, click: bool
    ) -> Navigate | None:
        """Go to the step of a timeline's column."""
        if not click:
            return None
        areas = logits_layout(data, request.width, request.height).timelines.values()
        return navigate_to_step(x, y, areas, data.window)


def _format_note(data: LogitsData) -> str:
    rank = format_rank(data.record.chosen_rank)
    return f"{format_chosen(data)}, {rank} · {data.window.format_steps()}"


@dataclass(frozen=True, slots=True)
class LogitsLayout:
    """What goes where: `rows` lines of candidates, header included, `histogram` lines of it.

    The block of candidates is `left` wide, a timeline `columns`; the areas of the timelines are
    without their titles.
    """

    left: int
    columns: int
    beside: bool
    header: bool
    rows: int
    histogram: int
    timelines: dict[str, Area]


def logits_layout(data: LogitsData, width: int, height: int) -> LogitsLayout:
    """Return the places of everything in a picture of this size."""
    wide = width >= MIN_TWO_COLUMN_WIDTH
    header = height >= 5
    need = len(data.record.candidates) + (data.chosen is None) + header + 1
    names = data.series_names
    if wide:
        rows, spare = min(need, height), height
    else:
        most = min(height // 2, 4 * len(names)) if height >= 8 else 0
        rows = min(need, height - most // len(names) * len(names))
        spare = height - rows
    names = names[: spare // 2]
    each = min(spare // len(names), _MAX_PLOT_HEIGHT) if names else 0
    x, y = (left_width(width) + COLUMN_GAP, 0) if wide else (0, rows)
    areas = {
        name: Area(x, y + each * i + 1, timeline_columns(width), each - 1)
        for i, name in enumerate(names)
    }
    rest = height - rows - (1 if wide else each * len(names))
    histogram = min(rest, _MAX_PLOT_HEIGHT) if data.record.histogram and rest >= 3 else 0
    return LogitsLayout(
        left_width(width), timeline_columns(width), wide, header, rows, histogram, areas
    )


def _draw_candidates(data: LogitsData, layout: LogitsLayout, theme: Theme) -> list[Strip]:
    strips = [_draw_summary(data, layout.left, theme)]
    strips += [_draw_header(data, layout.left, theme)] if layout.header else []
    room = layout.rows - len(strips)
    every = data.record.candidates
    shown = every[:room]
    if data.chosen not in shown and room > 0:
        shown = every[: room - 1]
    strips += [_draw_candidate(one, data, layout.left, theme) for one in shown]
    if data.chosen not in shown and room > 0:
        strips.append(_draw_unlisted_choice(data, layout.left, theme))
    if layout.histogram and layout.beside:
        strips.append(line([], layout.left, theme.style("text")))
    return [*strips, *_draw_histogram(data, layout, theme)]


def _draw_summary(data: LogitsData, width: int, theme: Theme) -> Strip:
    text, strong, muted = theme.style("text"), theme.style("strong"), theme.style("muted")
    record = data.record
    spans: list[Span] = [
        ("entropy ", muted),
        (format_number(record.entropy), strong),
        (" nats" if width >= 60 else "", muted),
        ("  margin ", muted),
        (format_number(record.margin), strong),
        ("  rank ", muted),
        (
            "?" if record.chosen_id == UNKNOWN else str(record.chosen_rank),
            strong if record.chosen_rank == 0 else theme.style("warn"),
        ),
    ]
    return line(spans, width, text)


def _column_widths(data: LogitsData, width: int) -> tuple[int, bool, int]:
    """Return the columns of the word, whether logits fit, and those of the bar."""
    fixed = 4 + (_NUMBER_WIDTH + 1) * (1 + data.is_processed) + (data.is_processed and 2)
    spare = width - fixed
    logits = spare >= 36
    spare -= (_NUMBER_WIDTH + 1) * (1 + data.is_processed) if logits else 0
    name = max(min(spare * 3 // 5, 20), 1)
    return name, logits, max(spare - name - 1, 0)


def _draw_header(data: LogitsData, width: int, theme: Theme) -> Strip:
    name, logits, _ = _column_widths(data, width)
    heads = ["logit"] * logits + ["before" if data.is_processed else "prob"]
    text = (
        "    "
        + clip_text("token", name)
        + "".join(" " + align_right(head, _NUMBER_WIDTH) for head in heads)
    )
    if data.is_processed:
        text += (
            (" " + align_right("score", _NUMBER_WIDTH)) * logits
            + " "
            + align_right("after", _NUMBER_WIDTH + 2)
        )
    return line([(text, theme.style("muted"))], width, theme.style("text"))


def _draw_candidate(one: Candidate, data: LogitsData, width: int, theme: Theme) -> Strip:
    name, logits, room = _column_widths(data, width)
    is_chosen = one.token_id == data.record.chosen_id
    style = theme.style("chosen" if is_chosen else "text")
    faint = theme.style("muted")
    spans: list[Span] = [
        (f"{'*' if is_chosen else ' '}{one.rank:>2} ", style),
        (clip_text(token_label(one.text, one.token_id), name), style),
    ]
    if logits:
        spans.append((" " + format_number(one.logit, _NUMBER_WIDTH), faint))
    spans.append((" " + format_number(probability(one.logprob), _NUMBER_WIDTH), style))
    last = probability(one.logprob)
    if data.is_processed:
        out, last = is_filtered(one), probability(one.score_logprob)
        if logits:
            spans.append((" " + format_number(one.score, _NUMBER_WIDTH), faint))
        after = "filtered" if out else format_number(last)
        spans.append((" " + align_right(after, _NUMBER_WIDTH + 2), faint if out else style))
    spans.append((" " + bar(last, room) if room else "", theme.style("accent")))
    return line(spans, width, theme.style("text"))


def _draw_unlisted_choice(data: LogitsData, width: int, theme: Theme) -> Strip:
    """Return the line of a chosen token that is not among the candidates shown."""
    record, style = data.record, theme.style("chosen")
    if record.chosen_id == UNKNOWN:
        return line([("  ? what was chosen was not seen", theme.style("muted"))], width)
    text = data.text or (data.chosen.text if data.chosen else None)
    name, logits, room = _column_widths(data, width)
    chance = probability(record.chosen_logprob)
    spans: list[Span] = [
        (
            f"*{align_right(str(record.chosen_rank), 2)} " if record.chosen_rank < 100 else "*.. ",
            style,
        ),
        (clip_text(token_label(text, record.chosen_id), name), style),
        (" " * (_NUMBER_WIDTH + 1) if logits else "", style),
        (" " + format_number(chance, _NUMBER_WIDTH), style),
    ]
    if data.is_processed:
        return line(spans, width, theme.style("text"))
    return line([*spans, (" " + bar(chance, room), theme.style("accent"))], width)


def _draw_titled_timeline(
    data: LogitsData, layout: LogitsLayout, name: str, theme: Theme
) -> list[Strip]:
    area, values = layout.timelines[name], data.series(name)
    known = [v for v in values.values() if v is not None and math.isfinite(v)]
    here = values.get(data.window.current)
    span = (
        f"{format_number(min(known))} to {format_number(max(known))}"
        if known
        else "no finite value"
    )
    title: list[Span] = [
        (f"{name} ", theme.style("title")),
        (f"{format_number(here)} {UNITS[name]}".rstrip(), theme.style("strong")),
        (f"  {span}", theme.style("muted")),
        (f"  {data.window.format_steps()}", theme.style("muted")),
    ]
    drawn = draw_timeline(values, data.window, area, theme)
    return [line(drop_cut_span(title, layout.columns), layout.columns, theme.style("text")), *drawn]


def _draw_histogram(data: LogitsData, layout: LogitsLayout, theme: Theme) -> list[Strip]:
    if not layout.histogram:
        return []
    record = data.record
    low, high = format_number(record.histogram_min), format_number(record.histogram_max)
    title: list[Span] = [
        ("logits ", theme.style("title")),
        (f"{low} to {high}, {sum(record.histogram)} of them, log counts", theme.style("muted")),
    ]
    heights = [math.log1p(count) if count > 0 else None for count in record.histogram]
    mark = find_bin(record, data.chosen.logit) if data.chosen else None
    drawn = timeline(heights, layout.left, layout.histogram - 1, theme, marked=mark, style="muted")
    return [line(title, layout.left, theme.style("text")), *drawn]
