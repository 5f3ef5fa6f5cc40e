"""A 2D attention mask with other values than 0 and 1."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.planting import of, one, planted, serious
from support.tiny import ids, make_model

from flexinspect.records.finding import Severity

PROMPT = torch.tensor([ids(10, 3)])
VALUES = "mask.other-values"


def test_position_ids_in_the_place_of_the_mask_are_named_once(tmp_path: Path) -> None:
    model = make_model("llama")

    def run(**arguments: Any) -> None:
        rows = PROMPT
        for _ in range(3):
            counts = torch.arange(rows.shape[1])[None]
            args = (rows,) if arguments else (rows, counts)
            out = model(*args, use_cache=False, **arguments and {"position_ids": counts})
            rows = torch.cat([rows, out.logits[:, -1:].argmax(-1)], 1)

    finding = one(planted(tmp_path, model, run), VALUES)
    assert (finding.severity, finding.step) == (Severity.WARNING, 0)
    assert finding.sentence == (
        "The attention_mask has values from 0 to 9 that count its columns, as position ids do: the "
        "model reads them as a mask that closes the first token and nothing else."
    )
    right = planted(tmp_path, model, lambda: run(position_ids=True), name="right")
    assert serious(right) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_to_add_are_named_in_any_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    model, mask = make_model("llama"), torch.zeros(1, 10, dtype=dtype)
    mask[:, :3] = -16384.0
    run = partial(model, PROMPT, attention_mask=mask, use_cache=False)
    finding = one(planted(tmp_path, model, run), VALUES)
    assert finding.severity is Severity.WARNING
    assert "has values from -16384 to 0" in finding.sentence
    assert "leave them open" in finding.sentence


def test_numbers_of_documents_are_a_note(tmp_path: Path) -> None:
    model, mask = make_model("llama"), torch.tensor([[1] * 4 + [2] * 6])
    run = partial(model, PROMPT, attention_mask=mask, use_cache=False)
    assert one(planted(tmp_path, model, run), VALUES).severity is Severity.NOTE


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16])
def test_zeros_and_ones_are_right_in_any_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    model, mask = make_model("llama"), torch.ones(1, 10, dtype=dtype)
    mask[:, :2] = 0
    run = partial(model, PROMPT, attention_mask=mask, use_cache=False)
    assert of(planted(tmp_path, model, run), VALUES) == []
