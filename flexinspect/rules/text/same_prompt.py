"""Compares generations of one run with the same prompt: equal, different by rounding, or more.

Runs of one prompt with two dtypes, kernels or masks differ by rounding, which grows evenly over the
layers, or by another mask, which causes a jump in one layer. All findings are notes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from flexinspect.core.text import format_ranges, is_or_are, plural
from flexinspect.records import imported
from flexinspect.records.finding import Finding
from flexinspect.records.step import MaskRecord, StepRecord
from flexinspect.rules import step_diff
from flexinspect.rules.engine import Findings, Rule, finding_kinds

MAX_GENERATIONS = 4  # earlier generations that are kept for comparison
MAX_COMPARED_STEPS = 32  # steps of each generation that are kept
MAX_MASK_CELLS = 1 << 22  # cells of the largest mask that is kept


class _GenerationRun(Struct):
    """The prompt, first steps and masks of a generation, without its large arrays."""

    generation: int
    prompt: tuple[int, ...]
    unpadded: step_diff.RealPositions = None
    steps: list[StepRecord] = []
    masks: dict[str, MaskRecord] = {}


class SamePromptRule(Rule):
    """Compares a finished generation with an earlier one of the same prompt."""

    name = "same_prompt"
    needs = (imported.WORDS, imported.CHOSEN)
    streams = ("inputs.mask",)
    findings = finding_kinds("same-prompt.*")

    def reset(self) -> None:
        """Begin a generation; earlier ones are kept, also those of other models."""
        tokens = () if self.context.is_standalone else self.context.generation.tokens
        prompt = tuple(token.token_id for token in tokens)
        self._current = _GenerationRun(self.context.generation.generation, prompt)
        if prompt:
            self._generations.append(self._current)

    @property
    def _generations(self) -> deque[_GenerationRun]:
        kept: deque[_GenerationRun] = deque(maxlen=MAX_GENERATIONS)
        return cast("deque[_GenerationRun]", self.context.shared_memory.setdefault(self.name, kept))

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Store the step, without its large arrays."""
        run = self._current
        if not run.prompt or len(run.steps) >= MAX_COMPARED_STEPS or step.branch:
            return ()
        if not run.steps:
            run.unpadded = step_diff.real_positions(step)
        for name in {call.mask for call in step.calls} - run.masks.keys():
            mask = self.context.mask(name)
            if mask is not None and mask.q_len * mask.kv_len <= MAX_MASK_CELLS:
                run.masks[mask.fingerprint] = mask
        run.steps.append(replace(step, masks=(), arrays=(), builds=(), memory=None, events=()))
        return ()

    def on_generation_end(self) -> Findings:
        """Compare the generation with the last one of the same prompt."""
        run = self._current
        if not run.steps:
            return
        earlier = [r for r in self._generations if r.generation < run.generation and r.steps]
        last = next((r for r in reversed(earlier) if r.prompt == run.prompt), None)
        if last is not None:
            yield from self._compare_generations(last, run)

    def _compare_generations(self, a: _GenerationRun, b: _GenerationRun) -> Findings:
        """The finding about two generations, none if they do not differ at all."""
        if (a.unpadded is None) != (b.unpadded is None) or _model_shape(a) != _model_shape(b):
            return
        find_masks = (a.masks.get, b.masks.get)
        difference = step_diff.compare_runs(a.steps, b.steps, find_masks, b.unpadded)
        differences, limit = difference.steps, difference.limit
        if all(replace(one, tokens=None).is_same for one in differences):
            return  # equal logits: another token can only come from sampling
        odd, parted = difference.first_beyond_rounding, difference.divergence
        if odd is not None:
            layer = odd.masks[0].layers[0] if odd.masks else difference.jump
            text = _describe_difference(odd, limit)
            yield self._generations_finding(a, b, "same-prompt.differ", text, odd, layer)
            return
        logits = [run.steps[len(differences) - 1].logits for run in (a, b)]
        best = [one.candidates[0].token_id if one and one.candidates else None for one in logits]
        is_drawn = parted is not None and best[0] == best[1]
        id_, text = "same-prompt.rounding", _describe_rounding(differences, is_drawn)
        # Steps are equal if they differ only in the last bits.
        largest = max((layer.difference for one in differences for layer in one.layers), default=0)
        is_equal = largest < 1e-4 and all((one.logits or 0.0) < 1e-3 for one in differences)
        if (parted is None or is_drawn) and is_equal:
            moved, n_steps = max(one.logits or 0.0 for one in differences), len(differences)
            steps = f"{plural(n_steps, 'step')} {is_or_are(n_steps)} equal"
            sampled = "" if parted is None else _describe_sampled(parted)
            id_, text = "same-prompt.same", f"and {steps} (logits up to {moved:.1g}){sampled}"
        yield self._generations_finding(a, b, id_, text, parted or differences[0])

    def _generations_finding(
        self,
        a: _GenerationRun,
        b: _GenerationRun,
        finding_id: str,
        text: str,
        at: step_diff.StepDifference,
        layer: int | None = None,
    ) -> Finding:
        pads = () if b.unpadded is None else np.flatnonzero(~b.unpadded).tolist()
        first = at.masks[0].first if at.masks else None
        if b.unpadded is not None:
            text += f"; rows {format_ranges(pads)} are padding: differences there are expected and "
            text += "not counted"
        calls = [next(iter(run.steps[0].calls), None) for run in (a, b)]
        paths = [f"{one.path}, {one.dtype}" if one else "no calls seen" for one in calls]
        ran_a, ran_b = ("", "") if paths[0] == paths[1] else (f" ({path})" for path in paths)
        margins = [None if math.isnan(one) else one for one in at.margins or ()]
        by_layer = {str(one.layer): round(one.difference, 6) for one in at.layers}
        sentence = (
            f"Generation {b.generation}{ran_b} has the same prompt as generation "
            f"{a.generation}{ran_a}, {text}."
        )
        options: dict[str, Any] = {"layers": () if layer is None else (layer,)}
        options["positions"] = pads or (() if first is None else (first[0],))
        options["evidence"] = {"logits": at.logits, "margins": margins, "layers": by_layer}
        return replace(self.finding(None, finding_id, sentence, **options), step=at.step)


