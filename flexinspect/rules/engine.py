"""The contract of a rule, and what runs rules over the steps of a trace as they come.

A rule is a class that takes no arguments. The built-in rules are listed in
`flexinspect.core.plugins`; others register in the entry-point group `flexinspect.rules`. One object
checks one run: records in, findings out, no I/O. Ordinary rules run for every step in the writer
thread, so a step without findings must cost microseconds. Rules with `offline_only` run over a
finished trace (see `flexinspect.analysis.offline_rules`).

A layer that fell back to another kernel has lost its mask, and a mask whose borders are off by one
leaks: each is said by a rule of its own, and both are true. The consequence names its cause, and
the cause is at least as bad as what follows from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from flexinspect.core import plugins
from flexinspect.records.finding import Finding, Repeat, Severity
from flexinspect.records.step import EventRecord, GenerationRecord, StepRecord
from flexinspect.records.token_gradients import GradientRecord
from flexinspect.rules.context import RuleContext


@dataclass(frozen=True, slots=True)
class FindingKind:
    """What an id stands for: its usual severity, its meaning in one line, and how to go on.

    `why` says why it matters, `confirm` how to see for oneself, `fix` what usually mends it: a
    sentence or two each, for findings that bring none of their own. `query` is the SQL that finds
    the evidence in the trace; {generation}, {branch}, {step} and {layer} stand for the finding's.
    Of one that `grows`, the words and numbers of the last time count, not those of the first.
    """

    severity: Severity
    meaning: str
    why: str = ""
    confirm: str = ""
    fix: str = ""
    query: str = ""
    keeps_latest: bool = False


class Rule:
    """Looks at the steps of one run, generation by generation, and says what is wrong.

    `scene` knows the generation, its words and the masks met so far, this step's included. What
    `look` finds again and again it may return each time with the same `series`: the book keeps the
    first and counts the rest.
    """

    name: ClassVar[str]
    findings: ClassVar[Mapping[str, FindingKind]]
    """Every id that this rule may return; others are refused."""
    offline_only: ClassVar[bool] = False
    """Whether it takes too long for a step of a running model."""
    handles_standalone_calls: ClassVar[bool] = False
    """Whether it also looks at calls of FlexAttention outside of any model."""
    streams: ClassVar[tuple[str, ...]] = ()
    """The streams of a step's `arrays` that it reads, "*" for all. A step that is read back from a
    trace has no others, as they may be large; masks have their cells without being named."""
    context: RuleContext

    def on_generation_start(self, context: RuleContext) -> None:
        """Forget the last generation; the steps of `scene.generation` come next."""
        self.context = context

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return what is wrong in a step. Steps come in order, each once."""
        return ()

    def on_event(self, event: EventRecord) -> Sequence[Finding]:
        """Return what an event means that belongs to no recorded step, such as a failed call.

        One that belongs to no generation may come before the first has begun.
        """
        return ()

    def on_gradients(self, gradients: GradientRecord) -> Sequence[Finding]:
        """Return what is wrong in the gradients of a token; they come after all steps."""
        return ()

    def on_generation_end(self) -> Sequence[Finding]:
        """Return what can be said only now that the generation is over."""
        return ()

    def finding(
        self,
        step: StepRecord,
        finding_id: str,
        sentence: str,
        *,
        severity: Severity | None = None,
        layers: Collection[int] = (),
        head: int | None = None,
        positions: Sequence[int] = (),
        evidence: Mapping[str, Any] | None = None,
        series: str = "",
    ) -> Finding:
        """Return a finding of a step, as bad as its kind unless `severity` says otherwise."""
        which = tuple(sorted(set(layers)))
        return Finding(
            id=finding_id,
            severity=severity or self.findings[finding_id].severity,
            sentence=sentence,
            generation=step.generation,
            branch=step.branch,
            step=step.step,
            layer=which[0] if which else None,
            head=head,
            positions=tuple(positions),
            evidence=dict(evidence or {}),
            layers=which if len(which) > 1 else (),
            series=series,
        )


