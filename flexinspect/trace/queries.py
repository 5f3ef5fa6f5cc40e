"""Queries of steps, findings, events, branches and tokens.

All of them are bounded: by a range, by a limit, or by counting inside SQLite. A branch is read with
its parents' steps before the fork, so that a range has no gaps. Every function raises `TraceError`
when the file is damaged.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, islice
from typing import Any, Literal, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from flexinspect.records.finding import Severity
from flexinspect.records.prompt import SegmentKind
from flexinspect.records.step import (
    CallRecord,
    Candidate,
    GpuRecord,
    LayerStatRecord,
    MemoryRecord,
    TokenRecord,
)
from flexinspect.trace import codec, schema
from flexinspect.trace.query_results import EventRow, FindingRow, GenerationRow, StepRow
from flexinspect.trace.reader import Lineage, TraceReader
from flexinspect.trace.schema import OPEN_END, WHERE_BRANCH, WHERE_STEPS

T = TypeVar("T")


class StepPath(Struct, frozen=True):
    """The layers of one step that ran one path with one mask, ascending, one entry per call."""

    step: int
    path: str
    mask: str | None
    layers: tuple[int, ...]


def step_paths(
    reader: TraceReader, generation: int, start: int, stop: int, branch: int = 0
) -> list[StepPath]:
    """Return the attention paths of the steps `start <= step < stop`, in order.

    Steps before the fork of a branch are those of its parent. Raises `TraceError`.
    """
    columns = "step, path, mask"
    sql = f"SELECT {columns}, group_concat(layer) FROM calls {WHERE_STEPS} GROUP BY {columns}"
    kinds = ("int", "text", "text?", "text")

    def make(row: Sequence[Any]) -> StepPath:
        step, path, mask, layers = codec.decode_values(kinds, row, "calls")
        return StepPath(step, path, mask, _parse_layers(layers))

    places = _branch_ranges(reader, generation, start, stop, branch)
    found = (path for place in places for path in reader._read(make, sql, place))
    return sorted(found, key=lambda path: (path.step, path.layers))


@lru_cache(maxsize=512)
def _parse_layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted(map(int, text.split(","))))
    except ValueError:
        raise codec.DamagedValueError("a row of calls holds a layer that is not a number") from None


def lineage(reader: TraceReader, generation: int, branch: int) -> Lineage:
    """Return (branch, first step, step after the last) of a branch and its parents, newest first.

    The step after the last of the branch itself is None, because it may still grow. It is read
    once per branch, because the parent and the fork of a branch never change.
    """
    if branch == 0:
        return ((0, 0, None),)
    if known := reader.known_lineages.get((generation, branch)):
        return known
    rows = {row.branch: row for row in reader.branches(generation)}
    found: list[tuple[int, int, int | None]] = []
    here: int | None = branch
    stop: int | None = None
    while here is not None and here in rows:
        row = rows.pop(here)  # removed, so that a damaged file cannot cause an endless loop
        found.append((here, row.fork_step or 0, stop))
        here, stop = row.parent, row.fork_step
    if found:
        reader.known_lineages[generation, branch] = tuple(found)
    return tuple(found)


# -- findings -------------------------------------------------------------------------------------


class NumberRange(Struct, frozen=True):
    """`n` different numbers between `low` and `high`, both included."""

    low: int
    high: int
    n: int

    def describe(self, name: str) -> str:
        """Return "layer 3", "layers 0-27" or "5 layers of 0-27"."""
        if self.low == self.high:
            return f"{name} {self.low}"
        span = f"{self.low}-{self.high}"
        whole = self.n == self.high - self.low + 1
        return f"{name}s {span}" if whole else f"{self.n} {name}s of {span}"


class FindingGroup(Struct, frozen=True):
    """All findings of one id and severity.

    `first` is the number of the first one, `sentence` its text. `times` includes repetitions, which
    a finding of a series counts. An extent is None when no finding of the group has such a place.
    """

    severity: Severity
    id: str
    count: int
    first: int
    times: int
    generations: NumberRange
    steps: NumberRange | None
    layers: NumberRange | None
    sentence: str


_SEVERITY_ORDER_SQL = "CASE severity WHEN 'error' THEN 0 WHEN 'warning' THEN 1 ELSE 2 END"
_FINDING_GROUPS_SQL = (
    "WITH grouped AS (SELECT severity, id, count(*), min(finding) AS first, sum(times), "
    "min(generation) AS generation, max(generation), count(DISTINCT generation), "
    "min(step) AS step, max(max(step, coalesce(last_step, step))), "
    "max(count(DISTINCT step), max(times)), "
    "min(layer) AS layer, max(max(layer, coalesce(json_extract(layers, '$[#-1]'), layer))), "
    "max(count(DISTINCT layer), max(json_array_length(layers))) FROM findings "
    "GROUP BY severity, id) "
    "SELECT *, (SELECT sentence FROM findings WHERE finding = first) FROM grouped "
    f"ORDER BY {_SEVERITY_ORDER_SQL}, generation, step, layer, first LIMIT ?"
)
_SEVERITIES = list(Severity)
# Naming the branches lets the index find the steps. They are found in the index as well: to look
# a branch up in its own table, SQLite reads its whole row, with an answer that may be megabytes.
_FINDING_STEPS_SQL = (
    "WITH RECURSIVE found(branch) AS (SELECT min(branch) FROM findings WHERE generation = ?1 "
    "UNION ALL SELECT (SELECT min(branch) FROM findings WHERE generation = ?1 "
    "AND branch > found.branch) FROM found WHERE found.branch IS NOT NULL) "
    "SELECT DISTINCT step, severity FROM found CROSS JOIN findings ON generation = ?1 "
    "AND findings.branch = found.branch AND step >= ?2 AND step < ?3"
)
_FINDING_GROUP_KINDS = ("text", "text", *("int",) * 6, *("int?", "int?", "int") * 2, "text")


def finding_groups(reader: TraceReader, *, limit: int = 500) -> list[FindingGroup]:
    """Return the findings of a trace in groups, worst first; counted inside SQLite."""
    return reader._read(_decode_finding_group, _FINDING_GROUPS_SQL, (limit,))


def worst_finding(reader: TraceReader, generation: int) -> FindingRow | None:
    """Return the worst finding of a generation, the first of several, None when it has none."""
    rest = f"WHERE generation = ? ORDER BY {_SEVERITY_ORDER_SQL}, step, layer, finding LIMIT 1"
    return _first_finding(reader, rest, (generation,))


def _decode_finding_group(row: Sequence[Any]) -> FindingGroup:
    severity, name, count, first, times, *extents, sentence = codec.decode_values(
        _FINDING_GROUP_KINDS, row, "findings"
    )
    generations, steps, layers = (
        None if None in extents[i : i + 2] else NumberRange(*extents[i : i + 3]) for i in (0, 3, 6)
    )
    if generations is None:
        raise codec.DamagedValueError("a group of findings has no generation")
    return FindingGroup(
        _severity(severity), name, count, first, times, generations, steps, layers, sentence
    )


def _severity(value: Any) -> Severity:
    try:
        return Severity(value)
    except ValueError:
        raise codec.DamagedValueError(f"{str(value)[:40]!r} is not a severity") from None


def findings_counter(reader: TraceReader) -> int:
    """Return a number that grows with every finding and every repetition; 0 without findings.

    Only findings of a series are repeated, and an index lists those.
    """
    repeats = "SELECT total(times) FROM findings WHERE series <> ''"
    sql = f"SELECT (SELECT max(finding) FROM findings), ({repeats})"
    ((last, n_repeats),) = reader._query(sql, ())
    return int((last or 0) + n_repeats)


def inferred_segments(reader: TraceReader, generation: int) -> list[tuple[int, int, str]]:
    """Return (start, stop, text) of segments that a rule read out of the executed mask."""
    rest = "WHERE generation = ? AND id IN (?, ?) ORDER BY finding LIMIT 1"
    ids = ("segments.inferred", "segments.suspect-border")
    row = _first_finding(reader, rest, (generation, *ids))
    found = row.finding.evidence.get("segments") if row is not None else None
    with reader._damage_as_error():
        try:
            return [_read_segment(each) for each in found or ()]
        except (TypeError, KeyError, ValueError, OverflowError):
            raise codec.DamagedValueError("a finding lists something else than segments") from None


def _read_segment(segment: Any) -> tuple[int, int, str]:
    if isinstance(segment, Mapping):
        segment = (segment["start"], segment["stop"], segment["text"])
    start, stop, text = segment  # a list in earlier traces
    return int(start), int(stop), str(text)


def finding_steps(
    reader: TraceReader, generation: int, start: int, stop: int
) -> dict[int, Severity]:
    """Return the worst severity of the findings of each step `start <= step < stop` with any."""
    found = dict[int, Severity]()
    rows = reader._read(
        lambda row: (codec.decode_int(row[0]), _severity(row[1])),
        _FINDING_STEPS_SQL,
        (generation, start, stop),
    )
    for step, severity in rows:
        worst = found.get(step, severity)
        found[step] = min(worst, severity, key=_SEVERITIES.index)
    return found


def finding_in_group(reader: TraceReader, group: FindingGroup, index: int) -> FindingRow | None:
    """Return finding number `index` (from 0) of a group, in order of writing."""
    rest = "WHERE id = ? AND severity = ? AND finding >= ? ORDER BY finding LIMIT 1 OFFSET ?"
    params = (group.id, group.severity.value, group.first, index)
    return _first_finding(reader, rest, params)


FindingPosition = tuple[int, int, int | None, int, int, int]
"""(generation, branch, step, layer, head, number): a position in the order of findings. The step
of findings of a whole generation is None; a missing layer or head is -1."""


FIRST_POSITION: FindingPosition = (-1, -1, None, -1, -1, -1)
LAST_POSITION: FindingPosition = (OPEN_END, 0, None, -1, -1, -1)


def finding_position(row: FindingRow) -> FindingPosition:
    """Return the position of a finding in the order of findings."""
    finding = row.finding
    layer, head = (-1 if value is None else value for value in (finding.layer, finding.head))
    return finding.generation, finding.branch, finding.step, layer, head, row.id


_FINDING_ORDER = ("coalesce(layer, -1)", "coalesce(head, -1)", "finding")


def adjacent_finding(
    reader: TraceReader, here: FindingPosition, direction: int
) -> FindingRow | None:
    """Return the finding after (direction 1) or before (-1) `here`, by a few index look-ups."""
    step = here[2]
    sign, order = (">", "ASC") if direction > 0 else ("<", "DESC")
    parts = ("generation", "branch", "step", *_FINDING_ORDER)
    by = ", ".join(f"{part} {order}" for part in parts)
    in_step = f"{WHERE_BRANCH} AND step IS ? AND ({', '.join(_FINDING_ORDER)}) {sign} (?, ?, ?)"
    tries: list[tuple[str, Sequence[int | None]]] = [(in_step, here)]
    if step is not None:
        tries.append((f"{WHERE_BRANCH} AND step {sign} ?", here[:3]))
    if (step is None) == (direction > 0):  # findings of a whole generation precede its steps
        some = "IS NOT NULL" if direction > 0 else "IS NULL"
        tries.append((f"{WHERE_BRANCH} AND step {some}", here[:2]))
    tries.append((f"WHERE generation = ? AND branch {sign} ?", here[:2]))
    tries.append((f"WHERE generation {sign} ?", here[:1]))
    found = (_first_finding(reader, f"{where} ORDER BY {by} LIMIT 1", key) for where, key in tries)
    return next((row for row in found if row is not None), None)


def _first_finding(reader: TraceReader, rest: str, params: Sequence[Any]) -> FindingRow | None:
    return next(iter(reader._select(reader.decode_finding, schema.FINDINGS, rest, params)), None)


# -- events ---------------------------------------------------------------------------------------


def matching_events(
    reader: TraceReader, generation: int | None, start: float, stop: float, like: str, limit: int
) -> list[EventRow]:
    """Return the events of steps `start <= step < stop` whose kind or text matches `like`.

    If `generation` is None, those outside of all generations at `start <= at < stop`, in seconds.
    `like` is a pattern of SQL's LIKE, which ignores case: "%compil%".
    """
    column = "at" if generation is None else "step"
    where = f"generation IS ? AND {column} >= ? AND {column} < ?"
    rest = f"WHERE {where} AND (kind LIKE ? OR text LIKE ?) ORDER BY event LIMIT ?"
    params = (generation, start, stop, like, like, limit)
    return reader._select(codec.decode_event, schema.EVENTS, rest, params)


def source_texts(reader: TraceReader) -> Iterator[tuple[str, str, int, str]]:
    """Yield the recorded functions: file and line, name, first line of the text, and the text."""
    rest = "WHERE kind = 'source' ORDER BY event"
    for row in reader._select(codec.decode_event, schema.EVENTS, rest, ()):
        source, name, line, text = map(row.event.data.get, ("source", "name", "line", "text"))
        if isinstance(line, int):
            yield str(source), str(name), line, str(text)


def attention_source(reader: TraceReader, layer: int) -> str | None:
    """Return file and line of the user's code that computed the attention of a layer, if any.

    Of several functions it is the one that was seen last.
    """
    rest = "WHERE kind = 'source' ORDER BY event DESC"
    for row in reader._select(codec.decode_event, schema.EVENTS, rest, ()):
        source, layers = map(row.event.data.get, ("source", "layers"))
        if isinstance(layers, list) and layer in layers:
            return str(source)
    return None


# -- steps ----------------------------------------------------------------------------------------


Statistic = Literal["norm", "max", "mean", "std", "bad"]
"""A column of the layer statistics: "max" is the largest absolute value, "bad" counts NaN and Inf.
"""

MAX_STAT_ROWS = 1 << 16  # rows of layer statistics that one query returns at most
_STATISTIC_SQL: dict[Statistic, str] = {
    "norm": "norm",
    "max": "max(abs(min), abs(max))",  # NULL, which stands for NaN, if either is
    "mean": "mean",
    "std": "std",
    "bad": "CAST(n_nan + n_inf AS REAL)",
}


class StatCell(Struct, frozen=True):
    """One statistic of one module in one step; `n_bad` counts NaN and Inf in its output."""

    step: int
    layer: int
    module: str
    value: float
    n_bad: int


def branch_of_step(reader: TraceReader, generation: int, step: int, branch: int = 0) -> int:
    """Return the branch that holds a step: `branch`, or a parent before the fork."""
    for number, first, _ in lineage(reader, generation, branch):
        if step >= first:
            return number
    return branch


def step_bounds(reader: TraceReader, generation: int, branch: int = 0) -> tuple[int, int] | None:
    """Return the first and the last recorded step, parents included; None without steps."""
    last = newest_step(reader, generation, branch)
    if last is None:
        return None
    first = reader.steps(generation, lineage(reader, generation, branch)[-1][0], limit=1)
    return first[0].step if first else last, last


def newest_step(reader: TraceReader, generation: int, branch: int = 0) -> int | None:
    """Return the last recorded step, parents included; None without steps."""
    for number, first, stop in lineage(reader, generation, branch):
        last = reader.last_step(generation, number)
        if last is not None and (stop is None or stop > first):
            return last if stop is None else min(last, stop - 1)
    return None


def step_range(
    reader: TraceReader, generation: int, start: int, stop: int, branch: int = 0
) -> list[StepRow]:
    """Return the steps `start <= step < stop` of a branch and its parents, in order."""
    places = _branch_ranges(reader, generation, start, stop, branch)
    return [row for place in places for row in reader.steps(*place)]


def chosen_tokens(
    reader: TraceReader, generation: int, start: int, stop: int, branch: int = 0
) -> dict[int, int | None]:
    """Return the token that each step `start <= step < stop` chose, None where it is not known."""
    sql = f"SELECT step, chosen_id FROM steps {WHERE_STEPS}"
    found: dict[int, int | None] = {}
    for place in _branch_ranges(reader, generation, start, stop, branch):
        rows = reader._read_values(("int", "int?"), sql, place, "steps")
        found.update((step, chosen) for step, chosen in rows)
    return found


def step_masks(
    reader: TraceReader, generation: int, start: int, stop: int, branch: int = 0
) -> dict[tuple[int, int], str]:
    """Return the mask of each (step, layer) of steps `start <= step < stop` that has one."""
    sql = f"SELECT step, layer, mask FROM calls {WHERE_STEPS} AND mask IS NOT NULL"
    found: dict[tuple[int, int], str] = {}
    for place in _branch_ranges(reader, generation, start, stop, branch):
        rows = reader._read_values(("int", "int", "text"), sql, place, "calls")
        found.update(((step, layer), mask) for step, layer, mask in rows)
    return found


def layers_by_mask(
    reader: TraceReader, generation: int, ranges: Iterable[tuple[int, int]], branch: int = 0
) -> list[list[int]]:
    """Return the layers that call a kernel in ranges of steps (start, stop), in groups.

    The layers of a group have the same masks throughout. If a layer has several calls in a step,
    the first one counts.
    """
    sql = f"SELECT step, layer, mask FROM calls {WHERE_STEPS} ORDER BY step, call"
    kinds = ("int", "int", "text?")
    masks: dict[int, dict[int, str | None]] = {}
    for start, stop in ranges:
        for place in _branch_ranges(reader, generation, start, stop, branch):
            for step, layer, mask in reader._read_values(kinds, sql, place, "calls"):
                masks.setdefault(layer, {}).setdefault(step, mask)
    groups: dict[tuple[tuple[int, str | None], ...], list[int]] = {}
    for layer, own in sorted(masks.items()):
        groups.setdefault(tuple(own.items()), []).append(layer)
    return list(groups.values())


MAX_TIMED_STEPS = 4096
"""Steps whose times make a mean; a row of a step is wide, and a run may have a million of them."""


def decode_phase_time(reader: TraceReader, generation: int, branch: int = 0) -> tuple[int, float]:
    """Return the number of a branch's own decode steps, and their total time in milliseconds.

    Of a longer branch they are those among its newest `MAX_TIMED_STEPS` steps.
    """
    last = reader.last_step(generation, branch)
    if last is None:
        return 0, 0.0
    sql = f"SELECT count(*), total(wall_ms) FROM steps {WHERE_STEPS} AND phase = 'decode'"
    span = (last + 1 - MAX_TIMED_STEPS, last + 1)
    ((number, total),) = reader._query(sql, (generation, branch, *span))
    return int(number), float(total)


def memory_range(
    reader: TraceReader, generation: int, start: int, stop: int, branch: int = 0
) -> dict[int, MemoryRecord]:
    """Return the memory at the end of each step `start <= step < stop` that has it."""
    rest = f"{WHERE_STEPS} ORDER BY step"
    found: dict[int, MemoryRecord] = {}
    for place in _branch_ranges(reader, generation, start, stop, branch):
        found.update(reader._records_by_step(codec.MEMORY_ROWS, rest, place))
    return found


def gpus_range(
    reader: TraceReader, generation: int, start: int, stop: int, branch: int = 0
) -> dict[int, list[GpuRecord]]:
    """Return the figures of the GPUs in each step `start <= step < stop` that has them."""
    rest = f"{WHERE_STEPS} ORDER BY step, device"
    return _lists_by_step(reader, codec.GPU_ROWS, rest, (generation, start, stop, branch))


def candidates_range(
    reader: TraceReader, generation: int, start: int, stop: int, branch: int = 0
) -> dict[int, list[Candidate]]:
    """Return the candidates of each step `start <= step < stop` that has any, best first."""
    rest = f"{WHERE_STEPS} ORDER BY step, rank"
    return _lists_by_step(reader, codec.CANDIDATE_ROWS, rest, (generation, start, stop, branch))


def calls_range(
    reader: TraceReader, generation: int, start: int, stop: int, branch: int = 0
) -> dict[int, list[CallRecord]]:
    """Return the attention calls of each step `start <= step < stop`, in the order they ran."""
    rest = f"{WHERE_STEPS} ORDER BY step, call"
    return _lists_by_step(reader, codec.CALL_ROWS, rest, (generation, start, stop, branch))


def _lists_by_step(
    reader: TraceReader,
    rows: codec.RowFormat[T],
    rest: str,
    span: tuple[int, int, int, int],
) -> dict[int, list[T]]:
    """Return the records of (generation, start, stop, branch) in lists by step."""
    found: dict[int, list[T]] = {}
    for place in _branch_ranges(reader, *span):
        for step, record in reader._records_by_step(rows, rest, place):
            found.setdefault(step, []).append(record)
    return found


def layer_stats_range(
    reader: TraceReader,
    generation: int,
    start: int,
    stop: int,
    branch: int = 0,
    *,
    statistic: Statistic = "norm",
) -> list[StatCell]:
    """Return one statistic of all modules in the steps `start <= step < stop`, as captured.

    At most `MAX_STAT_ROWS` values.
    """
    sql = (
        f"SELECT step, layer, module, {_STATISTIC_SQL[statistic]}, n_nan + n_inf FROM layer_stats "
        f"{WHERE_STEPS} ORDER BY step, number LIMIT ?"
    )
    kinds = ("int", "int", "text", "real", "int")
    found: list[StatCell] = []
    for place in _branch_ranges(reader, generation, start, stop, branch):
        params = (*place, MAX_STAT_ROWS - len(found))
        rows = reader._read_values(kinds, sql, params, "layer_stats")
        found += [StatCell(*row) for row in rows]
    return found


def first_nonfinite_output(
    reader: TraceReader, generation: int, start: int, stop: int, branch: int = 0
) -> tuple[int, LayerStatRecord] | None:
    """Return the earliest step with NaN or Inf and its lowest such layer, None without any.

    Reads two narrow columns of the own steps `start <= step < stop` of one branch, up to the first
    such step.
    """
    rest = f"{WHERE_STEPS} AND (n_nan > 0 OR n_inf > 0) ORDER BY step, layer, number LIMIT 1"
    rows = reader._records_by_step(codec.LAYER_STAT_ROWS, rest, (generation, branch, start, stop))
    return rows[0] if rows else None


def _branch_ranges(
    reader: TraceReader, generation: int, start: int, stop: int, branch: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (generation, branch, first step, step after the last) of a range, in order of steps."""
    for number, first, end in reversed(lineage(reader, generation, branch)):
        low, high = max(first, start), stop if end is None else min(end, stop)
        if low < high:
            yield generation, number, low, high