def _model_shape(run: _GenerationRun) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Number of layers, and heads and head dimension of each call, to tell models apart."""
    layers = {one.layer for one in run.steps[0].layer_stats}
    return len(layers), tuple((call.q_heads, call.head_dim) for call in run.steps[0].calls)


def _describe_sampled(parted: step_diff.StepDifference) -> str:
    return f"; step {parted.step} samples another token, although the best one is the same"


def _describe_rounding(differences: Sequence[step_diff.StepDifference], is_drawn: bool) -> str:
    first, parted = differences[0], differences[-1]
    layers = ", ".join(f"{one.difference:.2g}" for one in first.layers[:8])
    if layers:
        more = ", ..." if len(first.layers) > 8 else ""
        layers = f"; no layer adds far more than the others ({layers}{more})"
    if is_drawn:
        token = _describe_sampled(parted)
    elif parted.is_diverged and parted.margins is not None:
        margins = f"{parted.margins[0]:.3g} and {parted.margins[1]:.3g}"
        token = f"; step {parted.step} chooses another token, with margins of {margins}"
    else:
        margin = min((min(one.margins) for one in differences if one.margins), default=math.nan)
        n_steps = plural(len(differences), "step")
        token = f"; all tokens of {n_steps} are the same (smallest margin {margin:.3g})"
    return f"and differs by rounding{layers}{token}"


def _describe_difference(odd: step_diff.StepDifference, limit: float) -> str:
    what = []
    for mask in odd.masks[:2]:
        first = "" if mask.first is None else f", first at row {mask.first[0]}, key {mask.first[1]}"
        cells = "" if mask.cells is None else f" ({plural(mask.cells, 'cell')}{first})"
        what.append(f"the masks of layers {format_ranges(mask.layers)} differ{cells}")
    inputs = {"computed rows": odd.lengths, "position ids": odd.positions}
    what += [f"the {name} differ ({texts})" for name, texts in inputs.items() if texts]
    jump, worst = step_diff.find_jump(odd.layers, limit), odd.worst
    if jump is not None:
        what.append(f"layer {jump.layer} adds a relative difference of {jump.added:.2g}")
    elif worst is not None and worst.difference > limit:
        size = f"{worst.difference:.2g}, which is more than rounding"
        what.append(f"layer {worst.layer} has a relative difference of {size}")
    parted = ", and another token is chosen" if odd.is_diverged else ""
    return f"but in step {odd.step} {' and '.join(what)}{parted}"
