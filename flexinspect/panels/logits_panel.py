"""The logits panel: the candidates of a step, and timelines of entropy, margin and rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, compress
from statistics import median

from msgspec import Struct
from msgspec.structs import replace
from textual.strip import Strip

from flexinspect.core.text import escape_unprintable, plural
from flexinspect.drawing import plots
from flexinspect.drawing.text_lines import NamedSpan, Pen, align_right, clip_text
from flexinspect.drawing.theme import Theme
from flexinspect.panels import timeline
from flexinspect.panels.base import Help, Missing, NoOptions, Panel, Picture, Request, hook_hint
from flexinspect.panels.panel_source import Source
from flexinspect.records.imported import imported_facts
from flexinspect.records.step import UNKNOWN, Candidate, LogitsRecord
from flexinspect.trace.queries import branch_of_step, step_range
from flexinspect.trace.query_results import StepRow
from flexinspect.trace.reader import TraceReader

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

NUMBER_WIDTH = 7
_PROCESSED = "logits.processed."
"""The beginning of the streams with what each logits processor left of the candidates."""


class LogitsData(Struct, frozen=True):
    """The distribution of one step, and the scalar columns of the steps in the window, by step.

    `text` is what the chosen token adds to the text, None when the step recorded no token.
    `is_imported` says that the trace holds only what another tool has dumped.
    """

    step: int
    record: LogitsRecord
    text: str | None
    window: timeline.StepWindow
    rows: Mapping[int, StepRow]
    is_imported: bool = False
    processed: Mapping[str, Sequence[float]] = {}
    """The candidates' log-probabilities after each logits processor, in order, by its name."""

    @property
    def is_processed(self) -> bool:
        """Whether the logits processors changed any of the candidates."""
        return any(is_changed(candidate) for candidate in self.record.candidates)

    @property
    def chosen(self) -> Candidate | None:
        """The chosen token, None when it is not among the recorded candidates."""
        chosen_id = self.record.chosen_id
        return next((c for c in self.record.candidates if c.token_id == chosen_id), None)

    @property
    def chosen_text(self) -> str | None:
        """The text of the chosen token, if it is known."""
        return self.text or (self.chosen.text if self.chosen else None)

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
    return not math.isnan(candidate.score) and not math.isclose(
        candidate.logit, candidate.score, rel_tol=_SCORE_RTOL, abs_tol=_SCORE_RTOL
    )


def is_filtered(candidate: Candidate) -> bool:
    """Whether a logits processor, such as top-k or top-p, removed a candidate."""
    return candidate.score == -math.inf and candidate.logit != -math.inf


def probability(logprob: float) -> float:
    """Return the probability; NaN for a log-probability that is NaN or above 0."""
    return math.exp(logprob) if logprob <= 1e-3 else math.nan


def format_probability(logprob: float, width: int = 0) -> str:
    """Return the probability as the table of candidates shows it: "0.125", "1.8e-06"."""
    return plots.format_number(probability(logprob), width)


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
    """Return "the top candidate" or "rank 3"."""
    if rank < 0:
        return "rank unknown"
    return "the top candidate" if rank == 0 else f"rank {rank}"


def format_chosen(data: LogitsData) -> str:
    """Return the chosen token for use in a sentence."""
    if data.record.chosen_id == UNKNOWN:
        return "an unknown token"
    return quote_token(data.chosen_text, data.record.chosen_id)


def _describe_choice(data: LogitsData) -> str:
    record = data.record
    if record.chosen_id == UNKNOWN:
        why = "the dump does not name it" if data.is_imported else "the model never received it"
        return f"The token chosen at step {data.step} is unknown: {why}."
    chance = format_probability(record.chosen_logprob)
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


def _load_processed(reader: TraceReader, key: tuple[int, int, int]) -> dict[str, Sequence[float]]:
    """Return what each logits processor left of the candidates: log-probabilities, in order."""
    generation, step, branch = key
    found: dict[int, tuple[str, Sequence[float]]] = {}
    for info in reader.arrays(generation, step, branch):
        if info.stream.startswith(_PROCESSED):
            number, _, name = info.stream.removeprefix(_PROCESSED).partition(".")
            array = reader.array(generation, step, info.stream, None, branch)
            if number.isdecimal() and array is not None:
                found[int(number)] = (escape_unprintable(name), array.tolist())
    # A processor may run twice; then the number tells them apart.
    return {f"{number + 1} {name}": values for number, (name, values) in sorted(found.items())}


