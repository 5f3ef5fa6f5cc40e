"""Modules of a program in the place of the architecture's: only functions of each row are used."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flexinspect_hooks.audit.forward.program_modules import program_module

WIDTH = 8


class Own(nn.Linear):
    """A layer of the program that computes what a plain one does."""


class Drifting(nn.Linear):
    """A layer that gives other rows in every call."""

    n_calls = 0

    def forward(self, rows: Tensor) -> Tensor:
        self.n_calls += 1
        return super().forward(rows) + self.n_calls


class Neighbours(nn.Linear):
    """A layer whose rows depend on the rows beside them."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows - rows.mean(-2, keepdim=True))


class OneRow(nn.Linear):
    """A layer that gives one row, whatever it gets."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows[:, :1])


@pytest.mark.parametrize("kind", [Own, Drifting, Neighbours, OneRow])
def test_only_a_function_of_each_row_alone_is_used_as_given(kind: type[nn.Linear]) -> None:
    torch.manual_seed(0)
    reference = nn.ModuleDict({"proj": nn.Linear(WIDTH, 3)})
    root = nn.ModuleDict({"proj": kind(WIDTH, 3)})
    found = program_module(reference, root, "proj")
    assert (found is not None) is (kind is Own)
    if found is not None:
        name, given = found
        rows = torch.randn(1, 4, WIDTH)
        assert name == "proj"
        assert torch.equal(given(rows), root["proj"](rows))