# -- branches -------------------------------------------------------------------------------------


def generation_in_branch(reader: TraceReader, about: GenerationRow, branch: int) -> GenerationRow:
    """Return a generation with the mask that is declared in a branch: the one edited last."""
    if not branch:
        return about
    rows = {row.branch: row.change for row in reader.branches(about.generation)}
    for number, _, _ in lineage(reader, about.generation, branch):
        mask = rows.get(number, {}).get("declared")
        if isinstance(mask, Mapping):
            return replace(about, declared=with_declared_mask(about.declared, mask))
    return about


def with_declared_mask(declared: Mapping[str, Any], mask: Mapping[str, Any]) -> dict[str, Any]:
    """Return a declaration with another mask."""
    from flexinspect.masks.mask_presets import (
        SPEC_FIELDS,  # numpy, which the first screen does without
    )

    mask_keys = {"preset", "separators", *SPEC_FIELDS, "mask_mod"}
    rest = {key: value for key, value in declared.items() if key not in mask_keys}
    return {**rest, **mask}


def fork_steps(reader: TraceReader, generation: int) -> list[int]:
    """Return the steps at which the branches of a generation begin, except the first branch.

    SQLite reads whole rows for it, so callers keep the result until the trace changes.
    """
    sql = "SELECT fork_step FROM branches WHERE generation = ? AND fork_step IS NOT NULL"
    return [step for (step,) in reader._read_values(("int",), sql, (generation,), "branches")]


