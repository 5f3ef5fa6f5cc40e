"""A comparison in lines for people."""

from __future__ import annotations

from collections.abc import Iterator

from flexinspect.compare.steps import StepDifference
from flexinspect.compare.traces import (
    DIFFERENT,
    ROUNDING,
    Comparison,
    GenerationDifference,
)
from flexinspect.rules.words import format_ranges, plural, printable

_MAX_LAYERS = 40
_VERDICT_TEXTS = {
    DIFFERENT: "The two runs differ.",
    ROUNDING: "The same tokens and masks; numbers differ by rounding.",
}


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Yield what there is to say of two traces, without the line breaks."""
    yield f"A  {comparison.a}"
    yield f"B  {comparison.b}"
    if comparison.identical:
        yield "Identical files: byte for byte the same, so that this compares a run with itself."
    for generation in comparison.generations:
        yield from _generation_lines(generation)
    default = "No difference in anything that was recorded."
    yield _VERDICT_TEXTS.get(comparison.verdict, default)


def _generation_lines(one: GenerationDifference) -> Iterator[str]:
    yield f"generation {one.generation}"
    if one.missing:
        yield f"  {one.missing}"
        return
    if one.prompt is not None:
        place = f"{printable(one.prompt.a)!r} against {printable(one.prompt.b)!r}"
        yield f"  the prompts part at position {one.prompt.position}: {place}; no step is compared"
        return
    if one.n_steps[0] != one.n_steps[1]:
        yield f"  A has {plural(one.n_steps[0], 'step')}, B has {one.n_steps[1]}"
    if one.padding:
        yield f"  rows {format_ranges(one.padding)} are padding: differences there are not counted"
    for name, alike in zip("AB", one.alike, strict=True):
        if alike:
            yield f"  {name}: steps {format_ranges(alike)} hold the numbers of the step before (stale)"
    if one.first_difference is None:
        yield f"  {plural(len(one.steps), 'step')} compared: the same"
        return
    yield f"  first difference: step {one.first_difference.step}"
    shown = {one.first_difference.step: one.first_difference}
    for step in (one.first_beyond_rounding, one.divergence):
        if step is not None:
            shown[step.step] = step
    for number in sorted(shown):
        yield from _step_lines(one, shown[number])
    yield from _conclusion_lines(one)


def _step_lines(one: GenerationDifference, step: StepDifference) -> Iterator[str]:
    yield f"  step {step.step}"
    if step.lengths:
        yield f"    rows: {step.lengths}"
    if step.positions:
        yield f"    position ids: {step.positions}"
    for path in step.paths:
        yield f"    {_format_layers(path.layers)}: {path.a} against {path.b}"
    for mask in step.masks:
        cells = "" if mask.cells is None else f": {plural(mask.cells, 'cell')} of the first"
        first = "" if mask.first is None else f", first at row {mask.first[0]}, key {mask.first[1]}"
        yield f"    masks of {_format_layers(mask.layers)} differ{cells}{first}"
    if step.layers:
        yield from _layer_lines(step, one.limit)
    if step.logits is not None:
        moved = f"    logits of the candidates: up to {step.logits:.3g}"
        news = f"; {plural(len(step.entered), 'other candidate')}" if step.entered else ""
        yield moved + news
    if step.is_diverged and step.tokens is not None:
        pairs = zip(one.words, step.tokens, strict=True)
        a, b = (printable(word) or f"id {id_}" for word, id_ in pairs)
        margins = step.margins or (0.0, 0.0)
        yield f"    token: {a!r} (margin {margins[0]:.3g}) against {b!r} (margin {margins[1]:.3g})"


def _layer_lines(step: StepDifference, limit: float) -> Iterator[str]:
    """Yield each layer's difference and what the layer added to it."""
    how = "hidden states" if step.layers[0].exact else "statistics"
    yield f"    layer  difference  added     ({how}, relative; rounding up to {limit:g})"
    for layer in step.layers[:_MAX_LAYERS]:
        mark = "  <- more than rounding" if layer.difference > limit else ""
        yield f"    {layer.layer:5}  {layer.difference:<10.3g}  {layer.added:<+9.3g}{mark}".rstrip()
    if len(step.layers) > _MAX_LAYERS:
        yield f"    ... and {len(step.layers) - _MAX_LAYERS} more layers (--json has all)"


def _conclusion_lines(one: GenerationDifference) -> Iterator[str]:
    if one.jump is not None:
        yield f"  layer {one.jump} stands out: it adds far more than the others"
    elif (
        one.first_beyond_rounding is None
        and one.first_difference is not None
        and one.first_difference.layers
    ):
        yield "  the difference grows evenly over the layers, no single jump: rounding"
    if one.divergence is None:
        yield f"  the same token in each of {plural(len(one.steps), 'step')}"
    else:
        yield f"  from step {one.divergence.step + 1} on the two are fed other tokens: not compared"


def _format_layers(which: tuple[int, ...]) -> str:
    if not which:
        return "some layers"
    return f"layer{'s' * (len(which) > 1)} {format_ranges(which)}"
