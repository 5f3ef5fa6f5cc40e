"""The rule for the key-value cache: empty, lost, filled twice, of another prompt, or not used.

The cached lengths are compared with the input and with the number of keys of the attention calls.
Sliding windows, crops after rejected drafts and caches that drop keys by design are not faults.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from flexinspect.core.text import capitalize, format_layers, format_ranges, plural
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import CallRecord, EventRecord, InputsRecord, StepRecord
from flexinspect.rules.cache.cache_contents import (
    CACHE_DUPLICATED,
    CACHE_LOST,
    CACHE_NOT_USED,
    CACHE_SHARED,
    EMPTY_SLOTS,
    SLOT_STREAM,
    STALE_SLOTS,
    CacheTextTracker,
    check_slots,
)
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import Rule, finding_kinds

EMPTY_LAYER = "cache.empty-layer"


class CacheRule(Rule):
    """Follows the cache through the steps and generations of one model.

    In standalone calls only empty slots are checked.
    """

    name: ClassVar[str] = "caches"
    streams: ClassVar[tuple[str, ...]] = (SLOT_STREAM,)
    handles_standalone_calls: ClassVar[bool] = True
    findings = finding_kinds(
        EMPTY_LAYER,
        CACHE_LOST,
        CACHE_NOT_USED,
        EMPTY_SLOTS,
        STALE_SLOTS,
        CACHE_DUPLICATED,
        CACHE_SHARED,
    )

    def __init__(self) -> None:
        self._layers, self._texts = CacheLayerTracker(self), CacheTextTracker(self)

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin a generation; the texts of earlier ones are kept."""
        super().on_generation_start(context)
        self._layers.on_generation_start()
        self._texts.on_generation_start(context)

    def on_event(self, event: EventRecord) -> Sequence[Finding]:
        """Store the prompt that the caller assumes to be cached."""
        self._texts.on_event(event)
        return ()

    def on_step(self, step: StepRecord) -> Iterator[Finding]:
        """Check the slots, the lengths and the text of the cache at a step."""
        yield from check_slots(self, step)
        if step.inputs is not None:
            yield from self._layers.on_step(step, step.inputs)
            text_findings = self._texts.on_step(step)
            if not self._layers.is_always_empty:  # otherwise the tokens show the same fault
                yield from text_findings

    def on_generation_end(self) -> Sequence[Finding]:
        """Report that no cache was used."""
        return () if self.context.is_standalone else self._texts.on_generation_end()


