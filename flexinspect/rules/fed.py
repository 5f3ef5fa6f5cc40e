"""What was fed against what was declared: shifted, lost, shared or mistaken pieces of a prompt.

The words are looked at once per generation, when its prompt is known, and each mask of several rows
once in a run: its borders against those of the declared segments. A decode step costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from flexinspect.findings import Finding
from flexinspect.records import CallRecord, StepRecord, TokenRecord
from flexinspect.rules import fedsay
from flexinspect.rules.base import FindingKind, Rule
from flexinspect.rules.fedborders import BorderCheck, Verdict
from flexinspect.rules.fedfacts import Fed
from flexinspect.rules.fedkinds import KINDS
from flexinspect.rules.fedmask import HeadBorders, find_borders
from flexinspect.rules.fedwords import is_complete
from flexinspect.rules.scene import Scene


class FedRule(Rule):
    """Says where what was declared of a prompt is not what was fed, or not what the mask has."""

    name: ClassVar[str] = "fed"
    findings: ClassVar[Mapping[str, FindingKind]] = KINDS

    def __init__(self) -> None:
        self._borders: dict[str, tuple[HeadBorders, ...] | None] = {}
        """By fingerprint and for the whole run."""
        self._seen_whole = False
        """Whether a generation had every piece; then one without them may be of another kind."""

    def begin(self, scene: Scene) -> None:
        """Begin with a prompt that nothing is said of."""
        super().begin(scene)
        self._given: list[TokenRecord] = []
        self._fed = Fed.of(scene)
        self._is_judged = not self._fed.tokens
        self._check = BorderCheck(scene, self._fed)
        self._verdicts: dict[str, tuple[Verdict, ...]] = {}

    def look(self, step: StepRecord) -> Sequence[Finding]:
        """Return what is wrong with the prompt, once it is known, and with the step's masks."""
        if self._is_judged and step.q_len == 1:
            return ()
        found = []
        if not self._is_judged:
            found += self._read(step)
        if step.q_len > 1 and self._check.is_needed:
            found += self._compare(step)
        return found

    def end(self) -> Sequence[Finding]:
        """Return what is wrong with a prompt that was not seen to be over."""
        return () if self._is_judged else self._judge()

    def _read(self, step: StepRecord) -> list[Finding]:
        """Judge the prompt, unless pieces are missing that later forwards may still bring."""
        given = [token for token in step.tokens if token.step is None]
        if given:
            self._given += given
            self._fed = Fed.of(self.scene, self._given)
        if is_complete(self._fed) or (step.step > 0 and not given):
            return self._judge()
        return []

    def _judge(self) -> list[Finding]:
        self._is_judged = True
        found = list(fedsay.about_words(self.scene, self._fed, is_other=self._seen_whole))
        self._seen_whole |= bool(self._fed.pieces) and is_complete(self._fed)
        return found

    def _compare(self, step: StepRecord) -> Iterator[Finding]:
        by_mask: dict[str, list[CallRecord]] = {}
        for call in step.calls:
            if call.mask is not None:
                by_mask.setdefault(call.mask, []).append(call)
        verdicts: dict[Verdict, list[CallRecord]] = {}
        for fingerprint, calls in by_mask.items():
            if fingerprint not in self._verdicts:
                self._verdicts[fingerprint] = tuple(self._judged(fingerprint))
            for verdict in self._verdicts[fingerprint]:
                verdicts.setdefault(verdict, []).extend(calls)
        for verdict, calls in verdicts.items():
            yield self._check.finding(step, verdict, calls)

    def _judged(self, fingerprint: str) -> Iterator[Verdict]:
        mask = self.scene.mask(fingerprint)
        if fingerprint not in self._borders:
            self._borders[fingerprint] = find_borders(mask) if mask is not None else None
        for part in self._borders[fingerprint] or ():
            verdict = self._check.judge(mask, part)
            if verdict is not None:
                yield verdict


RULE: type[Rule] = FedRule
