"""The tree of what was decoded: each branch with the tokens it chose, and how to meet them again.

A branch (`Line`) holds its own steps only, from its `fork_step` on; what lies before is its
parent's, as in the trace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexinspect_hooks.generation.mask_source import MaskSource


class StepCheckpoint(NamedTuple):
    """What is kept of a step to run it again: small, whatever the model's size.

    `random` is the sampler's state before the choice (None when greedy), `check` the checksum of
    the logits, 0-dim on the device.
    """

    token_id: int
    rng_state: Tensor | None
    logits_checksum: Tensor
    wall_ms: float


@dataclass(slots=True)
class BranchState:
    """One branch.

    `recomputed` says that its first own step fed the whole sequence anew. `forced` are tokens that
    its first own steps take in place of those drawn. `change` is what made it differ, as
    `BranchRecord` has it. `ended` is why it ended, empty while it may go on; `is_closed` tells
    whether the trace holds its end.
    """

    number: int
    source: MaskSource
    parent: BranchState | None = None
    fork_step: int = 0
    forced: tuple[int, ...] = ()
    recomputed: bool = False
    change: Mapping[str, Any] = field(default_factory=dict)
    rng_state: Tensor | None = None
    """The sampler's state behind the last step, once the line was left."""
    checkpoints: list[StepCheckpoint] = field(default_factory=list)
    end_reason: str = ""
    is_closed: bool = False

    @property
    def n_steps(self) -> int:
        """Steps of the line, those of its parents before the fork included."""
        return self.fork_step + len(self.checkpoints)

    def ancestry(self) -> Iterator[BranchState]:
        """Yield the line and its parents, newest first."""
        here: BranchState | None = self
        while here is not None:
            yield here
            here = here.parent

    def owner(self, step: int) -> BranchState:
        """Return the line that holds a step."""
        return next(line for line in self.ancestry() if step >= line.fork_step)

    def checkpoint(self, step: int) -> StepCheckpoint:
        """Return what is kept of a step, its own or a parent's. Raises `IndexError`."""
        owner = self.owner(step)
        return owner.checkpoints[step - owner.fork_step]

    def token_ids(self, n_steps: int) -> list[int]:
        """Return the tokens of the first `n_steps` steps. Raises `IndexError` past the end."""
        if n_steps > self.n_steps:
            raise IndexError(f"Branch {self.number} has {self.n_steps} steps, not {n_steps}.")
        token_ids: list[int] = []
        for line in self.ancestry():
            own = line.checkpoints[: max(n_steps - line.fork_step, 0)]
            token_ids[:0] = [mark.token_id for mark in own]
            n_steps = min(n_steps, line.fork_step)
        return token_ids

    def cache_origin(self, step: int) -> BranchState:
        """Return the line whose forward over the whole sequence the cache at a step stems from."""
        family = self.owner(step).ancestry()
        return next(line for line in family if line.recomputed or line.parent is None)

    def recomputed_at(self, step: int) -> bool:
        """Say whether a step of this very line fed the whole sequence anew."""
        return self.recomputed and step == self.fork_step

    def rng_state_after(self, step: int) -> Tensor | None:
        """Return the sampler's state behind a step."""
        here: BranchState = self
        while step + 1 >= here.n_steps and here.parent is not None and step < here.fork_step:
            here = here.parent
        return here.checkpoint(step + 1).rng_state if step + 1 < here.n_steps else here.rng_state

    def forced_at(self, step: int) -> int | None:
        """Return the token that a step had to take, None where it was free."""
        owner = self.owner(step)
        number = step - owner.fork_step
        return owner.forced[number] if number < len(owner.forced) else None

    def last_shared_step(self, other: BranchState, up_to: int) -> int:
        """Return the last step up to `upto` that both lines computed as one, -1 without any.

        From there on they differ in a token, in a mask, or in how their keys came to be.
        """
        last = min(up_to, other.n_steps - 1)
        while last >= 0 and self.owner(last) is not other.owner(last):
            last = max(self.owner(last).fork_step, other.owner(last).fork_step) - 1
        return last


_SAMPLES = 1024
"""Values per tensor of the weights that are looked at, evenly spread."""


@dataclass(frozen=True, slots=True)
class RunConditions:
    """What bits depend on beside the input: weights, threads, modes and precision of torch."""

    weights: str
    threads: int
    training: bool
    precision: str
    deterministic: bool

    @classmethod
    def current(cls, model: nn.Module) -> RunConditions:
        """Return the conditions under which `model` would run now."""
        return cls(
            weights=weights_fingerprint(model),
            threads=torch.get_num_threads(),
            training=model.training,
            precision=torch.get_float32_matmul_precision(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )

    def changes(self, now: RunConditions) -> list[str]:
        """Return a sentence for each condition that is another one now."""
        said = []
        if self.weights != now.weights:
            said.append("The weights of the model have changed.")
        if self.threads != now.threads:
            said.append(f"torch ran on {self.threads} threads, and now runs on {now.threads}.")
        if self.training != now.training:
            said.append(f"The model is in {'training' if now.training else 'evaluation'} mode now.")
        if self.precision != now.precision:
            said.append(f"Matrix products are of precision {now.precision} now.")
        if self.deterministic != now.deterministic:
            said.append("torch.use_deterministic_algorithms was switched.")
        return said


def weights_fingerprint(model: nn.Module) -> str:
    """Return a name for the weights as they are in memory: equal weights have equal names.

    Of each tensor up to `_SAMPLES` values are read, so that it takes milliseconds; and how often
    torch has written to it counts too, since a change may miss all of these values.
    """
    digest = hashlib.blake2b(digest_size=16)
    sums = []
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}{_version(tensor)}".encode())
        sums.append(checksum(_sample_values(tensor.detach())))
    if sums:
        digest.update(torch.stack([one.cpu() for one in sums]).numpy().tobytes())
    return digest.hexdigest()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _sample_values(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    return flat[:: max(flat.numel() // _SAMPLES, 1)]


_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(values: Tensor) -> Tensor:
    """Return a 0-dim int64 on the device that any changed bit of `values` changes.

    A sum of the bits as integers: unlike a hash it costs one pass and never waits for the device.
    Two changes may cancel each other; those of a wrong logit row do not.
    """
    whole = values.detach().contiguous().view(-1)
    if whole.is_complex():
        whole = torch.view_as_real(whole).view(-1)
    return whole.view(_AS_INTEGERS[whole.element_size()]).sum(dtype=torch.int64)
