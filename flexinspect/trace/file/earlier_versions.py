"""Read traces of earlier versions by the names of today.

A temporary view takes the place of a table that is incomplete or has old names, because SQLite
resolves an unqualified name to it first. It gives defaults for what is missing, and today's names
to columns, values and JSON keys. Earlier names are listed here and nowhere else.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping
from functools import cache

from flexinspect.trace import schema
from flexinspect.trace.schema import Table

OLDEST_VERSION = 1  # the oldest version that can be read
Names = Mapping[str, str]


def _pairs(text: str) -> Names:
    """Return a mapping from its text, "KEY: VALUE, ..."."""
    return dict(pair.split(": ") for pair in text.split(", "))


ADDED_TABLES = (
    *("inputs", "builds", "gradients", "training_steps", "reviews", "output"),
    *("gpus", "lens"),
)
"""Tables that the first traces did not have; the others are in every trace."""

OLD_COLUMNS: Mapping[str, Names] = {
    "builds": {"mask_mod": "rule"},
    "calls": _pairs(
        "check_kind: gate_kind, lse_error: gate, mask_passed_to_layer: handed, "
        "suppressed_exception: swallowed"
    ),
    "gradients": {"logits_error": "gate", "runner_up_id": "rival"},
    "masks": {"mask_mod": "rule", "mask_mod_source": "rule_source"},
    "training_steps": {"anomaly_origin": "producer", "n_nonfinite": "n_sick"},
}
"""By table: the name of a column in version 1, by its name of today."""

NEW_EVENT_KINDS = _pairs(
    "batch: batched-input, breakpoint-unknown: breakpoint-not-evaluated, continued: resumed, "
    "control: control-server, cost: gradients-cost, "
    "gradients-by-reference: gradients-dense-fallback, holding: model-kept-alive, "
    "hook-off: hook-disabled, hooks-again: hooks-reinstalled, keys-changed: cache-overwritten, "
    "learnt-positions: learned-positions, no-cache: cache-disabled, no-ids: no-input-ids, "
    "no-weights: not-attention-weights, not-followed: generate-not-followed, "
    "not-returned: kernel-did-not-return, other-cache: cache-switched, "
    "parameters: parameters-changed, rule-off: rule-disabled, segments: segments-not-found, "
    "several-rows: chunked-input, step-unread: step-not-recorded, thinned: detail-reduced, "
    "unreached: parameters-without-gradient, unseen: not-recorded"
)
"""The kind of an event today, by its kind in version 1."""

NEW_NAMES = _pairs(
    "attention shape: attention_shape, call facts: call_facts, columns: unread_keys, "
    "fed: prompt, gradient.gate: gradient.check-failed, observer.gate: observer.check-failed, "
    "paddings: batch_padding, roles: row_roles, trainingsteps: training_steps, "
    "twins: same_prompt, twins.differ: same-prompt.differ, twins.rounding: same-prompt.rounding, "
    "twins.same: same-prompt.same"
)
"""The name of a rule, or id of a finding, today, by that in version 1."""

_NEW_DECLARED_KEYS = _pairs(
    "pieces: segments, words: tokenizer, rule: mask_mod, head: prefix_stops, low: local_starts"
)
NEW_VALUES: Mapping[tuple[str, str], Names] = {
    ("arrays", "stream"): _pairs(
        "mask.averaged: mask.uniform_rows, mask.ruled: mask.mask_mod_blocks"
    ),
    ("events", "kind"): NEW_EVENT_KINDS,
    ("findings", "id"): NEW_NAMES,
    ("reviews", "rule"): NEW_NAMES,
    ("training_steps", "loss_source"): {"told": "reported"},
}
"""By table and column: the value of today, by that of version 1."""

NEW_JSON_KEYS: Mapping[tuple[str, str], Names] = {
    ("branches", "change"): _NEW_DECLARED_KEYS,
    ("events", "data"): {"entered": "is_running", "what": "description"},
    ("findings", "evidence"): _pairs(
        "bar: tolerance, fed: received, gate: check_error, handed: mask_passed_to_layer, "
        "producer: anomaly_origin, rule: mask_mod, said: anomaly_message, "
        "swallowed: suppressed_exception, told by: reported_by, "
        "tokens alone and fed: tokens alone and in the prompt"
    ),
    ("generations", "declared"): _NEW_DECLARED_KEYS,
    ("training_steps", "anomaly_origin"): {"n_carriers": "n_affected"},
}
"""By table and column: the key of today in its JSON, by that of version 1."""

_COLUMNS_SQL = (
    "SELECT m.name, p.name FROM main.sqlite_schema m JOIN pragma_table_info(m.name, 'main') p "
    "WHERE m.type = 'table'"
)
_DEFAULT_LITERALS = {"int": "0", "bool": "0", "text": "''", "object": "'{}'"}
_DEFAULT_LITERALS |= dict.fromkeys(("texts", "ints", "floats", "runs"), "'[]'")


def check_tables(db: sqlite3.Connection) -> None:
    """Raise `sqlite3.DatabaseError` if a table of a trace is a view or has computed columns.

    Reading those runs SQL that came with the file, which may never end.
    """
    names = {table.name for table in schema.TABLES}
    for name, kind, sql in db.execute("SELECT name, type, sql FROM main.sqlite_schema").fetchall():
        if kind == "index" or str(name).lower() not in names:
            continue
        if kind != "table" or not re.match(r"\s*CREATE\s+TABLE\b", str(sql), re.IGNORECASE):
            raise sqlite3.DatabaseError(f"'{name}' is not a table of a trace")
        columns = db.execute("SELECT hidden FROM pragma_table_xinfo(?, 'main')", (name,))
        if any(hidden for (hidden,) in columns):
            raise sqlite3.DatabaseError(f"table '{name}' has computed columns")


@cache
def _tables_of_today() -> frozenset[str]:
    return frozenset(table.create_sql() for table in schema.TABLES)


def compatibility_selects(db: sqlite3.Connection) -> dict[str, str]:
    """Return for each table with differences, by name, the SELECT that gives it today's form."""
    is_old = db.execute("PRAGMA main.user_version").fetchone()[0] < schema.VERSION
    stored_sql = {sql for (sql,) in db.execute("SELECT sql FROM main.sqlite_schema")}
    if not is_old and stored_sql >= _tables_of_today():
        return {}
    check_tables(db)
    columns: dict[str, set[str]] = {}
    for table, column in db.execute(_COLUMNS_SQL):
        columns.setdefault(table, set()).add(column)
    selects: dict[str, str] = {}
    for each in schema.TABLES:
        stored = columns.get(each.name, set())
        if not stored and each.name not in ADDED_TABLES:
            continue
        parts = [_column_sql(each, name, stored, is_old=is_old) for name in each.kinds]
        if parts != list(each.names):
            source = f"FROM main.{each.name}" if stored else "WHERE 0"
            selects[each.name] = f"SELECT {', '.join(parts)} {source}"
    return selects


def _column_sql(table: Table, column: str, stored: set[str], *, is_old: bool) -> str:
    name = column if column in stored else OLD_COLUMNS.get(table.name, {}).get(column, column)
    sql = name if name in stored else _DEFAULT_LITERALS.get(table.kinds[column], "NULL")
    place = (table.name, column)
    values, keys = (each.get(place, {}) if is_old else {} for each in (NEW_VALUES, NEW_JSON_KEYS))
    if is_old and place == ("run", "value"):
        sql = f"CASE key WHEN 'rules' THEN {_replace_strings(sql, NEW_NAMES)} ELSE {sql} END"
    if values:
        cases = (f"WHEN '{old}' THEN '{new}'" for old, new in values.items())
        sql = f"CASE {sql} {' '.join(cases)} ELSE {sql} END"
    sql = _replace_strings(sql, keys, end=":")
    return sql if sql == column else f"{sql} AS {column}"


def _replace_strings(sql: str, names: Names, end: str = "") -> str:
    for old, new in names.items():
        sql = f"""replace({sql}, '"{old}"{end}', '"{new}"{end}')"""
    return sql