def visible_lineage(reader: TraceReader, generation: int, branch: int, step: int) -> Lineage:
    """Return the part of a branch's lineage whose keys are in the cache at a step.

    A branch that recomputed all keys, under an edited mask, uses none of its parents' keys.
    """
    family = lineage(reader, generation, branch)
    if len(family) > 1:
        rows = reader.branches(generation)
        recomputed = {row.branch for row in rows if row.change.get("recomputed") is True}
        for index, (number, first, _) in enumerate(family):
            if number in recomputed and step >= first:
                return family[: index + 1]
    return family


# -- the sequence, and counters -------------------------------------------------------------------


def token_ranges(trace: TraceReader, generation: int, branch: int = 0) -> Lineage:
    """Return (branch, first position, position after the last) of the parts of a sequence.

    Oldest parent first; the branch itself comes last and may still grow (None). A parent's tokens
    end where the first own step of its fork chose one.
    """
    parts: list[tuple[int, int, int | None]] = []
    start = 0
    family = lineage(trace, generation, branch)
    for (number, _, _), (fork, step, _) in zip(family[:0:-1], family[-2::-1], strict=True):
        row = trace.step(generation, step, fork) or trace.step(generation, step, number)
        stop = None if row is None else row.first_pos
        parts.append((number, start, stop))
        start = start if stop is None else stop
    return (*parts, (branch, start, None))


