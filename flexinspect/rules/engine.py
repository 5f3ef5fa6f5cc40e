"""The rule interface, the runner that applies rules to steps, and the catalog of rules.

A rule is a class that takes no arguments, listed in `flexinspect.core.plugins` or registered in the
entry-point group `flexinspect.rules`. One object checks one run: records in, findings out, no I/O.
Ordinary rules run for every step in the writer thread, so a step without findings must cost
microseconds; rules with `offline_only` run over a finished trace.
"""

from __future__ import annotations

import fnmatch
import time
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain, islice
from operator import methodcaller
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, NamedTuple

from msgspec import Struct, convert
from msgspec.structs import replace

from flexinspect.core import plugins
from flexinspect.core.text import MAX_LISTED_POSITIONS
from flexinspect.records.finding import Finding, Repeat, Severity
from flexinspect.records.step import EventRecord, GenerationRecord, GradientRecord, StepRecord
from flexinspect.rules import paged_keys
from flexinspect.rules.context import RuleContext

Findings = Iterator[Finding]


class FindingKind(Struct, frozen=True):
    """Severity and explanation of one finding id. A single finding may bring its own.

    `varies` says when the severity is another one: "warning if ...", "" if it never is.
    `meaning` says in one line what the id stands for. `why` it matters, how to `confirm` it by hand
    and the usual `fix` are one or two sentences. `query` is the SQL that selects the evidence from
    the trace; {generation}, {branch}, {step} and {layer} are replaced by those of the finding. With
    `keeps_latest`, a repeated finding keeps the sentence and evidence of its last occurrence.
    """

    severity: Severity
    meaning: str
    why: str = ""
    confirm: str = ""
    fix: str = ""
    query: str = ""
    keeps_latest: bool = False
    varies: str = ""

    @property
    def severities(self) -> str:
        """The usual severity, and when it is another one: `note; warning if ...`."""
        return f"{self.severity}; {self.varies}" if self.varies else str(self.severity)


@cache
def _read_findings_file() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("findings.toml").read_text(encoding="utf-8"))


def finding_kinds(*ids: str) -> dict[str, FindingKind]:
    """Return the kinds of these ids, or patterns like `cache.*`, that `findings.toml` describes."""
    described = _read_findings_file()
    names = chain.from_iterable(fnmatch.filter(described, name) or (name,) for name in ids)
    kinds = {id_: described[id_] for id_ in names}
    complete = {id_: {**kind, "query": _find_query(kind["query"])} for id_, kind in kinds.items()}
    return convert(complete, dict[str, FindingKind])


def _find_query(query: str) -> str:
    """Return the query that `findings.toml` has under a name; any other text is the query."""
    sql: str = _read_findings_file()["queries"].get(query, query)
    return sql


PACKED_REQUESTS_EVENT = "packed-requests"  # a forward of continuous batching