def _processor_table(data: LogitsData) -> list[str]:
    """Return the probability of each candidate before and after each processor."""
    names = [name.removesuffix("LogitsWarper").removesuffix("Processor") for name in data.processed]
    width = max(9, *map(len, names))
    heads = "".join(f"  {name:>{width}}" for name in ("logits", *names))
    lines = ["The processors, one after the other (probability):", f"{heads}  token"]
    for number, candidate in enumerate(data.record.candidates):
        after = (values[number] for values in data.processed.values() if number < len(values))
        cells = (
            "filtered" if logprob == -math.inf else format_probability(logprob)
            for logprob in (candidate.logprob, *after)
        )
        row = "".join(f"  {cell:>{width}}" for cell in cells)
        lines.append(f"{row}  {quote_token(candidate.text, candidate.token_id)}")
    return lines


def _candidate_numbers(candidate: Candidate, width: int) -> tuple[str, str, str, str]:
    """Return the logit, its probability, the score and its probability (or "filtered")."""
    logit, score = (plots.format_number(n, width) for n in (candidate.logit, candidate.score))
    before = format_probability(candidate.logprob, width)
    after = format_probability(candidate.score_logprob, width)
    return logit, before, score, "filtered" if is_filtered(candidate) else after


def _candidate_table(data: LogitsData) -> list[str]:
    header = f"  {'rank':>4}  {'probability':>11}  {'logit':>9}"
    lines = [f"{header}  {'after':>11}  {'score':>9}" if data.is_processed else header]
    lines[0] += "  token"
    for candidate in data.record.candidates:
        mark = "*" if candidate.token_id == data.record.chosen_id else " "
        logit, before, score, after = _candidate_numbers(candidate, 9)
        row = f"{mark} {candidate.rank:>4}  {before:>11}  {logit}"
        row += f"  {after:>11}  {score}" if data.is_processed else ""
        lines.append(f"{row}  {quote_token(candidate.text, candidate.token_id)}")
    return lines


def _describe_series(data: LogitsData, name: str) -> str:
    values = [(value, step) for step, value in data.series(name).items() if value is not None]
    finite = [pair for pair in values if math.isfinite(pair[0])]
    title = {"rank": "Rank of the chosen token", "entropy": "Entropy", "margin": "Margin"}[name]
    title += f" in {data.window.format_steps()}"
    if not finite:
        return f"{title}: no finite value."
    (low, low_step), (high, high_step) = min(finite), max(finite)
    middle = median(value for value, _ in finite)
    n_bad = len(values) - len(finite)
    bad = f", non-finite at {plural(n_bad, 'step')}" if n_bad else ""
    return (
        f"{title}: {plots.format_number(low)} (step {low_step}) to {plots.format_number(high)} "
        f"(step {high_step}), median {plots.format_number(middle)}{bad}."
    )


def _describe_histogram(record: LogitsRecord) -> str:
    counts, low, high = record.histogram, record.histogram_min, record.histogram_max
    if not counts:
        return (
            "No histogram of the logits is recorded: it needs level advanced or higher, and only "
            "finite logits."
        )
    fullest = max(range(len(counts)), key=counts.__getitem__)
    mode = plots.format_number(low + (fullest + 0.5) * (high - low) / len(counts))
    span = f"{plots.format_number(low)} and {plots.format_number(high)}"
    return f"The {sum(counts)} logits lie between {span}, most of them near {mode}."


def find_bin(record: LogitsRecord, logit: float) -> int | None:
    """Return the bin of the histogram that a logit lies in."""
    span = record.histogram_max - record.histogram_min
    if not (record.histogram and math.isfinite(logit) and math.isfinite(span) and span > 0):
        return None
    n_bins = len(record.histogram)
    return min(max(int((logit - record.histogram_min) / span * n_bins), 0), n_bins - 1)


