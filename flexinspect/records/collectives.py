"""The collective calls of a step, as two arrays of its record (docs/trace-format.md)."""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

DDP_GRADIENTS = "ddp_gradients"
"""The reduction of all gradients of a backward pass by DistributedDataParallel."""

KINDS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"),
    *("reduce", "gather", "scatter", "barrier", "send", "recv", DDP_GRADIENTS),
)
"""Kinds of collectives; a trace has their numbers, so that new ones are added at the end."""

COMMON_END = frozenset(
    {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", DDP_GRADIENTS}
)
"""Kinds that no rank can leave before the last one has entered."""

CALLS_STREAM = "collectives.calls"
"""int64 (calls, 3): the number of the kind in `KINDS`, the bytes that this rank sent, and a number
for the ranks of the process group."""

TIMES_STREAM = "collectives.times"
"""float64 (calls, 2): when this rank entered and left the call, in seconds since the epoch."""

WEIGHTS_STREAM = "training.weights"
"""int64 (groups,): the sum of the bits of a sample of each group's weights, as integers, after the
step: of rows with up to 65,536 values of each parameter, all of them in smaller ones."""

ALL_WEIGHTS_STREAM = "training.all_weights"
"""The same of all weights, in each 10th step at level basic, in each at higher ones."""


def group_number(ranks: Iterable[int]) -> int:
    """Return a number for the ranks of a process group, the same on each of them."""
    return crc32(",".join(map(str, sorted(ranks))).encode())
