"""A trace as text or JSON, yielded in pieces, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any, TypeVar

from msgspec import Struct, to_builtins

from flexinspect.core.errors import TraceError, UsageError
from flexinspect.core.text import escape_unprintable
from flexinspect.records import step as records
from flexinspect.records.finding import Finding
from flexinspect.records.step import MASK_ARRAYS, TRAIN
from flexinspect.records.training_step import TrainingStepRecord
from flexinspect.trace.codec import plain_json
from flexinspect.trace.query_results import BranchRow, EventRow, GenerationRow, OutputRow, StepRow
from flexinspect.trace.reader import TraceReader

T = TypeVar("T")
PAGE_ROWS = 256  # rows that are read at a time


class DumpSelection(Struct, frozen=True):
    """The part of a trace to print: one generation or all (None), one step of each or all."""

    reader: TraceReader
    generation: int | None = None
    step: int | None = None

    def check(self) -> None:
        """Raise `UsageError` when there is no such generation or step."""
        path = self.reader.path
        if self.generation is not None and not self.generations():
            hint = f"It has {len(self.reader.generations())}, numbered from 0."
            raise UsageError(f"{path} has no generation {self.generation}.", hint=hint)
        if self.step is not None and not any(True for b in self.branches() for _ in self.steps(b)):
            lasts = [self.reader.last_step(b.generation, b.branch) for b in self.branches()]
            last = max((each for each in lasts if each is not None), default=-1)
            hint = f"Its steps go from 0 to {last}." if last >= 0 else "It has no steps yet."
            raise UsageError(f"{path} has no step {self.step}.", hint=hint)

    def generations(self) -> list[GenerationRow]:
        """Return the selected generations."""
        rows = self.reader.generations()
        return [row for row in rows if self.generation in (None, row.generation)]

    def branches(self) -> Iterator[BranchRow]:
        """Yield the branches of the selected generations."""
        for row in self.generations():
            yield from self.reader.branches(row.generation)

    def steps(self, branch: BranchRow) -> Iterator[StepRow]:
        """Return the selected steps of a branch."""
        place = (branch.generation, branch.branch)
        first, stop = (0, None) if self.step is None else (self.step, self.step + 1)
        fetch = partial(self.reader.steps, *place, stop=stop, limit=PAGE_ROWS)
        return self._pages(lambda after: fetch(start=after + 1), "step", first - 1)

    def tokens(self, branch: BranchRow) -> Iterator[records.TokenRecord]:
        """Return the tokens of a branch, of the selected step only if one is selected."""
        place = (branch.generation, branch.branch)
        if self.step is not None:
            return iter(self.reader.step_tokens(place[0], self.step, place[1]))
        return self._pages(
            lambda after: self.reader.tokens(*place, after + 1, limit=PAGE_ROWS), "pos"
        )

    def masks(self) -> Iterator[records.MaskRecord]:
        """Yield the masks, with arrays, that the selected steps introduced or used."""
        yield from filter(None, map(self.reader.mask, self._fingerprints()))

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
        places: Iterable[dict[str, Any]] = [{}]
        if self.generation is not None or self.step is not None:
            places = (_place(branch) | {"step": self.step} for branch in self.branches())
        for place in places:
            fetch = partial(self.reader.finding_rows, limit=PAGE_ROWS, **place)
            for row in self._pages(fetch, "id"):
                yield row.finding

    def events(self) -> Iterator[EventRow]:
        """Return the events of the selected generations and steps."""
        fetch = partial(self.reader.events, generation=self.generation, step=self.step)
        return self._pages(partial(fetch, limit=PAGE_ROWS), "id")

    def output(self) -> Iterator[OutputRow]:
        """Yield the program's output: all of it, or what was printed in the selected steps."""
        wanted = (self.generation, self.step)
        for row in self._pages(partial(self.reader.output, limit=PAGE_ROWS), "id"):
            place = (row.output.generation, row.output.step)
            if all(want in (None, have) for want, have in zip(wanted, place, strict=True)):
                yield row

    def _pages(self, fetch: Callable[[int], list[T]], key: str, after: int = -1) -> Iterator[T]:
        """Yield all rows; each page is read from the key after the last one of the page before."""
        while page := fetch(after):
            yield from page
            last = attrgetter(key)(page[-1])
            if last <= after:  # only with a damaged index, and would never end
                raise TraceError(f"{self.reader.path} is damaged: its rows are out of order.")
            after = last


