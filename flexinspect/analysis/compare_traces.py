"""Compare two traces, generation by generation and step by step."""

from __future__ import annotations

import filecmp
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from msgspec import Struct, to_builtins
from msgspec.structs import replace

from flexinspect.core.errors import UsageError
from flexinspect.core.text import format_layers, format_ranges, plural, printable
from flexinspect.records.step import StepRecord, TokenRecord
from flexinspect.rules import step_diff
from flexinspect.trace.query_results import GenerationRow
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.replay import is_standalone, replay_steps

COMPARED_STREAMS = ("hidden", "inputs.mask")
SAME, ROUNDING, DIFFERENT = "same", "rounding", "different"


class PromptDifference(Struct, frozen=True):
    """The first position where two prompts differ, and both texts there (empty past the end)."""

    position: int
    a: str
    b: str


class GenerationDifference(step_diff.RunDifference, frozen=True):
    """One generation of two traces, compared.

    `prompt` is the first difference of the prompts, None if they are the same; if they differ, no
    step is compared. `n_steps` counts the steps of each trace. `words` are the texts of both tokens
    where the runs diverge, `texts` those of the tokens that are named, by position. `padding` are
    positions that were left out. `alike` are, for A and for B, the steps whose layer statistics
    equal those of the step before: they were not computed again (a replayed graph, a stale buffer).
    `missing` says which trace alone has the generation.
    """

    generation: int = 0
    prompt: PromptDifference | None = None
    n_steps: tuple[int, int] = (0, 0)
    words: tuple[str, str] = ("", "")
    texts: Mapping[int, str] = {}
    padding: tuple[int, ...] = ()
    alike: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    missing: str = ""

    @property
    def verdict(self) -> str:
        """`same`, `rounding` (same tokens and masks, numbers within rounding) or `different`."""
        has_other_steps = self.prompt is not None or self.n_steps[0] != self.n_steps[1]
        if self.missing or has_other_steps or self.first_beyond_rounding or self.divergence:
            return DIFFERENT
        return SAME if self.first_difference is None else ROUNDING


class Comparison(Struct, frozen=True):
    """The comparison of two traces; `identical` is whether the files are equal byte for byte."""

    a: str
    b: str
    identical: bool
    generations: tuple[GenerationDifference, ...]

    @property
    def verdict(self) -> str:
        """The worst verdict of the generations."""
        verdicts = {generation.verdict for generation in self.generations}
        return next((name for name in (DIFFERENT, ROUNDING) if name in verdicts), SAME)

    def as_json(self) -> dict[str, Any]:
        """Return the whole comparison as plain values for scripts, with verdicts."""
        fields = to_builtins(self)
        for entry, generation in zip(fields["generations"], self.generations, strict=True):
            divergence, first = generation.divergence, generation.first_difference
            entry["verdict"] = generation.verdict
            entry["first_difference"] = None if first is None else first.step
            entry["parted_at"] = None if divergence is None else divergence.step
            entry["jump"] = generation.jump
        return {"version": 1, "verdict": self.verdict, **fields}


def check_same_kind(a: TraceReader, b: TraceReader) -> None:
    """Raise `UsageError` for a training and a generation of tokens."""
    kinds = [
        "training"
        if any("training" in row.declared for row in reader.generations())
        else "generation"
        for reader in (a, b)
    ]
    if kinds[0] != kinds[1]:
        what = f"A is a {kinds[0]} and B a {kinds[1]}, so they cannot be compared."
        raise UsageError(what, hint="Name two traces of the same kind.")


