"""Judges options of attention calls: promises to the kernel, and keywords that are not read.

With some kernel options FlexAttention leaves out a check, and computes garbage where the mask does
not keep the promise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from flexinspect.core.text import is_or_are, plural, printable
from flexinspect.records import imported
from flexinspect.records.finding import Severity
from flexinspect.records.step import CallRecord, MaskRecord, StepRecord
from flexinspect.rules.context import format_step_layers
from flexinspect.rules.engine import Findings, Rule, finding_kinds

KERNEL_OPTIONS_EVENT = "kernel-options"
"""The event of a step whose calls have other kernel options than before: {layer: options}."""
UNREAD_EVENT = "keywords-not-read"
"""The event of an own attention function that ignores keywords: names, layer and function."""
PROMISE_BROKEN, UNREAD = "mask.option-promise", "attention.keyword-unread"


class KernelOptionsRule(Rule):
    """Compares ROWS_GUARANTEED_SAFE and BLOCKS_ARE_CONTIGUOUS with the masks of their calls."""

    name = "kernel_options"
    needs = (imported.MASKS, imported.EVENTS)
    handles_standalone_calls = True
    findings = finding_kinds(PROMISE_BROKEN, UNREAD)

    def __init__(self) -> None:
        self._options: dict[int, Mapping[str, Any]] = {}

    def on_step(self, step: StepRecord) -> Findings:
        """Check the calls of the layers that have such options."""
        for event in step.events:
            if event.kind == UNREAD_EVENT:
                yield self._unread_finding(step, event.data)
            if event.kind == KERNEL_OPTIONS_EVENT:
                by_layer = event.data["layers"]
                self._options = {int(layer): options for layer, options in by_layer.items()}
        if not self._options:
            return
        broken: dict[str, list[tuple[CallRecord, str]]] = {}
        for call in step.calls:
            mask = self.context.mask(call.mask)
            options = self._options.get(call.layer)
            if mask is not None and options:
                for option, what in _broken_promises(options, mask):
                    broken.setdefault(option, []).append((call, what))
        for option, calls in broken.items():
            yield self._finding(step, option, calls)

    def _unread_finding(self, step: StepRecord, data: Mapping[str, Any]) -> Any:
        names, layer = list(map(printable, data["names"])), int(data["layer"])
        sentence = (
            f"Layer {layer} passes {' and '.join(names)} to attention "
            f"'{printable(data['function'])}', whose code does not read "
            f"{'it' if len(names) == 1 else 'them'}."
        )
        return self.finding(step, UNREAD, sentence, (layer,), data, series=str(data["function"]))

    def _finding(self, step: StepRecord, option: str, calls: list[tuple[CallRecord, str]]) -> Any:
        layers = sorted({call.layer for call, _ in calls})
        (first, what), is_compiled = calls[0], any(c.path == "flex compiled" for c, _ in calls)
        where = "A call" if self.context.is_standalone else f"Step {step.step}"
        if not self.context.is_standalone:
            where += f", {format_step_layers(layers, step)}"
        does = (
            "so the compiled kernel computes garbage there"
            if is_compiled
            else "which uncompiled FlexAttention does not use; compiled it would compute garbage"
        )
        sentence = f"{where}: kernel_options has {option}=True, but {what}, {does}."
        severity = None if is_compiled else Severity.WARNING
        evidence = {"option": option, "path": first.path}
        return self.finding(
            step, PROMISE_BROKEN, sentence, layers, evidence, severity=severity, series=option
        )


def _broken_promises(options: Mapping[str, Any], mask: MaskRecord) -> Iterator[tuple[str, str]]:
    """Yield the options whose promise a mask breaks, and how."""
    if options.get("ROWS_GUARANTEED_SAFE") and mask.cells is not None:
        empty = np.flatnonzero(~mask.cells.any(axis=(0, -1)))
        if len(empty):
            first = mask.q_offset + int(empty[0])
            verb = "sees" if len(empty) == 1 else "see"
            yield (
                "ROWS_GUARANTEED_SAFE",
                f"{plural(len(empty), 'row')} of its mask {verb} no key (first: position {first})",
            )
    if options.get("BLOCKS_ARE_CONTIGUOUS") and mask.partial is not None:
        used = mask.partial if mask.full is None else mask.partial | mask.full
        edges = np.diff(np.pad(used, ((0, 0), (0, 0), (1, 1))).astype(np.int8), axis=-1)
        n_split = int(((edges == 1).sum(axis=-1) > 1).sum())
        if n_split:
            yield (
                "BLOCKS_ARE_CONTIGUOUS",
                f"the key blocks of {plural(n_split, 'block row')} {is_or_are(n_split)} scattered",
            )
