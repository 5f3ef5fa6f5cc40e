"""The result of comparing a kernel: errors, what explains them, and the report as text.

The capture side measures (`flexinspect.evaluate_kernel`); this module holds the numbers and prints
them, without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import asdict

from flexinspect.core.text import format_numbers, join_labels, plural

Status = Literal["same", "varies", "differs", "not compared"]
"""varies: within tolerance, but runs on the same inputs are not equal bit by bit."""


class ErrorStatistics(Struct, frozen=True):
    """The difference of a kernel's output from the oracle, over all elements of non-empty rows.

    Relative errors are those of elements above 1e-3 of the largest one. `ulp` counts units in the
    last place of the dtype at the oracle's value. `n_above` elements differ by more than the
    tolerance. NaN and infinite elements are counted, and are not part of the other numbers.
    """

    max_abs: float
    mean_abs: float
    max_rel: float
    mean_rel: float
    max_ulp: float
    mean_ulp: float
    cosine: float
    n_elements: int
    n_above: int
    n_nan: int
    n_inf: int


class Tolerance(Struct, frozen=True):
    """What a kernel's error may be: `factor` times the error of the reference, plus a floor."""

    reference: str
    factor: float
    reference_max: float
    reference_mean: float
    max_abs: float
    mean_abs: float


class ResultError(Struct, frozen=True):
    """The largest error of a further result (the LSE or a gradient), and its tolerance."""

    name: str
    max_abs: float
    tolerance: float

    @property
    def is_within(self) -> bool:
        """Whether the error is finite and within the tolerance."""
        return self.max_abs <= self.tolerance


class WorstElement(Struct, frozen=True):
    """The element with the largest error; `token` is the word at the row, "" if unknown."""

    batch: int
    head: int
    row: int
    column: int
    kernel: float
    oracle: float
    token: str = ""


class KeyUse(Struct, frozen=True):
    """Which keys a kernel used, by the identity-V probe.

    `n_opened` closed cells had weight, `n_closed` open cells had none; `first` describes the first
    of them. In `n_unseen` open cells the weight is too small to tell. `max_weight` is the largest
    difference of a weight. `skipped` is the reason why it was not tried.
    """

    n_cells: int = 0
    n_opened: int = 0
    n_closed: int = 0
    n_unseen: int = 0
    max_weight: float = 0.0
    first: str = ""
    skipped: str = ""


class KernelDiagnosis(Struct, frozen=True):
    """The class of a fault, and its proof.

    `residual` is the largest difference between the kernel and the oracle with that fault, `error`
    the difference before; None where the proof is another one, which the sentence states.
    """

    kind: str
    sentence: str
    residual: float | None = None
    error: float | None = None


class KernelEvaluation(Struct, frozen=True, kw_only=True):
    """One kernel on one configuration; `maps` are the arrays of its pictures, not part of JSON."""

    kernel: str
    config: str
    shape: str
    inputs: str
    device: str
    status: Status
    reason: str = ""
    faults: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    error: ErrorStatistics | None = None
    tolerance: Tolerance | None = None
    lse: ResultError | None = None
    gradients: tuple[ResultError, ...] = ()
    gradients_skipped: str = ""
    n_runs: int = 0
    bit_equal: bool = True
    run_difference: float = 0.0
    heads: tuple[float, ...] = ()
    wrong_rows: tuple[int, ...] = ()
    n_rows: int = 0
    worst: WorstElement | None = None
    n_empty_rows: int = 0
    empty_rows: str = ""
    key_use: KeyUse | None = None
    reads: tuple[str, ...] = ()
    n_wrong_reads: int = 0
    n_reads: int = 0
    diagnoses: tuple[KernelDiagnosis, ...] = ()
    maps: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)

    @property
    def is_same(self) -> bool:
        """Whether the kernel is within tolerance, and bit-equal in all runs."""
        return self.status == "same"

    def as_json(self) -> dict[str, Any]:
        """Return the numbers as plain data."""
        facts = {name: value for name, value in asdict(self).items() if name != "maps"}
        return {name: _plain(value) for name, value in facts.items()}

    def __str__(self) -> str:
        return "\n".join(evaluation_lines(self))


