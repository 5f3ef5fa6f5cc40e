"""Counting what torch.compile builds: one built anew in the middle of a run is a lost second."""

from __future__ import annotations

import sys


def graphs_built() -> int:
    """Return how many graphs torch.compile has built in this process; costs a look-up.

    The count is `unique_graphs` of dynamo's own counters (`torch/_dynamo/utils.py`); dynamo is not
    loaded for it.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


class GraphCount:
    """Tells of every step whether graphs were built in it, and whether that was to be expected."""

    def __init__(self) -> None:
        self._built = graphs_built()
        self._phases: set[str] = set()

    def look(self, phase: str) -> tuple[str, str] | None:
        """Return an event (kind, text) for a step in which graphs were built.

        The first step of a phase compiles ("compiled"); any later one recompiles ("recompiled").
        """
        built, first = graphs_built(), phase not in self._phases
        self._phases.add(phase)
        new, self._built = built - self._built, built
        if new <= 0:
            return None
        graphs = "graph" if new == 1 else "graphs"
        return ("compiled" if first else "recompiled", f"torch.compile built {new} {graphs}")
