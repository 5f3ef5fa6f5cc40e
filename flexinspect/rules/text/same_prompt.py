"""Generations of one run that were fed the same: what differs between them, and whether it matters.

Whoever runs a prompt twice, under two dtypes, kernels or masks, wants to know which it is:
rounding, which grows evenly over the layers, or another mask, which jumps in one of them. Nothing
is judged.
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
"""Generations that a later one is compared with."""
MAX_COMPARED_STEPS = 32
"""Steps of each that are remembered."""
MAX_MASK_CELLS = 1 << 22
"""Cells of the largest mask that is remembered."""

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
    """A generation as it is remembered: the prompt, and its first steps without what is large."""

    generation: int
    prompt: tuple[int, ...]
    unpadded: RealPositions = None
    steps: list[StepRecord] = field(default_factory=list)
    masks: dict[str, MaskRecord] = field(default_factory=dict)


class SamePromptRule(Rule):
    """Compares a generation with an earlier one of the same prompt, once it is over."""

    name: ClassVar[str] = "twins"
    streams: ClassVar[tuple[str, ...]] = ("inputs.mask",)
    findings: ClassVar[Mapping[str, FindingKind]] = {
        SAME_OUTPUT: FindingKind(
            Severity.NOTE,
            "two generations were fed the same and are the same",
            "Another kernel or backend changed nothing that matters.",
            _SAME_PROMPT_CONFIRM,
            "Nothing is to be mended.",
            _SAME_PROMPT_QUERY,
        ),
        DIFFERS_BY_ROUNDING: FindingKind(
            Severity.NOTE,
            "two generations that were fed the same differ by rounding",
            "Differences that grow evenly over the layers come from the dtype. Where a near tie "
            "flips, the texts part, and mask and cache have nothing to do with it.",
            _SAME_PROMPT_CONFIRM,
            "Nothing is to be mended. To compare two runs beyond the token that flips, force the "
            "same tokens on both.",
            _SAME_PROMPT_QUERY,
        ),
        DIFFERS: FindingKind(
            Severity.NOTE,
            "two generations that were fed the same differ by more than rounding",
            "What differs first is where to look: a mask in one layer, a path, or a single layer "
            "that jumps.",
            _SAME_PROMPT_CONFIRM,
            "If both were meant to be the same run, mend what the sentence names.",
            _SAME_PROMPT_QUERY,
        ),
    }

    def on_generation_start(self, context: RuleContext) -> None:
        """Begin with the prompt; what went before is remembered, of other models as well."""
        super().on_generation_start(context)
        prompt = tuple(token.token_id for token in context.generation.tokens)
        self._current = _GenerationRun(
            context.generation.generation, () if context.is_standalone else prompt
        )
        if self._current.prompt:
            self._generations.append(self._current)

    @property
    def _generations(self) -> deque[_GenerationRun]:
        lives: deque[_GenerationRun] = self.context.shared_memory.setdefault(
            self.name, deque(maxlen=MAX_GENERATIONS)
        )
        return lives

    def on_step(self, step: StepRecord) -> Sequence[Finding]:
        """Remember the step."""
        life = self._current
        if not life.prompt or len(life.steps) >= MAX_COMPARED_STEPS or step.branch:
            return ()
        if not life.steps:
            for wide in step.arrays:
                if wide.stream == "inputs.mask" and len(wide.array):
                    real = np.asarray(wide.array[0], np.bool_)
                    life.unpadded = None if real.all() else real
        for name in {call.mask for call in step.calls} - life.masks.keys():
            mask = self.context.mask(name)
            if mask is not None and mask.q_len * mask.kv_len <= MAX_MASK_CELLS:
                life.masks[mask.fingerprint] = mask
        life.steps.append(replace(step, masks=(), arrays=(), builds=(), memory=None, events=()))
        return ()

    def on_generation_end(self) -> Sequence[Finding]:
        """Return what the generation has in common with the last one of the same prompt."""
        life = self._current
        if not life.steps:
            return ()
        twins = [one for one in self._generations if one.generation < life.generation and one.steps]
        twin = next((one for one in reversed(twins) if one.prompt == life.prompt), None)
        return () if twin is None else _compare_generations(twin, life)


def _compare_generations(a: _GenerationRun, b: _GenerationRun) -> Sequence[Finding]:
    """Return the finding of two generations, none when they do not differ in any way."""
    if (a.unpadded is None) != (b.unpadded is None) or _model_shape(a) != _model_shape(b):
        return ()
    differences = []
    for one, other in zip(a.steps, b.steps, strict=False):
        difference = compare_steps(one, other, (a.masks.get, b.masks.get), real=b.unpadded)
        differences.append(difference)
        if difference.is_diverged or difference.lengths:
            break  # from here on they were fed other tokens
    if all(replace(one, tokens=None).is_same for one in differences):
        return ()  # another token from the very same logits is the draw
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
    """Return layers, and heads and head size of each call: two models of unlike shapes differ."""
    step = run.steps[0]
    layers = {one.layer for one in step.layer_stats}
    return len(layers), tuple((call.q_heads, call.head_dim) for call in step.calls)


def _best_token_id(step: StepRecord) -> int | None:
    logits = step.logits
    return logits.candidates[0].token_id if logits is not None and logits.candidates else None


def _exceeds_rounding(one: StepDifference, limit: float) -> bool:
    worst = one.worst
    fed = one.masks or one.lengths or one.positions
    return bool(fed) or (worst is not None and worst.difference > limit)


def _is_near_equal(one: StepDifference) -> bool:
    """Say whether a step is the same but for the last bits."""
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


# -- words -----------------------------------------------------------------------------------------


def _format_generations(a: _GenerationRun, b: _GenerationRun) -> tuple[str, str]:
    """Return both generations, with what tells them apart in brackets."""
    one, other = (f"{_format_path(life)}" for life in (a, b))
    about = ("", "") if one == other else (f" ({one})", f" ({other})")
    return f"generation {a.generation}{about[0]}", f"Generation {b.generation}{about[1]}"


def _format_path(run: _GenerationRun) -> str:
    calls = run.steps[0].calls
    return f"{calls[0].path}, {calls[0].dtype}" if calls else "no calls seen"


def _format_opening(a: _GenerationRun, b: _GenerationRun) -> str:
    first, second = _format_generations(a, b)
    return f"{second} was fed what {first} was"


def _format_padding(run: _GenerationRun) -> str:
    if run.unpadded is None:
        return ""
    rows = format_ranges(np.flatnonzero(~run.unpadded).tolist())
    return f"; rows {rows} are padding: differences there are expected and not counted"


def _describe_same(
    a: _GenerationRun, b: _GenerationRun, differences: Sequence[StepDifference]
) -> str:
    moved = max((one.logits or 0.0 for one in differences), default=0.0)
    what = plural(len(differences), "step")
    drawn = _describe_sampled(differences[-1]) if differences[-1].is_diverged else ""
    same = f"{_format_opening(a, b)}, and {what} came out the same (logits to {moved:.1g})"
    return f"{same}{drawn}{_format_padding(b)}."


def _describe_sampled(parted: StepDifference) -> str:
    return f"; step {parted.step} draws another token, the best one is the same"


def _describe_rounding(
    a: _GenerationRun,
    b: _GenerationRun,
    differences: Sequence[StepDifference],
    is_drawn: bool,
) -> str:
    first, parted = differences[0], differences[-1]
    each = ", ".join(f"{one.difference:.2g}" for one in first.layers[:8])
    layers = f"; the difference grows evenly over the layers ({each}{_format_more_layers(first)}), no single jump"
    if not first.layers:
        layers = ""
    if is_drawn:
        token = _describe_sampled(parted)
    elif not parted.is_diverged:
        margin = min((min(one.margins) for one in differences if one.margins), default=math.nan)
        n_steps = plural(len(differences), "step")
        token = f"; no other token in {n_steps} (smallest margin {margin:.3g})"
    else:
        assert parted.margins is not None
        token = (
            f"; step {parted.step} goes on with another token, where the margin was "
            f"{parted.margins[0]:.3g} and {parted.margins[1]:.3g}"
        )
    return f"{_format_opening(a, b)}, and differs by rounding{layers}{token}{_format_padding(b)}."


def _format_more_layers(one: StepDifference) -> str:
    return ", ..." if len(one.layers) > 8 else ""


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
        what.append(f"it computes other rows ({odd.lengths})")
    if odd.positions:
        what.append(f"its position ids differ ({odd.positions})")
    jump, worst = find_jump(odd.layers, limit), odd.worst
    if jump is not None:
        what.append(f"layer {jump.layer} adds {jump.added:.2g} of its size")
    elif worst is not None and worst.difference > limit:
        more = "of its size, which is more than rounding"
        what.append(f"layer {worst.layer} is off by {worst.difference:.2g} {more}")
    parted = ", and another token is chosen" if odd.is_diverged else ""
    return f"{_format_opening(a, b)}, but in step {odd.step} {' and '.join(what)}{parted}{_format_padding(b)}."
