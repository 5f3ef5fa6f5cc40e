"""A copy of a trace without what its prompt says, to attach to a public report.

Token ids, words, paths and program output become placeholders; masks, attention shares, shapes,
times, findings and the path of every layer stay. Equal tokens keep equal placeholders, so findings
about repeated or shifted text still hold.
"""

from __future__ import annotations

import re
import sqlite3
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field

from flexinspect.core.errors import UsageError
from flexinspect.core.parsing import parse_json
from flexinspect.trace import codec
from flexinspect.trace.file import connections
from flexinspect.trace.file.earlier_versions import NEW_VALUES, OLD_COLUMNS
from flexinspect.trace.file.location import write_private
from flexinspect.trace.schema import STREAM_FORMS

KEPT_FACTS = frozenset(
    {
        *("state", "started_at", "ended_at", "reason", "flexinspect", "versions", "level", "seed"),
        *("layers", "threads", "cost", "rules", "compiled", "graphs_counted", "model", "host"),
    }
)
"""Facts of the manifest that stay; their texts are searched for words and paths."""
TENSORS = ("q", "k", "v", "hidden", "logits.row", "audit.digests")
"""Streams from which a prompt can be computed again."""

_SENSITIVE = {
    "tokens": ("token", "text"),
    "candidates": ("text",),
    "branches": ("answer",),
    "generations": ("sample_id", "expected"),
    "output": ("text",),
}
"""Columns whose words must not remain anywhere."""
_CLEANED = {
    "segments": ("label",),
    "generations": ("declared", "model"),
    "branches": ("change", "stop_reason"),
    "calls": ("suppressed_exception",),
    "builds": ("mask_mod",),
    "masks": ("mask_mod", "mask_mod_source", "mask_mod_code"),
    "findings": ("sentence", "why", "confirm", "fix", "query", "evidence", "series"),
    "events": ("text", "data"),
    "gradients": ("anomaly",),
    "training_steps": ("anomaly_origin",),
}
"""Columns that may quote those words, or a path."""
_ID_COLUMNS = (
    *(("tokens", "token_id"), ("candidates", "token_id"), ("steps", "chosen_id")),
    *(("gradients", "token_id"), ("gradients", "runner_up_id")),
)
_ID_KEY = re.compile(r"(?:^|_)(?:id|ids|token|tokens|bos|eos|pad)$")
COMMON_WORDS = frozenset(
    re.findall(
        r"\w+",
        """the and for with are was were not that this from has have had its but you all can one two
        who what which when where how why will does did than then them they there their into over
        layer layers head heads step steps token tokens mask row rows key keys position positions
        segment segments paraphrase paraphrases prompt attention query value values""",
    )
)
"""Words that stay: they say nothing about a prompt, and the sentences of findings need them."""
_WORD = re.compile(r"[^\W_]{3,}")
_PATH = re.compile(r"(?:[A-Za-z]:)?(?:[\w.~+-]*[/\\])+[\w.+-]*")
_LABELS = re.compile(r"(?:bos|shared|paraphrase|separator|cue|generated|prompt)(?: \d+)?")


class Redacted(Struct):
    """What a redacted copy no longer holds."""

    n_tokens: int = 0
    n_words: int = 0
    n_outputs: int = 0
    dropped_arrays: list[str] = field(default_factory=list)


def redact(source: Path, target: Path, *, keep_tensors: bool = False) -> Redacted:
    """Write a redacted copy of the trace at `source` to `target`, complete or not at all.

    With `keep_tensors` the streams `TENSORS` stay; a model can compute the prompt from them.
    Raises `UsageError` if `target` cannot be written, and `TraceError` for a damaged trace.
    """
    source = source.absolute()
    try:
        with tempfile.TemporaryDirectory(dir=target.absolute().parent) as folder:
            work, small = Path(folder, "work"), Path(folder, "small")
            write_private(work, b"")
            with connections.trace_errors(source):
                connections.connect(source).close()  # checks the file
                with closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True)) as db:
                    db.execute("VACUUM INTO ?", (str(work),))
                with closing(sqlite3.connect(work, isolation_level=None)) as db:
                    db.execute("PRAGMA journal_mode = OFF")
                    _drop_triggers(db)
                    found = _Redaction(db, keep_tensors).run()
                    write_private(small, b"")
                    db.execute("VACUUM INTO ?", (str(small),))  # free pages hold what was replaced
            small.replace(target)
    except OSError as error:
        what = f"{target} cannot be written: {error.strerror or error}."
        raise UsageError(what, hint="Name another file with -o.") from error
    return found


