"""The text of a comparison of two runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flexinspect.analysis.run_diff import quantities
from flexinspect.analysis.run_diff.generations import (
    DIFFERENT,
    ROUNDING,
    SAME,
    Compared,
    GenerationDifference,
    Place,
)
from flexinspect.analysis.run_diff.quantities import Noise
from flexinspect.analysis.run_diff.traces import Comparison
from flexinspect.analysis.run_diff.training import TrainingDifference
from flexinspect.core.text import format_layers, format_ranges, plural, printable
from flexinspect.rules import step_diff

_MAX_LAYERS = 40
_COARSE = 0.01
_VERDICT_TEXTS = {
    DIFFERENT: "The two runs differ.",
    ROUNDING: "The same within noise: no difference is larger than rounding explains.",
    SAME: "No difference in anything that was compared.",
}
_AFTER_SCORES = "the attention output, its projection, the MLP or a norm of this layer"
_BEFORE_SCORES = "the norm, the projection or the rotation before the attention of this layer"


def verdict_text(comparison: Comparison) -> str:
    """Return the verdict as a sentence."""
    return _VERDICT_TEXTS[comparison.verdict]


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Yield the lines of the text about a comparison, without line breaks."""
    yield f"A  {comparison.a}"
    yield f"B  {comparison.b}"
    if comparison.identical:
        yield "Identical files: byte for byte the same, so this compares a run with itself."
    for generation in comparison.generations:
        yield from _generation_lines(generation)
    for training in comparison.trainings:
        yield from _training_lines(training)
    yield verdict_text(comparison)


def place_text(place: Place) -> str:
    """Return a place in one line: where, what, how much, and the stop reason."""
    layer = "" if place.layer is None else f", layer {place.layer}"
    name = quantities.QUANTITIES.get(place.quantity, place.quantity)
    what = place.quantity if name == place.quantity else f"{place.quantity} ({name})"
    parts = [f"step {place.step}{layer}: {what}"]
    if place.difference is not None:
        parts.append(f"{place.difference:.3g} relative, noise up to {place.limit or 0:.3g}")
    return f"{', '.join([*parts, *filter(None, [printable(place.text)])])} [{place.reason}]"


def short_place_text(place: Place) -> str:
    """Return where a place is, and its stop reason."""
    layer = "" if place.layer is None else f", layer {place.layer}"
    return f"step {place.step}{layer}: {place.quantity} [{place.reason}]"


def _place_lines(place: Place) -> Iterator[str]:
    yield f"  first place beyond noise: {place_text(place)}"
    before = [name for name in place.before if name != place.quantity]
    if not before or place.reason in ("dtype", "shape"):
        return
    where = ""
    if place.quantity == "hidden" and "scores" in before:
        where = f": the difference begins in {_AFTER_SCORES}"
    elif place.quantity in ("q", "k", "v"):
        where = f": the difference begins in {_BEFORE_SCORES}"
    elif place.quantity == "scores" and "mask" in before:
        where = ": the difference begins in the kernel"
    yield f"    within noise before it in this layer: {', '.join(before)}{where}"


def _generation_lines(one: GenerationDifference) -> Iterator[str]:
    with_ = "" if one.partner == one.generation or one.missing else f" with {one.partner} of B"
    yield f"generation {one.generation}{with_}"
    if one.missing:
        yield f"  {one.missing}"
        return
    if one.prompt is not None:
        place = f"{printable(one.prompt.a)!r} against {printable(one.prompt.b)!r}"
        position = one.prompt.position
        yield f"  the prompts differ from position {position} on: {place}; no step is compared"
        return
    yield from _alignment_lines(one)
    if one.noise is not None:
        yield f"  noise floor: {_noise_text(one.noise)}"
    if one.first is not None:
        yield from _place_lines(one.first)
    if one.first_difference is None:
        how = "the same" if one.verdict == SAME else "equal within noise"
        if one.first is None:
            yield f"  {plural(len(one.steps), 'step')} compared: {how}"
    else:
        yield f"  first difference: {_begin_text(one)}"
        yield from _notable_step_lines(one)
        yield from _conclusion_lines(one, one.first_difference)
    yield from _compared_lines(one.compared, one.not_compared)


