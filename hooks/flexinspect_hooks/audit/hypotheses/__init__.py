"""Hypotheses: faults that are tried on the reference until one gives the program's numbers.

A hypothesis is a function that takes a `FaultProbe` and yields `ForwardEdit`s, each with a sentence
that completes "the numbers are those of a forward …". It yields nothing where it cannot apply.
Plug-ins of the group `flexinspect.hypotheses` are such functions, or tuples of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from flexinspect.core import plugins
from flexinspect_hooks.audit.forward.forward_edits import ForwardEdit
from flexinspect_hooks.audit.hypotheses.probe import FaultProbe

Hypothesis = Callable[[FaultProbe], Iterable[ForwardEdit]]


def load_hypotheses() -> tuple[list[Hypothesis], dict[str, str]]:
    """Return all registered hypotheses, and for each plug-in that failed to load its error."""
    loaded, failed = plugins.load_all(plugins.HYPOTHESES)
    functions: list[Hypothesis] = []
    for one in loaded.values():
        functions += one if isinstance(one, tuple | list) else (one,)
    return functions, failed


def edits_of(hypotheses: Iterable[Hypothesis], probe: FaultProbe) -> Iterator[ForwardEdit]:
    """Yield the edits of all hypotheses; one that raises is left out."""
    for hypothesis in hypotheses:
        try:
            yield from hypothesis(probe)
        except (AttributeError, TypeError, ValueError, RuntimeError, IndexError):
            continue  # it does not fit this architecture
