"""The line breaks between the wordings belong to nobody: a row may see its own wording only."""

from __future__ import annotations

from typing import Any

from flexinspect_hooks.museum.kit import Stage, isolation, owners


def run(stage: Stage, *, repaired: bool) -> None:
    whole = stage.spans
    if repaired:
        rule = isolation(whole)
    else:
        numbers = owners([(start, stop - 1, label) for start, stop, label in whole], 512)
        cue = whole[-1][1]

        def rule(q: Any, kv: Any) -> Any:
            together = (numbers[q] == numbers[kv]) & (numbers[q] > 0)
            return (kv <= q) & (together | (q >= cue))

    stage.own_attention(rule)
    with stage.watched():
        stage.generate()