def compare_traces(a: TraceReader, b: TraceReader, *, generation: int | None = None) -> Comparison:
    """Compare two traces, or one generation of both.

    Raises `UsageError` for a generation that neither trace has, for traces without generations, and
    for a training and a generation; `TraceError` for a damaged trace.
    """
    check_same_kind(a, b)
    names = (str(a.path), str(b.path))
    identical = filecmp.cmp(a.path, b.path, shallow=False)
    pairs = list(zip_longest(_model_generations(a, generation), _model_generations(b, generation)))
    if not pairs:
        which = "" if generation is None else f" {generation}"
        raise UsageError(f"Neither {names[0]} nor {names[1]} has a generation{which} of a model.")
    return Comparison(*names, identical, tuple(_compare_generations(a, b, *pair) for pair in pairs))


def _model_generations(reader: TraceReader, generation: int | None) -> list[GenerationRow]:
    rows = [row for row in reader.generations() if not is_standalone(row)]
    return [row for row in rows if generation is None or row.generation == generation]


def _compare_generations(
    a: TraceReader, b: TraceReader, one: GenerationRow | None, other: GenerationRow | None
) -> GenerationDifference:
    if one is None or other is None:
        present = one or other
        assert present is not None
        missing = f"only {(b if one is None else a).path} has it"
        return GenerationDifference(generation=present.generation, missing=missing)
    prompts = [
        [token for token in reader.tokens(row.generation) if token.step is None]
        for reader, row in ((a, one), (b, other))
    ]
    result = GenerationDifference(
        generation=one.generation,
        prompt=_compare_prompts(*prompts),
        n_steps=(a.n_steps(one.generation), b.n_steps(other.generation)),
    )
    if result.prompt is not None:
        return result
    steps_a, steps_b = _WatchedSteps(a, one.generation), _WatchedSteps(b, other.generation)
    difference = step_diff.compare_runs(steps_a, steps_b, (a.mask, b.mask))
    is_diverged = difference.divergence is not None
    return replace(
        result,
        texts=_read_texts(a, one.generation, difference.steps),
        steps=difference.steps,
        limit=difference.limit,
        words=(steps_a.last_text, steps_b.last_text) if is_diverged else ("", ""),
        padding=() if steps_a.real is None else tuple(np.flatnonzero(~steps_a.real).tolist()),
        alike=(tuple(steps_a.stale), tuple(steps_b.stale)),
    )


def _read_texts(
    reader: TraceReader, generation: int, steps: Sequence[step_diff.StepDifference]
) -> dict[int, str]:
    """Return the texts of the tokens of the first cells that differ, by position."""
    masks = [mask for step in steps for mask in step.masks]
    sides = [side for mask in masks for side in (mask.only_a, mask.only_b) if side is not None]
    positions = {position for side in sides for position in side.first}
    tokens = (t for p in positions for t in reader.tokens(generation, 0, p, p + 1))
    return {token.pos: token.text or token.token for token in tokens}


def _compare_prompts(a: Sequence[TokenRecord], b: Sequence[TokenRecord]) -> PromptDifference | None:
    for position, (one, other) in enumerate(zip_longest(a, b)):
        if one is None or other is None or one.token_id != other.token_id:
            words = ("" if token is None else token.text or token.token for token in (one, other))
            return PromptDifference(position, *words)
    return None


class _WatchedSteps:
    """Iterates over the steps of a generation, and notes what a comparison reports besides.

    `stale` are the steps whose layer statistics equal those of the step before, `real` the
    positions that are not padding, and `last_text` the text of the last step's tokens.
    """

    def __init__(self, reader: TraceReader, generation: int) -> None:
        self._steps = replay_steps(reader, generation, 0, COMPARED_STREAMS)
        self.stale: list[int] = []
        self.real: step_diff.RealPositions = None
        self.last_text = ""

    def __iter__(self) -> Iterator[StepRecord]:
        before: tuple[object, ...] = ()
        for index, step in enumerate(self._steps):
            if index == 0:
                self.real = step_diff.real_positions(step)
            now = tuple((stat.layer, stat.norm, stat.min, stat.max) for stat in step.layer_stats)
            if now and now == before:
                self.stale.append(step.step)
            before, self.last_text = now, "".join(t.text or t.token for t in step.tokens)
            yield step


