"""Kernel truth: the weights that the kernel itself used, recovered by calling it again.

Attention is linear in its values, so the same call with columns of the identity in their place
gives the weights as its output, as many keys at a time as a head is wide. What is drawn is the
softmax of the same queries and keys under the mask that is recorded as executed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flexinspect.analysis.proof_results import (
    KERNEL_DIFFERS,
    KERNEL_SAME,
    KERNEL_UNSEEN,
    Proof,
    format_amount,
    proof_finding,
)
from flexinspect.core.errors import UsageError
from flexinspect.core.text import format_layers, plural
from flexinspect.records.finding import Finding
from flexinspect.rules.context import RuleContext
from flexinspect_hooks.capture.hook import CaptureContext
from flexinspect_hooks.capture.model_layers import attention_layers
from flexinspect_hooks.capture.step_clock import StepClock, StepContext
from flexinspect_hooks.observers.attention.attention_hook import AttentionHook
from flexinspect_hooks.observers.attention.call_references import AttentionCall
from flexinspect_hooks.observers.attention.mask_capture import (
    CapturedMask,
    capture_call_mask,
    dense_bias,
)
from flexinspect_hooks.observers.input_rows import ArgumentNames
from flexinspect_hooks.proofs.proof_subject import (
    OnProgress,
    RunIds,
    Subject,
    device_of,
    subject_of,
)
from flexinspect_hooks.user_code.declared_prompt import SegmentArgument

_MIN_DRAWN_WEIGHT = 1e-6
"""A kernel that gives an open cell nothing at all hides it, when more than this is drawn."""
_KERNEL_NOISE_FACTOR = 4
_TF32_EPS = 1e-3
"""Rounding of float32 products on CUDA, where they may be made with fewer bits."""


_CallLocation = tuple[int, int, str, tuple[int, int, int]]
"""Step, layer, path, and (heads, rows, keys) of a call."""


def prove_kernel(
    model: nn.Module,
    ids: Tensor | Sequence[int] | str,
    *,
    segments: Iterable[SegmentArgument] | None = None,
    tokenizer: Any = None,
    run: RunIds | None = None,
    attention_mask: Any = None,
    position_ids: Any = None,
    drawn: Any = None,
    steps: int = 3,
    report: OnProgress | None = None,
) -> Proof:
    """Compare the weights that each kernel call used with those that are drawn, cell by cell.

    `ids`, `segments`, `tokenizer`, `run`, `attention_mask` and `position_ids` as for isolation;
    segments only give the words. The first `steps` forwards of the run are compared. `drawn` is a
    mask to compare with in place of the executed one that is recorded: bool (rows, keys) or
    (heads, rows, keys) over the whole sequence. Of a batch, row 0 is compared.

    Raises `UsageError` when no attention call was seen, or `drawn` does not fit.
    """
    subject = subject_of(
        *(model, ids),
        run=run,
        segments=segments,
        tokenizer=tokenizer,
        attention_mask=attention_mask,
        position_ids=position_ids,
    )
    return check_kernel(subject, drawn=drawn, steps=steps, report=report)


def check_kernel(
    subject: Subject, *, drawn: Any = None, steps: int = 3, report: OnProgress | None = None
) -> Proof:
    """Compare the kernel calls of a subject's run."""
    say = report or (lambda text, fraction: None)
    own = None if drawn is None else _parse_drawn_mask(drawn, device_of(subject.model))
    done: list[KernelComparison] = []

    def compare(calls: Sequence[AttentionCall], step: StepContext) -> None:
        if step.step >= steps:
            return
        for number, ref in enumerate(calls):
            say(
                f"step {step.step}: calling the kernel of layer {ref.layer} again",
                number / len(calls),
            )
            done.append(_compare_call(ref, step, own))

    with _observe_calls(subject.model, compare):
        subject.forward()
    if not done:
        raise UsageError(
            "No attention call was seen in this run.",
            hint="Its layers call no kernel that is watched, or the model is compiled as a whole.",
        )
    n_layers = len({*attention_layers(subject.model).values()} or {one.layer for one in done})
    lines, findings = report_comparisons(done, subject.scene, n_layers)
    return Proof("kernel", lines, findings, {"calls": [comparison_facts(one) for one in done]})


# -- the calls -------------------------------------------------------------------------------------


@contextmanager
def _observe_calls(
    model: nn.Module, on_calls: Callable[[Sequence[AttentionCall], StepContext], None]
) -> Iterator[None]:
    """Hand over the attention calls of each forward as it ends."""
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

    removes = list(hook.install(context))
    hook.begin(context)
    removes.append(model.register_forward_pre_hook(begin, with_kwargs=True).remove)
    removes.append(model.register_forward_hook(end).remove)
    try:
        yield
    finally:
        for remove in reversed(removes):
            remove()