def read_tokens(
    trace: TraceReader,
    generation: int,
    branch: int = 0,
    start: int = 0,
    stop: int | None = None,
    *,
    limit: int = -1,
) -> list[TokenRecord]:
    """Return the tokens at `start <= pos < stop` (None: to the end), parents' before the fork."""
    found: list[TokenRecord] = []
    for number, first, end in token_ranges(trace, generation, branch):
        low = max(start, first)
        high = end if stop is None else stop if end is None else min(stop, end)
        left = limit - len(found) if limit >= 0 else -1
        if left and (high is None or low < high):
            found += trace.tokens(generation, number, low, high, limit=left)
    return found


def last_pos(trace: TraceReader, generation: int, branch: int = 0) -> int | None:
    """Return the highest position recorded so far, None when there is none."""
    sql = f"SELECT pos FROM tokens {WHERE_BRANCH} AND pos < ? ORDER BY pos DESC LIMIT 1"
    for number, _, stop in reversed(token_ranges(trace, generation, branch)):
        found = trace._read_int(sql, (generation, number, OPEN_END if stop is None else stop))
        if found is not None:
            return found
    return None


def n_generations(trace: TraceReader) -> int:
    """Return the number of generations recorded so far."""
    sql = "SELECT generation FROM generations ORDER BY generation DESC LIMIT 1"
    last = trace._read_int(sql)
    return 0 if last is None else last + 1