class Rule:
    """Base class of a rule: checks the steps of one run, generation by generation.

    `context` holds the generation, its tokens and the masks executed so far, including those of the
    current step. A rule may return the same finding at every step with the same `series`: the
    runner keeps the first and counts the others.
    """

    name: ClassVar[str]
    findings: ClassVar[Mapping[str, FindingKind]]
    """Every id that this rule may return; the runner rejects others."""
    offline_only: ClassVar[bool] = False  # whether the rule is too slow to run beside the model
    handles_standalone_calls: ClassVar[bool] = False
    """Whether the rule also checks standalone calls of FlexAttention (outside of any model)."""
    handles_packed_requests: ClassVar[bool] = False
    """Whether the rule also checks forwards of continuous batching, with rows of several texts."""
    needs: ClassVar[tuple[str, ...]] = ()
    """The kinds of records without which the rule has nothing to check, of
    `flexinspect.records.imported.RECORD_KINDS`. It does not run on an imported trace, nor on a
    training, that lacks one."""
    streams: ClassVar[tuple[str, ...]] = ()
    """The streams of a step's `arrays` that the rule reads, "*" for all. A step that is read back
    from a trace has no others, because they may be large. Mask cells are always there."""
    context: RuleContext

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin a generation, whose steps follow; see `reset`."""
        self.context = context
        self.reset()

    def reset(self) -> None:
        """Reset the state of the last generation; `context.generation` is the new one."""

    def on_step(self, step: StepRecord) -> Iterable[Finding]:
        """Return the findings of a step. Steps come in order, each once."""
        return ()

    def on_event(self, event: EventRecord) -> Iterable[Finding]:
        """Return the findings of an event that belongs to no recorded step, such as a failed call.

        An event that belongs to no generation may come before the first generation starts.
        """
        return ()

    def on_gradients(self, gradients: GradientRecord) -> Iterable[Finding]:
        """Return the findings in the gradients of a token; they come after all steps."""
        return ()

    def on_generation_end(self) -> Iterable[Finding]:
        """Return the findings that need the whole generation."""
        return ()

    def finding(
        self,
        place: StepRecord | EventRecord | GradientRecord | None,
        finding_id: str,
        sentence: str,
        layers: Iterable[int] = (),
        evidence: Mapping[str, Any] | None = None,
        *,
        severity: Severity | None = None,
        head: int | None = None,
        positions: Iterable[int] = (),
        series: str = "",
        query: str = "",
    ) -> Finding:
        """Return a finding of a step, event or gradients, or of the whole generation (None).

        It has the severity of its kind unless `severity` is given, and the first
        `MAX_LISTED_POSITIONS` positions. `query` replaces the query of the kind; like that one it
        is SQL, or a name in `findings.toml`.
        """
        generation, sorted_layers = getattr(place, "generation", None), tuple(sorted(set(layers)))
        found = Finding(
            finding_id,
            severity or self.findings[finding_id].severity,
            sentence,
            self.context.generation.generation if generation is None else generation,
            branch=getattr(place, "branch", 0),
            step=None if place is None else place.step,
            layer=sorted_layers[0] if sorted_layers else None,
            head=head,
            positions=tuple(int(pos) for pos in islice(positions, MAX_LISTED_POSITIONS)),
            evidence=dict(evidence or {}),
            layers=sorted_layers if len(sorted_layers) > 1 else (),
            series=series,
        )
        return replace(found, query=_format_query(query, found)) if query else found


class RuleResults(NamedTuple):
    """New findings, repeats of earlier ones, and an event for each rule that failed."""

    findings: tuple[Finding, ...]
    repeats: tuple[Repeat, ...]
    events: tuple[EventRecord, ...]


class RuleRunner:
    """Runs the rules of one run on its steps, events and gradients.

    `rules` may be a function that returns them, which is called when they are first used: importing
    the built-in ones takes time that a model need not wait for. A rule that raises is disabled, and
    an event reports it. With `holds`, the kinds of records that there will be (of
    `flexinspect.records.imported.RECORD_KINDS`), rules that need another kind are not called.
    """

    def __init__(
        self,
        rules: Sequence[Rule] | Callable[[], Sequence[Rule]] = (),
        *,
        is_standalone: bool = False,
        context: RuleContext | None = None,
        branch: int = 0,
        forced_tokens: Iterable[tuple[int, int]] = (),
        holds: Collection[str] | None = None,
    ) -> None:
        self._branch, self._given, self._holds = branch, rules, holds
        self._is_standalone = is_standalone
        self._context = context or RuleContext()
        self._context.forced_tokens |= {*forced_tokens}
        self._reported: set[tuple[int, int, str, str]] = set()
        self._loaded: list[Rule] | None = None
        self._step_rules: list[Rule] | None = None
        self._loading = Lock()

    @property
    def _rules(self) -> list[Rule]:
        """The enabled rules, which are loaded here at the first use, in any thread."""
        if self._loaded is None:
            with self._loading:
                if self._loaded is None:
                    self._load(self._given() if callable(self._given) else self._given)
        assert self._loaded is not None
        return self._loaded

    def _load(self, rules: Sequence[Rule]) -> None:
        holds, is_standalone = self._holds, self._is_standalone
        applying = [rule for rule in rules if rule.handles_standalone_calls or not is_standalone]
        idle = [one for one in applying if holds is not None and not set(one.needs) <= {*holds}]
        enabled = [rule for rule in applying if rule not in idle]
        self._idle_names = tuple(map(_rule_name, idle))
        for rule in enabled:  # an event may come before the first generation starts
            rule.context = self._context
        self._kinds = {id_: kind for rule in enabled for id_, kind in rule.findings.items()}
        self._loaded = enabled

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the enabled rules; those that failed are not among them."""
        return (*map(_rule_name, self._rules), *self._idle_names)

    @property
    def streams(self) -> frozenset[str]:
        """The streams that these rules read."""
        return frozenset(stream for rule in self._rules for stream in rule.streams)

    def for_branch(self, branch: int, forced_tokens: Iterable[tuple[int, int]]) -> RuleRunner:
        """Return a runner for a branch, with new objects of the same rules that have no state.

        `forced_tokens` are branch and step of the tokens that the user chose in this generation.
        A rule that cannot be created without arguments is left out.
        """
        rules = []
        for rule in self._rules:
            with suppress(TypeError):
                rules.append(type(rule)())
        return RuleRunner(
            rules,
            is_standalone=self._is_standalone,
            branch=branch,
            forced_tokens=forced_tokens,
        )

    def share_memory(self, memory: dict[str, Any]) -> None:
        """Let the rules share `memory` with the runners of other models of the run."""
        self._context.shared_memory = memory

    def on_generation_start(self, generation: GenerationRecord) -> tuple[EventRecord, ...]:
        """Start a generation; returns an event for each rule that failed."""
        self._context.start_generation(generation, is_standalone=self._is_standalone)
        # Each standalone call is a generation of its own; a series may run over several of them.
        if not self._is_standalone:
            self._reported.clear()
        where = f"the beginning of generation {generation.generation}"
        return self._call_rules(methodcaller("on_generation_start", self._context), where)[1]

    def on_step(self, step: StepRecord) -> StepRecord:
        """Return the step with its findings, and with an event for each rule that failed."""
        findings, repeats, events = self.on_record(step)
        if not (findings or repeats or events):
            return step
        findings, events = (*step.findings, *findings), (*step.events, *events)
        return replace(step, findings=findings, repeats=repeats, events=events)

    def on_record(self, record: StepRecord | EventRecord | GradientRecord) -> RuleResults:
        """Run the rules on a step, on an event outside of the steps, or on a token's gradients."""
        if isinstance(record, StepRecord):
            findings, failures = self._run_step(record)
            return self._split_repeats(link_causes(findings), failures)
        if isinstance(record, EventRecord):
            call, where = methodcaller("on_event", record), f"the event '{record.kind}'"
        else:
            call = methodcaller("on_gradients", record)
            where = f"the gradients of step {record.step}"
        return self._split_repeats(*self._call_rules(call, where))

    def replay_parent_step(self, step: StepRecord) -> tuple[EventRecord, ...]:
        """Run the rules on a step of the parent branch for their state alone.

        Its findings were reported on the parent. Returns an event for each rule that failed.
        """
        return self._run_step(step)[1]

    def on_generation_end(self) -> RuleResults:
        """Return the findings of the whole generation."""
        where = "the end of a generation"
        return self._split_repeats(*self._call_rules(lambda rule: rule.on_generation_end(), where))

    def _run_step(self, step: StepRecord) -> tuple[list[Finding], tuple[EventRecord, ...]]:
        self._context.add_step(step)
        step = paged_keys.without_slots(step, self._context)
        is_packed = any(event.kind == PACKED_REQUESTS_EVENT for event in step.events)
        rules = self._rules_of_steps()
        if is_packed:
            rules = [one for one in rules if one.handles_packed_requests]
        return self._call_rules(
            methodcaller("on_step", step), f"step {step.step}", rules, step.step
        )

    def _rules_of_steps(self) -> Sequence[Rule]:
        """The enabled rules that look at steps: this runs in the model's process, at every step."""
        if self._step_rules is None:
            inherited = Rule.on_step
            self._step_rules = [
                rule
                for rule in self._rules
                if getattr(type(rule), "on_step", None) is not inherited
            ]
        return self._step_rules

    def _call_rules(
        self,
        call: Callable[[Rule], Iterable[Finding]],
        where: str,
        rules: Sequence[Rule] | None = None,
        step: int | None = None,
    ) -> tuple[list[Finding], tuple[EventRecord, ...]]:
        """Return the findings of `rules`, or of all, and an event for each that failed."""
        findings: list[Finding] = []
        failures: list[EventRecord] = []
        for rule in tuple(self._rules if rules is None else rules):
            try:
                if found := call(rule):
                    findings += [self._complete(rule, finding) for finding in found]
            except Exception as error:
                self._rules.remove(rule)
                self._step_rules = None
                reason = f"{type(error).__name__}: {error}"
                text = f"The rule '{_rule_name(rule)}' failed at {where} and is off: {reason}"
                generation = self._context.generation.generation
                failures.append(EventRecord("rule-disabled", text, time.time(), generation, step))
        return findings, tuple(failures)

    def _complete(self, rule: Rule, finding: Finding) -> Finding:
        """Return a finding with this branch and the texts of its kind where it has none of its own.

        Raises `TypeError` for a finding that the trace cannot store, because writing its whole step
        would fail.
        """
        if not isinstance(finding, Finding) or not isinstance(finding.severity, Severity):
            raise TypeError(f"{type(finding).__name__} is not a Finding with a Severity")
        kind = rule.findings.get(finding.id)
        if kind is None:
            raise TypeError(f"the rule does not declare the finding {finding.id}")
        return fill_from_kind(kind, replace(finding, branch=finding.branch or self._branch))

    def _split_repeats(
        self, findings: Iterable[Finding], failures: tuple[EventRecord, ...]
    ) -> RuleResults:
        """Split findings into new ones and repeats of a series that was reported before."""
        new, repeats, current = [], {}, self._context.generation.generation
        for finding in findings:
            key = (finding.generation, finding.branch, finding.id, finding.series)
            if finding.series and key in self._reported:
                generation = None if finding.generation == current else finding.generation
                repeat = Repeat(finding.id, finding.series, generation)
                if self._kinds[finding.id].keeps_latest:
                    repeat = replace(repeat, sentence=finding.sentence, evidence=finding.evidence)
                repeats[finding.id, finding.series] = repeat
            else:
                self._reported.add(key)
                new.append(finding)
        return RuleResults(tuple(new), tuple(repeats.values()), failures)


