"""What the logits panel knows of a step, and the sentences and tables it says of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from flexinspect.panels.parts.windows import StepWindow
from flexinspect.records import UNKNOWN, Candidate, LogitsRecord
from flexinspect.text import visible
from flexinspect.trace.rows import StepRow
from flexinspect.widgets.plots import number

SERIES: Mapping[str, Callable[[StepRow], float | None]] = {
    "entropy": lambda row: row.entropy,
    "margin": lambda row: row.margin,
    "rank": lambda row: _rank(row.chosen_rank),
}
"""The timelines, in the order in which they give way when there is no room."""

UNITS = {"entropy": "nats", "margin": "logits", "rank": ""}


def _rank(rank: int | None) -> float | None:
    return None if rank is None or rank < 0 else float(rank)


_SAME = 1e-5
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
    def processed(self) -> bool:
        """Whether the processors changed anything among the candidates."""
        return any(changed(one) for one in self.record.candidates)

    @property
    def chosen(self) -> Candidate | None:
        """The chosen token among the candidates, None when it was not one of the best."""
        found = (one for one in self.record.candidates if one.token_id == self.record.chosen_id)
        return next(found, None)

    def series(self, name: str) -> dict[int, float | None]:
        """Return a timeline's value for each step of the window that is recorded."""
        return {step: SERIES[name](row) for step, row in self.rows.items()}

    @property
    def names(self) -> list[str]:
        """The timelines worth drawing: the rank only where it is not 0 everywhere."""
        ranks = self.series("rank").values()
        return [name for name in SERIES if name != "rank" or any(ranks)]


def changed(one: Candidate) -> bool:
    """Tell whether the processors are known to have changed a candidate's logit."""
    if math.isnan(one.score):
        return False
    return not math.isclose(one.logit, one.score, rel_tol=_SAME, abs_tol=_SAME)


def filtered(one: Candidate) -> bool:
    """Tell whether a processor took a candidate out, as top-k and top-p do."""
    return one.score == -math.inf and one.logit != -math.inf


def probability(logprob: float) -> float:
    """Return the probability; NaN where it makes no sense."""
    return math.exp(logprob) if logprob <= 1e-3 else math.nan


def word(text: str | None, token_id: int) -> str:
    """Return a token as it is drawn: its leading space as a dot, its number if it has no text."""
    if not text:
        return f"id {token_id}"
    return "·" + visible(text[1:]) if text[0] == " " else visible(text)


def quoted(text: str | None, token_id: int) -> str:
    """Return a token as it stands in a sentence."""
    return f'"{visible(text)}"' if text else f"token {token_id}"


def sick_words(data: LogitsData) -> str:
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


def rank_words(rank: int) -> str:
    """Return "rank 0 (the best)" or "rank 3"."""
    if rank < 0:
        return "rank unknown"
    return "rank 0 (the best)" if rank == 0 else f"rank {rank}"


def describe_logits(data: LogitsData) -> list[str]:
    """Return the choice, the candidates as a table, and the timelines in words."""
    record = data.record
    lines = [_choice_words(data), _spread_words(record)]
    lines += [sick] if (sick := sick_words(data)) else []
    if not record.n_nan and record.n_inf and not sick:
        lines.append(f"{record.n_inf} logits are -Inf: the model closed these tokens itself.")
    lines += _processor_words(data)
    lines += ["", *_table(data), ""] if record.candidates else ["No candidates are recorded."]
    lines += [_series_words(data, name) for name in SERIES]
    lines.append(_histogram_words(record))
    return lines


def chosen_words(data: LogitsData) -> str:
    """Return the chosen token as it stands in a sentence."""
    if data.record.chosen_id == UNKNOWN:
        return "a token that was not seen"
    text = data.text or (data.chosen.text if data.chosen else None)
    return quoted(text, data.record.chosen_id)


def _choice_words(data: LogitsData) -> str:
    record = data.record
    if record.chosen_id == UNKNOWN:
        return f"What step {data.step} chose was not seen: it was never fed."
    chance = number(probability(record.chosen_logprob))
    when = " before the processors" if data.processed else ""
    return (
        f"Step {data.step} chose {chosen_words(data)} (token {record.chosen_id}), "
        f"{rank_words(record.chosen_rank)}, with probability {chance}{when}."
    )


def _spread_words(record: LogitsRecord) -> str:
    return (
        f"Entropy {number(record.entropy)} nats, margin {number(record.margin)} (best logit less "
        "the second)."
    )


def _processor_words(data: LogitsData) -> list[str]:
    every = data.record.candidates
    if every and all(math.isnan(one.score) and not math.isnan(one.logit) for one in every):
        return ["Whether processors changed these logits before the choice was not seen."]
    if not data.processed:
        return ["The scores are the logits: no processor changed these candidates."]
    out = sum(filtered(one) for one in every)
    if not out:
        return ["The processors changed the logits and filtered none of these candidates."]
    among = f"{out} of these {len(every)} candidates"
    return [f"The processors filtered {among} (top-k, top-p or the like: their score is -Inf)."]


def _table(data: LogitsData) -> list[str]:
    both = data.processed
    head = f"  {'rank':>4}  {'probability':>11}  {'logit':>9}"
    head += f"  {'after':>11}  {'score':>9}" if both else ""
    rows = [f"{head}  token"]
    for one in data.record.candidates:
        mark = "*" if one.token_id == data.record.chosen_id else " "
        text = f"{mark} {one.rank:>4}  {number(probability(one.logprob), 11)}"
        text += f"  {number(one.logit, 9)}"
        if both:
            after = "filtered" if filtered(one) else number(probability(one.score_logprob))
            text += f"  {after:>11}  {number(one.score, 9)}"
        rows.append(f"{text}  {quoted(one.text, one.token_id)}")
    return rows


def _series_words(data: LogitsData, name: str) -> str:
    values = [(value, step) for step, value in data.series(name).items() if value is not None]
    known = [pair for pair in values if math.isfinite(pair[0])]
    what = {"rank": "Rank of the chosen token", "entropy": "Entropy", "margin": "Margin"}[name]
    if not known:
        return f"{what}: no finite value in {data.window.words()}."
    (low, low_step), (high, high_step) = min(known), max(known)
    middle = median(value for value, _ in known)
    n_bad = len(values) - len(known)
    return (
        f"{what} in {data.window.words()}: {number(low)} (step {low_step}) to {number(high)} "
        f"(step {high_step}), median {number(middle)}"
        f"{f', not finite at {n_bad}' if n_bad else ''}."
    )


def _histogram_words(record: LogitsRecord) -> str:
    if not record.histogram:
        return (
            "No histogram of the logits is recorded: level basic has none, and logits that are "
            "not all finite have none."
        )
    return (
        f"The {sum(record.histogram)} logits lie between {number(record.histogram_min)} and "
        f"{number(record.histogram_max)}, most of them near {number(mode(record))}."
    )


def mode(record: LogitsRecord) -> float:
    """Return the middle of the fullest bin of the histogram."""
    fullest = max(range(len(record.histogram)), key=record.histogram.__getitem__)
    span = record.histogram_max - record.histogram_min
    return record.histogram_min + (fullest + 0.5) * span / len(record.histogram)


def bin_of(record: LogitsRecord, logit: float) -> int | None:
    """Return the bin of the histogram that a logit lies in."""
    span = record.histogram_max - record.histogram_min
    if not (record.histogram and math.isfinite(logit) and math.isfinite(span) and span > 0):
        return None
    n_bins = len(record.histogram)
    return min(max(int((logit - record.histogram_min) / span * n_bins), 0), n_bins - 1)
