"""The modules that a program calls by themselves and trains with one optimizer.

Usually it is one model. A program may also call an encoder and a decoder without a module around
them: then a container, of which the program knows nothing, gives their parameters names.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from flexinspect_hooks.training.cost_governor import Detail
from flexinspect_hooks.training.forward_passes import ForwardWatch, StepPasses

MakeWatch = Callable[[nn.Module, str], ForwardWatch]  # of a module, with a prefix of its names


class ModelParts:
    """A watch of the forward passes of each part, which all add to the same step."""

    def __init__(self, model: nn.Module, make_watch: MakeWatch) -> None:
        self.model = model
        """The only part, or the container of all."""
        self._make_watch = make_watch
        self._parts = {"": model}
        self._watches = [make_watch(model, "")]
        self._is_installed = False

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """The modules that the program calls."""
        return tuple(self._parts.values())

    def add(self, part: nn.Module, name: str, first_name: str) -> None:
        """Add a part; if it is the second, the first one gets a name too."""
        if len(self._parts) == 1:
            (first,) = self._parts.values()
            self._parts = {first_name: first}
            self._watches[0].prefix = f"{first_name}."
            self.model = nn.Module()
            self.model.add_module(first_name, first)
        while name in self._parts:
            name = f"{name}_"
        self._parts[name] = part
        self.model.add_module(name, part)
        watch = self._make_watch(part, f"{name}.")
        watch.watches_leaves = self._watches[0].watches_leaves
        watch.keeps_stats = self._watches[0].keeps_stats
        self._watches.append(watch)
        if self._is_installed:
            watch.install()

    def install(self) -> None:
        """Register the hooks."""
        self._is_installed = True
        for one in self._watches:
            one.install()

    def remove(self) -> None:
        """Remove the hooks."""
        self._is_installed = False
        for one in self._watches:
            one.remove()

    def set_detail(self, detail: Detail) -> None:
        """Keep what `detail` says from the next forward pass on."""
        for one in self._watches:
            one.watches_leaves, one.keeps_stats = detail.watches_leaves, detail.keeps_stats

    @property
    def own_s(self) -> float:
        """The time spent in hooks since the last `begin_step`, in seconds."""
        spent = 0.0
        for one in self._watches:
            spent += one.own_s
        return spent

    @property
    def has_forward(self) -> bool:
        """Whether there was a forward pass since the last `begin_step`."""
        return any(one.has_forward for one in self._watches)

    def count_pending(self) -> None:
        """Add the forward passes of a step whose backward pass was not observed."""
        for one in self._watches:
            one.count_pending()

    def begin_step(self, passes: StepPasses) -> None:
        """Add the results of passes to `passes` from now on, which has none yet."""
        for one in self._watches:
            one.begin_step(passes)
            one.own_s = 0.0
