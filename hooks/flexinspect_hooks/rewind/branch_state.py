"""The tree of branches: the tokens that each chose, and what is needed to compute them again.

A `BranchState` holds its own steps only, from its `fork_step` on; earlier steps are its parent's,
as in the trace. `CacheStore` keeps the KV caches of branches. transformers' dynamic layers create
new tensors at every step, so a cropped cache can share its tensors with the longer one.
"""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from msgspec import Struct, field
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from flexinspect.core.text import plural
from flexinspect_hooks.generation.mask_source import MaskSource
from flexinspect_hooks.python_internals.torch_private import tensor_version


class StepCheckpoint(NamedTuple):
    """What is kept of a step to repeat it; its size does not depend on the model.

    `rng_state` is the sampler's state before the choice (None when greedy), `logits_checksum` a
    0-dim tensor on the device (see `checksum`), `wall_ms` the duration of the step.
    """

    token_id: int
    rng_state: Tensor | None
    logits_checksum: Tensor
    wall_ms: float


class BranchState(Struct):
    """One branch of a generation.

    Attributes:
        forced: tokens that its first own steps take in place of those drawn.
        recomputed: whether its first own step recomputed the whole sequence.
        change: how it differs from its parent, as in `BranchRecord`.
        end_reason: why it ended, "" while it may continue.
        is_closed: whether its end is in the trace.
    """

    number: int
    source: MaskSource
    parent: BranchState | None = None
    fork_step: int = 0
    forced: tuple[int, ...] = ()
    recomputed: bool = False
    change: Mapping[str, Any] = field(default_factory=dict)
    rng_state: Tensor | None = None
    """The sampler's state after the last step, set when the decoder leaves the branch."""
    checkpoints: list[StepCheckpoint] = field(default_factory=list)
    end_reason: str = ""
    is_closed: bool = False

    @property
    def n_steps(self) -> int:
        """Steps of the branch, including those of its parents before the fork."""
        return self.fork_step + len(self.checkpoints)

    def ancestry(self) -> Iterator[BranchState]:
        """Yield the branch and its parents, newest first."""
        branch: BranchState | None = self
        while branch is not None:
            yield branch
            branch = branch.parent

    def owner(self, step: int) -> BranchState:
        """The branch that holds a step: this one or a parent."""
        return next(branch for branch in self.ancestry() if step >= branch.fork_step)

    def checkpoint(self, step: int) -> StepCheckpoint:
        """The checkpoint of a step, its own or a parent's. Raises `IndexError` past the end."""
        owner = self.owner(step)
        return owner.checkpoints[step - owner.fork_step]

    def token_ids(self, n_steps: int) -> list[int]:
        """The tokens of the first `n_steps` steps. Raises `IndexError` past the end."""
        if n_steps > self.n_steps:
            raise IndexError(f"Branch {self.number} has {self.n_steps} steps, not {n_steps}.")
        token_ids: list[int] = []
        for branch in self.ancestry():
            own = branch.checkpoints[: max(n_steps - branch.fork_step, 0)]
            token_ids[:0] = [checkpoint.token_id for checkpoint in own]
            n_steps = min(n_steps, branch.fork_step)
        return token_ids

    def cache_origin(self, step: int) -> BranchState:
        """The branch whose forward pass over the whole sequence began the cache at a step."""
        family = self.owner(step).ancestry()
        return next(branch for branch in family if branch.recomputed or branch.parent is None)

    def recomputed_at(self, step: int) -> bool:
        """Whether a step is this branch's own and recomputed the whole sequence."""
        return self.recomputed and step == self.fork_step

    def rng_state_after(self, step: int) -> Tensor | None:
        """The sampler's state after a step."""
        branch: BranchState = self
        while step + 1 >= branch.n_steps and branch.parent is not None and step < branch.fork_step:
            branch = branch.parent
        if step + 1 < branch.n_steps:
            return branch.checkpoint(step + 1).rng_state
        return branch.rng_state

    def last_shared_step(self, other: BranchState, up_to: int) -> int:
        """The last step up to `up_to` with the same tokens, masks and keys in both, -1 if none."""
        last = min(up_to, other.n_steps - 1)
        while last >= 0 and self.owner(last) is not other.owner(last):
            last = max(self.owner(last).fork_step, other.owner(last).fork_step) - 1
        return last

    def describe(self) -> str:
        """A sentence on how the branch differs from its parent."""
        assert self.parent is not None
        change = self.change
        where = f"Branch {self.number} leaves branch {self.parent.number} at step {self.fork_step}"
        if change.get("kind") == "replay":
            why = " ".join(change.get("why", ()))
            return f"{where}, because that step differs from its recording: {why}"
        if change.get("kind") == "token":
            replaced = change.get("instead_text")
            instead = "" if replaced is None else f" instead of {replaced!r}"
            text = change.get("text", change.get("token_id"))
            return f"Branch {self.number}: {text!r}{instead} at step {self.fork_step}."
        n_changed = int(change.get("changed_rows", 0))
        how = "no computed row changes, so only the cache is forked"
        if change.get("recomputed") and not n_changed:
            how = "no computed row changes, but all keys are computed again at that step"
        elif change.get("recomputed"):
            how = f"{plural(n_changed, 'computed row')} changed, so all keys are computed again"
        elif not self.fork_step:
            how = "its first step computes the prompt"
        return f"{where} under an edited mask ({'; '.join(change.get('edits', ()))}): {how}."


