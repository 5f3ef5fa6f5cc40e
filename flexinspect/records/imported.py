"""What a trace that was imported from another tool's dump holds, as its manifest says.

A rule, a panel or a report that needs other records has nothing to look at in such a trace. That
is not a fault of the run, and it must not look as if it had been checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

IMPORTED_KEY = "imported"
"""The fact of the manifest that has the fields of `ImportedFacts`."""

TOKENS, WORDS, CHOSEN = "tokens", "words", "chosen tokens"
POSITIONS, LOGITS, STATISTICS = "position ids", "logits", "layer statistics"
CALLS, MASKS, ATTENTION = "attention calls", "masks", "attention"
KERNELS, CACHE, BLOCKS = "kernel paths", "cache lengths", "block tables"
MEMORY, BATCHES, EVENTS = "memory", "batch inputs", "capture events"
GRADIENTS, TRAINING = "gradients", "training steps"

RECORD_KINDS = (
    *(TOKENS, WORDS, CHOSEN, POSITIONS, LOGITS, STATISTICS, CALLS, MASKS, ATTENTION),
    *(KERNELS, CACHE, BLOCKS, MEMORY, BATCHES, EVENTS, GRADIENTS, TRAINING),
)
"""The kinds of records that a rule may need and a dump may lack."""


class ImportedFacts(Struct, frozen=True):
    """Where an imported trace comes from: the source in words, its format and versions.

    `holds` are the `RECORD_KINDS` that it has. `notes` say what was left out, or how something was
    obtained that the source does not hold as such.
    """

    source: str
    format: str
    versions: Mapping[str, str] = {}
    holds: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def lacks(self, needed: Iterable[str]) -> tuple[str, ...]:
        """Return those of the needed kinds that the trace does not have."""
        return tuple(kind for kind in needed if kind not in self.holds)


def imported_facts(run: Mapping[str, Any]) -> ImportedFacts | None:
    """Return the facts of a manifest, None for a trace that flexinspect recorded itself."""
    facts = run.get(IMPORTED_KEY)
    if facts is None:
        return None
    try:
        return msgspec.convert(facts, ImportedFacts)
    except msgspec.ValidationError:  # of a newer build: nothing is known to be there
        return ImportedFacts("another tool", "unknown")
