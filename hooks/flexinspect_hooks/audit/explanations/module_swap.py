"""Runs modules of the program on the inputs of the reference: which of them differs by itself.

The first quantity that differs lies behind several modules and the code between them. Each module
that takes one tensor runs alone, in the program and in the reference, on the same input. Where all
agree, the difference is made by the code between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor, nn

from flexinspect_hooks.audit.evidence.difference_shape import ComparedTensors, describe_difference
from flexinspect_hooks.audit.evidence.expert_routing import is_router
from flexinspect_hooks.audit.explanations.module_shape import describe_module
from flexinspect_hooks.audit.forward.forward_run import Run
from flexinspect_hooks.audit.forward.program_hooks import code_text, hooks_of
from flexinspect_hooks.audit.forward.unrecorded import unrecorded
from flexinspect_hooks.audit.reference.reference_model import ReferenceModel
from flexinspect_hooks.capture.quiet_modules import quiet_module

_MAX_ROWS = 256


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

    `agreeing` are names of those that agree; `differing` the innermost ones that do not. `untested`
    are those with weights that could not be run alone, or that the reference has from the program.
    """

    differing: tuple[ModuleDifference, ...]
    agreeing: tuple[str, ...]
    untested: tuple[str, ...] = ()


def compare_modules(
    reference: ReferenceModel,
    program: nn.Module,
    ids: Sequence[int],
    base: Run,
    layer: int | None,
    limit: float,
    spans: Sequence[tuple[int, int]],
) -> SwapResult:
    """Return which modules differ by themselves, of a layer and outside of all layers.

    `spans` are the rows of the program's forwards from the diverging one on: a module may do
    something else in a decode step than in a prompt.
    """
    pairs = _module_inputs(reference, ids, base, layer)
    agreeing, outputs = list[str](), dict[str, _Alone]()
    untested = [name for name in reference.taken if _is_near(reference, name, layer)]
    theirs = dict(program.named_modules())
    with unrecorded():
        for name, (given, right) in pairs.items():
            if reference.is_taken(name):
                continue  # it would be compared with itself
            try:
                alone = _run_spans(theirs[name], given, right, spans, len(ids))
                compared = _compared(alone.output, alone.right, limit, alone.positions)
            except Exception:  # code of the program may need a state that is gone
                untested += [name] if _counts(reference, name) else []
                continue
            if compared.distance <= limit:
                agreeing.append(name)
            else:
                outputs[name] = alone
    weights = dict(reference.model.named_parameters())
    differing = []
    for name, alone in outputs.items():
        if any(other.startswith(f"{name}.") for other in outputs):
            continue
        module = reference.model.get_submodule(name)
        compared = _compared(alone.output, alone.right, limit, alone.positions)
        given = alone.given.flatten(0, -2)[:_MAX_ROWS]
        shape = _router_shape(module, compared) or describe_module(module, given, compared, weights)
        inside = _first_inside(pairs, name, alone, limit)
        differing.append(ModuleDifference(name, type(theirs[name]).__name__, tuple(shape), inside))
    return SwapResult(tuple(differing), tuple(agreeing), tuple(untested))


def _is_near(reference: ReferenceModel, name: str, layer: int | None) -> bool:
    """Whether a module is in the layer, or outside of all layers."""
    others = [f"{block}." for number, (block, _) in reference.blocks.items() if number != layer]
    return not name.startswith(tuple(others))


def _counts(reference: ReferenceModel, name: str) -> bool:
    """Whether a module has weights, and is not compared by itself, as the embedding is."""
    module = reference.model.get_submodule(name)
    return not isinstance(module, nn.Embedding) and any(
        True for _ in module.parameters(recurse=False)
    )


def _router_shape(module: nn.Module, compared: ComparedTensors) -> list[str]:
    """Say which of a router's outputs are wrong: scores, weights of the chosen experts, experts."""
    if not is_router(module) or compared.ours.shape[-1] < 5:
        return []
    weight: Any = module.weight
    n_chosen = (compared.ours.shape[-1] - int(weight.shape[0])) // 2
    sizes = [compared.ours.shape[-1] - 2 * n_chosen, n_chosen, n_chosen]
    ours, theirs = (torch.split(one, sizes, -1) for one in (compared.ours, compared.theirs))
    parts = zip(ours, theirs, strict=True)
    texts = [
        f"has {'right' if float((a - b).norm() / b.norm()) <= compared.limit else 'wrong'} {name}"
        for name, (a, b) in zip(("scores", "weights of the experts", "experts"), parts, strict=True)
    ]
    return [", ".join(texts).replace(", has", ",")]


