"""The rank of this process in a distributed run, so that each rank writes a trace of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist


class Rank(NamedTuple):
    """The number of this process, from 0, and how many there are."""

    rank: int
    world_size: int


def current_rank() -> Rank | None:
    """Return the rank in the default process group, or as `torchrun` set it; None if alone."""
    if dist.is_available() and dist.is_initialized():
        found = Rank(dist.get_rank(), dist.get_world_size())
    else:
        rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
        if not (rank.isdecimal() and size.isdecimal()):
            return None
        found = Rank(int(rank), int(size))
    return found if found.world_size > 1 else None


def rank_path(path: Path) -> Path:
    """Return the path for this rank: "run.flextrace" becomes "run-rank1.flextrace" on rank 1."""
    found = current_rank()
    if found is None:
        return path
    width = len(str(found.world_size - 1))  # so that names sort by rank
    return path.with_name(f"{path.stem}-rank{found.rank:0{width}}{path.suffix}")
