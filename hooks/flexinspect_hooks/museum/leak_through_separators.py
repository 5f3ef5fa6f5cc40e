"""No wording sees another, but the line breaks see all before them, and all see the line breaks."""

from __future__ import annotations

from typing import Any

from flexinspect_hooks.museum.kit import Stage, isolation, owners


def run(stage: Stage, *, repaired: bool) -> None:
    inner = [(start, stop - 1, label) for start, stop, label in stage.spans]
    if repaired:
        rule = isolation(stage.spans)
    else:
        numbers, cue = owners(inner, 512), stage.spans[-1][1]

        def rule(q: Any, kv: Any) -> Any:
            shared = (numbers[q] == 0) | (numbers[kv] == 0)
            return (kv <= q) & ((numbers[q] == numbers[kv]) | shared | (q >= cue))

    stage.own_attention(rule)
    with stage.watched(segments=stage.spans if repaired else inner, mask=None):
        stage.generate()
