"""Measurements of tensors, gradients and models for the debuggers.

The results are dataclasses that are also dicts (see `DictDataclass`). Sizes are in bytes. A value
that a level does not measure is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from itertools import chain
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from flexinspect.core.errors import summarize_error
from flexinspect.records.debug_switches import DebugLevel, DictDataclass
from flexinspect_hooks.training import gradient_statistics
from flexinspect_hooks.training.gradient_statistics import real_values, tensor_norms


class TensorInfo(DictDataclass):
    """One tensor. `std`, `min` and `max` are measured from ADVANCED on, over finite values.

    `mean_value` is the mean of the finite values (NaN without any), `norm` the Euclidean norm.
    `first_bad` is the index of the first NaN or Inf (EXTREME).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    memory: int
    has_nan: bool
    has_inf: bool
    mean_value: float
    std: float | None = None
    min: float | None = None
    max: float | None = None
    norm: float | None = None
    n_nan: int = 0
    n_inf: int = 0
    first_bad: tuple[int, ...] | None = None


class ComponentInfo(DictDataclass):
    """One part of a model or of a pipeline."""

    name: str
    kind: str
    parameters: int
    trainable: int
    memory: int
    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    has_nan: bool
    has_inf: bool


def tensor_infos(tensors: Mapping[str, Tensor], level: DebugLevel) -> dict[str, TensorInfo]:
    """Measure tensors at a level; at BASIC a finite norm rules out NaN and Inf."""
    has_spread, is_extreme = level.includes(DebugLevel.ADVANCED), level is DebugLevel.EXTREME
    infos = {} if has_spread else _finite_infos(tensors)
    others = {name: tensor for name, tensor in tensors.items() if name not in infos}
    measured = gradient_statistics.tensor_facts(others.values())
    for (name, tensor), facts in zip(others.items(), measured, strict=True):
        is_bad = facts.n_nan + facts.n_inf > 0
        spread = {"std": facts.std, "min": facts.min, "max": facts.max} if has_spread else {}
        infos[name] = _tensor_info(
            name,
            tensor,
            has_nan=facts.n_nan > 0,
            has_inf=facts.n_inf > 0,
            mean_value=facts.mean,
            n_nan=facts.n_nan,
            n_inf=facts.n_inf,
            first_bad=_first_bad(tensor) if is_bad and is_extreme else None,
            **spread,
        )
    return {name: infos[name] for name in tensors}


