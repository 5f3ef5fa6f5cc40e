"""The steps of all ranks beside each other: the token or the loss of each, and what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from flexinspect.analysis.ranks.rank_comparison import RankComparison
from flexinspect.analysis.ranks.waiting import StepWaits
from flexinspect.trace.reader import TraceReader


class Cell(Struct, frozen=True):
    """One step of one rank: the chosen token, or loss and gradient norm (None: not recorded).

    `differs` names what differs first from the reference beyond noise, of what must be equal; "" if
    nothing does.
    """

    rank: int
    token: str | None = None
    loss: float | None = None
    gradient_norm: float | None = None
    wall_ms: float | None = None
    waited_s: float | None = None
    late_s: float | None = None
    differs: str = ""


class SideBySide(Struct, frozen=True):
    """One step: the cells of the ranks that have it, by rank."""

    generation: int
    step: int
    cells: Mapping[int, Cell]
    last_call: str = ""


def generation_steps(readers: Sequence[TraceReader], generation: int) -> int:
    """Return the number of steps of the rank that has most, of one generation."""
    lasts = [reader.last_step(generation) for reader in readers if _has(reader, generation)]
    return max((last + 1 for last in lasts if last is not None), default=0)


def load_steps_of_ranks(
    found: RankComparison,
    readers: Sequence[TraceReader],
    generation: int,
    start: int,
    stop: int,
) -> list[SideBySide]:
    """Return the steps `start <= step < stop` of a generation. Raises `TraceError`."""
    columns: dict[int, dict[int, Cell]] = {}
    for trace, reader in zip(found.run.traces, readers, strict=True):
        if _has(reader, generation):
            load = _training_cells if found.is_training else _token_cells
            columns[trace.rank] = load(reader, trace.rank, generation, start, stop)
    differing = {rank: found.differing_steps(rank, generation) for rank in found.pairs}
    rows = []
    for step in range(start, stop):
        waits = found.waiting.steps.get((generation, step))
        cells = {
            rank: _with_waits(cells[step], found, waits, differing.get(rank, {}).get(step, ""))
            for rank, cells in columns.items()
            if step in cells
        }
        rows.append(SideBySide(generation, step, cells, waits.last_call if waits else ""))
    return rows


def _has(reader: TraceReader, generation: int) -> bool:
    return any(row.generation == generation for row in reader.generations())


def _training_cells(
    reader: TraceReader, rank: int, generation: int, start: int, stop: int
) -> dict[int, Cell]:
    times = {row.step: row.wall_ms for row in reader.steps(generation, 0, start, stop)}
    return {
        step: Cell(
            rank,
            loss=record.loss if record.has_loss else None,
            gradient_norm=record.total_norm,
            wall_ms=times.get(step),
        )
        for step, record in reader.training_steps(generation, 0, start, stop).items()
    }


def _token_cells(
    reader: TraceReader, rank: int, generation: int, start: int, stop: int
) -> dict[int, Cell]:
    texts = {
        token.step: token.text or token.token
        for token in reader.tokens(generation)
        if token.step is not None and start <= token.step < stop
    }
    return {
        row.step: Cell(rank, token=texts.get(row.step), wall_ms=row.wall_ms)
        for row in reader.steps(generation, 0, start, stop)
    }


def _with_waits(cell: Cell, found: RankComparison, waits: StepWaits | None, differs: str) -> Cell:
    if waits is None and not differs:
        return cell
    at = [one.rank for one in found.run.traces].index(cell.rank)
    return Cell(
        cell.rank,
        cell.token,
        cell.loss,
        cell.gradient_norm,
        cell.wall_ms,
        None if waits is None else waits.waited_s[at],
        None if waits is None else waits.late_s[at],
        differs,
    )