def _plain(value: Any) -> Any:
    if isinstance(value, Struct):
        return asdict(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def evaluation_lines(one: KernelEvaluation) -> Iterator[str]:
    """Yield the report of one evaluation."""
    yield f"{one.kernel} on {one.config}: {_verdict(one)}"
    yield f"  {one.shape}; {one.inputs}; {one.device}"
    if one.reason:
        yield f"  {one.reason}"
    yield from (f"  contract: {fault}" for fault in one.faults)
    if one.error is not None and one.tolerance is not None:
        yield from _error_lines(one, one.error, one.tolerance)
    yield from _further_lines(one)
    for diagnosis in one.diagnoses:
        yield f"  class {diagnosis.kind}: {diagnosis.sentence}{_proof(diagnosis)}"
    yield from (f"  inputs: {warning}" for warning in one.warnings)


def _verdict(one: KernelEvaluation) -> str:
    return _VERDICTS[one.status]


_VERDICTS: Mapping[Status, str] = {
    "same": "same within tolerance",
    "varies": "RUNS DIFFER",
    "differs": "DIFFERS",
    "not compared": "not compared",
}


def _proof(diagnosis: KernelDiagnosis) -> str:
    if diagnosis.residual is None or diagnosis.error is None:
        return ""
    numbers = f"{diagnosis.residual:.2g} remains of a difference of {diagnosis.error:.2g}"
    return f" The oracle with this fault gives the kernel's numbers: {numbers}."


def _error_lines(one: KernelEvaluation, error: ErrorStatistics, bar: Tolerance) -> Iterator[str]:
    yield (
        f"  error: max {error.max_abs:.3g}, mean {error.mean_abs:.3g}, relative max "
        f"{error.max_rel:.2g} mean {error.mean_rel:.2g}, ulp max {error.max_ulp:.0f} mean "
        f"{error.mean_ulp:.2g}, 1 - cosine {max(1 - error.cosine, 0):.1g}"
    )
    yield (
        f"  tolerance: max {bar.max_abs:.3g}, mean {bar.mean_abs:.3g} "
        f"({bar.factor:g} x the error of {bar.reference}, max {bar.reference_max:.3g}, mean "
        f"{bar.reference_mean:.3g}, and a floor)"
    )
    if error.n_nan or error.n_inf:
        yield f"  NaN: {plural(error.n_nan, 'element')}; Inf: {error.n_inf}"
    if error.n_above:
        share = 100 * error.n_above / error.n_elements
        above = [head for head, value in enumerate(one.heads) if not value <= bar.max_abs]
        heads = "all heads" if len(above) == len(one.heads) else format_numbers("head", above)
        n_rows = len(one.wrong_rows)
        rows = "all rows" if n_rows == one.n_rows else _few_rows(one.wrong_rows)
        of = f"{error.n_above} of {error.n_elements} elements ({share:.3g} %)"
        yield f"  {of} above it: {heads}, {rows}"
    if one.worst is not None and error.n_above:
        at = one.worst
        word = f" ({at.token})" if at.token else ""
        yield (
            f"  worst: batch {at.batch}, head {at.head}, row {at.row}{word}, column {at.column}: "
            f"{at.kernel:.6g} instead of {at.oracle:.6g}"
        )


def _few_rows(rows: Sequence[int]) -> str:
    ranges = format_numbers("row", rows).split(", ")
    more = f" and {len(ranges) - 8} more ranges" if len(ranges) > 8 else ""
    return ", ".join(ranges[:8]) + more


def _further_lines(one: KernelEvaluation) -> Iterator[str]:
    further = [] if one.lse is None else [one.lse]
    for each in (further, one.gradients):
        if each:
            yield f"  largest errors: {', '.join(map(_result_text, each))}"
    if one.gradients_skipped:
        yield f"  gradients: {one.gradients_skipped}"
    if one.n_runs > 1:
        equal = f"differ by up to {one.run_difference:.2g}"
        yield f"  {one.n_runs} runs: {'bit-equal' if one.bit_equal else equal}"
    if one.n_empty_rows:
        yield f"  {plural(one.n_empty_rows, 'row')} without an open key: {one.empty_rows}"
    if one.key_use is not None:
        yield f"  keys used: {key_use_text(one.key_use)}"
    if one.n_reads:
        right = one.n_reads - one.n_wrong_reads
        yield f"  keys read: {right} of {one.n_reads} readable rows read the right key"
        yield from (f"    {sentence}" for sentence in one.reads)


def summary_lines(done: Sequence[KernelEvaluation]) -> Iterator[str]:
    """Yield one line per evaluation, and how many differ."""
    yield ""
    names, configs = (max(map(len, each)) for each in _columns(done))
    for one in done:
        ratio = ""
        if one.error is not None and one.tolerance is not None and one.tolerance.max_abs:
            ratio = f"{one.error.max_abs / one.tolerance.max_abs:8.3g} of the tolerance"
        kinds = ", ".join(each.kind for each in one.diagnoses)
        place = f"{one.kernel:<{max(names, 16)}} {one.config:<{max(configs, 18)}}"
        text = f"{place} {_verdict(one):<22} {ratio:<26} {kinds}"
        yield f"  {text}".rstrip()
    counts = [sum(one.status == status for one in done) for status in _VERDICTS]
    varying = f"{counts[1]} within tolerance with runs that differ, " if counts[1] else ""
    yield f"{counts[0]} within tolerance, {varying}{counts[2]} differ, {counts[3]} not compared"
    if warned := [one for one in done if one.warnings]:
        which = f"{plural(len(warned), 'evaluation')} of {len(done)} with a warning"
        yield f"inputs: {which}, such as: {warned[0].warnings[-1]}"


def _columns(done: Sequence[KernelEvaluation]) -> tuple[list[str], list[str]]:
    return [one.kernel for one in done], [one.config for one in done]


def _result_text(result: ResultError) -> str:
    sign, word = ("<=", "") if result.is_within else (">", " ABOVE IT")
    return f"{result.name} {result.max_abs:.2g} {sign} {result.tolerance:.2g}{word}"


def key_use_text(use: KeyUse) -> str:
    """Return what the identity-V probe showed, in words."""
    if use.skipped:
        return f"not tried: {use.skipped}"
    unseen = f" ({use.n_unseen} weights are too small to tell)" if use.n_unseen else ""
    if not use.n_opened and not use.n_closed:
        weights = f"largest difference of a weight {use.max_weight:.2g}"
        how = "those of the mask as far as weights tell" if unseen else "exactly those of the mask"
        return f"{how}, {use.n_cells} cells{unseen}; {weights}"
    parts = [f"{plural(use.n_opened, 'closed cell')} had weight"] * bool(use.n_opened)
    parts += [f"{plural(use.n_closed, 'open cell')} had none"] * bool(use.n_closed)
    return f"not those of the mask: {join_labels(parts)}{unseen}; {use.first}"
