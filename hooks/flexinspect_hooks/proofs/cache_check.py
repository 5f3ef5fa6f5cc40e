"""Cache check: steps with the cache against a full recompute without one, layer by layer.

What a run fed is taken down as it goes; every few steps all of it is fed again at once, to the same
code under the same mask. How far that is apart for the rows of the prompt, which no cache touched,
is what rounding does in this model; a row of a decode step may be a few times as far off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from flexinspect.analysis.proof_results import (
    CACHE_DIFFERS,
    CACHE_SAME,
    Proof,
    format_amount,
    proof_finding,
)
from flexinspect.core.errors import UsageError
from flexinspect.core.text import format_layers, plural, printable
from flexinspect.records.finding import Finding
from flexinspect_hooks.observers.input_rows import ArgumentNames, input_ids_of
from flexinspect_hooks.proofs.hidden_states import CapturePoint, capture_points, capture_rows
from flexinspect_hooks.proofs.proof_subject import OnProgress, RunIds, Subject, subject_of

Floats = npt.NDArray[np.float64]
Recompute = Callable[[Tensor, dict[str, Any]], object]
"""Runs ids (batch, rows) without a cache, given what else was fed: positions and padding."""

_CACHE_LIMITS = {
    torch.float32: (1e-4, 1e-2),
    torch.float16: (5e-3, 0.1),
    torch.bfloat16: (0.03, 0.3),
}
"""By dtype: what always passes for rounding, and what never does, relative to a row's norm."""
_CACHE_NOISE_FACTOR = 8
"""A row may be this many times further off than the rows of the prompt."""


@dataclass(slots=True)
class _CachedRun:
    """What a run with a cache was fed and what came out: one entry per forward.

    `states` are the newest row of each layer, (points, batch, width); of the prompt all rows are
    kept in `prompt`, (batch, rows, width) per point. `others` are position ids and padding mask.
    """

    ids: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    padding: Tensor | None = None
    states: list[list[Tensor]] = field(default_factory=list)
    prompt_states: list[Tensor] = field(default_factory=list)

    def inputs_up_to(self, step: int) -> tuple[Tensor, dict[str, Any]]:
        """Return all ids that were fed up to a step, and what else was fed with them."""
        ids = torch.cat(self.ids[: step + 1], 1)
        others: dict[str, Any] = {}
        if len(self.positions) == len(self.ids):
            others["position_ids"] = torch.cat(self.positions[: step + 1], 1)
        if self.padding is not None and self.padding.shape[1] >= ids.shape[1]:
            others["attention_mask"] = self.padding[:, : ids.shape[1]]
        return ids, others


@dataclass(frozen=True, slots=True)
class _StepCheck:
    """One step compared: how far each layer is off (layers,), and the limit of each (layers,).

    `token_id` is what was fed at `pos` in batch row 0.
    """

    step: int
    pos: int
    token_id: int
    differences: Floats
    limits: Floats

    @property
    def differing_layers(self) -> list[int]:
        """Numbers of the layers that are further off than rounding."""
        return np.flatnonzero(~(self.differences <= self.limits)).tolist()


def prove_cache(
    model: nn.Module,
    ids: Tensor | Sequence[int] | str,
    *,
    new_tokens: int = 16,
    every: int = 1,
    tokenizer: Any = None,
    attention_mask: Tensor | None = None,
    position_ids: Any = None,
    run: RunIds | None = None,
    recompute: RunIds | None = None,
    report: OnProgress | None = None,
) -> Proof:
    """Generate with the cache, and compare every `every`-th step with a full recompute.

    `run(ids)` generates in whatever way your code does, with its cache; without it `new_tokens`
    tokens are chosen greedily, with `attention_mask` (0 and 1, of padding) and `position_ids`
    handed on. `recompute(ids)` runs longer ids without cached keys under the same mask; without it
    the model is called with the position ids and padding that the run had fed.
    The steps in between are compared too, at the next recompute.

    Raises `UsageError` when the run makes no step after the prompt.
    """
    subject = subject_of(
        *(model, ids),
        tokenizer=tokenizer,
        attention_mask=attention_mask,
        position_ids=position_ids,
        run=run or (lambda fed: None),
    )
    if run is None:
        positions = None if position_ids is None else torch.as_tensor(position_ids)
        run = _greedy_run(model, new_tokens, attention_mask, positions)
    again = _default_recompute(model) if recompute is None else lambda fed, _: recompute(fed)
    return check_cache(subject, run, again, every=every, report=report)


