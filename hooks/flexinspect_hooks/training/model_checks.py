"""What can be wrong with a model before and while it is called: parameters, modes, dropout, dtypes.

Each check returns its failures: the name of the check, a sentence without its full stop, and facts.
"""

from __future__ import annotations

import functools
import gc
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from flexinspect.core.text import plural
from flexinspect_hooks.python_internals.patching import patch

Failure = tuple[str, str, dict[str, Any]]

MAX_EVALUATIONS = 8  # passes in evaluation mode whose calls of dropout are observed
ROW_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "labels", "decoder_input_ids")
"""Names of inputs of transformers models whose first dimension is that of the batch."""
FROZEN_COUNT = re.compile(r"^(num_)?(frozen_stages|frozen_layers|freeze_at|frozen_blocks)$")
FROZEN_FLAG = re.compile(r"^(freeze|freeze_(backbone|encoder|body|base|features|stem)|frozen)$")
FROZEN_TYPO = re.compile(r"^requires?d?_?(grads?|gradients?)$")
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")
AUTOCAST_MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Modules whose computation autocast casts to its dtype."""


def clean_name(name: str) -> str:
    """Remove what `torch.compile` and wrappers for several devices add to a name."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


# -- the optimizer ---------------------------------------------------------------------------------


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> list[Failure]:
    """Compare the parameters of the optimizer with those of the model, when gradients are there."""
    held = [one for group in optimizer.param_groups for one in group["params"]]
    kind = type(optimizer).__name__
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if held and not any(one.requires_grad for one in held):
        names = [*map(clean_name, trainable)]
        text = f"None of the {plural(len(held), 'parameter')} of {kind} requires gradients: its "
        text += "steps change nothing"
        if names:
            text += f". {plural(len(names), 'other parameter')} of the model would be trainable, "
            text += f"first {names[0]}, and no optimizer holds them"
        return [("optimizer-frozen", text, {"trainable": names[:100]})]
    own = {id(one) for one in held}
    missed = {n: p for n, p in trainable.items() if id(p) not in own and p.grad is not None}
    if not missed:
        return []
    elsewhere = _held_by_others(optimizer)
    names = [clean_name(name) for name, one in missed.items() if id(one) not in elsewhere]
    if not names:
        return []
    inside = {id(one) for one in model.parameters()}
    stale = [p for p in held if id(p) not in inside and p.requires_grad and p.grad is None]
    facts = {"names": names[:100], "n": len(names)}
    if stale:
        text = f"{kind} holds {plural(len(stale), 'parameter')} that the model no longer has, and "
        text += f"misses {len(names)} that it has, first {names[0]}: they were replaced after the "
        text += "optimizer was made"
        return [("optimizer-stale", text, facts)]
    text = f"{plural(len(names), 'trainable parameter')} get a gradient, but no optimizer holds "
    text += f"them, first {names[0]}: they keep their initial values"
    is_part = _are_whole_parts(model, names, {id(p) for p in missed.values()})
    return [("optimizer-misses", text, {**facts, "is_whole_part": is_part})]


def _held_by_others(optimizer: Optimizer) -> set[int]:
    """The ids of the parameters of all other optimizers of the process."""
    # By type: the class of a lazy object may be computed when it is read.
    others = (one for one in gc.get_objects() if issubclass(type(one), Optimizer))
    groups = chain.from_iterable(
        getattr(o, "param_groups", ()) for o in others if o is not optimizer
    )
    return {id(one) for group in groups for one in group["params"]}


def _are_whole_parts(model: nn.Module, names: list[str], ids: set[int]) -> bool:
    """Whether whole children of the model are missed, as if only the others were to be trained."""
    parts = {name.partition(".")[0] for name in names}
    children = {clean_name(name): one for name, one in model.named_children()}
    return all(
        part in children
        and all(id(p) in ids for p in children[part].parameters() if p.requires_grad)
        for part in parts
    )


# -- what a model says of itself -------------------------------------------------------------------


def check_frozen_flags(model: nn.Module) -> list[Failure]:
    """Find a module that says it is frozen, or has frozen stages, and has no frozen parameter."""
    for name, one in model.named_parameters():
        typo = next((key for key in vars(one) if FROZEN_TYPO.match(key)), None)
        if typo is not None and one.requires_grad and getattr(one, typo) is False:
            text = f"{clean_name(name)} has an attribute {typo} = False, which torch does not know "
            text += "(it is requires_grad): the parameter is trained"
            return [("frozen-trains", text, {"parameter": clean_name(name), "attribute": typo})]
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            is_count = isinstance(value, int) and not isinstance(value, bool)
            says_so = bool(FROZEN_FLAG.match(attribute)) and value is True
            says_so |= attribute == "requires_grad" and value is False
            says_so |= bool(FROZEN_COUNT.match(attribute)) and is_count and value > 0
            own = [*module.parameters()]
            if says_so and own and all(one.requires_grad for one in own):
                where = clean_name(name) or type(module).__name__
                text = f"{where} has {attribute} = {value}, but all of its "
                text += f"{plural(len(own), 'parameter')} are trained"
                if attribute == "requires_grad":
                    text += ": it is an attribute of parameters, requires_grad_() sets it"
                elif type(module).train is not nn.Module.train:
                    text += ": it freezes them in its train(), which was not called"
                return [("frozen-trains", text, {"module": where, "attribute": attribute})]
    return []


