"""The tables and the SQL of a trace.

A trace is one SQLite file. `docs/trace-format.md` describes it as a public interface: it says what
each table, column and stream means. A test checks that it lists the tables that are defined here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from msgspec import Struct

JSON_KINDS = ("json", "object", "texts", "ints", "floats", "runs")
"""Kinds of columns that hold JSON: any value, an object, or a list of strings, integers, numbers
or pairs of integers."""

NULLABLE_KINDS = ("bool", "object", "ints")
"""Kinds whose form that may be NULL is written and read as the kind itself."""

MAX_LENGTH = 1 << 26
"""Positions, rows or heads beyond this are damage; their reader would run out of memory."""

SQL_TYPES = {
    "int": "INTEGER NOT NULL",
    "int?": "INTEGER",
    "length": "INTEGER NOT NULL",
    "length?": "INTEGER",
    "bool": "INTEGER NOT NULL",
    "real": "REAL",
    "real?": "ANY",
    "text": "TEXT NOT NULL",
    "text?": "TEXT",
    "blob": "BLOB NOT NULL",
    "bool?": "INTEGER",
    **dict.fromkeys(JSON_KINDS, "TEXT NOT NULL"),
    **dict.fromkeys(("object?", "ints?"), "TEXT"),
}
"""SQL type by kind of a column. SQLite cannot store NaN, so NULL stands for it in a "real" column.
In a "real?" column NULL means "none", and NaN is the text 'nan'. A "length" is an integer from 0 to
`MAX_LENGTH`."""


# by identity: a table is a cache key per step
class Table(Struct, frozen=True, eq=False):
    """A table of the trace. `key` is its primary key, `kinds` are those of its columns, by name.

    `clustered` tables have no rowid: they are stored in the order of their key, so the rows of a
    step are neighbours. Tables with wide rows (arrays) have a rowid, because a clustered table
    spills such rows to overflow pages four times as early.
    """

    name: str
    key: tuple[str, ...]
    kinds: Mapping[str, str]
    clustered: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns, in order."""
        return tuple(self.kinds)

    @property
    def is_numbered_by_sqlite(self) -> bool:
        """Whether the key is a row id, which SQLite assigns."""
        return len(self.key) == 1 and not self.clustered

    def create_sql(self) -> str:
        """Return the CREATE TABLE statement.

        It has no prose in it: a truncated trace is repaired with the schema of this build.
        """
        # INTEGER alone (not "INTEGER NOT NULL") is what makes a single key the rowid itself.
        rowid = self.key[0] if self.is_numbered_by_sqlite else None
        lines = [
            f"  {name} {'INTEGER' if name == rowid else SQL_TYPES[kind]},"
            for name, kind in self.kinds.items()
        ]
        options = "STRICT, WITHOUT ROWID" if self.clustered else "STRICT"
        key = f"  PRIMARY KEY ({', '.join(self.key)})"
        return "\n".join([f"CREATE TABLE {self.name} (", *lines, key, f") {options}"])


TABLES: list[Table] = []  # all tables, in the order in which an empty trace gets them


def define_table(name: str, key: str, columns: str, *, clustered: bool = True) -> Table:
    """Add a table from its key (names separated by spaces) and its columns, "NAME KIND, ...".

    The columns `generation`, `branch` and `step` of the key come first if they are not listed.
    """
    kinds = dict(column.split() for column in columns.split(","))
    place = [n for n in key.split() if n in ("generation", "branch", "step") and n not in kinds]
    table = Table(name, tuple(key.split()), dict.fromkeys(place, "int") | kinds, clustered)
    TABLES.append(table)
    return table


@cache
def insert_sql(table: Table, n_rows: int, *, skip: int = 0) -> str:
    """Return the INSERT of `n_rows` rows, leaving out the first `skip` columns.

    All rows of a table are written by one statement, which releases the interpreter lock once
    instead of once per row; this matters beside a thread that runs a model.
    """
    names = table.names[skip:]
    row = f"({', '.join('?' * len(names))})"
    return f"INSERT INTO {table.name} ({', '.join(names)}) VALUES {', '.join([row] * n_rows)}"


@cache
def select_sql(table: Table, rest: str = "", *, skip: int = 0, stop: int | None = None) -> str:
    """Return the SELECT of the columns `skip` to `stop`, with `rest` behind FROM."""
    return f"SELECT {', '.join(table.names[skip:stop])} FROM {table.name} {rest}"