_MAX_LAYERS = 40
_VERDICT_TEXTS = {
    DIFFERENT: "The two runs differ.",
    ROUNDING: "The same tokens and masks; numbers differ by rounding.",
    SAME: "No difference in anything that was recorded.",
}


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Yield the lines of the text about a comparison, without line breaks."""
    yield f"A  {comparison.a}"
    yield f"B  {comparison.b}"
    if comparison.identical:
        yield "Identical files: byte for byte the same, so this compares a run with itself."
    for generation in comparison.generations:
        yield from _generation_lines(generation)
    yield verdict_text(comparison)


def verdict_text(comparison: Comparison) -> str:
    """Return the verdict as a sentence."""
    return _VERDICT_TEXTS[comparison.verdict]


def _generation_lines(one: GenerationDifference) -> Iterator[str]:
    yield f"generation {one.generation}"
    if one.missing:
        yield f"  {one.missing}"
        return
    if one.prompt is not None:
        place = f"{printable(one.prompt.a)!r} against {printable(one.prompt.b)!r}"
        position = one.prompt.position
        yield f"  the prompts differ from position {position} on: {place}; no step is compared"
        return
    if one.n_steps[0] != one.n_steps[1]:
        yield f"  A has {plural(one.n_steps[0], 'step')}, B has {one.n_steps[1]}"
    if one.padding:
        yield f"  rows {format_ranges(one.padding)} are padding: differences there are not counted"
    for name, alike in zip("AB", one.alike, strict=True):
        if alike:
            steps = format_ranges(alike)
            yield f"  {name}: steps {steps} hold the numbers of the step before (stale)"
    if one.first_difference is None:
        yield f"  {plural(len(one.steps), 'step')} compared: the same"
        return
    yield f"  first difference: step {one.first_difference.step}"
    notable = (one.first_difference, one.first_beyond_rounding, one.divergence)
    shown = {step.step: step for step in notable if step is not None}
    for _, step in sorted(shown.items()):
        yield from _step_lines(one, step)
    yield from _conclusion_lines(one, one.first_difference)


def _step_lines(one: GenerationDifference, step: step_diff.StepDifference) -> Iterator[str]:
    yield f"  step {step.step}"
    if step.lengths:
        yield f"    rows: {step.lengths}"
    if step.positions:
        yield f"    position ids: {step.positions}"
    for path in step.paths:
        yield f"    {format_layers(path.layers, 0)}: {path.a} against {path.b}"
    for mask in step.masks:
        yield from _mask_lines(mask, one.texts)
    if step.layers:
        yield from _layer_lines(step, one.limit)
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


def _layer_lines(step: step_diff.StepDifference, limit: float) -> Iterator[str]:
    """Yield each layer's difference and the part of it that the layer added."""
    how = "hidden states" if step.layers[0].exact else "statistics"
    yield f"    layer  difference  added     ({how}, relative; rounding up to {limit:g})"
    for layer in step.layers[:_MAX_LAYERS]:
        mark = "  <- more than rounding" if layer.difference > limit else ""
        yield f"    {layer.layer:5}  {layer.difference:<10.3g}  {layer.added:<+9.3g}{mark}".rstrip()
    if len(step.layers) > _MAX_LAYERS:
        yield f"    ... and {len(step.layers) - _MAX_LAYERS} more layers (--json has all)"


def _conclusion_lines(one: GenerationDifference, first: step_diff.StepDifference) -> Iterator[str]:
    if one.jump is not None:
        yield f"  layer {one.jump} stands out: it adds far more than the others"
    elif one.first_beyond_rounding is None and first.layers:
        yield "  no layer stands out, and the difference stays within rounding"
    if one.divergence is None:
        yield f"  the same token in each of {plural(len(one.steps), 'step')}"
    else:
        step = one.divergence.step + 1
        yield f"  from step {step} on the two receive different tokens: not compared"
