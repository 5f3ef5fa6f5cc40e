"""A trace as text or JSON, yielded in pieces, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, TypeVar

from flexinspect.core.errors import TraceError, UsageError
from flexinspect.core.text import escape_unprintable
from flexinspect.records.finding import Finding
from flexinspect.records.step import (
    MASK_ARRAYS,
    TRAIN,
    InputsRecord,
    LogitsRecord,
    MaskRecord,
    MemoryRecord,
    TokenRecord,
)
from flexinspect.records.token_gradients import GradientRecord
from flexinspect.records.training_step import TrainingStepRecord
from flexinspect.trace.codec import plain_json
from flexinspect.trace.query_results import (
    BranchRow,
    EventRow,
    GenerationRow,
    OutputRow,
    StepRow,
)
from flexinspect.trace.reader import TraceReader

T = TypeVar("T")

PAGE_ROWS = 256
"""Rows that are read at a time."""


@dataclass(frozen=True, slots=True)
class DumpSelection:
    """The part of a trace to print: one generation or all (None), one step of each or all."""

    reader: TraceReader
    generation: int | None = None
    step: int | None = None

    def check(self) -> None:
        """Raise `UsageError` when there is no such generation or step."""
        path = self.reader.path
        if self.generation is not None and not self.generations():
            raise UsageError(
                f"{path} has no generation {self.generation}.",
                hint=f"It has {len(self.reader.generations())}, numbered from 0.",
            )
        if self.step is not None and not any(True for b in self.branches() for _ in self.steps(b)):
            last = max((self._last(branch) for branch in self.branches()), default=-1)
            raise UsageError(
                f"{path} has no step {self.step}.",
                hint=f"Its steps go from 0 to {last}." if last >= 0 else "It has no steps yet.",
            )

    def _last(self, branch: BranchRow) -> int:
        last = self.reader.last_step(branch.generation, branch.branch)
        return -1 if last is None else last

    def generations(self) -> list[GenerationRow]:
        """Return the selected generations."""
        rows = self.reader.generations()
        return [row for row in rows if self.generation in (None, row.generation)]

    def branches(self) -> Iterator[BranchRow]:
        """Yield the branches of the selected generations."""
        for row in self.generations():
            yield from self.reader.branches(row.generation)

    def steps(self, branch: BranchRow) -> Iterator[StepRow]:
        """Yield the selected steps of a branch."""
        place = (branch.generation, branch.branch)
        if self.step is not None:
            yield from self.reader.steps(*place, self.step, self.step + 1)
            return
        yield from self._pages(
            lambda start: self.reader.steps(*place, start, limit=PAGE_ROWS), lambda row: row.step
        )

    def tokens(self, branch: BranchRow) -> Iterator[TokenRecord]:
        """Yield the tokens of a branch, of the selected step only if one is selected."""
        place = (branch.generation, branch.branch)
        if self.step is not None:
            yield from self.reader.step_tokens(place[0], self.step, place[1])
            return
        yield from self._pages(
            lambda start: self.reader.tokens(*place, start, limit=PAGE_ROWS), lambda row: row.pos
        )

    def masks(self) -> Iterator[MaskRecord]:
        """Yield the masks, with arrays, that the selected steps introduced or used."""
        for fingerprint in self._fingerprints():
            mask = self.reader.mask(fingerprint)
            if mask is not None:
                yield mask

    def _fingerprints(self) -> Iterable[str]:
        reader = self.reader
        if self.step is None and self.generation is None:
            return reader.fingerprints()
        used: dict[str, None] = {}
        for branch in self.branches():
            place = (branch.generation, self.step, branch.branch)
            used.update(dict.fromkeys(reader.fingerprints(*place)))
            for row in self.steps(branch):
                calls = reader.calls(branch.generation, row.step, branch.branch)
                used.update(dict.fromkeys(call.mask for call in calls if call.mask))
        return used

    def findings(self) -> Iterator[Finding]:
        """Yield the findings of the selected generations and steps."""
        if self.generation is None and self.step is None:
            yield from self._findings({})
            return
        for branch in self.branches():
            place = {"generation": branch.generation, "branch": branch.branch}
            yield from self._findings({**place, "step": self.step})

    def _findings(self, place: Mapping[str, Any]) -> Iterator[Finding]:
        for row in self._pages(
            lambda start: self.reader.finding_rows(start - 1, limit=PAGE_ROWS, **place),
            lambda row: row.id,
        ):
            yield row.finding

    def events(self) -> Iterator[EventRow]:
        """Yield the events of the selected generations and steps."""
        yield from self._pages(
            lambda start: self.reader.events(
                start - 1, generation=self.generation, step=self.step, limit=PAGE_ROWS
            ),
            lambda row: row.id,
        )

    def output(self) -> Iterator[OutputRow]:
        """Yield the program's output: all of it, or what was printed in the selected steps."""
        for row in self._pages(
            lambda start: self.reader.output(start - 1, limit=PAGE_ROWS), lambda row: row.id
        ):
            place = (row.output.generation, row.output.step)
            wanted = (self.generation, self.step)
            if all(want in (None, have) for want, have in zip(wanted, place, strict=True)):
                yield row

    def _pages(self, fetch: Callable[[int], list[T]], key: Callable[[T], int]) -> Iterator[T]:
        """Yield all rows; each page is read from the key after the last one of the page before."""
        start = 0
        while page := fetch(start):
            yield from page
            last = key(page[-1])
            if last < start:  # only with a damaged index, and would never end
                raise TraceError(f"{self.reader.path} is damaged: its rows are out of order.")
            start = last + 1


