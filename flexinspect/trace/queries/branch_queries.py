"""Queries about a branch: its declared mask, and which of its parents' keys it uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from flexinspect.masks.algebra import SPEC_FIELDS
from flexinspect.trace.queries.range_queries import lineage
from flexinspect.trace.query_results import GenerationRow
from flexinspect.trace.reader import Lineage, TraceReader

MASK_KEYS = frozenset({"preset", "separators", *SPEC_FIELDS, "mask_mod"})
"""The keys of a declaration that describe the declared mask."""


def generation_in_branch(reader: TraceReader, about: GenerationRow, branch: int) -> GenerationRow:
    """Return a generation with the mask that is declared in a branch: the one edited last."""
    if not branch:
        return about
    rows = {row.branch: row.change for row in reader.branches(about.generation)}
    for number, _, _ in lineage(reader, about.generation, branch):
        mask = rows.get(number, {}).get("declared")
        if isinstance(mask, Mapping):
            return replace(about, declared=with_declared_mask(about.declared, mask))
    return about


def with_declared_mask(declared: Mapping[str, Any], mask: Mapping[str, Any]) -> dict[str, Any]:
    """Return a declaration with another mask."""
    rest = {key: value for key, value in declared.items() if key not in MASK_KEYS}
    return {**rest, **mask}


def visible_lineage(reader: TraceReader, generation: int, branch: int, step: int) -> Lineage:
    """Return the part of a branch's lineage whose keys are in the cache at a step.

    A branch that recomputed all keys, under an edited mask, uses none of its parents' keys.
    """
    family = lineage(reader, generation, branch)
    if len(family) > 1:
        rows = reader.branches(generation)
        recomputed = {row.branch for row in rows if row.change.get("recomputed") is True}
        for index, (number, first, _) in enumerate(family):
            if number in recomputed and step >= first:
                return family[: index + 1]
    return family
