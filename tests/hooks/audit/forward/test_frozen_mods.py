"""Functions of the program that are kept as they were."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flexinspect_hooks.audit.forward.frozen_mods import frozen


class Bias:
    def __init__(self) -> None:
        self.past = 1
        self.table = torch.zeros(2)

    def score_mod(self, score: int) -> int:
        return score + self.past


def test_a_method_keeps_the_attributes_of_its_object() -> None:
    bias = Bias()
    kept = frozen(bias.score_mod)
    bias.past = 5
    assert (kept(1), bias.score_mod(1)) == (2, 6)
    assert kept.__self__.table is bias.table


def test_a_closure_keeps_plain_values() -> None:
    past, table = 1, torch.zeros(2)

    def score_mod(score: int, factor: int = 2, *, shift: int = 0) -> Any:
        return score * factor + past + shift, table

    kept, part = frozen(score_mod), frozen(partial(score_mod, shift=4))
    past = 5
    assert kept(1) == (3, table)
    assert kept(1)[1] is table
    assert part(1)[0] == 7
    assert score_mod(1)[0] == 7


def test_other_callables_are_returned_as_they_are() -> None:
    assert frozen(len) is len
    assert frozen(torch.relu) is torch.relu
