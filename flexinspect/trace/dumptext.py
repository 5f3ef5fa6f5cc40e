"""A trace as aligned text. Nothing that was recorded can reach the terminal as a control."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from flexinspect.findings import Finding
from flexinspect.gradientrecords import GradientRecord
from flexinspect.records import (
    TRAIN,
    BuildRecord,
    CallRecord,
    InputsRecord,
    LayerStatRecord,
    LogitsRecord,
    MaskRecord,
    MemoryRecord,
)
from flexinspect.text import visible
from flexinspect.trace.dump import WINDOW, Selection, mask_facts
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.rows import (
    ArrayInfo,
    BranchRow,
    EventRow,
    GenerationRow,
    OutputRow,
    StepRow,
)
from flexinspect.trace.schema import VERSION
from flexinspect.trace.values import plain_json
from flexinspect.trainingfacts import TrainingStepRecord

Rows = Iterable[Sequence[Any]]

_TOKENS = ("pos", "id", "position id", "segment", "step", "special", "token", "text")
_CANDIDATES = ("rank", "id", "logit", "logprob", "score", "score logprob", "text")
_CALLS = (
    *("layer", "path", "backend", "mask", "batch", "heads", "kv heads", "q", "kv", "head dim"),
    *("dtype", "scale", "gate", "gate kind", "handed", "swallowed", "causal", "window"),
)
_BUILDS = ("layer", "batch", "heads", "q", "kv", "ms", "peak growth", "rule")
_STATS = ("layer", "module", "nan", "inf", "bad row", "min", "max", "mean", "std", "norm")
_GRADS = ("layer", "part", "parameter", "norm", "max", "nan", "inf")
_ARRAYS = ("#", "stream", "layer", "dtype", "shape", "codec", "bytes")


def dump_text(what: Selection) -> Iterator[str]:
    """Yield the lines of the text, each with its newline.

    Raises `UsageError` for a step or generation that does not exist, `TraceError` for a damaged
    trace.
    """
    what.check()
    for line in _lines(what):
        yield line.rstrip() + "\n"


def quoted(text: str) -> str:
    """Return `text` made visible, in double quotes, so that its blanks show."""
    return '"' + visible(text).replace('"', '\\"') + '"'


def _lines(what: Selection) -> Iterator[str]:
    yield f"trace  version {VERSION}  {visible(what.reader.state)}"
    yield ""
    yield "run"
    run = [(visible(key), plain_json(value)) for key, value in what.reader.run().items()]
    yield from _table((), run, indent=2)
    for generation in what.generations():
        yield ""
        yield from _generation(generation)
        for branch in what.reader.branches(generation.generation):
            yield from _branch(what, branch)
    yield from _titled("masks", (line for mask in what.masks() for line in _mask(mask)))
    yield from _titled("findings", (line for found in what.findings() for line in _finding(found)))
    yield from _titled("events", (_event(row) for row in what.events()))
    yield from _titled("output", (_output(row) for row in what.output()))


def _titled(title: str, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        if not number:
            yield ""
            yield title
        yield "  " + line


def _generation(row: GenerationRow) -> Iterator[str]:
    about = f"sample {visible(row.sample_id)}  mask {visible(row.mask)}"
    about += f"  model {visible(row.model)}" if row.model else ""
    yield f"generation {row.generation}  {about}  positions {visible(row.positions)}"
    yield f"  started   {_time(row.started_at)}"
    yield f"  expected  {' | '.join(quoted(answer) for answer in row.expected)}"
    yield f"  declared  {plain_json(row.declared)}"


def _branch(what: Selection, branch: BranchRow) -> Iterator[str]:
    fork = "" if branch.parent is None else f"  from {branch.parent} at step {branch.fork_step}"
    yield f"  branch {branch.branch}{fork}  {visible(branch.state)}  {visible(branch.stop_reason)}"
    yield f"    started  {_time(branch.started_at)}  ended  {_time(branch.ended_at)}"
    yield f"    answer   {quoted(branch.answer)}"
    if branch.change:
        yield f"    change   {plain_json(branch.change)}"
    segments = [
        (number, row.start, row.stop, row.owner, row.kind.value, visible(row.label))
        for number, row in enumerate(what.reader.segments(branch.generation, branch.branch))
    ]
    heads = ("#", "start", "stop", "owner", "kind", "label")
    yield from _block("segments", heads, segments, indent=4)
    yield from _block("tokens", _TOKENS, _token_rows(what, branch), indent=4)
    for row in what.steps(branch):
        yield from _step(what.reader, row)


def _token_rows(what: Selection, branch: BranchRow) -> Iterator[Sequence[Any]]:
    for row in what.tokens(branch):
        numbers = (row.pos, row.token_id, row.position_id, row.segment, row.step)
        yield *numbers, "special" if row.special else "-", quoted(row.token), quoted(row.text)


def _step(reader: TraceReader, row: StepRow) -> Iterator[str]:
    key = (row.generation, row.step, row.branch)
    lengths = f"q {row.q_len}  kv {row.kv_before} → {row.kv_after}"
    times = f"wall {_cell(row.wall_ms)} ms  capture {_cell(row.capture_ms)} ms"
    yield f"    step {row.step}  {visible(row.phase)}  {lengths}  {times}"
    yield f"      started  {_time(row.started_at)}"
    logits = reader.logits(*key)
    if logits is not None:
        yield from _logits(logits)
    memory = reader.memory(*key)
    if memory is not None:
        yield "      " + _memory(memory)
    inputs = reader.inputs(*key)
    if inputs is not None:
        yield from _inputs(inputs)
    training = reader.training_step(*key) if row.phase == TRAIN else None
    if training is not None:
        yield from _training(training)
    yield from _block("calls", _CALLS, map(_call, reader.calls(*key)), indent=6)
    yield from _block("builds", _BUILDS, map(_build, reader.builds(*key)), indent=6)
    yield from _block("layer_stats", _STATS, map(_stat, reader.layer_stats(*key)), indent=6)
    gradients = reader.gradients(*key)
    if gradients is not None:
        yield from _gradients(gradients)
    yield from _block("arrays", _ARRAYS, map(_array, reader.arrays(*key)), indent=6)


def _training(row: TrainingStepRecord) -> Iterator[str]:
    rates = " ".join(_cell(None if one != one else one) for one in row.learning_rates) or "-"
    loss = f"{_cell(row.loss)} ({visible(row.loss_source)})" if row.has_loss else "-"
    yield f"      training loss {loss}  lr {rates}  detail {visible(row.detail)}"
    norms = (row.total_norm, row.norm_before_clip, row.max_norm)
    total, before, limit = map(_cell, norms)
    yield f"      norm     {total}  before clipping {before}  limit {limit}"
    sick = f"{row.n_exploding} explode  {row.n_vanishing} vanish  {row.n_dead} dead"
    yield f"      params   {row.n_parameters}  {sick}  {row.n_sick} not finite"
    if row.producer is not None:
        kind, name = visible(row.producer.kind), visible(row.producer.name)
        yield f"      producer {kind} {name}  carriers {row.producer.n_carriers}"
    rows = ((g.name, g.norm, g.max, g.n_nan, g.n_inf) for g in row.gradients)
    yield from _block("grads", ("name", "norm", "max", "nan", "inf"), rows, indent=6)


def _inputs(row: InputsRecord) -> Iterator[str]:
    runs = " ".join(
        f"{first}-{first + n - 1}" if n > 1 else str(first) for first, n in row.positions
    )
    yield f"      inputs   batch {row.batch}  positions {runs or '-'}"
    before, after = (
        " ".join(map(str, held)) or "-" for held in (row.cached_before, row.cached_after)
    )
    yield f"      cached   before {before}  after {after}"


def _call(c: CallRecord) -> Sequence[Any]:
    about = (c.layer, c.path, c.backend, c.mask, c.batch, c.q_heads, c.kv_heads, c.q_len, c.kv_len)
    last = (c.head_dim, c.dtype, c.scale, c.gate, c.gate_kind, c.handed, c.swallowed)
    return [*map(_safe, (*about, *last, c.causal, c.window))]


def _build(b: BuildRecord) -> Sequence[Any]:
    about = (b.layer, b.batch, b.heads, b.q_len, b.kv_len, b.wall_ms, b.peak_growth, b.rule)
    return [*map(_safe, about)]


def _stat(s: LayerStatRecord) -> Sequence[Any]:
    counts = (s.n_nan, s.n_inf, s.bad_row)
    return s.layer, visible(s.module), *counts, s.min, s.max, s.mean, s.std, s.norm


def _array(a: ArrayInfo) -> Sequence[Any]:
    shape = " × ".join(map(str, a.shape)) or "scalar"
    return [*map(_safe, (a.number, a.stream, a.layer, a.dtype, shape, a.codec, a.n_bytes))]


def _logits(row: LogitsRecord) -> Iterator[str]:
    chosen = f"chosen {row.chosen_id}  rank {row.chosen_rank}  logprob {_cell(row.chosen_logprob)}"
    shape = f"entropy {_cell(row.entropy)}  margin {_cell(row.margin)}"
    yield f"      logits   {shape}  {chosen}  nan {row.n_nan}  inf {row.n_inf}"
    counts = " ".join(map(str, row.histogram))
    ends = f"{_cell(row.histogram_min)} to {_cell(row.histogram_max)}"
    yield f"      histogram  {ends}  {counts}"
    candidates = [
        (c.rank, c.token_id, c.logit, c.logprob, c.score, c.score_logprob, quoted(c.text))
        for c in row.candidates
    ]
    yield from _block("candidates", _CANDIDATES, candidates, indent=6)


def _memory(row: MemoryRecord) -> str:
    cuda = (row.cuda_allocated, row.cuda_reserved, row.cuda_peak)
    allocated, reserved, peak = map(_cell, cuda)
    return (
        f"memory   rss {row.rss}  model {row.model}  kv cache {row.kv_cache}  "
        f"cuda allocated {allocated}  reserved {reserved}  peak {peak}"
    )


def _gradients(row: GradientRecord) -> Iterator[str]:
    to = "" if row.rival is None else f" to {row.rival}"
    gate = f"gate {_cell(row.gate)} of {_cell(row.tolerance)}"
    yield (
        f"      gradients  of the {visible(row.target)} of {row.token_id}{to}, {_cell(row.value)}  "
        f"{visible(row.path)}  {gate}  at the logits {_cell(row.scale)}  {_cell(row.wall_ms)} ms  "
        f"unreached {row.n_unreached}"
    )
    if row.anomaly is not None:
        yield f"      anomaly  {quoted(row.anomaly)}"
    stats = [
        (s.layer, _safe(s.part), visible(s.name), s.norm, s.max, s.n_nan, s.n_inf)
        for s in row.stats
    ]
    yield from _block("grads", _GRADS, stats, indent=6)


def _mask(mask: MaskRecord) -> Iterator[str]:
    size = f"batch {mask.batch}  heads {mask.heads}  q {mask.q_len}  kv {mask.kv_len}"
    blocks = f"blocks {_cell(mask.block_q)} × {_cell(mask.block_kv)}"
    how = "compiled" if mask.compiled else "uncompiled"
    keys = f"  keys from {mask.kv_offset}" if mask.kv_offset else ""
    yield (
        f"{visible(mask.fingerprint)}  {visible(mask.kind)}  {size}  "
        f"offset {mask.q_offset}{keys}  {blocks}  {how}"
    )
    yield f"  rule     {_safe(mask.rule) or '-'}  {_safe(mask.rule_source) or '-'}"
    for name, facts in mask_facts(mask).items():
        yield f"  {name:8} " + (f"{facts['shape']}  {facts['open']} open" if facts else "-")


def _finding(found: Finding) -> Iterator[str]:
    names = ("generation", "branch", "step", "layer", "head")
    where = "  ".join(f"{n} {getattr(found, n)}" for n in names if getattr(found, n) is not None)
    yield f"{found.severity.value}  {visible(found.id)}  {where}"
    yield f"  {visible(found.sentence)}"
    yield f"  positions {list(found.positions)}  evidence {plain_json(dict(found.evidence))}"
    if found.layers or found.times > 1:
        until = "" if found.last_step is None else f", the last in step {found.last_step}"
        yield f"  layers {list(found.layers)}  {found.times} times{until}"
    if found.query:
        yield f"  query {visible(found.query)}"


def _where(**places: int | None) -> str:
    return "".join(f"  {name} {value}" for name, value in places.items() if value is not None)


def _output(row: OutputRow) -> str:
    out = row.output
    where = _where(generation=out.generation, step=out.step)
    return f"{row.id}  {_time(out.at)}{where}  {visible(out.stream)}  {quoted(out.text)}"


def _event(row: EventRow) -> str:
    event = row.event
    where = _where(generation=event.generation, branch=row.branch, step=event.step)
    data = plain_json(dict(event.data))
    return (
        f"{row.id}  {_time(event.at)}{where}  {visible(event.kind)}  {visible(event.text)}  {data}"
    )


def _safe(value: Any) -> Any:
    return visible(value) if isinstance(value, str) else value


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _time(at: float | None) -> str:
    if at is None:
        return "-"
    try:
        return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return _cell(at)


def _block(title: str, heads: Sequence[str], rows: Rows, *, indent: int) -> Iterator[str]:
    """Yield a titled table, nothing when there are no rows; in windows, so that it may be long."""
    left = iter(rows)
    first = True
    while window := list(islice(left, WINDOW)):
        if first:
            yield " " * indent + title
        yield from _table(heads if first else (), window, indent=indent + 2)
        first = False


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]], *, indent: int) -> Iterator[str]:
    """Yield the lines of a table: numbers to the right, text to the left, two blanks between."""
    if not rows:
        return
    to_right = [all(_is_number(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = [[_cell(value) for value in row] for row in rows]
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