def dump_json(what: DumpSelection) -> Iterator[str]:
    """Yield the pieces of one JSON object, a row per line.

    NaN and infinities are the strings "NaN", "Infinity" and "-Infinity". Raises `UsageError` for a
    step or generation that does not exist, `TraceError` for a damaged trace.
    """
    what.check()
    reader, branches = what.reader, list(what.branches())
    segments = (
        _place(branch) | {"segment": number} | _fields(row)
        for branch in branches
        for number, row in enumerate(reader.segments(branch.generation, branch.branch))
    )
    sections: dict[str, Iterable[dict[str, Any]]] = {
        "generations": map(_fields, what.generations()),
        "branches": map(_fields, branches),
        "segments": segments,
        "tokens": (_place(b) | _fields(row) for b in branches for row in what.tokens(b)),
        "steps": (_step_dict(reader, row) for branch in branches for row in what.steps(branch)),
        "masks": (_fields(m, without=MASK_ARRAYS) | mask_facts(m) for m in what.masks()),
        "findings": map(_fields, what.findings()),
        "events": ({"id": r.id} | _fields(r.event) | {"branch": r.branch} for r in what.events()),
        "output": ({"id": r.id} | _fields(r.output) for r in what.output()),
    }
    yield f'{{"run": {plain_json(reader.run())}'
    for name, rows in sections.items():
        yield f',\n"{name}": ['
        separator = "\n"
        for row in rows:
            yield separator + plain_json(row)
            separator = ",\n"
        yield "]"
    yield "}\n"


def mask_facts(mask: records.MaskRecord) -> dict[str, dict[str, Any] | None]:
    """Return the shape of each array of a mask and how many elements are not 0.

    None stands for an array that was not captured. The non-zero elements of `mask_mod_blocks` are
    the blocks in which the mask_mod opens at least one cell.
    """
    facts: dict[str, dict[str, Any] | None] = dict.fromkeys(MASK_ARRAYS)
    for name in MASK_ARRAYS:
        if (array := getattr(mask, name)) is not None:
            facts[name] = {"shape": list(array.shape), "open": int((array != 0).sum())}
    return facts


