"""The logits panel: the candidates of a step, and timelines of entropy, margin and rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from textual.strip import Strip

from flexinspect.core.text import escape_unprintable, plural
from flexinspect.drawing.plots import bar, format_number, timeline
from flexinspect.drawing.text_lines import NamedSpan, Pen, align_right, clip_text
from flexinspect.drawing.theme import Theme
from flexinspect.panels.base import (
    Cell,
    Help,
    Missing,
    Navigate,
    NoOptions,
    Panel,
    Picture,
    Request,
)
from flexinspect.panels.panel_source import Source
from flexinspect.panels.timeline import (
    Area,
    StepWindow,
    draw_beside,
    draw_timeline,
    is_two_column,
    left_width,
    load_step_window,
    navigate_to_step,
    stack_timelines,
    timeline_columns,
)
from flexinspect.records.step import UNKNOWN, Candidate, LogitsRecord
from flexinspect.trace.queries.range_queries import branch_of_step, step_range
from flexinspect.trace.query_results import StepRow

SERIES: Mapping[str, Callable[[StepRow], float | None]] = {
    "entropy": lambda row: row.entropy,
    "margin": lambda row: row.margin,
    "rank": lambda row: None if (row.chosen_rank or 0) < 0 else row.chosen_rank,
}
"""The timelines; without room for all of them the last ones are left out."""

UNITS = {"entropy": " nats", "margin": " logits", "rank": ""}

_SCORE_RTOL = 1e-5
"""Relative difference up to which a score counts as equal to the logit."""

_MAX_HISTOGRAM_HEIGHT = 8
"""Maximum lines of the histogram, its title included."""

_NUMBER_WIDTH = 7


@dataclass(frozen=True, slots=True)
class LogitsData:
    """The distribution of one step, and the scalar columns of the steps in the window, by step.

    `text` is what the chosen token adds to the text, None when the step recorded no token.
    """

    step: int
    record: LogitsRecord
    text: str | None
    window: StepWindow
    rows: Mapping[int, StepRow]

    @property
    def is_processed(self) -> bool:
        """Whether the logits processors changed any of the candidates."""
        return any(is_changed(candidate) for candidate in self.record.candidates)

    @property
    def chosen(self) -> Candidate | None:
        """The chosen token, None when it is not among the recorded candidates."""
        chosen_id = self.record.chosen_id
        return next((c for c in self.record.candidates if c.token_id == chosen_id), None)

    def series(self, name: str) -> dict[int, float | None]:
        """Return a timeline's value for each recorded step of the window."""
        return {step: SERIES[name](row) for step, row in self.rows.items()}

    @property
    def series_names(self) -> list[str]:
        """The timelines to draw: the rank only if it is not 0 everywhere."""
        ranks = self.series("rank").values()
        return [name for name in SERIES if name != "rank" or any(ranks)]


def is_changed(candidate: Candidate) -> bool:
    """Whether the logits processors are known to have changed a candidate's logit."""
    if math.isnan(candidate.score):
        return False
    return not math.isclose(
        candidate.logit, candidate.score, rel_tol=_SCORE_RTOL, abs_tol=_SCORE_RTOL
    )


def is_filtered(candidate: Candidate) -> bool:
    """Whether a logits processor, such as top-k or top-p, removed a candidate."""
    return candidate.score == -math.inf and candidate.logit != -math.inf


def probability(logprob: float) -> float:
    """Return the probability; NaN for a log-probability that is NaN or above 0."""
    return math.exp(logprob) if logprob <= 1e-3 else math.nan


def token_label(text: str | None, token_id: int) -> str:
    """Return the label of a token: a leading space as a dot, its id if it has no text."""
    if not text:
        return f"id {token_id}"
    return "·" + escape_unprintable(text[1:]) if text[0] == " " else escape_unprintable(text)


def quote_token(text: str | None, token_id: int) -> str:
    """Return a token for use in a sentence: its quoted text, or its id if it has none."""
    return f'"{escape_unprintable(text)}"' if text else f"token {token_id}"


def describe_bad_logits(data: LogitsData) -> str:
    """Describe NaN and +Inf logits in a sentence, "" if there are none.

    -Inf alone raises no alarm: models use it to mask part of their vocabulary.
    """
    record = data.record
    if record.n_nan:
        more = f" and {record.n_inf} infinite" if record.n_inf else ""
        return f"{record.n_nan} of the logits of step {data.step} are NaN{more}."
    if any(candidate.logit == math.inf for candidate in record.candidates):
        return f"{record.n_inf} of the logits of step {data.step} are infinite."
    return ""


def format_rank(rank: int) -> str:
    """Return "rank 0 (the best)" or "rank 3"."""
    if rank < 0:
        return "rank unknown"
    return "rank 0 (the best)" if rank == 0 else f"rank {rank}"


