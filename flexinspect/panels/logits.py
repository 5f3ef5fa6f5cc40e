"""The logits panel: why this token won, how sure the model was, and how that went on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from textual.strip import Strip

from flexinspect.panels.base import Go, Help, Missing, NoOptions, Panel, Picture, Request
from flexinspect.panels.parts.logitswords import (
    UNITS,
    LogitsData,
    bin_of,
    chosen_words,
    describe_logits,
    filtered,
    probability,
    rank_words,
    sick_words,
    word,
)
from flexinspect.panels.parts.windows import (
    BESIDE,
    GAP,
    Area,
    draw_timeline,
    fitting,
    go_to_step,
    left_width,
    load_steps,
    put_beside,
    timeline_columns,
)
from flexinspect.panels.source import Source
from flexinspect.records import UNKNOWN, Candidate
from flexinspect.trace.ranges import holder, step_range
from flexinspect.widgets.lines import Span, clipped, line, right
from flexinspect.widgets.look import Look
from flexinspect.widgets.plots import bar, number, timeline

_TALLEST = 8
"""Lines that a timeline or the histogram takes at most, its title included."""

_NUMBER = 7


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
    sized: ClassVar[bool] = True

    def options(self) -> NoOptions:
        """Return the options; there are none."""
        return NoOptions()

    def load(self, source: Source, request: Request[NoOptions]) -> LogitsData:
        """Read the distribution of the step, and the narrow facts of the window's steps."""
        reader, place = source.reader, request.place
        window = load_steps(reader, place, timeline_columns(request.width))
        branch = holder(reader, place.generation, place.step, place.branch)
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

    def paint(self, data: LogitsData, request: Request[NoOptions], look: Look) -> Picture:
        """Draw the candidates, and as many timelines as there is room for."""
        plan = arrange(data, request.width, request.height)
        left = _left(data, plan, look)
        lines = [strip for name in plan.timelines for strip in _timeline(data, plan, name, look)]
        if plan.beside:
            strips = put_beside(left, lines, request.width, request.height, look)
        else:
            strips = [*left, *lines]
        sick = sick_words(data)
        return Picture(strips[: request.height], sick or _note(data), alarm=bool(sick))

    def point(
        self, x: int, y: int, data: LogitsData, request: Request[NoOptions], *, click: bool
    ) -> Go | None:
        """Go to the step of a timeline's column."""
        if not click:
            return None
        areas = arrange(data, request.width, request.height).timelines.values()
        return go_to_step(x, y, areas, data.window)


def _note(data: LogitsData) -> str:
    rank = rank_words(data.record.chosen_rank)
    return f"{chosen_words(data)}, {rank} · {data.window.words()}"


@dataclass(frozen=True, slots=True)
class Plan:
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


