"""Which kernel ran in each layer and step: fallbacks, layers left out, builds for nothing.

Judged is what ran, held against the other layers of the same step and the same layer's steps
before. Nothing is said of a program that never runs FlexAttention, unless an exception was
swallowed there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from flexinspect.core.text import format_layers as in_layers
from flexinspect.core.text import plural, printable
from flexinspect.masks.algebra import BoolArray
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import BuildRecord, CallRecord, EventRecord, StepRecord
from flexinspect.rules.attention.kernel_failures import KERNEL_FAILED_EVENT
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import FindingKind, Rule

NEEDLESS = "path.needless-builds"

NEEDLESS_KIND = FindingKind(
    Severity.NOTE,
    "the same block mask was built several times",
    "Uncompiled building evaluates the rule on every cell, for each head that is named: in a long "
    "prompt it costs more than the attention.",
    "The query lists the builds of the step with their grid and their time; the calls of all these "
    "layers have one mask fingerprint.",
    "Build the mask once per forward, outside of the layers, with None for the batch and heads "
    "that the rule ignores, and hand the object on.",
    "SELECT layer, batch, heads, q_len, kv_len, rule, wall_ms, peak_growth FROM builds WHERE "
    "generation = {generation} AND branch = {branch} AND step = {step} ORDER BY build",
)

COSTLY_MS = 50.0
COSTLY_SHARE = 0.2
COSTLY_LAYERS = 4
"""Needless builds are no trifle any more from this many layers, time and share of the step on."""

MIN_UNCHANGED_STEPS = 3
"""Steps in a row in which an unchanged mask is built anew, before it is told of."""


class BuildTracker:
    """Looks at the builds of one run, step by step.

    What a step built is held against the step before, be it of another generation: a loop over
    sequences of one length builds the same mask again for each.
    """

    def __init__(self) -> None:
        self._last_mask: str | None = None
        self._n_unchanged = 0
        self._reported: set[str] = set()

    def on_step(self, step: StepRecord, context: RuleContext) -> list[Finding]:
        """Return what was built for nothing in a step; nothing where masks are not known."""
        found = []
        groups: dict[tuple[Any, ...], list[BuildRecord]] = {}
        mask_of = {call.layer: call.mask for call in step.calls}
        for build in step.builds:
            if build.layer is not None and mask_of.get(build.layer) is not None:
                groups.setdefault((mask_of[build.layer], *_grid_shape(build)), []).append(build)
        for (mask, *_), builds in groups.items():
            layers = sorted({build.layer for build in builds if build.layer is not None})
            if len(builds) > 1:
                found.append(self._layers_finding(step, context, str(mask), builds, layers))
        return found or self._check_steps(step)

    def _layers_finding(
        self,
        step: StepRecord,
        context: RuleContext,
        mask: str,
        builds: Sequence[BuildRecord],
        layers: Sequence[int],
    ) -> Finding:
        first, ms = builds[0], sum(build.wall_ms for build in builds)
        spare = ms * (len(builds) - 1) / len(builds)
        known = context.mask(mask)
        cells = known.cells if known is not None else None
        for_nothing = (first.heads or 1) > 1 and cells is not None and len(cells) == 1
        heads = f", for {first.heads} heads that all share it" if for_nothing else ""
        n_layers = len({call.layer for call in step.calls})
        sentence = (
            f"The same mask was built {len(builds)} times in step {step.step}, in "
            f"{in_layers(layers, n_layers)} (grid {_format_grid(first)}, {ms:.1f} ms, rule "
            f"{printable(first.rule)}){heads}."
        )
        is_costly = (
            len(layers) >= COSTLY_LAYERS
            and spare >= COSTLY_MS
            and spare >= COSTLY_SHARE * step.wall_ms
        )
        evidence = {
            "builds": len(builds),
            "grid": _format_grid(first),
            "ms": round(ms, 2),
            "needless_ms": round(spare, 2),
            "peak_growth": sum(build.peak_growth for build in builds),
            "heads_ignored": for_nothing,
        }
        severity = Severity.WARNING if is_costly else Severity.NOTE
        return _build_finding(step, severity, sentence, evidence, layers, "layers")

    def _check_steps(self, step: StepRecord) -> list[Finding]:
        """Tell of a mask that is built anew in each step, and is the one before's."""
        masks = {call.mask for call in step.calls}
        lengths = {(call.q_len, call.kv_len) for call in step.calls}
        built = [build for build in step.builds if (build.q_len, build.kv_len) in lengths]
        only = masks.pop() if len(masks) == 1 else None
        self._n_unchanged = (
            self._n_unchanged + 1 if built and only is not None and only == self._last_mask else 0
        )
        self._last_mask = only
        if self._n_unchanged < MIN_UNCHANGED_STEPS - 1 or only is None or only in self._reported:
            return []
        self._reported.add(only)
        ms = built[0].wall_ms
        sentence = (
            f"The mask of step {step.step} is the one of the {self._n_unchanged} steps before it, and "
            f"was built anew in each (grid {_format_grid(built[0])}, {ms:.1f} ms)."
        )
        evidence = {
            "steps": self._n_unchanged + 1,
            "grid": _format_grid(built[0]),
            "ms": round(ms, 2),
        }
        return [_build_finding(step, Severity.NOTE, sentence, evidence, (), "steps")]


