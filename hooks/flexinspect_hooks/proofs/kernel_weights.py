"""Kernel check: the weights that the kernel itself used, recovered by calling it again.

Attention is linear in its values, so the same call with columns of the identity as values returns
the weights, for as many keys at a time as a head is wide. The drawn weights are the softmax of the
same queries and keys under the executed mask as it was recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor, nn

from flexinspect.analysis import proof_results
from flexinspect.analysis.proof_results import Proof, format_amount, proof_finding
from flexinspect.core.errors import UsageError, summarize_error
from flexinspect.core.text import format_layers, is_or_are, plural
from flexinspect.records.finding import Finding
from flexinspect.rules.context import RuleContext
from flexinspect_hooks.capture.hook import CaptureContext
from flexinspect_hooks.capture.model_layers import attention_layers
from flexinspect_hooks.capture.step_clock import StepClock, StepContext
from flexinspect_hooks.kernels.identity_probe import identity_values
from flexinspect_hooks.observers.attention.attention_hook import AttentionHook
from flexinspect_hooks.observers.attention.call_references import AttentionCall, CapturedMask
from flexinspect_hooks.observers.attention.mask_capture import capture_call_mask, dense_bias
from flexinspect_hooks.observers.inputs_hook import ArgumentNames
from flexinspect_hooks.proofs.proof_subject import Subject, device_of

_MIN_DRAWN_WEIGHT = 1e-6
"""An open cell of weight 0 counts as closed in the kernel if more than this is drawn."""
_KERNEL_NOISE_FACTOR = 4
_TF32_EPS = 1e-3
"""Rounding of float32 products on CUDA, which may use TF32."""


class _CellDifference(NamedTuple):
    """One cell where the kernel's weight and the drawn weight differ.

    The order is that of reporting: cells that are wrongly open or closed first, then by position.
    """

    same_visibility: bool
    row: int
    head: int
    key: int
    kernel: float
    drawn: float
    is_open: bool


class _KernelComparison(Struct):
    """The comparison of one attention call.

    `shape` is (heads, rows, keys); `row_offset` and `key_offset` are the positions of row 0 and key
    0. `largest` is the largest difference of a weight, None if only closed cells could be compared.
    `n_wrong` counts the cells that differ, `n_visibility` those that are closed in one and open in
    the other. `skip_reason` says why the call was not compared, "" if it was.
    """

    step: int
    layer: int
    path: str
    shape: tuple[int, int, int]
    row_offset: int = 0
    key_offset: int = 0
    largest: float | None = None
    n_wrong: int = 0
    n_visibility: int = 0
    first: _CellDifference | None = None
    skip_reason: str = ""


def check_kernel(subject: Subject, *, drawn: Any = None, steps: int = 3) -> Proof:
    """Compare the weights that each kernel call used with those that are drawn, cell by cell.

    Of a batch, row 0 is compared. The segments are only for the names of positions in the report.

    Args:
        drawn: a mask to compare with instead of the recorded executed mask, bool (rows, keys) or
            (heads, rows, keys) over the whole sequence.
        steps: compare the first `steps` forward passes of the run.

    Raises `UsageError` if no attention call was seen, or if `drawn` does not fit.
    """
    drawn_mask = None if drawn is None else _parse_drawn_mask(drawn, device_of(subject.model))
    done: list[_KernelComparison] = []

    def compare(calls: Sequence[AttentionCall], step: StepContext) -> None:
        for number, ref in enumerate(calls if step.step < steps else ()):
            doing = f"step {step.step}: calling the kernel of layer {ref.layer} again"
            subject.report(doing, number / len(calls))
            done.append(_compare_call(ref, step, drawn_mask))

    with _observe_calls(subject.model, compare):
        subject.forward()
    if not done:
        raise UsageError(
            "No attention call was seen in this run.",
            hint="Its layers call no supported kernel, or the model is compiled as a whole.",
        )
    n_layers = len({*attention_layers(subject.model).values()} or {one.layer for one in done})
    findings = tuple(_kernel_findings(done, subject.context, n_layers))
    facts = {"calls": [_comparison_facts(one) for one in done]}
    return Proof("kernel", tuple(_kernel_lines(done)), findings, facts)


# -- the calls -------------------------------------------------------------------------------------


@contextmanager
def _observe_calls(
    model: nn.Module, on_calls: Callable[[Sequence[AttentionCall], StepContext], None]
) -> Iterator[None]:
    """Call `on_calls` with the attention calls of each forward pass when it ends."""
    layer_of = attention_layers(model)
    context = CaptureContext(
        model, device_of(model), layer_of, {}, (), text_of=str, sees_kernels=True
    )
    hook, clock, names = AttentionHook(), StepClock(), ArgumentNames(model)
    current: list[StepContext] = []

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        current[:] = [clock.open((), names(args, kwargs), "advanced")]
        hook.open(current[0])
        context.is_open = True

    def end(module: nn.Module, args: Any, output: Any) -> None:
        context.is_open = False
        calls, _ = hook.take_calls(current[0])
        on_calls(calls, current[0])

    with ExitStack() as stack:
        for remove in hook.install(context):
            stack.callback(remove)
        hook.begin(context)
        stack.enter_context(model.register_forward_pre_hook(begin, with_kwargs=True))
        stack.enter_context(model.register_forward_hook(end))
        yield


# -- one call --------------------------------------------------------------------------------------


def _compare_call(
    ref: AttentionCall, step: StepContext, drawn_mask: Tensor | None
) -> _KernelComparison:
    heads, rows, keys = ref.query.shape[1], ref.query.shape[2], ref.key.shape[2]
    mask = capture_call_mask(ref, step)
    if drawn_mask is not None:
        mask.cells = _crop_mask(drawn_mask, mask, heads)
    call = (step.step, ref.layer, ref.path, (heads, rows, keys))
    one = _KernelComparison(*call, mask.q_offset, mask.kv_offset)
    one.skip_reason = _skip_reason(ref, mask)
    try:
        if not one.skip_reason:
            _compare_weights(one, ref, mask)
    except UsageError:
        raise
    except Exception as error:
        reason = f"the call could not be repeated: {summarize_error(error)}"
        one = _KernelComparison(*call, skip_reason=reason)
    return one


def _skip_reason(ref: AttentionCall, mask: CapturedMask) -> str:
    arguments = ref.kernel.arguments if ref.kernel is not None else ref.kwargs
    if arguments.get("dropout_p") or arguments.get("dropout"):
        return "the call has dropout"
    if ref.kernel is None and ref.function is None:
        return "the called function is unknown"
    if mask.cells is None:
        return "no executed mask is recorded for it"
    return ""


def _compare_weights(one: _KernelComparison, ref: AttentionCall, mask: CapturedMask) -> None:
    """Add up the cells that are open in one and closed in the other, or differ in their weight."""
    reference, is_exact = _ReferenceWeights(ref, mask), not ref.unknown_scores
    one.largest = 0.0 if is_exact else None
    for start, kernel in _kernel_weights(ref):
        drawn, is_open = reference.weights(start, start + kernel.shape[-1])
        visibility = ~is_open & (kernel != 0) & ~kernel.isnan()
        weight = torch.zeros_like(visibility)
        if is_exact:
            is_hidden = is_open & (kernel == 0) & (drawn > _MIN_DRAWN_WEIGHT)
            visibility |= is_hidden & ~reference.skipped
            weight = ((kernel - drawn).abs() > reference.tolerance(drawn)) | kernel.isnan()
            weight &= ~reference.skipped
        else:
            kernel = torch.where(is_open, drawn, kernel)
        kernel = torch.where(reference.skipped & is_open, drawn, kernel)
        if one.largest is not None:
            one.largest = max(one.largest, float((kernel - drawn).abs().nan_to_num().max()))
        one.n_wrong += int((visibility | weight).sum())
        one.n_visibility += int(visibility.sum())
        for wrong in (visibility, weight):
            if wrong.any():
                difference = _first_difference(wrong, start, kernel, drawn, is_open)
                one.first = min(one.first or difference, difference)


def _first_difference(
    wrong: Tensor, start: int, kernel: Tensor, drawn: Tensor, is_open: Tensor
) -> _CellDifference:
    """The first of some wrong cells; all tensors are (heads, rows, keys from `start` on)."""
    row, head, key = wrong.transpose(0, 1).nonzero()[0].tolist()
    cell = (head, row, key)
    used, opens = float(kernel[cell]), bool(is_open[cell])
    return _CellDifference(
        opens == (used != 0), row, head, start + key, used, float(drawn[cell]), opens
    )


def _kernel_weights(ref: AttentionCall) -> Iterator[tuple[int, Tensor]]:
    """Yield the first key of a chunk and the kernel's weights on its keys, (heads, rows, keys)."""
    width = ref.value.shape[-1]
    for start, n, value in identity_values(ref.value):
        output = ref.repeat(value)
        if tuple(output.shape[1:]) != (ref.query.shape[2], ref.query.shape[1], width):
            raise ValueError(f"its output is {tuple(output.shape)}")
        yield start, output[0, :, :, :n].float().transpose(0, 1)


