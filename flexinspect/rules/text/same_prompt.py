"""Compares generations of one run with the same prompt: equal, different by rounding, or more.

Runs of one prompt with two dtypes, kernels or masks differ by rounding, which grows evenly over the
layers, or by another mask, which causes a jump in one layer. All findings are notes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from flexinspect.core.text import format_ranges, plural
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import MaskRecord, StepRecord
from flexinspect.rules.context import RuleContext
from flexinspect.rules.engine import FindingKind, Rule
from flexinspect.rules.step_diff import (
    RealPositions,
    StepDifference,
    compare_steps,
    find_jump,
    rounding_limit,
)

SAME_OUTPUT, DIFFERS_BY_ROUNDING, DIFFERS = "twins.same", "twins.rounding", "twins.differ"

MAX_GENERATIONS = 4
"""Earlier generations that are kept for comparison."""
MAX_COMPARED_STEPS = 32
"""Steps of each generation that are kept."""
MAX_MASK_CELLS = 1 << 22
"""Cells of the largest mask that is kept."""

_SAME_PROMPT_QUERY = (
    "SELECT generation, step, layer, module, norm, mean, std, min, max FROM layer_stats "
    "WHERE step = {step} ORDER BY layer, generation"
)
_SAME_PROMPT_CONFIRM = (
    "`flexinspect compare` does the same for two traces, with every step; at level extreme it "
    "compares hidden states themselves."
)


@dataclass
class _GenerationRun:
    """The prompt, first steps and masks of a generation, without its large arrays."""

    generation: int
    prompt: tuple[int, ...]
    unpadded: RealPositions = None
    steps: list[StepRecord] = field(default_factory=list)
    masks: dict[str, MaskRecord] = field(default_factory=dict)


class SamePromptRule(Rule):
    """Compares a finished generation with an earlier one of the same prompt."""

    name: ClassVar[str] = "twins"
    streams: ClassVar[tuple[str, ...]] = ("inputs.mask",)
    findings: ClassVar[Mapping[str, FindingKind]] = {
        SAME_OUTPUT: FindingKind(
            Severity.NOTE,
            "two generations of the same prompt are equal",
            why="Another kernel or backend did not change the result.",
            confirm=_SAME_PROMPT_CONFIRM,
            fix="No action needed.",
            query=_SAME_PROMPT_QUERY,
        ),
        DIFFERS_BY_ROUNDING: FindingKind(
            Severity.NOTE,
            "two generations of the same prompt differ by rounding",
            why="Differences that grow evenly over the layers come from the dtype. A near tie can "
            "change a token, after which the texts differ; mask and cache are not the cause.",
            confirm=_SAME_PROMPT_CONFIRM,
            fix="No action needed. To compare two runs beyond the token that differs, force the "
            "same tokens in both.",
            query=_SAME_PROMPT_QUERY,
        ),
        DIFFERS: FindingKind(
            Severity.NOTE,
            "two generations of the same prompt differ by more than rounding",
            why="The first difference locates the cause: the mask of a layer, a path, or a jump in "
            "a single layer.",
            confirm=_SAME_PROMPT_CONFIRM,
            fix="If the two runs should be equal, fix the difference that the sentence names.",
            query=_SAME_PROMPT_QUERY,
        ),
    }

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin a generation; earlier ones are kept, also those of other models."""
        super().on_generation_start(context)
        prompt = tuple(token.token_id for token in context.generation.tokens)
        self._current = _GenerationRun(
            context.generation.generation, () if context.is_standalone else prompt
        )
        if self._current.prompt:
            self._generations.append(self._current)

    @property
    def _generations(self) -> deque[_GenerationRun]:
        runs: deque[_GenerationRun] = self.context.shared_memory.setdefault(
            self.name, deque(maxlen=MAX_GENERATIONS)
        )
        return runs

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Store the step, without its large arrays."""
        run = self._current
        if not run.prompt or len(run.steps) >= MAX_COMPARED_STEPS or step.branch:
            return ()
        if not run.steps:
            for record in step.arrays:
                if record.stream == "inputs.mask" and len(record.array):
                    real = np.asarray(record.array[0], np.bool_)
                    run.unpadded = None if real.all() else real
        for name in {call.mask for call in step.calls} - run.masks.keys():
            mask = self.context.mask(name)
            if mask is not None and mask.q_len * mask.kv_len <= MAX_MASK_CELLS:
                run.masks[mask.fingerprint] = mask
        run.steps.append(replace(step, masks=(), arrays=(), builds=(), memory=None, events=()))
        return ()

    def on_generation_end(self) -> Sequence[Finding]:
        """Compare the generation with the last one of the same prompt."""
        run = self._current
        if not run.steps:
            return ()
        earlier = [r for r in self._generations if r.generation < run.generation and r.steps]
        last = next((r for r in reversed(earlier) if r.prompt == run.prompt), None)
        return () if last is None else _compare_generations(last, run)


def _compare_generations(a: _GenerationRun, b: _GenerationRun) -> Sequence[Finding]:
    """The finding about two generations, none if they do not differ at all."""
    if (a.unpadded is None) != (b.unpadded is None) or _model_shape(a) != _model_shape(b):
        return ()
    differences = []
    for one, other in zip(a.steps, b.steps, strict=False):
        difference = compare_steps(one, other, (a.masks.get, b.masks.get), real=b.unpadded)
        differences.append(difference)
        if difference.is_diverged or difference.lengths:
            break  # the inputs differ from here on
    if all(replace(one, tokens=None).is_same for one in differences):
        return ()  # equal logits: another token can only come from sampling
    limit = rounding_limit(a.steps[0], b.steps[0])
    odd = next((one for one in differences if _exceeds_rounding(one, limit)), None)
    if odd is not None:
        return [
            _same_prompt_finding(
                b,
                DIFFERS,
                _describe_difference(a, b, odd, limit),
                odd,
                _find_jump_layer(odd, limit),
            )
        ]
    parted, last = next((one for one in differences if one.is_diverged), None), len(differences) - 1
    at = parted or differences[0]
    is_drawn = parted is not None and _best_token_id(a.steps[last]) == _best_token_id(b.steps[last])
    is_same = (parted is None or is_drawn) and all(_is_near_equal(one) for one in differences)
    words = (
        _describe_same(a, b, differences)
        if is_same
        else _describe_rounding(a, b, differences, is_drawn)
    )
    return [
        _same_prompt_finding(b, SAME_OUTPUT if is_same else DIFFERS_BY_ROUNDING, words, at, None)
    ]


def _model_shape(run: _GenerationRun) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Number of layers, and heads and head dimension of each call, to tell models apart."""
    step = run.steps[0]
    layers = {one.layer for one in step.layer_stats}
    return len(layers), tuple((call.q_heads, call.head_dim) for call in step.calls)