class RuleRunner:
    """The rules of one run. A rule that raises is switched off, and an event says so."""

    def __init__(
        self,
        rules: Sequence[Rule] = (),
        *,
        is_standalone: bool = False,
        context: RuleContext | None = None,
        branch: int = 0,
    ) -> None:
        self._branch = branch
        self._rules = (
            [rule for rule in rules if rule.handles_standalone_calls]
            if is_standalone
            else list(rules)
        )
        self._is_standalone = is_standalone
        self._context = context or RuleContext()
        for rule in self._rules:  # an event may come before the first generation
            rule.context = self._context
        self._reported: set[tuple[int, int, str, str]] = set()
        kinds = [pair for rule in self._rules for pair in rule.findings.items()]
        self._ids_keeping_latest = frozenset(id_ for id_, kind in kinds if kind.keeps_latest)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the rules that look; those that failed are not among them."""
        return tuple(_rule_name(rule) for rule in self._rules)

    @property
    def streams(self) -> frozenset[str]:
        """The streams that these rules read."""
        return frozenset(stream for rule in self._rules for stream in rule.streams)

    def for_branch(self, branch: int) -> RuleRunner:
        """Return a book for a branch, with new objects of the same rules: they have seen nothing.

        One that cannot be made without arguments is left out.
        """
        made = []
        for rule in self._rules:
            with suppress(TypeError):
                made.append(type(rule)())
        return RuleRunner(made, is_standalone=self._is_standalone, branch=branch)

    def share_memory(self, memory: dict[str, Any]) -> None:
        """Let the rules remember in `memory`, which books of other models of the run have, too."""
        self._context.shared_memory = memory

    def on_generation_start(self, generation: GenerationRecord) -> tuple[EventRecord, ...]:
        """Begin a generation; returns the events of rules that failed at it."""
        self._context.start_generation(generation, is_standalone=self._is_standalone)
        if (
            not self._is_standalone
        ):  # a call outside of a model may go on with what is said of another
            self._reported.clear()
        where = f"the beginning of generation {generation.generation}"

        def begin(rule: Rule) -> Sequence[Finding]:
            rule.on_generation_start(self._context)
            return ()

        return self._call_rules(begin, where, None)[1]

    def on_step(self, step: StepRecord) -> StepRecord:
        """Return the step with its findings, and with an event for each rule that failed."""
        self._context.add_step(step)
        found, events = self._call_rules(lambda rule: rule.on_step(step), f"step {step.step}", step)
        if not found and not events:
            return step
        news, repeats = self._split_repeats(link_causes(found) if len(found) > 1 else found)
        return replace(
            step,
            findings=(*step.findings, *news),
            repeats=repeats,
            events=(*step.events, *events),
        )

    def replay_parent_step(self, step: StepRecord) -> tuple[EventRecord, ...]:
        """Show the rules a step of a parent, of which all was said there; returns who failed."""
        self._context.add_step(step)
        return self._call_rules(lambda rule: rule.on_step(step), f"step {step.step}", step)[1]

    def on_event(self, event: EventRecord) -> tuple[Sequence[Finding], tuple[EventRecord, ...]]:
        """Return what the rules make of an event outside of the steps, and who failed at it."""
        found, events = self._call_rules(
            lambda rule: rule.on_event(event), f"the event '{event.kind}'", None
        )
        return self._split_repeats(found)[0], events

    def on_gradients(
        self, gradients: GradientRecord
    ) -> tuple[Sequence[Finding], tuple[Repeat, ...], tuple[EventRecord, ...]]:
        """Return what the rules say of a token's gradients, old and new, and who failed at them."""
        where = f"the gradients of step {gradients.step}"
        found, events = self._call_rules(lambda rule: rule.on_gradients(gradients), where, None)
        return *self._split_repeats(found), events

    def on_generation_end(self) -> tuple[Sequence[Finding], tuple[EventRecord, ...]]:
        """Return what the rules say of the generation as a whole, and who failed at it."""
        found, events = self._call_rules(
            lambda rule: rule.on_generation_end(), "the end of a generation", None
        )
        return self._split_repeats(found)[0], events

    def _call_rules(
        self, call: Callable[[Rule], Sequence[Finding]], where: str, step: StepRecord | None
    ) -> tuple[list[Finding], tuple[EventRecord, ...]]:
        found: list[Finding] = []
        events: list[EventRecord] = []
        for rule in tuple(self._rules):
            try:
                new = call(rule)
                if new:
                    checked = map(self._with_branch, _validate_findings(rule, new))
                    found += [_fill_from_kind(rule, finding) for finding in checked]
            except Exception as error:
                events.append(self._disable_rule(rule, error, where, step))
        return found, tuple(events)

    def _with_branch(self, finding: Finding) -> Finding:
        """Return a finding with its branch: what is said of a generation is said of this one."""
        if finding.branch or not self._branch:
            return finding
        return replace(finding, branch=self._branch)

    def _split_repeats(self, found: Sequence[Finding]) -> tuple[list[Finding], tuple[Repeat, ...]]:
        """Split findings into new ones and those of a series that was told of before."""
        news, repeats = [], []
        for finding in found:
            key = (finding.generation, finding.branch, finding.id, finding.series)
            if finding.series and key in self._reported:
                repeats.append(self._make_repeat(finding))
                continue
            self._reported.add(key)
            news.append(finding)
        return news, tuple({(r.id, r.series): r for r in repeats}.values())

    def _make_repeat(self, finding: Finding) -> Repeat:
        here = self._context.generation.generation
        within = None if finding.generation == here else finding.generation
        if finding.id not in self._ids_keeping_latest:
            return Repeat(finding.id, finding.series, within)
        return Repeat(finding.id, finding.series, within, finding.sentence, finding.evidence)

    def _disable_rule(
        self, rule: Rule, error: Exception, where: str, step: StepRecord | None
    ) -> EventRecord:
        self._rules.remove(rule)
        what = f"{type(error).__name__}: {error}"
        text = f"The rule '{_rule_name(rule)}' failed at {where} and is off: {what}"
        generation = self._context.generation.generation
        number = None if step is None else step.step
        return EventRecord("rule-off", text, time.time(), generation, number)