def _rule_name(rule: Rule) -> str:
    return str(getattr(rule, "name", type(rule).__name__))


def fill_from_kind(kind: FindingKind, finding: Finding) -> Finding:
    """Return a finding with the texts of its kind where it has none of its own."""
    names = ("why", "confirm", "fix")
    texts = {name: getattr(finding, name) or getattr(kind, name) for name in names}
    return replace(finding, **texts, query=finding.query or _format_query(kind.query, finding))


def _format_query(query: str, finding: Finding) -> str:
    """Return a query, named or itself, for a finding. A step or layer that it lacks matches any."""
    step = "step" if finding.step is None else finding.step
    layer = "layer" if finding.layer is None else finding.layer
    place = {"generation": finding.generation, "branch": finding.branch}
    return _find_query(query).format(**place, step=step, layer=layer)


OTHER_PROMPT = "mask.other-prompt"
_PATH_FINDINGS = ("path.fallback", "path.unpatched-layer", "path.bypass")
_BORDER_FINDINGS = ("segments.shifted", "segments.drift", "segments.merged")

CAUSES: Mapping[str, tuple[str, ...]] = {
    "mask.not-applied": _PATH_FINDINGS,
    "mask.lost": (OTHER_PROMPT, *_BORDER_FINDINGS, *_PATH_FINDINGS),
    "mask.leak": (OTHER_PROMPT, *_BORDER_FINDINGS, *_PATH_FINDINGS),
    "segments.drift": (OTHER_PROMPT,),
    "segments.shifted": (OTHER_PROMPT,),
    "reach.leak": (OTHER_PROMPT,),
    "segments.bos-missing": ("mask.padding-as-text",),
    "positions.restart": ("mask.text-as-padding",),
    "positions.jump": ("mask.text-as-padding",),
    "positions.duplicate": ("mask.text-as-padding",),
    "positions.padding": ("mask.text-as-padding",),
    "mask.empty-row": ("mask.option-promise", "mask.window-slots"),
    "mask.none": _PATH_FINDINGS,
    "mask.layers-differ": (*_PATH_FINDINGS, "mask.window-lost"),
}
"""Finding id to the ids that may be its cause in the same step and layer; the first one counts.

A layer that fell back to another kernel has lost its mask, and a mask whose borders are off by one
leaks. Different rules report the two, and both findings are true.
"""


