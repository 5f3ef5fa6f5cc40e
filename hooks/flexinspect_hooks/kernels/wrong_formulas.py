"""The formulas that kernels compute by mistake with the right inputs, each with its class."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from msgspec import Struct
from torch import Tensor

from flexinspect_hooks.kernels.oracle import Variation, scores_of
from flexinspect_hooks.kernels.problem import Problem

_BLOCKS = (1, 16, 32, 64, 128)
_MAX_STEPS = 256  # of an online softmax, for each size of blocks


class FormulaFault(Struct, frozen=True):
    """The output of a wrong formula, (batch, query heads, rows, head size)."""

    kind: str
    sentence: str
    out: Tensor


def formula_faults(problem: Problem, dtype: torch.dtype = torch.float64) -> Iterator[FormulaFault]:
    """Yield the outputs of wrong formulas, from the simplest on, computed in `dtype`."""
    variation = Variation.of(problem)
    scores = scores_of(problem, variation, dtype)
    value = problem.v[:, list(variation.kv_head)].to(dtype)
    yield from _wrong_softmax(scores, variation.cells, value)
    yield from _wrong_mask(scores, variation.cells, value)
    yield from _misplaced(
        torch.softmax(_closed(scores, variation.cells), -1).nan_to_num(0.0) @ value
    )
    yield from _padding_keys(problem, _closed(scores, variation.cells), value)
    yield from _online(problem, _closed(scores, variation.cells), value)


def _wrong_softmax(scores: Tensor, cells: Tensor, value: Tensor) -> Iterator[FormulaFault]:
    closed = _closed(scores, cells)
    for dim, over in ((-2, "rows"), (1, "heads")):
        text = f"The softmax is over {over} instead of keys."
        weights = torch.softmax(closed, dim).nan_to_num(0.0)  # no open cell: all are -inf
        yield FormulaFault("softmax-axis", text, weights @ value)
    top = closed.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    text = "The weights are not divided by their sum."
    yield FormulaFault("not-normalized", text, (closed - top).exp() @ value)
    text = "There is no softmax: the scores are used as weights."
    yield FormulaFault("softmax-missing", text, scores.masked_fill(~cells, 0) @ value)


def _wrong_mask(scores: Tensor, cells: Tensor, value: Tensor) -> Iterator[FormulaFault]:
    if bool(cells.all()):
        return
    text = "The mask is applied after the softmax: the weights of open keys do not add up to 1."
    after = torch.softmax(scores, -1).masked_fill(~cells, 0)
    yield FormulaFault("mask-after-softmax", text, after @ value)
    number = cells.to(scores.dtype)
    for text, changed in (
        ("The mask is added to the scores as 0 and 1, so closed keys are used.", scores + number),
        ("The scores of closed keys are 0 instead of -inf, so they are used.", scores * number),
    ):
        yield FormulaFault("mask-as-numbers", text, torch.softmax(changed, -1) @ value)


def _closed(scores: Tensor, cells: Tensor) -> Tensor:
    return scores.masked_fill(~cells, -torch.inf)


def _misplaced(out: Tensor) -> Iterator[FormulaFault]:
    batch, heads, rows, width = out.shape
    for shift, word in ((1, "before"), (-1, "after")):
        text = f"Each row has the output of the row {word} it."
        yield FormulaFault("output-misplaced", text, out.roll(shift, 2))
    if heads > 1:
        text = "The heads of the output are in the reverse order."
        yield FormulaFault("output-misplaced", text, out.flip(1))
        memory = out.transpose(1, 2).reshape(batch, heads, rows, width)
        text = "The output is written as (batch, rows, heads, size), and has the shape "
        text += "(batch, heads, rows, size)."
        yield FormulaFault("output-misplaced", text, memory)


def _padding_keys(problem: Problem, closed: Tensor, value: Tensor) -> Iterator[FormulaFault]:
    """Keys of 0 after the last one that are not masked: their score is 0, and their value."""
    n_keys = problem.config.kv_len
    numbers = {-n_keys % size: f" (up to a multiple of {size})" for size in reversed(_BLOCKS)}
    for n, why in ({1: "", **{k: v for k, v in numbers.items() if k}}).items():
        keys = "1 more key of 0 is" if n == 1 else f"{n} more keys of 0{why} are"
        zeros = torch.zeros_like(closed[..., :1]).expand(*closed.shape[:-1], n)
        weights = torch.softmax(torch.cat([closed, zeros], -1), -1)[..., :n_keys]
        text = f"{keys} in the softmax, as padding without a mask is."
        yield FormulaFault("padding-keys", text, weights @ value)


def _online(problem: Problem, scores: Tensor, value: Tensor) -> Iterator[FormulaFault]:
    n_keys = problem.config.kv_len
    for size in dict.fromkeys((problem.config.block_size, *_BLOCKS)):
        starts = range(0, n_keys, size)
        if not 1 < len(starts) <= _MAX_STEPS:
            continue
        for order in (starts, reversed(starts)):
            for what, out in _without_rescale(scores, value, size, [*order]).items():
                when = f"when a block of {size} keys raises the maximum"
                text = f"{what} of the online softmax is not rescaled {when}."
                yield FormulaFault("rescale-missing", text, out)


def _without_rescale(
    scores: Tensor, value: Tensor, size: int, starts: list[int]
) -> dict[str, Tensor]:
    """Return the outputs of an online softmax that keeps what it added up under an old maximum.

    The factor that must be applied is exp(old maximum - new maximum), as in algorithm 1 of
    https://arxiv.org/abs/2205.14135.
    """
    top = torch.full_like(scores[..., :1], -torch.inf)
    total, kept_total = torch.zeros_like(top), torch.zeros_like(top)
    out = torch.zeros((*scores.shape[:3], value.shape[-1]), dtype=scores.dtype)
    out = out.to(scores.device)
    kept_out = out.clone()
    for start in starts:
        part = scores[..., start : start + size]
        new = torch.maximum(top, part.amax(-1, keepdim=True))
        safe = new.nan_to_num(neginf=0.0)
        weights, shrink = (part - safe).exp(), (top - safe).exp()
        added, product = (
            weights.sum(-1, keepdim=True),
            weights @ value[..., start : start + size, :],
        )
        total, kept_total = total * shrink + added, kept_total + added
        out, kept_out, top = out * shrink + product, kept_out + product, new
    results = {
        "The output": kept_out / total,
        "The sum of the weights": out / kept_total,
        "Neither the output nor the sum": kept_out / kept_total,
    }
    return {what: result.nan_to_num(0.0) for what, result in results.items()}
