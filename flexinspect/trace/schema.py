"""The tables, streams and SQL of a trace.

A trace is one SQLite file. `docs/trace-format.md` describes it as a public interface; its tables
are the ones defined here, which a test checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

JSON_KINDS = ("json", "object", "texts", "ints", "floats", "runs")
"""Kinds of columns that hold JSON: any value, an object, or a list of strings, integers, numbers
or pairs of integers."""

NULLABLE_KINDS = ("bool", "object", "ints")
"""Kinds whose form that may be NULL is written and read as the kind itself."""

SQL_TYPES = {
    "int": "INTEGER NOT NULL",
    "int?": "INTEGER",
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
In a "real?" column NULL means "none", and NaN is the text 'nan'."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name, its kind (a key of `SQL_TYPES`) and what it holds, with the unit."""

    name: str
    kind: str
    meaning: str


@dataclass(frozen=True, slots=True, eq=False)  # by identity: a table is a cache key per step
class Table:
    """A table of the trace. `key` is its primary key.

    `clustered` tables have no rowid: they are stored in the order of their key, so the rows of a
    step are neighbours. Tables with wide rows (arrays) have a rowid, because a clustered table
    spills such rows to overflow pages four times as early.
    """

    name: str
    meaning: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]
    clustered: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns, in order."""
        return tuple(column.name for column in self.columns)

    def kinds(self, *, skip: int = 0) -> tuple[str, ...]:
        """Return the kinds of the columns after the first `skip`."""
        return tuple(column.kind for column in self.columns[skip:])

    @property
    def is_numbered_by_sqlite(self) -> bool:
        """Whether the key is a row id, which SQLite assigns."""
        return len(self.key) == 1 and not self.clustered

    def create_sql(self) -> str:
        """Return the CREATE TABLE statement.

        It has no prose in it: a truncated trace is repaired with the schema of this build.
        """
        lines = [f"  {column.name} {self._sql_type(column)}," for column in self.columns]
        options = "STRICT, WITHOUT ROWID" if self.clustered else "STRICT"
        key = f"  PRIMARY KEY ({', '.join(self.key)})"
        return "\n".join([f"CREATE TABLE {self.name} (", *lines, key, f") {options}"])

    def _sql_type(self, column: Column) -> str:
        # INTEGER alone (not "INTEGER NOT NULL") is what makes a single key the rowid itself.
        return (
            "INTEGER"
            if self.is_numbered_by_sqlite and column.name in self.key
            else (SQL_TYPES[column.kind])
        )


_PLACE = {
    name: Column(name, "int", meaning)
    for name, meaning in (
        ("generation", "the generation"),
        ("branch", "the branch"),
        ("step", "the step"),
    )
}
"""The columns that say where a row belongs."""


def define_table(
    name: str, key: str, meaning: str, columns: str, *, clustered: bool = True
) -> Table:
    """Return a table from its key (names separated by spaces) and a line per column.

    Columns of the key that say where a row belongs come first if they have no line.
    """
    names = tuple(key.split())
    parsed = [Column(*line.split(None, 2)) for line in columns.strip().splitlines()]
    described = {column.name for column in parsed}
    place = [_PLACE[each] for each in names if each in _PLACE and each not in described]
    return Table(name, meaning, names, (*place, *parsed), clustered)


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


RUN = define_table(
    "run",
    "key",
    "The manifest: what would be needed to run it again. `state` is one of recording, finished, "
    "interrupted, failed.",
    """
    key    text  name of the fact
    value  json  the fact
    """,
)

GENERATIONS = define_table(
    "generations",
    "generation",
    "One prompt to its end.",
    """
    generation  int     number, from 0
    sample_id   text    the sample of the data set
    mask        text    name of the requested mask preset or mask_mod
    positions   text    position ids: contiguous or reset
    expected    texts   the answers that count as right, a list of strings
    declared    object  the declared mask, segments and special tokens, an object
    started_at  real    seconds since the epoch
    model       text    its name in the manifest's list `models`; empty if there is only one
    """,
)

BRANCHES = define_table(
    "branches",
    "generation branch",
    "The branches of a generation; 0 is the first, a fork has a parent.",
    """
    generation   int     the generation
    branch       int     number within the generation, from 0
    parent       int?    the branch it was forked from, NULL for branch 0
    fork_step    int?    its first own step, NULL for branch 0
    state        text    recording, finished, interrupted or failed
    answer       text    the generated text, empty until the end
    stop_reason  text    why decoding ended, empty until the end
    started_at   real    seconds since the epoch
    ended_at     real?   seconds since the epoch, NULL until the end
    change       object  how it differs from its parent, an object; empty for branch 0
    """,
)

SEGMENTS = define_table(
    "segments",
    "generation branch segment",
    "Spans of the sequence.",
    """
    segment  int   number within the sequence, from 0
    start    int   first position
    stop     int   position after the last; for the generated segment the highest it may reach
    label    text  displayed name
    kind     text  bos, shared, paraphrase, separator, cue or generated
    owner    int   the segment it belongs to for masking: itself, except for separators
    """,
)

TOKENS = define_table(
    "tokens",
    "generation branch pos",
    "Positions of the sequence, prompt and generated.",
    """
    pos          int   position in the sequence, from 0
    token_id     int   id in the vocabulary
    token        text  the string in the vocabulary
    text         text  the token decoded alone
    position_id  int   position id that the model received
    segment      int   number of its segment
    special      bool  1 for BOS, EOS and the like
    step         int?  the step that chose it, NULL in the prompt
    """,
)


STEPS = define_table(
    "steps",
    "generation branch step",
    "One forward: 0 is the prefill. The columns from `entropy` on describe the distribution of the "
    "newest row (natural logarithms) and are NULL, `chosen_id` too, when no logits were captured.",
    """
    step            int    number of the forward, from 0
    phase           text   prefill or decode; train for an optimizer step
    q_len           int    number of rows
    kv_before       int    keys in the cache before
    kv_after        int    keys in the cache after
    started_at      real   seconds since the epoch
    wall_ms         real   milliseconds of the forward with the choice of the token
    capture_ms      real   milliseconds of it that capture took
    first_pos       int?   lowest position whose token this step chose, NULL when none
    last_pos        int?   highest position whose token this step chose
    entropy         real   entropy in nats
    margin          real   logit of the best minus the second
    chosen_id       int?   the chosen token, -1 when it was not observed
    chosen_rank     int?   its rank, from 0; -1 when it was not observed
    chosen_logprob  real   its log-probability
    n_nan           int?   NaN among the logits
    n_inf           int?   infinities among the logits
    histogram_min   real   lower end of the histogram, a logit
    histogram_max   real   upper end of the histogram, a logit
    histogram       ints?  counts in equal bins, a list of integers
    """,
)

CANDIDATES = define_table(
    "candidates",
    "generation branch step rank",
    "The top-k tokens of a step.",
    """
    rank           int   rank by logit, from 0
    token_id       int   id in the vocabulary
    text           text  the token decoded alone
    logit          real  before the logits processors
    logprob        real  log-probability before the processors
    score          real  after the processors, NULL when that was not observed
    score_logprob  real  log-probability after the processors
    """,
)

INPUTS = define_table(
    "inputs",
    "generation branch step",
    "What a step was fed beside its tokens, and what the cache held around it: a number per layer, "
    "-1 for one that counts no keys; none without a cache.",
    """
    batch          int   number of sequences
    positions      runs  position ids of row 0, runs [first, length]; empty if there were none
    cached_before  ints  keys in each layer's cache before, a list of integers
    cached_after   ints  keys in each layer's cache after, a list of integers
    """,
)

CALLS = define_table(
    "calls",
    "generation branch step call",
    "Attention calls, in the order they ran.",
    """
    call                  int    number within the step, from 0
    layer                 int    the layer
    path                  text   what ran: flex uncompiled, flex compiled, sdpa, eager or other
    backend               text   the name under which it was dispatched
    mask                  text?  fingerprint of the received mask, NULL when there was none
    batch                 int    sequences
    q_heads               int    query heads
    kv_heads              int    key and value heads
    q_len                 int    rows
    kv_len                int    keys
    head_dim              int    width of a head
    dtype                 text   type of the queries
    scale                 real?  factor on the scores, NULL for the kernel's default
    lse_error             real?  largest deviation of the newest row from 1, NULL if not computed
    check_kind            text?  how `lse_error` was computed: lse or output
    softcap               real?  cap on the scores, NULL when there is none
    mask_passed_to_layer  text?  mask passed to the layer, NULL when its kernel received the same
    suppressed_exception  text?  suppressed exception of the call, NULL when there was none
    causal                bool?  the layer's `is_causal` as 1 or 0, NULL when it has none
    window                int?   keys in its sliding window, NULL without one
    """,
)

BUILDS = define_table(
    "builds",
    "generation branch step build",
    "Block masks that user code built for a step, in order.",
    """
    build        int   number within the step, from 0
    layer        int?  the layer in whose forward it was built, NULL outside of all layers
    batch        int?  batch size of the mask, NULL when one serves all
    heads        int?  heads of the mask, NULL when one serves all
    q_len        int   rows
    kv_len       int   keys
    mask_mod     text  module and qualified name of the mask_mod
    wall_ms      real  time to build it, milliseconds
    peak_growth  int   bytes by which it raised the peak memory of the process or the GPU
    """,
)

LAYER_STATS = define_table(
    "layer_stats",
    "generation branch step number",
    "Statistics of module outputs over the rows of a step, in the order captured.",
    """
    number   int   number within the step, from 0
    layer    int   the layer
    module   text  the module, within the layer
    n_nan    int   NaN values
    n_inf    int   infinite values
    min      real  smallest value
    max      real  largest value
    mean     real  mean
    std      real  standard deviation
    norm     real  Euclidean norm
    bad_row  int?  first row of the step with NaN or Inf, NULL when there is none
    """,
)

MEMORY = define_table(
    "memory",
    "generation branch step",
    "Memory at the end of a step.",
    """
    rss             int   resident set of the process, bytes
    model           int   parameters and buffers, bytes
    kv_cache        int   cached keys and values, bytes
    cuda_allocated  int?  allocated by the CUDA allocator, bytes, NULL without CUDA
    cuda_reserved   int?  reserved by the CUDA allocator, bytes
    cuda_peak       int?  peak allocated, bytes: in this step, in training so far
    """,
)

GRADS = define_table(
    "grads",
    "generation branch step name",
    "Gradients per parameter: of the token that a step generated (see `gradients`), or of a "
    "training step (of all parameters or of those that mattered).",
    """
    name   text   qualified name of the parameter
    norm   real   Euclidean norm of the gradient
    max    real   largest absolute value, NULL when not measured
    n_nan  int    NaN values
    n_inf  int    infinite values
    layer  int?   its layer, NULL outside of all layers
    part   text?  embedding, q, k, v, qkv, o, attention, mlp, norm, lm_head, tied or other
    """,
)

GRADIENTS = define_table(
    "gradients",
    "generation branch step",
    "The differentiated quantity of a token's gradients, and whether their forward is what ran.",
    """
    step          int    the step that generated the token
    token_id      int    the token
    target        text   logprob, or margin to the next best token
    value         real   the differentiated quantity
    scale         real   norm of its gradient at the logits
    path          text   dense reference, flex or flex compiled
    logits_error  real   largest difference to the recorded logits, relative to the largest of them
    tolerance     real   `logits_error` above which this is not what ran: nothing else is recorded
    wall_ms       real   time, milliseconds
    runner_up_id  int?   the other token of a margin
    n_unreached   int    parameters without influence on the token
    anomaly       text?  message of autograd's anomaly mode, with the traceback of the forward
    """,
)

MASKS = define_table(
    "masks",
    "generation branch step fingerprint",
    "Masks as received, once per fingerprint, under the step that had it first. Cells and block "
    "tables are in `arrays`, owned by the fingerprint.",
    """
    generation       int    generation in which it first occurred
    branch           int    branch in which it first occurred
    step             int    step in which it first occurred
    fingerprint      text   identity of the mask, unique in the trace
    kind             text   block, bool or float
    batch            int    sequences it was built for
    heads            int    heads it was built for
    q_len            int    rows
    kv_len           int    keys
    q_offset         int    position of row 0 in the sequence
    kv_offset        int    position of key 0, above 0 once a sliding cache has dropped keys
    block_q          int?   rows per block, NULL for dense masks
    block_kv         int?   keys per block
    mask_mod         text?  module and qualified name of the mask_mod
    mask_mod_source  text?  file and line of the mask_mod
    compiled         bool   1 when the kernel that used it was compiled
    """,
)

ARRAYS = define_table(
    "arrays",
    "generation branch step number chunk",
    "Arrays, in chunks of at most 1 MiB.",
    """
    number    int    number of the array within the step, from 0
    chunk     int    number of the chunk within the array, from 0
    stream    text   name of its stream, see the streams
    layer     int?   the layer, NULL when the array holds all or none
    owner     text?  fingerprint of the mask it belongs to, NULL for an array of the step
    dtype     text   true type of the elements
    item      text   type of the stored elements: dtype, but uint16 for bfloat16
    shape     ints   lengths of the axes, a list of integers
    codec     text   raw, bits or bits+zstd
    checksum  int    CRC-32 of data, as zlib computes it
    data      blob   the bytes of this chunk
    """,
    clustered=False,
)

STREAMS = {
    "mask.cells": "bool (heads, rows, keys): the executed mask; heads is 1 when all share it",
    "mask.uniform_rows": "bool (heads, rows): rows with the lowest float in every cell, averaged",
    "mask.partial": "bool (heads, row blocks, key blocks): blocks where the mask_mod is applied",
    "mask.full": "bool (heads, row blocks, key blocks): blocks open in full, without the mask_mod",
    "mask.mask_mod_blocks": "uint8 (heads, row blocks, key blocks): mask_mod opens 0 nothing, "
    "1 some, 2 all",
    "attention.mass": "float (layers, heads, segments): attention of the newest row by segment",
    "attention.lse": "float (layers, heads): log-sum-exp of the newest row's scores, natural",
    "attention.entropy": "float (layers, heads): entropy of the newest row's attention, nats",
    "attention.slots": "float (layers, 5): where the newest row sees slots that hold nothing of "
    "its text: open keys, all-zero ones and their weight, stale ones and theirs",
    "logits.row": "float (vocabulary): the newest row's logits, before processors; level extreme",
    "inputs.ids": "int (sequences, rows): token ids, of a batch of several",
    "inputs.positions": "int (sequences, rows): position ids, of a batch where they may differ",
    "inputs.mask": "bool (sequences, keys): the 2D attention mask of a forward with an empty cache",
    "q": "(heads, rows, head width): queries of one layer, after rotation, rows of this step",
    "k": "(key heads, rows, head width): keys of one layer, after rotation, rows of this step",
    "v": "(key heads, rows, head width): values of one layer, rows of this step",
    "hidden": "(rows, width): output of one layer, rows of this step",
    "grads.tokens": "float (2, positions): gradient times input, and norm of the gradient, at each "
    "token's embedding",
    "grads.layers": "float (layers + 1,): norm of the gradient at the embeddings and at each "
    "layer's output, 0 where none arrives, NaN for layers without attention",
}
"""Streams with a defined meaning; hooks may add others."""


FINDINGS = define_table(
    "findings",
    "finding",
    "The findings of the rules.",
    """
    finding     int     number, in order of writing, from 1
    generation  int     the generation
    branch      int     the branch
    step        int?    the step, NULL for the whole generation
    id          text    kind of the finding, for instance mask.empty-row
    severity    text    error, warning or note
    sentence    text    what is wrong
    layer       int?    the layer
    head        int?    the head
    positions   ints    token positions, a list of integers
    evidence    object  the numbers behind it, an object
    layers      ints    all layers that are concerned if there are several, a list of integers
    series      text    key by which later findings of this id count as repetitions, '' for none
    last_step   int?    the last step in which it was repeated, NULL when it was not
    times       int     number of steps in which it occurred
    why         text    why it matters
    confirm     text    how to verify it
    fix         text    the usual fix
    query       text    the SQL that selects the evidence in this trace
    """,
    clustered=False,
)

REVIEWS = define_table(
    "reviews",
    "rule generation",
    "Which rules ran on a generation after it was recorded; their findings are in findings.",
    """
    rule        text  name of the rule
    generation  int   the generation
    at          real  seconds since the epoch
    wall_ms     real  time, milliseconds
    """,
)

EVENTS = define_table(
    "events",
    "event",
    "What happened around the steps: phases, warnings, hooks switched off.",
    """
    event       int     number, in order of writing, from 1
    generation  int?    the generation, NULL outside of one
    branch      int?    the branch, NULL outside of a step
    step        int?    the step, NULL outside of one
    kind        text    kind of the event, for instance loading
    text        text    what happened
    at          real    seconds since the epoch
    data        object  details, an object
    """,
    clustered=False,
)

OUTPUT = define_table(
    "output",
    "number",
    "The program's output in order; of very long output the beginning and the end.",
    """
    number      int   number, in order of arrival, from 1
    generation  int?  generation of the last step that had started, NULL before the first
    step        int?  that step
    stream      text  stdout or stderr
    at          real  seconds since the epoch
    text        text  the printed text, bytes that are not UTF-8 replaced
    """,
    clustered=False,
)


TRAINING_STEPS = define_table(
    "training_steps",
    "generation branch step",
    "What a step of phase train learned from, did and took. Counts are of parameters, norms of the "
    "gradients as the optimizer got them; groups are in the order of `declared.training.groups` of "
    "the generation, or of `groups` in its newest event of kind `parameters-changed`.",
    """
    step              int      the optimizer step
    loss              real     the loss
    loss_source       text     reported (by the user), output (of the model), or empty: unknown
    learning_rates    floats   of each group of the optimizer, a list of numbers; NaN: unknown
    total_norm        real?    norm of all gradients together, NULL when not measured
    norm_before_clip  real?    norm before clip_grad_norm_, NULL when not observed
    max_norm          real?    limit of clip_grad_norm_
    n_parameters      int      parameters that have a gradient
    n_exploding       int      parameters with a norm above 10
    n_vanishing       int      matrices with a norm below 1e-6, not 0
    n_dead            int      parameters whose gradient is 0 everywhere
    n_nonfinite       int      parameters with NaN or Inf in the gradient
    group_norms       floats   norm of each group's gradients, a list; empty when not measured
    group_ratios      floats   norm of each group's change over that of its weights; empty likewise
    anomaly_origin    object?  origin of an anomaly: kind, name, n_affected, detail
    n_backward        int      backward passes since the last step: micro-batches
    forward_ms        real     forward passes
    backward_ms       real     backward passes
    optimizer_ms      real     the optimizer's step
    data_ms           real?    waiting for the watched loader, NULL when none is watched
    other_ms          real     the rest of the time since the last step
    scale             real?    scale of the GradScaler, NULL without one
    is_skipped        bool     1 when the GradScaler skipped the optimizer's step
    device            text     device of the model's output
    autocast          text     dtype of autocast, empty without it
    detail            text     how much was measured: extreme, advanced, basic or sparse
    """,
)


APPLICATION_ID = 0x464C5854
"""`PRAGMA application_id` of every trace: the letters FLXT."""

VERSION = 2
"""`PRAGMA user_version`. It rises when a table, column, stream or kind of event is renamed, removed
or changes meaning. `flexinspect.trace.file.earlier_versions` reads traces of version 1."""

STATES = ("recording", "finished", "interrupted", "failed")

TABLES = (
    RUN,
    GENERATIONS,
    BRANCHES,
    SEGMENTS,
    TOKENS,
    STEPS,
    CANDIDATES,
    INPUTS,
    CALLS,
    BUILDS,
    LAYER_STATS,
    MEMORY,
    GRADS,
    GRADIENTS,
    TRAINING_STEPS,
    MASKS,
    ARRAYS,
    FINDINGS,
    REVIEWS,
    EVENTS,
    OUTPUT,
)

INDEXES = (
    "CREATE UNIQUE INDEX masks_by_fingerprint ON masks (fingerprint)",
    "CREATE INDEX findings_by_step ON findings (generation, branch, step)",
    (
        "CREATE INDEX findings_by_series ON findings (generation, branch, id, series) "
        "WHERE series <> ''"
    ),
    "CREATE INDEX events_by_step ON events (generation, step)",
    (
        "CREATE INDEX layer_stats_bad ON layer_stats (generation, branch, step, layer) "
        "WHERE n_nan > 0 OR n_inf > 0"
    ),
)

FIRST_GRADIENT_ARRAY = 1 << 20
"""Number of the first of a step's arrays that are written after the step: its gradients."""