def check_stale_gradients(model: nn.Module, held: Set[int]) -> list[Failure]:
    """Find frozen parameters whose last gradient is still there: the optimizer goes on with it."""
    names = [
        clean_name(name)
        for name, one in model.named_parameters()
        if not one.requires_grad and one.grad is not None and id(one) in held
    ]
    if not names:
        return []
    text = f"{plural(len(names), 'parameter')} of the optimizer were frozen, first {names[0]}, but "
    text += "keep the gradient of an earlier step: each step still changes them"
    return [("frozen-gradients", text, {"names": names[:100]})]


def check_tied_weights(model: nn.Module) -> list[Failure]:
    """Find embeddings of a transformers model that are to be tied, and are not."""
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if getattr(config, "tie_word_embeddings", None) is not True:
            continue
        try:
            first = module.get_input_embeddings().weight
            second = module.get_output_embeddings().weight
        except (AttributeError, NotImplementedError):
            continue
        if first is not second and first.shape == second.shape:
            where = clean_name(name) or type(module).__name__
            text = f"The config of {where} ties the input and output embeddings, but they are two "
            text += "parameters, which are trained apart"
            return [("untied-weights", text, {"module": where})]
    return []


def check_rows(inputs: Mapping[str, Any]) -> list[Failure]:
    """Compare the number of rows of the named inputs of a forward pass."""
    rows = {
        name: value.shape[0]
        for name in ROW_INPUTS
        if isinstance(value := inputs.get(name), Tensor) and value.dim() > 1
    }
    if len(set(rows.values())) < 2:
        return []
    shown = ", ".join(f"{name} {n}" for name, n in rows.items())
    text = f"The inputs of one forward pass have different numbers of rows: {shown}"
    return [("rows-differ", text, {"rows": rows})]


def check_constant_inputs(inputs: Sequence[Any]) -> list[Failure]:
    """Find inputs of a forward pass that are one value throughout; waits for their device."""
    tensors = [one for one in inputs if isinstance(one, Tensor) and one.numel() > 1]
    large = [o for o in tensors if o.is_floating_point() and o.dim() > 1 and o.shape[0] > 1]
    if not large or any(one.layout is not torch.strided or one.is_complex() for one in tensors):
        return []
    try:
        if any(bool((one != one.reshape(-1)[0]).any()) for one in tensors):
            return []
    except RuntimeError:
        return []  # values that cannot be read, as under vmap
    value = float(large[0].detach().reshape(-1)[0])
    text = f"Every value of the inputs of the first forward passes is {value:.4g}, in size "
    text += f"{tuple(large[0].shape)}: the model sees nothing of the data"
    return [("constant-inputs", text, {"value": value})]


# -- modes -----------------------------------------------------------------------------------------


def has_modes(model: nn.Module) -> bool:
    """Whether a module behaves differently in training and in evaluation mode."""
    return any(_depends_on_mode(one) for one in model.modules())


def _depends_on_mode(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return isinstance(module, _BatchNorm) and module.track_running_stats


def check_modes(model: nn.Module) -> list[Failure]:
    """Find batch norms in training mode in a model in evaluation mode."""
    named = [(n, m) for n, m in model.named_modules() if isinstance(m, _BatchNorm)]
    names = [clean_name(n) for n, m in named if m.training and m.track_running_stats]
    if not names:
        return []
    text = f"The model is in evaluation mode, but {plural(len(names), 'batch norm')} in training "
    text += f"mode, first {names[0]}: it normalizes by the batch, and changes its statistics"
    return [("mixed-modes", text, {"names": names[:100]})]


class DropoutCheck:
    """Finds calls of dropout, also inside of attention, by a model in evaluation mode.

    The functions are replaced only while the first forward passes in evaluation mode run.
    """

    def __init__(self) -> None:
        self._n = 0
        self._model: nn.Module | None = None
        self._patches = ExitStack()
        self._failures: list[Failure] = []

    def begin(self, model: nn.Module) -> bool:
        """A forward pass in evaluation mode begins; returns whether it is one of the first."""
        if self._model is not None or self._n >= MAX_EVALUATIONS:
            return False
        self._n, self._model = self._n + 1, model
        for name in DROPOUTS:
            original = getattr(functional, name)
            self._patches.callback(patch(functional, name, self._observed(original)))
        name = "scaled_dot_product_attention"
        attention = self._observed_attention(getattr(functional, name))
        self._patches.callback(patch(functional, name, attention))
        return True

    def end(self) -> list[Failure]:
        """The forward pass has ended; returns what was found."""
        self._patches.close()
        self._model = None
        failures, self._failures = self._failures, []
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