def _best_token_id(step: StepRecord) -> int | None:
    logits = step.logits
    return logits.candidates[0].token_id if logits is not None and logits.candidates else None


def _exceeds_rounding(one: StepDifference, limit: float) -> bool:
    worst = one.worst
    has_other_inputs = bool(one.masks or one.lengths or one.positions)
    return has_other_inputs or (worst is not None and worst.difference > limit)


def _is_near_equal(one: StepDifference) -> bool:
    """Whether a step differs only in the last bits."""
    worst = one.worst
    return (one.logits or 0.0) < 1e-3 and (worst is None or worst.difference < 1e-4)


def _find_jump_layer(one: StepDifference, limit: float) -> int | None:
    if one.masks and one.masks[0].layers:
        return one.masks[0].layers[0]
    jump = find_jump(one.layers, limit)
    return None if jump is None else jump.layer


def _same_prompt_finding(
    run: _GenerationRun, finding_id: str, sentence: str, at: StepDifference, layer: int | None
) -> Finding:
    pads = () if run.unpadded is None else tuple(np.flatnonzero(~run.unpadded)[:32].tolist())
    first = at.masks[0].first if at.masks else None
    return Finding(
        id=finding_id,
        severity=Severity.NOTE,
        sentence=sentence,
        generation=run.generation,
        step=at.step,
        layer=layer,
        positions=pads or (() if first is None else (first[0],)),
        evidence={
            "logits": at.logits,
            "margins": [None if math.isnan(one) else one for one in at.margins or ()],
            "layers": {str(one.layer): round(one.difference, 6) for one in at.layers},
        },
    )


