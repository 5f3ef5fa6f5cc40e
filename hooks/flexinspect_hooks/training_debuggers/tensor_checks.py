"""Measurements of tensors and gradients at the three levels, as the debuggers' result types."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from flexinspect.records.debug_switches import DebugLevel
from flexinspect.records.training_step import ParameterGradient, TensorStats
from flexinspect_hooks.training.gradient_statistics import (
    Gradients,
    gradient_facts,
    gradient_of,
    tensor_norms,
)
from flexinspect_hooks.training.parameters import NamedParameters
from flexinspect_hooks.training.tensor_statistics import facts_of_tensors, tensor_facts
from flexinspect_hooks.training_debuggers.result_types import (
    GradientAnalysis,
    GradientInfo,
    TensorInfo,
)


def tensor_info(tensor: Tensor, name: str, level: DebugLevel) -> TensorInfo:
    """Measure one tensor at a level."""
    return tensor_infos({name: tensor}, level)[name]


def tensor_infos(tensors: Mapping[str, Tensor], level: DebugLevel) -> dict[str, TensorInfo]:
    """Measure tensors at a level.

    All of them are reduced before the first wait; at BASIC a finite norm rules out NaN and Inf.
    """
    if level.includes(DebugLevel.ADVANCED):
        facts = facts_of_tensors(tensors)
        return {name: _full_info(facts[name], tensor, level) for name, tensor in tensors.items()}
    infos, plain = {}, {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.is_sparse and tensor.numel():
            plain[name] = tensor.detach()
        else:
            infos[name] = _full_info(tensor_facts(tensor, name), tensor, level)
    infos |= _basic_infos(plain)
    return {name: infos[name] for name in tensors}


@torch.no_grad()
def _basic_infos(tensors: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    names, values = list(tensors), list(tensors.values())
    norms, means = tensor_norms(values), _means(values)
    return {
        name: (
            TensorInfo(name, *_tensor_header(tensor), False, False, mean, norm=norm)
            if math.isfinite(norm)
            else _full_info(tensor_facts(tensor, name), tensor, DebugLevel.BASIC)
        )
        for name, tensor, norm, mean in zip(names, values, norms, means, strict=True)
    }


def _means(tensors: Sequence[Tensor]) -> list[float]:
    """The mean of each tensor, with one transfer per device."""
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    numbers = [0.0] * len(tensors)
    for indices in by_device.values():
        means = [tensors[at].mean(dtype=_accumulation_dtype(tensors[at])) for at in indices]
        for index, mean in zip(indices, torch.stack(means).tolist(), strict=True):
            numbers[index] = mean
    return numbers


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _tensor_header(tensor: Tensor) -> tuple[tuple[int, ...], str, str, int]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return tuple(tensor.shape), dtype, str(tensor.device), tensor.nbytes


def _full_info(facts: TensorStats, tensor: Tensor, level: DebugLevel) -> TensorInfo:
    has_spread = level.includes(DebugLevel.ADVANCED)
    finds_index = facts.has_nonfinite and level is DebugLevel.EXTREME
    return TensorInfo(
        name=facts.name,
        shape=facts.shape,
        dtype=facts.dtype,
        device=facts.device,
        memory=facts.n_bytes,
        has_nan=facts.has_nan,
        has_inf=facts.has_inf,
        mean_value=facts.mean_value,
        std=facts.std_value if has_spread else None,
        min=facts.min_value if has_spread else None,
        max=facts.max_value if has_spread else None,
        n_nan=facts.n_nan,
        n_inf=facts.n_inf,
        first_bad=_first_bad(tensor) if finds_index else None,
    )


@torch.no_grad()
def _first_bad(tensor: Tensor) -> tuple[int, ...] | None:
    if tensor.is_sparse:
        return None
    return tuple(int(index) for index in (~tensor.detach().isfinite()).nonzero()[0].tolist())


def gradients_of(named: NamedParameters, level: DebugLevel) -> Gradients:
    """The statistics of every gradient; with the largest values from ADVANCED on."""
    return gradient_facts(named, with_max=level.includes(DebugLevel.ADVANCED))


def gradient_infos(named: Mapping[str, nn.Parameter], level: DebugLevel) -> dict[str, TensorInfo]:
    """Measure the gradients of parameters at a level."""
    grads = {name: gradient_of(one) for name, one in named.items()}
    return tensor_infos({name: grad for name, grad in grads.items() if grad is not None}, level)


def gradient_analysis(
    model: nn.Module,
    facts: Gradients,
    level: DebugLevel,
    explosion: float,
    vanishing: float,
) -> GradientAnalysis:
    """Every gradient by name; at EXTREME with the measurements of its tensor."""
    is_extreme = level is DebugLevel.EXTREME
    tensors = gradient_infos(dict(model.named_parameters()), level) if is_extreme else {}
    infos = {one.name: _gradient_info(one, explosion, vanishing, tensors) for one in facts}
    return GradientAnalysis(infos, facts.total)


def _gradient_info(
    facts: ParameterGradient, explosion: float, vanishing: float, tensors: Mapping[str, TensorInfo]
) -> GradientInfo:
    return GradientInfo(
        name=facts.name,
        norm=facts.norm,
        has_nan=facts.n_nan > 0,
        has_inf=facts.n_inf > 0,
        explodes=facts.explodes(explosion),
        vanishes=facts.is_matrix and facts.vanishes(vanishing),
        largest=facts.max,
        tensor=tensors.get(facts.name),
    )
