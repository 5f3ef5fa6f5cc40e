"""Whether the state of an optimizer builds up: its moments, and its count of steps.

A state that is emptied or loaded between all steps makes Adam an optimizer of signs and takes the
momentum from SGD, and the loss still falls. One that a step does not change has the same effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.optim import Optimizer

from flexinspect.core.text import plural
from flexinspect_hooks.training.gradient_statistics import NamedParameters, local_part
from flexinspect_hooks.training.model_checks import Failure
from flexinspect_hooks.training.optimizer_states import (
    Pace,
    StateSnapshot,
    sample,
    state_of,
    version_of,
)

N_IN_SUCCESSION = 3  # steps that must fail
N_WATCHED = 1  # parameter that is looked at in each step
MAX_SWEPT = 64  # parameters that are looked at in the steps of a sweep
SWEEP_INTERVAL, SWEEP_BEGIN, SWEEP_END = 1000, 3, 9  # steps from one sweep to the next
MAX_VALUE_SNAPSHOTS = 8  # steps in which values of a parameter are compared, until the next sweep
MAX_COMPARED = 8  # parameters whose values are compared at a time
MIN_GRADIENT = 1e-12  # below it, a second moment in float32 may be 0
MIN_STEPS_TO_LOSE = 3  # that a state must have counted or seen, to be reported as lost
_ZERO_AT_FIRST = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg")


class _Watched(Struct, eq=False):
    """A parameter whose state is looked at, and for how many steps in succession it failed."""

    name: str
    parameter: nn.Parameter
    group: int
    start: StateSnapshot | None = None
    end: StateSnapshot | None = None
    restart: str = ""  # how the state started anew before the step, "" if it did not
    is_changed_outside: bool = False  # the weights were changed before the step, too
    n_snapshots: int = 0  # with values, that remain
    may_copy: bool = True
    n_seen: int = 0
    n_restarts: int = 0
    n_still: int = 0
    n_left: int = 0
    n_stuck: int = 0
    is_certain: bool = True  # that the last restart was none of a program that loads its weights
    is_lost: bool = False  # once, in the middle of the run

    is_unseen: bool = False  # the step that runs: its start was as expected
    n_unseen: int = 0  # steps since `end`
    pace: Pace | None = None

    def is_on_pace(self, optimizer: Optimizer) -> bool:
        """Whether nothing but steps changed the count since the last look."""
        if self.end is None or self.pace is None or self.n_restarts:
            return False
        return self.end.is_current_after(self.n_unseen, self.pace, optimizer, self.parameter)

    def pass_unseen(self, *, is_skipped: bool) -> None:
        """The step has ended, at whose start the count was as expected."""
        if not is_skipped:
            self.n_unseen += 1
            self.n_seen += 1
        self.n_still = self.n_left = self.n_stuck = 0
        self.is_lost = False

    def catch_up(self) -> None:
        """Let `end` be what it was after the last step."""
        if self.n_unseen and self.end is not None and self.pace is not None:
            self.end = self.end.after(self.n_unseen, self.pace)
        self.n_unseen = 0

    def suspect(self) -> None:
        """Compare values in the next steps."""
        if self.may_copy:
            self.may_copy, self.n_snapshots = False, MAX_VALUE_SNAPSHOTS


class StateCheck:
    """Looks at the state of some parameters before and after each step of an optimizer."""

    def __init__(self, optimizer: Optimizer | None) -> None:
        self._optimizer = optimizer
        self._watched: list[_Watched] = []
        self._trained: NamedParameters = ()
        self._has_begun = self._is_swept = False

    def before_step(self, *, is_brief: bool = False) -> None:
        """The optimizer is about to step; `is_brief` looks at the counts of the state alone."""
        if self._optimizer is None:
            return
        self._has_begun = True
        for one in self._watched:
            one.is_unseen = is_brief and one.is_on_pace(self._optimizer)
            if one.is_unseen:
                continue
            one.catch_up()
            start = self._snapshot(one, is_brief)
            one.restart, one.is_changed_outside = "", False
            if one.end is not None:
                one.restart = self._restart(one, start)
                one.is_changed_outside = one.end.version != version_of(one.parameter)
            one.start = start

    def after_step(
        self, number: int, trained: NamedParameters, *, is_skipped: bool, is_brief: bool = False
    ) -> list[Failure]:
        """The step has ended; returns what was found in it and in those before."""
        has_begun, self._has_begun = self._has_begun, False
        if self._optimizer is None or not has_begun:
            return []
        seen = [one for one in self._watched if not one.is_unseen]
        for one in self._watched:
            if one.is_unseen:
                one.pass_unseen(is_skipped=is_skipped)
        if is_brief and not seen:
            return []
        ends = [self._snapshot(one, is_brief) for one in seen]
        judge = self._judge_restarts if is_brief else self._judge
        failures = [] if is_skipped else judge(number, seen, ends)
        for one, end in zip(seen, ends, strict=True):
            one.end = end
            one.n_snapshots = max(one.n_snapshots - 1, 0)
        if not is_brief:
            self._choose(number, trained)
        return failures

    # -- which parameters are watched --------------------------------------------------------------

    def _choose(self, number: int, trained: NamedParameters) -> None:
        at = number % SWEEP_INTERVAL
        is_swept = SWEEP_BEGIN <= at < SWEEP_END
        is_searched = not self._watched and at < SWEEP_BEGIN
        if is_swept == self._is_swept and trained is self._trained and not is_searched:
            return
        begins = is_swept and not self._is_swept
        self._trained, self._is_swept = trained, is_swept
        n = MAX_SWEPT if is_swept else N_WATCHED
        known = {} if begins else {id(one.parameter): one for one in self._watched}
        chosen = {id(one.parameter): one for one in self._watched if self._is_failing(one)}
        groups = self._groups() if trained else {}
        distance = -(-len(trained) // n) or 1
        spread = trained[number // SWEEP_INTERVAL % distance :: distance]  # others in each sweep
        for named in (*_first_of_groups(trained, groups, n), *spread):
            key = id(named.parameter)
            if len(chosen) < n and key in groups and self._has_state(named.parameter):
                one = known.get(key) or _Watched(named.name, named.parameter, groups[key])
                chosen.setdefault(key, one)
        self._watched = [*chosen.values()]
        for one in self._watched:
            one.end = one.end or self._snapshot(one)

    def _groups(self) -> dict[int, int]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return {id(p): at for at, group in enumerate(groups) for p in group["params"]}

    def _has_state(self, one: nn.Parameter) -> bool:
        if self._optimizer is None or one.grad is None or not one.numel():
            return False
        return bool(state_of(self._optimizer, one))

    @staticmethod
    def _is_failing(one: _Watched) -> bool:
        return max(one.n_restarts, one.n_still, one.n_left, one.n_stuck) > 0

    def _snapshot(self, one: _Watched, is_brief: bool = False) -> StateSnapshot | None:
        if self._optimizer is None:
            return None
        if is_brief:
            return StateSnapshot.brief(self._optimizer, one.parameter)
        return StateSnapshot.at(self._optimizer, one.parameter, with_values=one.n_snapshots > 0)

    # -- between two steps -------------------------------------------------------------------------

    def _restart(self, one: _Watched, start: StateSnapshot | None) -> str:
        """How the state of a parameter was put back since the last step, "" if it was not."""
        end, before = one.end, one.start
        if end is None:
            return ""
        if start is None:
            return "is emptied"
        if not start.is_brief and end.moments.keys() - start.moments.keys():
            return "is emptied"
        if start.count is not None and end.count is not None and start.count < end.count:
            return f"goes back from step {end.count:g} to step {start.count:g}"
        names = end.moments.keys() - start.same_moments(end)
        if start.is_brief or not names or len(names) < len(end.moments):
            return ""
        self._suspect(one)
        if start.values is None or end.values is None:
            return ""
        if all(_is_zero(start.values[name]) for name in names):
            was_zero = all(_is_zero(end.values[name]) for name in names)
            is_zero = not was_zero and self._are_zero(one, names)
            return "is set to 0" if is_zero else ""
        if before is None or before.values is None:
            return ""
        is_back = all(
            name in before.values
            and torch.equal(start.values[name], before.values[name])
            and not torch.equal(start.values[name], end.values[name])
            for name in names
        )
        return "goes back to earlier values" if is_back else ""

    def _are_zero(self, one: _Watched, names: Iterable[str]) -> bool:
        """Whether all values of moments are 0, not only those of the sample."""
        state = {} if self._optimizer is None else state_of(self._optimizer, one.parameter)
        return all(_is_zero(local_part(state[name])) for name in names if name in state)

    def _suspect(self, one: _Watched) -> None:
        if sum(other.n_snapshots > 0 for other in self._watched) < MAX_COMPARED:
            one.suspect()

    # -- a step ------------------------------------------------------------------------------------

    def _judge_restarts(
        self, number: int, seen: Sequence[_Watched], ends: Sequence[StateSnapshot | None]
    ) -> list[Failure]:
        for one, end in zip(seen, ends, strict=True):
            one.is_lost = False
            one.n_still = one.n_left = one.n_stuck = 0
            if one.parameter.grad is None or end is None:
                one.n_restarts = 0
                continue
            self._count_restarts(one)
            one.n_seen += 1
        return [*self._restarts(number), *self._losses(number)]

    def _judge(
        self, number: int, seen: Sequence[_Watched], ends: Sequence[StateSnapshot | None]
    ) -> list[Failure]:
        is_any_moved = False
        for one, end in zip(seen, ends, strict=True):
            one.is_lost = False
            if one.parameter.grad is None or end is None:
                one.n_restarts = one.n_still = one.n_left = one.n_stuck = 0
                continue
            self._count_restarts(one)
            self._count_stuck(one, end)
            one.pace = None if one.start is None else one.start.pace_to(end)
            is_still = self._is_still(one, end)
            has_moved = _has_moved(one.start, end)
            is_any_moved |= has_moved is True and is_still is False
            one.n_still = one.n_still + 1 if is_still and has_moved else 0
            one.n_left = one.n_left + 1 if is_still and has_moved is False else 0
            one.n_seen += 1
        failures = [
            *self._restarts(number),
            *self._losses(number),
            *self._still(number),
            *self._stuck(number, ends),
            *(self._left(number) if is_any_moved else []),
        ]
        if not failures and number % SWEEP_INTERVAL == SWEEP_END - 1:
            failures += self._zeros(number)
        return failures

    @staticmethod
    def _count_restarts(one: _Watched) -> None:
        if one.restart:
            one.n_restarts += 1
            one.is_certain = not one.is_changed_outside
            return
        is_loss = one.n_restarts == 1 and one.n_seen > MIN_STEPS_TO_LOSE
        one.is_lost = is_loss and one.is_certain
        one.n_restarts = 0

    @staticmethod
    def _count_stuck(one: _Watched, end: StateSnapshot) -> None:
        last, start = one.end, one.start
        is_stuck = (
            last is not None
            and start is not None
            and end.count is not None
            and last.count == start.count == end.count
            and start.version != end.version
        )
        one.n_stuck = one.n_stuck + 1 if is_stuck else 0

    def _is_still(self, one: _Watched, end: StateSnapshot) -> bool | None:
        """Whether a step left all moments as they were; None if that is unknown."""
        start = one.start
        if start is None or not end.moments or end.moments.keys() != start.moments.keys():
            return False
        if len(end.same_moments(start)) < len(end.moments):
            return False
        self._suspect(one)
        if start.values is None or end.values is None or "gradient" not in end.values:
            return None
        last = None if one.end is None or one.end.values is None else one.end.values.get("gradient")
        gradient = end.values["gradient"]
        if not bool((gradient.abs() > MIN_GRADIENT).any()):
            return None
        if last is not None and torch.equal(last, gradient):
            return None  # a moment of a constant gradient arrives at its limit
        return all(torch.equal(start.values[name], end.values[name]) for name in end.moments)

    # -- findings ----------------------------------------------------------------------------------

    @property
    def _kind(self) -> str:
        return type(self._optimizer).__name__

    def _is_of_torch(self) -> bool:
        """Whether the optimizer is one of torch, or derived from one."""
        bases = type(self._optimizer).__mro__
        return any(b.__module__.startswith("torch.optim") and b is not Optimizer for b in bases)

    def _restarts(self, number: int) -> list[Failure]:
        failed = [one for one in self._watched if one.n_restarts >= N_IN_SUCCESSION]
        if not failed:
            return []
        text = f"The state of {self._kind} for {_names(failed)} {failed[0].restart} before each of "
        text += f"the steps {number - N_IN_SUCCESSION + 1} to {number}: no step builds on the "
        text += "moments of the steps before it"
        facts = _facts(failed, how=failed[0].restart)
        facts["is_uncertain"] = not failed[0].is_certain
        return [("state-restarts", text, facts)]

    def _losses(self, number: int) -> list[Failure]:
        lost = [one for one in self._watched if one.is_lost]
        if not lost:
            return []
        text = f"The state of {self._kind} for {_names(lost)} started anew between the steps "
        text += f"{number - 2} and {number - 1}: its moments and its count of steps are lost"
        return [("state-lost", text, _facts(lost))]

    def _still(self, number: int) -> list[Failure]:
        failed = [one for one in self._watched if one.n_still >= N_IN_SUCCESSION]
        if not failed:
            return []
        names = " and ".join(sorted(failed[0].end.moments)) if failed[0].end else "The state"
        text = f"The steps {number - N_IN_SUCCESSION + 1} to {number} of {self._kind} change "
        text += f"{_names(failed)}, and leave {names} in the state as before, although the "
        text += "gradient is not 0"
        return [("state-still", text, _facts(failed, moments=names))]

    def _left(self, number: int) -> list[Failure]:
        failed = [o for o in self._watched if o.n_left >= N_IN_SUCCESSION and self._rate(o) > 0]
        if not failed:
            return []
        its = "its" if len(failed) == 1 else "their"
        text = f"The steps {number - N_IN_SUCCESSION + 1} to {number} of {self._kind} leave "
        text += f"{_names(failed)} and {its} state as before, although {its} gradient and learning "
        text += "rate are not 0, and change other parameters"
        return [("state-left", text, _facts(failed, is_uncertain=not self._is_of_torch()))]

    def _stuck(self, number: int, ends: Sequence[StateSnapshot | None]) -> list[Failure]:
        each = zip(self._watched, ends, strict=True)
        counts = [(o, end.count) for o, end in each if end and o.n_stuck >= N_IN_SUCCESSION]
        is_of_torch = self._is_of_torch()
        failed = [one for one, count in counts if count or is_of_torch]
        if not failed:
            return []
        count = next(count for one, count in counts if one is failed[0])
        text = f"{self._kind} counts step {count:g} for {_names(failed)} in each of the steps "
        text += f"{number - N_IN_SUCCESSION + 1} to {number}, which change the parameter: what "
        text += "depends on the count, such as the correction of the bias, stands still"
        return [("state-counter", text, _facts(failed, is_uncertain=not is_of_torch))]

    def _zeros(self, number: int) -> list[Failure]:
        """Find moments that are still 0 after several steps, by the values of some parameters."""
        failed: list[tuple[_Watched, list[str]]] = []
        for one in self._watched[:MAX_COMPARED]:
            if _has_moved(one.start, self._snapshot(one)) and (names := self._zero_moments(one)):
                failed.append((one, names))
        if not failed:
            return []
        ones, moments = [one for one, _ in failed], " and ".join(failed[0][1])
        text = f"{moments} of {_names(ones)} in the state of {self._kind} is still 0 after step "
        text += f"{number}, although the gradient is not 0 and the parameter changes"
        return [("state-still", text, _facts(ones, moments=moments))]

    def _zero_moments(self, one: _Watched) -> list[str]:
        grad = one.parameter.grad
        if self._optimizer is None or grad is None or grad.is_sparse:
            return []
        gradient = sample(grad)
        places = gradient.abs() > MIN_GRADIENT
        if not bool(places.any()):
            return []
        group = self._optimizer.param_groups[one.group]
        state = state_of(self._optimizer, one.parameter)
        return [
            name
            for name in _ZERO_AT_FIRST
            if isinstance(value := state.get(name), Tensor)
            and value.shape == grad.shape
            and value.dtype in (torch.float32, torch.float64)
            and not _may_stay_zero(name, group)
            and not bool(sample(value)[places].any())
        ]

    def _rate(self, one: _Watched) -> float:
        groups: Any = [] if self._optimizer is None else self._optimizer.param_groups
        try:
            return float(groups[one.group]["lr"])
        except (IndexError, KeyError, TypeError, ValueError):
            return math.nan


def _may_stay_zero(name: str, group: Any) -> bool:
    """Whether the options of a group let a moment stay 0."""
    if name == "momentum_buffer":
        return bool(group.get("momentum") == 0 or group.get("dampening") == 1)
    betas = group.get("betas")
    return name == "exp_avg" and isinstance(betas, (tuple, list)) and not betas[0]


def _has_moved(start: StateSnapshot | None, end: StateSnapshot | None) -> bool | None:
    """Whether a step changed the parameter; None if that is unknown."""
    if start is None or end is None or start.version != end.version:
        return start is not None and end is not None
    if start.values is None or end.values is None:
        return None
    return not torch.equal(start.values["parameter"], end.values["parameter"])


def _is_zero(values: Tensor) -> bool:
    return not bool(values.any())


def _first_of_groups(trained: NamedParameters, groups: dict[int, int], n: int) -> NamedParameters:
    """The first trained parameter of each group of the optimizer."""
    first: dict[int, Any] = {}
    for one in trained:
        first.setdefault(groups.get(id(one.parameter), -1), one)
        if len(first) == n:
            break
    return [*first.values()]


def _names(failed: Sequence[_Watched]) -> str:
    more = len(failed) - 1
    return failed[0].name + f" and {plural(more, 'other parameter')}" * (more > 0)


def _facts(failed: Sequence[_Watched], **facts: Any) -> dict[str, Any]:
    return {"names": [one.name for one in failed][:100], **facts}
