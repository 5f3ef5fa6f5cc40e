"""Cache check: compares steps with the cache to a full recompute without it, layer by layer.

The inputs of a run are recorded. Every few steps, all of them are computed again at once, by the
same code under the same mask. The prompt's rows did not read a cache, so their difference is due to
rounding; a decode row may differ by a few times that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from msgspec import Struct, field
from torch import Tensor, nn

from flexinspect.analysis import proof_results
from flexinspect.analysis.proof_results import Proof, format_amount, proof_finding
from flexinspect.core.errors import UsageError
from flexinspect.core.text import format_layers, plural, printable
from flexinspect.records.finding import Finding, Severity
from flexinspect_hooks.capture.layer_rows import (
    CACHE_LIMITS,
    CACHE_NOISE_FACTOR,
    CapturePoint,
    Floats,
    capture_points,
    capture_rows,
    relative_differences,
)
from flexinspect_hooks.observers.inputs_hook import ArgumentNames, input_ids_of
from flexinspect_hooks.proofs.proof_subject import RunIds, Subject, check_padding

_MAX_STEP_LINES = 12
"""Most steps that are printed; of more steps, the worst."""


class _CachedRun(Struct):
    """The inputs of a run with a cache, one entry per forward pass, and its hidden states.

    `states` have the rows of all forward passes, (batch, rows, width) per layer.
    """

    ids: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    padding: Tensor | None = None
    states: Sequence[Tensor] = ()

    def inputs_up_to(self, step: int) -> tuple[Tensor, dict[str, Any]]:
        """All input ids up to a step, and the position ids and padding mask for them."""
        ids = torch.cat(self.ids[: step + 1], 1)
        others: dict[str, Any] = {}
        if len(self.positions) == len(self.ids):
            others["position_ids"] = torch.cat(self.positions[: step + 1], 1)
        if self.padding is not None and self.padding.shape[1] >= ids.shape[1]:
            others["attention_mask"] = self.padding[:, : ids.shape[1]]
        return ids, others


class _StepCheck(Struct, frozen=True):
    """One compared step: the difference and the limit of each layer, both (layers,).

    `token_id` is the input at `pos` in batch row 0.
    """

    step: int
    pos: int
    token_id: int
    differences: Floats
    limits: Floats

    @property
    def differing_layers(self) -> list[int]:
        """Indices of the layers that differ by more than rounding."""
        return np.flatnonzero(~(self.differences <= self.limits)).tolist()


def check_cache(
    subject: Subject, *, new_tokens: int = 16, every: int = 1, recompute: RunIds | None = None
) -> Proof:
    """Generate with the cache, and compare the steps with a full recompute.

    Args:
        subject: its `run` generates with a cache; without it, tokens are generated greedily.
        new_tokens: tokens that are generated without `run`.
        every: a recompute is made every so many steps, and at the last one; it compares all steps
            since the one before.
        recompute: `recompute(ids)` runs longer ids without cached keys under the same mask.
            Without it, the model is called with the position ids and padding of the run.

    The prompt is recomputed twice first: a model that does not give the same states again, such as
    in training mode with dropout, cannot be judged. Raises `UsageError` if the run makes no step
    after the prompt.
    """
    if every < 1:
        raise UsageError("every= must be 1 or more: the steps from one recompute to the next.")
    points = capture_points(subject.model)[1:]
    subject.report("generating with the cache", None)
    with torch.no_grad():
        cached_run = _record_run(subject, points, new_tokens)
        if (unstable := _check_repeats(subject, points, cached_run, recompute)) is not None:
            return unstable
        n_steps = len(cached_run.ids) - 1
        checks = [step for step in range(1, n_steps + 1) if step % every == 0 or step == n_steps]
        done: list[_StepCheck] = []
        for number, step in enumerate(checks):
            subject.report(f"recomputing up to step {step}", number / len(checks))
            full = _recompute(subject, points, cached_run, step, recompute)
            done += _compare_steps(cached_run, full, step, done[-1].step if done else 0)
    numbers = [point.layer for point in points if point.layer is not None]
    return _cache_proof(subject, done, numbers, n_recomputes=len(checks))


# -- the run with a cache --------------------------------------------------------------------------


def _greedy_run(subject: Subject, new_tokens: int) -> None:
    """Generate greedily with the cache that transformers chooses."""
    check_padding(subject.arguments, subject.ids)
    ids, cache, arguments = subject.ids, None, dict(subject.arguments)
    for _ in range(new_tokens + 1):
        output = subject.model(ids, past_key_values=cache, use_cache=True, **arguments)
        cache, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
        if (padding := arguments.get("attention_mask")) is not None:
            arguments["attention_mask"] = torch.cat((padding, torch.ones_like(padding[:, :1])), 1)
        if (positions := arguments.get("position_ids")) is not None:
            arguments["position_ids"] = positions.max().view(1, 1) + 1


def _record_run(subject: Subject, points: Sequence[CapturePoint], new_tokens: int) -> _CachedRun:
    def run() -> None:
        subject.run(subject.ids) if subject.run else _greedy_run(subject, new_tokens)

    cached_run = _CachedRun()
    with _record_inputs(subject.model, cached_run):
        cached_run.states = capture_rows(points, run)
    if len(cached_run.ids) < 2:
        raise UsageError(
            "The run made no step after the prompt, so nothing was read from a cache.",
            hint="It must generate at least two tokens, with a cache.",
        )
    n_rows = sum(ids.shape[1] for ids in cached_run.ids)
    if any(states.shape[1] != n_rows for states in cached_run.states):
        raise UsageError("Not every forward pass of the run went through every layer.")
    if any(ids.shape[1] != 1 for ids in cached_run.ids[1:]):
        raise UsageError(
            "A step of the run had more than one row, so it does not use a cache, or adds a text.",
            hint="The run must process the prompt once and then one token at a time.",
        )
    return cached_run


@contextmanager
def _record_inputs(model: nn.Module, cached_run: _CachedRun) -> Iterator[None]:
    """Record the inputs of each forward pass of the model."""
    names = ArgumentNames(model)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = names(args, kwargs)
        ids = input_ids_of(arguments)
        if ids is None:
            raise UsageError(
                "The run has no token ids as input, so it cannot be repeated without a cache."
            )
        cached_run.ids.append(ids.detach().clone())
        positions, padding = (arguments.get(k) for k in ("position_ids", "attention_mask"))
        if isinstance(positions, Tensor) and positions.shape[-1] == ids.shape[1]:
            cached_run.positions.append(positions.detach().clone())
        if isinstance(padding, Tensor) and padding.dim() == 2:
            cached_run.padding = padding.detach().clone()

    with model.register_forward_pre_hook(before, with_kwargs=True):
        yield


# -- the recompute ---------------------------------------------------------------------------------


def _recompute(
    subject: Subject,
    points: Sequence[CapturePoint],
    cached_run: _CachedRun,
    step: int,
    recompute: RunIds | None,
) -> list[Tensor]:
    """The rows of each layer (batch, rows, width) if all inputs up to a step run at once.

    With use_cache=False, transformers takes position ids that start again for several documents and
    masks them from each other, which the run itself did not: so the model gets an empty cache.
    """
    ids, others = cached_run.inputs_up_to(step)

    def run() -> None:
        recompute(ids) if recompute else subject.model(ids, use_cache=True, **others)

    full = capture_rows(points, run, ids.shape[1])
    n_passed = min(rows.shape[1] for rows in full)
    if n_passed < ids.shape[1]:
        raise UsageError(
            f"The recompute ran {n_passed} of {ids.shape[1]} rows: it must run all ids that "
            "it receives, without a cache."
        )
    return full


def _check_repeats(
    subject: Subject,
    points: Sequence[CapturePoint],
    cached_run: _CachedRun,
    recompute: RunIds | None,
) -> Proof | None:
    """Return a proof that nothing was judged if two forwards of the prompt differ, else None."""
    subject.report("running the prompt twice", None)
    twice = [_recompute(subject, points, cached_run, 0, recompute) for _ in range(2)]
    padding = None if cached_run.padding is None else ~cached_run.padding.bool()
    n = cached_run.ids[0].shape[1]
    hidden = None if padding is None else padding[:, :n]
    noise = np.array(
        [
            relative_differences(a[:, :n], b[:, :n], hidden).max()
            for a, b in zip(*twice, strict=True)
        ]
    )
    highest = CACHE_LIMITS.get(twice[0][0].dtype, CACHE_LIMITS[torch.float32])[1]
    if (noise <= highest).all():
        return None
    index = int(np.argmax(~(noise <= highest)))
    layer, off = points[index].layer, format_amount(float(noise[index]))
    why = " The model is in training mode." if subject.model.training else ""
    sentence = (
        f"The same prompt, run twice without a cache, gives states that differ in layer {layer} by "
        f"{off} of a row's norm, where rounding explains {format_amount(highest)}: steps were not "
        f"compared, because the difference would not be the cache's.{why}"
    )
    evidence = {"noise": noise.tolist(), "limit": highest}
    finding = proof_finding(
        proof_results.UNSTABLE, sentence, severity=Severity.ERROR, layer=layer, evidence=evidence
    )
    numbers = [point.layer for point in points if point.layer is not None]
    line = "cache check: no step was compared, because the model does not repeat itself"
    return Proof("cache", (line,), (finding,), {"layers": numbers, "steps": [], **evidence})


def _compare_steps(
    cached_run: _CachedRun, full: Sequence[Tensor], step: int, before: int
) -> list[_StepCheck]:
    """Compare the steps after `before` up to `step` with one recompute of all their inputs.

    A limit comes from the difference of the prompt's rows. If this is above the highest limit,
    these rows depend on what follows them.
    """
    ids = cached_run.inputs_up_to(step)[0][0]
    n_prompt = cached_run.ids[0].shape[1]
    padding = None if cached_run.padding is None else ~cached_run.padding[:, :n_prompt].bool()
    pairs = zip(cached_run.states, full, strict=True)
    differences = np.stack(
        [relative_differences(rows[:, : len(ids)], other, padding) for rows, other in pairs]
    )
    floor = differences[:, :n_prompt].max(1)
    lowest, highest = CACHE_LIMITS.get(full[0].dtype, CACHE_LIMITS[torch.float32])
    limits = np.clip(CACHE_NOISE_FACTOR * floor, lowest, highest)
    checks = []
    if not before and (floor > highest).any():
        most = np.full_like(limits, highest)
        checks.append(_StepCheck(0, n_prompt - 1, int(ids[n_prompt - 1]), floor, most))
    for number in range(before + 1, step + 1):
        pos = n_prompt + number - 1
        checks.append(_StepCheck(number, pos, int(ids[pos]), differences[:, pos], limits))
    return checks


# -- report ----------------------------------------------------------------------------------------


def _cache_proof(
    subject: Subject, done: Sequence[_StepCheck], numbers: Sequence[int], *, n_recomputes: int
) -> Proof:
    dtype = str(next(subject.model.parameters()).dtype).removeprefix("torch.")
    steps, recomputes = plural(len(done), "step"), plural(n_recomputes, "full recompute")
    lines = [f"cache check: {steps}, {len(numbers)} layers, {dtype}, {recomputes}"]
    if len(done) > _MAX_STEP_LINES:
        lines[0] += f"; the {_MAX_STEP_LINES} steps that differ most:"
    by_ratio = sorted(done, key=lambda check: -float((check.differences / check.limits).max()))
    for check in sorted(by_ratio[:_MAX_STEP_LINES], key=lambda check: check.step):
        worst = int(np.argmax(check.differences / check.limits))
        values = (check.differences[worst], check.limits[worst])
        difference, limit = (format_amount(float(value)) for value in values)
        verdict = "DIFFERS" if check.differing_layers else "rounding"
        lines.append(
            f"  step {check.step}: at most {difference} of the row's norm (layer "
            f"{numbers[worst]}), limit {limit}: {verdict}"
        )
    differs = any(check.differing_layers for check in done)
    finding = (
        _cache_differs(subject, done, numbers) if differs else _cache_same(done, numbers, dtype)
    )
    step_facts = [
        {
            "step": check.step,
            "position": check.pos,
            "difference": check.differences.tolist(),
            "limit": check.limits.tolist(),
            "layers_that_differ": [numbers[i] for i in check.differing_layers],
        }
        for check in done
    ]
    return Proof("cache", tuple(lines), (finding,), {"layers": list(numbers), "steps": step_facts})


def _cache_differs(subject: Subject, done: Sequence[_StepCheck], numbers: Sequence[int]) -> Finding:
    bad = [check for check in done if check.differing_layers]
    first = bad[0]
    index = first.differing_layers[0]
    layer, off, limit = numbers[index], float(first.differences[index]), float(first.limits[index])
    which = [numbers[i] for i in first.differing_layers]
    text = printable(subject.text_of(first.token_id))
    sentence = (
        f'Step {first.step} (position {first.pos} "{text}") differs from a full recompute in '
        f"layer {layer} by {format_amount(off)} of the row's norm, where rounding explains "
        f"{format_amount(limit)}"
    )
    if len(which) > 1:
        sentence += f", and by more than that in {format_layers(which, len(numbers))}"
    sentence += f"; {len(bad)} of {len(done)} steps differ."
    if first.step == 0:
        sentence += " Rows of the prompt itself change when tokens follow, so they see the future."
    return proof_finding(
        proof_results.CACHE_DIFFERS,
        sentence,
        step=first.step,
        layer=layer,
        positions=(first.pos,),
        evidence={
            "difference": off,
            "limit": limit,
            "steps_that_differ": [check.step for check in bad],
            "steps": len(done),
        },
        layers=which if len(which) > 1 else (),
    )


def _cache_same(done: Sequence[_StepCheck], numbers: Sequence[int], dtype: str) -> Finding:
    worst = max(float(check.differences.max()) for check in done)
    sentence = (
        f"With the cache and without it, {plural(len(done), 'step')} are the same in all "
        f"{len(numbers)} layers but for rounding in {dtype}: at most {format_amount(worst)} of a "
        "row's norm."
    )
    evidence = {"largest_difference": worst, "steps": len(done)}
    return proof_finding(proof_results.CACHE_SAME, sentence, evidence=evidence)
