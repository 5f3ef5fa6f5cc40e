"""Copies of weights, with which the change of a step is measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flexinspect_hooks.training.measurement import MAX_SAMPLE, GradientMeter


class Mixed(nn.Module):
    """Parameters of several dtypes and sizes: one that is sampled, a scalar, and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.ones(3 * MAX_SAMPLE // 64, 64))
        self.short = nn.Parameter(torch.ones(7, 5, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.empty = nn.Parameter(torch.ones(0, 4))


def test_copies_of_weights_share_one_block_and_are_reused() -> None:
    model = Mixed()
    meter = GradientMeter(model)
    meter.copy_weights()
    blocks = {one.untyped_storage().data_ptr() for one in meter._copies if one.numel()}
    places = [one.data_ptr() for one in meter._copies]
    meter.measure_change()
    meter.copy_weights()
    assert len(blocks) == 1
    assert [one.data_ptr() for one in meter._copies] == places
    begins = sorted((one.data_ptr(), one.nbytes) for one in meter._copies)
    ends = [at + size for at, size in begins]
    assert all(end <= begin for end, (begin, _) in zip(ends, begins[1:], strict=False))


def test_the_change_of_each_dtype_is_measured() -> None:
    model = Mixed()
    meter = GradientMeter(model)
    meter.copy_weights()
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(1.5)
    meter.measure_change()
    assert meter.changes is not None
    for name, change in meter.changes.changes.items():
        expected = model.get_parameter(name).double().norm().item() / 3
        assert change == pytest.approx(expected, rel=1e-3)