def _begin_text(one: GenerationDifference) -> str:
    assert one.first_difference is not None
    step, begins = one.first_difference.step, one.begins
    if begins is None or begins.step != step:
        return f"step {step}"
    layer = "" if begins.layer is None else f", layer {begins.layer}"
    size = "" if begins.difference is None else f" by {begins.difference:.3g}"
    return f"step {step}{layer}: {begins.quantity}{size}; no compared number before it differs"


def _alignment_lines(one: GenerationDifference) -> Iterator[str]:
    if one.n_steps[0] != one.n_steps[1]:
        yield f"  A has {plural(one.n_steps[0], 'step')}, B has {one.n_steps[1]}"
    for line in one.layers.lines():
        yield f"  {line}"
    for name, steps in zip("AB", one.left_out, strict=True):
        if steps:
            yield f"  left out: step {format_ranges(steps)} of {name} has no partner"
    if one.padding:
        yield f"  rows {format_ranges(one.padding)} are padding: differences there are not counted"
    for name, alike in zip("AB", one.alike, strict=True):
        if alike:
            steps_alike = format_ranges(alike)
            yield f"  {name}: steps {steps_alike} hold the numbers of the step before (stale)"


def _noise_text(noise: Noise) -> str:
    lowest = min(noise.measured.values(), default=noise.floor)
    spread = "" if lowest == noise.floor else f"{lowest:.3g} to "
    by = ", by quantity" if spread else ""
    text = f"{spread}{noise.floor:.3g} relative{by} ({noise.source})"
    if noise.first is not None:
        return f"{text}, {noise.first:.2g} for the first number that differs after equal ones"
    coarse = "; smaller faults do not show: record both under the same conditions (versions, "
    coarse += "device, dtype, kernels, threads), or use --noise"
    return text + coarse * (lowest >= _COARSE)


def _notable_step_lines(one: GenerationDifference) -> Iterator[str]:
    at = None if one.first is None else one.first.step
    beyond = next((step for step in one.steps if step.step == at), None)
    notable = (one.first_difference, beyond, one.divergence)
    shown = {step.step: step for step in notable if step is not None}
    for _, step in sorted(shown.items()):
        yield from _step_lines(one, step)


def _step_lines(one: GenerationDifference, step: step_diff.StepDifference) -> Iterator[str]:
    yield f"  step {step.step}"
    if step.lengths:
        yield f"    rows: {step.lengths}"
    if step.rows:
        yield f"    rows: {step.rows}; compared are those that both have"
    if step.positions:
        yield f"    position ids: {step.positions}"
    for path in step.paths:
        yield f"    {format_layers(path.layers, 0)}: {path.a} against {path.b}"
    for mask in step.masks:
        yield from _mask_lines(mask, one.texts)
    if step.layers:
        yield from _layer_lines(one, step)
    if step.logits or step.entered:
        n = len(step.entered)
        named = {0: "", 1: "; one top candidate was replaced"}
        entered = named.get(n, f"; {n} top candidates were replaced")
        yield f"    candidate logits differ by up to {step.logits or 0:.3g}{entered}"
    if step.is_diverged and step.tokens is not None:
        pairs = zip(one.words, step.tokens, strict=True)
        a, b = (printable(word) or f"id {id_}" for word, id_ in pairs)
        margins = step.margins or (0.0, 0.0)
        yield f"    token: {a!r} (margin {margins[0]:.3g}) against {b!r} (margin {margins[1]:.3g})"


