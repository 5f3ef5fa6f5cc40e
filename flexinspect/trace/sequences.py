"""Questions about the sequence as a whole: its length, and where a text occurs in it."""

from __future__ import annotations

from flexinspect.trace import decode, schema
from flexinspect.trace.queries import BRANCH, Queries
from flexinspect.trace.rows import EventRow


def last_pos(trace: Queries, generation: int, branch: int = 0) -> int | None:
    """Return the highest position recorded so far, None when there is none."""
    sql = f"SELECT pos FROM tokens {BRANCH} ORDER BY pos DESC LIMIT 1"
    return trace._number(sql, (generation, branch))


def n_generations(trace: Queries) -> int:
    """Return the number of generations recorded so far."""
    sql = "SELECT generation FROM generations ORDER BY generation DESC LIMIT 1"
    last = trace._number(sql)
    return 0 if last is None else last + 1


def n_steps_and_findings(trace: Queries) -> tuple[int, int]:
    """Return how many steps and how many findings are recorded so far."""
    ((steps, findings),) = trace._query(
        "SELECT (SELECT count(*) FROM steps), (SELECT count(*) FROM findings)", ()
    )
    return int(steps), int(findings)


def find_text(
    trace: Queries,
    text: str,
    generation: int,
    branch: int = 0,
    *,
    after: int = -1,
    only_generated: bool = False,
) -> tuple[int, int | None] | None:
    """Return (position, step that chose it) of the next token that holds `text`.

    Letters count without their case, where SQLite knows it (ASCII). The search begins after the
    position `after` and goes on from the start; None when no token holds it.
    """
    chosen = " AND step IS NOT NULL" if only_generated else ""
    sql = (
        f"SELECT pos, step FROM tokens {BRANCH} AND pos {{}} ? "
        f"AND (instr(lower(text), lower(?)) OR token = ?){chosen} ORDER BY pos LIMIT 1"
    )
    for part, start in ((">", after), ("<=", after)):
        params = (generation, branch, start, text, text)
        rows = trace._query(sql.format(part), params)
        if rows:
            pos, step = rows[0]
            return trace._guard(decode.whole, pos), step if type(step) is int else None
    return None


def newest_events(trace: Queries, kind: str, after_id: int, limit: int) -> list[EventRow]:
    """Return the newest events of a kind whose number is above `after_id`, in order."""
    rest = "WHERE kind = ? AND event > ? ORDER BY event DESC LIMIT ?"
    return trace._records(decode.event, schema.EVENTS, rest, (kind, after_id, limit))[::-1]


def last_output(trace: Queries) -> int | None:
    """Return the number of the newest piece of output, None when the program printed nothing."""
    return trace._number("SELECT number FROM output ORDER BY number DESC LIMIT 1")
