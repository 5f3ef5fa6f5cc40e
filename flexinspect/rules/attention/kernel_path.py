"""Checks which kernel ran in each layer and step: fallbacks, unpatched layers, needless builds.

The path of a call is compared with the other layers of its step and with its layer's earlier steps.
Programs that never run FlexAttention have no findings, except for suppressed exceptions.
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
    why="An uncompiled build evaluates the mask_mod on every cell and for every head. For a long "
    "prompt this costs more than the attention.",
    confirm="The query lists the builds of the step with grid and time; the calls of these layers "
    "have the same mask fingerprint.",
    fix="Build the mask once per forward, outside the layers, with None for batch and heads that "
    "the mask_mod ignores, and pass the object on.",
    query="SELECT layer, batch, heads, q_len, kv_len, rule, wall_ms, peak_growth FROM builds WHERE "
    "generation = {generation} AND branch = {branch} AND step = {step} ORDER BY build",
)

COSTLY_MS = 50.0
COSTLY_SHARE = 0.2
COSTLY_LAYERS = 4
"""Needless builds are a warning from this many layers, milliseconds and share of the step."""

MIN_UNCHANGED_STEPS = 3
"""Consecutive steps with a rebuilt unchanged mask, from which it is reported."""

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
"""Exceptions that code uses to detect that it has no mask yet."""

_NO_MASK_PASSED = (None, "none")
"""The kernel received the mask of its layer, or the layer received none."""


class KernelPathRule(Rule):
    """Compares the path of each layer with the other layers and with its earlier steps."""

    name: ClassVar[str] = "path"
    findings: ClassVar[Mapping[str, FindingKind]] = {
        FALLBACK: FindingKind(
            Severity.WARNING,
            "a layer fell back to another kernel",
            why="The fallback runs without the mask of the first choice: the other layers isolate "
            "segments and this one mixes them.",
            confirm="The path panel highlights the layer, and the mask panel shows its mask. The "
            "query lists path, mask and exception of every layer of the step.",
            fix="Do not catch exceptions of the attention call, or re-raise them. Then fix what "
            "the exception reports (a device, a length, a number of heads).",
            query=_PATH_QUERY,
        ),
        BYPASS: FindingKind(
            Severity.WARNING,
            "FlexAttention ran only in some steps, without an exception",
            why="The mask is not applied where the patch calls the original attention, so "
            "generated tokens are chosen under another mask than the prompt.",
            confirm="The path panel shows the steps side by side. In the mask panel the decode row "
            "is open where the declared mask is closed.",
            fix="Let the patched forward handle a query of one row too: build the one-row mask "
            "with the row's offset instead of calling the original.",
            query="SELECT step, layer, path, q_len, kv_len FROM calls WHERE generation = "
            "{generation} AND branch = {branch} ORDER BY step, layer",
        ),
        UNPATCHED: FindingKind(
            Severity.WARNING,
            "some layers never ran FlexAttention although others did",
            why="One layer without the mask is enough: it mixes the segments that the other layers "
            "isolate, and every later layer propagates the mixture.",
            confirm="The path panel shows the layers that differ; their backend is the function "
            "they requested.",
            fix="Patch every layer: take them from model.modules() or the configuration, not from "
            "a fixed list, and look for a layer whose forward was restored.",
            query=_PATH_QUERY,
        ),
        SUPPRESSED_EXCEPTION: FindingKind(
            Severity.NOTE,
            "an exception was suppressed, and the same path ran afterwards",
            why="Code that catches every exception hides the next failure too. The message shows "
            "whether this one matters.",
            confirm="Do not catch the exception, and check where it comes from.",
            fix="Catch only the expected exception, outside the attention call.",
            query=_PATH_QUERY,
        ),
        MASK_IGNORED: FindingKind(
            Severity.NOTE,
            "a layer received one mask, and its kernel another",
            why="Custom code that builds its own mask may be intended, but the padding or "
            "sliding-window mask of the model is then not applied.",
            confirm="The mask panel shows the mask that the kernel received; the query describes "
            "the one passed to the layer.",
            fix="Combine both masks if the model's own is needed (padding, sliding window).",
            query=_PATH_QUERY,
        ),
        NEEDLESS: NEEDLESS_KIND,
    }

    def __init__(self) -> None:
        self._builds = BuildTracker()
        self._failed_kernels: dict[tuple[int | None, str], str] = {}
        """Which kernel raised, by layer and exception message, for the whole run."""

    def on_generation_start(self, context: RuleContext) -> None:
        """Reset the paths of a generation."""
        super().on_generation_start(context)
        self._uniform_path = ("", False)
        """The only path of all layers so far, and whether the last step had one row."""
        self._ongoing: list[tuple[dict[int, str], Finding]] = []
        """Findings about layers that changed their path, with the path since then."""
        self._paths_by_layer: dict[int, list[tuple[str, bool]]] = {}
        """By layer, its paths so far, each with whether the step had one row."""

    def on_event(self, event: EventRecord) -> Sequence[Finding]:
        """Store which kernel raised; `on_step` reports the fallback."""
        if event.kind == KERNEL_FAILED_EVENT:
            key = (event.data.get("layer"), str(event.data.get("error")))
            self._failed_kernels[key] = str(event.data.get("kernel"))
        return ()

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Compare the calls of a step with each other and with earlier steps."""
        calls = step.calls
        if not calls:
            return ()
        found = self._builds.on_step(step, self.context) if step.builds else []
        # From here on, this is what a step without a fault costs.
        paths = {call.path for call in calls}
        suspicious = [
            c for c in calls if c.swallowed is not None or c.handed not in _NO_MASK_PASSED
        ]
        if (
            len(paths) == 1
            and not suspicious
            and (calls[0].path, step.q_len == 1) == self._uniform_path
        ):
            return found
        last = {call.layer: call for call in calls}
        found += self._check_calls(step, last)
        self._record_paths(step, last)
        agree = len(paths) == 1 and not suspicious and self._paths_agree(last)
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
        found, reported = [], set[int]()
        for group in _group_by_message(last, "swallowed").values():
            found.append(self._suppressed_finding(step, group, last))
            reported.update(group)
        rest = {layer: call for layer, call in last.items() if layer not in reported}
        found += [finding for paths, finding in self._ongoing if _has_same_paths(paths, rest)]
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
        message = str(call.swallowed)
        where = in_layers(tuple(group), 0 if len(last) == 1 else len(last))
        of = "" if len(group) == len(last) else f" (of {len(last)} layers)"
        kernel = self._failed_kernels.get((call.layer, message), "")
        lost = compare_call_mask(step, self.context, call, _other_calls(last, group))
        exception = f"{kernel + ' raised ' if kernel else ''}{printable(message)}, suppressed"
        if self._is_fallback(step, call, message, kernel, last, group):
            finding_id, verb = FALLBACK, f"fell back to {call.path}"
        else:
            finding_id, verb = SUPPRESSED_EXCEPTION, f"continued with {call.path}"
        sentence = (
            f"{_capitalize(where)}{of} {verb} in step {step.step}: {exception}{lost.description}."
        )
        severity = Severity.ERROR if lost.has_leak else self.findings[finding_id].severity
        evidence = {
            "swallowed": message,
            "kernel": kernel,
            **_path_evidence(group, last),
            **lost.evidence,
        }
        series = f"{call.path} in {list(group)}: {_mask_digits(message)}"
        return self._finding(step, finding_id, severity, sentence, group, evidence, series)

    def _is_fallback(
        self,
        step: StepRecord,
        call: CallRecord,
        message: str,
        kernel: str,
        last: Mapping[int, CallRecord],
        group: Mapping[int, CallRecord],
    ) -> bool:
        """Whether the call after an exception took another path than the one that raised."""
        others = {other.path for layer, other in last.items() if layer not in group}
        before = {path for path, _ in self._paths_by_layer.get(call.layer, ())}
        if (others | before) - {call.path}:
            return True
        if kernel:
            return not _is_path_of_kernel(kernel, call.path)
        is_lookup = message.partition(":")[0] in _LOOKUP_ERRORS
        return not _is_flex(call.path) and (bool(step.builds) or not is_lookup)

    # -- no exception ----------------------------------------------------------------------------

    def _has_changed_path(self, call: CallRecord) -> bool:
        """Whether a layer switched to or from FlexAttention for the first time."""
        before = {path for path, _ in self._paths_by_layer.get(call.layer, ())}
        if not before or call.path in before:
            return False
        return _is_flex(call.path) != any(map(_is_flex, before))

    def _changed_path_finding(
        self, step: StepRecord, moved: Mapping[int, CallRecord], last: Mapping[int, CallRecord]
    ) -> Finding:
        """Report layers that switch to or from FlexAttention within a generation."""
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
                    f"{_capitalize(where)} ran {paths} for the prompt and {call.path} for {rows}, "
                    f"from step {step.step} on: the patch calls the original attention there"
                )
        else:
            finding_id = FALLBACK
            sentence = f"From step {step.step} on {where} ran {call.path} after {paths}"
        severity = self.findings[finding_id].severity
        if lost.is_same:
            severity = Severity.NOTE
        evidence = {"before": paths, **_path_evidence(moved, last), **lost.evidence}
        full = f"{sentence}, without an exception{lost.description}."
        series = f"{call.path} in {list(moved)}"
        return self._finding(step, finding_id, severity, full, moved, evidence, series)

    def _check_unpatched(
        self, step: StepRecord, rest: Mapping[int, CallRecord], last: Mapping[int, CallRecord]
    ) -> list[Finding]:
        """Report layers that never ran FlexAttention although others do."""
        unpatched = {
            layer: call
            for layer, call in rest.items()
            if not _is_flex(call.path) and not self._has_run_flex(layer)
        }
        flex = [call for call in last.values() if _is_flex(call.path)]
        if not flex or not unpatched:
            return []
        call, where = next(iter(unpatched.values())), in_layers(tuple(unpatched), len(last))
        lost = compare_call_mask(step, self.context, call, flex)
        with_flex = in_layers([c.layer for c in flex], len(last))
        sentence = (
            f"{_capitalize(where)} (of {len(last)} layers) ran {call.path} in step {step.step}, "
            f"while {with_flex} ran {flex[0].path}, without an exception: "
            f"{'it was' if len(unpatched) == 1 else 'they were'} never patched{lost.description}."
        )
        severity = Severity.ERROR if lost.has_leak else Severity.WARNING
        evidence = {**_path_evidence(unpatched, last), **lost.evidence}
        series = "layers " + ",".join(map(str, unpatched))
        return [self._finding(step, UNPATCHED, severity, sentence, unpatched, evidence, series)]

    def _has_run_flex(self, layer: int) -> bool:
        return any(_is_flex(path) for path, _ in self._paths_by_layer.get(layer, ()))

    def _check_ignored_mask(
        self, step: StepRecord, group: Mapping[int, CallRecord]
    ) -> list[Finding]:
        """Report a mask that the layer received but the kernel did not use, not even in part."""
        call = next(iter(group.values()))
        passed = str(call.handed)
        mask = self.context.mask(call.mask)
        if passed in _NO_MASK_PASSED or mask is None:
            return []
        kind = passed.partition(" ")[0]
        if mask.kind == kind and kind != "block":  # may be a slice of the mask of the layer
            return []
        used = "no mask" if mask.kind.startswith("none") else f"another mask ({mask.kind})"
        sentence = (
            f"{_capitalize(in_layers(tuple(group), 0))} received a mask ({printable(passed)}) in "
            f"step {step.step}, but the kernel received {used}."
        )
        evidence = {"handed": passed, "mask": call.mask, "kind": mask.kind}
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
        return self.finding(
            step,
            finding_id,
            sentence,
            severity=severity,
            layers=group,
            evidence=evidence,
            series=series,
        )


