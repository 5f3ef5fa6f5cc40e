"""The reader of a trace, finished or being recorded: typed records, read on demand, never written.

The cost of a call grows with what it returns, not with the size of the trace. `generation`,
`branch` and `step` are numbers as they were recorded. A branch holds only its own tokens and steps;
those before its `fork_step` are its parent's. A `limit` of -1 means all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flexinspect.core.errors import TraceError
from flexinspect.records.prompt import Segment
from flexinspect.records.step import (
    Array,
    ArrayRecord,
    BuildRecord,
    CallRecord,
    Candidate,
    InputsRecord,
    LayerStatRecord,
    LogitsRecord,
    MaskRecord,
    MemoryRecord,
    StepRecord,
    TokenRecord,
)
from flexinspect.records.token_gradients import GradientRecord
from flexinspect.trace import arrays, codec, data_frames, schema
from flexinspect.trace.data_frames import Library
from flexinspect.trace.file.connections import in_wal_mode
from flexinspect.trace.query_base import OPEN_END, WHERE_BRANCH, WHERE_STEP, place_condition
from flexinspect.trace.query_results import ArrayInfo, BranchRow, GenerationRow, StepRow
from flexinspect.trace.reader_queries import TrainingQueries
from flexinspect.trace.step_loader import ALL_STREAMS, load_steps, read_arrays, with_arrays

Lineage = tuple[tuple[int, int, int | None], ...]
"""(branch, first step, step after the last) of a branch and its parents, newest first."""


def open_trace(path: str | Path) -> TraceReader:
    """Open the trace at `path`.

    Raises `TraceError` when it is missing, damaged, or not a trace.
    """
    return TraceReader(path)


class TraceReader(TrainingQueries):
    """A trace, read only. Any thread may use it: each thread gets its own connection.

    While a run is recorded, every call sees all committed steps; `changed` tells when to read
    again. Every method raises `TraceError` when the file turns out to be damaged.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.known_lineages: dict[tuple[int, int], Lineage] = {}
        self._added = False
        self._live = self.state == "recording"
        if not self._live and in_wal_mode(self.path):
            self._connections.release()  # its writer may be about to fold in the WAL

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        rows = self._select(schema.RUN, "WHERE key = 'state'")
        return str(rows[0][1]) if rows else ""

    def run(self) -> dict[str, Any]:
        """Return the manifest: the facts of the run by name."""
        return dict(self._select(schema.RUN, "ORDER BY key"))

    def model(self, generation: int) -> dict[str, Any]:
        """Return the manifest's facts of a generation's model, empty when it has none."""
        run = self.run()
        rows = self._query("SELECT model FROM generations WHERE generation = ?", (generation,))
        listed = run.get("models")
        for facts in listed if isinstance(listed, list) and rows else ():
            if isinstance(facts, dict) and facts.get("name") == rows[0][0]:
                return facts
        model = run.get("model")
        return model if isinstance(model, dict) else {}

    def generations(self) -> list[GenerationRow]:
        """Return all generations, in order."""
        return [self._decode(codec.decode_generation, row) for row in self._generation_rows("", ())]

    def generation(self, generation: int) -> GenerationRow:
        """Return one generation. Raises `TraceError` when there is no such generation."""
        rows = self._generation_rows("WHERE g.generation = ?", (generation,))
        if not rows:
            raise TraceError(f"{self.path} has no generation {generation}.")
        return self._decode(codec.decode_generation, rows[0])

    def branches(self, generation: int) -> list[BranchRow]:
        """Return the branches of a generation, in order."""
        rest = "WHERE generation = ? ORDER BY branch"
        return self._records(codec.BRANCH_ROWS, rest, (generation,))

    def segments(self, generation: int, branch: int = 0) -> list[Segment]:
        """Return the segments of a branch, in order."""
        rest = f"{WHERE_BRANCH} ORDER BY segment"
        return self._records(codec.SEGMENT_ROWS, rest, (generation, branch))

    def tokens(
        self,
        generation: int,
        branch: int = 0,
        start: int = 0,
        stop: int | None = None,
        *,
        limit: int = -1,
    ) -> list[TokenRecord]:
        """Return the tokens at `start <= pos < stop` (None: to the end), at most `limit`."""
        rest = f"{WHERE_BRANCH} AND pos >= ? AND pos < ? ORDER BY pos LIMIT ?"
        params = (generation, branch, start, OPEN_END if stop is None else stop, limit)
        return self._records(codec.TOKEN_ROWS, rest, params)

    def step_tokens(self, generation: int, step: int, branch: int = 0) -> list[TokenRecord]:
        """Return the tokens that a step chose."""
        row = self.step(generation, step, branch)
        if row is None or row.first_pos is None or row.last_pos is None:
            return []
        tokens = self.tokens(generation, branch, row.first_pos, row.last_pos + 1)
        return [token for token in tokens if token.step == step]

    def n_steps(self, generation: int, branch: int = 0) -> int:
        """Return the number of steps from the first to the last one recorded so far."""
        last = self.last_step(generation, branch)
        if last is None:
            return 0
        sql = f"SELECT step FROM steps {WHERE_BRANCH} ORDER BY step LIMIT 1"
        first = self._query_int(sql, (generation, branch))
        return 0 if first is None else last - first + 1

    def last_step(self, generation: int, branch: int = 0) -> int | None:
        """Return the number of the last step recorded so far, None when there is none."""
        sql = f"SELECT step FROM steps {WHERE_BRANCH} ORDER BY step DESC LIMIT 1"
        return self._query_int(sql, (generation, branch))

    def steps(
        self,
        generation: int,
        branch: int = 0,
        start: int = 0,
        stop: int | None = None,
        *,
        limit: int = -1,
    ) -> list[StepRow]:
        """Return the steps `start <= step < stop` (None: to the end), at most `limit` of them."""
        rest = f"{WHERE_BRANCH} AND step >= ? AND step < ? ORDER BY step LIMIT ?"
        params = (generation, branch, start, OPEN_END if stop is None else stop, limit)
        return self._made(codec.decode_step, schema.STEPS, rest, params, stop=-3)

    def step(self, generation: int, step: int, branch: int = 0) -> StepRow | None:
        """Return one step, None when it is not recorded."""
        rows = self.steps(generation, branch, step, step + 1)
        return rows[0] if rows else None

    def candidates(self, generation: int, step: int, branch: int = 0) -> list[Candidate]:
        """Return the top-k tokens of a step, best first."""
        return self._records_of_step(codec.CANDIDATE_ROWS, generation, step, branch)

    def logits(self, generation: int, step: int, branch: int = 0) -> LogitsRecord | None:
        """Return the distribution of a step with its candidates, None when not captured."""
        key = (generation, branch, step)
        rows = self._select(schema.STEPS, f"{WHERE_STEP} AND chosen_id IS NOT NULL", key)
        if not rows:
            return None
        candidates = tuple(self.candidates(generation, step, branch))
        return self._decode(lambda row: codec.decode_logits(row, candidates), rows[0])

    def inputs(self, generation: int, step: int, branch: int = 0) -> InputsRecord | None:
        """Return a step's forward input and cached lengths, None when not captured."""
        rows = self._records_of_step(codec.INPUTS_ROWS, generation, step, branch)
        return rows[0] if rows else None

    def calls(self, generation: int, step: int, branch: int = 0) -> list[CallRecord]:
        """Return the attention calls of a step, in the order they ran."""
        return self._records_of_step(codec.CALL_ROWS, generation, step, branch)

    def builds(self, generation: int, step: int, branch: int = 0) -> list[BuildRecord]:
        """Return the block masks that user code built for a step, in order."""
        return self._records_of_step(codec.BUILD_ROWS, generation, step, branch)

    def layer_stats(self, generation: int, step: int, branch: int = 0) -> list[LayerStatRecord]:
        """Return the statistics of a step's modules, in the order captured."""
        return self._records_of_step(codec.LAYER_STAT_ROWS, generation, step, branch)

    def memory(self, generation: int, step: int, branch: int = 0) -> MemoryRecord | None:
        """Return the memory at the end of a step, None when not captured."""
        rows = self._records_of_step(codec.MEMORY_ROWS, generation, step, branch)
        return rows[0] if rows else None

    def gradients(self, generation: int, step: int, branch: int = 0) -> GradientRecord | None:
        """Return the gradients of the token that a step generated, None when not recorded."""
        return read_gradients(self, generation, step, branch)

    def mask_summaries(
        self, generation: int | None = None, step: int | None = None, branch: int = 0
    ) -> list[MaskRecord]:
        """Return masks without their arrays, in the order in which they first occurred.

        All masks of the trace, or those that first occurred in a branch of a generation, or in one
        step of it.
        """
        rest, params = place_condition(generation, branch, step)
        rest += " ORDER BY generation, branch, step, fingerprint"
        return self._records(codec.MASK_ROWS, rest, params)

    def fingerprints(
        self, generation: int | None = None, step: int | None = None, branch: int = 0
    ) -> list[str]:
        """Return only the fingerprints of the masks that `mask_summaries` returns."""
        where, params = place_condition(generation, branch, step)
        sql = (
            f"SELECT fingerprint FROM masks {where} ORDER BY generation, branch, step, fingerprint"
        )
        return [str(name) for (name,) in self._query(sql, params)]

    def mask_summary(self, fingerprint: str) -> MaskRecord | None:
        """Return a mask without its arrays, None for an unknown fingerprint."""
        rows = self._records(codec.MASK_ROWS, "WHERE fingerprint = ?", (fingerprint,))
        return rows[0] if rows else None

    def mask(self, fingerprint: str) -> MaskRecord | None:
        """Return a mask with the arrays that were captured, None for an unknown fingerprint."""
        summary = self.mask_summary(fingerprint)
        if summary is None:
            return None
        sql = "SELECT generation, branch, step FROM masks WHERE fingerprint = ?"
        key = self._query(sql, (fingerprint,))[0]
        where = f"{WHERE_STEP} AND owner = ?"
        return with_arrays(summary, read_arrays(self, key[0], where, (*key, fingerprint)))

    def arrays(self, generation: int, step: int, branch: int = 0) -> list[ArrayInfo]:
        """Return the arrays of a step without their data; arrays of masks are not listed."""
        rows = self._query(schema.LIST_ARRAYS, (generation, branch, step))
        return [self._decode(codec.decode_array_info, row) for row in rows]

    def array(
        self, generation: int, step: int, stream: str, layer: int | None = None, branch: int = 0
    ) -> Array | None:
        """Return an array of a step, None when there is none; bfloat16 is widened to float32.

        Raises `TraceError` when its checksum is wrong.
        """
        condition = "owner IS NULL AND stream = ? AND layer IS ?"
        records = self._step_arrays((generation, branch, step), condition, (stream, layer))
        return arrays.widen_bfloat16(records[0].array, records[0].dtype or "") if records else None

    def array_records(self, generation: int, step: int, branch: int = 0) -> list[ArrayRecord]:
        """Return all arrays of a step as they were recorded (bfloat16 as uint16)."""
        return self._step_arrays((generation, branch, step), "owner IS NULL")

    def record(self, generation: int, step: int, branch: int = 0) -> StepRecord | None:
        """Return a step as one record, None when it is not recorded.

        It is what `TraceWriter.write_step` received, with the places of findings and events filled
        in. Events that were written by themselves are not part of it, even if they name the step.
        """
        steps = load_steps(self, generation, branch, step, step + 1, streams=ALL_STREAMS)
        if not steps:
            return None
        findings = self.findings(generation, step, branch)
        return replace(steps[0], findings=tuple(findings))

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
        query = data_frames.frame_query(table, generation=generation, branch=branch, step=step)
        build = data_frames.frame_builder(library)
        return build(self._decode(query.values, self._query(query.sql, query.params)))

    def _step_arrays(
        self, key: tuple[int, int, int], condition: str, params: Sequence[Any] = ()
    ) -> list[ArrayRecord]:
        """Return the arrays of a step for which `condition` holds as well."""
        where = f"{WHERE_STEP} AND {condition}"
        return [each.record for each in read_arrays(self, key[0], where, (*key, *params))]

    def _generation_rows(self, where: str, params: Sequence[Any]) -> list[list[Any]]:
        rows = self._query(f"{schema.READ_GENERATIONS} {where} ORDER BY g.generation", params)
        width = len(schema.GENERATIONS.columns)
        return [
            self._decode_row(schema.GENERATIONS, row[:width], 0)
            + self._decode_row(schema.BRANCHES, row[width:], 0)
            for row in rows
        ]