class _ReferenceWeights:
    """The drawn weights: the softmax of the call's scores under a mask, in float32."""

    def __init__(self, ref: AttentionCall, mask: CapturedMask) -> None:
        cells = mask.cells
        assert cells is not None
        self._ref, self._cells = ref, cells
        heads, groups = ref.query.shape[1], ref.query.shape[1] // ref.key.shape[1]
        self._kv_heads = torch.arange(heads, device=ref.key.device) // groups
        bias = dense_bias(ref, mask)
        self._bias = bias if bias is None or bias.shape[0] in (1, heads) else bias[:1]
        each = (self._max_and_lse(slice(head, head + 1)) for head in range(heads))
        largest, self._lse = map(torch.cat, zip(*each, strict=True))
        eps = torch.finfo(ref.query.dtype).eps
        eps = max(eps, _TF32_EPS) if ref.query.is_cuda else eps
        self._atol = _KERNEL_NOISE_FACTOR * eps
        self._rtol = (_KERNEL_NOISE_FACTOR * eps * (1 + largest))[..., None]
        empty = ~cells.any(-1, keepdim=True)
        self.skipped = empty if mask.averaged is None else empty | mask.averaged[..., None]
        """Rows whose open cells are not compared, bool (1 or heads, rows, 1)."""

    def weights(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The weights and the open cells of some keys, both (heads, rows, keys)."""
        scores, is_open = self._scores(slice(None), slice(start, stop))
        weights = (scores - self._lse[..., None]).exp().masked_fill(~is_open, 0).nan_to_num()
        return weights, is_open

    def tolerance(self, drawn: Tensor) -> Tensor:
        """How far a kernel's weights may differ from these by rounding."""
        return self._atol + self._rtol * drawn

    def _max_and_lse(self, heads: slice) -> tuple[Tensor, Tensor]:
        """The largest score of each row and its log-sum-exp, both (heads, rows)."""
        scores, is_open = self._scores(heads, slice(None))
        top = scores.masked_fill(~is_open, 0).abs().amax(-1)
        return top, scores.masked_fill(~is_open, -torch.inf).logsumexp(-1)

    def _scores(self, heads: slice, keys: slice) -> tuple[Tensor, Tensor]:
        """The scores of batch row 0 and the open cells, both (heads, rows, keys)."""
        ref = self._ref
        query = ref.query[0, heads].float()
        key = ref.key[0, self._kv_heads[heads], keys].float()
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if ref.scale is None else ref.scale)
        if ref.softcap:
            scores = ref.softcap * torch.tanh(scores / ref.softcap)
        if self._bias is not None:
            scores = scores + (self._bias if len(self._bias) == 1 else self._bias[heads])[..., keys]
        cells = self._cells if len(self._cells) == 1 else self._cells[heads]
        return scores, cells[..., keys].expand_as(scores)