def _drop_triggers(db: sqlite3.Connection) -> None:
    """Remove the triggers of a file: our traces have none, and those of a stranger would run."""
    names = db.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall()
    for (name,) in names:
        db.execute('DROP TRIGGER "{}"'.format(name.replace('"', '""')))


class _Redaction:
    """Edits one database in place."""

    def __init__(self, db: sqlite3.Connection, keep_tensors: bool) -> None:
        self._db, self._keep_tensors = db, keep_tensors
        self.done = Redacted()
        self._ids = self._placeholder_ids()
        self._words = self._sensitive_words()
        self.done.n_words = len(self._words)

    def run(self) -> Redacted:
        """Replace everything, one table after the other."""
        self._update("tokens", "text", self._token_text, of="token_id")
        self._update("tokens", "token", self._token_text, of="token_id")
        self._update("candidates", "text", self._token_text, of="token_id")
        for table, column in _ID_COLUMNS:
            self._update(table, column, self._ids.get, of=column)
        self._update("branches", "answer", lambda _: "")
        self._update("generations", "expected", lambda _: "[]")
        self._update("generations", "sample_id", lambda _: "")
        self.done.n_outputs = self._db.execute("DELETE FROM output").rowcount
        for table, columns in _CLEANED.items():
            for column in columns:
                self._update(table, column, self._clean_text)
        self._update("segments", "label", _plain_label)
        self._redact_facts()
        self._redact_arrays()
        return self.done

    def _stored_name(self, table: str, column: str) -> str | None:
        """Return the name of a column in the file, None if a trace of its version lacks it."""
        names = self._db.execute("SELECT name FROM pragma_table_info(?)", (table,))
        stored = {name for (name,) in names}
        found = (column, OLD_COLUMNS.get(table, {}).get(column, ""))
        return next((name for name in found if name in stored), None)

    def _values(self, table: str, column: str) -> list[Any]:
        name = self._stored_name(table, column)
        rows = self._db.execute(f"SELECT {name} FROM {table}") if name else ()
        return [value for (value,) in rows]

    def _update(
        self, table: str, column: str, change: Callable[[Any], Any], *, of: str | None = None
    ) -> None:
        """Set a column to what `change` returns for it, or for the column `of`; NULL stays."""
        name = self._stored_name(table, column)
        if name is None:
            return
        self._db.create_function("redact_value", 1, change, deterministic=True)
        source = self._stored_name(table, of or column)
        change_sql = f"{name} = redact_value({source})"
        self._db.execute(f"UPDATE {table} SET {change_sql} WHERE {name} IS NOT NULL")

    def _placeholder_ids(self) -> dict[int, int]:
        """Return a placeholder for each token id: special tokens keep theirs."""
        sql = "SELECT token_id FROM tokens WHERE special ORDER BY generation, branch, pos"
        special = {token for (token,) in self._db.execute(sql)}
        for declared in self._values("generations", "declared"):
            special |= _ids_of_tokenizer(declared)
        first = max(special, default=0) + 1
        ids = {token: token for token in special}
        for table, column in _ID_COLUMNS:
            for token in self._values(table, column):
                if token is not None and token not in ids:
                    ids[token] = first + len(ids) - len(special)
        self._special = special
        self.done.n_tokens = len(ids) - len(special)
        return ids

    def _token_text(self, token_id: int) -> str:
        if token_id in self._special:
            return f"<special {token_id}>"
        return f" token{self._ids.get(token_id, 0)}"

    def _sensitive_words(self) -> frozenset[str]:
        texts = (
            str(text)
            for table, columns in _SENSITIVE.items()
            for column in columns
            for text in self._values(table, column)
        )
        found = (
            word.lower() for text in (*texts, self._joined_tokens()) for word in _WORD.findall(text)
        )
        return frozenset(word for word in found if word not in COMMON_WORDS)

    def _joined_tokens(self) -> str:
        """Return the texts of all tokens in a row: a word may be of several tokens."""
        sql = "SELECT text FROM tokens ORDER BY generation, branch, pos"
        return "".join(str(text) for (text,) in self._db.execute(sql))

    def _clean_text(self, text: Any) -> Any:
        """Return a text, or a JSON text, without the words of the prompt and without paths."""
        if not isinstance(text, str):
            return text
        try:
            value = codec.from_json(text)
        except ValueError:
            return self._clean_words(text)
        if isinstance(value, dict | list):
            return codec.to_json(self._clean_json(value))
        return self._clean_words(text)

    def _clean_words(self, text: str) -> str:
        text = _PATH.sub("PATH", text)
        return _WORD.sub(lambda m: "…" if m[0].lower() in self._words else m[0], text)

    def _clean_json(self, value: Any, key: str = "") -> Any:
        if isinstance(value, Mapping):
            return {self._clean_words(k): self._clean_json(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [self._clean_json(item, key) for item in value]
        if isinstance(value, str):
            return self._clean_words(value)
        if type(value) is int and _ID_KEY.search(key):
            return self._ids.get(value, value)
        return value

    def _redact_facts(self) -> None:
        for key, value in self._db.execute("SELECT key, value FROM run").fetchall():
            try:
                cleaned = self._clean_json(codec.from_json(value))
            except ValueError:  # a damaged trace
                cleaned = None
            if key in KEPT_FACTS and cleaned is not None:
                self._db.execute(
                    "UPDATE run SET value = ? WHERE key = ?", (codec.to_json(cleaned), key)
                )
            else:
                self._db.execute("DELETE FROM run WHERE key = ?", (key,))
        self._db.execute("INSERT OR REPLACE INTO run VALUES ('redacted', 'true')")

    def _redact_arrays(self) -> None:
        """Remove arrays that the prompt can be computed from, and replace ids in the others."""
        streams = sorted(set(self._values("arrays", "stream")))
        known = {*STREAM_FORMS, *NEW_VALUES["arrays", "stream"]}
        known |= {name for name in streams if name.startswith("logits.processed.")}
        for stream in streams:
            is_kept = stream in known and (self._keep_tensors or stream not in TENSORS)
            if not is_kept:
                self._db.execute("DELETE FROM arrays WHERE stream = ?", (stream,))
                self.done.dropped_arrays.append(stream)
        sql = "SELECT rowid, item, data FROM arrays WHERE stream = 'inputs.ids'"
        for row, item, data in self._db.execute(sql).fetchall():
            ids = np.frombuffer(data, np.dtype(item).newbyteorder("<"))
            new = np.array([self._ids.get(int(one), 0) for one in ids], ids.dtype).tobytes()
            self._db.execute(
                "UPDATE arrays SET data = ?, checksum = ? WHERE rowid = ?",
                (new, zlib.crc32(new), row),
            )


def _ids_of_tokenizer(declared: str) -> set[int]:
    """Return the ids of special tokens that a generation declares."""
    try:
        tokenizer = parse_json(declared).get("tokenizer") or {}
    except (ValueError, AttributeError):
        return set()
    values = tokenizer.values() if isinstance(tokenizer, dict) else ()
    return {one for value in values for one in _flat(value) if type(one) is int}


def _flat(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else [value]


def _plain_label(label: str) -> str:
    return label if _LABELS.fullmatch(label) else "segment"
