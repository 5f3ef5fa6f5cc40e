"""The logits panel: why this token won, how sure the model was, and how that went on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from textual.strip import Strip

from flexinspect.core.text import escape_unprintable
from flexinspect.drawing.plots import bar, format_number, timeline
from flexinspect.drawing.text_lines import Span, align_right, clip_text, line
from flexinspect.drawing.theme import Theme
from flexinspect.panels.base import Help, Missing, Navigate, NoOptions, Panel, Picture, Request
from flexinspect.panels.source import Source
from flexinspect.panels.timeline import (
    COLUMN_GAP,
    MIN_TWO_COLUMN_WIDTH,
    Area,
    StepWindow,
    draw_timeline,
    draw_two_columns,
    drop_cut_span,
    left_width,
    load_step_window,
    navigate_to_step,
    timeline_columns,
)
from flexinspect.records.step import UNKNOWN, Candidate, LogitsRecord
from flexinspect.trace.queries.range_queries import branch_of_step, step_range
from flexinspect.trace.rows import StepRow

SERIES: Mapping[str, Callable[[StepRow], float | None]] = {
    "entropy": lambda row: row.entropy,
    "margin": lambda row: row.margin,
    "rank": lambda row: _known_rank(row.chosen_rank),
}
"""The timelines, in the order in which they give way when there is no room."""

UNITS = {"entropy": "nats", "margin": "logits", "rank": ""}


def _known_rank(rank: int | None) -> float | None:
    return None if rank is None or rank < 0 else float(rank)


_SCORE_RTOL = 1e-5
"""Relative difference up to which a score is the logit itself."""


@dataclass(frozen=True, slots=True)
class LogitsData:
    """The distribution of one step, and the narrow facts of the steps in the window.

    `text` is what the chosen token adds to the text, None when the step recorded no token.
    """

    step: int
    record: LogitsRecord
    text: str | None
    window: StepWindow
    rows: Mapping[int, StepRow]

    @property
    def is_processed(self) -> bool:
        """Whether the processors changed anything among the candidates."""
        return any(is_changed(one) for one in self.record.candidates)

    @property
    def chosen(self) -> Candidate | None:
        """The chosen token among the candidates, None when it was not one of the best."""
        found = (one for one in self.record.candidates if one.token_id == self.record.chosen_id)
        return next(found, None)

    def series(self, name: str) -> dict[int, float | None]:
        """Return a timeline's value for each step of the window that is recorded."""
        return {step: SERIES[name](row) for step, row in self.rows.items()}

    @property
    def series_names(self) -> list[str]:
        """The timelines worth drawing: the rank only where it is not 0 everywhere."""
        ranks = self.series("rank").values()
        return [name for name in SERIES if name != "rank" or any(ranks)]


def is_changed(one: Candidate) -> bool:
    """Tell whether the processors are known to have changed a candidate's logit."""
    if math.isnan(one.score):
        return False
    return not math.isclose(one.logit, one.score, rel_tol=_SCORE_RTOL, abs_tol=_SCORE_RTOL)


def is_filtered(one: Candidate) -> bool:
    """Tell whether a processor took a candidate out, as top-k and top-p do."""
    return one.score == -math.inf and one.logit != -math.inf


def probability(logprob: float) -> float:
    """Return the probability; NaN where it makes no sense."""
    return math.exp(logprob) if logprob <= 1e-3 else math.nan


def token_label(text: str | None, token_id: int) -> str:
    """Return a token as it is drawn: its leading space as a dot, its number if it has no text."""
    if not text:
        return f"id {token_id}"
    return "·" + escape_unprintable(text[1:]) if text[0] == " " else escape_unprintable(text)


def quote_token(text: str | None, token_id: int) -> str:
    """Return a token as it stands in a sentence."""
    return f'"{escape_unprintable(text)}"' if text else f"token {token_id}"


def describe_bad_logits(data: LogitsData) -> str:
    """Say in a sentence that logits are NaN or infinite, "" when they are not.

    -Inf alone is what a model does that closes some of its vocabulary: no alarm by itself.
    """
    record = data.record
    if record.n_nan:
        more = f" and {record.n_inf} infinite" if record.n_inf else ""
        return f"{record.n_nan} of the logits of step {data.step} are NaN{more}."
    if any(one.logit == math.inf for one in record.candidates):
        return f"{record.n_inf} of the logits of step {data.step} are infinite."
    return ""


def format_rank(rank: int) -> str:
    """Return "rank 0 (the best)" or "rank 3"."""
    if rank < 0:
        return "rank unknown"
    return "rank 0 (the best)" if rank == 0 else f"rank {rank}"


