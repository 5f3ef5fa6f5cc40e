"""Batch rows beyond the first: rules that read the batch index, and rows that see too much.

Cells are recorded of batch row 0 alone. What a sample of the other rows shows is told by the
capture, once for each mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from flexinspect.findings import Finding, Severity
from flexinspect.records import CallRecord, EventRecord, MaskRecord, StepRecord
from flexinspect.rules.base import FindingKind, Rule
from flexinspect.rules.words import format_layers as in_layers
from flexinspect.rules.words import format_ranges, plural, printable

IGNORES_BATCH = "mask.ignores-batch"
BATCH_FUTURE = "mask.batch-future"

BATCH_ROWS_EVENT = "batch-rows"
_MAX_BATCH_ROWS = 8

_BATCH_QUERY = (
    "SELECT step, text, data FROM events WHERE kind = 'batch-rows' AND generation = {generation} "
    "AND step = {step}"
)


class BatchRowsRule(Rule):
    """Says where a mask made for one batch row has a rule that tells rows apart, and the like."""

    name: ClassVar[str] = "batches"
    handles_standalone_calls: ClassVar[bool] = True
    findings: ClassVar[Mapping[str, FindingKind]] = {
        IGNORES_BATCH: FindingKind(
            Severity.ERROR,
            "a mask for one batch row, whose rule tells batch rows apart",
            "The block tables are those of batch row 0. Compiled FlexAttention goes by them for "
            "every sequence: others lose blocks or see blocks that their rule closes. Uncompiled "
            "it is right, so it goes unnoticed while one debugs.",
            "The event gives the open cells of each batch row; evaluate the rule at b = 0 and at "
            "the named row.",
            "Give `create_block_mask` the batch size as B whenever the rule reads `b`.",
            _BATCH_QUERY,
        ),
        BATCH_FUTURE: FindingKind(
            Severity.WARNING,
            "a batch row sees the future, and batch row 0 does not",
            "Panels and most rules look at batch row 0, whose mask is causal: the sequence that is "
            "named is shown the tokens that it predicts.",
            "Run the named sequence alone: it is batch row 0 then.",
            "Add `kv_idx <= q_idx` for every batch row; look for tables indexed by `b` that were "
            "filled for the first row alone.",
            _BATCH_QUERY,
        ),
    }

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Return what the step's events say of its masks' batch rows."""
        found: list[Finding] = []
        for event in step.events:
            if event.kind == BATCH_ROWS_EVENT and event.data["differ"]:
                found += self._check_event(step, event)
        return found

    def _check_event(self, step: StepRecord, event: EventRecord) -> list[Finding]:
        data = event.data
        calls = [call for call in step.calls if call.mask == data["mask"]]
        mask = self.context.mask(str(data["mask"]))
        if not calls or mask is None:
            return []
        if mask.kind == "block" and data["made_for"] == 1:
            return [self._ignores_batch_finding(step, mask, calls, data)]
        future = [row for row, n in enumerate(data["future"]) if n and not data["future"][0]]
        if future and calls[0].causal is not False and step.q_len > 1:
            return [self._future_finding(step, mask, calls, data, future)]
        return []

    def _ignores_batch_finding(
        self,
        step: StepRecord,
        mask: MaskRecord,
        calls: Sequence[CallRecord],
        data: Mapping[str, Any],
    ) -> Finding:
        other, row, key = data["first"]
        n_open = data["open"]
        runs = (
            "compiled flex went by the tables of batch row 0 for all of them"
            if mask.compiled
            else "uncompiled flex asks the rule and is right, compiled it would go by one table"
        )
        sentence = (
            f"{self._format_where(step, calls)}the block mask of "
            f"{printable(mask.rule or 'an unnamed rule')} was built for one batch row (B=None), "
            f"and its rule tells the {data['batch']} apart: {_format_differing_rows(data['differ'])} not as row 0, "
            f"first at row {step.kv_before + row}, key {key} of batch row {other} "
            f"({n_open[other]} cells open of those looked at, {n_open[0]} in row 0); {runs}."
        )
        severity = Severity.ERROR if mask.compiled else Severity.WARNING
        position = step.kv_before + row
        return self._finding(step, IGNORES_BATCH, severity, sentence, calls, data, position)

    def _future_finding(
        self,
        step: StepRecord,
        mask: MaskRecord,
        calls: Sequence[CallRecord],
        data: Mapping[str, Any],
        future: Sequence[int],
    ) -> Finding:
        pairs = sum(data["future"][row] for row in future)
        sentence = (
            f"{self._format_where(step, calls)}batch {_format_batch_rows(future)} of {data['batch']} "
            f"{'sees' if len(future) == 1 else 'see'} the future ({plural(pairs, 'pair')} of "
            f"those looked at) under the {mask.kind} mask, and batch row 0 does not."
        )
        position = step.kv_before + int(data["first"][1])
        about = (BATCH_FUTURE, Severity.WARNING, sentence)
        return self._finding(step, *about, calls, data, position)

    def _format_where(self, step: StepRecord, calls: Sequence[CallRecord]) -> str:
        if self.context.is_standalone:
            return "In a call outside of a model "
        which = sorted({call.layer for call in calls})
        return f"In {in_layers(which, len({call.layer for call in step.calls}))} "

    def _finding(
        self,
        step: StepRecord,
        finding_id: str,
        severity: Severity,
        sentence: str,
        calls: Sequence[CallRecord],
        data: Mapping[str, Any],
        position: int,
    ) -> Finding:
        which = () if self.context.is_standalone else {call.layer for call in calls}
        about: dict[str, Any] = {"severity": severity, "layers": which, "positions": (position,)}
        return self.finding(step, finding_id, sentence, evidence=data, series=finding_id, **about)


def _format_batch_rows(which: Sequence[int]) -> str:
    """Return `row 1` or `rows 1, 3`."""
    return f"row{'s' * (len(which) > 1)} {format_ranges(which[:_MAX_BATCH_ROWS])}"


def _format_differing_rows(differ: Sequence[int]) -> str:
    """Return `batch row 1 is` or `batch rows 1, 3 are`."""
    return f"batch {_format_batch_rows(differ)} {'is' if len(differ) == 1 else 'are'}"
