"""Recognises that memory ran out, from the exception that ended a program or a forward."""

from __future__ import annotations

import re
from typing import Any

from msgspec.structs import replace

from flexinspect.core.errors import is_out_of_memory
from flexinspect.records.finding import Finding
from flexinspect.records.step import EventRecord
from flexinspect.rules.engine import fill_from_kind, finding_kinds

OUT_OF_MEMORY = "memory.exhausted"
_KINDS = finding_kinds(OUT_OF_MEMORY)
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_REQUESTED = re.compile(r"tried to allocate ([\d.]+) ?(?:([kmgt]?)i?b|bytes)", re.IGNORECASE)
_FREE = re.compile(r"([\d.]+ [KMGT]?i?B) is free")


def out_of_memory_finding(event: EventRecord, generation: int = 0) -> Finding | None:
    """Return the finding of an event of kind "error", None if it is about something else.

    `generation` is that of the finding if the event has none. The amounts are those that torch
    names in its message; other libraries mostly name none.
    """
    if event.kind != "error" or not is_out_of_memory(event.text):
        return None
    lowered = event.text.lower()
    device = "the GPU" if "cuda" in lowered or "hip" in lowered else "this machine"
    device = "the GPU (MPS)" if "mps" in lowered else device
    evidence: dict[str, Any] = {"error": event.text}
    sentence = f"Memory of {device} ran out"
    if event.step is not None:
        sentence += f" in step {event.step}"
    if (requested := _REQUESTED.search(event.text)) is not None:
        number, unit = requested.groups()
        n_bytes = evidence["requested"] = int(float(number) * (1 << _UNITS[(unit or "").lower()]))
        sentence += f": a single tensor of {_binary(n_bytes)} was requested"
    if (free := _FREE.search(event.text)) is not None:
        sentence += f", and {free[1]} were free"
    kind = _KINDS[OUT_OF_MEMORY]
    found = Finding(OUT_OF_MEMORY, kind.severity, f"{sentence}.", evidence=evidence)
    place = generation if event.generation is None else event.generation
    return fill_from_kind(kind, replace(found, generation=place, step=event.step))


def _binary(n: int) -> str:
    """Return a size as torch writes it: "2.0 GiB"."""
    value, units = float(n), ("B", "KiB", "MiB", "GiB")
    for unit in units:
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
