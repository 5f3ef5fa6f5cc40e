"""The rank of this process in a distributed run, and how a model is split over the ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from flexinspect.core.rank_environment import Rank, rank_of_environment


def current_rank() -> Rank | None:
    """Return the rank in the default process group, or as `torchrun` set it; None if alone."""
    set_by_launcher = rank_of_environment()
    if not (dist.is_available() and dist.is_initialized()):
        return set_by_launcher
    rank, size = dist.get_rank(), dist.get_world_size()
    if set_by_launcher is not None and set_by_launcher[:2] == (rank, size):
        return set_by_launcher
    return Rank(rank, size) if size > 1 else None


def is_split(tensor: Tensor) -> bool:
    """Return whether each rank has a part of a tensor only."""
    return any(placement.is_shard() for placement in getattr(tensor, "placements", ()))


def split_facts(model: nn.Module) -> dict[str, Any]:
    """Return over how many ranks a model's layers and its parameters are split; none if not at all.

    `tp_size` is the number of ranks that share each layer (tensor parallel). `shards` is the number
    of ranks that share each parameter: those of tensor parallelism, or of FSDP, whose layers see
    whole parameters.
    """
    split: list[Any] = [one for one in model.parameters() if is_split(one)]
    shards = max((math.prod(one.device_mesh.shape) for one in split), default=1)
    tp_size = getattr(model, "tp_size", None)
    if not isinstance(tp_size, int) or isinstance(tp_size, bool):
        is_gathered = any(type(one).__name__.startswith("FSDP") for one in model.modules())
        tp_size = 1 if is_gathered else shards
    facts = {"tp_size": tp_size, "shards": shards}
    return {name: n for name, n in facts.items() if n > 1}


def parallel_facts(model_facts: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of tensor and data parallel for the manifest; none in a single process."""
    rank = current_rank()
    if rank is None:
        return {}
    tp_size = int(model_facts.get("tp_size", 1))
    return {"tp_size": tp_size, "dp_size": max(rank.world_size // tp_size, 1)}
