"""The line breaks between the wordings belong to nobody: a row may see its own wording only."""

from __future__ import annotations

from typing import Any

from flexinspect_hooks.broken_runs.kit import BrokenRunSetup, isolation, span_numbers


def run(setup: BrokenRunSetup, *, repaired: bool) -> None:
    whole = setup.spans
    if repaired:
        rule = isolation(whole)
    else:
        numbers = span_numbers([(start, stop - 1, label) for start, stop, label in whole], 512)
        cue = whole[-1][1]

        def rule(q: Any, kv: Any) -> Any:
            together = (numbers[q] == numbers[kv]) & (numbers[q] > 0)
            return (kv <= q) & (together | (q >= cue))

    setup.register_attention(rule)
    with setup.recorded():
        setup.generate()
