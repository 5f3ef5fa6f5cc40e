"""Whether the updates of a step arrive at the parameters, and whether one is out of proportion."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from flexinspect.core.text import plural
from flexinspect_hooks.python_internals.torch_private import tensor_version
from flexinspect_hooks.training.gradient_statistics import (
    NamedParameter,
    NamedParameters,
    gradient_of,
    local_part,
)
from flexinspect_hooks.training.model_checks import Failure, held_by_others

MAX_VALUE_CHECKS = 3  # steps in which values are compared that did not seem to change
REMOTE_INTERVAL = 100  # steps between two comparisons of values on a device, which wait for it
MAX_SAMPLES, SAMPLE_SIZE = 8, 16  # parameters whose update is checked, and values of each
N_ROUNDING_STEPS = 8  # first steps in which updates of small dtypes are compared
ROUNDED_SIZE = 256  # values of each parameter
MIN_ROUNDED = 64  # values that have a gradient
LOST_SHARE = 0.75  # of the values, that do not change
MIN_SIBLINGS = 4  # parameters of the same name in other layers
OUTLIER_RATIO = 100.0  # of an update to that of every sibling


class UpdateCheck:
    """Whether a step changes some of the parameters that it should.

    An in-place operation counts up the version of a parameter. An optimizer that updates through
    `.data` does not, so values are compared if the version did not change.
    """

    def __init__(self) -> None:
        self._before: list[tuple[nn.Parameter, int | None, Tensor | None]] = []
        self._copies = False
        self._n_still = self._n_compared = 0

    def before(self, trained: NamedParameters, *, is_expected: bool) -> None:
        """Note the state of some parameters before a step that is expected to change them."""
        self._before = []
        if not is_expected:
            return
        # Fewer are looked at where all have gradients: each is a wait for memory.
        chosen = _with_gradient(trained, MAX_SAMPLES)
        if len(chosen) < min(len(trained), MAX_SAMPLES):
            chosen = _with_gradient(trained, 4 * MAX_SAMPLES)
            chosen = chosen[:: -(-len(chosen) // MAX_SAMPLES) or 1]
        self._n_compared += self._copies
        is_remote = not all(one.is_cpu for one in chosen)
        is_rare = self._n_compared > MAX_VALUE_CHECKS and self._n_compared % REMOTE_INTERVAL > 0
        if is_remote and is_rare:
            return
        for one in chosen:
            copy = self._values(one).clone() if self._copies else None
            self._before.append((one, tensor_version(one), copy))

    @staticmethod
    def _values(parameter: nn.Parameter) -> Tensor:
        return parameter.detach().reshape(-1)[:SAMPLE_SIZE]

    def is_still(self) -> bool:
        """Whether none of them has changed, neither in this step nor in the one before."""
        before, self._before = self._before, []
        if not before:
            return False
        if any(tensor_version(one) != version for one, version, _ in before):
            self._copies, self._n_still = False, 0
            return False
        if not self._copies:
            self._copies = True
            return False
        is_still = all(
            copy is not None and torch.equal(copy, self._values(one)) for one, _, copy in before
        )
        self._n_still = self._n_still + 1 if is_still else 0
        return self._n_still > 0


class OutsideCheck:
    """Whether something else than the optimizer changes its parameters between two steps.

    It sees operations in place. Those through `.data`, which loops use to average or to exchange
    weights, do not count up the version of a parameter.

    To find other optimizers all objects of the process are looked at, which takes a part of a
    second. So the answer for a parameter is kept, and after the first failure nothing is compared:
    a loop that clamps its weights changes them in each step.
    """

    def __init__(self) -> None:
        self._known: list[tuple[NamedParameter, int | None]] = []
        self._has_failed = False
        # By identity: tensors compare by value.
        self._held_elsewhere: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def forget(self) -> None:
        """A step has ended whose versions are not noted."""
        self._known = []

    def after_step(self, trained: NamedParameters) -> None:
        """Note the versions of some parameters at the end of a step."""
        if self._has_failed:
            return
        chosen = trained[:: -(-len(trained) // MAX_SAMPLES) or 1]
        self._known = [(one, tensor_version(one.parameter)) for one in chosen]

    def before_step(self, number: int, optimizer: Optimizer) -> list[Failure]:
        """Compare the versions before step `number`."""
        known, self._known = self._known, []
        changed = [
            one
            for one, version in known
            if tensor_version(one.parameter) != version
            and one.parameter not in self._held_elsewhere
        ]
        if not changed:
            return []
        elsewhere = held_by_others(optimizer)
        for one, _ in known:
            if id(one.parameter) in elsewhere:
                self._held_elsewhere[one.parameter] = True
        names = [one.name for one in changed if id(one.parameter) not in elsewhere]
        if not names:
            return []
        self._has_failed = True
        also = f" and {plural(len(names) - 1, 'other parameter')}" * (len(names) > 1)
        text = f"Something else than {type(optimizer).__name__} changed {names[0]}{also} between "
        text += f"steps {number - 1} and {number}, of {plural(len(known), 'parameter')} that were "
        text += "compared"
        return [("changed-outside", text, {"names": names, "n_compared": len(known)})]


def _with_gradient(trained: NamedParameters, n: int) -> list[nn.Parameter]:
    """Those of about `n` evenly spaced parameters, at most, that have a gradient."""
    each = (one.parameter for one in trained[:: -(-len(trained) // n) or 1])
    return [one for one in each if one.grad is not None]


class RoundingCheck:
    """Finds weights in bfloat16 or float16 whose updates are below half of their precision.

    Only optimizers of torch are judged, which round to the nearest value: others may round at
    random, or keep the rest of an update. Two steps with the same rates are judged together, which
    those of a warm-up do not have.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []
        self._rates: tuple[float, ...] = ()
        self._n = 0
        self._was_lost = self._is_steady = False

    def before(
        self, trained: NamedParameters, optimizer: Optimizer | None, rates: Sequence[float]
    ) -> None:
        """Note values of some matrices before a step that is expected to change them."""
        self._before = []
        self._is_steady, self._rates = tuple(rates) == self._rates, tuple(rates)
        is_torch = type(optimizer).__module__.startswith("torch.optim")
        if self._n >= N_ROUNDING_STEPS or not is_torch:
            return
        self._n += 1
        small = [o.parameter for o in trained if o.is_matrix and _is_small(o.parameter)]
        for one in small[:: -(-len(small) // MAX_SAMPLES) or 1]:
            if (grad := gradient_of(one)) is not None and grad.shape == one.shape:
                values, moves = _spread(one.detach()), _spread(grad) != 0
                self._before.append((one, values.clone(), moves))

    def after(self, number: int) -> list[Failure]:
        """A step has ended; returns what was found in it and in the one before."""
        before, self._before = self._before, []
        if not before:
            return []
        n = lost = 0
        for one, values, moves in before:
            n += int(moves.sum())
            lost += int(((_spread(one.detach()) == values) & moves).sum())
        was_lost, self._was_lost = self._was_lost, n >= MIN_ROUNDED and lost >= LOST_SHARE * n
        if not (was_lost and self._was_lost and self._is_steady):
            return []
        dtype = str(before[0][0].dtype).removeprefix("torch.")
        text = f"Step {number} left {lost / n:.0%} of the weights in {dtype} as they were that "
        text += "were compared, although their gradients and the learning rate are not 0: the "
        text += f"updates are smaller than half of the distance between two values of {dtype}"
        return [("update-rounded", text, {"share": lost / n, "dtype": dtype})]


def _is_small(parameter: Tensor) -> bool:
    return parameter.dtype in (torch.bfloat16, torch.float16) and parameter.numel() > 0


def _spread(tensor: Tensor) -> Tensor:
    """Evenly spaced values of a tensor, at an odd distance so as not to stay in one column."""
    values = local_part(tensor).reshape(-1)
    return values[:: (-(-values.numel() // ROUNDED_SIZE)) | 1]


def update_outliers(
    changes: Mapping[str, float], weights: Mapping[str, float], gradients: Mapping[str, float]
) -> list[tuple[str, float]]:
    """Return parameters whose update is out of proportion, with the ratio to the nearest sibling.

    The arguments are norms by name. Siblings have the same name in other layers. An update is out
    of proportion if it is 100 times as large or as small as that of every sibling, both relative to
    the parameter and relative to the gradient: neither a large gradient under SGD nor a small one
    under Adam makes it so, and rates that fall from layer to layer do not either.
    """
    families: dict[str, list[str]] = defaultdict(list)
    for name in changes:
        if (family := re.sub(r"(?<![^.])\d+(?![^.])", "*", name)) != name:
            families[family].append(name)
    found = []
    for names in families.values():
        known = [n for n in names if weights.get(n, 0.0) > 0 and gradients.get(n, 0.0) > 0]
        if len(known) >= MIN_SIBLINGS:
            relative = [changes[name] / weights[name] for name in known]
            efficient = [changes[name] / gradients[name] for name in known]
            found += [
                (known[at], min(ratios, key=abs))
                for at in range(len(known))
                if math.prod(ratios := (_ratio(relative, at), _ratio(efficient, at))) > 0
            ]
    return found


def _ratio(values: Sequence[float], at: int) -> float:
    """By how much a value is above all others, or negative below them; 0 if not by enough."""
    own, others = values[at], [*values[:at], *values[at + 1 :]]
    if own > OUTLIER_RATIO * max(others) > 0:
        return own / max(others)
    if own * OUTLIER_RATIO < min(others):
        return -min(others) / own if own > 0 else -math.inf
    return 0.0


def check_outliers(
    changes: Mapping[str, float],
    weights: Mapping[str, float],
    gradients: Mapping[str, float],
    number: int,
) -> list[Failure]:
    """Find parameters whose update in a step is out of proportion; all are norms by name."""
    outliers = update_outliers(changes, weights, gradients)
    if not outliers:
        return []
    name, ratio = outliers[0]
    if math.isinf(ratio):
        text = f"Step {number} does not change {name}, which has a gradient, but it changes the "
        text += "same parameter of every other layer"
    else:
        text = f"The update of {name} in step {number} is at least {abs(ratio):,.0f} times as "
        text += f"{'large' if ratio > 0 else 'small'} as that of the same parameter in any other "
        text += "layer, relative to its weights and also relative to its gradient"
    names = [one for one, _ in outliers]
    facts = {"names": names[:100], "ratio": None if math.isinf(ratio) else ratio}
    return [("update-outlier", text, facts)]