@torch.no_grad()
def _finite_infos(tensors: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    dense = {name: one.detach() for name, one in tensors.items() if not one.is_sparse}
    dense = {n: one for n, one in dense.items() if one.is_floating_point() and one.numel()}
    values = [*dense.values()]
    norms, means = tensor_norms(values), gradient_statistics.reduce_batched(values, _stack_means)
    return {
        name: _tensor_info(name, tensor, has_nan=False, has_inf=False, mean_value=mean, norm=norm)
        for (name, tensor), norm, mean in zip(dense.items(), norms, means, strict=True)
        if math.isfinite(norm)
    }


def _stack_means(tensors: list[Tensor]) -> Tensor:
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return torch.stack([one.mean(dtype=wide) for one in tensors])


def _tensor_info(name: str, tensor: Tensor, **measured: Any) -> TensorInfo:
    dtype, n_bytes = str(tensor.dtype).removeprefix("torch."), real_values(tensor).nbytes
    return TensorInfo(name, tuple(tensor.shape), dtype, str(tensor.device), n_bytes, **measured)


@torch.no_grad()
def _first_bad(tensor: Tensor) -> tuple[int, ...] | None:
    return None if tensor.is_sparse else tuple((~tensor.isfinite()).nonzero()[0].tolist())


def gradient_infos(named: Mapping[str, nn.Parameter], level: DebugLevel) -> dict[str, TensorInfo]:
    """Measure the gradients of parameters at a level."""
    grads = {name: gradient_statistics.gradient_of(one) for name, one in named.items()}
    return tensor_infos({name: grad for name, grad in grads.items() if grad is not None}, level)


def component_info(module: nn.Module, name: str) -> ComponentInfo:
    """The sizes, dtypes and devices of a module; its weights are checked for NaN and Inf."""
    parameters = [*module.parameters()]
    values = [one for one in (*parameters, *module.buffers()) if one.is_floating_point()]
    values = [one.detach() for one in values if one.numel()]
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


def parts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The parts of a model by name: its children, or itself if it has none."""
    return dict(model.named_children()) or {"(model)": model}


def weight_problems(infos: Iterable[ComponentInfo]) -> Iterator[str]:
    """Sentences on non-finite weights, and on dtypes and devices that differ between parts."""
    components = list(infos)
    yield from nonfinite_problems(components, "weights of ")
    for what in ("dtypes", "devices"):
        values = sorted({*chain.from_iterable(getattr(info, what) for info in components)})
        if len(values) > 1:
            yield f"The weights are of several {what}: {', '.join(values)}."


def nonfinite_problems(infos: Iterable[ComponentInfo | TensorInfo], of: str) -> Iterator[str]:
    """Sentences on NaN and Inf in parts of a model, or in its outputs."""
    for info in infos:
        for is_bad, what in ((info.has_nan, "NaN"), (info.has_inf, "Inf")):
            if is_bad:
                yield f"{what} in the {of}{info.name}."


def describe_forward_error(error: BaseException, model: nn.Module) -> str:
    """A sentence about an exception of a forward pass, with the innermost module that raised it."""
    names, where = {id(one): name for name, one in model.named_modules()}, ""
    frame = error.__traceback__
    while frame is not None:
        module = frame.tb_frame.f_locals.get("self")
        if name := names.get(id(module), ""):
            where = f" in {name} ({type(module).__name__})"
        frame = frame.tb_next
    return f"The forward pass failed{where}: {summarize_error(error)}."


def logits_of(output: Any) -> Any:
    """The logits of an output: `.logits`, the key "logits", or the output itself."""
    if isinstance(output, Mapping):
        return output.get("logits", output)
    return getattr(output, "logits", output)


def memory_of(*models: nn.Module) -> dict[str, int]:
    """Bytes of the models' `parameters`, `gradients`, `buffers`, their `total`, and of the rest.

    `process` is the resident memory of the process, `system_used` of all processes; `cuda_*` are
    the allocator's figures, 0 without CUDA.
    """
    parts = [_sizes(model) for model in models]
    sizes = {name: sum(part[name] for part in parts) for name in parts[0]}
    return {
        **sizes,
        "total": sum(sizes.values()),
        "process": int(psutil.Process().memory_info().rss),
        "system_used": int(psutil.virtual_memory().used),
        "cuda_allocated": torch.cuda.memory_allocated(),
        "cuda_reserved": torch.cuda.memory_reserved(),
    }


def _sizes(model: nn.Module) -> dict[str, int]:
    parameters = [*model.parameters()]
    return {
        "parameters": sum(one.nbytes for one in parameters),
        "gradients": sum(one.grad.nbytes for one in parameters if one.grad is not None),
        "buffers": sum(one.nbytes for one in model.buffers()),
    }


def tensors_in(output: object, above: frozenset[int] = frozenset()) -> Iterator[Tensor]:
    """Yield the tensors in an output at any depth; `above` are ids of what contains it."""
    parts: Iterable[object] = ()
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        parts = output.values()
    elif isinstance(output, (tuple, list)):
        parts = output
    elif hasattr(output, "__dict__") and not isinstance(output, (nn.Module, Enum, type)):
        parts = vars(output).values()
    if id(output) not in above:
        for part in parts:
            yield from tensors_in(part, above | {id(output)})


def has_nonfinite(output: object) -> bool:
    """Whether any of the tensors in an output has NaN or Inf."""
    return any(_nan_and_inf([one.detach() for one in tensors_in(output)]))


def _nan_and_inf(values: list[Tensor]) -> tuple[bool, bool]:
    values = [
        one.float() if one.dtype.itemsize == 1 else one  # float8 has no norm of its own
        for one in values
        if one.is_floating_point() and one.numel() and not one.is_meta
    ]
    norms = zip(values, tensor_norms(values), strict=True)
    bad = [one for one, norm in norms if not math.isfinite(norm)]
    return any(bool(one.isnan().any()) for one in bad), any(bool(one.isinf().any()) for one in bad)
