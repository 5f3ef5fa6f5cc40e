"""Counts the graphs that torch.compile builds: a recompilation during a run costs seconds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from flexinspect.core.text import plural
from flexinspect_hooks.capture.step_clock import StepEvent
from flexinspect_hooks.python_internals.torch_private import compilation_metrics, dynamo_counters

RECOMPILE_LIMIT = "recompile-limit"

_GUARDED_CODE = re.compile(r"([\w.\[\]'\"]+)\.__code__")
"""The name of a function in a guard that failed because the function's code is another."""

_GUARDED_MODS = (("mask_mod", "args[4]"), ("score_mod", "args[3]"))
"""Names of mask_mod and score_mod in guards: of a compiled call, and of an uncompiled one."""


def _read_counters() -> tuple[int, int]:
    """Return how many graphs dynamo built, and how many it refused, without loading dynamo."""
    refused = dynamo_counters("unimplemented")
    limits = sum(n for reason, n in refused.items() if "recompile" in reason[:40])
    return dynamo_counters("stats").get("unique_graphs", 0), limits


class GraphCount:
    """Compares the counters of dynamo before and after each step."""

    def __init__(self) -> None:
        self._counters = _read_counters()
        self._phases: set[str] = set()

    def on_step(self, phase: str) -> list[StepEvent]:
        """Return the events (kind, text, facts) of a step in which graphs were built.

        The first step of a phase compiles ("compiled"); any later one recompiles ("recompiled").
        A function that reached its recompile limit, and is not compiled any more, has an event too.
        The facts name the functions that were compiled and the guard that failed.
        """
        before, self._counters = self._counters, _read_counters()
        new, refused = (now - then for now, then in zip(self._counters, before, strict=True))
        first = phase not in self._phases
        self._phases.add(phase)
        if new <= 0 and refused <= 0:
            return []
        facts = _newest_compilations(max(new, 0) + max(refused, 0))
        events: list[StepEvent] = []
        if new > 0:
            kind, text = "compiled" if first else "recompiled", plural(new, "graph")
            events.append((kind, f"torch.compile built {text}", {"graphs": new, **facts}))
        if refused > 0:
            text = "torch.compile reached its recompile limit: the function runs uncompiled now"
            events.append((RECOMPILE_LIMIT, text, facts))
        return events


def _newest_compilations(n: int) -> Mapping[str, Any]:
    """Return the functions of the newest compilations and the last reason; empty if unknown."""
    facts: dict[str, Any] = {}
    with suppress(Exception):
        metrics = compilation_metrics()
        names = {_frame_id(entry): entry.co_name for entry in metrics if entry.co_name}
        newest = metrics[-n:]
        # A compilation that was refused has no name, but earlier ones of the same function do.
        facts["of"] = sorted({name for entry in newest if (name := names.get(_frame_id(entry)))})
        reasons = [entry.recompile_reason for entry in newest if entry.recompile_reason]
        if reasons:  # of the newest the first line, without the comment at its end
            reason = reasons[-1].partition("\n")[0].partition("  #")[0].strip()
            facts["reason"] = reason
            if guarded := _GUARDED_CODE.search(reason):
                name = guarded[1]
                mods = (mod for mod, argument in _GUARDED_MODS if mod in name or argument in name)
                facts["guard"] = f"{next(mods, name)} code object"
    return facts


def _frame_id(metrics: Any) -> str:
    return str(metrics.compile_id).partition("/")[0]