class LogitsPanel(Panel[LogitsData, NoOptions]):
    """Bars of the most likely tokens, and timelines of entropy, margin and rank."""

    name = "logits"
    title = "Logits"
    needs_tokens = True
    help = Help(
        "It shows the most likely tokens of this step, which one was chosen, and the entropy, the "
        "margin and the rank of the choice over the steps.",
        "A bar is a probability and * marks the chosen token; with sampling, 'after' is the "
        "probability after the logits processors and 'filtered' is a token that they removed; "
        "click a timeline to go to a step.",
        "Look for a step where the entropy jumps or the margin falls near 0: there the answer "
        "could have changed.",
    )
    depends_on_size = True

    def load(self, source: Source, request: Request[NoOptions]) -> LogitsData:
        """Read the distribution of the step, and the scalar columns of the window's steps."""
        reader, place = source.reader, request.place
        window = timeline.load_step_window(reader, place, timeline.column_widths(request.width)[1])
        branch = branch_of_step(reader, place.generation, place.step, place.branch)
        record = reader.logits(place.generation, place.step, branch)
        if record is None:
            missing = f"No logits are recorded at step {place.step}."
            raise Missing(missing, hook_hint(source, "logits", "them"))
        rows = step_range(reader, place.generation, window.start, window.stop, place.branch)
        tokens = reader.step_tokens(place.generation, place.step, branch)
        text = next((token.text for token in tokens if token.token_id == record.chosen_id), None)
        by_step = {row.step: row for row in rows}
        is_imported = imported_facts(reader.run()) is not None
        processed = _load_processed(reader, (place.generation, place.step, branch))
        return LogitsData(place.step, record, text, window, by_step, is_imported, processed)

    def describe(self, data: LogitsData) -> list[str]:
        """Return the choice, the candidates as a table, and summaries of the timelines."""
        record, problem = data.record, describe_bad_logits(data)
        entropy, margin = plots.format_number(record.entropy), plots.format_number(record.margin)
        spread = f"Entropy {entropy} nats, margin {margin} (best logit minus second best)."
        lines = [_describe_choice(data), spread]
        if problem:
            lines.append(problem)
        elif record.n_inf and not record.n_nan:
            lines.append(f"{record.n_inf} logits are -Inf: the model masked these tokens itself.")
        lines.append(_describe_processors(data))
        table = ["", *_candidate_table(data), ""]
        lines += table if record.candidates else ["No candidates are recorded."]
        if data.processed:
            lines += [*_processor_table(data), ""]
        lines += [_describe_series(data, name) for name in SERIES]
        return [*lines, _describe_histogram(record)]

    def paint(self, data: LogitsData, request: Request[NoOptions], theme: Theme) -> Picture:
        """Draw the candidates, and as many timelines as there is room for."""
        pen, width, height = Pen(theme, request.width), request.width, request.height
        left_pen = pen.resize(timeline.column_widths(width)[0])
        wide, names, has_header = left_pen.width < width, data.series_names, height >= 5
        rows = min(len(data.record.candidates) + (data.chosen is None) + has_header + 1, height)
        if wide:
            rest, areas = height - rows - 1, timeline.stack_timelines(names, width, 0, height)
        else:
            reserved = min(height // 2, 4 * len(names)) if height >= 8 else 0
            rows = min(rows, height - reserved // len(names) * len(names))
            areas = timeline.stack_timelines(names, width, rows, height - rows)
            rest = height - rows - sum(area.height + 1 for area in areas.values())
        left = _draw_candidates(data, rows, has_header, left_pen)
        if data.record.histogram and rest >= 3:
            histogram = _draw_histogram(data, min(rest, _MAX_HISTOGRAM_HEIGHT), left_pen)
            left += [*[left_pen.line()] * wide, *histogram]
            if not wide:  # the timelines are below it
                areas = {n: replace(a, y=a.y + len(histogram)) for n, a in areas.items()}
        drawn = (_draw_series(name, data, area, theme) for name, area in areas.items())
        strips = timeline.draw_beside(left, [*chain.from_iterable(drawn)], height, pen)
        problem = describe_bad_logits(data)
        rank, steps = format_rank(data.record.chosen_rank), data.window.format_steps()
        note = problem or f"{format_chosen(data)}, {rank} · {steps}"
        return Picture(strips, note, bool(problem), timeline.timeline_target(data.window, areas))


def _draw_series(name: str, data: LogitsData, area: timeline.Area, theme: Theme) -> list[Strip]:
    """Draw one of `SERIES` over the window."""
    values, window = data.series(name), data.window
    low, high = plots.finite_bounds(values.values())
    limits = f"{plots.format_number(low)} to {plots.format_number(high)}"
    title = [
        (f"{name} ", "title"),
        (f"{plots.format_number(values.get(window.current))}{UNITS[name]}", "strong"),
        (f"  {'no finite value' if low is None else limits}", "muted"),
        (f"  {window.format_steps()}", "muted"),
    ]
    return timeline.draw_timeline(title, map(values.get, window.steps), window, area, theme)


def _draw_candidates(data: LogitsData, rows: int, header: bool, pen: Pen) -> list[Strip]:
    record, is_unknown = data.record, data.record.chosen_id == UNKNOWN
    rank = "?" if is_unknown else str(record.chosen_rank)
    summary: list[NamedSpan] = [
        ("entropy ", "muted"),
        (plots.format_number(record.entropy), "strong"),
        (" nats" if pen.width >= 60 else "", "muted"),
        ("  margin ", "muted"),
        (plots.format_number(record.margin), "strong"),
        ("  rank ", "muted"),
        (rank, "warn" if record.chosen_rank else "strong"),
    ]
    strips = [pen.line(*summary)]
    if header:
        titles = ("logit", "before" if data.is_processed else "prob", "score", "after")
        strips.append(_draw_row("    ", "token", titles, "muted", None, data, pen))
    room = rows - len(strips)
    shown = record.candidates[:room]
    if data.chosen not in shown and room > 0:
        shown = shown[: room - 1]
    strips += [_draw_candidate(candidate, data, pen) for candidate in shown]
    if data.chosen not in shown and room > 0:
        strips.append(_draw_unlisted_choice(data, pen))
    return strips


def _draw_candidate(candidate: Candidate, data: LogitsData, pen: Pen) -> Strip:
    is_chosen = candidate.token_id == data.record.chosen_id
    return _draw_row(
        f"{'*' if is_chosen else ' '}{candidate.rank:>2} ",
        token_label(candidate.text, candidate.token_id),
        _candidate_numbers(candidate, NUMBER_WIDTH),
        "chosen" if is_chosen else "text",
        probability(candidate.score_logprob if data.is_processed else candidate.logprob),
        data,
        pen,
    )


def _draw_unlisted_choice(data: LogitsData, pen: Pen) -> Strip:
    record = data.record
    if record.chosen_id == UNKNOWN:
        return pen.line(("  ? the chosen token is unknown", "muted"))
    numbers = ("", format_probability(record.chosen_logprob, NUMBER_WIDTH), "", "")
    mark = f"*{record.chosen_rank:>2} " if record.chosen_rank < 100 else "*.. "
    label = token_label(data.chosen_text, record.chosen_id)
    share = None if data.is_processed else probability(record.chosen_logprob)
    return _draw_row(mark, label, numbers, "chosen", share, data, pen)


def _draw_row(
    mark: str,
    label: str,
    numbers: tuple[str, str, str, str],
    style: str,
    share: float | None,
    data: LogitsData,
    pen: Pen,
) -> Strip:
    """Draw a row of the table: a label, those of the numbers that fit, and a bar over `share`.

    Scores and the probabilities after the processors are shown if those changed any candidate.
    """
    processed = data.is_processed
    width = (NUMBER_WIDTH + 1) * (1 + processed)
    spare = pen.width - 4 - width - 2 * processed
    has_logits = spare >= 36
    spare -= width * has_logits
    name = max(min(spare * 3 // 5, 20), 1)
    room = max(spare - name - 1, 0)
    columns = (has_logits, True, has_logits and processed, processed)
    widths = (*(NUMBER_WIDTH,) * 3, NUMBER_WIDTH + 2)
    after_style = "muted" if numbers[3] == "filtered" else style
    styles = ("muted", style, "muted", after_style)
    cells = [
        (" " + align_right(number, n), number_style)
        for number, n, number_style in zip(numbers, widths, styles, strict=True)
    ]
    length = "" if share is None or not room else " " + plots.bar(share, room)
    label_spans = [(mark, style), (clip_text(label, name), style)]
    return pen.line(*label_spans, *compress(cells, columns), (length, "accent"))


def _draw_histogram(data: LogitsData, height: int, pen: Pen) -> list[Strip]:
    record = data.record
    low, high = plots.format_number(record.histogram_min), plots.format_number(record.histogram_max)
    about = f"{low} to {high}, {sum(record.histogram)} of them, log counts"
    heights = [math.log1p(count) if count > 0 else None for count in record.histogram]
    mark = find_bin(record, data.chosen.logit) if data.chosen else None
    drawn = plots.timeline(heights, pen.width, height - 1, pen.theme, marked=mark, style="muted")
    return [pen.line(("logits ", "title"), (about, "muted")), *drawn]