_CARRIED: Mapping[str, tuple[str, ...]] = {
    "mask.none": ("numbers.nan", "numbers.inf"),
    "mask.future": ("numbers.nan", "numbers.inf"),
}
"""As `CAUSES`, for what also reaches later layers: NaN hides which mask an own kernel applied."""


def link_causes(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings of one step, with each consequence turned into a note.

    The note names its cause, and the cause becomes at least as severe as its consequence was.
    """
    linked = list(findings)
    for index, finding in enumerate(findings):
        cause_index = _find_cause(finding, findings)
        if cause_index is None:
            continue
        cause = linked[cause_index]
        worse = min(cause.severity, finding.severity, key=list(Severity).index)
        linked[cause_index] = replace(cause, severity=worse)
        linked[index] = as_consequence(finding, cause.id)
    return linked


def as_consequence(finding: Finding, cause: str, where: str = "") -> Finding:
    """Return a finding as a note that follows from another, which is at the place `where`."""
    return replace(
        finding,
        severity=Severity.NOTE,
        sentence=f"{finding.sentence} This follows from {cause}{where}.",
        evidence={**finding.evidence, "cause": cause},
    )


def _find_cause(finding: Finding, findings: Sequence[Finding]) -> int | None:
    causes, layers = CAUSES.get(finding.id, ()), {*(finding.layers or (finding.layer,))}
    matching = (
        index
        for index, other in enumerate(findings)
        if other.id in causes and other.severity is not Severity.NOTE
        if not layers.isdisjoint(other.layers or (other.layer,))
    )
    found = min(matching, key=lambda index: causes.index(findings[index].id), default=None)
    return _find_carried(finding, findings) if found is None else found


def _find_carried(finding: Finding, findings: Sequence[Finding]) -> int | None:
    """Return the finding of an earlier layer, or the same, whose values a later one carries."""
    causes, layer = _CARRIED.get(finding.id, ()), finding.layer
    for index, other in enumerate(findings):
        is_cause = other.id in causes and other.layer is not None
        if is_cause and layer is not None and (other.layer or 0) <= layer:
            return index
    return None


class LoadedRules(NamedTuple):
    """The registered rules; `failed` maps the names of rules that did not load to the reason."""

    rules: tuple[Rule, ...]
    failed: dict[str, str]

    @property
    def finding_kinds(self) -> dict[str, FindingKind]:
        """The kind of each finding id, sorted by id."""
        kinds = {id_: kind for rule in self.rules for id_, kind in rule.findings.items()}
        return dict(sorted(kinds.items()))


def load_rules() -> LoadedRules:
    """Return new objects of all registered rules, in the order of their plug-in names."""
    classes, failed = plugins.load_all(plugins.RULES)
    rules: list[Rule] = []
    for name, make in classes.items():
        try:
            rule = plugins.make(plugins.RULES, name, make)
        except (Exception, SystemExit) as error:
            failed[name] = f"It could not be created: {type(error).__name__}: {error}"
            continue
        if isinstance(rule, Rule):
            rules.append(rule)
        else:
            failed[name] = f"It is of type {type(rule).__name__}, not a Rule."
    return LoadedRules(tuple(rules), failed)
