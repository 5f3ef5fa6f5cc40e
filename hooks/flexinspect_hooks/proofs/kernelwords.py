"""What the comparison of kernel weights with drawn ones found, and its words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flexinspect.findings import Finding
from flexinspect.proofs import KERNEL_DIFFERS, KERNEL_SAME, KERNEL_UNSEEN, amount, found
from flexinspect.rules.scene import Scene
from flexinspect.rules.words import counted, layers


@dataclass(frozen=True, slots=True)
class Cell:
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
class Compared:
    """One attention call compared. `why_not` tells why it was not, then the rest is empty.

    `row_of` and `key_of` are the positions of row 0 and key 0. `largest` is the largest difference
    of a weight, None where only closed cells could be compared. `n_wrong` counts the cells that
    differ, `n_hidden` those of them that are closed in one and open in the other.
    """

    step: int
    layer: int
    path: str
    shape: tuple[int, int, int]
    row_of: int = 0
    key_of: int = 0
    largest: float | None = None
    n_wrong: int = 0
    n_hidden: int = 0
    first: Cell | None = None
    why_not: str = ""


# -- in words --------------------------------------------------------------------------------------


def said(
    done: Sequence[Compared], scene: Scene, n_layers: int
) -> tuple[tuple[str, ...], tuple[Finding, ...]]:
    """Return the lines and the findings of a comparison, of a model of so many layers."""
    findings: list[Finding] = []
    wrong = [one for one in done if one.n_wrong]
    skipped = [one for one in done if one.why_not]
    if wrong:
        findings.append(_differing(wrong, scene, n_layers))
    elif len(skipped) < len(done):
        findings.append(_same(done, n_layers))
    findings += _unseen(done, skipped, n_layers)
    return tuple(_lines(done)), tuple(findings)


def _differing(wrong: Sequence[Compared], scene: Scene, n_layers: int) -> Finding:
    one = wrong[0]
    cell = one.first
    assert cell is not None
    row, key = one.row_of + cell.row, one.key_of + cell.key
    drawn = amount(cell.drawn) if cell.is_open else "a closed cell"
    here = sorted({other.layer for other in wrong if other.step == one.step})
    later = len({other.step for other in wrong}) - 1
    sentence = (
        f"In layer {one.layer}, head {cell.head}, step {one.step}, the kernel ({one.path}) gave "
        f"{scene.position(key)} {amount(cell.kernel)} of the weight of {scene.position(row)}, and "
        f"{drawn} is drawn; {_how_many(one)}"
    )
    if len(here) > 1:
        sentence += f"; cells differ in {layers(here, n_layers)}"
    if later:
        sentence += f", also in {counted(later, 'more step')}"
    evidence = {
        "path": one.path,
        "row": row,
        "key": key,
        "kernel": cell.kernel,
        "drawn": cell.drawn,
        "open": cell.is_open,
        "cells": sum(other.n_wrong for other in wrong),
        "cells_open_in_one": sum(other.n_hidden for other in wrong),
        "largest_difference": one.largest,
    }
    return found(
        KERNEL_DIFFERS,
        f"{sentence}.",
        step=one.step,
        layer=one.layer,
        head=cell.head,
        positions=(row, key),
        evidence=evidence,
        layers=here if len(here) > 1 else (),
    )


def _how_many(one: Compared) -> str:
    if one.n_hidden:
        cells = counted(one.n_hidden, "cell")
        return f"{cells} of that layer {_are(one.n_hidden)} open in one and closed in the other"
    weights = counted(one.n_wrong, "weight")
    differ = "differs" if one.n_wrong == 1 else "differ"
    return f"{weights} of that layer {differ} by more than rounding"


def _are(n: int) -> str:
    return "is" if n == 1 else "are"


def _same(done: Sequence[Compared], n_layers: int) -> Finding:
    compared = [one for one in done if not one.why_not]
    cells = sum(one.shape[0] * one.shape[1] * one.shape[2] for one in compared)
    steps = len({one.step for one in compared})
    largest = max((one.largest or 0.0 for one in compared), default=0.0)
    where = layers(sorted({one.layer for one in compared}), n_layers)
    sentence = (
        f"The kernel's own weights are those that are drawn: {cells} cells of {where} in "
        f"{counted(steps, 'step')}, largest difference {amount(largest)}."
    )
    return found(KERNEL_SAME, sentence, evidence={"cells": cells, "largest_difference": largest})


def _unseen(
    done: Sequence[Compared], skipped: Sequence[Compared], n_layers: int
) -> Iterator[Finding]:
    for why_not in dict.fromkeys(one.why_not for one in skipped):
        which = sorted({one.layer for one in skipped if one.why_not == why_not})
        sentence = f"Not compared: {layers(which, n_layers)}, as {why_not}."
        yield found(KERNEL_UNSEEN, sentence, layer=which[0], layers=which)
    n_seen = len({one.layer for one in done})
    if n_seen < n_layers:
        sentence = (
            f"Attention was seen in {n_seen} of {n_layers} layers; of the others nothing is proven."
        )
        yield found(KERNEL_UNSEEN, sentence)


def _lines(done: Sequence[Compared]) -> Iterator[str]:
    yield f"kernel truth: {counted(len(done), 'attention call')} made again with identity values"
    for step in dict.fromkeys(one.step for one in done):
        calls = [one for one in done if one.step == step and not one.why_not]
        if not calls:
            yield f"  step {step}: not compared"
            continue
        heads, rows, keys = calls[0].shape
        worst = max(calls, key=lambda one: one.largest or 0.0)
        paths = ", ".join(dict.fromkeys(one.path for one in calls))
        said = (
            "only closed cells compared, as scores are changed by a score_mod"
            if worst.largest is None
            else f"largest difference {amount(worst.largest)} (layer {worst.layer})"
        )
        shape = f"{heads} x {rows} x {keys}"
        yield f"  step {step}: {counted(len(calls), 'layer')}, {paths}, {shape}: {said}"


def facts(one: Compared) -> dict[str, Any]:
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
        "not_compared": one.why_not or None,
    }
