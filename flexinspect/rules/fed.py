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
from flexinspect.rules.fedborders import BorderCheck, BorderFault
from flexinspect.rules.fedfacts import PromptTokens
from flexinspect.rules.fedkinds import PROMPT_KINDS
from flexinspect.rules.fedmask import HeadBorders, find_borders
from flexinspect.rules.fedwords import is_complete
from flexinspect.rules.scene import RuleContext


class PromptRule(Rule):
    """Says where what was declared of a prompt is not what was fed, or not what the mask has."""

    name: ClassVar[str] = "fed"
    findings: ClassVar[Mapping[str, FindingKind]] = PROMPT_KINDS

    def __init__(self) -> None:
        self._borders: dict[str, tuple[HeadBorders, ...] | None] = {}
        """By fingerprint and for the whole run."""
        self._had_complete_prompt = False
        """Whether a generation had every piece; then one without them may be of another kind."""

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin with a prompt that nothing is said of."""
        super().on_generation_start(context)
        self._later_tokens: list[TokenRecord] = []
        self._prompt = PromptTokens.from_context(context)
        self._is_checked = not self._prompt.tokens
        self._border_check = BorderCheck(context, self._prompt)
        self._border_faults: dict[str, tuple[BorderFault, ...]] = {}

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return what is wrong with the prompt, once it is known, and with the step's masks."""
        if self._is_checked and step.q_len == 1:
            return ()
        found = []
        if not self._is_checked:
            found += self._read_prompt(step)
        if step.q_len > 1 and self._border_check.is_needed:
            found += self._check_masks(step)
        return found

    def on_generation_end(self) -> Sequence[Finding]:
        """Return what is wrong with a prompt that was not seen to be over."""
        return () if self._is_checked else self._check_prompt()

    def _read_prompt(self, step: StepRecord) -> list[Finding]:
        """Judge the prompt, unless pieces are missing that later forwards may still bring."""
        given = [token for token in step.tokens if token.step is None]
        if given:
            self._later_tokens += given
            self._prompt = PromptTokens.from_context(self.context, self._later_tokens)
        if is_complete(self._prompt) or (step.step > 0 and not given):
            return self._check_prompt()
        return []

    def _check_prompt(self) -> list[Finding]:
        self._is_checked = True
        found = list(
            fedsay.check_prompt(
                self.context, self._prompt, had_complete_prompt=self._had_complete_prompt
            )
        )
        self._had_complete_prompt |= bool(self._prompt.pieces) and is_complete(self._prompt)
        return found

    def _check_masks(self, step: StepRecord) -> Iterator[Finding]:
        by_mask: dict[str, list[CallRecord]] = {}
        for call in step.calls:
            if call.mask is not None:
                by_mask.setdefault(call.mask, []).append(call)
        verdicts: dict[BorderFault, list[CallRecord]] = {}
        for fingerprint, calls in by_mask.items():
            if fingerprint not in self._border_faults:
                self._border_faults[fingerprint] = tuple(self._check_mask(fingerprint))
            for verdict in self._border_faults[fingerprint]:
                verdicts.setdefault(verdict, []).extend(calls)
        for verdict, calls in verdicts.items():
            yield self._border_check.make_finding(step, verdict, calls)

    def _check_mask(self, fingerprint: str) -> Iterator[BorderFault]:
        mask = self.context.mask(fingerprint)
        if fingerprint not in self._borders:
            self._borders[fingerprint] = find_borders(mask) if mask is not None else None
        for part in self._borders[fingerprint] or ():
            verdict = self._border_check.check_mask(mask, part)
            if verdict is not None:
                yield verdict
