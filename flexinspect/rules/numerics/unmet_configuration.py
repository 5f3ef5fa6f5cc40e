"""What the configuration of a model says, and the model does not do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexinspect.core.text import printable
from flexinspect.records import imported
from flexinspect.records.step import StepRecord
from flexinspect.rules.engine import Findings, Rule, finding_kinds

UNMET_EVENT = "unmet-configuration"
"""The event of a first step: `what` is `UNTIED` or `ROPE`, and what the configuration says."""
UNTIED, ROPE = "config.untied-head", "config.unread-rope"


class UnmetConfigurationRule(Rule):
    """Reports each setting once."""

    name = "unmet_configuration"
    needs = (imported.EVENTS,)
    findings = finding_kinds(UNTIED, ROPE)

    def on_step(self, step: StepRecord) -> Findings:
        """Look for the events."""
        for event in step.events:
            if event.kind == UNMET_EVENT:
                sentence = _untied if event.data["what"] == UNTIED else _rope
                what = str(event.data["what"])
                yield self.finding(step, what, sentence(event.data), (), event.data, series=what)


def _untied(data: Mapping[str, Any]) -> str:
    head, table = printable(str(data["head"])), printable(str(data["table"]))
    return (
        "The configuration says that the output head is the embedding table "
        f"(tie_word_embeddings), but {head} is another tensor than {table}, and differs from it by "
        f"{data['difference']:.2g} times its norm."
    )


def _rope(data: Mapping[str, Any]) -> str:
    return (
        f"The configuration has {data['name']} = {data['given']:g}, but the model is made from "
        f"rope_parameters, which has {data['used']:g}: nothing reads the attribute."
    )
