"""Caches that a program put together from rows of earlier steps, as by eviction or joining."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexinspect.core.text import plural
from flexinspect.records import imported
from flexinspect.records.step import EventRecord
from flexinspect.rules.engine import Findings, Rule, finding_kinds

ORIGINS_EVENT = "cache-origins"
"""The event of a step with such a cache; docs/trace-format.md has its data."""
OTHER_VALUES, MOVED_KEYS = "cache.other-values", "cache.moved-keys"


class AssembledCacheRule(Rule):
    """Reports rows whose value is of another token than their key, and keys at wrong positions."""

    name = "assembled_cache"
    needs = (imported.EVENTS,)
    findings = finding_kinds(OTHER_VALUES, MOVED_KEYS)

    def on_event(self, event: EventRecord) -> Findings:
        """Check an event of a step."""
        if event.kind != ORIGINS_EVENT:
            return
        data = event.data
        id_ = OTHER_VALUES if data["pattern"] == "other-values" else MOVED_KEYS
        sentence = _SENTENCES[str(data["pattern"])](data)
        yield self.finding(
            event, id_, f"{sentence}.", (int(data["layer"]),), data, series=str(data["pattern"])
        )


def _other_values(data: Mapping[str, Any]) -> str:
    return (
        f"In the cache that step {data['step']} reads, {data['n']} of {data['total']} values are "
        f"of other tokens than their keys: row {data['row']} has the key of position "
        f"{data['key_position']} and the value of position {data['value_position']}"
    )


def _moved(data: Mapping[str, Any]) -> str:
    row, now, due = (int(data[name]) for name in ("row", "position", "before"))
    due += 1
    effect = f"position {due} is free" if now > due else f"position {now} is taken twice"
    more = int(data["n_breaks"]) - 1
    places = f" ({plural(more, 'more such place')})" if more else ""
    return (
        f"In the cache that step {data['step']} reads, keys were moved to other positions, but not "
        f"to those of their place: from row {row} on they were moved by {data['shift']}, so row "
        f"{row} has position {now} after {due - 1}, and {effect}{places}; the last key has "
        f"position {data['last']}"
    )


def _base(data: Mapping[str, Any]) -> str:
    return (
        f"In the cache that step {data['step']} reads, {data['n']} of {data['total']} keys were "
        f"moved with RoPE of base {data['base']:,.0f}, first by {data['shift']} positions in row "
        f"{data['row']}: the model's base is {data['own']:,.0f}"
    )


_SENTENCES = {"other-values": _other_values, "moved": _moved, "base": _base}