# -- the user's drawn mask -------------------------------------------------------------------------


def _parse_drawn_mask(drawn: Any, device: torch.device) -> Tensor:
    mask = torch.as_tensor(np.asarray(drawn) if not isinstance(drawn, Tensor) else drawn)
    if mask.dtype is not torch.bool or mask.dim() not in (2, 3):
        raise UsageError(
            "drawn= must be bool (rows, keys) or (heads, rows, keys), true where a row attends to "
            "a key."
        )
    return (mask[None] if mask.dim() == 2 else mask).to(device)


def _crop_mask(drawn_mask: Tensor, mask: CapturedMask, heads: int) -> Tensor:
    """The part of a mask of the whole sequence that belongs to a call."""
    rows = slice(mask.q_offset, mask.q_offset + mask.q_len)
    cells = drawn_mask[:, rows, mask.kv_offset : mask.kv_offset + mask.kv_len]
    if cells.shape[0] not in (1, heads) or cells.shape[1:] != (mask.q_len, mask.kv_len):
        raise UsageError(
            f"drawn= is {tuple(drawn_mask.shape)}, but the call has {plural(heads, 'head')} and "
            f"rows up to {mask.q_offset + mask.q_len} over {mask.kv_len} keys."
        )
    return cells


# -- report ----------------------------------------------------------------------------------------