def _grid_shape(build: BuildRecord) -> tuple[Any, ...]:
    return build.rule, build.batch, build.heads, build.q_len, build.kv_len


def _format_grid(build: BuildRecord) -> str:
    return f"{build.batch or 1} x {build.heads or 1} x {build.q_len} x {build.kv_len}"


def _build_finding(
    step: StepRecord,
    severity: Severity,
    sentence: str,
    evidence: Mapping[str, Any],
    layers: Sequence[int],
    series: str,
) -> Finding:
    return Finding(
        id=NEEDLESS,
        severity=severity,
        sentence=sentence,
        generation=step.generation,
        branch=step.branch,
        step=step.step,
        layer=layers[0] if layers else None,
        layers=tuple(layers) if len(layers) > 1 else (),
        evidence=evidence,
        series=series,
    )


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
        lost = compare_call_mask(step, self.context, call, _other_calls(last, group))
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
        lost = compare_call_mask(step, self.context, call, [])
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
        lost = compare_call_mask(step, self.context, call, flex)
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


@dataclass(frozen=True, slots=True)
class MaskComparison:
    """How the mask that a call ran under differs from the one it should have had.

    `words` ends a sentence. `is_sure` says that pairs are open that were to be closed, `is_same`
    that the masks are proved to be the same.
    """

    description: str = ""
    has_leak: bool = False
    is_same: bool = False
    evidence: Mapping[str, Any] = field(default_factory=dict)


def compare_call_mask(
    step: StepRecord, context: RuleContext, call: CallRecord, peers: Sequence[CallRecord]
) -> MaskComparison:
    """Compare a call's mask with those of other layers, or with the declared one without them.

    With several other masks (sliding and full layers) the nearest counts. Nothing is said where
    cells were not recorded.
    """
    mine = _call_cells(context, call)
    if mine is None:
        return MaskComparison()
    theirs = _peer_cells(context, peers) if peers else _declared_cells(context, call, mine)
    counts = [
        _count_differing_pairs(mine, one) for one in theirs if one.shape[1:] == mine.shape[1:]
    ]
    if not counts:
        return MaskComparison()
    leaked, closed = min(counts, key=sum)
    whom = "the other layers keep" if peers else "the declared mask has"
    facts = {"leaked": leaked, "lost": closed}
    if not leaked and not closed:
        return MaskComparison(is_same=True, evidence=facts)
    if not leaked:
        return MaskComparison(
            f"; {plural(closed, 'pair')} {_is_or_are(closed)} closed that {whom} open",
            evidence=facts,
        )
    words = f"; {plural(leaked, 'pair')} {_is_or_are(leaked)} open there that {whom} closed"
    return MaskComparison(words, has_leak=True, evidence=facts)


def _call_cells(context: RuleContext, call: CallRecord) -> BoolArray | None:
    mask = context.mask(call.mask)
    return None if mask is None else mask.cells


def _peer_cells(context: RuleContext, peers: Sequence[CallRecord]) -> list[BoolArray]:
    names = dict.fromkeys(peer.mask for peer in peers)
    masks = (context.mask(name) for name in names)
    return [mask.cells for mask in masks if mask is not None and mask.cells is not None]


def _declared_cells(context: RuleContext, call: CallRecord, mine: BoolArray) -> list[BoolArray]:
    intent, mask = context.declared_mask, context.mask(call.mask)
    if intent is None or intent.assumed or mask is None or mask.kv_offset:
        return []
    return [intent.spec.dense(mine.shape[1], mine.shape[2], q_offset=mask.q_offset)[None]]


def _count_differing_pairs(mine: BoolArray, other: BoolArray) -> tuple[int, int]:
    """Return how many pairs are open in mine alone, and in the other alone, in any head."""
    leaked: BoolArray = np.any(mine & ~other, axis=0)
    closed: BoolArray = np.any(~mine & other, axis=0)
    return int(leaked.sum()), int(closed.sum())


def _is_or_are(n: int) -> str:
    return "is" if n == 1 else "are"