def unfinished_generations(trace: TraceReader) -> set[int]:
    """Return the generations with a branch that is not finished."""
    sql = "SELECT DISTINCT generation FROM branches WHERE state <> 'finished'"
    return {int(number) for (number,) in trace._query(sql)}


def n_reviews(trace: TraceReader) -> dict[str, int]:
    """Return how many generations each rule has reviewed, if it has any."""
    rows = trace._query("SELECT rule, count(*) FROM reviews GROUP BY rule")
    return {str(rule): int(number) for rule, number in rows}


def generation_range(trace: TraceReader, start: int, stop: int) -> list[GenerationRow]:
    """Return the generations `start <= generation < stop`, in order."""
    where = "WHERE g.generation >= ? AND g.generation < ? ORDER BY g.generation"
    return trace._read(codec.decode_generation, f"{schema.READ_GENERATIONS} {where}", (start, stop))


def problem_counts(trace: TraceReader, start: int, stop: int) -> dict[int, tuple[int, int]]:
    """Return the number of errors and warnings of `start <= generation < stop`, if it has any."""
    sql = (
        "SELECT generation, sum(severity = 'error'), sum(severity = 'warning') FROM findings "
        "WHERE generation >= ? AND generation < ? GROUP BY generation"
    )
    rows = trace._read_values(("int", "int", "int"), sql, (start, stop), "findings")
    return {generation: (errors, warnings) for generation, errors, warnings in rows}


