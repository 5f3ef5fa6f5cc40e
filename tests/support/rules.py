"""Rules for tests: an offline one, one that reports at the end, one that fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import EventRecord, StepRecord
from flexinspect.rules.engine import FindingKind, Rule

QUERY = "SELECT * FROM steps WHERE generation = {generation} AND step = {step}"


class Slow(Rule):
    """Names every step of which a token is longer than three letters; an offline rule."""

    name: ClassVar[str] = "slow"
    findings: ClassVar = {
        "slow.long-token": FindingKind(
            *(Severity.WARNING, "a token is long", "It matters.", "Count.", "Cut it.", QUERY)
        ),
        "slow.never": FindingKind(Severity.NOTE, "what is never found"),
    }
    offline_only: ClassVar[bool] = True
    streams: ClassVar[tuple[str, ...]] = ("attention.lse",)

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        assert [array.stream for array in step.arrays] == ["attention.lse"]
        long = [token for token in step.tokens if len(token.text) > 3]
        return [
            Finding(
                *("slow.long-token", Severity.WARNING, f"“{token.text}” is long."),
                generation=step.generation,
                branch=step.branch,
                step=step.step,
                positions=(token.pos,),
                evidence={"letters": len(token.text), "odds": float("nan")},
                series="long",
            )
            for token in long
        ]


class Late(Rule):
    """Reports the number of steps and the events, at the end."""

    name: ClassVar[str] = "late"
    findings: ClassVar = {"late.end": FindingKind(Severity.NOTE, "how much there was")}

    def on_generation_start(self, context: object) -> None:
        super().on_generation_start(context)  # type: ignore[arg-type]
        self.steps: list[int] = []
        self.events: list[str] = []

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        self.steps.append(step.step)
        return ()

    def on_event(self, event: EventRecord) -> Sequence[Finding]:
        self.events.append(f"{event.text} after {self.steps[-1:]}")
        return ()

    def on_generation_end(self) -> Sequence[Finding]:
        sentence = f"{len(self.steps)} steps, heard {self.events}"
        number = self.context.generation.generation
        return [Finding("late.end", Severity.NOTE, sentence, generation=number)]


class Broken(Rule):
    """Fails at step 2."""

    name: ClassVar[str] = "broken"
    findings: ClassVar = {"broken.id": FindingKind(Severity.ERROR, "never reported")}
    offline_only: ClassVar[bool] = True

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        if step.step == 2:
            raise ValueError("no such thing")
        return ()
