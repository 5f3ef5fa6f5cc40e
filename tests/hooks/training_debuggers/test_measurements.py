"""Parts of a model that have no values to check, or unusual ones."""

from __future__ import annotations

from enum import Enum

import torch
from torch import nn

from flexinspect_hooks.training_debuggers.measurements import component_info, tensors_in


class Mode(Enum):
    FAST = 1


def test_weights_without_values_are_counted_and_not_looked_at() -> None:
    info = component_info(nn.Linear(2, 2, device="meta"), "unet")
    assert (info.parameters, info.has_nan) == (6, False)


def test_nan_in_float8_weights_is_found() -> None:
    module = nn.Linear(2, 2)
    with torch.no_grad():
        module.weight[0, 0] = float("nan")
    info = component_info(module.to(torch.float8_e4m3fn), "unet")
    assert (info.has_nan, info.has_inf) == (True, False)


def test_an_output_that_holds_itself_and_a_constant_gives_its_tensors_once() -> None:
    tensor = torch.ones(2)
    output: dict[str, object] = {"mode": Mode.FAST, "values": [tensor]}
    output["self"] = output
    (found,) = tensors_in(output)
    assert found is tensor