def _capitalize(words: str) -> str:
    return words[0].upper() + words[1:]


def _is_flex(path: str) -> bool:
    return path.startswith("flex")


def _is_path_of_kernel(kernel: str, path: str) -> bool:
    """Whether a path belongs to a kernel; building a mask is part of FlexAttention."""
    return _is_flex(path) if kernel in ("flex_attention", "create_block_mask") else path == "sdpa"


def _group_by_message(
    last: Mapping[int, CallRecord], name: str
) -> dict[str, dict[int, CallRecord]]:
    """The layers whose calls have a message in the field `name`, by path and message."""
    groups: dict[str, dict[int, CallRecord]] = {}
    for layer, call in last.items():
        message = getattr(call, name)
        if message is not None:
            groups.setdefault(f"{call.path} {_mask_digits(message)}", {})[layer] = call
    return groups


def _mask_digits(words: str) -> str:
    """A message without its numbers, which differ between steps and layers."""
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
    """How the executed mask of a call differs from the expected one.

    `description` ends a sentence. `has_leak` says that pairs are open that should be closed,
    `is_same` that the masks are known to be equal.
    """

    description: str = ""
    has_leak: bool = False
    is_same: bool = False
    evidence: Mapping[str, Any] = field(default_factory=dict)


def compare_call_mask(
    step: StepRecord, context: RuleContext, call: CallRecord, peers: Sequence[CallRecord]
) -> MaskComparison:
    """Compare a call's mask with those of `peers`, or with the declared mask if there are none.

    Of several other masks (sliding and full layers) the most similar one is used. The result is
    empty if cells were not recorded.
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
    owner = "in the other layers" if peers else "in the declared mask"
    facts = {"leaked": leaked, "lost": closed}
    if not leaked and not closed:
        return MaskComparison(is_same=True, evidence=facts)
    if not leaked:
        return MaskComparison(
            f"; {plural(closed, 'pair')} {_is_or_are(closed)} closed that {_is_or_are(closed)} "
            f"open {owner}",
            evidence=facts,
        )
    verb = _is_or_are(leaked)
    words = f"; {plural(leaked, 'pair')} {verb} open that {verb} closed {owner}"
    return MaskComparison(words, has_leak=True, evidence=facts)


def _call_cells(context: RuleContext, call: CallRecord) -> BoolArray | None:
    mask = context.mask(call.mask)
    return None if mask is None else mask.cells


def _peer_cells(context: RuleContext, peers: Sequence[CallRecord]) -> list[BoolArray]:
    names = dict.fromkeys(peer.mask for peer in peers)
    masks = (context.mask(name) for name in names)
    return [mask.cells for mask in masks if mask is not None and mask.cells is not None]


def _declared_cells(context: RuleContext, call: CallRecord, mine: BoolArray) -> list[BoolArray]:
    declared, mask = context.declared_mask, context.mask(call.mask)
    if declared is None or declared.assumed or mask is None or mask.kv_offset:
        return []
    return [declared.spec.dense(mine.shape[1], mine.shape[2], q_offset=mask.q_offset)[None]]


def _count_differing_pairs(mine: BoolArray, other: BoolArray) -> tuple[int, int]:
    """Number of pairs that are open only in `mine`, and only in `other`, in any head."""
    leaked: BoolArray = np.any(mine & ~other, axis=0)
    closed: BoolArray = np.any(~mine & other, axis=0)
    return int(leaked.sum()), int(closed.sum())


def _is_or_are(n: int) -> str:
    return "is" if n == 1 else "are"


class BuildTracker:
    """Finds needless mask builds of one run.

    A step is compared with the previous one, even of another generation: a loop over sequences of
    equal length rebuilds the same mask for each.
    """

    def __init__(self) -> None:
        self._last_mask: str | None = None
        self._n_unchanged = 0
        self._reported: set[str] = set()

    def on_step(self, step: StepRecord, context: RuleContext) -> list[Finding]:
        """Report needless builds of a step whose masks are known."""
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
        heads_ignored = (first.heads or 1) > 1 and cells is not None and len(cells) == 1
        heads = f", for {first.heads} heads that all share it" if heads_ignored else ""
        n_layers = len({call.layer for call in step.calls})
        sentence = (
            f"The same mask was built {len(builds)} times in step {step.step}, in "
            f"{in_layers(layers, n_layers)} (grid {_format_grid(first)}, {ms:.1f} ms, mask_mod "
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
            "heads_ignored": heads_ignored,
        }
        severity = Severity.WARNING if is_costly else Severity.NOTE
        return _build_finding(step, severity, sentence, evidence, layers, "layers")

    def _check_steps(self, step: StepRecord) -> list[Finding]:
        """Report a mask that each step rebuilds without a change."""
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
            f"The mask of step {step.step} is the same as in the {self._n_unchanged} steps before, "
            f"but was rebuilt in each (grid {_format_grid(built[0])}, {ms:.1f} ms)."
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
