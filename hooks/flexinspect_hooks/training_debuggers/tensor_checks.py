"""Measurements of tensors and gradients at the three levels, as the debuggers' result types."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from flexinspect.records.debug_switches import DebugLevel
from flexinspect_hooks.training.gradient_statistics import (
    Gradients,
    gradient_facts,
    gradient_of,
    real_values,
    reduce_batched,
    tensor_norms,
)
from flexinspect_hooks.training.parameters import NamedParameters
from flexinspect_hooks.training.tensor_statistics import TensorFacts, tensor_facts
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
    basic = {} if level.includes(DebugLevel.ADVANCED) else _finite_infos(tensors)
    others = {name: tensor for name, tensor in tensors.items() if name not in basic}
    facts = zip(others.items(), tensor_facts(others.values()), strict=True)
    infos = basic | {name: _full_info(name, tensor, one, level) for (name, tensor), one in facts}
    return {name: infos[name] for name in tensors}


@torch.no_grad()
def _finite_infos(tensors: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    """Norm and mean of the dense floating tensors whose norm is finite."""
    dense = {
        name: tensor.detach()
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not tensor.is_sparse and tensor.numel()
    }
    values = [*dense.values()]
    measured = zip(dense.items(), tensor_norms(values), _means(values), strict=True)
    return {
        name: TensorInfo(name, *_tensor_header(tensor), False, False, mean, norm=norm)
        for (name, tensor), norm, mean in measured
        if math.isfinite(norm)
    }


def _means(tensors: Sequence[Tensor]) -> list[float]:
    def stack_means(alike: list[Tensor]) -> Tensor:
        wide = torch.float64 if alike[0].dtype == torch.float64 else torch.float32
        return torch.stack([one.mean(dtype=wide) for one in alike])

    return reduce_batched(tensors, stack_means)


def _tensor_header(tensor: Tensor) -> tuple[tuple[int, ...], str, str, int]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return tuple(tensor.shape), dtype, str(tensor.device), real_values(tensor).nbytes


def _full_info(name: str, tensor: Tensor, facts: TensorFacts, level: DebugLevel) -> TensorInfo:
    has_spread = level.includes(DebugLevel.ADVANCED)
    finds_index = facts.n_nan + facts.n_inf > 0 and level is DebugLevel.EXTREME
    return TensorInfo(
        name,
        *_tensor_header(tensor),
        has_nan=facts.n_nan > 0,
        has_inf=facts.n_inf > 0,
        mean_value=facts.mean,
        std=facts.std if has_spread else None,
        min=facts.min if has_spread else None,
        max=facts.max if has_spread else None,
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
    infos = {
        one.name: GradientInfo(
            name=one.name,
            norm=one.norm,
            has_nan=one.n_nan > 0,
            has_inf=one.n_inf > 0,
            explodes=one.explodes(explosion),
            vanishes=one.is_matrix and one.vanishes(vanishing),
            largest=one.max,
            tensor=tensors.get(one.name),
        )
        for one in facts.rows
    }
    return GradientAnalysis(infos, facts.total)