def question_text(trace: TraceReader, generation: int, *, limit: int = -1) -> str:
    """Return the text of the first paraphrase, or without one of the first segment with text.

    It has at most `limit` tokens (-1: all). Padding is no text.
    """
    segments = [one for one in trace.segments(generation) if one.label != "padding"]
    first = min(segments, key=lambda s: s.kind is not SegmentKind.PARAPHRASE, default=None)
    if first is None:
        return ""
    tokens = trace.tokens(generation, 0, first.start, first.stop, limit=limit)
    return "".join(token.text for token in tokens).strip()


def n_steps_and_findings(trace: TraceReader) -> tuple[int, int]:
    """Return how many steps and how many findings are recorded so far."""
    sql = "SELECT (SELECT count(*) FROM steps), (SELECT count(*) FROM findings)"
    ((steps, findings),) = trace._query(sql)
    return int(steps), int(findings)


def find_text(
    trace: TraceReader,
    text: str,
    generation: int,
    branch: int = 0,
    *,
    after: int = -1,
    only_generated: bool = False,
) -> tuple[int, int | None] | None:
    """Return (position, step that chose it) of the first token of a place of `text`.

    Tokens are searched as one text, so a place may begin and end inside tokens; a token whose name
    in the vocabulary is `text` is one as well. The case is ignored. It is the first place after
    the position `after`; None without one.
    """
    chosen = " AND step IS NOT NULL" if only_generated else ""
    sql = (
        f"SELECT pos, step, text, token FROM tokens {WHERE_BRANCH} AND pos >= ? AND pos < ? "
        f"{chosen} ORDER BY pos"
    )
    rows: list[Any] = []
    for number, first, end in token_ranges(trace, generation, branch):
        span = (first, OPEN_END if end is None else end)
        kinds = ("int", "int?", "text", "text")
        rows += trace._read_values(kinds, sql, (generation, number, *span), "tokens")
    parts = [part.lower() for _, _, part, _ in rows]
    starts, whole, wanted = [0, *accumulate(map(len, parts))], "".join(parts), text.lower()
    named = (index for index, row in enumerate(rows) if row[3] == text and row[0] > after)
    begin = starts[bisect_right(rows, after, key=lambda row: row[0])]
    at = whole.find(wanted, begin) if wanted else -1
    found = [*islice(named, 1), *([bisect_right(starts, at) - 1] if at >= 0 else ())]
    return tuple(rows[min(found)][:2]) if found else None


def newest_events(trace: TraceReader, kind: str, after_id: int, limit: int) -> list[EventRow]:
    """Return the newest events of a kind whose number is above `after_id`, in order."""
    rest = "WHERE kind = ? AND event > ? ORDER BY event DESC LIMIT ?"
    return trace._select(codec.decode_event, schema.EVENTS, rest, (kind, after_id, limit))[::-1]


def last_output(trace: TraceReader) -> int | None:
    """Return the number of the newest piece of output, None when the program printed nothing."""
    return trace._read_int("SELECT number FROM output ORDER BY number DESC LIMIT 1")