# -- sentences -------------------------------------------------------------------------------------


def _format_generations(a: _GenerationRun, b: _GenerationRun) -> tuple[str, str]:
    """Both generations, with path and dtype in parentheses if they differ."""
    path_a, path_b = (_format_path(run) for run in (a, b))
    if path_a == path_b:
        return f"generation {a.generation}", f"Generation {b.generation}"
    return f"generation {a.generation} ({path_a})", f"Generation {b.generation} ({path_b})"


def _format_path(run: _GenerationRun) -> str:
    calls = run.steps[0].calls
    return f"{calls[0].path}, {calls[0].dtype}" if calls else "no calls seen"


def _format_opening(a: _GenerationRun, b: _GenerationRun) -> str:
    first, second = _format_generations(a, b)
    return f"{second} has the same prompt as {first}"


def _format_padding(run: _GenerationRun) -> str:
    if run.unpadded is None:
        return ""
    rows = format_ranges(np.flatnonzero(~run.unpadded).tolist())
    return f"; rows {rows} are padding: differences there are expected and not counted"


def _describe_same(
    a: _GenerationRun, b: _GenerationRun, differences: Sequence[StepDifference]
) -> str:
    moved = max((one.logits or 0.0 for one in differences), default=0.0)
    n_steps = len(differences)
    what = f"{plural(n_steps, 'step')} {'is' if n_steps == 1 else 'are'}"
    sampled = _describe_sampled(differences[-1]) if differences[-1].is_diverged else ""
    same = f"{_format_opening(a, b)}, and {what} equal (logits up to {moved:.1g})"
    return f"{same}{sampled}{_format_padding(b)}."


def _describe_sampled(parted: StepDifference) -> str:
    return f"; step {parted.step} samples another token, although the best one is the same"


def _describe_rounding(
    a: _GenerationRun,
    b: _GenerationRun,
    differences: Sequence[StepDifference],
    is_drawn: bool,
) -> str:
    first, parted = differences[0], differences[-1]
    each = ", ".join(f"{one.difference:.2g}" for one in first.layers[:8])
    layers = ""
    if first.layers:
        more = ", ..." if len(first.layers) > 8 else ""
        layers = f"; the difference grows evenly over the layers ({each}{more}), without a jump"
    if is_drawn:
        token = _describe_sampled(parted)
    elif not parted.is_diverged:
        margin = min((min(one.margins) for one in differences if one.margins), default=math.nan)
        n_steps = plural(len(differences), "step")
        token = f"; all tokens of {n_steps} are the same (smallest margin {margin:.3g})"
    else:
        assert parted.margins is not None
        token = (
            f"; step {parted.step} chooses another token, with margins of "
            f"{parted.margins[0]:.3g} and {parted.margins[1]:.3g}"
        )
    return f"{_format_opening(a, b)}, and differs by rounding{layers}{token}{_format_padding(b)}."


def _describe_difference(
    a: _GenerationRun, b: _GenerationRun, odd: StepDifference, limit: float
) -> str:
    what = []
    for mask in odd.masks[:2]:
        where = f"layers {format_ranges(mask.layers)}" if mask.layers else "a layer"
        first = "" if mask.first is None else f", first at row {mask.first[0]}, key {mask.first[1]}"
        cells = "" if mask.cells is None else f" ({plural(mask.cells, 'cell')}{first})"
        what.append(f"the masks of {where} differ{cells}")
    if odd.lengths:
        what.append(f"the computed rows differ ({odd.lengths})")
    if odd.positions:
        what.append(f"the position ids differ ({odd.positions})")
    jump, worst = find_jump(odd.layers, limit), odd.worst
    if jump is not None:
        what.append(f"layer {jump.layer} adds a relative difference of {jump.added:.2g}")
    elif worst is not None and worst.difference > limit:
        what.append(
            f"layer {worst.layer} has a relative difference of {worst.difference:.2g}, which is "
            "more than rounding"
        )
    parted = ", and another token is chosen" if odd.is_diverged else ""
    where = f"in step {odd.step} {' and '.join(what)}"
    return f"{_format_opening(a, b)}, but {where}{parted}{_format_padding(b)}."