_GRADIENT_ARRAYS = "owner IS NULL AND stream IN ('grads.tokens', 'grads.layers')"


def read_gradients(
    reader: TraceReader, generation: int, step: int, branch: int = 0
) -> GradientRecord | None:
    """Return the gradients of the token that a step generated, None when there are none."""
    key = (generation, branch, step)
    rows = reader._select(schema.GRADIENTS, WHERE_STEP, key)
    if not rows:
        return None
    rest = f"{WHERE_STEP} ORDER BY layer, name"
    stats = reader._records(codec.GRADIENT_STAT_ROWS, rest, key)
    arrays_by_stream = {
        record.stream: record.array for record in reader._step_arrays(key, _GRADIENT_ARRAYS)
    }
    others = {
        "stats": tuple(stats),
        "tokens": arrays_by_stream.get("grads.tokens"),
        "layers": arrays_by_stream.get("grads.layers"),
    }
    return reader._decode(lambda row: codec.GRADIENT_ROWS.decode(row, **others), rows[0])


def steps_with_gradients(reader: TraceReader, generation: int, branch: int = 0) -> list[int]:
    """Return the steps of a branch whose tokens have gradients, in order."""
    sql = f"SELECT step FROM gradients {WHERE_BRANCH} ORDER BY step"
    return [int(step) for (step,) in reader._query(sql, (generation, branch))]


def read_all_gradients(
    reader: TraceReader, generation: int, branch: int = 0
) -> Iterator[GradientRecord]:
    """Yield the gradients of a branch, step by step."""
    for step in steps_with_gradients(reader, generation, branch):
        record = read_gradients(reader, generation, step, branch)
        if record is not None:
            yield record
