"""Models and their parts: sizes, dtypes, devices, and whether their weights are finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import chain

import psutil
import torch
from torch import Tensor, nn

from flexinspect_hooks.training.gradient_statistics import tensor_norms
from flexinspect_hooks.training.tensor_statistics import model_bytes
from flexinspect_hooks.training_debuggers.result_types import ComponentInfo, TensorInfo


def component_info(module: nn.Module, name: str) -> ComponentInfo:
    """Return what a module is and holds; its weights are looked at for NaN and Inf."""
    parameters = list(module.parameters())
    values = [one.detach() for one in _float_tensors(module)]
    has_nan, has_inf = _nan_and_inf(values)
    return ComponentInfo(
        name=name,
        kind=type(module).__name__,
        parameters=sum(one.numel() for one in parameters),
        trainable=sum(one.numel() for one in parameters if one.requires_grad),
        memory=model_bytes(module).total,
        dtypes=tuple(sorted({str(one.dtype).removeprefix("torch.") for one in values})),
        devices=tuple(sorted({str(one.device) for one in values})),
        has_nan=has_nan,
        has_inf=has_inf,
    )


def component_infos(model: nn.Module) -> dict[str, ComponentInfo]:
    """Return the parts of a model: its children, or itself where it has none."""
    parts = dict(model.named_children()) or {"(model)": model}
    return {name: component_info(part, name) for name, part in parts.items()}


def weight_problems(infos: Iterable[ComponentInfo]) -> Iterator[str]:
    """Say in sentences what does not go together in some parts."""
    found = list(infos)
    for info in found:
        for is_sick, what in ((info.has_nan, "NaN"), (info.has_inf, "Inf")):
            if is_sick:
                yield f"{what} in the weights of {info.name}."
    for what, values in (("dtypes", "dtypes"), ("devices", "devices")):
        all_of = sorted({value for info in found for value in getattr(info, values)})
        if len(all_of) > 1:
            yield f"The weights are of several {what}: {', '.join(all_of)}."


def memory_of(model: nn.Module | None) -> dict[str, int]:
    """Return bytes: of the model's parameters, gradients and buffers, `total`, and around it.

    `process` is the resident memory of the process, `system_used` of all processes; `cuda_*` are
    the allocator's figures, 0 without CUDA.
    """
    found = {"parameters": 0, "gradients": 0, "buffers": 0, "total": 0}
    if model is not None:
        held = model_bytes(model)
        sizes = (held.parameters, held.gradients, held.buffers, held.total)
        found = dict(zip(found, sizes, strict=True))
    has_cuda = torch.cuda.is_available()
    return found | {
        "process": int(psutil.Process().memory_info().rss),
        "system_used": int(psutil.virtual_memory().used),
        "cuda_allocated": torch.cuda.memory_allocated() if has_cuda else 0,
        "cuda_reserved": torch.cuda.memory_reserved() if has_cuda else 0,
    }


def tensors_in(output: object) -> Iterator[Tensor]:
    """Return the tensors in what a forward returned: tuples, lists, dicts, model outputs."""
    yield from _tensors_in(output, set())


def _tensors_in(output: object, above: set[int]) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
        return
    parts: Iterable[object] = ()
    if isinstance(output, dict):
        parts = output.values()
    elif isinstance(output, (tuple, list)):
        parts = output
    elif hasattr(output, "__dict__") and not isinstance(output, (nn.Module, Enum, type)):
        parts = vars(output).values()
    if id(output) not in above:
        for part in parts:
            yield from _tensors_in(part, above | {id(output)})


def has_nonfinite(tensors: Iterable[Tensor]) -> bool:
    """Say whether any of some tensors has a NaN or Inf."""
    return any(_nan_and_inf([one.detach() for one in tensors]))


def _float_tensors(module: nn.Module) -> Iterator[Tensor]:
    for one in chain(module.parameters(), module.buffers()):
        if one.is_floating_point() and one.numel():
            yield one


def _nan_and_inf(values: list[Tensor]) -> tuple[bool, bool]:
    values = [
        one.float() if one.dtype.itemsize == 1 else one  # float8 has no norm of its own
        for one in values
        if one.is_floating_point() and one.numel() and not one.is_meta
    ]
    norms = tensor_norms(values) if values else []
    bad = [one for one, norm in zip(values, norms, strict=True) if not math.isfinite(norm)]
    has_nan = any(bool(one.isnan().any()) for one in bad)
    return has_nan, any(bool(one.isinf().any()) for one in bad)


def output_problems(infos: Iterable[TensorInfo]) -> Iterator[str]:
    """Say which outputs of a model are not finite."""
    for info in infos:
        for is_bad, what in ((info.has_nan, "NaN"), (info.has_inf, "Inf")):
            if is_bad:
                yield f"{what} in the {info.name}."