class _Alone(Struct, frozen=True):
    """What a module gave alone, for `given`, beside what is `right`, of rows at `positions`.

    A norm of heads has a row per head, one after another, at the same position. `inner` are the
    first inputs of the modules in it.
    """

    given: Tensor
    output: Tensor
    right: Tensor
    inner: Mapping[str, Tensor]
    positions: Sequence[int]


def _run_spans(
    module: nn.Module,
    given: Tensor,
    right: Tensor,
    spans: Sequence[tuple[int, int]],
    n_rows: int,
) -> _Alone:
    """Run a module on the rows of each forward of the program, of `n_rows` rows of the text."""
    parts, outputs, rights = list[Tensor](), list[Tensor](), list[Tensor]()
    inside: Mapping[str, Tensor] = {}
    of_given, of_right = _rows_dim(given, n_rows), _rows_dim(right, n_rows)
    for first, stop in spans:
        parts.append(given.narrow(of_given, first, stop - first))
        rights.append(right.narrow(of_right, first, stop - first))
        output, inner = _run_alone(module, parts[-1])
        outputs.append(output)
        inside = inside or inner
    if any(one.shape != two.shape for one, two in zip(outputs, rights, strict=True)):
        raise ValueError("The module gives another shape.")
    sides = ((parts, of_given), (outputs, of_right), (rights, of_right))
    tables = [
        torch.cat([one.movedim(dim, 0).flatten(0, -2) for one in those]) for those, dim in sides
    ]
    places = [place for first, stop in spans for place in range(first, stop)]
    n_heads = len(tables[1]) // max(len(places), 1)
    places = [place for place in places for _ in range(n_heads)]
    return _Alone(tables[0], tables[1], tables[2], inside, places)


def _rows_dim(tensor: Tensor, n_rows: int) -> int:
    """Return the dimension of the text: the heads of a norm may come before it, or after."""
    dims = [dim for dim in range(tensor.dim() - 1) if tensor.shape[dim] == n_rows]
    return dims[0] if dims else max(tensor.dim() - 2, 0)


def _run_alone(module: nn.Module, given: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output of a module, and the first input of each module in it by its name."""
    inner: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if args and isinstance(args[0], Tensor):
                inner.setdefault(name, args[0].detach())

        return hook

    dtype = next(module.parameters(), given).dtype
    with quiet_module(module):
        inside = [(name, one) for name, one in module.named_modules() if name]
        removes = [one.register_forward_pre_hook(keep(name)) for name, one in inside]
        try:
            output = module(given.to(dtype) if given.is_floating_point() else given)
        finally:
            for one in removes:
                one.remove()
    return whole_output(output), inner


def whole_output(output: Any) -> Tensor:
    """Return the output of a module; of a router all it gives, one after another in each row."""
    if not isinstance(output, tuple):
        return cast(Tensor, output)
    first = output[0]
    same = [one for one in output if isinstance(one, Tensor) and one.shape[:-1] == first.shape[:-1]]
    return torch.cat([one.to(first.dtype) for one in same], -1)


def _first_inside(
    pairs: Mapping[str, tuple[Tensor, Tensor]], name: str, alone: _Alone, limit: float
) -> tuple[str, tuple[str, ...]] | None:
    """Return the first module inside another one whose input is wrong, and how it is."""
    for last, given in alone.inner.items():
        right = pairs.get(f"{name}.{last}")
        if right is None:
            continue
        rows = given.flatten(0, -2)
        places = list(alone.positions)[: len(rows)]
        table = right[0].flatten(0, -2)
        if not places or table.shape[1:] != rows.shape[1:] or places[-1] >= len(table):
            continue
        compared = _compared(rows, table[places[0] : places[-1] + 1], limit, places)
        if compared.distance > limit:
            return last, tuple(describe_difference(compared))
    return None


def _compared(ours: Tensor, theirs: Tensor, limit: float, places: Sequence[int]) -> ComparedTensors:
    ours, theirs = (one.detach().double().flatten(0, -2)[:_MAX_ROWS] for one in (ours, theirs))
    return ComparedTensors(ours, theirs.to(ours.device), limit, list(places)[: len(ours)])


def _module_inputs(
    reference: ReferenceModel, ids: Sequence[int], base: Run, layer: int | None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the input and the output of the reference's modules that take one tensor."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    prefixes = {number: f"{name}." for number, (name, _) in reference.blocks.items()}
    others = tuple(prefix for number, prefix in prefixes.items() if number != layer)

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            rows = whole_output(output)
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
        run = replace(base, positions=base.positions.clone(), values={}, routes={})
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


def own_hooks(program: nn.Module, others: Sequence[str]) -> Iterator[str]:
    """Yield the hooks that the program put on its modules, but not those in `others`."""
    for hook in hooks_of(program):
        name = hook.name
        if not any(name == one or name.startswith(f"{one}.") for one in others):
            yield f"{name or 'the model'} has a {hook.kind} ({hook.where})"
