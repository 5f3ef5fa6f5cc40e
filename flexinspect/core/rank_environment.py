"""The rank of a process in a distributed run, as `torchrun` sets it, and the name of its trace."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

RANK_SUFFIX = re.compile(r"-rank(\d+)$")
"""The end of a trace's name that tells its rank."""


class Rank(NamedTuple):
    """The number of this process, from 0, and how many there are.

    `local_rank` is its number on its machine, None if unknown.
    """

    rank: int
    world_size: int
    local_rank: int | None = None


def rank_of_environment(environment: Mapping[str, str] = os.environ) -> Rank | None:
    """Return the rank that `torchrun` set; None outside of it, and for a world of one process."""
    rank, size, local = (
        int(text) if (text := environment.get(name, "")).isdecimal() else None
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    )
    return None if rank is None or size is None or size < 2 else Rank(rank, size, local)


def rank_path(path: Path, rank: Rank | None) -> Path:
    """Return the path for a rank: "run.flextrace" becomes "run-rank1.flextrace" for rank 1."""
    if rank is None:
        return path
    width = len(str(rank.world_size - 1))  # so that names sort by rank
    return path.with_name(f"{path.stem}-rank{rank.rank:0{width}}{path.suffix}")


def rank_facts(
    rank: Rank | None, environment: Mapping[str, str] = os.environ
) -> dict[str, int | str]:
    """Return the facts of a rank for the manifest of its trace; none without a rank.

    `launch` names the start of all processes that belong together: `torchrun` gives each start the
    same identifier, address and number of restarts.
    """
    if rank is None:
        return {}
    facts: dict[str, int | str] = {"rank": rank.rank, "world_size": rank.world_size}
    if rank.local_rank is not None:
        facts["local_rank"] = rank.local_rank
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    launch = "/".join(environment.get(name, "") for name in names).strip("/")
    return facts | {"hostname": socket.gethostname()} | ({"launch": launch} if launch else {})
