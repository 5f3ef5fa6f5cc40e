"""A 2D attention mask with other values than 0 and 1, which transformers reads as 0 and not 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexinspect.records import imported
from flexinspect.records.finding import Severity
from flexinspect.records.step import StepRecord
from flexinspect.rules.engine import Findings, Rule, finding_kinds

OTHER_VALUES = "mask.other-values"
MASK_VALUES_EVENT = "mask-values"


class MaskValuesRule(Rule):
    """Reports position ids, scores and other numbers that were passed as the attention mask.

    Numbers from 1 on are a note: some attention functions read them as the documents of a row.
    """

    name = "mask_values"
    needs = (imported.EVENTS,)
    findings = finding_kinds(OTHER_VALUES)

    def on_step(self, step: StepRecord) -> Findings:
        """Judge the event of a first forward."""
        for event in step.events:
            if event.kind == MASK_VALUES_EVENT:
                yield self._finding(step, event.data)

    def _finding(self, step: StepRecord, data: Mapping[str, Any]) -> Any:
        smallest, largest, severity = data["smallest"], data["largest"], None
        sentence = f"The attention_mask has values from {smallest:g} to {largest:g}"
        if data["counts"]:
            sentence += (
                " that count its columns, as position ids do: the model reads them as a mask that "
                "closes the first token and nothing else"
            )
        elif smallest < 0:
            sentence += (
                ": transformers reads a 2D mask as 0 and not 0, so the negative values, which "
                "would close keys if they were added to scores, leave them open"
            )
        else:
            severity = Severity.NOTE
            sentence += (
                ", and transformers reads each one that is not 0 as 1; only an attention function "
                "that knows such masks, as of packed documents, tells them apart"
            )
        evidence = {name: data[name] for name in ("smallest", "largest", "distinct")}
        return self.finding(step, OTHER_VALUES, f"{sentence}.", (), evidence, severity=severity)
