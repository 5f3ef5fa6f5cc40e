"""Rows of a batch that lost the common end of the prompts are noted; other batches are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.planting import of, planted, serious
from support.tiny import ids, make_model

from flexinspect.rules.prompt.cut_rows import Ids, find_cut_rows

START, END = (1, 6, 9), (5, 9, 8, 9)


def prompts(*lengths: int, start: Ids = START, end: Ids = END) -> list[Ids]:
    return [(*start, *ids(n, seed), *end) for seed, n in enumerate(lengths)]


def cut(rows: list[Ids], width: int) -> list[Ids]:
    return [row[:width] for row in rows]


@pytest.mark.parametrize("width", [17, 16, 15])
def test_a_row_that_was_cut_is_found(width: int) -> None:
    assert find_cut_rows(cut(prompts(6, 20, 4), width), width) == ([1], END)


def test_all_rows_that_were_cut_are_found() -> None:
    assert find_cut_rows(cut(prompts(6, 20, 4, 30), 16), 16) == ([1, 3], END)


@pytest.mark.parametrize(
    ("rows", "width"),
    [
        (prompts(6, 20, 4), 27),
        ([*prompts(6, 4), ids(20, 7)], 20),
        (cut(prompts(6, 20), 16), 16),
        ([prompts(6)[0], prompts(6)[0], prompts(20)[0][:16]], 16),
        (cut(prompts(20, 30, 25), 16), 16),
        (prompts(6, 20, 4, end=()), 23),
        (prompts(6, 20, 4, end=(2,)), 24),
        ([row[-16:] for row in prompts(6, 20, 4)], 16),
    ],
    ids=[
        *("not cut", "other beginnings", "two rows", "equal rows", "all cut", "no common end"),
        *("one common id", "cut at the left"),
    ],
)
def test_other_batches_are_left_alone(rows: list[Ids], width: int) -> None:
    assert find_cut_rows(rows, width) is None


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("limit", [16, 99])
def test_a_batch_of_generate_with_a_row_that_was_cut(tmp_path: Path, side: str, limit: int) -> None:
    rows = cut(prompts(6, 20, 4), limit)
    width = max(map(len, rows))
    padded = [
        (0,) * (width - len(row)) + row if side == "left" else row + (0,) * (width - len(row))
        for row in rows
    ]
    batch = torch.tensor(padded)
    mask = torch.tensor([[int(bool(token)) for token in row] for row in padded])
    model = make_model("llama")
    found = planted(tmp_path, model, lambda: model(batch, attention_mask=mask))
    notes = of(found, "inputs.row-cut")
    assert serious(notes) == []
    assert ["lacks the last 4 ids (5 9 8 9)" in one.sentence for one in notes] == [True] * (
        limit == 16
    )
    assert all("Batch row 1 of 3" in one.sentence for one in notes)
