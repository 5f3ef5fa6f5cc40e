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
from flexinspect.rules.cachekinds import KINDS
from flexinspect.rules.cachelayers import CacheLayers
from flexinspect.rules.cachetexts import CacheTexts
from flexinspect.rules.scene import Scene
from flexinspect.rules.slots import STREAM, slot_findings


class CachesRule(Rule):
    """Follows the cache through the steps of one model, from one generation to the next.

    Of own code alone, as the cache of our own generation is ours; outside of models only slots of
    keys that were never filled are looked for.
    """

    name: ClassVar[str] = "caches"
    streams: ClassVar[tuple[str, ...]] = (STREAM,)
    loose: ClassVar[bool] = True
    findings: ClassVar[Mapping[str, FindingKind]] = KINDS

    def __init__(self) -> None:
        self._layers, self._texts = CacheLayers(), CacheTexts()

    def begin(self, scene: Scene) -> None:
        """Begin a generation; what earlier ones left in a cache stays known."""
        super().begin(scene)
        self._layers.begin()
        self._texts.begin(scene)

    def hear(self, event: EventRecord) -> Sequence[Finding]:
        """Take what is known of the cache that a generation goes on with."""
        self._texts.hear(event)
        return ()

    def look(self, step: StepRecord) -> Sequence[Finding]:
        """Return what is wrong with the cache around a step."""
        found = slot_findings(self.scene, step)
        if step.inputs is not None:
            found += self._layers.look(step, step.inputs)
            told = self._texts.look(step)
            if not self._layers.keeps_nothing:  # else it is what the tokens tell, too
                found += told
        return found

    def end(self) -> Sequence[Finding]:
        """Return what was computed again and again without a cache."""
        return () if self.scene.is_loose else self._texts.end()


RULE: type[Rule] = CachesRule