class CacheLayerTracker:
    """Follows the cached length of each layer through a generation.

    `is_always_empty` says that no layer stores anything: each step is then a generation of its own,
    and one finding is enough for all of them.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.is_always_empty = False
        self.on_generation_start()

    def on_generation_start(self) -> None:
        """Begin a generation."""
        self._last_cached: tuple[int, ...] = ()
        self._reported_layers: set[int] = set()
        """Layers that already have a finding in this generation."""

    def on_step(self, step: StepRecord, inputs: InputsRecord) -> list[Finding]:
        """Report layers that are empty, lost keys, or store keys twice."""
        found = [] if self._is_healthy(step, inputs) else self._check_layers(step, inputs)
        self._last_cached = inputs.cached_after
        return found

    def _is_healthy(self, step: StepRecord, inputs: InputsRecord) -> bool:
        """Whether all layers hold the same length: the previous one plus the rows of this step."""
        after = inputs.cached_after
        if not after:
            return True
        n = after[0]
        return (
            n == step.kv_after
            and after.count(n) == len(after)
            and len(inputs.cached_before) in (0, len(after))
            and inputs.cached_before == (self._last_cached or inputs.cached_before)
            and not (
                step.kv_before
                and step.calls
                and min(call.kv_len for call in step.calls) <= step.q_len
            )
        )

    def _check_layers(self, step: StepRecord, inputs: InputsRecord) -> list[Finding]:
        counted_layers = {n: held for n, held in enumerate(inputs.cached_after) if held >= 0}
        called = {call.layer: call for call in step.calls}
        most = max(counted_layers.values(), default=0)
        empty = self._find_empty(step, counted_layers, called)
        lost = [n for n in self._find_lost(step, inputs, called) if n not in empty]
        before = dict(enumerate(inputs.cached_before))
        twice = [n for n, held in counted_layers.items() if held - before.get(n, 0) > step.q_len]
        found = []
        if empty:
            found.append(self._empty_finding(step, inputs, empty, called, most))
        if lost:
            found.append(self._lost_finding(step, inputs, lost, called))
        if twice and (before or not step.kv_before):
            found.append(self._duplicated_finding(step, inputs, twice))
        is_known, self.is_always_empty = self.is_always_empty, bool(empty) and not most
        if is_known and self.is_always_empty:
            return []
        new = [one for one in found if set(_layers_of_finding(one)) - self._reported_layers]
        self._reported_layers.update(layer for one in new for layer in _layers_of_finding(one))
        return new

    def _find_empty(
        self, step: StepRecord, held: Mapping[int, int], called: Mapping[int, CallRecord]
    ) -> list[int]:
        """Layers that ran and store nothing."""
        ran = set(called) or {stat.layer for stat in step.layer_stats}
        none = [n for n, keys in held.items() if keys == 0 and n in ran]
        # A layer that shares the keys of another one stores none, but attends to them.
        if step.kv_before:
            absent = [n for n in called if n >= len(held) and n not in held]
            none += [n for n in absent if called[n].kv_len <= step.q_len]
            none = [n for n in none if n not in called or called[n].kv_len <= step.q_len]
        return sorted(set(none))

    def _find_lost(
        self, step: StepRecord, inputs: InputsRecord, called: Mapping[int, CallRecord]
    ) -> list[int]:
        """Layers that lost keys, stopped growing, or do not attend to their cached keys."""
        if not step.kv_before:
            return []
        blind = [n for n, call in called.items() if call.kv_len <= step.q_len]
        pairs = list(zip(inputs.cached_before, inputs.cached_after, strict=False))
        grew = {after - before for before, after in pairs if after >= 0}
        stuck = []
        if len(grew) > 1 and max(grew) == step.q_len:
            stuck = [n for n, (b, a) in enumerate(pairs) if 0 <= a - b < step.q_len and a >= 0]
        return sorted({*blind, *stuck, *self._find_shrunk(inputs)})

    def _find_shrunk(self, inputs: InputsRecord) -> list[int]:
        """Layers that lost keys since the last step, while others did not."""
        pairs = list(zip(self._last_cached, inputs.cached_before, strict=False))
        shrunk = [n for n, (before, now) in enumerate(pairs) if 0 <= now < before]
        return shrunk if any(before == now > 0 for before, now in pairs) else []

    def _empty_finding(
        self,
        step: StepRecord,
        inputs: InputsRecord,
        empty: Sequence[int],
        called: Mapping[int, CallRecord],
        most: int,
    ) -> Finding:
        filled = {n: keys for n, keys in enumerate(inputs.cached_after) if keys > 0}
        others = (
            f"{format_layers([*filled], 0)} {'holds' if len(filled) == 1 else 'hold'} {most}"
            if filled
            else "no layer holds any keys"
        )
        sentence = (
            f"{capitalize(format_layers(empty, _count_layers(called, inputs)))} received a cache "
            f"and left it empty (0), {others}"
        )
        sees = [called[n].kv_len for n in empty if n in called]
        if step.kv_before and sees:
            sentence += (
                f": in step {step.step} "
                f"{'it attends' if len(empty) == 1 else 'they attend'} to "
                f"{plural(max(sees), 'key')} instead of {step.kv_after}"
            )
        return self._finding(step, EMPTY_LAYER, sentence, empty, inputs, called)

    def _lost_finding(
        self,
        step: StepRecord,
        inputs: InputsRecord,
        lost: Sequence[int],
        called: Mapping[int, CallRecord],
    ) -> Finding:
        who = capitalize(format_layers(lost, _count_layers(called, inputs)))
        one, severity = len(lost) == 1, Severity.ERROR
        shrunk = set(self._find_shrunk(inputs)) & set(lost)
        if shrunk:
            first = min(shrunk)
            what = f"lost keys between steps {step.step - 1} and {step.step}: "
            what += (
                f"the cache held {self._last_cached[first]} and now holds "
                f"{inputs.cached_before[first]}"
            )
        elif all(n in called and called[n].kv_len <= step.q_len for n in lost):
            seen = plural(called[lost[0]].kv_len, "key")
            what = f"{'attends' if one else 'attend'} to only {seen} in step {step.step}, those of "
            what += f"the step itself; the cache held {step.kv_before} before it"
        else:
            # A cache that drops keys by design looks the same if its layers differ.
            grew, severity = plural(step.q_len, "row"), Severity.WARNING
            what = f"{'does' if one else 'do'} not store the {grew} of step {step.step}: "
            what += f"{'its' if one else 'their'} cache stays at {inputs.cached_after[lost[0]]}, "
            what += f"the other layers hold {max(inputs.cached_after)}"
        return self._finding(step, CACHE_LOST, f"{who} {what}", lost, inputs, called, severity)

    def _duplicated_finding(
        self, step: StepRecord, inputs: InputsRecord, twice: Sequence[int]
    ) -> Finding:
        first = twice[0]
        before = inputs.cached_before[first] if first < len(inputs.cached_before) else 0
        grew = inputs.cached_after[first] - before
        which = format_layers(twice, len(inputs.cached_after))
        sentence = (
            f"The cache of {which} grew by {grew} keys in step {step.step}, which has "
            f"{plural(step.q_len, 'row')}: keys are stored more than once"
        )
        return self._finding(step, CACHE_DUPLICATED, sentence, twice, inputs, {})

    def _finding(
        self,
        step: StepRecord,
        finding_id: str,
        sentence: str,
        which: Sequence[int],
        inputs: InputsRecord,
        called: Mapping[int, CallRecord],
        severity: Severity = Severity.ERROR,
    ) -> Finding:
        return self._rule.finding(
            step,
            finding_id,
            f"{sentence}.",
            severity=severity,
            layers=which,
            evidence={
                "rows": step.q_len,
                "cached_before": list(inputs.cached_before),
                "cached_after": list(inputs.cached_after),
                "kv_len": [call.kv_len for call in called.values()],
            },
            series=format_ranges(which),
        )


def _layers_of_finding(finding: Finding) -> tuple[int, ...]:
    return finding.layers or ((finding.layer,) if finding.layer is not None else ())


def _count_layers(called: Mapping[int, CallRecord], inputs: InputsRecord) -> int:
    return len(called) or len(inputs.cached_after)
