"""Queries of the sequence as a whole (length, tokens, text search), and counters of a trace."""

from __future__ import annotations

from flexinspect.records.step import TokenRecord
from flexinspect.trace import codec, schema
from flexinspect.trace.queries.range_queries import lineage
from flexinspect.trace.query_results import EventRow
from flexinspect.trace.reader import Lineage, TraceReader
from flexinspect.trace.schema import OPEN_END, WHERE_BRANCH


def token_ranges(trace: TraceReader, generation: int, branch: int = 0) -> Lineage:
    """Return (branch, first position, position after the last) of the parts of a sequence.

    Oldest parent first; the branch itself comes last and may still grow (None). A parent's tokens
    end where the first own step of its fork chose one.
    """
    parts: list[tuple[int, int, int | None]] = []
    start = 0
    family = lineage(trace, generation, branch)
    for (number, _, _), (fork, step, _) in zip(family[:0:-1], family[-2::-1], strict=True):
        row = trace.step(generation, step, fork) or trace.step(generation, step, number)
        stop = None if row is None else row.first_pos
        parts.append((number, start, stop))
        start = start if stop is None else stop
    return (*parts, (branch, start, None))


def read_tokens(
    trace: TraceReader,
    generation: int,
    branch: int = 0,
    start: int = 0,
    stop: int | None = None,
    *,
    limit: int = -1,
) -> list[TokenRecord]:
    """Return the tokens at `start <= pos < stop` (None: to the end), parents' before the fork."""
    found: list[TokenRecord] = []
    for number, first, end in token_ranges(trace, generation, branch):
        low = max(start, first)
        high = end if stop is None else stop if end is None else min(stop, end)
        left = limit - len(found) if limit >= 0 else -1
        if left and (high is None or low < high):
            found += trace.tokens(generation, number, low, high, limit=left)
    return found


def last_pos(trace: TraceReader, generation: int, branch: int = 0) -> int | None:
    """Return the highest position recorded so far, None when there is none."""
    sql = f"SELECT pos FROM tokens {WHERE_BRANCH} AND pos < ? ORDER BY pos DESC LIMIT 1"
    for number, _, stop in reversed(token_ranges(trace, generation, branch)):
        found = trace._read_int(sql, (generation, number, OPEN_END if stop is None else stop))
        if found is not None:
            return found
    return None


def n_generations(trace: TraceReader) -> int:
    """Return the number of generations recorded so far."""
    sql = "SELECT generation FROM generations ORDER BY generation DESC LIMIT 1"
    last = trace._read_int(sql)
    return 0 if last is None else last + 1


def n_steps_and_findings(trace: TraceReader) -> tuple[int, int]:
    """Return how many steps and how many findings are recorded so far."""
    sql = "SELECT (SELECT count(*) FROM steps), (SELECT count(*) FROM findings)"
    ((steps, findings),) = trace._query(sql)
    return int(steps), int(findings)


def find_text(
    trace: TraceReader,
    text: str,
    generation: int,
    branch: int = 0,
    *,
    after: int = -1,
    only_generated: bool = False,
) -> tuple[int, int | None] | None:
    """Return (position, step that chose it) of the next token whose text contains `text`.

    The case of ASCII letters is ignored. The search begins after the position `after` and wraps
    around; None when no token matches.
    """
    chosen = " AND step IS NOT NULL" if only_generated else ""
    sql = (
        f"SELECT pos, step FROM tokens {WHERE_BRANCH} AND pos >= ? AND pos < ? "
        f"AND (instr(lower(text), lower(?)) OR token = ?){chosen} ORDER BY pos LIMIT 1"
    )
    parts = token_ranges(trace, generation, branch)
    for low, high in ((after + 1, OPEN_END), (0, after + 1)):
        for number, first, end in parts:
            span = (max(low, first), high if end is None else min(high, end))
            params = (generation, number, *span, text, text)
            for pos, step in trace._read_values(("int", "int?"), sql, params, "tokens"):
                return pos, step
    return None


def newest_events(trace: TraceReader, kind: str, after_id: int, limit: int) -> list[EventRow]:
    """Return the newest events of a kind whose number is above `after_id`, in order."""
    rest = "WHERE kind = ? AND event > ? ORDER BY event DESC LIMIT ?"
    return trace._select(codec.decode_event, schema.EVENTS, rest, (kind, after_id, limit))[::-1]


def last_output(trace: TraceReader) -> int | None:
    """Return the number of the newest piece of output, None when the program printed nothing."""
    return trace._read_int("SELECT number FROM output ORDER BY number DESC LIMIT 1")
