"""The text and the JSON of a comparison of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from msgspec import to_builtins
from msgspec.structs import asdict

from flexinspect.analysis.ranks.rank_comparison import ComparedPart, RankComparison, RankPlace
from flexinspect.analysis.ranks.rank_run import STOPPED, RankTrace
from flexinspect.analysis.ranks.side_by_side import Cell, SideBySide
from flexinspect.analysis.ranks.waiting import OtherCalls, Waiting
from flexinspect.analysis.run_diff.generations import DIFFERENT, ROUNDING, Place
from flexinspect.analysis.run_diff.quantities import QUANTITIES
from flexinspect.core.text import format_ranges, plural, printable, truncate

JSON_VERSION = 1
_MAX_COLUMN = 22
_SENTENCES = {
    DIFFERENT: "The ranks differ.",
    ROUNDING: "What must be equal on all ranks is the same within rounding.",
}
_SAME = "What must be equal on all ranks is equal."


def ranks_text(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 0-2, 5"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranges(ranks)}"


# -- sentences ------------------------------------------------------------------------------------


def title_text(found: RankComparison) -> str:
    """Return what the run is: its name, its ranks, how the model is split, and the machines."""
    run = found.run
    kind = "training" if found.is_training else "generation"
    n_hosts = len(run.hostnames)
    where = f" on {plural(n_hosts, 'machine')}" if n_hosts > 1 else ""
    split = "the whole model on each"
    if found.tp_size > 1:
        groups = f"{found.dp_size} groups of " if found.dp_size > 1 else "over "
        split = f"tensor parallel, {groups}{found.tp_size}"
    if found.shards > 1 and found.tp_size == 1:
        split = f"weights in {found.shards} parts"
    elif found.is_training and found.tp_size == 1:
        split = "data parallel"
    name = printable(run.name)
    return f"{name}: {kind} of {plural(run.world_size, 'rank')}{where}, {split}"


def verdict_text(found: RankComparison) -> str:
    """Return the verdict as a sentence, with the first place that differs."""
    if len(found.run.traces) < 2:
        return "Only one rank has a trace here, so nothing is compared."
    if not found.pairs:
        return "No two ranks have steps, so nothing is compared."
    sentence = _SENTENCES.get(found.verdict, _SAME)
    return (
        sentence if found.first is None else f"{sentence} First: {first_text(found, found.first)}."
    )


def first_text(found: RankComparison, first: RankPlace) -> str:
    """Return where ranks differ first: step, layer, quantity, and which ranks from which."""
    place = first.place
    others = {*found.pairs, first.reference} - {*first.ranks, *found.own_inputs}
    alike = sorted(rank for rank in others if found.reference_of(rank) == first.reference)
    generation = f"generation {first.generation}, " if first.generation else ""
    layer = "" if place.layer is None else f", layer {place.layer}"
    what = f"{generation}step {place.step}{layer}: {_quantity_text(place)}"
    who = ranks_text(first.ranks)
    verb = "differs" if len(first.ranks) == 1 else "differ"
    return f"{what}: {who} {verb} from {ranks_text(alike)}"


def _quantity_text(place: Place) -> str:
    name = QUANTITIES.get(place.quantity, "")
    text = place.quantity if name in ("", place.quantity) else f"{place.quantity} ({name})"
    if place.difference is not None:
        text += f", {place.difference:.3g} relative, noise up to {place.limit or 0:.3g}"
    if place.quantity == "step":  # "A alone has steps": which rank that is, the sentence says
        return f"the number of steps [{place.reason}]"
    return f"{text}, {printable(place.text)}" if place.text else text


def late_text(found: RankComparison) -> str:
    """Return who is late in collective calls, and how long the others wait for it."""
    waits = found.waiting
    if not waits.n_calls:
        return "No collective call was recorded on all of its ranks."
    share = sum(waits.waited_s) / len(waits.waited_s) / (waits.total_s or 1.0)
    ranks = [one.rank for one in found.run.traces]
    step, at = waits.longest_late()
    longest = (
        f"the longest wait is for rank {ranks[at]} in step {step[1]} "
        f"({waits.steps[step].last_call}), {waits.steps[step].late_s[at] * 1e3:.3g} ms"
    )
    if waits.late is None:
        calls = plural(waits.n_calls, "collective call")
        return (
            f"No rank is late again and again in {calls}; a rank waits {share:.1%} of the time for "
            f"others; {longest}."
        )
    at = ranks.index(waits.late)
    return (
        f"Rank {waits.late} is late: it enters collective calls last in {waits.n_last[at]} of "
        f"{plural(waits.n_steps, 'step')}, in all {waits.late_s[at]:.3g} s after the rank "
        f"before it ({waits.late_s[at] / waits.total_s:.0%} of the time); {longest}."
    )


def state_lines(found: RankComparison) -> Iterator[str]:
    """Yield which ranks stopped, failed or have no trace, and what that leaves out."""
    run = found.run
    if run.missing:
        yield f"The folder has no readable trace of {ranks_text(run.missing)}."
    yield from _stopped_lines(run.stopped)
    if found.own_inputs:
        others = ranks_text(found.own_inputs)
        prompts = f"whose prompts are not those of rank {found.reference}"
        yield f"Not compared: the steps of {others}, {prompts}."
    for other in found.waiting.others[:1]:
        yield _other_calls_text(other, len(found.waiting.others))
    yield from _clock_lines(found.waiting)


def _stopped_lines(stopped: Sequence[RankTrace]) -> Iterator[str]:
    """Yield which ranks ended without finishing, the first to end first, with their errors."""
    for (state, last), group in groupby(stopped, key=lambda one: (one.state, one.last)):
        own = [*group]
        errors = (one.error.splitlines()[0] for one in own if one.error)
        error = printable(next(errors, ""))
        text = _ENDINGS.get(state, f"failed {_last_text(last)}")
        text = text.format(last=_last_text(last), their="its" if len(own) == 1 else "their")
        shown = f" {truncate(error, _MAX_ERROR)}" if error else ""
        yield f"{ranks_text([one.rank for one in own]).capitalize()} {text}.{shown}"


_ENDINGS = {
    STOPPED: "stopped {last}: {their} process ended without finishing the trace",
    "interrupted": "was interrupted {last}",
}
_MAX_ERROR = 100


def _last_text(last: tuple[int, int] | None) -> str:
    if last is None:
        return "before its first step"
    return f"after step {last[1]}" + (f" of generation {last[0]}" if last[0] else "")


def _other_calls_text(other: OtherCalls, n: int) -> str:
    """Return the first step in which ranks made other collectives, which can make them hang."""
    calls = "; ".join(
        f"rank {rank}: {', '.join(kinds[:6])}{', …' if len(kinds) > 6 else ''}"
        for rank, kinds in other.kinds.items()
    )
    more = f" (and {n - 1} more steps)" if n > 1 else ""
    return f"The ranks make other collective calls in step {other.step}: {calls}.{more}"


def _clock_lines(waits: Waiting) -> Iterator[str]:
    for host, clock in waits.clocks.items():
        if not clock.n:
            continue
        yield (
            f"The clock of {printable(host)} is {clock.offset_s * 1e3:+.3f} ms ahead of the first "
            f"machine's, by the ends of {plural(clock.n, 'call')} (half of the estimates within "
            f"{clock.spread_s * 1e3:.3f} ms)."
        )


# -- tables ---------------------------------------------------------------------------------------


def comparison_lines(found: RankComparison, rows: Sequence[SideBySide]) -> Iterator[str]:
    """Yield the whole text: what the run is, its ranks, the verdict, and steps side by side."""
    yield title_text(found)
    yield from _rank_table(found)
    yield verdict_text(found)
    yield late_text(found)
    yield from state_lines(found)
    if rows:
        yield ""
        yield from step_table(found, rows)
        yield from _more_steps(found, rows)
    yield from _not_compared_lines(found)


def _rank_table(found: RankComparison) -> Iterator[str]:
    waits, run = found.waiting, found.run
    width = max([len(one.state) for one in run.traces] + [5])
    yield f"  rank  {'state':{width}}  last step    waited      late  trace"
    for at, one in enumerate(run.traces):
        last = "none" if one.last is None else str(one.last[1])
        times = ["        -"] * 2
        if waits.n_calls:
            times = [f"{seconds[at]:7.3f} s" for seconds in (waits.waited_s, waits.late_s)]
        mark = "  <- late" if one.rank == waits.late else ""
        name = printable(one.path.name)
        yield f"  {one.rank:4}  {one.state:{width}}  {last:>9} {times[0]} {times[1]}  {name}{mark}"


def step_table(found: RankComparison, rows: Sequence[SideBySide]) -> Iterator[str]:
    """Yield one line per step with a column per rank."""
    ranks = [one.rank for one in found.run.traces]
    texts = [
        [cell_text(row.cells.get(rank), is_training=found.is_training) for rank in ranks]
        for row in rows
    ]
    heads = [f"rank {rank}" for rank in ranks]
    columns = zip(heads, *texts, strict=True)
    widths = [min(max(map(len, column)), _MAX_COLUMN) for column in columns]
    yield (
        "  step  "
        + "  ".join(f"{head:{width}}" for head, width in zip(heads, widths, strict=True)).rstrip()
    )
    for row, cells in zip(rows, texts, strict=True):
        line = "  ".join(
            f"{text[:width]:{width}}" for text, width in zip(cells, widths, strict=True)
        )
        late = _late_cell(row)
        yield f"  {row.step:4}  {line}{late}".rstrip()
    what = "loss, gradient norm" if found.is_training else "token"
    yield f"  ({what}; ≠ differs from {_reference_text(found)} in what must be equal)"


def _more_steps(found: RankComparison, rows: Sequence[SideBySide]) -> Iterator[str]:
    """Yield that other steps are not in the table, if the last generation has some."""
    generation, shown = rows[-1].generation, {row.step for row in rows}
    last = max((one.last for one in found.run.traces if one.last), default=(0, 0))
    if last[0] == generation and len(shown) <= last[1]:
        steps = f"steps {min(shown)} to {max(shown)} of 0 to {last[1]}"
        yield f"  ({steps}; --step N prints those around another)"


def _reference_text(found: RankComparison) -> str:
    is_grouped = found.dp_size > 1 and found.tp_size > 1
    return "the first rank of its group" if is_grouped else f"rank {found.reference}"


def cell_text(cell: Cell | None, *, is_training: bool) -> str:
    """Return the loss and the gradient norm, or the token, and whether it differs."""
    if cell is None:
        return "-"
    mark = " ≠" if cell.differs else ""
    if is_training:
        numbers = (cell.loss, cell.gradient_norm)
        return " ".join("?" if n is None else f"{n:.4g}" for n in numbers) + mark
    return ("?" if cell.token is None else repr(printable(cell.token))[:18]) + mark


def _late_cell(row: SideBySide) -> str:
    """Return who entered collectives later than all others in this step, if by a millisecond."""
    late = [(cell.late_s or 0.0, rank) for rank, cell in row.cells.items()]
    most = max(late, default=(0.0, 0))
    return f"  rank {most[1]} {most[0] * 1e3:.1f} ms late" if most[0] >= 1e-3 else ""


def _not_compared_lines(found: RankComparison) -> Iterator[str]:
    """Yield what was compared on all ranks, and what each rank has of its own."""
    parts: list[ComparedPart] = []
    for one in found.pairs.values():
        parts += [*one.generations, *one.trainings]
    compared = dict.fromkeys(name for part in parts for name in part.compared)
    if compared:
        yield f"compared: {', '.join(compared)}"
    reasons: dict[str, dict[str, None]] = {}
    for part in parts:
        for name, reason in part.not_compared.items():
            if name not in compared:
                reasons.setdefault(reason, {})[name] = None
    for reason, names in reasons.items():
        yield f"not compared: {', '.join(names)} ({reason})"


# -- JSON -----------------------------------------------------------------------------------------


def comparison_json(found: RankComparison, rows: Sequence[SideBySide]) -> dict[str, Any]:
    """Return the comparison as plain values for scripts."""
    run, waits = found.run, found.waiting
    ranks = [
        {
            **asdict(one),
            "path": str(one.path),
            "waited_s": waits.waited_s[at] if waits.n_calls else None,
            "late_s": waits.late_s[at] if waits.n_calls else None,
            "n_last": waits.n_last[at] if waits.n_calls else None,
        }
        for at, one in enumerate(run.traces)
    ]
    pairs = [{"rank": rank, **one.as_json()} for rank, one in found.pairs.items()]
    for pair in pairs:
        del pair["version"]
    fields = {name: getattr(waits, name) for name in ("n_calls", "n_steps", "total_s", "late")}
    others = [to_builtins(one, str_keys=True) for one in waits.others]
    return {
        "version": JSON_VERSION,
        "run": run.name,
        "verdict": found.verdict,
        "kind": "training" if found.is_training else "generation",
        "world_size": run.world_size,
        "tp_size": found.tp_size,
        "dp_size": found.dp_size,
        "shards": found.shards,
        "reference": found.reference,
        "missing": run.missing,
        "stopped": [one.rank for one in run.stopped],
        "own_inputs": found.own_inputs,
        "first": None if found.first is None else to_builtins(found.first),
        "ranks": ranks,
        "waiting": {**fields, "other_calls": others, "clocks": to_builtins(dict(waits.clocks))},
        "steps": [_row_json(row) for row in rows],
        "pairs": pairs,
    }


def _row_json(row: SideBySide) -> dict[str, Any]:
    cells = [to_builtins(cell) for cell in row.cells.values()]
    place = {"generation": row.generation, "step": row.step}
    return {**place, "last_call": row.last_call, "ranks": cells}
