"""What holds in a branch: the mask that is meant there, and how far back its keys go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flexinspect.trace.queries.range_queries import lineage
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.rows import GenerationRow

MASK_KEYS = frozenset({"preset", "separators", "starts", "head", "low", "rule"})
"""The keys of a declaration that say which mask is meant."""


def generation_in_branch(reader: TraceReader, about: GenerationRow, branch: int) -> GenerationRow:
    """Return a generation as it is declared in a branch: under the mask edited last."""
    if not branch:
        return about
    rows = {row.branch: row.change for row in reader.branches(about.generation)}
    for number, _, _ in lineage(reader, about.generation, branch):
        mask = rows.get(number, {}).get("declared")
        if isinstance(mask, Mapping):
            return replace(about, declared=with_declared_mask(about.declared, mask))
    return about


def with_declared_mask(declared: Mapping[str, Any], mask: Mapping[str, Any]) -> dict[str, Any]:
    """Return a declaration under another mask."""
    rest = {key: value for key, value in declared.items() if key not in MASK_KEYS}
    return {**rest, **mask}


def visible_lineage(
    reader: TraceReader, generation: int, branch: int, step: int
) -> list[tuple[int, int, int | None]]:
    """Return the lineage of a branch as far as the keys seen at a step go back.

    A branch that computed all keys anew, under an edited mask, sees none of its parents' ones.
    """
    family = lineage(reader, generation, branch)
    if len(family) > 1:
        anew = {r.branch for r in reader.branches(generation) if r.change.get("recomputed") is True}
        for at, (number, first, _) in enumerate(family):
            if number in anew and step >= first:
                return family[: at + 1]
    return family