def check_cache(
    subject: Subject,
    run: RunIds,
    recompute: Recompute,
    *,
    every: int = 1,
    report: OnProgress | None = None,
) -> Proof:
    """Compare the steps of `run` with `recompute`, every so many steps and at the last one."""
    if every < 1:
        raise UsageError("every= must be 1 or more: how many steps lie between two recomputes.")
    say = report or (lambda text, fraction: None)
    points = capture_points(subject.model)[1:]
    say("generating with the cache", None)
    with torch.no_grad():
        fed = _record_run(subject, points, run)
        n_steps = len(fed.ids) - 1
        checks = [step for step in range(1, n_steps + 1) if step % every == 0 or step == n_steps]
        done: list[_StepCheck] = []
        for number, step in enumerate(checks):
            say(f"recomputing up to step {step}", number / len(checks))
            done += _compare_steps(points, fed, step, done[-1].step if done else 0, recompute)
    numbers = [point.layer for point in points if point.layer is not None]
    return _cache_proof(subject, done, numbers, n_recomputes=len(checks))


# -- the run with a cache --------------------------------------------------------------------------


def _greedy_run(
    model: nn.Module, new_tokens: int, attention_mask: Tensor | None, positions: Tensor | None
) -> RunIds:
    """Return what generates greedily with a cache of transformers' own choice."""

    def run(ids: Tensor) -> None:
        fed, cache = ids, None
        padding = None if attention_mask is None else attention_mask.to(ids.device)
        at = None if positions is None else positions.to(ids.device).view(1, -1)
        for _ in range(new_tokens + 1):
            given = {} if padding is None else {"attention_mask": padding}
            given |= {} if at is None else {"position_ids": at}
            output = model(fed, past_key_values=cache, use_cache=True, **given)
            cache, fed = output.past_key_values, output.logits[:, -1:].argmax(-1)
            if padding is not None:
                padding = torch.cat((padding, padding.new_ones(len(padding), 1)), 1)
            if at is not None:
                at = at.max().view(1, 1) + 1

    return run


def _default_recompute(model: nn.Module) -> Recompute:
    """Return what feeds all ids at once, into an empty cache.

    With use_cache=False transformers reads position ids that begin again as several documents, and
    masks them from each other, which the run's own prompt was not.
    """
    return lambda ids, others: model(ids, use_cache=True, **others)


def _record_run(subject: Subject, points: Sequence[CapturePoint], run: RunIds) -> _CachedRun:
    fed = _CachedRun()
    with _record_inputs(subject.model, fed), _record_newest_rows(points, fed):
        run(subject.ids)
    if len(fed.ids) < 2:
        raise UsageError(
            "The run made no step after the prompt, so nothing was read from a cache.",
            hint="It must generate at least two tokens, with a cache.",
        )
    if not len(fed.states) == len(fed.ids) or any(len(s) != len(points) for s in fed.states):
        raise UsageError("Not every forward of the run went through every layer.")
    if any(ids.shape[1] != 1 for ids in fed.ids[1:]):
        raise UsageError(
            "A step of the run fed more than one row, so it uses no cache, or goes on with a text.",
            hint="Give a run that feeds the prompt once and then one token at a time.",
        )
    return fed


