"""Reading what is said about a run: by rules, by capture, and by the program itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flexinspect.findings import Finding
from flexinspect.trace import decode, schema
from flexinspect.trace.connections import ReviewKey
from flexinspect.trace.encode import Statement
from flexinspect.trace.queries import TraceQueries, place_condition
from flexinspect.trace.rows import EventRow, FindingRow, OutputRow


class FindingQueries(TraceQueries):
    """The questions about findings, reviews, events and output."""

    def findings(
        self, generation: int | None = None, step: int | None = None, branch: int = 0
    ) -> list[Finding]:
        """Return what the rules said, in order: all, of one branch, or of one step of it."""
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
    ) -> list[FindingRow]:
        """Return findings with their numbers, from above `after_id` on, at most `limit`."""
        where, params = place_condition(generation, branch, step)
        rest = f"{where or 'WHERE true'} AND finding > ? ORDER BY finding LIMIT ?"
        return self._records(
            decode.decode_finding, schema.FINDINGS, rest, [*params, after_id, limit]
        )

    def reviews(self) -> list[tuple[str, int]]:
        """Return which rules have looked at which generations after these were recorded."""
        rows = self._select(schema.REVIEWS, "ORDER BY rule, generation")
        return [(str(row[0]), int(row[1])) for row in rows]

    def add_reviews(self, reviews: Mapping[ReviewKey, Sequence[Statement]]) -> None:
        """Let this reader say more findings, events and reviews than its file holds.

        `reviews` are by rule and generation what would write them; the file stays as it is, and
        what it holds by then of the same rule and generation counts.
        """
        self._connections.add_overlay(reviews)
        self._added = True

    def remove_added_reviews(self) -> None:
        """Say again what the file holds, and nothing of what was added."""
        self._connections.remove_overlay()

    def events(
        self,
        after_id: int = 0,
        *,
        generation: int | None = None,
        step: int | None = None,
        limit: int = -1,
    ) -> list[EventRow]:
        """Return events whose number is above `after_id`, in order.

        All of them, or those of a generation or of one step of it; at most `limit`.
        """
        where = [("event", after_id), ("generation", generation), ("step", step)]
        used = [(name, value) for name, value in where if value is not None]
        tests = " AND ".join(f"{name} {'>' if name == 'event' else '='} ?" for name, _ in used)
        params = [*(value for _, value in used), limit]
        rest = f"WHERE {tests} ORDER BY event LIMIT ?"
        return self._records(decode.decode_event, schema.EVENTS, rest, params)

    def output(self, after_id: int = 0, *, limit: int = -1) -> list[OutputRow]:
        """Return what the program printed, pieces with numbers above `after_id`, in order."""
        rest = "WHERE number > ? ORDER BY number LIMIT ?"
        return self._records(decode.decode_output, schema.OUTPUT, rest, (after_id, limit))
