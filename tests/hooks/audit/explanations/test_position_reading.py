"""Rotated rows show the positions and the base by which they were rotated."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexinspect_hooks.audit.explanations.position_reading import RotatedRows, read_positions

ROWS, HEADS, SIZE = 10, 2, 16


def plain() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, HEADS, SIZE, generator=generator, dtype=torch.float64)


def frequencies(base: float = 10000.0) -> Tensor:
    return base ** -(torch.arange(0, SIZE, 2, dtype=torch.float64) / SIZE)


def rotated(positions: Tensor, table: Tensor) -> Tensor:
    angles = positions.double()[:, None] * table
    pairs = torch.complex(plain()[..., : SIZE // 2], plain()[..., SIZE // 2 :])
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def read(ours: Tensor, first: int = 0) -> str:
    places = tuple(range(first, first + ROWS))
    return read_positions(RotatedRows(ours, plain(), frequencies(), places))


PLACES = torch.arange(ROWS)
SENTENCES: dict[str, tuple[Tensor, str]] = {
    "shifted": (PLACES + 3, "for positions that are +3 from those of the text"),
    "halved": (PLACES / 2, "for 0.5 times the positions of the text"),
    "backwards": (PLACES.flip(0), "for positions that count backwards"),
    "constant": (PLACES * 0 + 7, "All its rows are rotated for position 7"),
    "from 6 on": (
        torch.where(PLACES < 6, PLACES, PLACES - 6),
        "those at the positions 6 to 9 are rotated for other positions: 6 as 0, 7 as 1",
    ),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_the_positions_of_rotated_rows_are_read(name: str) -> None:
    positions, words = SENTENCES[name]
    assert words in read(rotated(positions, frequencies()))


def test_another_base_is_read() -> None:
    assert "RoPE of base 500, not 1e+04" in read(rotated(PLACES, frequencies(500.0)))


def test_a_base_that_changes_with_the_row_is_read() -> None:
    bases = 1000.0 + 500.0 * PLACES.double()
    table = bases[:, None] ** -(torch.arange(0, SIZE, 2, dtype=torch.float64) / SIZE)
    angles = PLACES.double()[:, None] * table
    pairs = torch.complex(plain()[..., : SIZE // 2], plain()[..., SIZE // 2 :])
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    text = read(torch.cat((turned.real, turned.imag), -1))
    assert "RoPE of bases that change: position 1 with base 1.5e+03" in text
    assert "9 with base 5.5" in text


def test_rows_that_are_rotated_rightly_or_not_at_all_by_angles_are_not_described() -> None:
    assert read(rotated(PLACES, frequencies())) == ""
    assert read(plain() * 2) == ""


def test_channels_that_are_left_out_and_neighbours_that_are_paired_are_named() -> None:
    ours = plain()
    half = torch.complex(ours[..., :4], ours[..., 4:8])
    angles = PLACES.double()[:, None] * frequencies()[::2]
    turned = half * torch.polar(torch.ones_like(angles), angles)[:, None]
    kept = torch.cat((turned.real, turned.imag, ours[..., 8:]), -1)
    assert read(kept) == "Only the first 8 of 16 channels of each head are rotated."
    even = torch.complex(ours[..., ::2], ours[..., 1::2])
    angles = PLACES.double()[:, None] * frequencies()
    turned = even * torch.polar(torch.ones_like(angles), angles)[:, None]
    assert "pairs channel 0 with 8" in read(torch.view_as_real(turned).flatten(-2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_frequencies_that_were_cast_and_cast_back_are_no_other_base(dtype: torch.dtype) -> None:
    far = PLACES + 5000
    sentence = read(rotated(far, frequencies().to(dtype).double()), first=5000)
    name = str(dtype).removeprefix("torch.")
    assert sentence.startswith(f"Its frequencies are rounded to {name}: the model was cast to it")
    assert "RoPE of base 9990" in read(rotated(far, frequencies(9990.0)), first=5000)