def dump_json(what: DumpSelection) -> Iterator[str]:
    """Yield the pieces of one JSON object, a row per line.

    NaN and infinities are the strings "NaN", "Infinity" and "-Infinity". Raises `UsageError` for a
    step or generation that does not exist, `TraceError` for a damaged trace.
    """
    what.check()
    branches = list(what.branches())
    yield f'{{"run": {plain_json(what.reader.run())}'
    yield from _json_section("generations", (_record_fields(row) for row in what.generations()))
    yield from _json_section("branches", (_record_fields(row) for row in branches))
    yield from _json_section("segments", (row for b in branches for row in _segment_dicts(what, b)))
    yield from _json_section("tokens", (row for b in branches for row in _token_dicts(what, b)))
    steps = (_step_dict(what.reader, row) for b in branches for row in what.steps(b))
    yield from _json_section("steps", steps)
    yield from _json_section("masks", (_mask_dict(mask) for mask in what.masks()))
    yield from _json_section("findings", (_record_fields(row) for row in what.findings()))
    yield from _json_section("events", (_event_dict(row) for row in what.events()))
    yield from _json_section(
        "output", ({"id": r.id, **_record_fields(r.output)} for r in what.output())
    )
    yield "}\n"


def mask_facts(mask: MaskRecord) -> dict[str, dict[str, Any] | None]:
    """Return the shape of each array of a mask and how many elements are not 0.

    None stands for an array that was not captured. The non-zero elements of `mask_mod_blocks` are
    the blocks in which the mask_mod opens at least one cell.
    """
    arrays = {name: getattr(mask, name) for name in MASK_ARRAYS}
    return {
        name: None
        if array is None
        else {"shape": list(array.shape), "open": int((array != 0).sum())}
        for name, array in arrays.items()
    }