@contextmanager
def _record_inputs(model: nn.Module, cached_run: _CachedRun) -> Iterator[None]:
    """Take down what each forward of the model is fed."""
    names = ArgumentNames(model)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = names(args, kwargs)
        ids = input_ids_of(arguments)
        if ids is None:
            raise UsageError("The run fed no token ids, so it cannot be repeated without a cache.")
        cached_run.ids.append(ids.detach().clone())
        cached_run.states.append([])
        positions, padding = (arguments.get(k) for k in ("position_ids", "attention_mask"))
        if isinstance(positions, Tensor) and positions.shape[-1] == ids.shape[1]:
            cached_run.positions.append(positions.detach().clone())
        if isinstance(padding, Tensor) and padding.dim() == 2:
            cached_run.padding = padding.detach().clone()

    handle = model.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _record_newest_rows(points: Sequence[CapturePoint], cached_run: _CachedRun) -> Iterator[None]:
    """Keep the newest row that leaves each layer, and all rows of the first forward."""

    def see(index: int, start: int, rows: Tensor) -> None:
        cached_run.states[-1].append(rows[:, -1].clone())
        if len(cached_run.states) == 1:
            cached_run.prompt_states.append(rows.clone())

    with capture_rows(points, 1 << 40, see):
        yield


# -- the recompute ---------------------------------------------------------------------------------


def _compare_steps(
    points: Sequence[CapturePoint],
    cached_run: _CachedRun,
    step: int,
    before: int,
    recompute: Recompute,
) -> list[_StepCheck]:
    """Compare the steps after `before` up to `step` with one recompute of all that was fed."""
    ids, others = cached_run.inputs_up_to(step)
    full: list[list[Tensor]] = [[] for _ in points]

    def see(index: int, start: int, rows: Tensor) -> None:
        full[index].append(rows.clone())

    with capture_rows(points, ids.shape[1], see) as passed:
        recompute(ids, others)
    if min(passed) < ids.shape[1]:
        raise UsageError(
            f"The recompute showed {min(passed)} of {ids.shape[1]} rows: it must feed all the ids "
            "that it is given, without a cache."
        )
    whole = [torch.cat(parts, 1) for parts in full]
    n_prompt = cached_run.ids[0].shape[1]
    real = _real_prompt_rows(cached_run, n_prompt)
    floor = np.array(
        [
            _relative_difference(cached_run.prompt_states[i], whole[i][:, :n_prompt], real)
            for i in range(len(points))
        ]
    )
    limit, most = _layer_limits(whole[0].dtype, floor)
    out: list[_StepCheck] = []
    if not before and (floor > most).any():
        out.append(_StepCheck(0, n_prompt - 1, int(ids[0, n_prompt - 1]), floor, most))
    for one in range(before + 1, step + 1):
        pos = n_prompt + one - 1
        states = cached_run.states[one]
        off = [
            _relative_difference(states[i][:, None], whole[i][:, pos : pos + 1])
            for i in range(len(points))
        ]
        out.append(_StepCheck(one, pos, int(ids[0, pos]), np.array(off), limit))
    return out


def _real_prompt_rows(cached_run: _CachedRun, n_prompt: int) -> Tensor | None:
    return None if cached_run.padding is None else cached_run.padding[:, :n_prompt].bool()


def _relative_difference(one: Tensor, other: Tensor, real: Tensor | None = None) -> float:
    """Return how far rows (batch, rows, width) are apart, relative to the norm, at the worst row.

    Rows that are not finite in both are taken to be equal, as nothing tells them apart.
    """
    kind = torch.promote_types(one.dtype, torch.float32)
    one, other = one.to(kind), other.to(kind)
    same = (one == other) | (~one.isfinite() & ~other.isfinite())
    apart = (one - other).masked_fill(same, 0).norm(dim=-1)
    off = (apart / other.norm(dim=-1).clamp_min(1e-30)).nan_to_num(nan=torch.inf)
    off = off.masked_fill(apart == 0, 0)
    if real is not None:
        off = off.masked_fill(~real, 0)
    return float(off.max())


def _layer_limits(dtype: torch.dtype, floor: Floats) -> tuple[Floats, Floats]:
    """Return the limit of each layer, a few times what the prompt's rows are off, and the highest.

    Rows of the prompt above the highest change with what follows them.
    """
    least, most = _CACHE_LIMITS.get(dtype, _CACHE_LIMITS[torch.float32])
    return np.clip(_CACHE_NOISE_FACTOR * floor, least, most), np.full_like(floor, most)


