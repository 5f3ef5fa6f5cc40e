"""Runs modules of the program on the inputs of the reference: which of them differs by itself.

The first quantity that differs lies behind several modules and the code between them. Each module
that takes one tensor runs alone, in the program and in the reference, on the same input. Where all
agree, the difference is made by the code between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn

from flexinspect_hooks.audit.difference_shape import Compared, describe_difference
from flexinspect_hooks.audit.forward_run import Run
from flexinspect_hooks.audit.module_shape import describe_module
from flexinspect_hooks.audit.reference_model import ReferenceModel
from flexinspect_hooks.observers.attention.kernel_calls import set_unrecorded
from flexinspect_hooks.python_internals.torch_private import MODULE_HOOKS

_MAX_ROWS = 256
_OWN = ("flexinspect", "torch.", "accelerate.", "transformers.")


class ModuleDifference(Struct, frozen=True):
    """A module whose output for the reference's input differs, and how, in ends of sentences.

    If its modules are right, `inside` says where in its code it begins to differ: the one whose
    input is wrong, and how.
    """

    name: str
    cls: str
    shape: tuple[str, ...]
    inside: tuple[str, tuple[str, ...]] | None = None


class SwapResult(Struct, frozen=True):
    """What modules of a layer, and those outside of all layers, gave on the same inputs.

    `agreeing` are names of those that agree; `differing` the innermost ones that do not.
    """

    differing: tuple[ModuleDifference, ...]
    agreeing: tuple[str, ...]


def compare_modules(
    reference: ReferenceModel,
    program: nn.Module,
    ids: Sequence[int],
    base: Run,
    layer: int | None,
    limit: float,
) -> SwapResult:
    """Return which modules differ by themselves, of a layer and outside of all layers."""
    pairs = _module_inputs(reference, ids, base, layer)
    agreeing, outputs = list[str](), dict[str, tuple[Tensor, dict[str, Tensor]]]()
    theirs = dict(program.named_modules())
    set_unrecorded(is_unrecorded=True)
    try:
        for name, (given, right) in pairs.items():
            with suppress(Exception):  # code of the program may need a state that is gone
                output, inner = _run_alone(theirs[name], given)
                if output.shape != right.shape:
                    continue
                if _compared(output, right, limit).distance <= limit:
                    agreeing.append(name)
                else:
                    outputs[name] = output, inner
    finally:
        set_unrecorded(is_unrecorded=False)
    weights = dict(reference.model.named_parameters())
    differing = []
    for name, (output, inner) in outputs.items():
        if any(other.startswith(f"{name}.") for other in outputs):
            continue
        module = reference.model.get_submodule(name)
        given, right = pairs[name]
        shape = describe_module(
            module, given.flatten(0, -2)[:_MAX_ROWS], _compared(output, right, limit), weights
        )
        inside = _first_inside(pairs, name, inner, limit)
        differing.append(ModuleDifference(name, type(theirs[name]).__name__, tuple(shape), inside))
    return SwapResult(tuple(differing), tuple(agreeing))


def _run_alone(module: nn.Module, given: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output of a module, and the first input of each module in it by its name."""
    inner: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if args and isinstance(args[0], Tensor):
                inner.setdefault(name, args[0].detach())

        return hook

    inside = [(name, one) for name, one in module.named_modules() if name]
    removes = [one.register_forward_pre_hook(keep(name)) for name, one in inside]
    dtype = next(module.parameters(), given).dtype
    try:
        with torch.no_grad():
            output = module(given.to(dtype) if given.is_floating_point() else given)
    finally:
        for one in removes:
            one.remove()
    return (output[0] if isinstance(output, tuple) else output), inner


def _first_inside(
    pairs: Mapping[str, tuple[Tensor, Tensor]], name: str, inner: Mapping[str, Tensor], limit: float
) -> tuple[str, tuple[str, ...]] | None:
    """Return the first module inside another one whose input is wrong, and how it is."""
    for last, given in inner.items():
        right = pairs.get(f"{name}.{last}")
        if right is None or right[0].shape != given.shape:
            continue
        compared = _compared(given, right[0], limit)
        if compared.distance > limit:
            return last, tuple(describe_difference(compared))
    return None


def _compared(ours: Tensor, theirs: Tensor, limit: float) -> Compared:
    ours, theirs = (one.detach().double().flatten(0, -2)[:_MAX_ROWS] for one in (ours, theirs))
    return Compared(ours, theirs.to(ours.device), limit, range(len(ours)))


def _module_inputs(
    reference: ReferenceModel, ids: Sequence[int], base: Run, layer: int | None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the input and the output of the reference's modules that take one tensor."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    prefixes = {number: f"{name}." for number, (name, _) in reference.blocks.items()}
    others = tuple(prefix for number, prefix in prefixes.items() if number != layer)

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            rows = output[0] if isinstance(output, tuple) else output
            is_plain = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
            if is_plain and isinstance(rows, Tensor):
                found[name] = (args[0].detach(), rows.detach())

        return hook

    removes = [
        module.register_forward_hook(keep(name), with_kwargs=True)
        for name, module in reference.model.named_modules()
        if name and not name.startswith(others) and name not in _whole(reference)
    ]
    try:
        run = Run(base.positions.clone(), base.ends, base.masks, base.biases, encoder=base.encoder)
        reference.run(ids, run, [len(ids) - 1])
    finally:
        for one in removes:
            one.remove()
    return found


def _whole(reference: ReferenceModel) -> set[str]:
    return {name for name, _ in reference.blocks.values()}


# -- what the program put into its modules ---------------------------------------------------------


def replaced_code(program: nn.Module, names: Sequence[str]) -> Mapping[str, str]:
    """Return for `module.forward` names of replaced methods where their code is."""
    found = {}
    for name in names:
        owner, _, method = name.rpartition(".")
        with suppress(AttributeError):
            function = getattr(program.get_submodule(owner), method)
            if text := code_text(function):
                found[name] = text
    return found


def code_text(function: Any) -> str:
    """Return the name and the line of a function of the program, empty for one of a library."""
    function = getattr(function, "__func__", function)
    function = getattr(function, "func", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    return f"{function.__qualname__} at {PurePath(code.co_filename).name}:{code.co_firstlineno}"


def own_hooks(program: nn.Module, others: Sequence[str]) -> Iterator[str]:
    """Yield the hooks that the program put on its modules, but not those in `others`."""
    for name, module in program.named_modules():
        if any(name == one or name.startswith(f"{one}.") for one in others):
            continue
        for attribute in MODULE_HOOKS:
            for hook in getattr(module, attribute, {}).values():
                if str(getattr(hook, "__module__", "")).startswith(_OWN):
                    continue
                kind = "pre-hook" if "pre" in attribute else "hook"
                where = code_text(hook) or type(hook).__name__
                yield f"{name or 'the model'} has a forward {kind} ({where})"
