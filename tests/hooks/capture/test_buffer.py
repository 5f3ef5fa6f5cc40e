"""Tensors of a step on several devices, with the device of no data for the second one."""

from __future__ import annotations

import pytest
import torch

from flexinspect_hooks.capture.buffer import StepBuffer, stack_layers

CPU, OTHER = torch.device("cpu"), torch.device("meta")


def test_layers_on_several_devices_are_stacked_on_the_first() -> None:
    stacked = stack_layers([torch.zeros(2, 3, device=OTHER), torch.zeros(2, 3)])
    assert stacked.is_meta
    assert stacked.shape == (2, 2, 3)


def test_layers_of_different_shapes_are_not_stacked() -> None:
    with pytest.raises(RuntimeError, match="equal size"):
        stack_layers([torch.zeros(2), torch.zeros(3)])


def test_what_is_on_another_device_is_reduced_there_at_once() -> None:
    buffer = StepBuffer(CPU)
    buffer.defer(lambda xp, rows: {"sum": xp.sum(rows)}, rows=torch.ones(3, device=OTHER))
    assert buffer.tensor("sum").is_meta
