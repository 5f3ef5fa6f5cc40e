"""Names the class of a kernel's fault: the variation of the oracle that gives the same numbers.

A hypothesis counts if the oracle with that fault reproduces the kernel's output: the difference
that remains is within the tolerance, and at most a quarter of the difference to the right oracle.
The residual is reported as the proof. Nothing is claimed for a kernel within tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import permutations

import torch
from msgspec.structs import replace
from torch import Tensor

from flexinspect.analysis.kernel_report import KernelDiagnosis, KernelEvaluation
from flexinspect.core.text import format_numbers, plural
from flexinspect_hooks.kernels.calling import ContractError, Kernel, KernelResult, call_kernel
from flexinspect_hooks.kernels.key_use import MIN_WEIGHT, measure_key_use
from flexinspect_hooks.kernels.lse_diagnosis import (
    EXPLAINED_SHARE,
    SIZE_RANGE,
    lse_diagnosis,
)
from flexinspect_hooks.kernels.oracle import (
    Variation,
    attend,
    low_precision_sums,
    scores_of,
    weights_of,
)
from flexinspect_hooks.kernels.problem import Problem
from flexinspect_hooks.kernels.reference import Reference, largest, mean, nan_as_inf
from flexinspect_hooks.kernels.wrong_formulas import FormulaFault, formula_faults
from flexinspect_hooks.kernels.wrong_inputs import InputFault, input_faults
from flexinspect_hooks.kernels.wrong_masks import MaskFault, mask_faults

_MAX_BIAS = 0.5
_SEEDED_RUNS = 4
_MIN_SHARE, _MOST, _ROUNDINGS = 0.01, 0.99, 3.0
"""99 % of the weights above 1 % of the largest are right up to 3 units of rounding."""
_FIT_STEPS = 4


def diagnose(
    one: KernelEvaluation, kernel: Kernel, bar: Reference, runs: Sequence[KernelResult]
) -> Iterator[KernelDiagnosis]:
    """Yield what explains a kernel's differences, the surest first; nothing for a right one."""
    assert one.error is not None
    for fault in one.faults:
        kinds = {"The output": "output-dtype", "The LSE": "lse-shape"}
        kind = next((kinds[start] for start in kinds if fault.startswith(start)), "inputs-changed")
        yield KernelDiagnosis(kind, fault)
    if one.empty_rows and "FlexAttention gives 0" in one.empty_rows:
        yield KernelDiagnosis(
            "empty-rows", f"In {plural(one.n_empty_rows, 'empty row')}, {one.empty_rows}."
        )
    if not one.bit_equal:
        yield _nondeterminism(one, kernel, bar)
    if one.run_difference > bar.tolerance.max_abs:
        return  # no single run tells what else is wrong
    if not bar.is_within(one.error) or one.n_wrong_reads or has_wrong_keys(one):
        yield _Search(one, kernel, bar, runs[0]).explanation()
    elif one.lse is not None and not one.lse.is_within:
        yield lse_diagnosis(one, kernel, bar, runs[0])
    for gradient in one.gradients:
        if not gradient.is_within and bar.is_within(one.error):
            numbers = f"its error is {gradient.max_abs:.2g}, above {gradient.tolerance:.2g}"
            yield KernelDiagnosis(
                "gradient", f"The output is right and {gradient.name} is not: {numbers}."
            )


def _nondeterminism(one: KernelEvaluation, kernel: Kernel, bar: Reference) -> KernelDiagnosis:
    difference, allowed = one.run_difference, bar.tolerance.max_abs
    if difference <= allowed:
        text = (
            f"{one.n_runs} runs on the same inputs differ by up to {difference:.2g}, within the "
            "tolerance: the order of the additions varies (atomic additions, or a split by load)."
        )
        return KernelDiagnosis("random-order", text)
    text = (
        f"{one.n_runs} runs on the same inputs differ by up to {difference:.2g}, above the "
        f"tolerance of {allowed:.2g}"
    )
    if _draws_random_numbers(kernel, bar.problem):
        text += ", and are bit-equal from the same state of torch's random generator: it draws "
        return KernelDiagnosis("random-numbers", f"{text}random numbers, as dropout does.")
    text += ": reads and writes race, or it keeps a state between calls."
    return KernelDiagnosis("race", text)


