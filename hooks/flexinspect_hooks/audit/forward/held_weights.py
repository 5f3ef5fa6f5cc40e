"""The weights of a model as each generation ran with them, which a program may change between two.

A generation is judged with its own weights. Replaced parameters are held, not copied; what was
overwritten in place is lost. Counters of in-place changes do not see writes through `.data`, so
some values of each parameter are kept, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from msgspec import Struct
from torch import Tensor, nn

from flexinspect.core.errors import FlexInspectError
from flexinspect_hooks.audit.forward.weights import Snapshot, snapshot, write_count
from flexinspect_hooks.loading.placement import free_memory

MAX_HELD_SHARE = 0.25
"""Weights that take more than this share of the free memory are not kept alive."""
MODIFIED = "The weights were modified after the steps ran."
_DELETED = "The program deleted the model, whose weights are too large to be kept for it."
_NOT_HELD = (
    "The forwards ran in training mode with gradients, as those of a training, so their weights "
    "were not kept. Call model.eval() before a generation."
)
_MAX_STATES = 8
"""States of the weights that are kept; the generations of older ones are not judged."""
_SAMPLED = 512
"""Values of each parameter whose sum is kept."""


class _State(Struct):
    """The weights from one generation on.

    `owners` are the parameters, `writes` counts in-place changes of them, and `sample` has a sum of
    each, (parameters,). `held` is None for weights that are too large to be held.
    """

    generation: int
    owners: list[weakref.ref[nn.Parameter]]
    n_bytes: int
    writes: int
    sample: Tensor
    held: Snapshot | None = None

    def is_of(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether these are the parameters, with the same values as far as is known."""
        return (
            len(parameters) == len(self.owners)
            and all(_is_same(one(), p) for one, p in zip(self.owners, parameters, strict=True))
            and self.is_intact(parameters)
        )

    def is_intact(self, parameters: Sequence[Tensor]) -> bool:
        """Whether nothing was written into the parameters since."""
        return self.writes == write_count(parameters) and torch.equal(
            self.sample, _sample(parameters)
        )


class HeldWeights:
    """The states of the weights of one model, and from which generation on each was used."""

    def __init__(self) -> None:
        self._states: list[_State] = []
        self._first_known = 0
        self.find_model: Callable[[], nn.Module | None] = lambda: None
        """Returns the model if it is alive, for weights that are too large to be held."""
        self.moved_of: Callable[[nn.Module], dict[str, nn.Parameter]] = lambda model: {}
        """Returns the parameters that modules of the program hold, by the names that they had."""

    def note(self, generation: int, model: nn.Module) -> None:
        """Hold the weights of a generation that began, if they are not those of the one before."""
        parameters = list(model.parameters())
        if not parameters or (self._states and self._states[-1].is_of(parameters)):
            return
        if len(self._states) == _MAX_STATES:
            self._states.pop(0)
            self._first_known = self._states[0].generation
        owners, n_bytes = [weakref.ref(one) for one in parameters], _bytes_of(parameters)
        writes, sample = write_count(parameters), _sample(parameters)
        state = _State(generation, owners, n_bytes, writes, sample)
        known = {id(one()) for other in self._states if other.held for one in other.owners}
        new = [one for one in parameters if id(one) not in known]
        replaced = sum(one.n_bytes for one in self._states if one.held and new)
        if replaced + n_bytes <= MAX_HELD_SHARE * free_bytes(parameters[0].device):
            state.held = snapshot(model, self.moved_of(model))
        self._states.append(state)

    def hold(self, held: Snapshot) -> None:
        """Use these weights for all generations."""
        parameters = held.parameters
        writes, sample = write_count(parameters), _sample(parameters)
        self._states = [_State(0, [], held.n_bytes, writes, sample, held)]

    def of(self, generation: int) -> Snapshot:
        """Return the weights of a generation.

        Raises `FlexInspectError` if they were modified since, or if the model, whose weights were
        too large to be held, is gone.
        """
        those = [one for one in self._states if one.generation <= generation]
        if not those:
            raise FlexInspectError(_NOT_HELD)
        if generation < self._first_known:
            raise FlexInspectError(MODIFIED)
        state = those[-1]
        if state.held is None:
            model = self.find_model()
            if model is None:
                raise FlexInspectError(_DELETED)
            if not state.is_of(list(model.parameters())):
                raise FlexInspectError(MODIFIED)
            state.held = snapshot(model, self.moved_of(model))
        elif not state.is_intact(state.held.parameters):
            raise FlexInspectError(MODIFIED)
        return state.held

    def clear(self) -> None:
        """Hold nothing any more."""
        self._states.clear()
        self._first_known = 0


def _is_same(one: Tensor | None, other: Tensor) -> bool:
    # Offloading makes new parameters without data for each forward.
    return one is other or other.is_meta


def _bytes_of(parameters: Sequence[Tensor]) -> int:
    return sum(one.nbytes for one in parameters)


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device in bytes, a guess of 16 GB where it cannot be read."""
    return free_memory(str(device)) or 1 << 34


@torch.no_grad()
def _sample(parameters: Sequence[Tensor]) -> Tensor:
    """Return a sum over some values of each parameter, (parameters,)."""
    sums = [_sampled_sum(one) for one in parameters]
    on_devices: dict[torch.device, list[int]] = {}
    for index, one in enumerate(sums):
        on_devices.setdefault(one.device, []).append(index)
    result = torch.zeros(len(sums), dtype=torch.float64, device="cpu")
    for indices in on_devices.values():  # one synchronisation per device
        result[indices] = torch.stack([sums[index] for index in indices]).cpu()
    return result


def _sampled_sum(parameter: Tensor) -> Tensor:
    # Sharded parameters, and those of quantisation libraries, may be of any kind.
    if type(parameter) in (nn.Parameter, Tensor) and not parameter.is_meta:
        with suppress(RuntimeError, TypeError, NotImplementedError):
            values = parameter.detach().reshape(-1)
            chosen = values[:: max(len(values) // _SAMPLED, 1)].double()
            weights = torch.arange(1, len(chosen) + 1, device=chosen.device, dtype=chosen.dtype)
            return (chosen * weights).sum().nan_to_num()
    return torch.zeros((), dtype=torch.float64, device="cpu")
