"""Regression of kernels: the numbers of a comparison as JSON, and what got worse since then."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from flexinspect.analysis.kernel_report import KernelEvaluation
from flexinspect.core.environment import read_text, save_file
from flexinspect.core.errors import UsageError

VERSION = 1
_SAME_MACHINE, _OTHER_MACHINE = (1.1, 0.01), (2.0, 0.1)
"""A larger error than `factor * baseline + share * tolerance` is worse. On the same device and
version of torch the inputs are the same bits, and so are the outputs of an unchanged kernel."""


class BaselineEntry(Struct, frozen=True):
    """The numbers of one evaluation; `errors` by name, None where a result was not finite."""

    kernel: str
    config: str
    inputs: str
    device: str
    status: str
    bit_equal: bool
    errors: dict[str, float | None]
    tolerances: dict[str, float]

    @property
    def key(self) -> tuple[str, str, str]:
        """What is compared with an entry of the same key."""
        return self.kernel, self.config, self.inputs


class Baseline(Struct, frozen=True):
    """A baseline file."""

    version: int
    entries: tuple[BaselineEntry, ...]


def baseline_entry(one: KernelEvaluation) -> BaselineEntry:
    """Return the numbers of an evaluation that a baseline keeps."""
    errors: dict[str, float] = {}
    tolerances: dict[str, float] = {}
    if one.error is not None and one.tolerance is not None:
        errors = {"max error": one.error.max_abs, "mean error": one.error.mean_abs}
        errors["number of NaN and Inf"] = float(one.error.n_nan + one.error.n_inf)
        tolerances = {"max error": one.tolerance.max_abs, "mean error": one.tolerance.mean_abs}
    for result in (*((one.lse,) if one.lse else ()), *one.gradients):
        errors[f"error of {result.name}"] = result.max_abs
        tolerances[f"error of {result.name}"] = result.tolerance
    finite = {name: value if value < float("inf") else None for name, value in errors.items()}
    where = (one.kernel, one.config, one.inputs, one.device)
    return BaselineEntry(*where, one.status, one.bit_equal, finite, tolerances)


def save_baseline(file: Path, evaluations: Sequence[KernelEvaluation]) -> None:
    """Write a baseline, replacing the file at once. Raises `FlexInspectError`."""
    baseline = Baseline(VERSION, tuple(map(baseline_entry, evaluations)))
    data = json.dumps(msgspec.to_builtins(baseline), indent=1).encode() + b"\n"
    save_file(file, data)


def load_baseline(file: Path) -> Baseline:
    """Read a baseline. Raises `UsageError` when it is none, or of another version."""
    hint = "Write one with: flexinspect kernels --save FILE"
    try:
        baseline = msgspec.json.decode(read_text(file, "baseline").encode(), type=Baseline)
    except msgspec.DecodeError as error:
        raise UsageError(f"{file} is not a baseline of kernels: {error}.", hint=hint) from error
    if baseline.version != VERSION:
        raise UsageError(f"{file} has version {baseline.version}, not {VERSION}.", hint=hint)
    return baseline


def regressions(baseline: Baseline, evaluations: Sequence[KernelEvaluation]) -> Iterator[str]:
    """Yield a sentence for each evaluation that got worse, in order.

    Raises `UsageError` if the baseline has none of them.
    """
    before = {entry.key: entry for entry in baseline.entries}
    entries = [baseline_entry(one) for one in evaluations]
    if not any(entry.key in before for entry in entries):
        what = "The baseline has none of these kernels on these configurations and inputs."
        raise UsageError(what, hint="Save it with the same --kernel, --config and --inputs.")
    for now in entries:
        if now.key in before and (reasons := [*_reasons(before[now.key], now)]):
            yield f"{now.kernel} on {now.config} got worse: {'; '.join(reasons)}."


def is_new_fault(baseline: Baseline, one: KernelEvaluation) -> bool:
    """Whether an evaluation fails that the baseline does not know, or knows as right."""
    before = {entry.key: entry.status for entry in baseline.entries}
    order = ("same", "varies", "differs")
    earlier = before.get(baseline_entry(one).key, "same")
    return one.status in order and (
        earlier not in order or order.index(one.status) > order.index(earlier)
    )


def _reasons(before: BaselineEntry, now: BaselineEntry) -> Iterator[str]:
    if before.status != "not compared" and now.status == "not compared":
        yield "it was compared, and cannot be now"
    if before.status in ("same", "varies") and now.status == "differs":
        yield "it was within tolerance, and is not now"
    if before.bit_equal and not now.bit_equal:
        yield "its runs were bit-equal, and are not now"
    factor, share = _SAME_MACHINE if before.device == now.device else _OTHER_MACHINE
    for name, error in now.errors.items():
        earlier = before.errors.get(name)
        if name not in before.errors or earlier is None:
            continue
        limit = factor * earlier + share * now.tolerances.get(name, 0.0)
        if error is None or error > limit:
            text = "not finite" if error is None else f"{error:.3g}"
            yield f"{name} {text}, it was {earlier:.3g}"