def describe_logits(data: LogitsData) -> list[str]:
    """Return the choice, the candidates as a table, and the timelines in words."""
    record = data.record
    lines = [_describe_choice(data), _describe_spread(record)]
    lines += [problem] if (problem := describe_bad_logits(data)) else []
    if not record.n_nan and record.n_inf and not problem:
        lines.append(f"{record.n_inf} logits are -Inf: the model closed these tokens itself.")
    lines += _describe_processors(data)
    lines += (
        ["", *_candidate_table(data), ""] if record.candidates else ["No candidates are recorded."]
    )
    lines += [_describe_series(data, name) for name in SERIES]
    lines.append(_describe_histogram(record))
    return lines


def format_chosen(data: LogitsData) -> str:
    """Return the chosen token as it stands in a sentence."""
    if data.record.chosen_id == UNKNOWN:
        return "a token that was not seen"
    text = data.text or (data.chosen.text if data.chosen else None)
    return quote_token(text, data.record.chosen_id)


def _describe_choice(data: LogitsData) -> str:
    record = data.record
    if record.chosen_id == UNKNOWN:
        return f"What step {data.step} chose was not seen: it was never fed."
    chance = format_number(probability(record.chosen_logprob))
    when = " before the processors" if data.is_processed else ""
    return (
        f"Step {data.step} chose {format_chosen(data)} (token {record.chosen_id}), "
        f"{format_rank(record.chosen_rank)}, with probability {chance}{when}."
    )


def _describe_spread(record: LogitsRecord) -> str:
    return (
        f"Entropy {format_number(record.entropy)} nats, margin {format_number(record.margin)} (best logit less "
        "the second)."
    )


def _describe_processors(data: LogitsData) -> list[str]:
    every = data.record.candidates
    if every and all(math.isnan(one.score) and not math.isnan(one.logit) for one in every):
        return ["Whether processors changed these logits before the choice was not seen."]
    if not data.is_processed:
        return ["The scores are the logits: no processor changed these candidates."]
    out = sum(is_filtered(one) for one in every)
    if not out:
        return ["The processors changed the logits and filtered none of these candidates."]
    among = f"{out} of these {len(every)} candidates"
    return [f"The processors filtered {among} (top-k, top-p or the like: their score is -Inf)."]


def _candidate_table(data: LogitsData) -> list[str]:
    both = data.is_processed
    head = f"  {'rank':>4}  {'probability':>11}  {'logit':>9}"
    head += f"  {'after':>11}  {'score':>9}" if both else ""
    rows = [f"{head}  token"]
    for one in data.record.candidates:
        mark = "*" if one.token_id == data.record.chosen_id else " "
        text = f"{mark} {one.rank:>4}  {format_number(probability(one.logprob), 11)}"
        text += f"  {format_number(one.logit, 9)}"
        if both:
            after = (
                "filtered" if is_filtered(one) else format_number(probability(one.score_logprob))
            )
            text += f"  {after:>11}  {format_number(one.score, 9)}"
        rows.append(f"{text}  {quote_token(one.text, one.token_id)}")
    return rows


def _describe_series(data: LogitsData, name: str) -> str:
    values = [(value, step) for step, value in data.series(name).items() if value is not None]
    known = [pair for pair in values if math.isfinite(pair[0])]
    what = {"rank": "Rank of the chosen token", "entropy": "Entropy", "margin": "Margin"}[name]
    if not known:
        return f"{what}: no finite value in {data.window.format_steps()}."
    (low, low_step), (high, high_step) = min(known), max(known)
    middle = median(value for value, _ in known)
    n_bad = len(values) - len(known)
    return (
        f"{what} in {data.window.format_steps()}: {format_number(low)} (step {low_step}) to {format_number(high)} "
        f"(step {high_step}), median {format_number(middle)}"
        f"{f', not finite at {n_bad}' if n_bad else ''}."
    )


def _describe_histogram(record: LogitsRecord) -> str:
    if not record.histogram:
        return (
            "No histogram of the logits is recorded: level basic has none, and logits that are "
            "not all finite have none."
        )
    return (
        f"The {sum(record.histogram)} logits lie between {format_number(record.histogram_min)} and "
        f"{format_number(record.histogram_max)}, most of them near {format_number(histogram_mode(record))}."
    )


def histogram_mode(record: LogitsRecord) -> float:
    """Return the middle of the fullest bin of the histogram."""
    fullest = max(range(len(record.histogram)), key=record.histogram.__getitem__)
    span = record.histogram_max - record.histogram_min
    return record.histogram_min + (fullest + 0.5) * span / len(record.histogram)


def find_bin(record: LogitsRecord, logit: float) -> int | None:
    """Return the bin of the histogram that a logit lies in."""
    span = record.histogram_max - record.histogram_min
    if not (record.histogram and math.isfinite(logit) and math.isfinite(span) and span > 0):
        return None
    n_bins = len(record.histogram)
    return min(max(int((logit - record.histogram_min) / span * n_bins), 0), n_bins - 1)


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
