"""The schema of a trace: its tables, each of which one of the `*tables` modules names, and its SQL.

A trace is one SQLite file. `docs/trace-format.md` describes it as a public interface; its tables
are made from these descriptions, and a test keeps the two equal.
"""

from __future__ import annotations

from flexinspect.trace.runtables import BRANCHES, GENERATIONS, RUN, SEGMENTS, TOKENS
from flexinspect.trace.saidtables import EVENTS, FINDINGS, OUTPUT, REVIEWS
from flexinspect.trace.steptables import (
    ARRAYS,
    BUILDS,
    CALLS,
    CANDIDATES,
    GRADIENTS,
    GRADS,
    INPUTS,
    LAYER_STATS,
    MASKS,
    MEMORY,
    STEPS,
    STREAMS,
)
from flexinspect.trace.trainingtables import TRAINING_STEPS

__all__ = [
    "APPLICATION_ID",
    "ARRAYS",
    "BRANCHES",
    "BUILDS",
    "CALLS",
    "CANDIDATES",
    "DROP_SEGMENTS",
    "END_BRANCH",
    "END_OPEN_BRANCHES",
    "EVENTS",
    "FINDINGS",
    "FIRST_GRADIENT_ARRAY",
    "GENERATIONS",
    "GRADIENTS",
    "GRADS",
    "INDEXES",
    "INPUTS",
    "LAYER_STATS",
    "LIST_ARRAYS",
    "MASKS",
    "MEMORY",
    "OUTPUT",
    "READ_ARRAYS",
    "READ_GENERATIONS",
    "REPEAT_FINDING",
    "REVIEWS",
    "RUN",
    "SEGMENTS",
    "SET_FACT",
    "STATES",
    "STEPS",
    "STREAMS",
    "TABLES",
    "TOKENS",
    "TRAINING_STEPS",
    "VERSION",
    "create_statements",
]

APPLICATION_ID = 0x464C5854
"""`PRAGMA application_id` of every trace: the letters FLXT."""

VERSION = 1
"""`PRAGMA user_version`. It rises when a table, column or stream changes its meaning or goes."""

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
"""Number of a step's first array that was written after the step: its gradients."""

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
_ARRAYS_OF_STEP_SQL = "FROM arrays WHERE generation = ? AND branch = ? AND step = ?"
LIST_ARRAYS = (
    "SELECT number, stream, layer, dtype, shape, codec, sum(length(data)) "
    f"{_ARRAYS_OF_STEP_SQL} AND owner IS NULL GROUP BY number ORDER BY number"
)
READ_ARRAYS = f"SELECT number, stream, layer, chunk, dtype, item, shape, codec, checksum, data {_ARRAYS_OF_STEP_SQL}"
DROP_SEGMENTS = "DELETE FROM segments WHERE generation = ? AND branch = ?"


def create_statements() -> tuple[str, ...]:
    """Return the statements that make the tables of an empty trace."""
    return (
        f"PRAGMA application_id = {APPLICATION_ID}",
        f"PRAGMA user_version = {VERSION}",
        *(table.create_sql() for table in TABLES),
        *INDEXES,
    )