def format_chosen(data: LogitsData) -> str:
    """Return the chosen token for use in a sentence."""
    if data.record.chosen_id == UNKNOWN:
        return "an unknown token"
    return quote_token(_chosen_text(data), data.record.chosen_id)


def _chosen_text(data: LogitsData) -> str | None:
    return data.text or (data.chosen.text if data.chosen else None)


def _describe_choice(data: LogitsData) -> str:
    record = data.record
    if record.chosen_id == UNKNOWN:
        return f"The token chosen at step {data.step} is unknown: the model never received it."
    chance = format_number(probability(record.chosen_logprob))
    when = " before the processors" if data.is_processed else ""
    return (
        f"Step {data.step} chose {format_chosen(data)} (token {record.chosen_id}), "
        f"{format_rank(record.chosen_rank)}, with probability {chance}{when}."
    )


def _describe_processors(data: LogitsData) -> str:
    candidates = data.record.candidates
    if candidates and all(math.isnan(c.score) and not math.isnan(c.logit) for c in candidates):
        return "It is unknown whether logits processors changed these logits before the choice."
    if not data.is_processed:
        return "The scores are the logits: no processor changed these candidates."
    n_filtered = sum(map(is_filtered, candidates))
    if not n_filtered:
        return "The processors changed the logits and filtered none of these candidates."
    share = f"{n_filtered} of these {len(candidates)} candidates"
    return f"The processors filtered {share} (as top-k and top-p do: their score is -Inf)."


def _candidate_table(data: LogitsData) -> list[str]:
    header = f"  {'rank':>4}  {'probability':>11}  {'logit':>9}"
    header += f"  {'after':>11}  {'score':>9}" if data.is_processed else ""
    rows = [f"{header}  token"]
    for candidate in data.record.candidates:
        mark = "*" if candidate.token_id == data.record.chosen_id else " "
        chance = format_number(probability(candidate.logprob), 11)
        row = f"{mark} {candidate.rank:>4}  {chance}  {format_number(candidate.logit, 9)}"
        if data.is_processed:
            row += f"  {_format_after(candidate):>11}  {format_number(candidate.score, 9)}"
        rows.append(f"{row}  {quote_token(candidate.text, candidate.token_id)}")
    return rows


def _format_after(candidate: Candidate) -> str:
    """Return the probability after the processors, or "filtered"."""
    if is_filtered(candidate):
        return "filtered"
    return format_number(probability(candidate.score_logprob))


def _describe_series(data: LogitsData, name: str) -> str:
    values = [(value, step) for step, value in data.series(name).items() if value is not None]
    finite = [pair for pair in values if math.isfinite(pair[0])]
    title = {"rank": "Rank of the chosen token", "entropy": "Entropy", "margin": "Margin"}[name]
    steps = data.window.format_steps()
    if not finite:
        return f"{title}: no finite value in {steps}."
    (low, low_step), (high, high_step) = min(finite), max(finite)
    middle = median(value for value, _ in finite)
    n_bad = len(values) - len(finite)
    bad = f", non-finite at {plural(n_bad, 'step')}" if n_bad else ""
    return (
        f"{title} in {steps}: {format_number(low)} (step {low_step}) to {format_number(high)} "
        f"(step {high_step}), median {format_number(middle)}{bad}."
    )


