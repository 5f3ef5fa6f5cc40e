"""What can be wrong with a forward pass while it runs: dropout, dtypes, checkpoints.

Each check returns its failures: the name of the check, a sentence without its full stop, and facts.
"""

from __future__ import annotations

import functools
import operator
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flexinspect.core.text import plural
from flexinspect_hooks.python_internals.patching import patch
from flexinspect_hooks.training.batch_values import batch_values
from flexinspect_hooks.training.gradient_statistics import NamedParameters
from flexinspect_hooks.training.model_checks import Failure, clean_name

MAX_EVALUATIONS = 8  # passes in evaluation mode whose calls of dropout are observed
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")
AUTOCAST_MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Modules whose computation autocast casts to its dtype."""


class DropoutCheck:
    """Finds calls of dropout, also inside of attention, by a model in evaluation mode.

    The functions are replaced only while the first forward passes in evaluation mode run. Several
    passes of the same inputs in a row are meant to differ (Monte Carlo dropout), so a pass without
    gradients is judged when the next one begins.
    """

    def __init__(self) -> None:
        self._n = 0
        self._model: nn.Module | None = None
        self._patches = ExitStack()
        self._failures: list[Failure] = []
        self._waiting: list[Failure] = []
        self._inputs: list[weakref.ref[Tensor]] = []
        self._values: tuple[Any, ...] = ()

    def on_inputs(self, inputs: Sequence[Any]) -> list[Failure]:
        """A pass without gradients begins; returns what was found in the one before."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return []
        tensors = [one for one in inputs if isinstance(one, Tensor)]
        known = [one() for one in self._inputs]
        is_same = len(known) == len(tensors) > 0 and all(map(operator.is_, known, tensors))
        if is_same or (self._values and self._values == batch_values(inputs)[0]):
            self._n = MAX_EVALUATIONS  # dropout is meant
            return []
        return waiting

    def flush(self) -> list[Failure]:
        """Another pass begins than one without gradients; returns what was found in the last."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def begin(self, model: nn.Module, inputs: Sequence[Any]) -> bool:
        """A forward pass in evaluation mode begins; returns whether it is one of the first.

        `inputs` are those of a pass without gradients.
        """
        if self._model is not None or self._n >= MAX_EVALUATIONS:
            return False
        self._n, self._model = self._n + 1, model
        self._inputs = [weakref.ref(one) for one in inputs if isinstance(one, Tensor)]
        self._values = batch_values(inputs)[0] if inputs else ()
        for name in DROPOUTS:
            original = getattr(functional, name)
            self._patches.callback(patch(functional, name, self._observed(original)))
        name = "scaled_dot_product_attention"
        attention = self._observed_attention(getattr(functional, name))
        self._patches.callback(patch(functional, name, attention))
        return True

    def end(self) -> list[Failure]:
        """The forward pass has ended; returns what was found."""
        if self._model is None:
            return []
        self._patches.close()
        self._model = None
        failures, self._failures = self._failures, []
        if self._inputs:
            self._waiting += failures
            return []
        return failures

    def _observed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def dropout(
            input: Tensor,  # noqa: A002 (the name in torch)
            p: float = 0.5,
            training: bool = True,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if training and p > 0:
                self._report(f"dropout with p = {p:g}", p)
            return original(input, p, training, *args, **kwargs)

        return dropout

    def _observed_attention(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def attention(*args: Any, **kwargs: Any) -> Any:
            p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            if p > 0:
                self._report(f"attention with dropout_p = {p:g}", p)
            return original(*args, **kwargs)

        return attention

    def _report(self, what: str, p: float) -> None:
        model = self._model
        if model is None or self._failures or torch.compiler.is_compiling():
            return
        names = {id(one): clean_name(name) for name, one in model.named_modules()}
        callers = (one for one in _calling_modules() if id(one) in names)
        module = next(callers, model)
        where = names[id(module)] or "the model"
        why = "does not look at its mode"
        if module.training:
            why = "is still in training mode"
        text = f"The model is in evaluation mode, but {where} ({type(module).__name__}) calls "
        text += f"{what}: it {why}"
        self._failures.append(("dropout-in-evaluation", text, {"module": where, "p": p}))


def _calling_modules() -> Iterator[nn.Module]:
    """Yield the modules whose methods run in this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        one = frame.f_locals.get("self")
        if isinstance(one, nn.Module):
            yield one
        frame = frame.f_back


class CheckpointCheck:
    """Explains parameters without a gradient by reentrant checkpoints that cut the backward pass.

    Such a checkpoint has a backward pass only if one of its inputs requires gradients, which the
    output of a frozen embedding does not.
    """

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._n_unknown = 0

    def add(self, function: Any) -> None:
        """A checkpoint without an input that requires gradients runs `function`."""
        while isinstance(function, functools.partial):
            function = function.func
        module = getattr(function, "__self__", function)
        if isinstance(module, nn.Module):
            self._modules.append(module)
        else:
            self._n_unknown += 1

    def check(self, named: NamedParameters, unreached: Sequence[str]) -> list[Failure]:
        """Judge the parameters that got no gradient in the first backward pass."""
        inside = {id(one) for module in self._modules for one in module.parameters()}
        missed = {*unreached}
        known = {name: id(one) for name, one, *_ in named if name in missed}
        names = [name for name, one in known.items() if self._n_unknown or one in inside]
        if not names or not (self._modules or self._n_unknown):
            return []
        text = f"{plural(len(names), 'trainable parameter')} get no gradient, first {names[0]}: "
        text += "torch.utils.checkpoint with use_reentrant=True ran them on inputs that do not "
        text += "require gradients, and has no backward pass then"
        return [("checkpoint-cuts", text, {"names": names[:100], "n": len(names)})]


class AutocastCheck:
    """Finds modules whose output has not the dtype of autocast, while that of others like it has.

    Modules are hooked only during the forward passes that are checked.
    """

    def __init__(self) -> None:
        self._hooks = ExitStack()
        self._dtypes: dict[str, tuple[str, torch.dtype]] = {}
        self._names: dict[int, str] = {}

    def begin(self, model: nn.Module) -> None:
        """A forward pass begins."""
        if self._names or type(model).__name__ == "OptimizedModule":
            return
        for name, module in model.named_modules():
            if isinstance(module, AUTOCAST_MODULES) and module.weight.dtype is torch.float32:
                self._names[id(module)] = clean_name(name)
                self._hooks.enter_context(module.register_forward_hook(self._keep))

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        device = module.weight.device
        kind = device.type if isinstance(device, torch.device) else "cpu"
        if isinstance(output, Tensor) and torch.is_autocast_enabled(kind):
            name = self._names.get(id(module), "")
            self._dtypes[name] = (type(module).__name__, output.dtype)

    def end(self) -> list[Failure]:
        """The forward pass has ended; returns what was found."""
        if not self._names:
            return []
        self._hooks.close()
        self._names, dtypes, self._dtypes = {}, self._dtypes, {}
        kinds = Counter(dtype for _, dtype in dtypes.values())
        wide = [name for name, (_, dtype) in dtypes.items() if dtype is torch.float32]
        low = next((dtype for dtype in kinds if dtype.itemsize < 4), None)
        if low is None or not wide or len(wide) > len(dtypes) // 2:
            return []
        of, shown = dtypes[wide[0]][0], str(low).removeprefix("torch.")
        text = f"Autocast to {shown} passes over {wide[0]} ({of}): its output is float32, and that "
        text += f"of {plural(kinds[low], 'other module')} is {shown}"
        return [("autocast-passed-over", text, {"names": wide[:100]})]
