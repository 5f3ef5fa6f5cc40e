"""Evaluates a kernel: its errors against the oracle, and whether a right kernel could have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from flexinspect.analysis.kernel_report import (
    ErrorStatistics,
    KernelEvaluation,
    KeyUse,
    ResultError,
    Status,
    WorstElement,
)
from flexinspect.core.errors import UsageError
from flexinspect.core.text import plural
from flexinspect.inputs.kernel_configs import (
    KernelConfig,
    check_config,
    choose_configs,
    config_from,
    read_table,
)
from flexinspect_hooks.kernels.builtin_kernels import EAGER, named_kernel
from flexinspect_hooks.kernels.calling import (
    ContractError,
    Kernel,
    KernelResult,
    call_kernel,
    check_contract,
)
from flexinspect_hooks.kernels.diagnosis import diagnose, has_wrong_keys
from flexinspect_hooks.kernels.gradients import gradient_errors
from flexinspect_hooks.kernels.inputs import KINDS, input_warnings, make_problem, wrong_reads
from flexinspect_hooks.kernels.key_use import measure_key_use
from flexinspect_hooks.kernels.problem import Problem, choose_device
from flexinspect_hooks.kernels.reference import Reference, largest, mean, nan_as_inf

_MIN_RELATIVE = 1e-3
_MAX_PROBE_CALLS = 64
_MAX_REPORTED_READS = 4


def evaluate_kernel(
    kernel: Any,
    config: str | KernelConfig | Mapping[str, Any] = "causal-float32",
    *,
    inputs: str = "normal",
    reference: Any = EAGER,
    seed: int = 0,
    device: str = "cpu",
    n_runs: int = 3,
    gradients: bool = True,
    **stated: Any,
) -> KernelEvaluation:
    """Compare a kernel with the oracle, eager attention in float64, and explain a difference.

    Args:
        kernel: a callable `(q, k, v, **options) -> out` or `(out, lse)`, a built-in name, or
            "module:function". q is (batch, query heads, rows, head size), k and v (batch, key
            heads, keys, head size), the LSE (batch, query heads, rows).
        config: a name of the table, or the fields of a `KernelConfig`.
        inputs: "normal", "raw", "unit" or "token" (docs/kernels.md).
        reference: the kernel whose error in the same dtype sets the tolerance.
        n_runs: runs whose outputs must be bit-equal.
        gradients: compare the gradients too, if the kernel has a backward pass.
        stated: facts about the kernel, such as `layout="bshd"` or `dtypes=("float16",)`.

    Raises `UsageError` for an unknown name or a configuration that cannot be run.
    """
    place = choose_device(device)
    chosen = _config(config)
    if inputs not in KINDS:
        raise UsageError(f"There are no inputs '{inputs}'; known: {', '.join(KINDS)}.")
    problem = make_problem(chosen, inputs, seed, place)
    bar = Reference(problem, as_kernel(reference, place))
    under_test = as_kernel(kernel, place, **stated)
    return evaluate(under_test, bar, n_runs=n_runs, gradients=gradients)


def _config(config: str | KernelConfig | Mapping[str, Any]) -> KernelConfig:
    if isinstance(config, KernelConfig):
        check_config(config)
        return config
    if isinstance(config, str):
        return choose_configs(read_table(None), [config])[0]
    return config_from(config)


def as_kernel(kernel: Any, device: torch.device, **stated: Any) -> Kernel:
    """Return a kernel from a callable, a built-in name, or "module:function"."""
    if isinstance(kernel, Kernel):
        return kernel
    if isinstance(kernel, str):
        return named_kernel(kernel, device)
    if not callable(kernel):
        raise UsageError(f"A kernel is a callable or a name, not {type(kernel).__name__}.")
    return Kernel(getattr(kernel, "__name__", type(kernel).__name__), kernel, **stated)


def evaluate(
    kernel: Kernel, bar: Reference, *, n_runs: int = 3, gradients: bool = True
) -> KernelEvaluation:
    """Evaluate a kernel on the problem of a reference."""
    problem = bar.problem
    base = KernelEvaluation(
        kernel=kernel.name,
        config=problem.config.name,
        shape=problem.config.describe(),
        inputs=problem.inputs_text,
        device=_device_text(problem.device),
        status="not compared",
    )
    before = [each.clone() for each in (problem.q, problem.k, problem.v)]
    try:
        check_contract(kernel, problem)
        runs = [call_kernel(kernel, problem)]
        if changed := _restore_inputs(problem, before):
            kernel = _on_copies(kernel)
        runs += [call_kernel(kernel, problem) for _ in range(n_runs - 1)]
    except ContractError as error:
        _restore_inputs(problem, before)
        status: Status = "differs" if error.is_fault else "not compared"
        return replace(base, status=status, reason=error.message)
    if _is_out_of_range(runs[0].out, bar):
        reason = f"The output is NaN or Inf, and so is that of {bar.kernel.name} in "
        reason += f"{problem.config.dtype}: the inputs are out of its range."
        return replace(base, reason=reason)
    one = _measure(base, bar, runs)
    one = replace(one, faults=(*one.faults, *changed))
    one = replace(one, key_use=_key_use(kernel, problem))
    if problem.holds_positions:
        one = _with_reads(one, problem, runs[0])
    if gradients:
        errors, skipped = gradient_errors(kernel, bar)
        one = replace(one, gradients=errors, gradients_skipped=skipped)
    one = replace(one, status=_status(one, bar))
    one = replace(one, diagnoses=tuple(diagnose(one, kernel, bar, runs)))
    is_probed = one.key_use is not None and not one.key_use.skipped
    warnings = tuple(input_warnings(problem, bar.tolerance.max_abs, is_probed=is_probed))
    return replace(one, warnings=(*_reference_warnings(bar), *warnings))


def _is_out_of_range(out: Tensor, bar: Reference) -> bool:
    """Whether the output is not finite, but only where that of the reference is not either."""
    bad = ~out[bar.rows].isfinite()
    return bool(bad.any()) and not bool((bad & bar.result.out[bar.rows].isfinite()).any())


def _restore_inputs(problem: Problem, before: Sequence[Tensor]) -> list[str]:
    """Undo what a kernel wrote into its inputs, and say so."""
    changed = []
    for name, tensor in zip(("q", "k", "v"), before, strict=True):
        if not torch.equal(_bits(getattr(problem, name)), _bits(tensor)):
            changed.append(f"It changed {name} in place.")
            setattr(problem, name, tensor)
    return changed


def _on_copies(kernel: Kernel) -> Kernel:
    """A kernel that overwrites its inputs, called with copies: what else is wrong shows then."""

    @wraps(kernel.function)
    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return kernel.function(q.clone(), k.clone(), v.clone(), **options)

    return replace(kernel, function=call)


def _status(one: KernelEvaluation, bar: Reference) -> Status:
    assert one.error is not None
    is_within = bar.is_within(one.error) and (one.lse is None or one.lse.is_within)
    is_within &= all(each.is_within for each in one.gradients)
    is_within &= not one.faults and one.empty_rows in ("", _ZERO_ROWS)
    is_within &= not has_wrong_keys(one)
    is_within &= one.bit_equal or one.run_difference <= bar.tolerance.max_abs
    if not is_within or one.n_wrong_reads:
        return "differs"
    return "same" if one.bit_equal else "varies"


# -- numbers ---------------------------------------------------------------------------------------


def _measure(
    base: KernelEvaluation, bar: Reference, runs: Sequence[KernelResult]
) -> KernelEvaluation:
    problem, oracle, out = bar.problem, bar.oracle, runs[0].out.double()
    rows = bar.rows[..., None]
    error = (out - oracle.out).abs()
    finite = out.isfinite()
    shown = torch.where(finite, error, torch.inf).masked_fill(~rows, 0)
    spread = max(_run_difference(run.out.double(), out) for run in runs)
    wrong = (shown > bar.tolerance.max_abs).any(-1).any(0).any(0)
    return replace(
        base,
        error=_statistics(out, bar),
        tolerance=bar.tolerance,
        faults=runs[0].faults,
        lse=_lse_error(runs[0], bar),
        n_runs=len(runs),
        bit_equal=all(torch.equal(_bits(run.out), _bits(runs[0].out)) for run in runs),
        run_difference=spread,
        heads=tuple(shown.amax((0, 2, 3)).tolist()),
        wrong_rows=tuple(wrong.nonzero().flatten().tolist()),
        n_rows=problem.config.q_len,
        worst=_worst(shown, out, bar),
        n_empty_rows=int((~bar.rows).sum()),
        empty_rows=_empty_rows_text(out, bar),
        maps=_maps(error, shown, oracle.out, bar),
    )


def _run_difference(out: Tensor, other: Tensor) -> float:
    same = (out == other) | (out.isnan() & other.isnan())
    return largest(nan_as_inf((out - other).abs().masked_fill(same, 0)))


def _statistics(out: Tensor, bar: Reference) -> ErrorStatistics:
    actual, truth = out[bar.rows], bar.oracle.out[bar.rows]
    finite = actual.isfinite()
    error = (actual - truth).abs()[finite]
    size = truth.abs()[finite]
    large = size > _MIN_RELATIVE * (float(size.max()) if size.numel() else 0.0)
    relative = (error / size)[large]
    ulp = (error / _ulp(truth[finite], bar.problem.dtype))[large]
    a, b = actual[finite], truth[finite]
    norms = float(a.norm() * b.norm())
    return ErrorStatistics(
        max_abs=largest(error),
        mean_abs=mean(error),
        max_rel=largest(relative),
        mean_rel=mean(relative),
        max_ulp=largest(ulp),
        mean_ulp=mean(ulp),
        cosine=float(a @ b) / norms if norms else float(torch.equal(a, b)),
        n_elements=truth.numel(),
        n_above=int((error > bar.tolerance.max_abs).sum()) + int((~finite).sum()),
        n_nan=int(actual.isnan().sum()),
        n_inf=int(actual.isinf().sum()),
    )


def _ulp(truth: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbouring numbers of a dtype at some values; normal numbers only."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(truth.abs().clamp_min(info.tiny))
    return info.eps * torch.exp2((exponent - 1).double())


def _lse_error(run: KernelResult, bar: Reference) -> ResultError | None:
    if run.lse is None:
        return None
    error = nan_as_inf((run.lse.double() - bar.oracle.lse)[bar.rows].abs())
    return ResultError("LSE", largest(error), bar.lse_tolerance)


def _worst(shown: Tensor, out: Tensor, bar: Reference) -> WorstElement | None:
    if not shown.numel() or float(shown.max()) == 0:
        return None
    place = [int(each) for each in torch.unravel_index(shown.argmax(), shown.shape)]
    batch, head, row, column = place
    config, tokens = bar.problem.config, bar.problem.tokens
    position = row + config.kv_len - config.q_len
    token = tokens[position] if 0 <= position < len(tokens) else ""
    at = (batch, head, row, column)
    return WorstElement(*at, float(out[at]), float(bar.oracle.out[at]), token)


_ZERO_ROWS = "the output is 0 there, as in FlexAttention"


def _empty_rows_text(out: Tensor, bar: Reference) -> str:
    rows = out[~bar.rows]
    if not rows.numel():
        return ""
    if not bool(rows.isfinite().all()):
        return "the output is NaN or Inf there; FlexAttention gives 0"
    return "the output is not 0 there; FlexAttention gives 0" if bool(rows.any()) else _ZERO_ROWS


def _maps(error: Tensor, shown: Tensor, truth: Tensor, bar: Reference) -> dict[str, Any]:
    """The arrays of the pictures, float32: the largest error by (row, column) and (head, row)."""
    infinite = shown.masked_fill(shown.isinf(), torch.nan)
    maps = {
        "rows": infinite.nan_to_num(-1).amax((0, 1)),
        "heads": infinite.nan_to_num(-1).amax((0, 3)),
        "errors": error[bar.rows].flatten(),
    }
    for name, over in (("rows", (0, 1)), ("heads", (0, 3))):
        maps[name] = maps[name].masked_fill(infinite.isnan().double().amax(over) > 0, torch.nan)
    return {name: value.float().cpu().numpy() for name, value in maps.items()}


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)  # NaN is equal to itself here


# -- what the kernel read --------------------------------------------------------------------------


def _key_use(kernel: Kernel, problem: Problem) -> KeyUse:
    n_calls = -(-problem.config.kv_len // problem.config.head_dim)
    if n_calls > _MAX_PROBE_CALLS:
        return KeyUse(skipped=f"it would take {n_calls} calls")
    try:
        return measure_key_use(kernel, problem)[0]
    except ContractError as error:
        return KeyUse(skipped=error.message)


def _with_reads(one: KernelEvaluation, problem: Problem, run: KernelResult) -> KernelEvaluation:
    reads, n_reads = wrong_reads(problem, run.out)
    sentences = []
    n_keys, n_heads = problem.config.kv_len, problem.config.kv_heads
    for each in reads[:_MAX_REPORTED_READS]:
        head, position = each.read
        known = 0 <= head < n_heads and 0 <= position < n_keys
        got = f"key {position} of key head {head}" if known else "no key (the code is invalid)"
        must = f"key {each.expected[1]} of key head {each.expected[0]}"
        place = f"batch {each.batch}, head {each.head}, row {each.row}"
        sentences.append(f"{place} read {got} instead of {must}")
    if len(reads) > _MAX_REPORTED_READS:
        sentences.append(f"and {plural(len(reads) - _MAX_REPORTED_READS, 'more row')}")
    return replace(one, reads=tuple(sentences), n_wrong_reads=len(reads), n_reads=n_reads)


def _reference_warnings(bar: Reference) -> Iterator[str]:
    if not bool(bar.result.out[bar.rows].isfinite().all()):
        name = bar.kernel.name
        yield f"The reference {name} gives NaN or Inf in {bar.problem.config.dtype}: out of range."


def _device_text(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}, torch {torch.__version__}"