# -- in words --------------------------------------------------------------------------------------


def _cache_proof(
    subject: Subject, done: Sequence[_StepCheck], numbers: Sequence[int], *, n_recomputes: int
) -> Proof:
    dtype = str(next(subject.model.parameters()).dtype).removeprefix("torch.")
    bad = [one for one in done if one.differing_layers]
    head = (
        f"cache check: {plural(len(done), 'step')}, {len(numbers)} layers, {dtype}, "
        f"{plural(n_recomputes, 'full recompute')}"
    )
    lines = [head, *(_step_line(one, numbers) for one in _worst_steps(done))]
    finding = (
        _cache_differs(subject, bad, numbers, done) if bad else _cache_same(done, numbers, dtype)
    )
    facts = {
        "layers": list(numbers),
        "steps": [
            {
                "step": one.step,
                "position": one.pos,
                "difference": one.differences.tolist(),
                "limit": one.limits.tolist(),
                "layers_that_differ": [numbers[i] for i in one.differing_layers],
            }
            for one in done
        ],
    }
    return Proof("cache", tuple(lines), (finding,), facts)


_MAX_STEP_LINES = 12


def _worst_steps(done: Sequence[_StepCheck]) -> Sequence[_StepCheck]:
    """Return the steps that are printed: all of a few, else the worst, in their order."""
    if len(done) <= _MAX_STEP_LINES:
        return done
    worst = sorted(done, key=lambda one: -float((one.differences / one.limits).max()))[
        :_MAX_STEP_LINES
    ]
    return sorted(worst, key=lambda one: one.step)


def _step_line(one: _StepCheck, numbers: Sequence[int]) -> str:
    worst = int(np.argmax(one.differences / one.limits))
    verdict = "DIFFERS" if one.differing_layers else "rounding"
    return (
        f"  step {one.step}: at most {format_amount(float(one.differences[worst]))} of the row's norm (layer "
        f"{numbers[worst]}), limit {format_amount(float(one.limits[worst]))}: {verdict}"
    )


def _cache_differs(
    subject: Subject, bad: Sequence[_StepCheck], numbers: Sequence[int], done: Sequence[_StepCheck]
) -> Finding:
    first = bad[0]
    index = first.differing_layers[0]
    layer, off, limit = numbers[index], float(first.differences[index]), float(first.limits[index])
    which = [numbers[i] for i in first.differing_layers]
    word = printable(subject.text_of(first.token_id))
    sentence = (
        f'Step {first.step} (position {first.pos} "{word}") differs from a full recompute in '
        f"layer {layer} by {format_amount(off)} of the row's norm, where rounding explains "
        f"{format_amount(limit)}"
    )
    if len(which) > 1:
        sentence += f", and by more than that in {format_layers(which, len(numbers))}"
    sentence += f"; {len(bad)} of {len(done)} steps differ."
    if first.step == 0:
        sentence += " Rows of the prompt itself change when tokens follow, so they see the future."
    return proof_finding(
        CACHE_DIFFERS,
        sentence,
        step=first.step,
        layer=layer,
        positions=(first.pos,),
        evidence={
            "difference": off,
            "limit": limit,
            "steps_that_differ": [one.step for one in bad],
            "steps": len(done),
        },
        layers=which if len(which) > 1 else (),
    )


def _cache_same(done: Sequence[_StepCheck], numbers: Sequence[int], dtype: str) -> Finding:
    worst = max(float(one.differences.max()) for one in done)
    sentence = (
        f"With the cache and without it, {plural(len(done), 'step')} are the same in all "
        f"{len(numbers)} layers but for rounding in {dtype}: at most {format_amount(worst)} of a row's "
        "norm."
    )
    return proof_finding(
        CACHE_SAME, sentence, evidence={"largest_difference": worst, "steps": len(done)}
    )