def _kernel_findings(
    done: Sequence[_KernelComparison], context: RuleContext, n_layers: int
) -> Iterator[Finding]:
    """The findings of the comparisons, for a model of `n_layers` layers."""
    wrong = [one for one in done if one.n_wrong]
    compared = [one for one in done if not one.skip_reason]
    if wrong:
        yield _kernel_differs(wrong, context, n_layers)
    elif compared:
        yield _kernel_same(compared, n_layers)
    for reason in dict.fromkeys(one.skip_reason for one in done if one.skip_reason):
        layers = sorted({one.layer for one in done if one.skip_reason == reason})
        sentence = f"Not compared: {format_layers(layers, n_layers)}, because {reason}."
        yield proof_finding(proof_results.KERNEL_UNSEEN, sentence, layer=layers[0], layers=layers)
    n_seen = len({one.layer for one in done})
    if n_seen < n_layers:
        sentence = (
            f"Attention was seen in {n_seen} of {n_layers} layers; the others are not proven."
        )
        yield proof_finding(proof_results.KERNEL_UNSEEN, sentence)


def _kernel_differs(
    wrong: Sequence[_KernelComparison], context: RuleContext, n_layers: int
) -> Finding:
    one = wrong[0]
    cell = one.first
    assert cell is not None
    row, key = one.row_offset + cell.row, one.key_offset + cell.key
    drawn = format_amount(cell.drawn) if cell.is_open else "a closed cell"
    here = sorted({other.layer for other in wrong if other.step == one.step})
    later = len({other.step for other in wrong}) - 1
    sentence = (
        f"In layer {one.layer}, head {cell.head}, step {one.step}, the kernel ({one.path}) gave "
        f"{context.format_position(key)} {format_amount(cell.kernel)} of the weight of "
        f"{context.format_position(row)}, and {drawn} is drawn; {_differing_cells_text(one)}"
    )
    if len(here) > 1:
        sentence += f"; cells differ in {format_layers(here, n_layers)}"
    if later:
        sentence += f", also in {plural(later, 'more step')}"
    evidence = {
        "path": one.path,
        "row": row,
        "key": key,
        "kernel": cell.kernel,
        "drawn": cell.drawn,
        "open": cell.is_open,
        "cells": sum(other.n_wrong for other in wrong),
        "cells_open_in_one": sum(other.n_visibility for other in wrong),
        "largest_difference": one.largest,
    }
    return proof_finding(
        proof_results.KERNEL_DIFFERS,
        f"{sentence}.",
        step=one.step,
        layer=one.layer,
        head=cell.head,
        positions=(row, key),
        evidence=evidence,
        layers=here if len(here) > 1 else (),
    )


def _differing_cells_text(one: _KernelComparison) -> str:
    if one.n_visibility:
        cells, verb = plural(one.n_visibility, "cell"), is_or_are(one.n_visibility)
        return f"{cells} of that layer {verb} open in one and closed in the other"
    verb = "differs" if one.n_wrong == 1 else "differ"
    return f"{plural(one.n_wrong, 'weight')} of that layer {verb} by more than rounding"


def _kernel_same(compared: Sequence[_KernelComparison], n_layers: int) -> Finding:
    cells = sum(math.prod(one.shape) for one in compared)
    steps = len({one.step for one in compared})
    largest = max(one.largest or 0.0 for one in compared)
    where = format_layers(sorted({one.layer for one in compared}), n_layers)
    sentence = (
        f"The kernel's own weights are those that are drawn: {cells} cells of {where} in "
        f"{plural(steps, 'step')}, largest difference {format_amount(largest)}."
    )
    evidence = {"cells": cells, "largest_difference": largest}
    return proof_finding(proof_results.KERNEL_SAME, sentence, evidence=evidence)


def _kernel_lines(done: Sequence[_KernelComparison]) -> Iterator[str]:
    yield f"kernel check: {plural(len(done), 'attention call')} repeated with identity values"
    for step in dict.fromkeys(one.step for one in done):
        calls = [one for one in done if one.step == step and not one.skip_reason]
        if not calls:
            yield f"  step {step}: not compared"
            continue
        heads, rows, keys = calls[0].shape
        worst = max(calls, key=lambda one: one.largest or 0.0)
        paths = ", ".join(dict.fromkeys(one.path for one in calls))
        result = (
            "only closed cells compared, because a score_mod changes the scores"
            if worst.largest is None
            else f"largest difference {format_amount(worst.largest)} (layer {worst.layer})"
        )
        shape = f"{heads} x {rows} x {keys}"
        yield f"  step {step}: {plural(len(calls), 'layer')}, {paths}, {shape}: {result}"


def _comparison_facts(one: _KernelComparison) -> dict[str, Any]:
    """One comparison as numbers and strings, for JSON."""
    heads, rows, keys = one.shape
    return {
        "step": one.step,
        "layer": one.layer,
        "path": one.path,
        "heads": heads,
        "rows": rows,
        "keys": keys,
        "largest_difference": one.largest,
        "cells_that_differ": one.n_wrong,
        "not_compared": one.skip_reason or None,
    }
