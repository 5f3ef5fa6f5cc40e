"""Embeddings that the program took from the table itself, without the scale of their module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexinspect.core.text import format_numbers, plural, printable
from flexinspect.records import imported
from flexinspect.records.step import StepRecord
from flexinspect.rules.engine import Findings, Rule, finding_kinds

RAW_EMBEDDINGS_EVENT = "raw-embeddings"
"""The event of a first step with rows of `inputs_embeds` that the table has, see its observer."""
UNSCALED = "inputs.unscaled-embeddings"


class RawEmbeddingsRule(Rule):
    """Reports what the capture side found in the `inputs_embeds` of a first forward."""

    name = "raw_embeddings"
    needs = (imported.EVENTS,)
    findings = finding_kinds(UNSCALED)

    def on_step(self, step: StepRecord) -> Findings:
        """Look for the event."""
        for event in step.events:
            if event.kind == RAW_EMBEDDINGS_EVENT:
                yield self._finding(step, event.data)

    def _finding(self, step: StepRecord, data: Mapping[str, Any]) -> Any:
        positions, factor, module = data["positions"], data["factor"], printable(data["module"])
        does, lack = "changes them", "lack this change"
        if factor is not None:
            does = f"multiplies them by {factor:.4g}"
            lack = f"are {factor:.4g} times too small" if factor > 1 else "lack this factor"
        sentence = (
            f"{len(positions)} of {plural(data['rows'], 'row')} of inputs_embeds are raw rows of "
            f"the embedding table ({format_numbers('position', positions)}), but the model's "
            f"{module} {does}: they {lack}."
        )
        return self.finding(step, UNSCALED, sentence, evidence=data, positions=positions)