# -- one call --------------------------------------------------------------------------------------


def _compare_call(ref: AttentionCall, step: StepContext, own: Tensor | None) -> KernelComparison:
    heads, rows, keys = ref.query.shape[1], ref.query.shape[2], ref.key.shape[2]
    place: _CallLocation = (step.step, ref.layer, ref.path, (heads, rows, keys))
    mask = capture_call_mask(ref, step)
    if own is not None:
        mask.cells = _crop_mask(own, mask, heads)
    why_not = _skip_reason(ref, mask)
    if why_not:
        return KernelComparison(*place, skip_reason=why_not)
    try:
        return _compare_weights(ref, mask, place, exact=not ref.unknown_scores)
    except UsageError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return KernelComparison(
            *place, skip_reason=f"the call could not be made again: {type(error).__name__}: {first}"
        )


def _skip_reason(ref: AttentionCall, mask: CapturedMask) -> str:
    given = ref.kernel.arguments if ref.kernel is not None else ref.kwargs
    if given.get("dropout_p") or given.get("dropout"):
        return "the call has dropout"
    if ref.kernel is None and ref.function is None:
        return "what was called is not known"
    if mask.cells is None:
        return "no executed mask is recorded for it"
    return ""


@dataclass(slots=True)
class _WeightDifferences:
    """What was found so far, one chunk of keys after the other."""

    largest: float = 0.0
    n_wrong: int = 0
    n_visibility: int = 0
    first: KernelCellDifference | None = None

    def add(
        self, at: int, got: Tensor, want: Tensor, is_open: Tensor, hidden: Tensor, far: Tensor
    ) -> None:
        """Take the keys from `at` on; all are (heads, rows, keys).

        `hidden` are cells that are open in one and closed in the other, `far` have weights that
        are not the same.
        """
        self.largest = max(self.largest, float((got - want).abs().nan_to_num().max()))
        self.n_wrong += int((hidden | far).sum())
        self.n_visibility += int(hidden.sum())
        for wrong in (hidden, far):
            if bool(wrong.any()):
                self._record_first(at, got, want, is_open, wrong)

    def _record_first(
        self, at: int, got: Tensor, want: Tensor, is_open: Tensor, wrong: Tensor
    ) -> None:
        """Remember the first wrong cell."""
        row, head, key = (int(n) for n in wrong.transpose(0, 1).nonzero()[0])
        cell = (head, row, key)
        known = (float(got[cell]), float(want[cell]), bool(is_open[cell]))
        one = KernelCellDifference(head, row, at + key, *known)
        if self.first is None or one.rank < self.first.rank:
            self.first = one


def _compare_weights(
    ref: AttentionCall, mask: CapturedMask, place: _CallLocation, *, exact: bool
) -> KernelComparison:
    drawn, tally = _ReferenceWeights(ref, mask), _WeightDifferences()
    for start, got in _kernel_weights(ref):
        want, is_open = drawn.weights(start, start + got.shape[-1])
        hidden = ~is_open & (got != 0) & ~got.isnan()
        far = torch.zeros_like(hidden)
        if exact:
            hidden |= is_open & (got == 0) & (want > _MIN_DRAWN_WEIGHT) & ~drawn.skipped
            far = ((got - want).abs() > drawn.tolerance(want)) | got.isnan()
            far &= ~drawn.skipped
        else:
            got = torch.where(is_open, want, got)
        got = torch.where(drawn.skipped & is_open, want, got)
        tally.add(start, got, want, is_open, hidden, far)
    largest = tally.largest if exact else None
    return KernelComparison(
        *place,
        row_offset=mask.q_offset,
        key_offset=mask.kv_offset,
        largest=largest,
        n_wrong=tally.n_wrong,
        n_visibility=tally.n_visibility,
        first=tally.first,
    )


def _kernel_weights(ref: AttentionCall) -> Iterator[tuple[int, Tensor]]:
    """Yield a first key and the kernel's weights on the keys from there, (heads, rows, keys)."""
    width, n_keys = ref.value.shape[-1], ref.key.shape[2]
    for start in range(0, n_keys, width):
        n = min(width, n_keys - start)
        value = torch.zeros_like(ref.value)
        columns = torch.arange(n, device=value.device)
        value[:, :, start + columns, columns] = 1
        output = ref.repeat(value)
        if tuple(output.shape[1:]) != (ref.query.shape[2], ref.query.shape[1], width):
            raise ValueError(f"its output is {tuple(output.shape)}")
        yield start, output[0, :, :, :n].float().transpose(0, 1)