def _draws_random_numbers(kernel: Kernel, problem: Problem) -> bool:
    """Whether runs that differ become equal from the same state of the random generator."""
    outs = []
    try:
        with torch.random.fork_rng():
            for _ in range(_SEEDED_RUNS):
                torch.manual_seed(0)
                outs.append(call_kernel(kernel, problem).out)
    except ContractError:
        return False
    return all(torch.equal(out, outs[0]) for out in outs)


def has_wrong_keys(one: KernelEvaluation) -> bool:
    """Whether the identity-V probe showed other keys than those of the mask."""
    use = one.key_use
    return use is not None and bool(use.n_opened or use.n_closed)


class _Search:
    """The search for the variation that explains one output."""

    def __init__(
        self, one: KernelEvaluation, kernel: Kernel, bar: Reference, run: KernelResult
    ) -> None:
        self._one, self._kernel, self._bar, self._problem = one, kernel, bar, bar.problem
        self._out = run.out.double()
        self._right = Variation.of(bar.problem)
        assert one.error is not None
        self._error = math.inf if one.error.n_nan + one.error.n_inf else one.error.max_abs

    def explanation(self) -> KernelDiagnosis:
        """Return the best explanation: of the keys, the scores, the heads, or the additions."""
        use = self._one.key_use
        wrong_keys = has_wrong_keys(self._one)
        found = [*self._mask_diagnoses()] if wrong_keys or use is None or use.skipped else []
        if not found:
            found = [*self._score_diagnoses(), *self._head_diagnoses(), *self._input_diagnoses()]
        if not found:
            found = [*self._formula_diagnoses()] or [*self._fitted_diagnoses()]
        if not found and not wrong_keys:
            found = [*self._accumulation_diagnoses()]
        if not found and wrong_keys:
            found = [self._other_keys()]
        if not found:
            return self._unexplained()
        return min(found, key=lambda each: math.inf if each.residual is None else each.residual)

    def _residual(self, variation: Variation) -> float:
        """The largest difference to a variation, in rows that have an open key in both."""
        rows = variation.cells.any(-1) & self._bar.rows
        out = attend(self._problem, variation).out
        return self._distance(out, rows.expand(self._out.shape[:3]))

    def _distance(self, out: Tensor, rows: Tensor) -> float:
        if not bool(rows.any()):
            return math.inf
        return float(nan_as_inf((out - self._out)[rows].abs()).max())

    def _explains(
        self, residual: float, variation: Variation, problem: Problem | None = None
    ) -> bool:
        """Whether so little remains that the variation must be what the kernel computes."""
        limit = partial(self._bar.tolerance_of, variation, problem or self._problem)
        return self._is_small(residual, limit)

    def _is_small(self, residual: float, limit: Callable[[], float]) -> bool:
        assert self._one.error is not None
        is_visible = not self._bar.is_within(self._one.error)  # else any variation would fit
        return is_visible and residual <= EXPLAINED_SHARE * self._error and residual <= limit()

    # -- which keys --------------------------------------------------------------------------------

    def _mask_diagnoses(self) -> Iterator[KernelDiagnosis]:
        faults = mask_faults(self._problem)
        used = self._used_keys()
        for fault in faults:
            if used is not None and not self._fits(fault, used):
                continue
            variation = replace(self._right, cells=fault.cells)
            residual = self._residual(variation)
            # A fault that the tolerance hides is known by its keys.
            hidden = used is not None and residual <= self._error <= self._bar.tolerance.max_abs
            if hidden or self._explains(residual, variation):
                yield KernelDiagnosis(fault.kind, fault.sentence, residual, self._error)
                return  # the faults are in the order from the simplest on

    def _used_keys(self) -> Tensor | None:
        """The kernel's own weights, None if they cannot be recovered."""
        try:
            return measure_key_use(self._kernel, self._problem)[1]
        except ContractError:
            return None

    def _fits(self, fault: MaskFault, used: Tensor) -> bool:
        """Whether the keys with weight are those of a wrong mask, except for tiny weights."""
        cells = fault.cells.expand(used.shape)
        rows = cells.any(-1, keepdim=True) & self._bar.rows[..., None]
        if bool((rows & (used != 0) & ~used.isnan() & ~cells).any()):
            return False
        scores = scores_of(self._problem, self._right).masked_fill(~cells, -torch.inf)
        relative = (scores - scores.amax(-1, keepdim=True)).exp()
        return not bool((rows & cells & (used == 0) & (relative > 100 * MIN_WEIGHT)).any())

    def _other_keys(self) -> KernelDiagnosis:
        use, used = self._one.key_use, self._used_keys()
        assert use is not None
        text = f"The kernel used other keys than the mask's: {use.first}."
        if used is not None:
            variation = replace(self._right, cells=used != 0)
            residual = self._residual(variation)
            if self._explains(residual, variation):
                return KernelDiagnosis("other-keys", text, residual, self._error)
        if self._error <= self._bar.tolerance.max_abs:
            return KernelDiagnosis("other-keys", f"{text} These inputs hide it in the output.")
        text += " With these keys the oracle gives other numbers: scores or values are wrong too."
        return KernelDiagnosis("other-keys", text)

    # -- scores, heads, inputs ---------------------------------------------------------------------

    def _input_diagnoses(self) -> Iterator[KernelDiagnosis]:
        for fault in input_faults(self._problem, self._kernel.layout):
            problem = self._problem.with_inputs(fault.qkv)
            residual = self._input_residual(fault, problem)
            if self._explains(residual, self._right, problem):
                yield KernelDiagnosis(fault.kind, fault.sentence, residual, self._error)

    def _input_residual(self, fault: InputFault, problem: Problem) -> float:
        """The largest difference to the output for wrong inputs, whatever unknown memory holds."""
        out = attend(problem, self._right).out
        change, rows = self._out - out, self._bar.rows
        if fault.beyond is not None:
            batch, head, row, _ = fault.beyond.nonzero()[0].tolist()
            if fault.name == "q":
                rows = rows.clone()
                rows[batch, head, row] = False
            else:
                group = self._problem.config.q_heads // self._problem.config.kv_heads
                place = batch, slice(head * group, (head + 1) * group)
                fit = _without_key if fault.name == "k" else _without_value
                weights = weights_of(problem, self._right)[place][..., row]
                toward = problem.v[batch, head, row].double() - out[place]
                columns = fault.beyond[batch, head, row]
                change[place] = fit(change[place], weights, toward, columns)
        return float(nan_as_inf(change[rows].abs()).max()) if bool(rows.any()) else math.inf

    def _formula_diagnoses(self) -> Iterator[KernelDiagnosis]:
        for fault in formula_faults(self._problem):
            residual = self._distance(fault.out, self._bar.rows)
            if self._is_small(residual, partial(self._rounding_of, fault)):
                yield KernelDiagnosis(fault.kind, fault.sentence, residual, self._error)

    def _score_diagnoses(self) -> Iterator[KernelDiagnosis]:
        for kind, sentence, variation in self._score_variations():
            residual = self._residual(variation)
            if self._explains(residual, variation):
                yield KernelDiagnosis(kind, sentence, residual, self._error)

    def _score_variations(self) -> Iterator[tuple[str, str, Variation]]:
        right, config = self._right, self._problem.config
        if right.softcap is not None:
            text = f"The softcap of {right.softcap:g} is ignored."
            yield "softcap-ignored", text, replace(right, softcap=None)
        if right.score_mod is not None:
            text = f"The score_mod {config.score_mod} is ignored."
            yield "score-mod-ignored", text, replace(right, score_mod=None)
        if right.softcap is not None and right.score_mod is not None:
            text = f"The softcap of {right.softcap:g} and the score_mod {config.score_mod} are "
            without = replace(right, softcap=None, score_mod=None)
            yield "score-mod-ignored", f"{text}ignored.", without
        yield from self._score_orders()
        scale, default = right.scale, float(config.head_dim**-0.5)
        scales = (
            (1.0, "no scale is applied"),
            (default, f"it is the default {default:g}, not that of the call"),
            (scale * scale, "it is applied twice"),
            (scale * math.log(2), "exp2 is used for exp"),
            (scale / math.log(2), "exp is used for exp2"),
            (1 / config.head_dim, "it is 1 / head size"),
            (1 / default, "the scores are multiplied by the root of the head size, not divided"),
            (-scale, "its sign is wrong"),
        )
        reasons: dict[float, list[str]] = {}  # numbers that are equal have several reasons
        for other, reason in scales:
            reasons.setdefault(float(f"{other:.6g}"), []).append(reason)
        for other, why in reasons.items():
            if not math.isclose(other, scale, rel_tol=1e-3):
                kind = "scale-missing" if other == 1.0 else "scale"
                text = f"The scale is {other:g} instead of {scale:g}: {', or '.join(why)}."
                yield kind, text, replace(right, scale=other)

    def _score_orders(self) -> Iterator[tuple[str, str, Variation]]:
        right = self._right
        absent = {"softcap": right.softcap is None, "score_mod": right.score_mod is None}
        present = tuple(change for change in right.order if not absent.get(change))
        for order in permutations(present):
            if order != present:
                must = ", ".join(present)
                text = f"The scores are changed in the order {', '.join(order)}; it must be {must}."
                yield "score-order", text, replace(right, order=order)

    def _head_diagnoses(self) -> Iterator[KernelDiagnosis]:
        """Query heads that use another key head, each found by itself."""
        config, limit = self._problem.config, self._bar.tolerance.max_abs
        wrong = [head for head, error in enumerate(self._one.heads) if not error <= limit]
        if config.kv_heads == 1 or not wrong:
            return
        heads = list(self._right.kv_head)
        for other in range(config.kv_heads):
            varied = replace(self._right, kv_head=tuple(other for _ in heads))
            difference = (attend(self._problem, varied).out - self._out).abs()
            per_head = difference.masked_fill(~self._bar.rows[..., None], 0).amax((0, 2, 3))
            for head in wrong:
                if float(per_head[head]) <= limit:
                    heads[head] = other
        variation = replace(self._right, kv_head=tuple(heads))
        residual = self._residual(variation)
        if not self._explains(residual, variation):
            return
        repeated = tuple(head % config.kv_heads for head in range(config.q_heads))
        pairs = ", ".join(f"{head} uses {heads[head]}" for head in wrong[:8])
        text = f"Of the query heads, {pairs} as key head, not {self._right.kv_head[wrong[0]]}."
        if variation.kv_head == repeated and len(wrong) > 1:
            text = "Key heads are repeated as 0, 1, ..., 0, 1, ...; neighbours must share one."
        yield KernelDiagnosis("key-head", text, residual, self._error)

    def _has_the_weights(self, eps: float) -> bool:
        """Whether the weights of a row are right up to a factor and a few roundings."""
        used = self._used_keys()
        if used is None:
            return True
        truth = weights_of(self._problem, self._right)
        least = truth.amax(-1, keepdim=True) * _MIN_SHARE
        told = (truth > least.clamp_min(MIN_WEIGHT)) & (used > 0) & self._bar.rows[..., None]
        logs = (used.clamp_min(1e-300) / truth.clamp_min(1e-300)).log()
        logs = logs.masked_fill(~told, torch.nan)
        spread = (logs - logs.nanmedian(-1, keepdim=True).values).abs()[told]
        if not spread.numel():
            return True
        rank = max(math.ceil(_MOST * spread.numel()), 1)
        most = float(spread.flatten().kthvalue(rank).values)
        return most < _ROUNDINGS * max(eps, torch.finfo(self._problem.dtype).eps)

    def _fitted_diagnoses(self) -> Iterator[KernelDiagnosis]:
        """Faults with a number that is not known: a factor of the output, of a row, the scale."""
        scaled = self._missing_rows() or self._scaled_output() or self._scaled_rows()
        if scaled is not None:
            yield scaled
            return
        variation = self._fitted_scale()
        residual = self._residual(variation) if variation is not None else math.inf
        if variation is not None and self._explains(residual, variation):
            text = f"The scale is {variation.scale:.6g} instead of {self._right.scale:g}."
            yield KernelDiagnosis("scale", text, residual, self._error)

    def _fitted_scale(self) -> Variation | None:
        """The scale that fits best, by Gauss-Newton steps from the right one."""
        rows, scale = self._bar.rows, self._right.scale
        for _ in range(_FIT_STEPS):
            step = 1e-6 * scale
            here, there = (
                attend(self._problem, replace(self._right, scale=each)).out[rows]
                for each in (scale, scale + step)
            )
            slope = (there - here) / step
            size = float(slope.square().sum())
            moved = float((slope * (self._out[rows] - here)).sum()) / size if size else math.nan
            scale += moved
            if not math.isfinite(scale) or not scale > 0:
                return None
        return replace(self._right, scale=scale)

    def _missing_rows(self) -> KernelDiagnosis | None:
        """Rows that are 0, and right ones besides."""
        rows = self._bar.rows & ~(self._out == 0).all(-1)
        missing = self._bar.rows & ~rows
        residual = self._distance(self._bar.oracle.out, rows)
        if not bool(missing.any()) or residual > self._bar.tolerance.max_abs:
            return None
        numbers = missing.any(0).any(0).nonzero().flatten().tolist()
        heads = missing.any(0).any(-1).nonzero().flatten().tolist()
        where = f"{format_numbers('row', numbers)} of {format_numbers('head', heads)}"
        text = f"The output is 0 in {where}: it is not computed there."
        return KernelDiagnosis("rows-missing", text, residual, self._error)

    def _scaled_rows(self) -> KernelDiagnosis | None:
        """Each row of the right output times a number of its own: a wrong sum of its weights."""
        truth, rows = self._bar.oracle.out, self._bar.rows
        size = truth.square().sum(-1, keepdim=True).clamp_min(1e-300)
        factors = (truth * self._out).sum(-1, keepdim=True) / size
        residual = self._distance(truth * factors, rows)
        if not self._is_small(residual, partial(self._bar.tolerance_at, truth * factors)):
            return None
        low, high = (float(each) for each in factors[rows].aminmax())
        text = f"Each row is the right one times a number of its own, {low:.4g} to {high:.4g}: the "
        text += "sum of its weights is wrong."
        return KernelDiagnosis("weight-sum", text, residual, self._error)

    def _scaled_output(self) -> KernelDiagnosis | None:
        """The right output times a number, fitted by least squares."""
        truth, rows = self._bar.oracle.out, self._bar.rows
        right, got = truth[rows], self._out[rows]
        factor = float((right * got).sum() / right.square().sum().clamp_min(1e-300))
        if not math.isfinite(factor):
            return None
        residual = self._distance(truth * factor, rows)
        if not self._is_small(residual, partial(self._bar.tolerance_at, truth * factor)):
            return None
        text = f"The output is the right one times {factor:.9g}."
        return KernelDiagnosis("output-scaled", text, residual, self._error)

    def _rounding_of(self, fault: FormulaFault) -> float:
        """The largest error that a kernel with a wrong formula may have."""
        narrow = formula_faults(self._problem, torch.float32)
        same = next(each.out for each in narrow if each.sentence == fault.sentence)
        error = largest((same.double() - fault.out)[self._bar.rows].abs())
        bar = self._bar.tolerance
        return max(self._bar.tolerance_at(fault.out), bar.factor * error)

    # -- additions ---------------------------------------------------------------------------------

    def _accumulation_diagnoses(self) -> Iterator[KernelDiagnosis]:
        """Sums that are rounded to a low precision: reproduced, or of the size of such an error."""
        truth, rows = self._bar.oracle.out, self._bar.rows
        error = (self._out - truth)[rows]
        if not math.isfinite(self._error) or not error.numel():
            return
        size = max(float(error.abs().mean()), 1e-300)
        bias = float(error.mean().abs()) / size
        by_size: list[tuple[float, str, float]] = []
        for name, block, out in low_precision_sums(self._problem):
            residual = self._distance(out.out, rows)
            text = f"Sums over keys are rounded to {name}"
            if residual <= EXPLAINED_SHARE * self._error:
                text += f" after every {plural(block, 'key')}."
                yield KernelDiagnosis("low-precision-sum", text, residual, self._error)
            ratio = size / max(mean((out.out - truth)[rows].abs()), 1e-300)
            if SIZE_RANGE[0] <= ratio <= SIZE_RANGE[1] and bias < _MAX_BIAS:
                text += f", judged by the size of the error: its mean is {ratio:.2g} times that "
                text += f"of sums rounded after every {plural(block, 'key')}. The keys are right."
                if name == "float16" and self._problem.dtype is torch.float32:
                    text += " Products in TF32 have errors of this size too."
                eps = torch.finfo(getattr(torch, name)).eps
                by_size.append((abs(math.log(ratio)), text, eps))
        if by_size and self._has_the_weights(min(by_size)[2]):
            yield KernelDiagnosis("low-precision-sum", min(by_size)[1])

    def _unexplained(self) -> KernelDiagnosis:
        one = self._one
        assert one.error is not None
        if one.error.n_nan + one.error.n_inf:
            where = ", ".join(format_numbers(*each) for each in self._nonfinite())
            text = f"The output is NaN or Inf in {where}, where the oracle is finite."
            return KernelDiagnosis("nan", text)
        heads = [h for h, value in enumerate(one.heads) if not value <= self._bar.tolerance.max_abs]
        where = f"{format_numbers('head', heads)}, {plural(len(one.wrong_rows), 'row')}"
        if not heads:
            where = "no element is above the tolerance, and the mean is"
        use = one.key_use
        known = use is not None and not use.skipped
        keys = "The kernel uses the right keys and values, so its arithmetic is wrong, or it reads "
        keys = f"{keys}q or k at a wrong place. " if known else ""
        text = f"{keys}No known fault gives these numbers ({where})."
        return KernelDiagnosis("unexplained", text)

    def _nonfinite(self) -> list[tuple[str, list[int]]]:
        bad = (~self._out.isfinite()).any(-1) & self._bar.rows
        heads, rows = bad.any(0).any(-1), bad.any(0).any(0)
        return [
            (n, each.nonzero().flatten().tolist()) for n, each in (("head", heads), ("row", rows))
        ]


def _without_key(change: Tensor, weights: Tensor, toward: Tensor, columns: Tensor) -> Tensor:
    """What remains of a change (heads, rows, head size) if one key has any k.

    Another weight of it moves the output o of a row along v - o, which is `toward`.
    """
    size = toward.square().sum(-1, keepdim=True).clamp_min(1e-300)
    share = (change * toward).sum(-1, keepdim=True) / size
    return change - share * toward * (weights > 0)[..., None]


def _without_value(change: Tensor, weights: Tensor, toward: Tensor, columns: Tensor) -> Tensor:
    """What remains of a change if one key has any v in some columns: its weights times a vector."""
    size = weights.square().sum().clamp_min(1e-300)
    value = (change * weights[..., None]).sum((0, 1)) / size
    return change - weights[..., None] * value * columns