RUN = define_table("run", "key", "key text, value json")
GENERATIONS = define_table(
    "generations",
    "generation",
    "sample_id text, mask text, positions text, expected texts, declared object, started_at real, "
    "model text",
)
BRANCHES = define_table(
    "branches",
    "generation branch",
    "parent int?, fork_step int?, state text, answer text, stop_reason text, started_at real, "
    "ended_at real?, change object",
)
SEGMENTS = define_table(
    "segments",
    "generation branch segment",
    "segment int, start int, stop int, label text, kind text, owner int",
)
TOKENS = define_table(
    "tokens",
    "generation branch pos",
    "pos int, token_id int, token text, text text, position_id int, segment int, special bool, "
    "step int?",
)
# From `entropy` on, columns are NULL in a step whose logits were not captured.
STEPS = define_table(
    "steps",
    "generation branch step",
    "phase text, q_len length, kv_before length, kv_after length, started_at real, "
    "wall_ms real, capture_ms real, first_pos length?, last_pos length?, entropy real, "
    "margin real, chosen_id int?, chosen_rank int?, chosen_logprob real, n_nan int?, n_inf int?, "
    "histogram_min real, histogram_max real, histogram ints?",
)
CANDIDATES = define_table(
    "candidates",
    "generation branch step rank",
    "rank int, token_id int, text text, logit real, logprob real, score real, score_logprob real",
)
INPUTS = define_table(
    "inputs",
    "generation branch step",
    "batch length, positions runs, cached_before ints, cached_after ints",
)
CALLS = define_table(
    "calls",
    "generation branch step call",
    "call int, layer int, path text, backend text, mask text?, batch length, q_heads length, "
    "kv_heads length, q_len length, kv_len length, head_dim length, dtype text, scale real?, "
    "lse_error real?, check_kind text?, softcap real?, mask_passed_to_layer text?, "
    "suppressed_exception text?, causal bool?, window int?",
)
BUILDS = define_table(
    "builds",
    "generation branch step build",
    "build int, layer int?, batch length?, heads length?, q_len length, kv_len length, "
    "mask_mod text, wall_ms real, peak_growth int",
)
LAYER_STATS = define_table(
    "layer_stats",
    "generation branch step number",
    "number int, layer int, module text, n_nan int, n_inf int, min real, max real, mean real, "
    "std real, norm real, bad_row int?",
)
MEMORY = define_table(
    "memory",
    "generation branch step",
    "rss int, model int, kv_cache int, cuda_allocated int?, cuda_reserved int?, cuda_peak int?",
)
GPUS = define_table(
    "gpus",
    "generation branch step device",
    "device int, name text, utilization real, memory_used int, memory_total int, memory_own int?, "
    "temperature int?, power real?, processes runs",
)
LENS = define_table(
    "lens",
    "generation branch step layer",
    "layer int, token_ids ints, texts texts, logprobs floats, chosen_rank int, "
    "chosen_logprob real, error real?",
)
# The gradients of a generated token or of a training step.
GRADS = define_table(
    "grads",
    "generation branch step name",
    "name text, norm real, max real, n_nan int, n_inf int, layer int?, part text?",
)
GRADIENTS = define_table(
    "gradients",
    "generation branch step",
    "token_id int, target text, value real, scale real, path text, logits_error real, "
    "tolerance real, wall_ms real, runner_up_id int?, n_unreached int, anomaly text?",
)
TRAINING_STEPS = define_table(
    "training_steps",
    "generation branch step",
    "loss real, loss_source text, learning_rates floats, total_norm real?, "
    "norm_before_clip real?, max_norm real?, n_parameters int, n_exploding int, n_vanishing int, "
    "n_dead int, n_nonfinite int, group_norms floats, group_ratios floats, "
    "anomaly_origin object?, n_backward int, forward_ms real, backward_ms real, "
    "optimizer_ms real, data_ms real?, other_ms real, scale real?, is_skipped bool, device text, "
    "autocast text, detail text",
)
# A mask once per fingerprint, under the first step that had it; its arrays have it as owner.
MASKS = define_table(
    "masks",
    "generation branch step fingerprint",
    "fingerprint text, kind text, batch length, heads length, q_len length, kv_len length, "
    "q_offset int, kv_offset length, block_q length?, block_kv length?, mask_mod text?, "
    "mask_mod_source text?, compiled bool, mask_mod_code object?, added object?",
)
ARRAYS = define_table(
    "arrays",
    "generation branch step number chunk",
    "number int, chunk int, stream text, layer int?, owner text?, dtype text, item text, "
    "shape ints, codec text, checksum int, data blob",
    clustered=False,
)
FINDINGS = define_table(
    "findings",
    "finding",
    "finding int, generation int, branch int, step int?, id text, severity text, sentence text, "
    "layer int?, head int?, positions ints, evidence object, layers ints, series text, "
    "last_step int?, times int, why text, confirm text, fix text, query text",
    clustered=False,
)
REVIEWS = define_table(
    "reviews", "rule generation", "rule text, generation int, at real, wall_ms real"
)
EVENTS = define_table(
    "events",
    "event",
    "event int, generation int?, branch int?, step int?, kind text, text text, at real, "
    "data object",
    clustered=False,
)
OUTPUT = define_table(
    "output",
    "number",
    "number int, generation int?, step int?, stream text, at real, text text",
    clustered=False,
)


