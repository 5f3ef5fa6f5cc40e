"""What can be wrong with a model before it is called: parameters, modes, inputs.

Each check returns its failures: the name of the check, a sentence without its full stop, and facts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from flexinspect.core.text import plural
from flexinspect_hooks.python_internals.initializer_calls import (
    forget_initializations,
    initializations_of,
)
from flexinspect_hooks.python_internals.live_objects import live_objects

Failure = tuple[str, str, dict[str, Any]]

MAX_HELD = 1000  # values of a list or dictionary of a module that are looked at
ROW_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "labels", "decoder_input_ids")
"""Names of inputs of transformers models whose first dimension is that of the batch."""
FROZEN_COUNT = re.compile(r"^(num_)?(frozen_stages|frozen_layers|freeze_at|frozen_blocks)$")
FROZEN_FLAG = re.compile(r"^(freeze|freeze_(backbone|encoder|body|base|features|stem)|frozen)$")
FROZEN_TYPO = re.compile(r"^requires?d?_?(grads?|gradients?)$")


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
    if len(own) < len(held):
        times = Counter(map(id, held))
        twice = {n: times[id(p)] for n, p in model.named_parameters() if times[id(p)] > 1}
        first = next((f", first {clean_name(name)}" for name in twice), "")
        text = f"{kind} holds {plural(len(held) - len(own), 'parameter')} more than once{first}: "
        text += "each of its steps changes them several times"
        return [("optimizer-twice", text, {"names": [*map(clean_name, twice)][:100]})]
    missed = {n: p for n, p in trainable.items() if id(p) not in own and p.grad is not None}
    if not missed:
        return []
    elsewhere = held_by_others(optimizer)
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
    if is_part and _are_last(model, missed, own):
        is_part = False
        text += (
            ". They are the last ones of the model and fewer than those that are trained, as if "
        )
        text += "a head had been left out"
    return [("optimizer-misses", text, {**facts, "is_whole_part": is_part})]


def check_unregistered(model: nn.Module, optimizer: Optimizer) -> list[Failure]:
    """Find layers in a list or dictionary, which `parameters()` does not return, with gradients."""
    own = {id(one) for one in model.parameters()}
    own |= {id(one) for group in optimizer.param_groups for one in group["params"]}
    missed: dict[int, str] = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, (list, tuple, dict)):
                where = f"{type(module).__name__}.{attribute}"
                where = f"{where} of {clean_name(name)}" if clean_name(name) else where
                missed.update((id(o), where) for o in _held_in(value) if _is_missed(o, own))
    if not missed or not (missed.keys() - held_by_others(optimizer)):
        return []
    where = next(iter(missed.values()))
    text = f"{plural(len(missed), 'parameter')} in {where} get a gradient, but are not registered, "
    text += "because the layers are in a Python list or dictionary: parameters() does not return "
    text += "them, and they keep their initial values"
    return [("unregistered", text, {"where": where, "n": len(missed)})]


def _held_in(value: Any, depth: int = 2) -> Iterator[nn.Parameter]:
    """Yield the parameters in a list or dictionary, and in those inside of it."""
    for one in islice(value.values() if isinstance(value, dict) else value, MAX_HELD):
        if isinstance(one, nn.Module):
            yield from one.parameters()
        elif isinstance(one, nn.Parameter):
            yield one
        elif depth > 1 and isinstance(one, (list, tuple, dict)):
            yield from _held_in(one, depth - 1)


def _is_missed(parameter: nn.Parameter, own: Set[int]) -> bool:
    has_gradient = parameter.requires_grad and parameter.grad is not None
    return has_gradient and id(parameter) not in own


def held_by_others(optimizer: Optimizer) -> set[int]:
    """The ids of the parameters of all other optimizers of the process."""
    others = (one for one in live_objects(Optimizer) if one is not optimizer)
    groups = chain.from_iterable(getattr(one, "param_groups", ()) for one in others)
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


def _are_last(model: nn.Module, missed: Mapping[str, nn.Parameter], own: set[int]) -> bool:
    """Whether the missed parameters come after all that are trained, and have fewer values."""
    order = {id(one): number for number, one in enumerate(model.parameters())}
    trained = [one for one in model.parameters() if id(one) in own]
    if not trained:
        return False
    last = max(order[id(one)] for one in trained)
    is_after = all(order[id(one)] > last for one in missed.values())
    return is_after and sum(p.numel() for p in missed.values()) < sum(p.numel() for p in trained)


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


def check_initializations(model: nn.Module) -> list[Failure]:
    """Find parameters that the same function initialized several times, before the first step."""
    repeated = {}
    for name, one in model.named_parameters():
        most = initializations_of(one).most_common(1)
        if most and most[0][1] > 1:
            repeated[clean_name(name)] = most[0]
    forget_initializations()  # what is initialized during a training may be meant
    if not repeated:
        return []
    name, (function, n) = max(repeated.items(), key=lambda item: item[1][1])
    text = f"The initializer of {plural(len(repeated), 'parameter')} ran again before the first "
    text += f"step, that of {name} {n} times ({function}): only the last time counts"
    facts = {"names": [*repeated][:100], "n": len(repeated), "most": n, "function": function}
    return [("repeated-initialization", text, facts)]


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
