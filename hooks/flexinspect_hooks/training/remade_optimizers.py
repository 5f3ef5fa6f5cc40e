"""Whether a program makes its optimizer anew, for each step or each pass over the data."""

from __future__ import annotations

import weakref
from typing import Any

from msgspec import Struct, field
from torch.optim import Optimizer

from flexinspect_hooks.training.model_checks import Failure
from flexinspect_hooks.training.optimizer_states import state_of, version_of

N_REMADE = 6  # optimizers in succession, each of which made one step
N_ROUNDS = 4  # optimizers in succession, of which each but the last made the same number of steps
MAX_COMPARED = 4  # parameters by which those of two optimizers are compared
MAX_KNOWN = 256  # sets of parameters


class _Trained(Struct, eq=False):
    """A set of parameters, and the optimizer that made the last step with it."""

    optimizer: weakref.ref[Optimizer]
    kind: type
    parameters: list[weakref.ref[Any]]
    n_parameters: int
    n_steps: int = 0
    n_remade: int = 1  # optimizers in succession that made one step each, with this one
    n_rounds: int = 1  # optimizers in succession that made as many steps each, with this one
    n_steps_before: int = 0  # of the optimizer before
    options: str = ""
    made_at: int = 0
    stepped_at: int = 0
    versions: list[int | None] = field(default_factory=list)
    """Of the first parameters after the first step, and by how much the second one raised them."""
    increases: list[int] = field(default_factory=list)
    has_state: bool = False


class RemadeOptimizers:
    """Counts optimizers in succession with the same parameters, of which each makes a few steps.

    It is one step, or the same number of steps with the same options, as in each pass over the
    data, which may be meant. A later one must have been made after the step of the one before, and
    nothing else may have changed the weights in between: several optimizers of one model, and
    programs that load weights for each of many short trainings, are no error. Neither are
    optimizers without a state.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Trained] = {}
        self._made_at: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._running: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._n_steps = 0

    def on_made(self, optimizer: Optimizer) -> None:
        """An optimizer was made."""
        self._made_at[optimizer] = self._n_steps

    def before_step(self, optimizer: Optimizer) -> list[Failure]:
        """An optimizer is about to step; the `step` of a subclass may call that of its base."""
        chosen = _parameters(optimizer)
        if not chosen or optimizer in self._running:
            return []
        self._running.add(optimizer)
        key, last = id(chosen[0]), self._known.get(id(chosen[0]))
        if last is not None and last.optimizer() is optimizer:
            return []
        now = _Trained(
            weakref.ref(optimizer),
            type(optimizer),
            [*map(weakref.ref, chosen)],
            sum(len(group["params"]) for group in optimizer.param_groups),
            made_at=self._made_at.get(optimizer, -1),
            options=repr(getattr(optimizer, "defaults", "")),
        )
        if last is not None and _continues(last, now, chosen):
            _count(last, now)
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[key] = now
        kind = type(optimizer).__name__
        if now.n_rounds == N_ROUNDS:
            text = f"{kind} is made anew after every {now.n_steps_before} steps, with the same "
            text += f"parameters and options ({N_ROUNDS} so far): the state of an optimizer begins "
            text += "empty, so its moments and its count of steps are lost each time"
            facts = {"optimizer": kind, "n": N_ROUNDS, "steps": now.n_steps_before}
            facts["is_uncertain"] = True  # a program may restart its moments on purpose
            return [("optimizer-remade", text, facts)]
        if now.n_remade != N_REMADE:
            return []
        text = f"Each of the last {N_REMADE} steps was made by a new {kind} with the same "
        text += "parameters: the state of an optimizer begins empty, so no step builds on the "
        text += "moments of the steps before it"
        return [("optimizer-remade", text, {"optimizer": kind, "n": N_REMADE})]

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer has made a step."""
        chosen = _parameters(optimizer)
        if not chosen or optimizer not in self._running:
            return
        self._running.discard(optimizer)
        self._n_steps += 1
        now = self._known.get(id(chosen[0]))
        if now is None or now.optimizer() is not optimizer:
            return
        now.n_steps += 1
        now.stepped_at = self._n_steps
        if now.n_steps == 1:
            now.versions = [*map(version_of, chosen)]
            now.has_state = bool(state_of(optimizer, chosen[0]))
        elif now.n_steps == 2:
            pairs = zip(map(version_of, chosen), now.versions, strict=True)
            now.increases = [b - a for b, a in pairs if a is not None and b is not None]


def _count(last: _Trained, now: _Trained) -> None:
    """Count an optimizer that continues another one."""
    now.n_steps_before = last.n_steps
    if last.n_steps == 1:
        now.n_remade = last.n_remade + 1
    elif last.options == now.options and last.n_steps_before in (0, last.n_steps):
        now.n_rounds = last.n_rounds + 1


def _continues(last: _Trained, now: _Trained, chosen: list[Any]) -> bool:
    """Whether an optimizer takes the place of another one, whose steps alone changed the weights.

    Each step raises the versions of the parameters by the same number.
    """
    is_next = last.n_steps > 0 and last.has_state and now.made_at >= last.stepped_at
    is_same = (last.kind, last.n_parameters) == (now.kind, now.n_parameters)
    return (
        is_next
        and is_same
        and len(last.parameters) == len(chosen)
        and all(ref() is one for ref, one in zip(last.parameters, chosen, strict=True))
        and _versions_after(last) == [*map(version_of, chosen)]
    )


def _versions_after(last: _Trained) -> list[int | None] | None:
    """The versions of the first parameters after the last step, None if they are not known."""
    if last.n_steps == 1:
        return last.versions
    if len(last.increases) < len(last.versions):
        return None
    n, pairs = last.n_steps - 1, zip(last.versions, last.increases, strict=True)
    return [None if first is None else first + n * more for first, more in pairs]


def _parameters(optimizer: Optimizer) -> list[Any]:
    """The first parameter of each of the first groups."""
    groups = optimizer.param_groups[:MAX_COMPARED]
    return [group["params"][0] for group in groups if group["params"]]
