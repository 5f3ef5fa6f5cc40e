"""The drawing of the ranks of a run side by side: a row per rank, a column per step."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from textual.strip import Strip

from flexinspect.analysis.ranks import rank_text
from flexinspect.analysis.ranks.rank_comparison import RankComparison
from flexinspect.analysis.ranks.rank_run import RankTrace
from flexinspect.analysis.ranks.side_by_side import Cell, SideBySide
from flexinspect.core.text import escape_unprintable, format_ranges
from flexinspect.drawing.text_lines import NamedSpan, Pen, align_right, clip_text, visible
from flexinspect.panels.timeline import StepWindow

BLOCKS = "▁▂▃▄▅▆▇█"
MEASURES = ("differences", "late")
"""What a strip shows: which steps differ, or how late the rank is."""
MIN_TABLE = 5
"""Lines from which the table of steps is drawn."""
STEP_WIDTH = 8
N_DETAILS = 3
"""Lines about the current step, below the ranks."""
COLUMN_WIDTH = 17
"""Columns of a rank in the table of steps."""
_VALUES_WIDTH = {True: 32, False: 28}
"""Columns of the numbers of the current step: of a training, and of a generation."""


class RanksData(Struct, frozen=True):
    """The steps of a strip, and those around the current one with the values of all ranks."""

    window: StepWindow
    rows: Sequence[SideBySide]

    @property
    def row(self) -> SideBySide:
        """The current step."""
        return next(row for row in self.rows if row.step == self.window.current)


def head_lines(found: RankComparison, pen: Pen) -> list[Strip]:
    """Draw what the run is, the verdict, who is late, and which ranks stopped."""
    style = "bad" if found.first is not None else "good"
    texts = [(rank_text.verdict_text(found), style), (rank_text.late_text(found), "text")]
    texts += [(text, "warn") for text in rank_text.state_lines(found)]
    return [pen.line((rank_text.title_text(found), "strong")), *pen.paragraphs(texts)]


def draw_ranks(
    found: RankComparison, data: RanksData, at: int, measure: str, pen: Pen, height: int
) -> list[Strip]:
    """Draw everything; `at` is the place of the chosen rank in the run."""
    head = head_lines(found, pen)
    room = max(height - N_DETAILS - 3, 3)
    n_rows = min(len(found.run.traces), max(room - len(head), 2))
    head = head[: max(room - n_rows, 1)]
    shown = visible(at, n_rows, len(found.run.traces))
    rows = [
        _draw_rank(found, data, place, at, measure, pen)
        for place in range(len(found.run.traces))[shown]
    ]
    title = _title_line(found, data, measure, pen)
    details = _detail_lines(found, data, at, pen)
    lines = [*head, pen.line(), title, *rows, pen.line(), *details]
    return [*lines, *_step_table(found, data, at, pen, height - len(lines) - 1)]


def strip_width(found: RankComparison, width: int) -> int:
    """Return the columns that the steps of a rank take."""
    return max(width - _name_width(found) - _VALUES_WIDTH[found.is_training], 8)


def rank_at(found: RankComparison, at: int, y: int, height: int, pen: Pen) -> int | None:
    """Return the place of the rank that is drawn in a line, None for other lines."""
    room, n_head = max(height - N_DETAILS - 3, 3), len(head_lines(found, pen))
    n_rows = min(len(found.run.traces), max(room - n_head, 2))
    first = min(n_head, max(room - n_rows, 1)) + 2
    shown = visible(at, n_rows, len(found.run.traces))
    places = range(len(found.run.traces))[shown]
    return places[y - first] if 0 <= y - first < len(places) else None


def step_at(found: RankComparison, data: RanksData, x: int, width: int) -> int | None:
    """Return the step at a column, None outside of the strips."""
    return data.window.step_at(x - _name_width(found), strip_width(found, width))


def _name_width(found: RankComparison) -> int:
    return len(f"▸ rank {found.run.world_size - 1} ✖ ")


def _title_line(found: RankComparison, data: RanksData, measure: str, pen: Pen) -> Strip:
    window, width = data.window, strip_width(found, pen.width)
    what = {"differences": "≠ differs", "late": "how late"}[measure]
    steps = clip_text(f"{window.format_steps()} · {what}", width)
    columns = "   loss  grad norm      late" if found.is_training else "token           late"
    here = f"step {data.row.step}"
    return pen.line(
        (clip_text(here, _name_width(found)), "title"),
        (steps, "muted"),
        (f"  {columns}", "title"),
    )


def _draw_rank(
    found: RankComparison, data: RanksData, place: int, at: int, measure: str, pen: Pen
) -> Strip:
    trace = found.run.traces[place]
    sign = {"finished": " ", "recording": "●"}.get(trace.state, "✖")
    name = f"{'▸' if place == at else ' '} rank {trace.rank} {sign}"
    style = "chosen" if place == at else "bad" if sign == "✖" else "title"
    spans: list[NamedSpan] = [(clip_text(name, _name_width(found)), style)]
    spans += _strip_spans(found, data, place, measure, strip_width(found, pen.width))
    cell = data.row.cells.get(trace.rank)
    return pen.line(*spans, *_value_spans(found, data, trace, cell))


def _strip_spans(
    found: RankComparison, data: RanksData, place: int, measure: str, width: int
) -> list[NamedSpan]:
    """Return one sign for each step of the window, padded to the width."""
    window, each = data.window, data.window.columns_per_point(width)
    signs = _late_signs if measure == "late" else _difference_signs
    spans: list[NamedSpan] = []
    for step, (sign, style) in zip(window.steps, signs(found, data, place), strict=True):
        spans.append((sign * each, "cursor" if step == window.current else style))
    spans.append((" " * max(width - each * len(window), 0), "text"))
    return spans


def _difference_signs(
    found: RankComparison, data: RanksData, place: int
) -> Sequence[tuple[str, str]]:
    """Return ≠ for steps that differ, · for others, × for the end of a rank that stopped."""
    trace, generation = found.run.traces[place], data.row.generation
    differing = found.differing_steps(trace.rank, generation)
    last = trace.last or (-1, -1)
    signs = []
    for step in data.window.steps:
        if (generation, step) > last:
            is_end = (generation, step - 1) == last and trace.state not in ("finished", "recording")
            signs.append(("×", "bad") if is_end else (" ", "text"))
        else:
            signs.append(("≠", "bad") if step in differing else ("·", "muted"))
    return signs


def _late_signs(found: RankComparison, data: RanksData, place: int) -> Sequence[tuple[str, str]]:
    """Return a bar for how late the rank is in each step, of the longest in the window."""
    steps, generation = found.waiting.steps, data.row.generation
    shown = [steps.get((generation, step)) for step in data.window.steps]
    # The first step waits for ranks that start later.
    counted = [one for step, one in zip(data.window.steps, shown, strict=True) if one and step]
    top = max((max(one.late_s) for one in counted or filter(None, shown)), default=0.0)
    signs = []
    for one in shown:
        late = 0.0 if one is None else one.late_s[place]
        if one is None or not late:
            signs.append((" " if one is None else "·", "muted"))
        else:
            height = int(late / (top or late) * len(BLOCKS))
            signs.append((BLOCKS[min(height, len(BLOCKS) - 1)], "warn"))
    return signs


def _value_spans(
    found: RankComparison, data: RanksData, trace: RankTrace, cell: Cell | None
) -> list[NamedSpan]:
    """Return the numbers of a rank in the current step."""
    if cell is None:
        why = "ended before" if trace.state != "recording" else "not here yet"
        return [(f"  {why}", "muted")]
    style = "bad" if cell.differs else "text"
    late = "" if cell.late_s is None else f"{cell.late_s * 1e3:.1f} ms"
    late_span: NamedSpan = (align_right(late, 10), "warn" if _is_latest(data, cell) else "muted")
    if not found.is_training:
        token = "?" if cell.token is None else escape_unprintable(repr(cell.token)[1:-1])
        return [("  ", "text"), (clip_text(token, 12), style), late_span]
    loss, norm = ("?" if n is None else f"{n:.4g}" for n in (cell.loss, cell.gradient_norm))
    values = f"  {align_right(loss, 8)} {align_right(norm, 9)}"
    return [(values, style), late_span]


def _is_latest(data: RanksData, cell: Cell) -> bool:
    others = [one.late_s or 0.0 for one in data.row.cells.values()]
    return bool(cell.late_s) and cell.late_s == max(others)


def _detail_lines(found: RankComparison, data: RanksData, at: int, pen: Pen) -> list[Strip]:
    """Draw what differs in this step, who is late in which call, and the chosen rank."""
    cells, trace = data.row.cells, found.run.traces[at]
    by_what: dict[str, list[int]] = {}
    for rank, cell in cells.items():
        if cell.differs:
            by_what.setdefault(cell.differs, []).append(rank)
    texts = [f"rank {format_ranges(ranks)}: {what}" for what, ranks in by_what.items()]
    other = f"rank {found.reference_of(trace.rank)}"
    differ = f"nothing differs from {other}"
    if texts:
        differ = f"differs from {other}: {'; '.join(texts)}"
    latest = max(cells.values(), key=lambda cell: cell.late_s or 0.0, default=None)
    late = "no collective call is recorded in this step"
    if latest is not None and latest.late_s is not None:
        call = data.row.last_call
        late = f"last: rank {latest.rank}, {latest.late_s * 1e3:.1f} ms after the others ({call})"
    place = f"{trace.hostname}, " if trace.hostname else ""
    about = f"rank {trace.rank}: {place}{trace.path.name}, {trace.state}"
    return [
        pen.line((f"step {data.row.step}: {differ}", "bad" if texts else "text")),
        pen.line((late, "text")),
        pen.line((escape_unprintable(about), "muted")),
    ]


def _step_table(
    found: RankComparison, data: RanksData, at: int, pen: Pen, height: int
) -> list[Strip]:
    """Draw the steps around the current one, a column per rank, in what room is left."""
    if height < MIN_TABLE:
        return []
    ranks = [one.rank for one in found.run.traces]
    n_columns = max((pen.width - STEP_WIDTH) // COLUMN_WIDTH, 1)
    columns = ranks[visible(at, min(n_columns, len(ranks)), len(ranks))]
    current = next(n for n, row in enumerate(data.rows) if row.step == data.window.current)
    rows = data.rows[visible(current, min(height - 2, len(data.rows)), len(data.rows))]
    heads = [(clip_text(f"rank {rank}", COLUMN_WIDTH), "title") for rank in columns]
    lines = [pen.line(), pen.line((clip_text("step", STEP_WIDTH), "title"), *heads)]
    for row in rows:
        number = f"{align_right(str(row.step), STEP_WIDTH - 2)}  "
        spans: list[NamedSpan] = [(number, "cursor" if row is data.row else "muted")]
        for rank in columns:
            cell = row.cells.get(rank)
            text = rank_text.cell_text(cell, is_training=found.is_training)
            style = "bad" if cell is not None and cell.differs else "text"
            spans.append((clip_text(text, COLUMN_WIDTH - 1) + " ", style))
        lines.append(pen.line(*spans))
    return lines
