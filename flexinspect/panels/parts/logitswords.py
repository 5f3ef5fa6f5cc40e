"""What the logits panel knows of a step, and the sentences and tables it says of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from flexinspect.panels.parts.windows import StepWindow
from flexinspect.records import UNKNOWN, Candidate, LogitsRecord
from flexinspect.text import escape_unprintable
from flexinspect.trace.rows import StepRow
from flexinspect.widgets.plots import format_number

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
