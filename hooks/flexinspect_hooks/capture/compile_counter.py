"""Counting what torch.compile builds: one built anew in the middle of a run is a lost second."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from flexinspect_hooks.capture.step_clock import StepEvent

RECOMPILE_LIMIT = "recompile-limit"

_GUARDED_CODE = re.compile(r"([\w.\[\]'\"]+)\.__code__")
"""A function, as it is named in a guard that failed because it is other code."""

_MOD_GUARD_NAMES = {"mask_mod": ("mask_mod", "args[4]"), "score_mod": ("score_mod", "args[3]")}
"""How the rules of FlexAttention are named there, of a compiled call and of an uncompiled one."""


def graphs_built() -> int:
    """Return how many graphs torch.compile has built in this process; costs a look-up.

    The count is `unique_graphs` of dynamo's own counters (`torch/_dynamo/utils.py`); dynamo is not
    loaded for it.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


def _recompile_limit_count() -> int:
    """Return how often dynamo refused a function because of its recompile limit."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    refused = dynamo.counters.get("unimplemented") if dynamo is not None else None
    return sum(n for why, n in refused.items() if "recompile" in why[:40]) if refused else 0


class GraphCount:
    """Tells of every step whether graphs were built in it, and whether that was to be expected."""

    def __init__(self) -> None:
        self._built = graphs_built()
        self._limits = _recompile_limit_count()
        self._phases: set[str] = set()

    def on_step(self, phase: str) -> list[StepEvent]:
        """Return the events (kind, text, facts) of a step in which graphs were built.

        The first step of a phase compiles ("compiled"); any later one recompiles ("recompiled").
        A function that met its recompile limit, and is not compiled any more, has an event too. The
        facts say which functions were compiled and which guard made that necessary.
        """
        built, limits, first = graphs_built(), _recompile_limit_count(), phase not in self._phases
        self._phases.add(phase)
        new, self._built = built - self._built, built
        refused, self._limits = limits - self._limits, limits
        if new <= 0 and refused <= 0:
            return []
        facts = _newest_compilations(max(new, 0) + max(refused, 0))
        events: list[StepEvent] = []
        if new > 0:
            graphs = "graph" if new == 1 else "graphs"
            kind = "compiled" if first else "recompiled"
            events.append((kind, f"torch.compile built {new} {graphs}", {"graphs": new, **facts}))
        if refused > 0:
            text = "torch.compile met its recompile limit: what it compiled runs uncompiled now"
            events.append((RECOMPILE_LIMIT, text, facts))
        return events


def _newest_compilations(n: int) -> Mapping[str, Any]:
    """Return what dynamo says of its newest compilations: functions, and why the last was needed.

    Its own records (`get_compilation_metrics`); without them nothing is known.
    """
    facts: dict[str, Any] = {}
    with suppress(Exception):
        known = sys.modules["torch._dynamo.utils"].get_compilation_metrics()
        names = {_frame_id(one): one.co_name for one in known if one.co_name}
        found = known[-n:]
        # A compilation that was refused has no name of its own, but earlier ones of its function.
        facts["of"] = sorted({name for one in found if (name := names.get(_frame_id(one)))})
        if reason := _newest_reason(one.recompile_reason for one in found):
            facts["reason"] = reason
            if guarded := _GUARDED_CODE.search(reason):
                facts["guard"] = f"{_guarded_function(guarded[1])} code object"
    return facts


def _frame_id(metrics: Any) -> str:
    return str(metrics.compile_id).partition("/")[0]


def _guarded_function(name: str) -> str:
    """Return which function a guard's name means, its own last part where it is no rule."""
    for rule, names in _MOD_GUARD_NAMES.items():
        if any(each in name for each in names):
            return rule
    return name


def _newest_reason(reasons: Iterable[str | None]) -> str:
    """Return the newest reason, its first line without the comment behind it."""
    last = next((reason for reason in reversed(list(reasons)) if reason), "")
    return last.partition("\n")[0].partition("  #")[0].strip()
