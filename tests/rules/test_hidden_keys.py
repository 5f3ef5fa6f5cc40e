"""Padding inside of a prompt, which its mask closes and a later mask opens, is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ownmasks import attend_by, with_cache
from support.planting import of, one, planted
from support.tiny import ids, make_model
from torch import Tensor

OPENED = "mask.hidden-keys-opened"
PAD, PROMPT = 0, 16
PADS = (5, 6, 7, 12, 13)


def prompt_ids(padding: int | None = PAD) -> Tensor:
    tokens = [*ids(PROMPT, 3)]
    for place in PADS:
        tokens[place] = padding if padding is not None else tokens[place]
    return torch.tensor([tokens])


def closed_in(rows: Tensor, keys: Tensor, places: tuple[int, ...]) -> Tensor:
    """Return which cells of these keys are closed to all rows but their own."""
    return torch.isin(keys, torch.tensor(places)) & (keys != rows)


def found(tmp_path: Path, *, opens_from: int, places: Any = PADS, **prompt: Any) -> list[Any]:
    """Generate with keys that are closed to rows before `opens_from`."""
    model = make_model("llama")

    def cells(layer: int, rows: Tensor, keys: Tensor) -> Tensor:
        return (keys <= rows) & ~(closed_in(rows, keys, places) & (rows < opens_from))

    attend_by(model, cells)
    return planted(tmp_path, model, lambda: with_cache(model, prompt_ids(**prompt)))


def test_padding_that_decode_steps_see_is_reported_once(tmp_path: Path) -> None:
    finding = one(found(tmp_path, opens_from=PROMPT), OPENED)
    assert finding.step == 1
    assert finding.positions == PADS
    assert "The newest row of step 1 sees 5 keys of the prompt" in finding.sentence


def test_padding_that_stays_closed_is_not_reported(tmp_path: Path) -> None:
    assert of(found(tmp_path, opens_from=10**6), OPENED) == []


@pytest.mark.parametrize(
    ("places", "padding"),
    [
        (PADS, None),  # other tokens, which the answer may be meant to read
        ((5, 12), PAD),  # the last tokens of segments, which no other row of them reads
        ((5, 6), PAD),  # the same token is read elsewhere
    ],
)
def test_keys_that_are_no_padding_may_be_opened(
    tmp_path: Path, places: tuple[int, ...], padding: int | None
) -> None:
    assert of(found(tmp_path, opens_from=PROMPT, places=places, padding=padding), OPENED) == []