def arrange(data: LogitsData, width: int, height: int) -> Plan:
    """Return the places of everything in a picture of this size."""
    wide = width >= BESIDE
    header = height >= 5
    need = len(data.record.candidates) + (data.chosen is None) + header + 1
    names = data.names
    if wide:
        rows, spare = min(need, height), height
    else:
        most = min(height // 2, 4 * len(names)) if height >= 8 else 0
        rows = min(need, height - most // len(names) * len(names))
        spare = height - rows
    names = names[: spare // 2]
    each = min(spare // len(names), _TALLEST) if names else 0
    x, y = (left_width(width) + GAP, 0) if wide else (0, rows)
    areas = {
        name: Area(x, y + each * i + 1, timeline_columns(width), each - 1)
        for i, name in enumerate(names)
    }
    rest = height - rows - (1 if wide else each * len(names))
    histogram = min(rest, _TALLEST) if data.record.histogram and rest >= 3 else 0
    return Plan(left_width(width), timeline_columns(width), wide, header, rows, histogram, areas)


def _left(data: LogitsData, plan: Plan, look: Look) -> list[Strip]:
    strips = [_summary(data, plan.left, look)]
    strips += [_header(data, plan.left, look)] if plan.header else []
    room = plan.rows - len(strips)
    every = data.record.candidates
    shown = every[:room]
    if data.chosen not in shown and room > 0:
        shown = every[: room - 1]
    strips += [_candidate(one, data, plan.left, look) for one in shown]
    if data.chosen not in shown and room > 0:
        strips.append(_far(data, plan.left, look))
    if plan.histogram and plan.beside:
        strips.append(line([], plan.left, look.style("text")))
    return [*strips, *_histogram(data, plan, look)]


def _summary(data: LogitsData, width: int, look: Look) -> Strip:
    text, strong, muted = look.style("text"), look.style("strong"), look.style("muted")
    record = data.record
    spans: list[Span] = [
        ("entropy ", muted),
        (number(record.entropy), strong),
        (" nats" if width >= 60 else "", muted),
        ("  margin ", muted),
        (number(record.margin), strong),
        ("  rank ", muted),
        (
            "?" if record.chosen_id == UNKNOWN else str(record.chosen_rank),
            strong if record.chosen_rank == 0 else look.style("warn"),
        ),
    ]
    return line(spans, width, text)


def _widths(data: LogitsData, width: int) -> tuple[int, bool, int]:
    """Return the columns of the word, whether logits fit, and those of the bar."""
    fixed = 4 + (_NUMBER + 1) * (1 + data.processed) + (data.processed and 2)
    spare = width - fixed
    logits = spare >= 36
    spare -= (_NUMBER + 1) * (1 + data.processed) if logits else 0
    name = max(min(spare * 3 // 5, 20), 1)
    return name, logits, max(spare - name - 1, 0)


def _header(data: LogitsData, width: int, look: Look) -> Strip:
    name, logits, _ = _widths(data, width)
    heads = ["logit"] * logits + ["before" if data.processed else "prob"]
    text = "    " + clipped("token", name) + "".join(" " + right(head, _NUMBER) for head in heads)
    if data.processed:
        text += (" " + right("score", _NUMBER)) * logits + " " + right("after", _NUMBER + 2)
    return line([(text, look.style("muted"))], width, look.style("text"))


def _candidate(one: Candidate, data: LogitsData, width: int, look: Look) -> Strip:
    name, logits, room = _widths(data, width)
    is_chosen = one.token_id == data.record.chosen_id
    style = look.style("chosen" if is_chosen else "text")
    faint = look.style("muted")
    spans: list[Span] = [
        (f"{'*' if is_chosen else ' '}{one.rank:>2} ", style),
        (clipped(word(one.text, one.token_id), name), style),
    ]
    if logits:
        spans.append((" " + number(one.logit, _NUMBER), faint))
    spans.append((" " + number(probability(one.logprob), _NUMBER), style))
    last = probability(one.logprob)
    if data.processed:
        out, last = filtered(one), probability(one.score_logprob)
        if logits:
            spans.append((" " + number(one.score, _NUMBER), faint))
        after = "filtered" if out else number(last)
        spans.append((" " + right(after, _NUMBER + 2), faint if out else style))
    spans.append((" " + bar(last, room) if room else "", look.style("accent")))
    return line(spans, width, look.style("text"))


def _far(data: LogitsData, width: int, look: Look) -> Strip:
    """Return the line of a chosen token that is not among the candidates shown."""
    record, style = data.record, look.style("chosen")
    if record.chosen_id == UNKNOWN:
        return line([("  ? what was chosen was not seen", look.style("muted"))], width)
    text = data.text or (data.chosen.text if data.chosen else None)
    name, logits, room = _widths(data, width)
    chance = probability(record.chosen_logprob)
    spans: list[Span] = [
        (f"*{right(str(record.chosen_rank), 2)} " if record.chosen_rank < 100 else "*.. ", style),
        (clipped(word(text, record.chosen_id), name), style),
        (" " * (_NUMBER + 1) if logits else "", style),
        (" " + number(chance, _NUMBER), style),
    ]
    if data.processed:
        return line(spans, width, look.style("text"))
    return line([*spans, (" " + bar(chance, room), look.style("accent"))], width)


def _timeline(data: LogitsData, plan: Plan, name: str, look: Look) -> list[Strip]:
    area, values = plan.timelines[name], data.series(name)
    known = [v for v in values.values() if v is not None and math.isfinite(v)]
    here = values.get(data.window.current)
    span = f"{number(min(known))} to {number(max(known))}" if known else "no finite value"
    title: list[Span] = [
        (f"{name} ", look.style("title")),
        (f"{number(here)} {UNITS[name]}".rstrip(), look.style("strong")),
        (f"  {span}", look.style("muted")),
        (f"  {data.window.words()}", look.style("muted")),
    ]
    drawn = draw_timeline(values, data.window, area, look)
    return [line(fitting(title, plan.columns), plan.columns, look.style("text")), *drawn]


def _histogram(data: LogitsData, plan: Plan, look: Look) -> list[Strip]:
    if not plan.histogram:
        return []
    record = data.record
    low, high = number(record.histogram_min), number(record.histogram_max)
    title: list[Span] = [
        ("logits ", look.style("title")),
        (f"{low} to {high}, {sum(record.histogram)} of them, log counts", look.style("muted")),
    ]
    heights = [math.log1p(count) if count > 0 else None for count in record.histogram]
    mark = bin_of(record, data.chosen.logit) if data.chosen else None
    drawn = timeline(heights, plan.left, plan.histogram - 1, look, marked=mark, style="muted")
    return [line(title, plan.left, look.style("text")), *drawn]
