"""Which kernel ran in each layer and step: fallbacks, layers left out, builds for nothing.

Judged is what ran, held against the other layers of the same step and the same layer's steps
before. Nothing is said of a program that never runs FlexAttention, unless an exception was
swallowed there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from flexinspect.findings import Finding, Severity
from flexinspect.records import CallRecord, EventRecord, StepRecord
from flexinspect.rules import pathcells
from flexinspect.rules.base import FindingKind, Rule
from flexinspect.rules.builds import NEEDLESS, NEEDLESS_KIND, BuildTracker
from flexinspect.rules.failures import KERNEL_FAILED_EVENT
from flexinspect.rules.scene import RuleContext
from flexinspect.rules.words import format_layers as in_layers
from flexinspect.rules.words import printable

FALLBACK = "path.fallback"
BYPASS = "path.bypass"
UNPATCHED = "path.unpatched-layer"
SUPPRESSED_EXCEPTION = "path.swallowed"
MASK_IGNORED = "path.mask-ignored"

_PATH_QUERY = (
    "SELECT step, layer, path, backend, mask, handed, swallowed FROM calls WHERE generation = "
    "{generation} AND branch = {branch} AND step = {step} ORDER BY layer"
)
_DIGITS = re.compile(r"\d+")
_LOOKUP_ERRORS = ("KeyError", "IndexError", "AttributeError", "StopIteration", "LookupError")
"""Exceptions by which code finds out that it has no mask yet, and makes one."""


class KernelPathRule(Rule):
    """Compares the path of each layer with that of the others, and with its own before."""

    name: ClassVar[str] = "path"
    findings: ClassVar[Mapping[str, FindingKind]] = {
        FALLBACK: FindingKind(
            Severity.WARNING,
            "a layer ran another kernel than the others, or than before",
            "A fallback keeps the run going without the mask that the first choice had: the other "
            "layers isolate, this one mixes, and the answer is neither.",
            "The path panel colours the layer; the mask panel, at this layer, shows what it ran "
            "under. The query lists path, mask and exception of every layer of the step.",
            "Do not catch what the attention call raises, or raise it again; then mend what the "
            "exception says (a device, a length, a head count).",
            _PATH_QUERY,
        ),
        BYPASS: FindingKind(
            Severity.WARNING,
            "FlexAttention ran in some steps only, without any exception",
            "The mask is not applied where the patch steps aside, so generated tokens are chosen "
            "under another mask than the prompt was read with.",
            "The path panel shows the steps side by side; in the mask panel the decode row is open "
            "where the declared mask is closed.",
            "Let the patched forward also handle a query of one row: build the one-row mask with "
            "the row's offset instead of handing over to the original.",
            "SELECT step, layer, path, q_len, kv_len FROM calls WHERE generation = {generation} "
            "AND branch = {branch} ORDER BY step, layer",
        ),
        UNPATCHED: FindingKind(
            Severity.WARNING,
            "some layers never ran FlexAttention while others did",
            "One open layer is enough: what the other layers keep apart is mixed there, and every "
            "layer after it carries the mixture on.",
            "The path panel shows the layers that differ; their backend says which function they "
            "asked for.",
            "Patch every layer: count them from model.modules() or the configuration, not from a "
            "list, and look for a layer whose forward was put back.",
            _PATH_QUERY,
        ),
        SUPPRESSED_EXCEPTION: FindingKind(
            Severity.NOTE,
            "an exception was swallowed, and the same path was taken after it",
            "Code that catches everything hides the next failure, too; whether this one mattered "
            "is for its words to say.",
            "Let the exception through, and see where it comes from.",
            "Catch the one exception that is meant, outside of the attention call.",
            _PATH_QUERY,
        ),
        MASK_IGNORED: FindingKind(
            Severity.NOTE,
            "a layer was handed one mask, and its kernel got another",
            "Own code that makes its own mask works as meant; a padding or sliding-window mask "
            "that the model made is then not applied.",
            "The mask panel shows the mask that the kernel got; the query has the one that was "
            "handed on, in words.",
            "Combine the two masks where the model's own is needed (padding, sliding window).",
            _PATH_QUERY,
        ),
        NEEDLESS: NEEDLESS_KIND,
    }

    def __init__(self) -> None:
        self._builds = BuildTracker()
        self._failed_kernels: dict[tuple[int | None, str], str] = {}
        """Which kernel raised, by layer and the exception's words: told once in a run."""

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin with no step seen."""
        super().on_generation_start(context)
        self._uniform_path = ("", False)
        """The one path of all layers in all steps so far, and whether the last had one row."""
        self._ongoing: list[tuple[dict[int, str], Finding]] = []
        """What was told of layers that changed their path, with the path since then."""
        self._paths_by_layer: dict[int, list[tuple[str, bool]]] = {}
        """By layer, the paths that it took, each with whether it was a step of one row."""

    def on_event(self, event: EventRecord) -> Sequence[Finding]:
        """Remember which kernel raised; the step that went on tells of the fallback."""
        if event.kind == KERNEL_FAILED_EVENT:
            key = (event.data.get("layer"), str(event.data.get("error")))
            self._failed_kernels[key] = str(event.data.get("kernel"))
        return ()

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return where the step's calls differ from each other, and from the steps before."""
        calls = step.calls
        if not calls:
            return ()
        found = self._builds.on_step(step, self.context) if step.builds else []
        # From here on, this is what a step costs in which nothing is strange.
        paths = {call.path for call in calls}
        strange = [c for c in calls if c.swallowed is not None or c.handed not in _NO_MASK_PASSED]
        if (
            len(paths) == 1
            and not strange
            and (calls[0].path, step.q_len == 1) == self._uniform_path
        ):
            return found
        last = {call.layer: call for call in calls}
        found += self._check_calls(step, last)
        self._record_paths(step, last)
        agree = len(paths) == 1 and not strange and self._paths_agree(last)
        self._uniform_path = (calls[0].path if agree else "", step.q_len == 1)
        return found

    def _paths_agree(self, last: Mapping[int, CallRecord]) -> bool:
        return all(len({path for path, _ in self._paths_by_layer[layer]}) == 1 for layer in last)

    def _record_paths(self, step: StepRecord, last: Mapping[int, CallRecord]) -> None:
        for layer, call in last.items():
            seen = self._paths_by_layer.setdefault(layer, [])
            if (call.path, call.q_len == 1) not in seen:
                seen.append((call.path, call.q_len == 1))

    def _check_calls(self, step: StepRecord, last: Mapping[int, CallRecord]) -> list[Finding]:
        found, told = [], set[int]()
        for group in _group_by_message(last, "swallowed").values():
            found.append(self._suppressed_finding(step, group, last))
            told.update(group)
        rest = {layer: call for layer, call in last.items() if layer not in told}
        found += [again for paths, again in self._ongoing if _has_same_paths(paths, rest)]
        moved = {layer: call for layer, call in rest.items() if self._has_changed_path(call)}
        if moved:
            found.append(self._changed_path_finding(step, moved, last))
            self._ongoing.append(({n: call.path for n, call in moved.items()}, found[-1]))
        else:
            found += self._check_unpatched(step, rest, last)
        for group in _group_by_message(rest, "handed").values():
            found += self._check_ignored_mask(step, group)
        return found

    # -- an exception ----------------------------------------------------------------------------

    def _suppressed_finding(
        self,
        step: StepRecord,
        group: Mapping[int, CallRecord],
        last: Mapping[int, CallRecord],
    ) -> Finding:
        call = next(iter(group.values()))
        words = str(call.swallowed)
        where = in_layers(tuple(group), 0 if len(last) == 1 else len(last))
        of = "" if len(group) == len(last) else f" (of {len(last)} layers)"
        raised = self._failed_kernels.get((call.layer, words), "")
        lost = pathcells.compare_call_mask(step, self.context, call, _other_calls(last, group))
        said = f"{raised + ' raised ' if raised else ''}{printable(words)}, swallowed"
        if not self._is_fallback(step, call, words, raised, last, group):
            finding_id, verb = SUPPRESSED_EXCEPTION, f"went on with {call.path}"
        else:
            finding_id, verb = FALLBACK, f"fell back to {call.path}"
        who = where[0].upper() + where[1:]
        sentence = f"{who}{of} {verb} in step {step.step}: {said}{lost.description}."
        severity = Severity.ERROR if lost.has_leak else self.findings[finding_id].severity
        evidence = {
            "swallowed": words,
            "kernel": raised,
            **_path_evidence(group, last),
            **lost.evidence,
        }
        series = f"{call.path} in {list(group)}: {_mask_digits(words)}"
        return self._finding(step, finding_id, severity, sentence, group, evidence, series)

    def _is_fallback(
        self,
        step: StepRecord,
        call: CallRecord,
        words: str,
        raised: str,
        last: Mapping[int, CallRecord],
        group: Mapping[int, CallRecord],
    ) -> bool:
        """Say whether the call after an exception is another one than was tried."""
        others = {other.path for layer, other in last.items() if layer not in group}
        before = {path for path, _ in self._paths_by_layer.get(call.layer, ())}
        if (others | before) - {call.path}:
            return True
        if raised:
            return not _is_path_of_kernel(raised, call.path)
        is_lookup = words.partition(":")[0] in _LOOKUP_ERRORS
        return not _is_flex(call.path) and (bool(step.builds) or not is_lookup)

    # -- no exception ----------------------------------------------------------------------------

    def _has_changed_path(self, call: CallRecord) -> bool:
        """Say whether a layer took another path than ever before, to or from FlexAttention."""
        before = {path for path, _ in self._paths_by_layer.get(call.layer, ())}
        if not before or call.path in before:
            return False
        return _is_flex(call.path) != any(map(_is_flex, before))

    def _changed_path_finding(
        self, step: StepRecord, moved: Mapping[int, CallRecord], last: Mapping[int, CallRecord]
    ) -> Finding:
        """Tell of layers that left FlexAttention, or came to it, in the middle of a generation."""
        call = next(iter(moved.values()))
        before = self._paths_by_layer[call.layer]
        where = in_layers(tuple(moved), len(last))
        is_first = call.q_len == 1 and not any(one_row for _, one_row in before)
        paths = " and ".join(dict.fromkeys(path for path, _ in before))
        lost = pathcells.compare_call_mask(step, self.context, call, [])
        if is_first or _is_flex(call.path):
            finding_id = BYPASS
            rows = "the steps of one row" if is_first else f"step {step.step} on"
            sentence = f"From step {step.step} on {where} ran {call.path}, after {paths}"
            if is_first and not _is_flex(call.path):
                sentence = (
                    f"{where[0].upper() + where[1:]} ran {paths} for the prompt and {call.path} "
                    f"for {rows}, from step {step.step} on: the patch steps aside there"
                )
        else:
            finding_id = FALLBACK
            sentence = f"From step {step.step} on {where} ran {call.path} after {paths}"
        severity = self.findings[finding_id].severity
        if lost.is_same:
            severity = Severity.NOTE
        evidence = {"before": paths, **_path_evidence(moved, last), **lost.evidence}
        full = f"{sentence}, and no exception was seen{lost.description}."
        series = f"{call.path} in {list(moved)}"
        return self._finding(step, finding_id, severity, full, moved, evidence, series)

    def _check_unpatched(
        self, step: StepRecord, rest: Mapping[int, CallRecord], last: Mapping[int, CallRecord]
    ) -> list[Finding]:
        """Tell of layers that run something else than the others, and never ran anything else."""
        left_out = {
            layer: call
            for layer, call in rest.items()
            if not _is_flex(call.path) and not self._has_run_flex(layer)
        }
        flex = [call for call in last.values() if _is_flex(call.path)]
        if not flex or not left_out:
            return []
        call, where = next(iter(left_out.values())), in_layers(tuple(left_out), len(last))
        lost = pathcells.compare_call_mask(step, self.context, call, flex)
        with_flex = in_layers([c.layer for c in flex], len(last))
        sentence = (
            f"{where[0].upper() + where[1:]} (of {len(last)} layers) ran {call.path} in step "
            f"{step.step}, where {with_flex} ran {flex[0].path}, and no exception was seen: "
            f"{'it was' if len(left_out) == 1 else 'they were'} never patched{lost.description}."
        )
        severity = Severity.ERROR if lost.has_leak else Severity.WARNING
        evidence = {**_path_evidence(left_out, last), **lost.evidence}
        series = "layers " + ",".join(map(str, left_out))
        return [self._finding(step, UNPATCHED, severity, sentence, left_out, evidence, series)]

    def _has_run_flex(self, layer: int) -> bool:
        return any(_is_flex(path) for path, _ in self._paths_by_layer.get(layer, ()))

    def _check_ignored_mask(
        self, step: StepRecord, group: Mapping[int, CallRecord]
    ) -> list[Finding]:
        """Tell of a mask that was handed on and not used, unless a part of it may have been."""
        call = next(iter(group.values()))
        words = str(call.handed)
        mask = self.context.mask(call.mask)
        if words in _NO_MASK_PASSED or mask is None:
            return []
        kind = words.partition(" ")[0]
        if mask.kind == kind and kind != "block":  # a slice of what was handed on is none of it
            return []
        got = "no mask" if mask.kind.startswith("none") else f"a mask of its own ({mask.kind})"
        where = in_layers(tuple(group), 0)
        sentence = (
            f"{where[0].upper() + where[1:]} {'was' if len(group) == 1 else 'were'} handed a mask "
            f"({printable(words)}) in step {step.step}, and the kernel got {got}."
        )
        evidence = {"handed": words, "mask": call.mask, "kind": mask.kind}
        return [self._finding(step, MASK_IGNORED, None, sentence, group, evidence, kind)]

    def _finding(
        self,
        step: StepRecord,
        finding_id: str,
        severity: Severity | None,
        sentence: str,
        group: Mapping[int, CallRecord],
        evidence: Mapping[str, Any],
        series: str,
    ) -> Finding:
        how: dict[str, Any] = {"severity": severity, "evidence": evidence, "series": series}
        return self.finding(step, finding_id, sentence, layers=group, **how)


