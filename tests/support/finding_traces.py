"""Findings, and the tokens and segments of a trace that has them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from flexinspect.records.finding import Finding, Severity
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import TokenRecord

SEGMENTS = (Segment(0, 9, "generated", SegmentKind.GENERATED, 0),)
TOKENS = (
    TokenRecord(0, 1, "<s>", "", 0, 0, True),
    TokenRecord(1, 2, "Ċ", "\n", 1, 0),
    TokenRecord(2, 3, "x", "\x1b[31mred", 2, 0),
)


def found(
    id_: str, severity: Severity = Severity.ERROR, step: int | None = 0, **changes: Any
) -> Finding:
    """Return a finding whose sentence names its id."""
    return replace(Finding(id_, severity, f"{id_} is wrong.", step=step), **changes)


MANY = [
    *(found("mask.leak", step=n, layer=i) for n in range(3, 41) for i in range(28)),
    found("logits.flat", Severity.NOTE, 7),
    found("numbers.nan", Severity.WARNING, 2, layer=1, head=3),
    found("mask.empty-row", step=5, positions=(1, 2), evidence={"rows": 2, "worst": float("inf")}),
]