def _fields(record: Any, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    names = type(record).__struct_fields__
    return {name: getattr(record, name) for name in names if name not in without}


def _place(branch: BranchRow) -> dict[str, Any]:
    return {"generation": branch.generation, "branch": branch.branch}


def _step_dict(reader: TraceReader, row: StepRow) -> dict[str, Any]:
    key = (row.generation, row.step, row.branch)
    logits, gradients = reader.logits(*key), reader.gradients(*key)
    memory, inputs = reader.memory(*key), reader.inputs(*key)
    training = reader.training_step(*key) if row.phase == TRAIN else None
    gradient_fields = gradients and {
        **_fields(gradients, without=("stats", "tokens", "layers")),
        "parameters": list(map(_fields, gradients.stats)),
    }
    return {
        **_fields(row),
        "logits": logits and _fields(logits, without=("candidates",)),
        "candidates": list(map(_fields, logits.candidates if logits else ())),
        "inputs": inputs and _fields(inputs),
        "calls": list(map(_fields, reader.calls(*key))),
        "builds": list(map(_fields, reader.builds(*key))),
        "layer_stats": list(map(_fields, reader.layer_stats(*key))),
        "memory": memory and _fields(memory),
        "gpus": list(map(_fields, reader.gpus(*key))),
        "lens": list(map(_fields, reader.lens(*key))),
        "gradients": gradient_fields,
        "training": training and to_builtins(training),
        "arrays": list(map(_fields, reader.arrays(*key))),
    }


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
    reader = what.reader
    yield f"trace  version {reader.format_version}  {escape_unprintable(reader.state)}"
    yield ""
    yield "run"
    run = [(escape_unprintable(key), plain_json(value)) for key, value in reader.run().items()]
    yield from _table_lines((), run, indent=2)
    for generation in what.generations():
        yield ""
        yield from _generation_lines(generation)
        for branch in reader.branches(generation.generation):
            yield from _branch_lines(what, branch)
    sections: tuple[tuple[str, Iterator[Any], Callable[[Any], Iterator[str]]], ...] = (
        ("masks", what.masks(), _mask_lines),
        ("findings", what.findings(), _finding_lines),
        ("events", what.events(), _event_lines),
        ("output", what.output(), _output_lines),
    )
    for title, rows, lines_of in sections:
        for number, row in enumerate(rows):
            yield from () if number else ("", title)
            yield from ("  " + line for line in lines_of(row))


def _fill(template: str, record: Any, **others: Any) -> str:
    """Return a template with fields of a record as cells; `others` are inserted as they are."""
    return template.format_map(_Cells(record, others))


class _Cells(dict[str, Any]):
    """The cells of a record's fields, each made when a template asks for it."""

    def __init__(self, record: Any, others: Mapping[str, Any]) -> None:
        super().__init__(others)
        self._record = record

    def __missing__(self, name: str) -> str:
        return _format_cell(_field_cell(name, getattr(self._record, name)))


def _generation_lines(row: GenerationRow) -> Iterator[str]:
    model = "  model {model}" if row.model else ""
    names = f"sample {{sample_id}}  mask {{mask}}{model}  positions {{positions}}"
    yield _fill(f"generation {{generation}}  {names}", row)
    yield _fill("  started   {started_at}", row)
    yield f"  expected  {' | '.join(map(quote_visible, row.expected))}"
    yield _fill("  declared  {declared}", row)


def _branch_lines(what: DumpSelection, branch: BranchRow) -> Iterator[str]:
    fork = "" if branch.parent is None else "  from {parent} at step {fork_step}"
    yield _fill(f"  branch {{branch}}{fork}  {{state}}  {{stop_reason}}", branch)
    yield _fill("    started  {started_at}  ended  {ended_at}", branch)
    yield _fill("    answer   {answer}", branch)
    if branch.change:
        yield _fill("    change   {change}", branch)
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


_LOGITS_LINE = (
    "      logits   entropy {entropy}  margin {margin}  chosen {chosen_id}  rank {chosen_rank}  "
    "logprob {chosen_logprob}  nan {n_nan}  inf {n_inf}"
)
_MEMORY_LINE = (
    "      memory   rss {rss}  model {model}  kv cache {kv_cache}  "
    "cuda allocated {cuda_allocated}  reserved {cuda_reserved}  peak {cuda_peak}"
)
_GRADIENTS_LINE = (
    "      gradients  of the {target} of {token_id}{to}, {value}  {path}  "
    "error {logits_error} of {tolerance}  at the logits {scale}  {wall_ms} ms  "
    "unreached {n_unreached}"
)
_CALL_NAMES = (
    "layer path backend mask batch q_heads kv_heads q_len kv_len head_dim dtype scale "
    "lse_error check_kind mask_passed_to_layer suppressed_exception causal window"
)
_BUILD_NAMES = "layer batch heads q_len kv_len wall_ms peak_growth mask_mod"
_GPU_NAMES = "device utilization memory_used memory_own memory_total temperature power name"
_LENS_NAMES = "layer chosen_rank chosen_logprob error token_ids logprobs texts"
_STAT_NAMES = "layer module n_nan n_inf bad_row min max mean std norm"


def _step_lines(reader: TraceReader, row: StepRow) -> Iterator[str]:
    key = (row.generation, row.step, row.branch)
    lengths = "q {q_len}  kv {kv_before} → {kv_after}"
    times = "wall {wall_ms} ms  capture {capture_ms} ms"
    yield _fill(f"    step {{step}}  {{phase}}  {lengths}  {times}", row)
    yield _fill("      started  {started_at}", row)
    if logits := reader.logits(*key):
        yield _fill(_LOGITS_LINE, logits)
        counts = " ".join(map(str, logits.histogram))
        line = "      histogram  {histogram_min} to {histogram_max}  {counts}"
        yield _fill(line, logits, counts=counts)
        names = "rank token_id logit logprob score score_logprob text"
        yield from _record_table("candidates", names, logits.candidates, indent=6)
    if memory := reader.memory(*key):
        yield _fill(_MEMORY_LINE, memory)
    yield from _record_table("gpus", _GPU_NAMES, reader.gpus(*key), indent=6)
    yield from _record_table("lens", _LENS_NAMES, reader.lens(*key), indent=6)
    if inputs := reader.inputs(*key):
        yield from _inputs_lines(inputs)
    if row.phase == TRAIN and (training := reader.training_step(*key)):
        yield from _training_lines(training)
    yield from _record_table("calls", _CALL_NAMES, reader.calls(*key), indent=6)
    yield from _record_table("builds", _BUILD_NAMES, reader.builds(*key), indent=6)
    yield from _record_table("layer_stats", _STAT_NAMES, reader.layer_stats(*key), indent=6)
    if gradients := reader.gradients(*key):
        to = "" if gradients.runner_up_id is None else f" to {gradients.runner_up_id}"
        yield _fill(_GRADIENTS_LINE, gradients, to=to)
        if gradients.anomaly is not None:
            yield _fill("      anomaly  {anomaly}", gradients)
        names = "layer part name norm max n_nan n_inf"
        yield from _record_table("grads", names, gradients.stats, indent=6)
    names = "number stream layer dtype shape codec n_bytes"
    yield from _record_table("arrays", names, reader.arrays(*key), indent=6)


def _training_lines(row: TrainingStepRecord) -> Iterator[str]:
    rates = " ".join(_format_cell(None if one != one else one) for one in row.learning_rates) or "-"
    loss = "{loss} ({loss_source})" if row.has_loss else "-"
    yield _fill(f"      training loss {loss}  lr {rates}  detail {{detail}}", row)
    norms = "{total_norm}  before clipping {norm_before_clip}  limit {max_norm}"
    yield _fill(f"      norm     {norms}", row)
    counts = "{n_exploding} explode  {n_vanishing} vanish  {n_dead} dead"
    yield _fill(f"      params   {{n_parameters}}  {counts}  {{n_nonfinite}} not finite", row)
    if row.anomaly_origin is not None:
        yield _fill("      origin   {kind} {name}  affected {n_affected}", row.anomaly_origin)
    yield from _record_table("grads", "name norm max n_nan n_inf", row.gradients, indent=6)


def _inputs_lines(row: records.InputsRecord) -> Iterator[str]:
    runs = (f"{first}-{first + n - 1}" if n > 1 else str(first) for first, n in row.positions)
    yield f"      inputs   batch {row.batch}  positions {' '.join(runs) or '-'}"
    lengths = (row.cached_before, row.cached_after)
    before, after = (" ".join(map(str, each)) or "-" for each in lengths)
    yield f"      cached   before {before}  after {after}"


def _mask_lines(mask: records.MaskRecord) -> Iterator[str]:
    size = "batch {batch}  heads {heads}  q {q_len}  kv {kv_len}  offset {q_offset}"
    keys = "  keys from {kv_offset}" if mask.kv_offset else ""
    how = "compiled" if mask.compiled else "uncompiled"
    blocks = f"blocks {{block_q}} × {{block_kv}}  {how}"
    yield _fill(f"{{fingerprint}}  {{kind}}  {size}{keys}  {blocks}", mask)
    yield _fill("  mask_mod  {mask_mod}  {mask_mod_source}", mask)
    if mask.added is not None:
        yield _fill("  added  {added}", mask)
    for name, facts in mask_facts(mask).items():
        yield f"  {name:15}  " + (f"{facts['shape']}  {facts['open']} open" if facts else "-")


def _finding_lines(found: Finding) -> Iterator[str]:
    where = _place_text(found, "generation", "branch", "step", "layer", "head")
    yield _fill("{severity}  {id}{where}", found, where=where)
    yield _fill("  {sentence}", found)
    positions = list(found.positions)
    yield _fill("  positions {positions}  evidence {evidence}", found, positions=positions)
    if found.layers or found.times > 1:
        until = "" if found.last_step is None else ", the last in step {last_step}"
        yield _fill(f"  layers {list(found.layers)}  {{times}} times{until}", found)
    if found.query:
        yield _fill("  query {query}", found)


def _event_lines(row: EventRow) -> Iterator[str]:
    branch = "" if row.branch is None else f"  branch {row.branch}"
    where = _place_text(row.event, "generation") + branch + _place_text(row.event, "step")
    others = {"number": row.id, "where": where, "text": escape_unprintable(row.event.text)}
    yield _fill("{number}  {at}{where}  {kind}  {text}  {data}", row.event, **others)


def _output_lines(row: OutputRow) -> Iterator[str]:
    where = _place_text(row.output, "generation", "step")
    yield _fill("{number}  {at}{where}  {stream}  {text}", row.output, number=row.id, where=where)


def _place_text(record: Any, *names: str) -> str:
    places = ((name, getattr(record, name)) for name in names)
    return "".join(f"  {name} {value}" for name, value in places if value is not None)


def _format_cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _record_table(title: str, names: str, records: Iterable[Any], *, indent: int) -> Iterator[str]:
    """Yield a titled table of records; `names` are those of their fields that are shown."""
    heads = names.split()
    rows = ([_field_cell(name, getattr(record, name)) for name in heads] for record in records)
    return _titled_table(title, heads, rows, indent=indent)


def _field_cell(name: str, value: Any) -> Any:
    if name in ("token", "text", "answer", "anomaly"):  # spaces in them count
        return quote_visible(value)
    if isinstance(value, Mapping):
        return plain_json(dict(value))
    if value is not None and (name == "at" or name.endswith("_at")):
        with suppress(ValueError, OverflowError, OSError):
            return datetime.fromtimestamp(value, UTC).isoformat(timespec="milliseconds")
    if name == "shape":
        return " × ".join(map(str, value)) or "scalar"
    if isinstance(value, tuple):
        cells = (_format_cell(_field_cell("text", v) if isinstance(v, str) else v) for v in value)
        return " ".join(cells) or "-"
    if name == "special":
        return "special" if value else "-"
    return escape_unprintable(value) if isinstance(value, str) else value


def _titled_table(
    title: str, heads: Sequence[str], rows: Iterable[Sequence[Any]], *, indent: int
) -> Iterator[str]:
    """Yield a titled table in pages, so that it may be long; nothing when there are no rows."""
    remaining = iter(rows)
    while page := list(islice(remaining, PAGE_ROWS)):
        if title:
            yield " " * indent + title
        yield from _table_lines(heads, page, indent=indent + 2)
        title, heads = "", ()


def _table_lines(
    heads: Sequence[str], rows: Sequence[Sequence[Any]], *, indent: int
) -> Iterator[str]:
    """Yield the lines of a table: numbers right-aligned, text left-aligned, two spaces between."""
    if not rows:
        return
    to_right = [
        all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(rows[0]))
    ]
    cells = [[_format_cell(value) for value in row] for row in rows]
    lines = [list(heads), *cells] if heads else cells
    widths = [max(len(line[i]) for line in lines) for i in range(len(to_right))]
    for line in lines:
        parts = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, to_right, strict=True)
        ]
        yield " " * indent + "  ".join(parts)
