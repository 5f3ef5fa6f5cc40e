"""Tensors of a step on several devices, with the device of no data for the second one."""

from __future__ import annotations

import pytest
import torch

from flexinspect_hooks.capture.buffer import (
    MODIFIED,
    StepBuffer,
    stack_layers,
    unless_modified,
)

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


@pytest.mark.parametrize("has_graph", [True, False])
def test_a_tensor_with_a_graph_is_read_all_the_same(has_graph: bool) -> None:
    rows = torch.ones(3, requires_grad=True) * 2
    buffer = StepBuffer(CPU, has_graph=has_graph)
    buffer.defer(lambda xp, rows: {"sum": xp.sum(rows[0])}, rows=[rows])
    assert buffer.values()["sum"] == 6


def test_reductions_of_tensors_that_were_modified_say_only_that() -> None:
    rows = torch.ones(3)
    guard = unless_modified([rows])
    buffer = StepBuffer(CPU)
    for name in ("first", "second"):
        buffer.defer(guard(lambda xp, rows, name=name: {name: xp.sum(rows)}), rows=rows)
    rows += 1
    assert list(buffer.values()) == [MODIFIED]
