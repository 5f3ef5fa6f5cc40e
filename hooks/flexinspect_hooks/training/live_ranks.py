"""Compares the steps of replicas: after reduction, all ranks have the same gradients and weights.

Each rank puts the norms, the learning rates and the sums of the bits of the weights of a step into
the store of the process group, and reads those of the others when they are there: no rank waits for
another, and no collective is called, so ranks that part cannot hang. It runs in the writer thread.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flexinspect.records.training_step import (
    LOSS_FROM_BACKWARD,
    LOSS_FROM_OUTPUT,
    TrainingStepRecord,
)
from flexinspect_hooks.python_internals import torch_private
from flexinspect_hooks.python_internals.live_objects import live_objects

TOLERANCE = 1e-4  # relative difference of norms that are equal but for the order of a sum
N_FIRST_STEPS, INTERVAL = 32, 10  # steps of which each is compared, and then every so many
N_AGREEING = 3  # steps that must agree without DistributedDataParallel, before one may differ
N_SAME_LOSSES = 2  # in succession, after which ranks have the same data
MAX_PENDING = 64  # steps of this rank whose counterparts have not come yet

LOCAL_LOSSES = (LOSS_FROM_BACKWARD, LOSS_FROM_OUTPUT)
"""Sources of losses that no rank has averaged with those of others."""

Facts = dict[str, list[float]]
Found = tuple[str, dict[str, Any]]  # a sentence, and facts
NAMES = {
    "before": "gradient norm before clipping",
    "norm": "gradient norm",
    "rates": "learning rate",
}


class LiveRanks:
    """Compares the steps of this rank with those of rank 0, and on rank 0 with all others.

    What is found is a sentence and facts, of which "check" names the check. `groups` returns the
    names of the groups of parameters, in the order of the sums of their weights.
    """

    def __init__(
        self, model: nn.Module, generation: int, groups: Callable[[], Sequence[str]]
    ) -> None:
        self._generation, self._groups = generation, groups
        self._pending: deque[tuple[int, Facts]] = deque(maxlen=MAX_PENDING)
        self._n_agreeing = 0
        self._same_weights: dict[tuple[int, int], int] = {}
        """Of each other rank and group: the last step after which its weights were the same."""
        self._same_losses: dict[int, list[tuple[int, float]]] = {}
        """Of each other rank: steps in succession whose losses are the same, with the loss."""
        self._store = torch_private.default_store() if _is_distributed() else None
        wrapper = None if self._store is None else _wrapper_of(model)
        self._is_replicated = wrapper is not None
        self._has_own_data = wrapper is not None and _is_of_all_ranks(wrapper)
        if self._store is not None:
            self._rank, size = dist.get_rank(), dist.get_world_size()
            self._others = range(1, size) if self._rank == 0 else (0,)

    def compares(self, step: int) -> bool:
        """Whether a step is one that the ranks compare, so that each of them measures it."""
        return self._store is not None and (step < N_FIRST_STEPS or step % INTERVAL == 0)

    def compare(
        self, step: int, record: TrainingStepRecord, weights: Sequence[int] = ()
    ) -> Found | None:
        """Add a step; return a sentence and facts about the first step that differs, if any.

        `weights` are the sums of the bits of each group after the step.
        """
        if self._store is None or record.total_norm is None or record.is_skipped:
            return None
        if not self.compares(step):
            return self.finish() if self._pending else None  # what the others wrote since
        before = record.norm_before_clip
        facts: Facts = {
            "before": [] if before is None else [before],
            "norm": [record.total_norm],
            "rates": [*record.learning_rates],
            "loss": [record.loss] if record.loss_source in LOCAL_LOSSES else [],
            "weights": [*map(int, weights)] if self._is_replicated else [],
        }
        try:
            self._store.set(self._key(step, self._rank), json.dumps(facts))
            self._pending.append((step, facts))
            return self._compare_pending()
        except Exception:  # the process group was destroyed
            self._store = None
            return None

    def finish(self) -> Found | None:
        """Compare what the other ranks have written by now."""
        try:
            return None if self._store is None else self._compare_pending()
        except Exception:
            return None

    def _key(self, step: int, rank: int) -> str:
        return f"flexinspect/training/{self._generation}/{step}/{rank}"

    def _compare_pending(self) -> Found | None:
        while self._pending and self._store is not None:
            step, own = self._pending[0]
            keys = [self._key(step, rank) for rank in self._others]
            if not self._store.check(keys):
                return None
            self._pending.popleft()
            is_equal = True
            for rank, key in zip(self._others, keys, strict=True):
                other = json.loads(self._store.get(key).decode())
                name = next((one for one in NAMES if not _agree(own[one], other[one])), None)
                is_equal = is_equal and name is None
                if name is not None and (self._is_replicated or self._n_agreeing >= N_AGREEING):
                    return self._describe(step, rank, name, own[name], other[name])
                if parted := self._parted_weights(step, rank, own, other):
                    return parted
                if self._has_own_data and (first := self._same_data(step, rank, own, other)):
                    return first
            self._n_agreeing += is_equal
        return None

    def _parted_weights(self, step: int, rank: int, own: Facts, other: Facts) -> Found | None:
        """Find weights that were the same after an earlier step.

        So the norms need not be compared in each step: ranks that parted have other weights since.
        Groups that each rank has for itself, as experts may be, never had the same weights.
        """
        pairs = zip(own["weights"], other.get("weights", ()), strict=False)
        for at, (mine, others) in enumerate(pairs):
            if mine == others:
                self._same_weights[rank, at] = step
                continue
            before = self._same_weights.get((rank, at))
            if before is None:
                continue
            name = dict(enumerate(self._groups())).get(at, f"group {at}")
            first = before + 1
            when = f"in step {step}" if first == step else f"between steps {first} and {step}"
            text = f"The ranks parted {when}: the weights of {name} "
            text += f"were the same on rank {self._rank} and rank {rank} after step {before}, and "
            text += f"are not after step {step}"
            self._store = None  # later steps only follow
            facts = {"first_step": first, "ranks": [self._rank, rank], "group": name}
            return text, {"check": "ranks-differ", "quantity": "weights", **facts}
        return None

    def _same_data(self, step: int, rank: int, own: Facts, other: Facts) -> Found | None:
        """Find equal losses of two steps in succession: then the ranks had the same batches.

        The losses of a step differ from those of the one before, or they may be constant.
        """
        same = self._same_losses.setdefault(rank, [])
        if not own["loss"] or own["loss"] != other.get("loss") or not math.isfinite(own["loss"][0]):
            same.clear()
            return None
        same.append((step, own["loss"][0]))
        if len(same) < N_SAME_LOSSES or same[-1][1] == same[-2][1]:
            return None
        self._has_own_data = False  # later steps only follow
        first = same[0][0]
        text = f"Rank {self._rank} and rank {rank} have the same loss to the last bit in steps "
        text += f"{first} to {step}: both are trained on the same batches, as without a "
        text += "DistributedSampler, or with the same shard"
        return text, {"check": "same-data", "first_step": first, "ranks": [self._rank, rank]}

    def _describe(
        self, step: int, rank: int, name: str, own: list[float], other: list[float]
    ) -> Found:
        shown = [", ".join(f"{one:.6g}" for one in values) or "none" for values in (own, other)]
        text = f"The ranks part in step {step}: the {NAMES[name]} is {shown[0]} on rank "
        text += f"{self._rank} and {shown[1]} on rank {rank}"
        if not own or not other:
            text += ": only one of them clips"
        self._store = None  # later steps only follow
        facts = {
            "check": "ranks-differ",
            "first_step": step,
            "ranks": [self._rank, rank],
            "quantity": NAMES[name],
        }
        return text, {**facts, "values": [own, other]}


def _agree(own: list[float], other: list[float]) -> bool:
    return len(own) == len(other) and all(
        one == another
        or math.isclose(one, another, rel_tol=TOLERANCE)
        or (math.isnan(one) and math.isnan(another))
        for one, another in zip(own, other, strict=True)
    )


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _wrapper_of(model: nn.Module) -> Any:
    """The `DistributedDataParallel` that reduces the gradients of a model, None if none does."""
    own = {id(one) for one in model.parameters()}
    wrappers = live_objects(DistributedDataParallel)
    each = (one for one in wrappers if not own.isdisjoint(map(id, one.parameters())))
    return next(each, None)


def _is_of_all_ranks(wrapper: Any) -> bool:
    """Whether every rank is a replica; with tensor parallelism, some have the same batches."""
    group = getattr(wrapper, "process_group", None)
    return group is not None and dist.get_world_size(group) == dist.get_world_size()