_NO_MASK_PASSED = (None, "none")
"""A kernel that got what its layer was handed, or a layer that was handed nothing."""


def _is_flex(path: str) -> bool:
    return path.startswith("flex")


def _is_path_of_kernel(kernel: str, path: str) -> bool:
    """Say whether a path is that of a kernel; building a mask is a part of FlexAttention."""
    return _is_flex(path) if kernel in ("flex_attention", "create_block_mask") else path == "sdpa"


def _group_by_message(
    last: Mapping[int, CallRecord], name: str
) -> dict[str, dict[int, CallRecord]]:
    """Return the layers whose calls say something under a name, by path and what they say."""
    groups: dict[str, dict[int, CallRecord]] = {}
    for layer, call in last.items():
        said = getattr(call, name)
        if said is not None:
            groups.setdefault(f"{call.path} {_mask_digits(said)}", {})[layer] = call
    return groups


def _mask_digits(words: str) -> str:
    """Return an exception's words without their numbers, which differ by step and layer."""
    return _DIGITS.sub("#", words)


def _has_same_paths(paths: Mapping[int, str], rest: Mapping[int, CallRecord]) -> bool:
    return all(layer in rest and rest[layer].path == path for layer, path in paths.items())


def _other_calls(
    last: Mapping[int, CallRecord], group: Mapping[int, CallRecord]
) -> list[CallRecord]:
    return [call for layer, call in last.items() if layer not in group]


def _path_evidence(
    group: Mapping[int, CallRecord], last: Mapping[int, CallRecord]
) -> dict[str, Any]:
    return {
        "layers": len(group),
        "of": len(last),
        "paths": {str(layer): call.path for layer, call in last.items()},
    }