def _json_section(name: str, rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    yield f',\n"{name}": ['
    separator = "\n"
    for row in rows:
        yield separator + plain_json(row)
        separator = ",\n"
    yield "]"


def _record_fields(record: Any, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    names = type(record).__slots__  # all records have them; `fields` is slower
    return {name: getattr(record, name) for name in names if name not in without}


def _branch_place(branch: BranchRow) -> dict[str, int]:
    return {"generation": branch.generation, "branch": branch.branch}


def _segment_dicts(what: DumpSelection, branch: BranchRow) -> Iterator[dict[str, Any]]:
    rows = what.reader.segments(branch.generation, branch.branch)
    for number, row in enumerate(rows):
        yield {**_branch_place(branch), "segment": number, **_record_fields(row)}


def _token_dicts(what: DumpSelection, branch: BranchRow) -> Iterator[dict[str, Any]]:
    for row in what.tokens(branch):
        yield {**_branch_place(branch), **_record_fields(row)}


def _step_dict(reader: TraceReader, row: StepRow) -> dict[str, Any]:
    key = (row.generation, row.step, row.branch)
    logits = reader.logits(*key)
    memory, inputs = reader.memory(*key), reader.inputs(*key)
    training = reader.training_step(*key) if row.phase == TRAIN else None
    return {
        **_record_fields(row),
        "logits": logits and _record_fields(logits, without=("candidates",)),
        "candidates": [_record_fields(each) for each in logits.candidates] if logits else [],
        "inputs": inputs and _record_fields(inputs),
        "calls": [_record_fields(each) for each in reader.calls(*key)],
        "builds": [_record_fields(each) for each in reader.builds(*key)],
        "layer_stats": [_record_fields(each) for each in reader.layer_stats(*key)],
        "memory": memory and _record_fields(memory),
        "gradients": _gradients_dict(reader, key),
        "training": training and asdict(training),
        "arrays": [_record_fields(each) for each in reader.arrays(*key)],
    }


def _gradients_dict(reader: TraceReader, key: tuple[int, int, int]) -> dict[str, Any] | None:
    found = reader.gradients(*key)
    if found is None:
        return None
    stats = [_record_fields(each) for each in found.stats]
    return {**_record_fields(found, without=("stats", "tokens", "layers")), "parameters": stats}


def _mask_dict(mask: MaskRecord) -> dict[str, Any]:
    return {**_record_fields(mask, without=MASK_ARRAYS), **mask_facts(mask)}


def _event_dict(row: EventRow) -> dict[str, Any]:
    return {"id": row.id, **_record_fields(row.event), "branch": row.branch}


TableRows = Iterable[Sequence[Any]]

_TEXT_FIELDS = ("token", "text")
"""Fields that are quoted, because spaces in them count."""


def dump_text(what: DumpSelection) -> Iterator[str]:
    """Yield the lines of the text, each with its newline.

    Raises `UsageError` for a step or generation that does not exist, `TraceError` for a damaged
    trace.
    """
    what.check()
    for line in _trace_lines(what):
        yield line.rstrip() + "\n"


def quote_visible(text: str) -> str:
    """Return `text` in double quotes with unprintable characters escaped."""
    return '"' + escape_unprintable(text).replace('"', '\\"') + '"'


def _trace_lines(what: DumpSelection) -> Iterator[str]:
    yield f"trace  version {what.reader.format_version}  {escape_unprintable(what.reader.state)}"
    yield ""
    yield "run"
    run = [(escape_unprintable(key), plain_json(value)) for key, value in what.reader.run().items()]
    yield from _table_lines((), run, indent=2)
    for generation in what.generations():
        yield ""
        yield from _generation_lines(generation)
        for branch in what.reader.branches(generation.generation):
            yield from _branch_lines(what, branch)
    yield from _titled_lines("masks", (line for mask in what.masks() for line in _mask_lines(mask)))
    yield from _titled_lines(
        "findings", (line for found in what.findings() for line in _finding_lines(found))
    )
    yield from _titled_lines("events", (_event_line(row) for row in what.events()))
    yield from _titled_lines("output", (_output_line(row) for row in what.output()))


def _titled_lines(title: str, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        if not number:
            yield ""
            yield title
        yield "  " + line


def _generation_lines(row: GenerationRow) -> Iterator[str]:
    about = f"sample {escape_unprintable(row.sample_id)}  mask {escape_unprintable(row.mask)}"
    about += f"  model {escape_unprintable(row.model)}" if row.model else ""
    yield f"generation {row.generation}  {about}  positions {escape_unprintable(row.positions)}"
    yield f"  started   {_format_time(row.started_at)}"
    yield f"  expected  {' | '.join(quote_visible(answer) for answer in row.expected)}"
    yield f"  declared  {plain_json(row.declared)}"


def _branch_lines(what: DumpSelection, branch: BranchRow) -> Iterator[str]:
    fork = "" if branch.parent is None else f"  from {branch.parent} at step {branch.fork_step}"
    state, stop_reason = map(escape_unprintable, (branch.state, branch.stop_reason))
    yield f"  branch {branch.branch}{fork}  {state}  {stop_reason}"
    yield f"    started  {_format_time(branch.started_at)}  ended  {_format_time(branch.ended_at)}"
    yield f"    answer   {quote_visible(branch.answer)}"
    if branch.change:
        yield f"    change   {plain_json(branch.change)}"
    segments = [
        (number, row.start, row.stop, row.owner, row.kind.value, escape_unprintable(row.label))
        for number, row in enumerate(what.reader.segments(branch.generation, branch.branch))
    ]
    heads = ("#", "start", "stop", "owner", "kind", "label")
    yield from _titled_table("segments", heads, segments, indent=4)
    names = "pos token_id position_id segment step special token text"
    yield from _record_table("tokens", names, what.tokens(branch), indent=4)
    for row in what.steps(branch):
        yield from _step_lines(what.reader, row)


def _step_lines(reader: TraceReader, row: StepRow) -> Iterator[str]:
    key = (row.generation, row.step, row.branch)
    lengths = f"q {row.q_len}  kv {row.kv_before} → {row.kv_after}"
    times = f"wall {_format_cell(row.wall_ms)} ms  capture {_format_cell(row.capture_ms)} ms"
    yield f"    step {row.step}  {escape_unprintable(row.phase)}  {lengths}  {times}"
    yield f"      started  {_format_time(row.started_at)}"
    logits = reader.logits(*key)
    if logits is not None:
        yield from _logits_lines(logits)
    memory = reader.memory(*key)
    if memory is not None:
        yield "      " + _memory_line(memory)
    inputs = reader.inputs(*key)
    if inputs is not None:
        yield from _inputs_lines(inputs)
    training = reader.training_step(*key) if row.phase == TRAIN else None
    if training is not None:
        yield from _training_lines(training)
    names = (
        "layer path backend mask batch q_heads kv_heads q_len kv_len head_dim dtype scale "
        "lse_error check_kind mask_passed_to_layer suppressed_exception causal window"
    )
    yield from _record_table("calls", names, reader.calls(*key), indent=6)
    names = "layer batch heads q_len kv_len wall_ms peak_growth mask_mod"
    yield from _record_table("builds", names, reader.builds(*key), indent=6)
    names = "layer module n_nan n_inf bad_row min max mean std norm"
    yield from _record_table("layer_stats", names, reader.layer_stats(*key), indent=6)
    gradients = reader.gradients(*key)
    if gradients is not None:
        yield from _gradients_lines(gradients)
    names = "number stream layer dtype shape codec n_bytes"
    yield from _record_table("arrays", names, reader.arrays(*key), indent=6)


def _training_lines(row: TrainingStepRecord) -> Iterator[str]:
    rates = " ".join(_format_cell(None if one != one else one) for one in row.learning_rates) or "-"
    loss = (
        f"{_format_cell(row.loss)} ({escape_unprintable(row.loss_source)})" if row.has_loss else "-"
    )
    yield f"      training loss {loss}  lr {rates}  detail {escape_unprintable(row.detail)}"
    norms = (row.total_norm, row.norm_before_clip, row.max_norm)
    total, before, limit = map(_format_cell, norms)
    yield f"      norm     {total}  before clipping {before}  limit {limit}"
    counts = f"{row.n_exploding} explode  {row.n_vanishing} vanish  {row.n_dead} dead"
    yield f"      params   {row.n_parameters}  {counts}  {row.n_nonfinite} not finite"
    if row.anomaly_origin is not None:
        kind, name = map(escape_unprintable, (row.anomaly_origin.kind, row.anomaly_origin.name))
        yield f"      origin   {kind} {name}  affected {row.anomaly_origin.n_affected}"
    yield from _record_table("grads", "name norm max n_nan n_inf", row.gradients, indent=6)


def _inputs_lines(row: InputsRecord) -> Iterator[str]:
    runs = " ".join(
        f"{first}-{first + n - 1}" if n > 1 else str(first) for first, n in row.positions
    )
    yield f"      inputs   batch {row.batch}  positions {runs or '-'}"
    before, after = (
        " ".join(map(str, lengths)) or "-" for lengths in (row.cached_before, row.cached_after)
    )
    yield f"      cached   before {before}  after {after}"


def _logits_lines(row: LogitsRecord) -> Iterator[str]:
    logprob = _format_cell(row.chosen_logprob)
    chosen = f"chosen {row.chosen_id}  rank {row.chosen_rank}  logprob {logprob}"
    shape = f"entropy {_format_cell(row.entropy)}  margin {_format_cell(row.margin)}"
    yield f"      logits   {shape}  {chosen}  nan {row.n_nan}  inf {row.n_inf}"
    counts = " ".join(map(str, row.histogram))
    ends = f"{_format_cell(row.histogram_min)} to {_format_cell(row.histogram_max)}"
    yield f"      histogram  {ends}  {counts}"
    names = "rank token_id logit logprob score score_logprob text"
    yield from _record_table("candidates", names, row.candidates, indent=6)


def _memory_line(row: MemoryRecord) -> str:
    cuda = (row.cuda_allocated, row.cuda_reserved, row.cuda_peak)
    allocated, reserved, peak = map(_format_cell, cuda)
    return (
        f"memory   rss {row.rss}  model {row.model}  kv cache {row.kv_cache}  "
        f"cuda allocated {allocated}  reserved {reserved}  peak {peak}"
    )


def _gradients_lines(row: GradientRecord) -> Iterator[str]:
    to = "" if row.runner_up_id is None else f" to {row.runner_up_id}"
    target, path = escape_unprintable(row.target), escape_unprintable(row.path)
    numbers = (row.value, row.logits_error, row.tolerance, row.scale, row.wall_ms)
    value, error, tolerance, scale, wall_ms = map(_format_cell, numbers)
    yield (
        f"      gradients  of the {target} of {row.token_id}{to}, {value}  {path}  "
        f"error {error} of {tolerance}  at the logits {scale}  {wall_ms} ms  "
        f"unreached {row.n_unreached}"
    )
    if row.anomaly is not None:
        yield f"      anomaly  {quote_visible(row.anomaly)}"
    names = "layer part name norm max n_nan n_inf"
    yield from _record_table("grads", names, row.stats, indent=6)


def _mask_lines(mask: MaskRecord) -> Iterator[str]:
    size = f"batch {mask.batch}  heads {mask.heads}  q {mask.q_len}  kv {mask.kv_len}"
    blocks = f"blocks {_format_cell(mask.block_q)} × {_format_cell(mask.block_kv)}"
    how = "compiled" if mask.compiled else "uncompiled"
    keys = f"  keys from {mask.kv_offset}" if mask.kv_offset else ""
    yield (
        f"{escape_unprintable(mask.fingerprint)}  {escape_unprintable(mask.kind)}  {size}  "
        f"offset {mask.q_offset}{keys}  {blocks}  {how}"
    )
    mask_mod, source = map(_visible_cell, (mask.mask_mod, mask.mask_mod_source))
    yield f"  mask_mod  {mask_mod or '-'}  {source or '-'}"
    for name, facts in mask_facts(mask).items():
        yield f"  {name:15}  " + (f"{facts['shape']}  {facts['open']} open" if facts else "-")


def _finding_lines(found: Finding) -> Iterator[str]:
    names = ("generation", "branch", "step", "layer", "head")
    where = "  ".join(f"{n} {getattr(found, n)}" for n in names if getattr(found, n) is not None)
    yield f"{found.severity.value}  {escape_unprintable(found.id)}  {where}"
    yield f"  {escape_unprintable(found.sentence)}"
    yield f"  positions {list(found.positions)}  evidence {plain_json(dict(found.evidence))}"
    if found.layers or found.times > 1:
        until = "" if found.last_step is None else f", the last in step {found.last_step}"
        yield f"  layers {list(found.layers)}  {found.times} times{until}"
    if found.query:
        yield f"  query {escape_unprintable(found.query)}"


def _place_text(**places: int | None) -> str:
    return "".join(f"  {name} {value}" for name, value in places.items() if value is not None)


def _output_line(row: OutputRow) -> str:
    out = row.output
    where = _place_text(generation=out.generation, step=out.step)
    stream, text = escape_unprintable(out.stream), quote_visible(out.text)
    return f"{row.id}  {_format_time(out.at)}{where}  {stream}  {text}"


def _event_line(row: EventRow) -> str:
    event = row.event
    where = _place_text(generation=event.generation, branch=row.branch, step=event.step)
    data = plain_json(dict(event.data))
    kind, text = escape_unprintable(event.kind), escape_unprintable(event.text)
    return f"{row.id}  {_format_time(event.at)}{where}  {kind}  {text}  {data}"


def _visible_cell(value: Any) -> Any:
    return escape_unprintable(value) if isinstance(value, str) else value


def _format_cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _format_time(at: float | None) -> str:
    if at is None:
        return "-"
    try:
        return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return _format_cell(at)


def _record_table(title: str, names: str, records: Iterable[Any], *, indent: int) -> Iterator[str]:
    """Yield a titled table of records; `names` are those of their fields that are shown."""
    heads = names.split()
    rows = ([_field_cell(name, getattr(record, name)) for name in heads] for record in records)
    return _titled_table(title, heads, rows, indent=indent)


def _field_cell(name: str, value: Any) -> Any:
    if name in _TEXT_FIELDS:
        return quote_visible(value)
    if name == "shape":
        return " × ".join(map(str, value)) or "scalar"
    if name == "special":
        return "special" if value else "-"
    return _visible_cell(value)


def _titled_table(
    title: str, heads: Sequence[str], rows: TableRows, *, indent: int
) -> Iterator[str]:
    """Yield a titled table in pages, so that it may be long; nothing when there are no rows."""
    remaining = iter(rows)
    is_first = True
    while page := list(islice(remaining, PAGE_ROWS)):
        if is_first:
            yield " " * indent + title
        yield from _table_lines(heads if is_first else (), page, indent=indent + 2)
        is_first = False


def _table_lines(
    heads: Sequence[str], rows: Sequence[Sequence[Any]], *, indent: int
) -> Iterator[str]:
    """Yield the lines of a table: numbers right-aligned, text left-aligned, two spaces between."""
    if not rows:
        return
    to_right = [all(_is_number(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = [[_format_cell(value) for value in row] for row in rows]
    lines = [list(heads), *cells] if heads else cells
    widths = [max(len(line[i]) for line in lines) for i in range(len(to_right))]
    for line in lines:
        parts = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, to_right, strict=True)
        ]
        yield " " * indent + "  ".join(parts)


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)
