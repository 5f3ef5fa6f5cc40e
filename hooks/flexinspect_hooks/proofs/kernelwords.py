"""What the comparison of kernel weights with drawn ones found, and its words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flexinspect.findings import Finding
from flexinspect.proofs import (
    KERNEL_DIFFERS,
    KERNEL_SAME,
    KERNEL_UNSEEN,
    format_amount,
    proof_finding,
)
from flexinspect.rules.scene import RuleContext
from flexinspect.rules.words import format_layers, plural


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
