"""The reader of a trace, finished or being recorded: typed records, read on demand, never written.

The cost of a call grows with what it returns, not with the size of the trace. `generation`,
`branch` and `step` are numbers as they were recorded. A branch holds only its own tokens and steps;
those before its `fork_step` are its parent's. A `limit` of -1 means all.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from flexinspect.core.environment import command_path
from flexinspect.core.errors import TraceError, UsageError
from flexinspect.records import step as records
from flexinspect.records.finding import Finding
from flexinspect.records.prompt import Segment
from flexinspect.records.training_step import ParameterGradient, TrainingStepRecord
from flexinspect.trace import codec, schema
from flexinspect.trace import query_results as results
from flexinspect.trace.codec import RowFormat, Statement
from flexinspect.trace.file.connections import ReviewKey, TraceConnections, in_wal_mode
from flexinspect.trace.query_results import StepRow
from flexinspect.trace.schema import OPEN_END, WHERE_BRANCH, WHERE_STEP, WHERE_STEPS

T = TypeVar("T")

Library: TypeAlias = Literal["pandas", "polars"]
FRAME_LIBRARIES = ("pandas", "polars")  # supported libraries, the preferred one first

Lineage = tuple[tuple[int, int, int | None], ...]
"""(branch, first step, step after the last) of a branch and its parents, newest first."""

_RATE_SQL = ", max(json_extract(learning_rates, '$[{}]'))"
_CURVE_SQL = (
    "SELECT (step - ?) * ? / ? AS bucket, min(step), max(loss), max(total_norm), "
    "max(loss_source <> '' AND (loss IS NULL OR abs(loss) = 9e999)), max(n_nonfinite > 0){} "
    f"FROM training_steps {WHERE_BRANCH} GROUP BY bucket ORDER BY bucket"
)
_NONFINITE_STEPS_SQL = (
    "SELECT step FROM (SELECT step, row_number() OVER "
    "(PARTITION BY (step - ?) * ? / ? ORDER BY step) AS nth "
    f"FROM training_steps {WHERE_BRANCH} AND n_nonfinite > 0) WHERE nth <= ?"
)
_GROUP_NORMS_SQL = (
    "SELECT (step - ?) * ? / ? AS bucket, key, max(value), max(type = 'object') "
    f"FROM training_steps, json_each(group_norms) {WHERE_BRANCH} "
    f"AND (step % ? = 0 OR n_exploding > 0 OR step IN ({_NONFINITE_STEPS_SQL})) "
    "GROUP BY bucket, key"
)
_NEWEST_GROUPS_SQL = (
    "SELECT key, value FROM json_each((SELECT json_extract(data, '$.groups') FROM events "
    "WHERE generation = ? AND kind = 'parameters-changed' ORDER BY event DESC LIMIT 1)) ORDER BY "
    "key"
)
MAX_KEPT_GENERATIONS = 4
MAX_RATES = 8
"""Number of parameter groups of an optimizer whose learning rates are read for a curve."""
MAX_STEPS_READ = 4096
"""Steps whose norms by group are read for a plot. Of a longer run these are evenly spread steps,
steps with large norms, and as many steps with NaN or Inf (a run may end with only such steps)."""


class CurvePoint(Struct, frozen=True):
    """The highest values of some consecutive steps, the first of which is `step`.

    None where nothing was recorded. `rates` are the learning rates of the optimizer's groups. In a
    step that a loss scaler skipped the gradients are non-finite, and the loss is finite.
    """

    step: int
    loss: float | None
    norm: float | None
    has_nonfinite_loss: bool
    has_nonfinite_gradient: bool
    rates: tuple[float | None, ...] = ()


def open_trace(path: str | Path) -> TraceReader:
    """Open the trace at `path`.

    Raises `TraceError` when it is missing, damaged, or not a trace.
    """
    return TraceReader(path)


STEPS_PER_READ = 64  # steps that `load_steps` reads at most, by default
ALL_STREAMS = ("*",)  # the streams that mean all arrays of a step

_ROWS_OF_STEP: Mapping[str, RowFormat[Any]] = {
    "candidates": codec.CANDIDATE_ROWS,
    "inputs": codec.INPUTS_ROWS,
    "calls": codec.CALL_ROWS,
    "builds": codec.BUILD_ROWS,
    "layer_stats": codec.LAYER_STAT_ROWS,
    "memory": codec.MEMORY_ROWS,
    "gpus": codec.GPU_ROWS,
    "lens": codec.LENS_ROWS,
    "masks": codec.MASK_ROWS,
}
_ARRAY_KEY_KINDS = ("int", "text", "int?", "text?", "int")


class TraceReader:
    """A trace, read only. Any thread may use it: each thread gets its own connection.

    While a run is recorded, every call sees all committed steps; `changed` tells when to read
    again. Every method raises `TraceError` when the file turns out to be damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.known_lineages: dict[tuple[int, int], Lineage] = {}
        self._ended_generations: dict[int, results.GenerationRow] = {}
        self._connections = TraceConnections(self.path)
        self._query = self._connections.query
        self._added = False
        self._live = self.state == "recording"
        if not self._live and in_wal_mode(self.path):
            self._connections.release()  # its writer may be about to fold in the WAL

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TraceReader({str(self.path)!r})"

    def close(self) -> None:
        """Close all connections; a later call opens new ones."""
        self._connections.close()

    def snapshot(self) -> AbstractContextManager[None]:
        """Return a context in which this thread reads the trace as it is now, despite writes."""
        return self._connections.snapshot()

    def changed(self) -> bool:
        """Tell whether anything was written since the last call; cheap enough to poll.

        This includes the end of a recording; the file is then released, so that its writer can fold
        in the WAL.
        """
        has_changed = self._connections.changed() or self._added
        self._added = False
        if has_changed:
            self._ended_generations.clear()
        if has_changed and self._live and self.state != "recording":
            self._live = False
            self._connections.release()
        return has_changed

    @property
    def format_version(self) -> int:
        """The version of the trace format in which the file was written."""
        return self._connections.version

    @property
    def state(self) -> str:
        """recording, finished, interrupted or failed. The state of a killed run stays recording."""
        return str(self._facts("WHERE key = 'state'").get("state", ""))

    def run(self) -> dict[str, Any]:
        """Return the manifest: the facts of the run by name."""
        return self._facts("ORDER BY key")

    def model(self, generation: int) -> dict[str, Any]:
        """Return the manifest's facts of a generation's model, empty when it has none."""
        run = self.run()
        rows = self._query("SELECT model FROM generations WHERE generation = ?", (generation,))
        listed = run.get("models")
        several = listed if isinstance(listed, list) and rows else []
        named = (m for m in several if isinstance(m, dict) and m.get("name") == rows[0][0])
        model = next(named, run.get("model"))
        return model if isinstance(model, dict) else {}

    def generations(self) -> list[results.GenerationRow]:
        """Return all generations, in order."""
        sql = f"{schema.READ_GENERATIONS} ORDER BY g.generation"
        return self._read(codec.decode_generation, sql)

    def generation(self, generation: int) -> results.GenerationRow:
        """Return one generation. Raises `TraceError` when there is no such generation.

        Of one that has ended it is kept until something is written: an answer may be megabytes.
        """
        if known := self._ended_generations.get(generation):
            return known
        sql = f"{schema.READ_GENERATIONS} WHERE g.generation = ?"
        rows = self._read(codec.decode_generation, sql, (generation,))
        if not rows:
            raise TraceError(f"{self.path} has no generation {generation}.")
        if rows[0].state != "recording":
            if len(self._ended_generations) >= MAX_KEPT_GENERATIONS:
                self._ended_generations.clear()
            self._ended_generations[generation] = rows[0]
        return rows[0]

    def branches(self, generation: int) -> list[results.BranchRow]:
        """Return the branches of a generation, in order."""
        rest = "WHERE generation = ? ORDER BY branch"
        return self._records(codec.BRANCH_ROWS, rest, (generation,))

    def newest_fork(self) -> results.BranchRow | None:
        """Return the last branch that has a parent, of all generations."""
        rest = "WHERE parent IS NOT NULL ORDER BY generation DESC, branch DESC LIMIT 1"
        return next(iter(self._records(codec.BRANCH_ROWS, rest)), None)

    def segments(self, generation: int, branch: int = 0) -> list[Segment]:
        """Return the segments of a branch, in order."""
        rest = f"{WHERE_BRANCH} ORDER BY segment"
        found = self._records(codec.SEGMENT_ROWS, rest, (generation, branch))
        with self._damage_as_error():
            codec.check_segments(found)
        return found

    def tokens(
        self,
        generation: int,
        branch: int = 0,
        start: int = 0,
        stop: int | None = None,
        *,
        limit: int = -1,
    ) -> list[records.TokenRecord]:
        """Return the tokens at `start <= pos < stop` (None: to the end), at most `limit`."""
        rest = f"{WHERE_BRANCH} AND pos >= ? AND pos < ? ORDER BY pos LIMIT ?"
        params = (generation, branch, start, OPEN_END if stop is None else stop, limit)
        return self._records(codec.TOKEN_ROWS, rest, params)

    def step_tokens(self, generation: int, step: int, branch: int = 0) -> list[records.TokenRecord]:
        """Return the tokens that a step chose."""
        row = self.step(generation, step, branch)
        if row is None or row.first_pos is None or row.last_pos is None:
            return []
        tokens = self.tokens(generation, branch, row.first_pos, row.last_pos + 1)
        return [token for token in tokens if token.step == step]

    def n_steps(self, generation: int, branch: int = 0) -> int:
        """Return the number of steps from the first to the last one recorded so far."""
        first = self.steps(generation, branch, limit=1)
        last = self.last_step(generation, branch)
        return last - first[0].step + 1 if first and last is not None else 0

    def last_step(self, generation: int, branch: int = 0) -> int | None:
        """Return the number of the last step recorded so far, None when there is none."""
        sql = f"SELECT step FROM steps {WHERE_BRANCH} ORDER BY step DESC LIMIT 1"
        found = self._read(lambda row: codec.decode_step_number(row[0]), sql, (generation, branch))
        return next(iter(found), None)

    def steps(
        self,
        generation: int,
        branch: int = 0,
        start: int = 0,
        stop: int | None = None,
        *,
        limit: int = -1,
    ) -> list[results.StepRow]:
        """Return the steps `start <= step < stop` (None: to the end), at most `limit` of them."""
        rest = f"{WHERE_STEPS} ORDER BY step LIMIT ?"
        params = (generation, branch, start, OPEN_END if stop is None else stop, limit)
        return self._select(codec.decode_step, schema.STEPS, rest, params, stop=-3)

    def step(self, generation: int, step: int, branch: int = 0) -> results.StepRow | None:
        """Return one step, None when it is not recorded."""
        rows = self.steps(generation, branch, step, step + 1)
        return rows[0] if rows else None

    def candidates(self, generation: int, step: int, branch: int = 0) -> list[records.Candidate]:
        """Return the top-k tokens of a step, best first."""
        return self._records_of_step(codec.CANDIDATE_ROWS, generation, step, branch)

    def logits(self, generation: int, step: int, branch: int = 0) -> records.LogitsRecord | None:
        """Return the distribution of a step with its candidates, None when not captured."""
        key = (generation, branch, step)
        found = next(iter(self._select(codec.decode_logits, schema.STEPS, WHERE_STEP, key)), None)
        candidates = self.candidates(generation, step, branch) if found is not None else ()
        return found and replace(found, candidates=tuple(candidates))

    def inputs(self, generation: int, step: int, branch: int = 0) -> records.InputsRecord | None:
        """Return a step's forward input and cached lengths, None when not captured."""
        return next(iter(self._records_of_step(codec.INPUTS_ROWS, generation, step, branch)), None)

    def calls(self, generation: int, step: int, branch: int = 0) -> list[records.CallRecord]:
        """Return the attention calls of a step, in the order they ran."""
        return self._records_of_step(codec.CALL_ROWS, generation, step, branch)

    def builds(self, generation: int, step: int, branch: int = 0) -> list[records.BuildRecord]:
        """Return the block masks that user code built for a step, in order."""
        return self._records_of_step(codec.BUILD_ROWS, generation, step, branch)

    def layer_stats(
        self, generation: int, step: int, branch: int = 0
    ) -> list[records.LayerStatRecord]:
        """Return the statistics of a step's modules, in the order captured."""
        return self._records_of_step(codec.LAYER_STAT_ROWS, generation, step, branch)

    def memory(self, generation: int, step: int, branch: int = 0) -> records.MemoryRecord | None:
        """Return the memory at the end of a step, None when not captured."""
        return next(iter(self._records_of_step(codec.MEMORY_ROWS, generation, step, branch)), None)

    def gpus(self, generation: int, step: int, branch: int = 0) -> list[records.GpuRecord]:
        """Return the figures of the GPUs, empty in a step in which they were not read."""
        return self._records_of_step(codec.GPU_ROWS, generation, step, branch)

    def lens(self, generation: int, step: int, branch: int = 0) -> list[records.LensRecord]:
        """Return the logit lens of each layer, by layer; empty below level extreme."""
        return self._records_of_step(codec.LENS_ROWS, generation, step, branch)

    def gradients(
        self, generation: int, step: int, branch: int = 0
    ) -> records.GradientRecord | None:
        """Return the gradients of the token that a step generated, None when not recorded."""
        key = (generation, branch, step)
        found = self._records(codec.GRADIENT_ROWS, WHERE_STEP, key)
        if not found:
            return None
        stats = self._records(codec.GRADIENT_STAT_ROWS, f"{WHERE_STEP} ORDER BY layer, name", key)
        condition = "owner IS NULL AND stream IN ('grads.tokens', 'grads.layers')"
        found_arrays = self._step_arrays(key, condition)
        fields = {each.stream.removeprefix("grads."): each.array for each in found_arrays}
        if len(fields.get("tokens", (0, 0))) != 2:
            with self._damage_as_error():
                raise codec.DamagedValueError("the gradients of tokens have not two rows")
        return replace(found[0], stats=tuple(stats), **fields)

    def fingerprints(
        self, generation: int | None = None, step: int | None = None, branch: int = 0
    ) -> list[str]:
        """Return the fingerprints of masks, in the order in which they first occurred.

        All masks of the trace, or those that first occurred in a branch of a generation, or in one
        step of it.
        """
        where, params = _place_condition(generation, branch, step)
        order = "ORDER BY generation, branch, step, fingerprint"
        rows = self._query(f"SELECT fingerprint FROM masks {where} {order}", params)
        return [str(name) for (name,) in rows]

    def mask_summary(self, fingerprint: str) -> records.MaskRecord | None:
        """Return a mask without its arrays, None for an unknown fingerprint."""
        found = self._records(codec.MASK_ROWS, "WHERE fingerprint = ?", (fingerprint,))
        return found[0] if found else None

    def mask(self, fingerprint: str) -> records.MaskRecord | None:
        """Return a mask with the arrays that were captured, None for an unknown fingerprint."""
        summary = self.mask_summary(fingerprint)
        if summary is None:
            return None
        sql = "SELECT generation, branch, step FROM masks WHERE fingerprint = ?"
        (key,) = self._query(sql, (fingerprint,))
        where = f"{WHERE_STEP} AND owner = ?"
        return with_arrays(summary, read_arrays(self, key[0], where, (*key, fingerprint)))

    def arrays(self, generation: int, step: int, branch: int = 0) -> list[results.ArrayInfo]:
        """Return the arrays of a step without their data; arrays of masks are not listed."""
        kinds = ("int", "text", "int?", "text", "ints", "text", "int")
        rows = self._read_values(kinds, schema.LIST_ARRAYS, (generation, branch, step), "arrays")
        return [results.ArrayInfo(*row) for row in rows]

    def array(
        self, generation: int, step: int, stream: str, layer: int | None = None, branch: int = 0
    ) -> records.Array | None:
        """Return an array of a step, None when there is none; bfloat16 is widened to float32.

        Raises `TraceError` when its checksum is wrong.
        """
        condition = "owner IS NULL AND stream = ? AND layer IS ?"
        found = self._step_arrays((generation, branch, step), condition, (stream, layer))
        if not found:
            return None
        from flexinspect.trace.arrays import widen_bfloat16

        return widen_bfloat16(found[0].array, found[0].dtype or "")

    def array_records(
        self, generation: int, step: int, branch: int = 0
    ) -> list[records.ArrayRecord]:
        """Return all arrays of a step as they were recorded (bfloat16 as uint16)."""
        return self._step_arrays((generation, branch, step), "owner IS NULL")

    def record(self, generation: int, step: int, branch: int = 0) -> records.StepRecord | None:
        """Return a step as one record, None when it is not recorded.

        It is what `TraceWriter.write_step` received, with the places of findings and events filled
        in. Events that were written by themselves are not part of it, even if they name the step.
        """
        steps = load_steps(self, generation, branch, step, step + 1, streams=ALL_STREAMS)
        if not steps:
            return None
        return replace(steps[0], findings=tuple(self.findings(generation, step, branch)))

    def frame(
        self,
        table: str,
        *,
        library: Library | None = None,
        generation: int | None = None,
        branch: int | None = None,
        step: int | None = None,
    ) -> Any:
        """Return a table of the trace as a DataFrame: all rows, or those of one place.

        Tables and columns are those of `docs/trace-format.md`, without blobs; JSON stays text.
        Without `library` it is a DataFrame of pandas if that is installed, of polars otherwise.
        Raises `UsageError` for an unknown table, and when neither is installed.
        """
        place = {"generation": generation, "branch": branch, "step": step}
        with self._damage_as_error():
            return _read_frame(self._query, table, library, place)

    def findings(
        self, generation: int | None = None, step: int | None = None, branch: int = 0
    ) -> list[Finding]:
        """Return findings in order: all, those of one branch, or those of one step of it."""
        rows = self.finding_rows(generation=generation, step=step, branch=branch)
        return [row.finding for row in rows]

    def finding_rows(
        self,
        after_id: int = 0,
        *,
        generation: int | None = None,
        step: int | None = None,
        branch: int = 0,
        limit: int = -1,
    ) -> list[results.FindingRow]:
        """Return findings with their numbers, those above `after_id`, at most `limit`."""
        where, params = _place_condition(generation, branch, step)
        rest = f"{where or 'WHERE true'} AND finding > ? ORDER BY finding LIMIT ?"
        params = (*params, after_id, limit)
        return self._select(self.decode_finding, schema.FINDINGS, rest, params)

    def decode_finding(self, row: codec.SqlRow) -> results.FindingRow:
        """Return a finding whose fix has this file in the commands, in place of `TRACE`."""
        found = codec.decode_finding(row)
        if " TRACE " not in found.finding.fix:
            return found
        fix = found.finding.fix.replace(" TRACE ", f" {command_path(self.path)} ")
        return replace(found, finding=replace(found.finding, fix=fix))

    def reviews(self) -> list[tuple[str, int]]:
        """Return (rule, generation) of each review: a rule that ran after the recording."""
        sql = "SELECT rule, generation FROM reviews ORDER BY rule, generation"
        rows = self._read_values(("text", "int"), sql, (), "reviews")
        return [(rule, generation) for rule, generation in rows]

    def add_reviews(self, reviews: Mapping[ReviewKey, Sequence[Statement]]) -> None:
        """Add findings, events and reviews to what this reader returns, without writing them.

        `reviews` maps rule and generation to the statements that would write a review. If the file
        holds a review of the same rule and generation, the stored one is returned instead.
        """
        self._connections.add_overlay(reviews)
        self._added = True

    def remove_added_reviews(self) -> None:
        """Return only what the file holds again, without added reviews."""
        self._connections.remove_overlay()

    def events(
        self,
        after_id: int = 0,
        *,
        generation: int | None = None,
        step: int | None = None,
        limit: int = -1,
    ) -> list[results.EventRow]:
        """Return events whose number is above `after_id`, in order.

        All of them, or those of a generation or of one step of it; at most `limit`.
        """
        conditions = {"event > ?": after_id, "generation = ?": generation, "step = ?": step}
        used = {sql: value for sql, value in conditions.items() if value is not None}
        rest = f"WHERE {' AND '.join(used)} ORDER BY event LIMIT ?"
        return self._select(codec.decode_event, schema.EVENTS, rest, [*used.values(), limit])

    def output(self, after_id: int = 0, *, limit: int = -1) -> list[results.OutputRow]:
        """Return the pieces of printed output whose number is above `after_id`, in order."""
        rest = "WHERE number > ? ORDER BY number LIMIT ?"
        return self._select(codec.decode_output, schema.OUTPUT, rest, (after_id, limit))

    def training_steps(
        self, generation: int, branch: int = 0, start: int = 0, stop: int | None = None
    ) -> dict[int, TrainingStepRecord]:
        """Return the training steps `start <= step < stop` by number, without their gradients."""
        rest = f"{WHERE_STEPS} ORDER BY step"
        params = (generation, branch, start, OPEN_END if stop is None else stop)
        return dict(self._records_by_step(codec.TRAINING_ROWS, rest, params))

    def training_step(
        self, generation: int, step: int, branch: int = 0
    ) -> TrainingStepRecord | None:
        """Return one training step with its gradients, None when it is not recorded."""
        found = self.training_steps(generation, branch, step, step + 1).get(step)
        gradients = self.training_gradients(generation, step, branch) if found is not None else ()
        return found and replace(found, gradients=tuple(gradients))

    def training_gradients(
        self, generation: int, step: int, branch: int = 0
    ) -> list[ParameterGradient]:
        """Return the parameter gradients that were recorded for a training step."""
        sql = f"SELECT name, norm, max, n_nan, n_inf FROM grads {WHERE_STEP} ORDER BY name"
        return self._read(codec.decode_parameter_gradient, sql, (generation, branch, step))

    def training_curve(
        self,
        generation: int,
        first: int,
        n_steps: int,
        n_points: int,
        branch: int = 0,
        *,
        n_rates: int = 1,
    ) -> dict[int, CurvePoint]:
        """Return at most `n_points` points of the `n_steps` steps from `first` on, by number.

        Points without any recorded step are missing. Each has the learning rates of the optimizer's
        first `n_rates` groups.
        """
        params = (first, n_points, n_steps, generation, branch)
        rates = "".join(_RATE_SQL.format(group) for group in range(min(n_rates, MAX_RATES)))
        return {row[0]: _curve_point(row) for row in self._query(_CURVE_SQL.format(rates), params)}

    def group_curve(
        self, generation: int, first: int, n_steps: int, n_points: int, branch: int = 0
    ) -> dict[tuple[int, int], float]:
        """Return the highest norm by (point, group), NaN where a norm was non-finite."""
        stride = max(n_steps // MAX_STEPS_READ, 1)
        key = (first, n_points, n_steps, generation, branch)
        params = (*key, stride, *key, max(MAX_STEPS_READ // n_points, 1))
        return dict(self._read(_group_norm, _GROUP_NORMS_SQL, params))

    def parameter_groups(self, generation: int) -> tuple[str, ...]:
        """Return the groups of parameters of a training run: all as last reported, else declared.

        They begin with the groups that the run declared at its start.
        """
        if added := self._query(_NEWEST_GROUPS_SQL, (generation,)):
            return tuple(str(name) for _, name in added)
        training = self.generation(generation).declared.get("training")
        declared = training.get("groups") if isinstance(training, dict) else None
        return tuple(map(str, declared)) if isinstance(declared, list) else ()

    def _read(
        self, make: Callable[[Sequence[Any]], T], sql: str, params: Sequence[Any] = ()
    ) -> list[T]:
        """Return what `make` makes of each row of a query."""
        rows = self._query(sql, params)
        with self._damage_as_error():
            return [make(row) for row in rows]

    def _read_values(
        self, kinds: Sequence[str], sql: str, params: Sequence[Any], table: str
    ) -> list[list[Any]]:
        """Return the values of the rows of a query of `table`, by the kinds of its columns."""
        return self._read(lambda row: codec.decode_values(kinds, row, table), sql, params)

    def _read_int(self, sql: str, params: Sequence[Any] = ()) -> int | None:
        """Return the integer that a query selects, None when it has no row."""
        return next(iter(self._read(lambda row: codec.decode_int(row[0]), sql, params)), None)

    def _select(
        self,
        make: Callable[[Sequence[Any]], T],
        table: schema.Table,
        rest: str,
        params: Sequence[Any] = (),
        *,
        skip: int = 0,
        stop: int | None = None,
    ) -> list[T]:
        """Return what `make` makes of the rows of a table that `rest` (behind FROM) selects."""
        return self._read(make, schema.select_sql(table, rest, skip=skip, stop=stop), params)

    def _records(self, rows: RowFormat[T], rest: str, params: Sequence[Any] = ()) -> list[T]:
        return self._select(rows.decode, rows.table, rest, params, skip=rows.skip)

    def _records_of_step(
        self, rows: RowFormat[T], generation: int, step: int, branch: int
    ) -> list[T]:
        """Return the records of a step, in the order of their key."""
        order = ", ".join(rows.table.key[2:])
        return self._records(rows, f"{WHERE_STEP} ORDER BY {order}", (generation, branch, step))

    def _records_by_step(
        self, rows: RowFormat[T], rest: str, params: Sequence[Any]
    ) -> list[tuple[int, T]]:
        """Return records with their steps."""

        def make(row: Sequence[Any]) -> tuple[int, T]:
            return codec.decode_int(row[0]), rows.decode(row[rows.skip - 2 :])

        return self._select(make, rows.table, rest, params, skip=2)

    def _facts(self, rest: str) -> dict[str, Any]:
        sql = f"SELECT key, value FROM run {rest}"
        return dict(self._read_values(("text", "json"), sql, (), "run"))

    def _step_arrays(
        self, key: tuple[int, int, int], condition: str, params: Sequence[Any] = ()
    ) -> list[records.ArrayRecord]:
        """Return the arrays of a step for which `condition` holds as well."""
        where = f"{WHERE_STEP} AND {condition}"
        return [array for _, _, array in read_arrays(self, key[0], where, (*key, *params))]

    @contextmanager
    def _damage_as_error(self) -> Iterator[None]:
        try:
            yield
        except codec.DamagedValueError as damage:
            hint = "Other steps may still be readable; copy the file again if you can."
            raise TraceError(f"{self.path} is damaged: {damage}.", hint=hint) from None


def _place_condition(
    generation: int | None, branch: int, step: int | None
) -> tuple[str, Sequence[int]]:
    """Return the SQL condition for all rows, one branch or one step of it, and its parameters."""
    if generation is None:
        return "", ()
    if step is None:
        return WHERE_BRANCH, (generation, branch)
    return WHERE_STEP, (generation, branch, step)


def _group_norm(row: Sequence[Any]) -> tuple[tuple[int, int], float]:
    point, group, norm, is_nonfinite = row
    values = (point, group, math.nan if is_nonfinite else norm)
    kinds = ("int", "int", "real")
    point, group, norm = codec.decode_values(kinds, values, "training_steps")
    return (point, group), norm


def _curve_point(row: Sequence[Any]) -> CurvePoint:
    _, step, loss, norm, has_nonfinite_loss, has_nonfinite_gradient, *rates = row
    return CurvePoint(
        step=step,
        loss=_curve_value(loss),
        norm=_curve_value(norm),
        has_nonfinite_loss=bool(has_nonfinite_loss),
        has_nonfinite_gradient=bool(has_nonfinite_gradient),
        # A learning rate of NaN is unknown.
        rates=tuple(None if isinstance(rate, str) else _curve_value(rate) for rate in rates),
    )


def _curve_value(value: Any) -> float | None:
    """Return a number of the trace: NULL stands for None, and text for NaN."""
    if isinstance(value, str):
        return math.nan
    return None if value is None else float(value)


def steps_with_gradients(reader: TraceReader, generation: int, branch: int = 0) -> list[int]:
    """Return the steps of a branch whose tokens have gradients, in order."""
    sql = f"SELECT step FROM gradients {WHERE_BRANCH} ORDER BY step"
    return [int(step) for (step,) in reader._query(sql, (generation, branch))]


def read_all_gradients(
    reader: TraceReader, generation: int, branch: int = 0
) -> Iterator[records.GradientRecord]:
    """Yield the gradients of a branch, step by step."""
    steps = steps_with_gradients(reader, generation, branch)
    yield from filter(None, (reader.gradients(generation, step, branch) for step in steps))


# -- steps as whole records ------------------------------------------------------------------------


StoredArray = tuple[int, str | None, records.ArrayRecord]
"""The step of an array, the fingerprint of its mask (None: it belongs to the step), the array."""


def load_steps(
    reader: TraceReader,
    generation: int,
    branch: int = 0,
    start: int = 0,
    stop: int | None = None,
    *,
    streams: Collection[str] = (),
    limit: int = STEPS_PER_READ,
    mask_arrays: bool = True,
) -> list[records.StepRecord]:
    """Return the recorded steps `start <= step < stop` (None: to the end), at most `limit`.

    They are as `TraceWriter.write_step` received them, but without findings. Masks have all their
    arrays, or none without `mask_arrays`; of the steps' own arrays only those of `streams` are read
    (`ALL_STREAMS`: all). Raises `TraceError` when the file is damaged.
    """
    rest = f"{WHERE_STEPS} ORDER BY step LIMIT ?"
    params = (generation, branch, start, OPEN_END if stop is None else stop, limit)
    rows = reader._select(
        lambda row: (codec.decode_step(row), codec.decode_logits(row)), schema.STEPS, rest, params
    )
    if not rows:
        return []
    steps = [step for step, _ in rows]
    tables = _read_tables(reader, steps, streams, mask_arrays=mask_arrays)
    found = []
    for step, logits in rows:
        of: dict[str, Any] = {name: tuple(rows_of[step.step]) for name, rows_of in tables.items()}
        of |= {name: next(iter(of[name]), None) for name in ("inputs", "memory")}
        stored, candidates = of.pop("stored"), of.pop("candidates")
        of["masks"] = tuple(with_arrays(mask, stored) for mask in of["masks"])
        of["logits"] = logits and replace(logits, candidates=candidates)
        if step.phase == records.TRAIN:
            of["training"] = reader.training_step(generation, step.step, branch)
        scalars = {name: getattr(step, name) for name in codec.STEP_SCALARS}
        found.append(records.StepRecord(**scalars, **of))
    return found


def read_arrays(
    reader: TraceReader, generation: int, where: str, params: Sequence[Any]
) -> Iterator[StoredArray]:
    """Yield the arrays of one branch of a generation for which `where` holds, in order.

    Raises `TraceError` when a part, a checksum or a length is wrong.
    """
    from flexinspect.trace import arrays

    def make(row: Sequence[Any]) -> tuple[list[Any], arrays.ArrayChunk]:
        return codec.decode_values(_ARRAY_KEY_KINDS, row[:5], "arrays"), codec.decode_chunk(row[5:])

    rows = reader._read(make, schema.READ_ARRAYS.format(where), params)
    for (step, stream, layer, owner, _), group in itertools.groupby(rows, key=itemgetter(0)):
        name = f"{stream!r} of step {step} of generation {generation} in {reader.path}"
        array, dtype = arrays.decode_array([chunk for _, chunk in group], name, stream)
        true_dtype = None if dtype == array.dtype.name else dtype
        yield step, owner, records.ArrayRecord(stream, array, layer, true_dtype)


def with_arrays(mask: records.MaskRecord, stored: Iterable[StoredArray]) -> records.MaskRecord:
    """Return a mask with those of the arrays that it owns."""
    own = (array for _, owner, array in stored if owner == mask.fingerprint)
    by_stream = {each.stream: each.array for each in own}
    fields: dict[str, Any] = {name: by_stream.get(f"mask.{name}") for name in records.MASK_ARRAYS}
    return replace(mask, **fields)


def _read_tables(
    reader: TraceReader, steps: Sequence[StepRow], streams: Collection[str], *, mask_arrays: bool
) -> dict[str, dict[int | None, list[Any]]]:
    """Return what the other tables hold of consecutive steps of a branch, by step.

    "stored" are the arrays of masks and steps, "arrays" only the arrays of steps.
    """
    branch = (steps[0].generation, steps[0].branch)
    place = (*branch, steps[0].step, steps[-1].step + 1)
    names = (*_ROWS_OF_STEP, "stored", "arrays", "tokens", "events")
    tables: dict[str, dict[int | None, list[Any]]] = {name: defaultdict(list) for name in names}
    for name, rows in _ROWS_OF_STEP.items():
        rest = f"{WHERE_STEPS} ORDER BY {', '.join(rows.table.key[2:])}"
        for step, record in reader._records_by_step(rows, rest, place):
            tables[name][step].append(record)
    wanted = [] if "*" in streams else sorted(streams)
    own = "true" if "*" in streams else f"stream IN ({', '.join('?' * len(wanted))})"
    condition = f"owner IS NOT NULL OR {own}" if mask_arrays else f"owner IS NULL AND {own}"
    where = f"{WHERE_STEPS} AND ({condition})"
    for stored in read_arrays(reader, branch[0], where, (*place, *wanted)):
        number, owner, array = stored
        tables["stored"][number].append(stored)
        if owner is None:
            tables["arrays"][number].append(array)
    chosen = [pos for step in steps for pos in (step.first_pos, step.last_pos) if pos is not None]
    if chosen:
        for token in reader.tokens(*branch, min(chosen), max(chosen) + 1):
            tables["tokens"][token.step].append(token)
    # Only events that were written with a step have a branch.
    rest = f"{WHERE_STEPS} ORDER BY event"
    for row in reader._select(codec.decode_event, schema.EVENTS, rest, place):
        tables["events"][row.event.step].append(row.event)
    return tables


# -- tables as data frames of pandas or polars, which are optional ---------------------------------


def _read_frame(
    query: Callable[[str, Sequence[Any]], Sequence[Any]],
    name: str,
    library: Library | None,
    place: Mapping[str, int | None],
) -> Any:
    """Return the rows of a table at `place` (None there means all) as a data frame, without blobs.

    Without `library` the first installed one builds it. Raises `UsageError` for an unknown table,
    for a place that its columns do not have, and when no library is installed. The types of the
    columns follow from the schema alone, so that a frame without rows has them too:

    | kind of column | pandas | polars |
    |---|---|---|
    | int, bool, real | int64, bool, float64 | Int64, Boolean, Float64 |
    | int, bool that may be NULL | Int64, boolean | Int64, Boolean |
    | real where NULL means "none" | Float64: NaN stays NaN, none is NA | Float64: NaN, null |
    | text, and JSON as text | string | String |
    """
    tables = {table.name: table for table in schema.TABLES}
    if name not in tables:
        raise UsageError(f"A trace has no table {name!r}; it has {', '.join(tables)}.")
    table = tables[name]
    where = {column: number for column, number in place.items() if number is not None}
    unknown = next((column for column in where if column not in table.names), None)
    if unknown is not None:
        raise UsageError(f"The table {name} has no column {unknown}; leave {unknown} out.")
    module = _find_library(library)
    kinds = {column: kind for column, kind in table.kinds.items() if kind != "blob"}
    condition = f" WHERE {' AND '.join(f'{column} = ?' for column in where)}" if where else ""
    sql = f"SELECT {', '.join(kinds)} FROM {name}{condition} ORDER BY {', '.join(table.key)}"
    rows = query(sql, tuple(where.values()))
    by_column = zip(*rows, strict=True) if rows else ((),) * len(kinds)
    pairs = zip(kinds.items(), by_column, strict=True)
    values = {}
    for (column, kind), stored in pairs:
        is_json = kind.removesuffix("?") in schema.JSON_KINDS
        read_as = f"text{'?' * kind.endswith('?')}" if is_json else kind
        values[column] = codec.decode_values([read_as] * len(stored), stored, name)
    build = _pandas_array if module.__name__ == "pandas" else _polars_series
    return module.DataFrame({c: build(module, kinds[c], each) for c, each in values.items()})


def _find_library(library: Library | None) -> Any:
    if library is not None and library not in FRAME_LIBRARIES:
        known = " or ".join(FRAME_LIBRARIES)
        raise UsageError(f"{library!r} is not a library for data frames: choose {known}.")
    found = next(filter(find_spec, FRAME_LIBRARIES if library is None else (library,)), None)
    if found is None:
        raise UsageError(
            "A data frame needs pandas or polars, and neither is installed: pip install pandas."
            if library is None
            else f"{library} is not installed: pip install {library}."
        )
    if found == "pandas":
        import pandas

        return pandas
    import polars

    return polars


def _pandas_array(pandas: Any, kind: str, values: list[Any]) -> Any:
    import numpy as np

    kind = kind.replace("length", "int")
    if kind == "real?":  # pandas.array would take NaN for a missing value
        none = np.array([value is None for value in values], np.bool_)
        floats = np.array([0.0 if value is None else value for value in values], np.float64)
        return pandas.arrays.FloatingArray(floats, none)
    dtypes = {"int": "int64", "int?": "Int64", "bool": "bool", "bool?": "boolean"}
    return pandas.array(values, dtype="float64" if kind == "real" else dtypes.get(kind, "string"))


def _polars_series(polars: Any, kind: str, values: list[Any]) -> Any:
    dtypes = {"int": polars.Int64, "real": polars.Float64, "bool": polars.Boolean}
    return polars.Series(
        values, dtype=dtypes.get(kind.removesuffix("?").replace("length", "int"), polars.String)
    )
