"""Model validation: parameters are consistent, parts and outputs are valid, memory is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import flexinspect_hooks.training_debuggers.measurements as measurements
from flexinspect.records.debug_switches import DebugLevel, DictDataclass
from flexinspect_hooks.training_debuggers.measurements import ComponentInfo, TensorInfo


class ModelReport(DictDataclass):
    """Whether a model has problems: see `PyTorchDebugger.validate_model`."""

    is_valid: bool
    problems: tuple[str, ...]
    components: dict[str, ComponentInfo]
    memory: dict[str, int]
    output: tuple[TensorInfo, ...] = ()


def model_report(
    model: nn.Module, inputs: Sequence[Any], named_inputs: Mapping[str, Any], level: DebugLevel
) -> tuple[ModelReport, Exception | None]:
    """Return what is wrong with a model, and what a run with these inputs raised, if any.

    Without inputs the model does not run.
    """
    modules = measurements.parts_of(model)
    parts = {name: measurements.component_info(one, name) for name, one in modules.items()}
    output: tuple[TensorInfo, ...] = ()
    error: Exception | None = None
    if inputs or named_inputs:
        try:
            with torch.no_grad():
                tensors = [*measurements.tensors_in(model(*inputs, **named_inputs))]
        except Exception as raised:
            error, tensors = raised, []
        named = {f"output {number}": one for number, one in enumerate(tensors)}
        output = tuple(measurements.tensor_infos(named, level).values())
    problems = tuple(measurements.weight_problems(parts.values()))
    problems += tuple(measurements.nonfinite_problems(output, ""))
    report = ModelReport(not problems, problems, parts, measurements.memory_of(model), output)
    return report, error