APPLICATION_ID = 0x464C5854  # `PRAGMA application_id` of every trace: the letters FLXT
VERSION = 2
"""`PRAGMA user_version`. It rises when a table, column, stream or kind of event is renamed, removed
or changes meaning. `flexinspect.trace.file.earlier_versions` reads traces of version 1."""

INDEXES = (
    "CREATE UNIQUE INDEX masks_by_fingerprint ON masks (fingerprint)",
    "CREATE INDEX findings_by_step ON findings (generation, branch, step)",
    (
        "CREATE INDEX findings_by_series ON findings (generation, branch, id, series) "
        "WHERE series <> ''"
    ),
    "CREATE INDEX events_by_step ON events (generation, step)",
    "CREATE INDEX events_by_kind ON events (kind)",
    (
        "CREATE INDEX layer_stats_bad ON layer_stats (generation, branch, step, layer) "
        "WHERE n_nan > 0 OR n_inf > 0"
    ),
)

STREAM_FORMS: Mapping[str, tuple[str, int]] = {
    **dict.fromkeys(("mask.cells", "mask.partial", "mask.full"), ("b", 3)),
    "mask.uniform_rows": ("b", 2),
    "mask.mask_mod_blocks": ("u", 3),
    "attention.mass": ("f", 3),
    **dict.fromkeys(("attention.lse", "attention.entropy", "attention.slots"), ("f", 2)),
    "logits.row": ("f", 1),
    **dict.fromkeys(("inputs.ids", "inputs.positions"), ("iu", 2)),
    **dict.fromkeys(("inputs.mask", "inputs.seen"), ("b", 2)),
    **dict.fromkeys(("q", "k", "v"), ("fiu", 3)),
    "hidden": ("fiu", 2),
    "grads.tokens": ("f", 2),
    "grads.layers": ("f", 1),
    "audit.digests": ("f", 4),
    "audit.weights": ("f", 2),
}
"""By stream: the kinds of numpy dtypes that it may have, and its number of dimensions. A bfloat16
is stored as the unsigned integer of its bits. Streams of other programs are not listed."""

FIRST_GRADIENT_ARRAY = 1 << 20
"""Number of the first of a step's arrays that are written after the step: its gradients."""

WHERE_BRANCH = "WHERE generation = ? AND branch = ?"
WHERE_STEP = f"{WHERE_BRANCH} AND step = ?"
WHERE_STEPS = f"{WHERE_BRANCH} AND step >= ? AND step < ?"
OPEN_END = 1 << 62
"""Stands for the end of a range that is open: no step and no position is as large."""

SET_FACT = "INSERT INTO run VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
END_BRANCH = (
    f"UPDATE branches SET state = ?, answer = ?, stop_reason = ?, ended_at = ? {WHERE_BRANCH}"
)
END_OPEN_BRANCHES = "UPDATE branches SET state = ?, ended_at = ? WHERE state = 'recording'"
REPEAT_FINDING = (
    "UPDATE findings SET times = times + 1, last_step = ?, "
    "sentence = coalesce(?, sentence), evidence = coalesce(?, evidence) "
    f"{WHERE_BRANCH} AND id = ? AND series = ? AND series <> ''"
)
EXPLAIN_FINDING = (
    "UPDATE findings SET severity = ?, sentence = ?, evidence = ? "
    f"{WHERE_BRANCH} AND id = ? AND step IS ? AND layer IS ? AND series = ?"
)
READ_GENERATIONS = (
    f"SELECT {', '.join(f'g.{name}' for name in GENERATIONS.names)}, "
    f"{', '.join(f'b.{name}' for name in BRANCHES.names)} "
    "FROM generations g JOIN branches b ON b.generation = g.generation AND b.branch = 0"
)
LIST_ARRAYS = (
    "SELECT number, stream, layer, dtype, shape, codec, sum(length(data)) FROM arrays "
    f"{WHERE_STEP} AND owner IS NULL "
    "GROUP BY number ORDER BY number"
)
READ_ARRAYS = (
    "SELECT step, stream, layer, owner, number, chunk, dtype, item, shape, codec, checksum, data "
    "FROM arrays {} ORDER BY generation, branch, step, number, chunk"
)
DROP_SEGMENTS = f"DELETE FROM segments {WHERE_BRANCH}"


def create_statements() -> tuple[str, ...]:
    """Return the statements that create the tables of an empty trace."""
    return (
        f"PRAGMA application_id = {APPLICATION_ID}",
        f"PRAGMA user_version = {VERSION}",
        *(table.create_sql() for table in TABLES),
        *INDEXES,
    )