_SAMPLES = 1024  # values read from each weight tensor, evenly spaced


def run_conditions(model: nn.Module) -> dict[str, Any]:
    """What bit-equal results depend on besides the input, by the sentence on a change of it."""
    return {
        "The weights of the model have changed.": weights_fingerprint(model),
        "torch ran on {before} threads and now runs on {now}.": torch.get_num_threads(),
        "The model is now in {now} mode.": "training" if model.training else "evaluation",
        "The precision of matrix products is now {now}.": torch.get_float32_matmul_precision(),
        "torch.use_deterministic_algorithms was switched.": (
            torch.are_deterministic_algorithms_enabled()
        ),
    }


def changed_conditions(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A sentence for each of the `run_conditions` that differs."""
    changed = [text for text in before if before[text] != now[text]]
    return [text.format(before=before[text], now=now[text]) for text in changed]


def weights_fingerprint(model: nn.Module) -> str:
    """A fingerprint of the weights in memory: equal weights have equal fingerprints.

    It reads up to about `_SAMPLES` values of each tensor, which takes milliseconds. It includes the
    tensors' version counters, because a change may miss all of these values.
    """
    digest = hashlib.blake2b(digest_size=16)
    sums = []
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        version = 0 if tensor.is_inference() else tensor_version(tensor)
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}{version}".encode())
        values = tensor.detach().reshape(-1)
        sums.append(checksum(values[:: max(values.numel() // _SAMPLES, 1)]))
    if sums:
        digest.update(torch.stack([one.cpu() for one in sums]).numpy().tobytes())
    return digest.hexdigest()


_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(values: Tensor) -> Tensor:
    """The sum of the bits of `values` as integers: 0-dim int64, on their device.

    Any single changed bit changes it. Unlike a hash it costs one pass and never waits for the
    device. Two changes may cancel each other, but those of a wrong logit row do not.
    """
    whole = values.detach().contiguous().view(-1)
    if whole.is_complex():
        whole = torch.view_as_real(whole).view(-1)
    return whole.view(_AS_INTEGERS[whole.element_size()]).sum(dtype=torch.int64)


# -- KV caches -------------------------------------------------------------------------------------

MAX_STORED_CACHES = 3
"""Caches stored beside the live one: that of branch 0, and those of the latest branches."""

_SHAREABLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers that create new tensors at every step; other kinds write in place."""


def n_rows_of(cache: Any) -> int:
    """The number of rows that a cache has received."""
    return int(cache.get_seq_length())


def can_crop(cache: Any, n_rows: int) -> bool:
    """Whether a cache can be cropped to its first `n_rows` rows without computing anything.

    A sliding layer drops the keys that leave its window, so it can be cropped only before that.
    Layers of other kinds (static, recurrent) write in place, so they cannot be shared at all.
    """
    now = n_rows_of(cache)
    if n_rows == now:
        return all(type(layer) in _SHAREABLE_LAYERS for layer in cache.layers)
    return n_rows < now and all(_holds_all_keys(layer) for layer in cache.layers)


def _holds_all_keys(layer: Any) -> bool:
    if type(layer) is DynamicLayer:
        return True
    if type(layer) is DynamicSlidingWindowLayer:
        return bool(layer.cumulative_length < layer.sliding_window) and not layer.record_past
    return False


def crop_cache(cache: Any, n_rows: int) -> Any:
    """A cache of the first `n_rows` rows that shares its tensors with `cache`."""
    short = copy.copy(cache)
    short.layers = [copy.copy(layer) for layer in cache.layers]
    if n_rows >= n_rows_of(cache):
        return short
    for layer in short.layers:
        if layer.is_initialized:
            layer.keys, layer.values = layer.keys[..., :n_rows, :], layer.values[..., :n_rows, :]
            if layer.is_sliding:
                layer.cumulative_length = n_rows
    return short


def cache_bytes(caches: Iterable[Any]) -> int:
    """The bytes that caches keep alive together; shared tensors count once."""
    sizes: dict[int, int] = {}
    for cache in caches:
        for layer in cache.layers:
            # The size of a recurrent layer's states does not depend on the step.
            named = (getattr(layer, name, {}) for name in ("conv_states", "recurrent_states"))
            states = [state for states in named for state in states.values()]
            for tensor in (*_keys_and_values(layer), *filter(torch.is_tensor, states)):
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _keys_and_values(layer: Any) -> list[Tensor]:
    values = (getattr(layer, name, None) for name in ("keys", "values"))
    return [tensor for tensor in values if isinstance(tensor, Tensor)]


def row_bytes(cache: Any) -> int:
    """The bytes of one row of a cache over all layers, 0 for an empty cache."""
    tensors = [tensor for layer in cache.layers for tensor in _keys_and_values(layer)]
    tables = [tensor for tensor in tensors if tensor.dim() > 1 and tensor.shape[-2]]
    return sum(table.element_size() * table.numel() // table.shape[-2] for table in tables)


class CacheStore(OrderedDict[int, Any]):
    """The longest cache of each branch; branch 0 stays, the least recently used goes first."""

    def put(self, branch: int, cache: Any) -> None:
        """Store a cache, unless the store has one of the same branch that is as long."""
        known = self.get(branch)
        if known is None or n_rows_of(known) < n_rows_of(cache):
            self[branch] = cache
        self.move_to_end(branch)
        while len(self) > MAX_STORED_CACHES:
            self.pop(next(number for number in self if number != 0))
