"""Whether paraphrases are isolated is read from the cells that ran, not from what is declared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flexinspect.analysis.isolation_verdict import IsolationVerdict, judge_isolation
from flexinspect.records.prompt import Segment, SegmentKind
from flexinspect.records.step import MaskRecord

P, S = SegmentKind.PARAPHRASE, SegmentKind.SEPARATOR
SEGMENTS = [
    Segment(0, 1, "bos", SegmentKind.BOS, 0),
    Segment(1, 4, "paraphrase 1", P, 1),
    Segment(4, 5, "separator 1", S, 1),
    Segment(5, 8, "paraphrase 2", P, 3),
    Segment(8, 9, "separator 2", S, 3),
    Segment(9, 10, "cue", SegmentKind.CUE, 5),
]


def isolated() -> np.ndarray:
    cells = np.zeros((10, 10), np.bool_)
    cells[1:5, 1:5] = cells[5:9, 5:9] = cells[:, 0] = cells[9] = True
    return np.tril(cells)


class Reader:
    """Has one step, whose layers ran these masks; None is one whose cells are not recorded."""

    def __init__(self, *layers: np.ndarray | None, segments: Any = SEGMENTS) -> None:
        self._layers, self._segments = layers, segments

    def segments(self, generation: int, branch: int) -> Any:
        return self._segments

    def calls(self, *place: int) -> Any:
        names = range(len(self._layers))
        return [type("Call", (), {"layer": n, "mask": str(n)})() for n in names]

    def mask(self, fingerprint: str) -> MaskRecord:
        cells = self._layers[int(fingerprint)]
        kept = None if cells is None else cells[None]
        return MaskRecord(fingerprint, "block", 1, 1, 10, 10, 0, cells=kept)

    mask_summary = mask


def judge(*layers: np.ndarray | None, **options: Any) -> IsolationVerdict:
    return judge_isolation(Reader(*layers, **options), 0)  # type: ignore[arg-type]


def test_isolated_paraphrases_pass() -> None:
    verdict = judge(isolated(), isolated())
    assert (verdict.passed, verdict.label) == (True, "PASS")
    assert verdict.sentence.startswith("none of 2 paraphrases attends to another in 2 layers")


@pytest.mark.parametrize(("row", "key", "n"), [(6, 2, 1), (5, 4, 1)], ids=["text", "separator"])
def test_one_open_cell_in_one_layer_fails_with_its_layer(row: int, key: int, n: int) -> None:
    leaking = isolated()
    leaking[row, key] = True
    verdict = judge(isolated(), leaking)
    assert verdict.label == "FAIL"
    assert verdict.sentence == f"paraphrase 2 attends to paraphrase 1 ({n} cell) in layer 1"


def test_a_newest_row_that_misses_a_paraphrase_fails() -> None:
    cells = isolated()
    cells[9, 1:5] = False
    assert judge(cells).sentence == "the newest row does not attend to paraphrase 1"


def test_what_cannot_be_judged_is_said_and_does_not_pass() -> None:
    assert judge(None).label == "SKIP"
    assert "level basic" in judge(None).sentence
    assert "only one paraphrase" in judge(isolated(), segments=SEGMENTS[:3]).sentence
    assert "no paraphrases are declared" in judge(isolated(), segments=SEGMENTS[:1]).sentence
    assert "no attention call" in judge().sentence