SET_FACT = "INSERT INTO run VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
END_BRANCH = (
    "UPDATE branches SET state = ?, answer = ?, stop_reason = ?, ended_at = ? "
    "WHERE generation = ? AND branch = ?"
)
END_OPEN_BRANCHES = "UPDATE branches SET state = ?, ended_at = ? WHERE state = 'recording'"
REPEAT_FINDING = (
    "UPDATE findings SET times = times + 1, last_step = ?, "
    "sentence = coalesce(?, sentence), evidence = coalesce(?, evidence) "
    "WHERE generation = ? AND branch = ? AND id = ? AND series = ? AND series <> ''"
)
READ_GENERATIONS = (
    f"SELECT {', '.join(f'g.{name}' for name in GENERATIONS.names)}, "
    f"{', '.join(f'b.{name}' for name in BRANCHES.names)} "
    "FROM generations g JOIN branches b ON b.generation = g.generation AND b.branch = 0"
)
LIST_ARRAYS = (
    "SELECT number, stream, layer, dtype, shape, codec, sum(length(data)) FROM arrays "
    "WHERE generation = ? AND branch = ? AND step = ? AND owner IS NULL "
    "GROUP BY number ORDER BY number"
)
READ_ARRAYS = (
    "SELECT step, number, stream, layer, owner, chunk, dtype, item, shape, codec, checksum, data "
    "FROM arrays"
)
ARRAY_ORDER = "ORDER BY generation, branch, step, number, chunk"
DROP_SEGMENTS = "DELETE FROM segments WHERE generation = ? AND branch = ?"


def create_statements() -> tuple[str, ...]:
    """Return the statements that create the tables of an empty trace."""
    return (
        f"PRAGMA application_id = {APPLICATION_ID}",
        f"PRAGMA user_version = {VERSION}",
        *(table.create_sql() for table in TABLES),
        *INDEXES,
    )
