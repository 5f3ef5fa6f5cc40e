"""What the parts of torture report."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Failure(Struct, frozen=True, omit_defaults=True):
    """Something that should not happen: its kind, the facts, and what was done before."""

    kind: str
    detail: str
    how: str = ""
    argv: tuple[str, ...] = ()
    trace: str = ""


class Result(Struct, frozen=True):
    """What happened with a seed of a part; `failures` are `Failure`s as JSON."""

    part: str
    seed: int
    failures: list[dict[str, Any]]
    seconds: float = 0.0