def _rule_name(rule: Rule) -> str:
    return str(getattr(rule, "name", type(rule).__name__))


def _validate_findings(rule: Rule, found: Sequence[Any]) -> list[Finding]:
    """Return findings that the trace can hold. Raises `TypeError` for any other.

    A wrong one would take its whole step down with it when the step is written.
    """
    for finding in found:
        if not isinstance(finding, Finding) or not isinstance(finding.severity, Severity):
            raise TypeError(f"{type(finding).__name__} is no Finding with a Severity")
        if finding.id not in rule.findings:
            raise TypeError(f"the rule does not declare the finding {finding.id}")
    return list(found)


def _fill_from_kind(rule: Rule, finding: Finding) -> Finding:
    """Return a finding with its kind's words where it brings none of its own."""
    kind = rule.findings[finding.id]
    return replace(
        finding,
        why=finding.why or kind.why,
        confirm=finding.confirm or kind.confirm,
        fix=finding.fix or kind.fix,
        query=finding.query or _format_query(kind.query, finding),
    )


def _format_query(query: str, finding: Finding) -> str:
    """Return a kind's query for one finding. A place that it does not name becomes any."""
    return query.format(
        generation=finding.generation,
        branch=finding.branch,
        step="step" if finding.step is None else finding.step,
        layer="layer" if finding.layer is None else finding.layer,
    )


_PATH_FINDINGS = ("path.fallback", "path.unpatched-layer", "path.bypass")
_BORDER_FINDINGS = ("segments.shifted", "segments.drift", "segments.merged")

CAUSES: Mapping[str, tuple[str, ...]] = {
    "mask.not-applied": _PATH_FINDINGS,
    "mask.lost": (*_PATH_FINDINGS, *_BORDER_FINDINGS),
    "mask.leak": (*_PATH_FINDINGS, *_BORDER_FINDINGS),
    "mask.none": _PATH_FINDINGS,
    "mask.layers-differ": _PATH_FINDINGS,
}
"""By consequence, what may have caused it where both are about one layer of one step."""

_SEVERITY_ORDER = list(Severity)


def link_causes(found: Sequence[Finding]) -> list[Finding]:
    """Return findings of one step, consequences as notes that name what caused them."""
    out = list(found)
    for index, one in enumerate(found):
        at = _find_cause(one, found)
        if at is None or one.severity is Severity.NOTE:
            continue
        cause = out[at]
        if cause.severity is Severity.NOTE:
            continue
        worse = min(cause.severity, one.severity, key=_SEVERITY_ORDER.index)
        out[at] = replace(cause, severity=worse)
        said = f"{one.sentence} This follows from {cause.id}."
        evidence = {**one.evidence, "cause": cause.id}
        out[index] = replace(one, severity=Severity.NOTE, sentence=said, evidence=evidence)
    return out


def _find_cause(one: Finding, found: Sequence[Finding]) -> int | None:
    """Return where the cause of a finding stands, None where there is none."""
    causes = CAUSES.get(one.id, ())
    for index, other in enumerate(found):
        if other.id in causes and _finding_layers(one) & _finding_layers(other):
            return index
    return None


def _finding_layers(finding: Finding) -> set[int | None]:
    return set(finding.layers) or {finding.layer}


@dataclass(frozen=True, slots=True)
class LoadedRules:
    """The registered rules, by name; `failed` says why some of them could not be made."""

    rules: tuple[Rule, ...]
    failed: dict[str, str]

    @property
    def finding_kinds(self) -> dict[str, FindingKind]:
        """What each id stands for, ids in order."""
        return finding_kinds_of(self.rules)


def load_rules() -> LoadedRules:
    """Return new objects of all registered rules, in the order of their plug-in names."""
    classes, failed = plugins.load_all(plugins.RULES)
    rules: list[Rule] = []
    for name, make in classes.items():
        try:
            rules.append(make())
        except Exception as error:
            failed[name] = f"It could not be made: {type(error).__name__}: {error}"
    return LoadedRules(tuple(rules), failed)


def finding_kinds_of(rules: Iterable[Rule]) -> dict[str, FindingKind]:
    """Return what the ids of some rules stand for, ids in order."""
    found = {id_: kind for rule in rules for id_, kind in rule.findings.items()}
    return dict(sorted(found.items()))