class _ReferenceWeights:
    """The weights that are drawn: softmax of the call's scores under a mask, in float32."""

    def __init__(self, ref: AttentionCall, mask: CapturedMask) -> None:
        cells = mask.cells
        assert cells is not None
        self._ref, self._cells = ref, cells
        heads = ref.query.shape[1]
        self._bias = dense_bias(ref, mask)
        if self._bias is not None and self._bias.shape[0] not in (1, heads):
            self._bias = self._bias[:1]
        averaged = mask.averaged
        top, lse = zip(*(self._max_and_lse(head) for head in range(heads)), strict=True)
        self._lse, largest = torch.stack(lse), torch.stack(top)
        eps = torch.finfo(ref.query.dtype).eps
        eps = max(eps, _TF32_EPS) if ref.query.is_cuda else eps
        self._atol = _KERNEL_NOISE_FACTOR * eps
        self._rtol = (_KERNEL_NOISE_FACTOR * eps * (1 + largest))[..., None]
        empty = ~cells.any(-1, keepdim=True)
        self.skipped = empty if averaged is None else empty | averaged[..., None]
        """Rows of which only closed cells are compared, bool (1 or heads, rows, 1)."""

    def weights(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return weights and open cells of some keys, (heads, rows, keys) each."""
        heads = range(self._ref.query.shape[1])
        scores = torch.stack([self._scores(head, start, stop) for head in heads])
        is_open = self._cells[..., start:stop].expand_as(scores)
        weights = (scores - self._lse[..., None]).exp().masked_fill(~is_open, 0).nan_to_num()
        return weights, is_open

    def tolerance(self, want: Tensor) -> Tensor:
        """Return how far a kernel's weights may be from these by rounding."""
        return self._atol + self._rtol * want

    def _max_and_lse(self, head: int) -> tuple[Tensor, Tensor]:
        """Return the largest score of each row and its log-sum-exp, (rows,) each."""
        scores = self._scores(head, 0, self._ref.key.shape[2])
        is_open = self._cells[head if len(self._cells) > 1 else 0]
        top = scores.masked_fill(~is_open, 0).abs().amax(-1)
        return top, scores.masked_fill(~is_open, -torch.inf).logsumexp(-1)

    def _scores(self, head: int, start: int, stop: int) -> Tensor:
        """Return the scores of one head with some keys, (rows, keys), batch 0."""
        ref = self._ref
        shared = ref.query.shape[1] // ref.key.shape[1]
        query, key = ref.query[0, head].float(), ref.key[0, head // shared, start:stop].float()
        scale = ref.scale if ref.scale is not None else query.shape[-1] ** -0.5
        scores = query @ key.mT * scale
        if ref.softcap:
            scores = ref.softcap * torch.tanh(scores / ref.softcap)
        if self._bias is not None:
            scores = scores + self._bias[head if len(self._bias) > 1 else 0, :, start:stop]
        return scores


# -- a mask of the user's own ----------------------------------------------------------------------


def _parse_drawn_mask(drawn: Any, device: torch.device) -> Tensor:
    mask = torch.as_tensor(np.asarray(drawn) if not isinstance(drawn, Tensor) else drawn)
    if mask.dtype is not torch.bool or mask.dim() not in (2, 3):
        raise UsageError(
            "drawn= must be bool (rows, keys) or (heads, rows, keys), true where a row sees a key."
        )
    return (mask[None] if mask.dim() == 2 else mask).to(device)


def _crop_mask(own: Tensor, mask: CapturedMask, heads: int) -> Tensor:
    """Return the part of a mask of the whole sequence that a call is about."""
    rows = slice(mask.q_offset, mask.q_offset + mask.q_len)
    cells = own[:, rows, mask.kv_offset : mask.kv_offset + mask.kv_len]
    if cells.shape[0] not in (1, heads) or cells.shape[1:] != (mask.q_len, mask.kv_len):
        raise UsageError(
            f"drawn= is {tuple(own.shape)}, and the call has {plural(heads, 'head')} and rows up "
            f"to {mask.q_offset + mask.q_len} over {mask.kv_len} keys."
        )
    return cells


@dataclass(frozen=True, slots=True)
class KernelCellDifference:
    """One cell where the kernel and the picture differ."""

    head: int
    row: int
    key: int
    kernel: float
    drawn: float
    is_open: bool

    @property
    def rank(self) -> tuple[bool, int, int, int]:
        """Which of two cells is told of: one that is open or closed wrongly, else the first."""
        is_hidden = self.is_open != (self.kernel != 0)
        return not is_hidden, self.row, self.head, self.key


@dataclass(frozen=True, slots=True)
class KernelComparison:
    """One attention call compared. `why_not` tells why it was not, then the rest is empty.

    `row_of` and `key_of` are the positions of row 0 and key 0. `largest` is the largest difference
    of a weight, None where only closed cells could be compared. `n_wrong` counts the cells that
    differ, `n_hidden` those of them that are closed in one and open in the other.
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
    first: KernelCellDifference | None = None
    skip_reason: str = ""


# -- in words --------------------------------------------------------------------------------------


def report_comparisons(
    done: Sequence[KernelComparison], scene: RuleContext, n_layers: int
) -> tuple[tuple[str, ...], tuple[Finding, ...]]:
    """Return the lines and the findings of a comparison, of a model of so many layers."""
    findings: list[Finding] = []
    wrong = [one for one in done if one.n_wrong]
    skipped = [one for one in done if one.skip_reason]
    if wrong:
        findings.append(_kernel_differs(wrong, scene, n_layers))
    elif len(skipped) < len(done):
        findings.append(_kernel_same(done, n_layers))
    findings += _skipped_findings(done, skipped, n_layers)
    return tuple(_kernel_lines(done)), tuple(findings)


def _kernel_differs(
    wrong: Sequence[KernelComparison], scene: RuleContext, n_layers: int
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
        f"{scene.format_position(key)} {format_amount(cell.kernel)} of the weight of {scene.format_position(row)}, and "
        f"{drawn} is drawn; {_differing_cells_text(one)}"
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
        KERNEL_DIFFERS,
        f"{sentence}.",
        step=one.step,
        layer=one.layer,
        head=cell.head,
        positions=(row, key),
        evidence=evidence,
        layers=here if len(here) > 1 else (),
    )


def _differing_cells_text(one: KernelComparison) -> str:
    if one.n_visibility:
        cells = plural(one.n_visibility, "cell")
        return f"{cells} of that layer {_are(one.n_visibility)} open in one and closed in the other"
    weights = plural(one.n_wrong, "weight")
    differ = "differs" if one.n_wrong == 1 else "differ"
    return f"{weights} of that layer {differ} by more than rounding"


def _are(n: int) -> str:
    return "is" if n == 1 else "are"


def _kernel_same(done: Sequence[KernelComparison], n_layers: int) -> Finding:
    compared = [one for one in done if not one.skip_reason]
    cells = sum(one.shape[0] * one.shape[1] * one.shape[2] for one in compared)
    steps = len({one.step for one in compared})
    largest = max((one.largest or 0.0 for one in compared), default=0.0)
    where = format_layers(sorted({one.layer for one in compared}), n_layers)
    sentence = (
        f"The kernel's own weights are those that are drawn: {cells} cells of {where} in "
        f"{plural(steps, 'step')}, largest difference {format_amount(largest)}."
    )
    return proof_finding(
        KERNEL_SAME, sentence, evidence={"cells": cells, "largest_difference": largest}
    )


def _skipped_findings(
    done: Sequence[KernelComparison], skipped: Sequence[KernelComparison], n_layers: int
) -> Iterator[Finding]:
    for why_not in dict.fromkeys(one.skip_reason for one in skipped):
        which = sorted({one.layer for one in skipped if one.skip_reason == why_not})
        sentence = f"Not compared: {format_layers(which, n_layers)}, as {why_not}."
        yield proof_finding(KERNEL_UNSEEN, sentence, layer=which[0], layers=which)
    n_seen = len({one.layer for one in done})
    if n_seen < n_layers:
        sentence = (
            f"Attention was seen in {n_seen} of {n_layers} layers; of the others nothing is proven."
        )
        yield proof_finding(KERNEL_UNSEEN, sentence)


def _kernel_lines(done: Sequence[KernelComparison]) -> Iterator[str]:
    yield f"kernel truth: {plural(len(done), 'attention call')} made again with identity values"
    for step in dict.fromkeys(one.step for one in done):
        calls = [one for one in done if one.step == step and not one.skip_reason]
        if not calls:
            yield f"  step {step}: not compared"
            continue
        heads, rows, keys = calls[0].shape
        worst = max(calls, key=lambda one: one.largest or 0.0)
        paths = ", ".join(dict.fromkeys(one.path for one in calls))
        said = (
            "only closed cells compared, as scores are changed by a score_mod"
            if worst.largest is None
            else f"largest difference {format_amount(worst.largest)} (layer {worst.layer})"
        )
        shape = f"{heads} x {rows} x {keys}"
        yield f"  step {step}: {plural(len(calls), 'layer')}, {paths}, {shape}: {said}"


def comparison_facts(one: KernelComparison) -> dict[str, Any]:
    """Return one comparison as numbers and strings."""
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
