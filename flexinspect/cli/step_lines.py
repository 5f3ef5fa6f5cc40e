"""What `flexinspect run --verbose` and its log print of a step: shapes, mask, candidates, token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flexinspect.analysis.isolation_verdict import judge_isolation
from flexinspect.core.errors import FlexInspectError
from flexinspect.inputs.model_sizes import human_bytes, human_count
from flexinspect.trace.query_results import StepRow
from flexinspect.trace.reader import TraceReader

_PICTURE_HEIGHT = 20


def plan_line(plan: Mapping[str, Any]) -> str:
    """Return the model, and the memory that it needs, from the facts of the event `plan`."""
    count, needs = human_count(plan.get("parameters")), human_bytes(plan.get("total"))
    free = human_bytes(plan.get("available"))
    return (
        f"{plan.get('name')}: {count} parameters in {plan.get('dtype')} on {plan.get('device')}, "
        f"from {plan.get('place')}; needs {needs} of {free} free"
    )


def step_lines(step: StepRow, reader: TraceReader) -> list[str]:
    """Return lengths, kernel path, shapes, distribution and the chosen token of a step."""
    calls = reader.calls(step.generation, step.step)
    lengths = f"q {step.q_len}, kv {step.kv_before} → {step.kv_after}"
    lines = [f"  step {step.step} {step.phase}: {lengths}, {step.wall_ms:.1f} ms"]
    if calls:
        call = calls[0]
        paths = ", ".join(sorted({call.path for call in calls}))
        masks = ", ".join(sorted({call.mask or "none" for call in calls}))
        shape = f"q {call.batch}×{call.q_heads}×{call.q_len}×{call.head_dim}"
        shape += f", k {call.batch}×{call.kv_heads}×{call.kv_len}×{call.head_dim}"
        lines.append(f"    {len(calls)} layers {paths}; {shape} {call.dtype}; mask {masks}")
    logits = reader.logits(step.generation, step.step)
    if logits is not None:
        best = "  ".join(f"{c.text!r} {c.logprob:.2f}" for c in logits.candidates[:4])
        lines.append(f"    entropy {logits.entropy:.3f}, margin {logits.margin:.2f}: {best}")
    tokens = reader.step_tokens(step.generation, step.step)
    return [*lines, *(f"    token {token.text!r} ({token.token_id})" for token in tokens)]


def mask_lines(step: StepRow, reader: TraceReader, width: int) -> Iterator[str]:
    """Yield the picture of the mask that ran in a step, in characters, and the verdict on it."""
    from flexinspect.panels.base import Missing  # loads Textual

    try:
        yield from (f"    {line}".rstrip() for line in _mask_picture(step, reader, width - 4))
    except (FlexInspectError, Missing) as error:
        yield f"    no mask picture: {error}"
    yield f"    {verdict_line(step, reader)}"


def verdict_line(step: StepRow, reader: TraceReader) -> str:
    """Return whether the paraphrases were isolated in the masks that ran in a step."""
    verdict = judge_isolation(reader, step.generation, step.step)
    return f"isolation {verdict.label}: {verdict.sentence}"


def _mask_picture(step: StepRow, reader: TraceReader, width: int) -> list[str]:
    from flexinspect.drawing.theme import Theme
    from flexinspect.panels.base import Request, TracePlace
    from flexinspect.panels.panel_registry import load_panel, with_options
    from flexinspect.panels.panel_source import Source

    panel = load_panel("mask")
    place = TracePlace(step.generation, 0, step.step, 0, 0)
    request = Request(place, with_options(panel, {}), max(width, 20), _PICTURE_HEIGHT)
    picture = panel.paint(panel.load(Source(reader), request), request, Theme("none"))
    lines = [strip.text.rstrip() for strip in picture.strips]
    return [*lines, picture.note] if picture.note else lines
