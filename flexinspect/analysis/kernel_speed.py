"""Times of kernels as a table: mean, median and deviation, ratio to SDPA, rate of work."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, median, stdev
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

_LEVEL = 0.95
_MAX_WIDTH = 0.1  # of an interval that shows that nothing changed


class Timing(Struct, frozen=True):
    """The samples of one kernel in milliseconds; `reason` says why there are none.

    `flops` are those of all cells (two products of 2 operations each, per cell and column).
    `open_share` is the share of the cells that the mask leaves open: the sparse work.
    """

    kernel: str
    length: int
    inputs: str
    samples: tuple[float, ...]
    flops: int
    open_share: float
    reason: str = ""

    @property
    def median_ms(self) -> float:
        """The median of the samples."""
        return median(self.samples)

    @property
    def tflops(self) -> float:
        """Rate of the open cells' work, in units of 1e12 operations per second."""
        return self.flops * self.open_share / self.median_ms / 1e9

    def as_json(self) -> dict[str, Any]:
        """Return the numbers as plain data."""
        facts = {**asdict(self), "samples": list(self.samples)}
        if not self.samples:
            return facts
        spread = stdev(self.samples) if len(self.samples) > 1 else 0.0
        facts |= {"mean_ms": fmean(self.samples), "median_ms": self.median_ms, "std_ms": spread}
        return {**facts, "tflops": self.tflops}


class InputEffect(Struct, frozen=True):
    """How inputs of a kind change the times: ratios to random inputs of the same round.

    `low` and `high` bound the median ratio at 95 %.
    """

    kind: str
    ratio: float
    low: float
    high: float
    n_pairs: int

    def sentence(self) -> str:
        """Return whether the inputs changed the speed."""
        interval = f"{self.low:.3f} to {self.high:.3f}"
        measured = f"median ratio {self.ratio:.3f}, 95 % interval {interval}, {self.n_pairs} pairs"
        verdict = f"--range {self.kind} changed the speed"
        if self.low <= 1 <= self.high:
            verdict = f"--range {self.kind} did not change the speed"
            if self.high - self.low > _MAX_WIDTH:
                verdict = f"too noisy to tell whether --range {self.kind} changed the speed"
        return f"{verdict}: {measured}"


class SpeedReport(Struct, frozen=True):
    """All times of one call of `--bench`."""

    shape: str
    machine: str
    timings: tuple[Timing, ...]
    effects: tuple[InputEffect, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the numbers as plain data."""
        return {
            "shape": self.shape,
            "machine": self.machine,
            "timings": [each.as_json() for each in self.timings],
            "effects": [asdict(each) for each in self.effects],
        }


def speed_lines(report: SpeedReport) -> Iterator[str]:
    """Yield the table of times."""
    yield f"times in ms ({report.machine})"
    yield f"  {report.shape}"
    baseline = {
        (one.length, one.inputs): one.median_ms
        for one in report.timings
        if one.kernel == "sdpa" and one.samples
    }
    width = max([len(one.kernel) for one in report.timings], default=6)
    head = f"  {'kernel':<{width}}   keys  inputs      mean   median      std  / sdpa  TFLOP/s"
    yield f"{head}  open work"
    for one in report.timings:
        start = f"  {one.kernel:<{width}} {one.length:>6}  {one.inputs:<7}"
        if not one.samples:
            yield f"{start} not timed. {one.reason}"
            continue
        spread = stdev(one.samples) if len(one.samples) > 1 else 0.0
        times = "".join(f" {value:8.4g}" for value in (fmean(one.samples), one.median_ms, spread))
        base = baseline.get((one.length, one.inputs))
        ratio = f"{one.median_ms / base:7.2f}" if base else "      -"
        yield f"{start}{times} {ratio} {one.tflops:8.3g} {one.open_share:10.1%}"
    yield from (f"  {effect.sentence()}" for effect in report.effects)


def input_effect(timings: Sequence[Timing], kind: str) -> InputEffect | None:
    """Return how the inputs of a kind changed the times, None without samples.

    Ratios pair the samples of one round. The interval of the median is that of order statistics
    (a binomial distribution of the number of ratios below the median), free of assumptions about
    the distribution of times.
    """
    normal = {(t.kernel, t.length): t.samples for t in timings if t.inputs == "normal"}
    ratios = sorted(
        sample / other
        for one in timings
        if one.inputs == kind
        for sample, other in zip(one.samples, normal[one.kernel, one.length], strict=True)
    )
    if not ratios:
        return None
    n, below = len(ratios), 0.0
    rank = 0
    while rank < n // 2:  # the largest rank whose lower tail has at most half of the error level
        below += math.comb(n, rank) / 2**n
        if below > (1 - _LEVEL) / 2:
            break
        rank += 1
    low, high = ratios[max(rank - 1, 0)], ratios[min(n - rank, n - 1)]
    return InputEffect(kind, median(ratios), low, high, n)
