"""The key-value cache: left empty, lost, filled twice, used by another prompt, or not used at all.

What a cache holds is compared with what was fed and with how many keys the attention calls really
got: windows, crops after rejected drafts and caches that forget on purpose are no faults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from flexinspect.findings import Finding
from flexinspect.records import EventRecord, StepRecord
from flexinspect.rules.base import FindingKind, Rule
from flexinspect.rules.cachekinds import CACHE_KINDS
from flexinspect.rules.cachelayers import CacheLayerTracker
from flexinspect.rules.cachetexts import CacheTextTracker
from flexinspect.rules.scene import RuleContext
from flexinspect.rules.slots import SLOT_STREAM, check_slots


class CacheRule(Rule):
    """Follows the cache through the steps of one model, from one generation to the next.

    Of own code alone, as the cache of our own generation is ours; outside of models only slots of
    keys that were never filled are looked for.
    """

    name: ClassVar[str] = "caches"
    streams: ClassVar[tuple[str, ...]] = (SLOT_STREAM,)
    handles_standalone_calls: ClassVar[bool] = True
    findings: ClassVar[Mapping[str, FindingKind]] = CACHE_KINDS

    def __init__(self) -> None:
        self._layers, self._texts = CacheLayerTracker(), CacheTextTracker()

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin a generation; what earlier ones left in a cache stays known."""
        super().on_generation_start(context)
        self._layers.on_generation_start()
        self._texts.on_generation_start(context)

    def on_event(self, event: EventRecord) -> Sequence[Finding]:
        """Take what is known of the cache that a generation goes on with."""
        self._texts.on_event(event)
        return ()

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return what is wrong with the cache around a step."""
        found = check_slots(self.context, step)
        if step.inputs is not None:
            found += self._layers.on_step(step, step.inputs)
            told = self._texts.on_step(step)
            if not self._layers.is_always_empty:  # else it is what the tokens tell, too
                found += told
        return found

    def on_generation_end(self) -> Sequence[Finding]:
        """Return what was computed again and again without a cache."""
        return () if self.context.is_standalone else self._texts.on_generation_end()