def _describe_histogram(record: LogitsRecord) -> str:
    if not record.histogram:
        return (
            "No histogram of the logits is recorded: it needs level advanced or higher, and only "
            "finite logits."
        )
    low, high = format_number(record.histogram_min), format_number(record.histogram_max)
    return (
        f"The {sum(record.histogram)} logits lie between {low} and {high}, most of them near "
        f"{format_number(histogram_mode(record))}."
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


class LogitsPanel(Panel[LogitsData, NoOptions]):
    """Bars of the most likely tokens, and timelines of entropy, margin and rank."""

    name: ClassVar[str] = "logits"
    title: ClassVar[str] = "Logits"
    needs_tokens: ClassVar[bool] = True
    help: ClassVar[Help] = Help(
        "It shows the most likely tokens of this step, which one was chosen, and the entropy, the "
        "margin and the rank of the choice over the steps.",
        "A bar is a probability and * marks the chosen token; with sampling, 'after' is the "
        "probability after the logits processors and 'filtered' is a token that they removed; "
        "click a timeline to go to a step.",
        "Look for a step where the entropy jumps or the margin falls near 0: there the answer "
        "could have changed.",
    )
    depends_on_size: ClassVar[bool] = True

    def load(self, source: Source, request: Request[NoOptions]) -> LogitsData:
        """Read the distribution of the step, and the scalar columns of the window's steps."""
        reader, place = source.reader, request.place
        window = load_step_window(reader, place, timeline_columns(request.width))
        branch = branch_of_step(reader, place.generation, place.step, place.branch)
        record = reader.logits(place.generation, place.step, branch)
        if record is None:
            raise Missing(
                f"No logits are recorded at step {place.step}.",
                "The logits hook records them at every level; 'flexinspect dump' shows whether it "
                "was disabled.",
            )
        rows = step_range(reader, place.generation, window.start, window.stop, place.branch)
        tokens = reader.step_tokens(place.generation, place.step, branch)
        text = next((token.text for token in tokens if token.token_id == record.chosen_id), None)
        return LogitsData(place.step, record, text, window, {row.step: row for row in rows})

    def describe(self, data: LogitsData) -> list[str]:
        """Return the choice, the candidates as a table, and summaries of the timelines."""
        record, problem = data.record, describe_bad_logits(data)
        entropy, margin = format_number(record.entropy), format_number(record.margin)
        spread = f"Entropy {entropy} nats, margin {margin} (best logit minus second best)."
        lines = [_describe_choice(data), spread]
        if problem:
            lines.append(problem)
        elif record.n_inf and not record.n_nan:
            lines.append(f"{record.n_inf} logits are -Inf: the model masked these tokens itself.")
        lines.append(_describe_processors(data))
        table = ["", *_candidate_table(data), ""]
        lines += table if record.candidates else ["No candidates are recorded."]
        lines += [_describe_series(data, name) for name in SERIES]
        return [*lines, _describe_histogram(record)]

    def paint(self, data: LogitsData, request: Request[NoOptions], theme: Theme) -> Picture:
        """Draw the candidates, and as many timelines as there is room for."""
        layout = logits_layout(data, request.width, request.height)
        pen = Pen(theme, request.width)
        left = _draw_candidates(data, layout, pen.resize(left_width(request.width)))
        timelines = [
            strip
            for name, area in layout.timelines.items()
            for strip in _draw_series(data, name, area, theme)
        ]
        strips = draw_beside(left, timelines, request.height, pen)
        problem = describe_bad_logits(data)
        rank, steps = format_rank(data.record.chosen_rank), data.window.format_steps()
        note = problem or f"{format_chosen(data)}, {rank} · {steps}"
        return Picture(strips, note, alarm=bool(problem))

    def on_click(self, at: Cell, data: LogitsData, request: Request[NoOptions]) -> Navigate | None:
        """Go to the step of a timeline's column."""
        areas = logits_layout(data, request.width, request.height).timelines.values()
        return navigate_to_step(at, areas, data.window)


@dataclass(frozen=True, slots=True)
class LogitsLayout:
    """The lines of candidates (their header included) and of the histogram, and the timelines.

    The areas of the timelines exclude their titles; they are beside the rest if `is_wide`.
    """

    is_wide: bool
    has_header: bool
    rows: int
    histogram: int
    timelines: dict[str, Area]


def logits_layout(data: LogitsData, width: int, height: int) -> LogitsLayout:
    """Lay out a picture of this size."""
    wide, names, has_header = is_two_column(width), data.series_names, height >= 5
    rows = min(len(data.record.candidates) + (data.chosen is None) + has_header + 1, height)
    if wide:
        timelines = stack_timelines(names, width, 0, height)
    else:
        reserved = min(height // 2, 4 * len(names)) if height >= 8 else 0
        rows = min(rows, height - reserved // len(names) * len(names))
        timelines = stack_timelines(names, width, rows, height - rows)
    n_lines = 1 if wide else sum(area.height + 1 for area in timelines.values())
    rest = height - rows - n_lines
    histogram = min(rest, _MAX_HISTOGRAM_HEIGHT) if data.record.histogram and rest >= 3 else 0
    return LogitsLayout(wide, has_header, rows, histogram, timelines)


def _draw_candidates(data: LogitsData, layout: LogitsLayout, pen: Pen) -> list[Strip]:
    strips = [_draw_summary(data, pen)]
    strips += [_draw_header(data, pen)] if layout.has_header else []
    room = layout.rows - len(strips)
    shown = data.record.candidates[:room]
    if data.chosen not in shown and room > 0:
        shown = shown[: room - 1]
    strips += [_draw_candidate(candidate, data, pen) for candidate in shown]
    if data.chosen not in shown and room > 0:
        strips.append(_draw_unlisted_choice(data, pen))
    if not layout.histogram:
        return strips
    gap = [pen.line()] if layout.is_wide else []
    return [*strips, *gap, *_draw_histogram(data, layout, pen)]


def _draw_summary(data: LogitsData, pen: Pen) -> Strip:
    record = data.record
    return pen.line(
        ("entropy ", "muted"),
        (format_number(record.entropy), "strong"),
        (" nats" if pen.width >= 60 else "", "muted"),
        ("  margin ", "muted"),
        (format_number(record.margin), "strong"),
        ("  rank ", "muted"),
        (
            "?" if record.chosen_id == UNKNOWN else str(record.chosen_rank),
            "strong" if record.chosen_rank == 0 else "warn",
        ),
    )


def _column_widths(data: LogitsData, width: int) -> tuple[int, bool, int]:
    """Return the columns of the token, whether logits fit, and the columns of the bar."""
    numbers = (_NUMBER_WIDTH + 1) * (1 + data.is_processed)
    spare = width - 4 - numbers - (data.is_processed and 2)
    logits = spare >= 36
    spare -= numbers if logits else 0
    name = max(min(spare * 3 // 5, 20), 1)
    return name, logits, max(spare - name - 1, 0)


def _draw_header(data: LogitsData, pen: Pen) -> Strip:
    name, logits, _ = _column_widths(data, pen.width)
    titles = [("logit", _NUMBER_WIDTH)] * logits
    titles.append(("before" if data.is_processed else "prob", _NUMBER_WIDTH))
    if data.is_processed:
        titles += [("score", _NUMBER_WIDTH)] * logits
        titles.append(("after", _NUMBER_WIDTH + 2))
    columns = "".join(" " + align_right(title, columns) for title, columns in titles)
    return pen.line((f"    {clip_text('token', name)}{columns}", "muted"))


def _draw_candidate(candidate: Candidate, data: LogitsData, pen: Pen) -> Strip:
    name, logits, room = _column_widths(data, pen.width)
    is_chosen = candidate.token_id == data.record.chosen_id
    style = "chosen" if is_chosen else "text"
    share = probability(candidate.logprob)
    spans: list[NamedSpan] = [
        (f"{'*' if is_chosen else ' '}{candidate.rank:>2} ", style),
        (clip_text(token_label(candidate.text, candidate.token_id), name), style),
    ]
    if logits:
        spans.append((" " + format_number(candidate.logit, _NUMBER_WIDTH), "muted"))
    spans.append((" " + format_number(share, _NUMBER_WIDTH), style))
    if data.is_processed:
        share = probability(candidate.score_logprob)
        if logits:
            spans.append((" " + format_number(candidate.score, _NUMBER_WIDTH), "muted"))
        after = align_right(_format_after(candidate), _NUMBER_WIDTH + 2)
        spans.append((" " + after, "muted" if is_filtered(candidate) else style))
    return pen.line(*spans, (" " + bar(share, room) if room else "", "accent"))


def _draw_unlisted_choice(data: LogitsData, pen: Pen) -> Strip:
    """Draw the line of a chosen token that is not among the candidates shown."""
    record = data.record
    if record.chosen_id == UNKNOWN:
        return pen.line(("  ? the chosen token is unknown", "muted"))
    name, logits, room = _column_widths(data, pen.width)
    chance = probability(record.chosen_logprob)
    rank = align_right(str(record.chosen_rank), 2) if record.chosen_rank < 100 else ".."
    label = clip_text(token_label(_chosen_text(data), record.chosen_id), name)
    blank = " " * (_NUMBER_WIDTH + 1) if logits else ""
    chosen = f"*{rank} {label}{blank} {format_number(chance, _NUMBER_WIDTH)}"
    length = "" if data.is_processed else " " + bar(chance, room)
    return pen.line((chosen, "chosen"), (length, "accent"))


def _draw_series(data: LogitsData, name: str, area: Area, theme: Theme) -> list[Strip]:
    values = data.series(name)
    finite = [v for v in values.values() if v is not None and math.isfinite(v)]
    limits = "no finite value"
    if finite:
        limits = f"{format_number(min(finite))} to {format_number(max(finite))}"
    title = [
        (f"{name} ", "title"),
        (f"{format_number(values.get(data.window.current))}{UNITS[name]}", "strong"),
        (f"  {limits}", "muted"),
        (f"  {data.window.format_steps()}", "muted"),
    ]
    return draw_timeline(title, map(values.get, data.window.steps), data.window, area, theme)


def _draw_histogram(data: LogitsData, layout: LogitsLayout, pen: Pen) -> list[Strip]:
    record = data.record
    low, high = format_number(record.histogram_min), format_number(record.histogram_max)
    about = f"{low} to {high}, {sum(record.histogram)} of them, log counts"
    heights = [math.log1p(count) if count > 0 else None for count in record.histogram]
    mark = find_bin(record, data.chosen.logit) if data.chosen else None
    height = layout.histogram - 1
    drawn = timeline(heights, pen.width, height, pen.theme, marked=mark, style="muted")
    return [pen.line(("logits ", "title"), (about, "muted")), *drawn]
