"""Checks which kernel ran in each layer and step: fallbacks, unpatched layers, needless builds.

The path of a call is compared with the other layers of its step and with its layer's earlier steps.
Programs that never run FlexAttention have no findings, except for suppressed exceptions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from flexinspect.core.text import capitalize, format_layers, is_or_are, plural, printable
from flexinspect.masks.mask_presets import BoolArray
from flexinspect.records import imported
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import BuildRecord, CallRecord, EventRecord, StepRecord
from flexinspect.rules.attention.kernel_failures import KERNEL_FAILED_EVENT
from flexinspect.rules.context import format_step_layers
from flexinspect.rules.engine import Findings, Rule, finding_kinds

COSTLY_LAYERS, COSTLY_CELLS = 4, 2048 * 2048
"""Needless builds are a warning from this many layers and cells that are evaluated again.

Times are left out: under load they differ between runs, and the exit code must not.
"""
MIN_UNCHANGED_STEPS = 3  # consecutive steps with a rebuilt unchanged mask, until it is reported

_DIGITS = re.compile(r"\d+")  # they differ between the messages of steps and layers
_LOOKUP_ERRORS = ("KeyError", "IndexError", "AttributeError", "StopIteration", "LookupError")
"""Exceptions that code uses to detect that it has no mask yet."""
_NO_MASK_PASSED = (None, "none")  # the kernel received the mask of its layer, or the layer none

Calls = Mapping[int, CallRecord]  # the last call of each layer


class KernelPathRule(Rule):
    """Compares the path of each layer with the other layers and with its earlier steps."""

    name = "path"
    needs = (imported.KERNELS,)
    findings = finding_kinds("path.[!k]*")  # all but path.kernel-failed

    def __init__(self) -> None:
        self._last_mask: str | None = None  # the only one of the last step, of any generation
        self._n_unchanged = 0  # consecutive steps that rebuilt it without a change
        self._unchanged_masks: set[str] = set()  # masks whose needless builds were reported
        self._failed_kernels: dict[tuple[int | None, str], str] = {}  # by layer and message

    def reset(self) -> None:
        self._uniform_path = ("", False)  # of all layers so far; whether the last step had one row
        self._ongoing: list[tuple[dict[int, str], Finding]] = []  # with the new path of each layer
        self._paths_by_layer: dict[int, dict[tuple[str, bool], None]] = {}
        """By layer, its paths so far, each with whether the step had one row."""

    def on_event(self, event: EventRecord) -> Sequence[Finding]:
        """Store which kernel raised; `on_step` reports the fallback."""
        if event.kind == KERNEL_FAILED_EVENT:
            key = (event.data.get("layer"), str(event.data.get("error")))
            self._failed_kernels[key] = str(event.data.get("kernel"))
        return ()

    def on_step(self, step: StepRecord) -> Findings:
        """Compare the calls of a step with each other and with earlier steps."""
        calls = step.calls
        if not calls:
            return
        if step.builds:
            yield from self._check_builds(step)
        # From here on, this is what a step without a fault costs.
        is_uniform = len({call.path for call in calls}) == 1 and all(
            call.suppressed_exception is None and call.mask_passed_to_layer in _NO_MASK_PASSED
            for call in calls
        )
        if is_uniform and (calls[0].path, step.q_len == 1) == self._uniform_path:
            return
        last = {call.layer: call for call in calls}
        yield from self._check_calls(step, last)
        for layer, call in last.items():
            self._paths_by_layer.setdefault(layer, {})[call.path, call.q_len == 1] = None
        agree = is_uniform and all(len({*self._paths_before(layer)}) == 1 for layer in last)
        self._uniform_path = (calls[0].path if agree else "", step.q_len == 1)

    def _paths_before(self, layer: int) -> list[str]:
        return [path for path, _ in self._paths_by_layer.get(layer, ())]

    def _check_calls(self, step: StepRecord, last: Calls) -> Findings:
        reported = set[int]()
        for group in _group_by_message(last, "suppressed_exception").values():
            yield self._suppressed_finding(step, group, last)
            reported.update(group)
        rest = {layer: call for layer, call in last.items() if layer not in reported}
        for paths, finding in self._ongoing:
            if all(layer in rest and rest[layer].path == path for layer, path in paths.items()):
                yield finding
        moved = {}  # layers that switched to or from FlexAttention for the first time
        for layer, call in rest.items():
            before = self._paths_before(layer)
            is_new = bool(before) and call.path not in before
            if is_new and _is_flex(call.path) != any(map(_is_flex, before)):
                moved[layer] = call
        if moved:
            finding = self._changed_path_finding(step, moved, last)
            self._ongoing.append(({n: call.path for n, call in moved.items()}, finding))
            yield finding
        else:
            yield from self._check_unpatched(step, rest, last)
        for group in _group_by_message(rest, "mask_passed_to_layer").values():
            yield from self._check_ignored_mask(step, group)

    def _path_finding(
        self,
        step: StepRecord,
        finding_id: str,
        sentence: str,
        group: Calls,
        last: Calls,
        *,
        peers: Sequence[CallRecord],
        evidence: Mapping[str, Any],
        series: str,
        leaked: Severity | None = None,
        same: Severity | None = None,
    ) -> Finding:
        """Return the finding about a group of the last calls, with a comparison of its first mask.

        Its severity is `leaked` if pairs are open that should be closed, `same` for equal masks.
        """
        paths, severity = {str(layer): call.path for layer, call in last.items()}, None
        facts = {**evidence, "layers": len(group), "of": len(last), "paths": paths}
        counts = self._compare_mask(next(iter(group.values())), peers)
        if counts is not None:
            n_open, n_closed = counts
            facts |= {"leaked": n_open, "lost": n_closed}
            n, now, then = (n_open, "open", "closed") if n_open else (n_closed, "closed", "open")
            severity, verb = leaked if n_open else None, is_or_are(n)
            owner = "in the other layers" if peers else "in the declared mask"
            if n:
                sentence += f"; {plural(n, 'pair')} {verb} {now} that {verb} {then} {owner}"
            else:
                severity = same
        options: dict[str, Any] = {"severity": severity, "layers": group, "series": series}
        return self.finding(step, finding_id, f"{sentence}.", evidence=facts, **options)

    def _suppressed_finding(self, step: StepRecord, group: Calls, last: Calls) -> Finding:
        call = next(iter(group.values()))
        message = str(call.suppressed_exception)
        where = capitalize(format_layers(tuple(group), 0 if len(last) == 1 else len(last)))
        of = "" if len(group) == len(last) else f" (of {len(last)} layers)"
        kernel = self._failed_kernels.get((call.layer, message), "")
        peers = [call for layer, call in last.items() if layer not in group]
        id_, verb = "path.swallowed", "continued with"
        if self._is_fallback(step, call, kernel, peers):
            id_, verb = "path.fallback", "fell back to"
        sentence = (
            f"{where}{of} {verb} {call.path} in step {step.step}: "
            f"{kernel + ' raised ' if kernel else ''}{printable(message)}, suppressed"
        )
        options: dict[str, Any] = {"peers": peers, "leaked": Severity.ERROR}
        options["evidence"] = {"suppressed_exception": message, "kernel": kernel}
        options["series"] = f"{call.path} in {list(group)}: {_DIGITS.sub('#', message)}"
        return self._path_finding(step, id_, sentence, group, last, **options)

    def _is_fallback(
        self, step: StepRecord, call: CallRecord, kernel: str, peers: Sequence[CallRecord]
    ) -> bool:
        """Whether the call after an exception took another path than the one that raised."""
        if {peer.path for peer in peers}.union(self._paths_before(call.layer)) - {call.path}:
            return True
        if kernel in ("flex_attention", "create_block_mask"):  # building a mask is part of it
            return not _is_flex(call.path)
        if kernel:
            return call.path != "sdpa"
        is_lookup = str(call.suppressed_exception).partition(":")[0] in _LOOKUP_ERRORS
        return not _is_flex(call.path) and (bool(step.builds) or not is_lookup)

    def _changed_path_finding(self, step: StepRecord, moved: Calls, last: Calls) -> Finding:
        """Report layers that switch to or from FlexAttention within a generation."""
        call, where = next(iter(moved.values())), format_layers(tuple(moved), len(last))
        before = self._paths_by_layer[call.layer]
        is_first = call.q_len == 1 and not any(one_row for _, one_row in before)
        paths = " and ".join(dict.fromkeys(path for path, _ in before))
        id_ = "path.bypass" if is_first or _is_flex(call.path) else "path.fallback"
        sentence = f"From step {step.step} on {where} ran {call.path} after {paths}"
        if is_first and not _is_flex(call.path):
            sentence = (
                f"{capitalize(where)} ran {paths} for the prompt and {call.path} for the steps of "
                f"one row, from step {step.step} on: the patch calls the original attention there"
            )
        sentence += ", without an exception"
        options: dict[str, Any] = {"evidence": {"before": paths}, "same": Severity.NOTE}
        series = f"{call.path} in {list(moved)}"
        return self._path_finding(
            step, id_, sentence, moved, last, peers=(), series=series, **options
        )

    def _check_unpatched(self, step: StepRecord, rest: Calls, last: Calls) -> Findings:
        """Report layers that never ran FlexAttention although others do."""
        paths = {layer: (call.path, *self._paths_before(layer)) for layer, call in rest.items()}
        unpatched = {n: call for n, call in rest.items() if not any(map(_is_flex, paths[n]))}
        flex = [call for call in last.values() if _is_flex(call.path)]
        if not flex or not unpatched:
            return
        call, where = next(iter(unpatched.values())), format_layers(tuple(unpatched), len(last))
        with_flex = format_layers([c.layer for c in flex], len(last))
        sentence = (
            f"{capitalize(where)} (of {len(last)} layers) ran {call.path} in step {step.step}, "
            f"while {with_flex} ran {flex[0].path}, without an exception: "
            f"{'it was' if len(unpatched) == 1 else 'they were'} never patched"
        )
        series = "layers " + ",".join(map(str, unpatched))
        options: dict[str, Any] = {"peers": flex, "series": series, "leaked": Severity.ERROR}
        id_ = "path.unpatched-layer"
        yield self._path_finding(step, id_, sentence, unpatched, last, evidence={}, **options)

    def _check_ignored_mask(self, step: StepRecord, group: Calls) -> Findings:
        """Report a mask that the layer received but the kernel did not use, not even in part."""
        call = next(iter(group.values()))
        passed, mask = str(call.mask_passed_to_layer), self.context.mask(call.mask)
        if passed in _NO_MASK_PASSED or mask is None:
            return
        kind = passed.partition(" ")[0]
        if mask.kind == kind and kind != "block":  # may be a slice of the mask of the layer
            return
        used = "no mask" if mask.kind.startswith("none") else f"another mask ({mask.kind})"
        sentence = (
            f"{capitalize(format_layers(tuple(group), 0))} received a mask ({printable(passed)}) "
            f"in step {step.step}, but the kernel received {used}."
        )
        evidence = {"mask_passed_to_layer": passed, "mask": call.mask, "kind": mask.kind}
        yield self.finding(step, "path.mask-ignored", sentence, group, evidence, series=kind)

    def _compare_mask(
        self, call: CallRecord, peers: Sequence[CallRecord]
    ) -> tuple[int, int] | None:
        """Count the pairs that only a call's mask opens, and those that only it closes.

        It is compared with the most similar mask of `peers` (sliding and full layers differ), or
        with the declared mask if there are none. None if cells were not recorded.
        """
        mask, spec = self.context.mask(call.mask), self.context.declared_spec
        if mask is None or mask.cells is None:
            return None
        mine, theirs = mask.cells, list[BoolArray]()
        if peers:
            others = map(self.context.mask, dict.fromkeys(peer.mask for peer in peers))
            theirs = [one.cells for one in others if one is not None and one.cells is not None]
        elif spec is not None and not mask.kv_offset:
            theirs = [spec.dense(mine.shape[1], mine.shape[2], q_offset=mask.q_offset)[None]]
        counts = [
            (int((mine & ~other).any(axis=0).sum()), int((~mine & other).any(axis=0).sum()))
            for other in theirs
            if other.shape[1:] == mine.shape[1:]
        ]
        return min(counts, key=sum, default=None)

    def _check_builds(self, step: StepRecord) -> Findings:
        """Report masks that several layers build, or else one that each step builds again."""
        # A step is compared with the previous one, even of another generation: a loop over
        # sequences of equal length rebuilds the same mask for each.
        groups: dict[tuple[Any, ...], list[BuildRecord]] = {}
        mask_of = {call.layer: call.mask for call in step.calls}
        for build in step.builds:
            mask = None if build.layer is None else mask_of.get(build.layer)
            if mask is not None:
                groups.setdefault((mask, build.mask_mod, *grid_sizes(build)), []).append(build)
        repeated = [(key[0], builds) for key, builds in groups.items() if len(builds) > 1]
        for mask, builds in repeated:
            yield self._repeated_build_finding(step, mask, builds)
        if not repeated:
            yield from self._check_unchanged_mask(step)

    def _repeated_build_finding(
        self, step: StepRecord, mask: str, builds: Sequence[BuildRecord]
    ) -> Finding:
        layers = {build.layer for build in builds if build.layer is not None}
        first, ms = builds[0], sum(build.wall_ms for build in builds)
        grid, spare = _format_grid(first), ms * (len(builds) - 1) / len(builds)
        known = self.context.mask(mask)
        has_one_head = known is not None and known.cells is not None and len(known.cells) == 1
        heads_ignored = (first.heads or 1) > 1 and has_one_head
        heads = f", for {first.heads} heads that all share it" if heads_ignored else ""
        sentence = (
            f"The same mask was built {len(builds)} times in step {step.step}, in "
            f"{format_step_layers(layers, step)} (grid {grid}, {ms:.1f} ms, "
            f"mask_mod {printable(first.mask_mod)}){heads}."
        )
        cells = math.prod(grid_sizes(first)) * (len(builds) - 1)
        is_costly = cells >= COSTLY_CELLS and len(layers) >= COSTLY_LAYERS
        evidence = {"builds": len(builds), "grid": grid, "needless_cells": cells}
        evidence["ms"] = round(ms, 2)
        peak_growth = sum(build.peak_growth for build in builds)
        evidence |= {"needless_ms": round(spare, 2), "peak_growth": peak_growth}
        evidence["heads_ignored"] = heads_ignored
        severity = Severity.WARNING if is_costly else Severity.NOTE
        options: dict[str, Any] = {"severity": severity, "layers": layers, "series": "layers"}
        return self.finding(step, "path.needless-builds", sentence, evidence=evidence, **options)

    def _check_unchanged_mask(self, step: StepRecord) -> Findings:
        """Report a mask that each step rebuilds without a change."""
        masks = {call.mask for call in step.calls}
        lengths = {(call.q_len, call.kv_len) for call in step.calls}
        built = [build for build in step.builds if (build.q_len, build.kv_len) in lengths]
        only = masks.pop() if len(masks) == 1 else None
        is_unchanged = built and only is not None and only == self._last_mask
        self._n_unchanged = self._n_unchanged + 1 if is_unchanged else 0
        self._last_mask = only
        n = self._n_unchanged
        if n < MIN_UNCHANGED_STEPS - 1 or only is None or only in self._unchanged_masks:
            return
        self._unchanged_masks.add(only)
        grid, ms = _format_grid(built[0]), built[0].wall_ms
        sentence = (
            f"The mask of step {step.step} is the same as in the {n} steps before, but was rebuilt "
            f"in each (grid {grid}, {ms:.1f} ms)."
        )
        evidence, id_ = {"steps": n + 1, "grid": grid, "ms": round(ms, 2)}, "path.needless-builds"
        yield self.finding(step, id_, sentence, evidence=evidence, series="steps")


def grid_sizes(build: BuildRecord) -> tuple[int, ...]:
    """Return the batch, heads, rows and keys for which a mask was built."""
    return build.batch or 1, build.heads or 1, build.q_len, build.kv_len


def _format_grid(build: BuildRecord) -> str:
    return " x ".join(map(str, grid_sizes(build)))


def _is_flex(path: str) -> bool:
    return path.startswith("flex")


def _group_by_message(last: Calls, name: str) -> dict[str, dict[int, CallRecord]]:
    """The layers whose calls have a message in the field `name`, by path and message."""
    groups: dict[str, dict[int, CallRecord]] = {}
    for layer, call in last.items():
        message = getattr(call, name)
        if message is not None:
            groups.setdefault(f"{call.path} {_DIGITS.sub('#', message)}", {})[layer] = call
    return groups
