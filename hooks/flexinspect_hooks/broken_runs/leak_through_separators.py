"""No wording sees another, but the line breaks see all before them, and all see the line breaks."""

from __future__ import annotations

from typing import Any

from flexinspect_hooks.broken_runs.kit import BrokenRunSetup, isolation, span_numbers


def run(setup: BrokenRunSetup, *, repaired: bool) -> None:
    inner = [(start, stop - 1, label) for start, stop, label in setup.spans]
    if repaired:
        rule = isolation(setup.spans)
    else:
        numbers, cue = span_numbers(inner, 512), setup.spans[-1][1]

        def rule(q: Any, kv: Any) -> Any:
            shared = (numbers[q] == 0) | (numbers[kv] == 0)
            return (kv <= q) & ((numbers[q] == numbers[kv]) | shared | (q >= cue))

    setup.register_attention(rule)
    with setup.recorded(segments=setup.spans if repaired else inner, mask=None):
        setup.generate()