def _mask_lines(mask: step_diff.MaskDifference, texts: Mapping[int, str]) -> Iterator[str]:
    """Yield which run opens cells that the other closes, in the first head that differs."""
    layers = format_layers(mask.layers, 0)
    if mask.only_a is None and mask.only_b is None:
        yield f"    masks of {layers} differ"
    for name, other, side in (("A", "B", mask.only_a), ("B", "A", mask.only_b)):
        if side is not None:
            row, key = (f'"{printable(texts.get(at, ""))}" ({at})' for at in side.first)
            cells = f"{name} opens {plural(side.cells, 'cell')} that {other} closes"
            yield f"    {cells} ({layers}); first: {row} sees {key}"


def _layer_lines(one: GenerationDifference, step: step_diff.StepDifference) -> Iterator[str]:
    """Yield each layer's difference and the part of it that the layer added."""
    how = "hidden states" if step.layers[0].exact else "statistics"
    yield f"    layer  difference  added     ({how}, relative)"
    for layer in step.layers[:_MAX_LAYERS]:
        limit = one.limit if one.noise is None else one.noise.limit("hidden", layer.layer)
        mark = "  <- beyond noise" if layer.difference > limit else ""
        yield f"    {layer.layer:5}  {layer.difference:<10.3g}  {layer.added:<+9.3g}{mark}".rstrip()
    if len(step.layers) > _MAX_LAYERS:
        yield f"    ... and {len(step.layers) - _MAX_LAYERS} more layers (--json has all)"


def _conclusion_lines(one: GenerationDifference, first: step_diff.StepDifference) -> Iterator[str]:
    if one.jump is not None:
        yield f"  layer {one.jump} stands out: it adds far more than the others"
    elif one.first is None and first.layers:
        yield "  no layer stands out, and the difference stays within noise"
    if one.divergence is None:
        yield f"  the same token in each of {plural(len(one.steps), 'step')}"
    else:
        step = one.divergence.step + 1
        yield f"  from step {step} on the two receive different tokens: not compared"


def _compared_lines(
    compared: Mapping[str, Compared], not_compared: Mapping[str, str]
) -> Iterator[str]:
    """Yield what was compared, with the largest differences, and what was not, and why."""
    width = max(map(len, compared), default=0)
    if compared:
        yield f"  {'compared':{width + 2}}  places  largest difference"
    for name, one in compared.items():
        where = f"step {one.step}" if one.layer is None else f"step {one.step}, layer {one.layer}"
        size = f"{one.difference:.3g} ({where})" if one.difference else "0"
        if one.difference == float("inf"):
            size = f"other ({where})"
        n_rough = one.n - one.n_exact
        how = f"; {n_rough} from statistics or candidates" if n_rough else ""
        yield f"    {name:{width}}  {one.n:6}  {size}{how}"
    by_reason: dict[str, list[str]] = {}
    for name, reason in not_compared.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        yield f"  not compared: {', '.join(names)} ({reason})"


def _training_lines(one: TrainingDifference) -> Iterator[str]:
    yield "training"
    if one.missing:
        yield f"  {one.missing}"
        return
    a, b = one.n_steps
    yield f"  {plural(one.n_compared, 'step')} compared, of {a} in A and {b} in B"
    for name, groups in zip("AB", one.groups, strict=True):
        if groups:
            names = ", ".join(map(printable, groups[:8])) + (", ..." if len(groups) > 8 else "")
            yield f"  left out: groups of parameters that only {name} has: {names}"
    if one.noise is not None:
        measured = "grows with the steps" if one.noise.is_measured else f"{one.noise.floor:g}"
        yield f"  noise floor: {measured} ({one.noise.source})"
    if one.first is not None:
        yield from _place_lines(one.first)
    if one.first_difference is None:
        yield "  no compared number differs in any step"
    elif one.first is None or one.first_difference < one.first.step:
        yield f"  numbers differ by rounding from step {one.first_difference} on"
    yield from _compared_lines(one.compared, one.not_compared)
