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
from flexinspect_hooks.training_debuggers.result_types import ComponentInfo, TensorInfo


def component_info(module: nn.Module, name: str) -> ComponentInfo:
    """The sizes, dtypes and devices of a module; its weights are checked for NaN and Inf."""
    parameters = list(module.parameters())
    values = [one.detach() for one in _float_tensors(module)]
    has_nan, has_inf = _nan_and_inf(values)
    return ComponentInfo(
        name=name,
        kind=type(module).__name__,
        parameters=sum(one.numel() for one in parameters),
        trainable=sum(one.numel() for one in parameters if one.requires_grad),
        memory=sum(_sizes(module).values()),
        dtypes=tuple(sorted({str(one.dtype).removeprefix("torch.") for one in values})),
        devices=tuple(sorted({str(one.device) for one in values})),
        has_nan=has_nan,
        has_inf=has_inf,
    )


def component_infos(model: nn.Module) -> dict[str, ComponentInfo]:
    """The parts of a model: its children, or itself if it has none."""
    parts = dict(model.named_children()) or {"(model)": model}
    return {name: component_info(part, name) for name, part in parts.items()}


def weight_problems(infos: Iterable[ComponentInfo]) -> Iterator[str]:
    """Sentences on non-finite weights, and on dtypes and devices that differ between parts."""
    components = list(infos)
    yield from nonfinite_problems(components, "weights of ")
    for what in ("dtypes", "devices"):
        values = sorted({value for info in components for value in getattr(info, what)})
        if len(values) > 1:
            yield f"The weights are of several {what}: {', '.join(values)}."


def memory_of(model: nn.Module) -> dict[str, int]:
    """Bytes of the model's `parameters`, `gradients` and `buffers`, their `total`, and of the rest.

    `process` is the resident memory of the process, `system_used` of all processes; `cuda_*` are
    the allocator's figures, 0 without CUDA.
    """
    sizes, has_cuda = _sizes(model), torch.cuda.is_available()
    return {
        **sizes,
        "total": sum(sizes.values()),
        "process": int(psutil.Process().memory_info().rss),
        "system_used": int(psutil.virtual_memory().used),
        "cuda_allocated": torch.cuda.memory_allocated() if has_cuda else 0,
        "cuda_reserved": torch.cuda.memory_reserved() if has_cuda else 0,
    }


def _sizes(model: nn.Module) -> dict[str, int]:
    parameters = [*model.parameters()]
    return {
        "parameters": sum(one.nbytes for one in parameters),
        "gradients": sum(one.grad.nbytes for one in parameters if one.grad is not None),
        "buffers": sum(one.nbytes for one in model.buffers()),
    }


def tensors_in(output: object) -> Iterator[Tensor]:
    """Yield the tensors in a model's output: tuples, lists, dicts, model outputs."""
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
    """Whether any of the tensors has NaN or Inf."""
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


def nonfinite_problems(infos: Iterable[ComponentInfo | TensorInfo], of: str) -> Iterator[str]:
    """Sentences on NaN and Inf in parts of a model, or in its outputs."""
    for info in infos:
        for is_bad, what in ((info.has_nan, "NaN"), (info.has_inf, "Inf")):
            if is_bad:
                yield f"{what} in the {of}{info.name}."
