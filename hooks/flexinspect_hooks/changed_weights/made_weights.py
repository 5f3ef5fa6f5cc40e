"""What a program changed in the weights of a model between making, or loading, and running it.

Small parameters are copied when the model is made. Of larger ones a block is kept, of evenly spaced
rows and columns: a block of a matrix of rank r has a rank of at most r, so a merged adapter shows.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from msgspec import Struct
from torch import Tensor, nn

from flexinspect_hooks.audit.forward.program_modules import is_of_program, own_tensors
from flexinspect_hooks.changed_weights.adapter_factors import AdapterFactors
from flexinspect_hooks.changed_weights.adapter_places import place_facts
from flexinspect_hooks.changed_weights.merged_adapters import MovedChange, adapters_twice
from flexinspect_hooks.changed_weights.parameter_writes import ParameterWrites
from flexinspect_hooks.changed_weights.replaced_weights import (
    is_conv,
    replaced_facts,
    weights_of,
    wrapped_weights,
)
from flexinspect_hooks.changed_weights.weight_changes import Delta, change_facts
from flexinspect_hooks.changed_weights.weight_orders import Weights, order_facts
from flexinspect_hooks.python_internals.default_device import cpu_by_default
from flexinspect_hooks.python_internals.patching import patch
from flexinspect_hooks.python_internals.torch_private import tensor_version

_SIDE = 64
"""Rows and columns of a block."""
_RANK_SIDE = 24
"""Rows and columns whose rank is measured."""
_MAX_RANK = 0.75
"""A rank above this part of the side counts as full: random matrices may just miss it."""
_WHOLE = 1 << 16
"""Elements up to which a parameter is copied as a whole."""
_MAX_GENERATIONS = 16
"""How often the weights of a model are compared."""
_MAX_LISTED = 64
_MAX_UNCHANGED = 3
"""After how many comparisons without a change the factors of adapters are dropped."""
_LAYER = re.compile(r"\.(\d+)\.")

ReplacedFacts = tuple[str, dict[str, Any]]


_Owners = dict[int, tuple[weakref.ref[nn.Parameter], str]]


class _Made(Struct):
    """The blocks and shapes of a model's parameters by name, and how often each was written to.

    `owners` are the parameters themselves: an adapter may hold one under another name. `flipped`
    are the weights that are (inputs, outputs).
    """

    blocks: dict[str, Tensor]
    shapes: dict[str, torch.Size]
    versions: dict[str, int]
    owners: _Owners
    flipped: set[str]
    n_compared: int = 0
    reported: str = ""


class _WeightChanges(Struct, frozen=True):
    """The data of an event, by how much matrices changed, the parameters that still have their
    shape, and which of those changed. `moved` are matrices that changed and have another name."""

    facts: dict[str, Any]
    deltas: dict[str, Delta]
    same: dict[str, nn.Parameter]
    changed: set[str]
    moved: dict[str, MovedChange]

    def weights(self, model: nn.Module, made: _Made) -> Weights:
        return weights_of(model, self.same, made.blocks, self.changed, block_places)


class MadeWeights:
    """Keeps blocks of the weights of each model that transformers makes or loads."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[nn.Module, _Made] = WeakKeyDictionary()
        self._writes = ParameterWrites(self._on_write)
        self._factors = AdapterFactors(self._writes.is_followed)
        self._n_unchanged = 0
        self.on_made: list[Callable[[nn.Module], None]] = []
        """Called with each model that was made or loaded."""

    def models(self) -> Iterator[nn.Module]:
        """Yield the models that were made and still exist."""
        yield from list(self._made)

    def watch(self) -> Callable[[], None]:
        """Keep blocks from now on; returns a function that stops it.

        transformers.modeling_utils must be loaded.
        """
        from transformers import modeling_utils

        stack = ExitStack()
        stack.callback(self._watch_call(modeling_utils.PreTrainedModel, "post_init"))
        if hasattr(modeling_utils, "log_state_dict_report"):  # called when a checkpoint is loaded
            stack.callback(self._watch_call(modeling_utils, "log_state_dict_report"))
        self._writes.watch()
        stack.callback(self._writes.stop)
        return stack.close

    def _on_write(self) -> None:
        self._factors.read_callers()
        if self._factors.is_exhausted:
            self._writes.stop()

    def _watch_call(self, owner: Any, name: str) -> Callable[[], None]:
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            model = args[0] if args else kwargs.get("model")
            if isinstance(model, nn.Module):
                with suppress(Exception), torch.no_grad():  # a model may be of any kind
                    self._keep(model)
            return result

        return patch(owner, name, call)

    def _keep(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        if named and not any(one.is_meta for one in named.values()):
            owners = {id(one): (weakref.ref(one), name) for name, one in named.items()}
            shapes = {name: one.shape for name, one in named.items()}
            flipped = {
                f"{name}.weight" for name, module in model.named_modules() if is_conv(module)
            }
            versions = _versions(named)
            self._made[model] = _Made(_blocks(named), shapes, versions, owners, flipped)
            self._writes.follow(model)
            for call in self.on_made:
                call(model)

    def changed(self, model: nn.Module) -> dict[str, Any] | None:
        """Return which parameters changed since they were made, as the data of an event.

        None if none did, if all did alike, or if it was reported already.
        """
        made = self._made.get(model)
        if made is None or made.n_compared >= _MAX_GENERATIONS:
            return None
        made.n_compared += 1
        facts: dict[str, Any] = {}
        with suppress(Exception), torch.no_grad(), cpu_by_default():
            changes = _changes(made, model)
            facts = changes.facts
            if str(facts) == made.reported:
                facts = {}
            elif facts:
                made.reported = str(facts)
                self._judge(model, made, changes)
        self._n_unchanged = 0 if facts else self._n_unchanged + 1
        if facts or self._n_unchanged > _MAX_UNCHANGED:  # else they may be for another model
            self._factors.clear()
        return facts or None

    def moved_of(self, model: nn.Module) -> Callable[[nn.Module], dict[str, nn.Parameter]]:
        """Return a function that returns parameters by the names with which they were made.

        It takes the model, or a proxy of it. Only parameters of modules of the program that have no
        other floating-point tensors are returned: then such a module computes what the one in whose
        place it is does, from the same weights.
        """
        made = self._made.get(model)
        owners = {} if made is None else made.owners
        return lambda now: _moved(owners, now)

    def replaced_of(self, model: nn.Module) -> Callable[[nn.Module], Iterator[ReplacedFacts]]:
        """Return a function that yields what is wrong with modules in the place of weights.

        See `replaced_facts`. It takes a module with the children of the model, which may be gone,
        and its configuration. It calls modules, so the program must be over.
        """
        made = self._made.get(model)

        def replaced(root: nn.Module) -> Iterator[ReplacedFacts]:
            if made is not None:
                changes, followed = _changes(made, root), self._writes.is_followed
                weights = changes.weights(root, made)
                yield from replaced_facts(
                    root, weights, made, changes.changed, followed, block_places
                )

        return replaced

    def _judge(self, model: nn.Module, made: _Made, changes: _WeightChanges) -> None:
        """Add what is wrong with the changes."""
        facts, deltas = changes.facts, changes.deltas
        with suppress(Exception):
            weights = changes.weights(model, made)
            facts["orders"] = order_facts(model, weights)
            facts["twice"] = adapters_twice(model, changes.moved)
            facts["wrapped"] = list(wrapped_weights(weights, changes.same, made.blocks))
        # Each by itself: modules of the program, and tensors that it holds, may be of any kind.
        with suppress(Exception):
            self._factors.read_callers()
        with suppress(Exception):
            facts |= change_facts(model, deltas, self._factors.matrices())
        with suppress(Exception):
            facts |= place_facts(model, deltas, self._factors.pairs())
            surely = {one["name"] for one in facts.get("flipped", ())}
            others = [one for one in facts.get("transposed", ()) if one["name"] not in surely]
            facts["transposed"] = others

    def drop_factors(self) -> None:
        """Drop the factors of adapters that were found, and look for no more."""
        self._writes.stop()
        self._factors.clear()


def _changes(made: _Made, model: nn.Module) -> _WeightChanges:
    """Return which parameters changed, and by how much matrices did."""
    named, same = dict(model.named_parameters()), {}
    for name, one in named.items():
        owner, known = made.owners.get(id(one), (None, name))
        is_own = owner is not None and owner() is one
        known = known if is_own else name  # a new parameter may have the id of one that is gone
        # A vector of another module, such as a norm of another class, may mean something else.
        # A table that was resized has other rows in its block.
        has_block = known in made.blocks and one.shape == made.shapes[known] and not one.is_meta
        if has_block and (is_own or one.dim() > 1):
            same[known] = one
    blocks, versions = _blocks(same), _versions(same)
    groups: dict[str, list[dict[str, Any]]] = {}
    deltas, changed, moved = dict[str, Delta](), set[str](), dict[str, MovedChange]()
    for name, now in blocks.items():
        before = made.blocks[name]
        if before.shape != now.shape or torch.equal(before, now):
            continue
        changed.add(name)
        gap, rank = now - before, _rank(now - before)
        if name in named and gap.dim() == named[name].dim() == 2:
            deltas[name] = _delta(gap, rank, named[name])
        elif rank and gap.dim() == same[name].dim() == 2:
            moved[name] = MovedChange(same[name], _delta(gap, rank, same[name]))
        found = _LAYER.search(name)
        key = name if found is None else f"{name[: found.start(1)]}*{name[found.end(1) :]}"
        groups.setdefault(key, []).append(
            {
                "layer": None if found is None else int(found[1]),
                # A vector of zeros, such as a bias, is compared with what it became.
                "change": float(gap.norm() / (before.norm() or now.norm())),
                "rank": rank,
                "writes": versions[name] - made.versions[name],
            }
        )
    kept = {name: one for name, one in same.items() if named.get(name) is one}
    if not changed:
        return _WeightChanges({}, {}, kept, changed, moved)
    listed = [{"name": key, "parameters": those} for key, those in groups.items()]
    facts = {"groups": listed[:_MAX_LISTED], "changed": len(changed), "total": len(blocks)}
    return _WeightChanges(facts, deltas, kept, changed & kept.keys(), moved)


def _delta(gap: Tensor, rank: int, whole: Tensor) -> Delta:
    sides = zip(whole.shape, gap.shape, strict=True)
    rows, columns = (_places(n, kept, gap.device) for n, kept in sides)
    return Delta(gap, rank, rows, columns, tuple(whole.shape))


def _rank(gap: Tensor) -> int:
    """Return the rank of a block's change; 0 for vectors, and where it is full."""
    if gap.dim() < 2 or min(gap.shape) < 4 or not bool(gap.isfinite().all()):
        return 0
    gap = _spaced(gap, _RANK_SIDE).double()
    values = torch.linalg.svdvals(gap)
    rank = int((values > 1e-4 * values[0]).sum())
    return 0 if rank > _MAX_RANK * min(gap.shape) else rank


def _blocks(named: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: _block(one.detach()) for name, one in named.items() if one.numel()}


def _block(tensor: Tensor) -> Tensor:
    if tensor.numel() > _WHOLE:
        tensor = _spaced(tensor, _SIDE)
    # A copy, also of a float32 tensor on the CPU, which would be shared.
    return tensor.to("cpu", torch.float32, copy=True)


def _spaced(tensor: Tensor, side: int) -> Tensor:
    for dim in range(min(tensor.dim(), 2)):
        places = _places(tensor.shape[dim], side, tensor.device)
        tensor = tensor.index_select(dim, places)
    return tensor.flatten(2)[..., 0] if tensor.dim() > 2 else tensor


def block_places(n: int) -> Tensor:
    """Return which of n rows, or columns, a block has."""
    return _places(n, _SIDE, torch.device("cpu"))


@functools.lru_cache(maxsize=256)
def _places(n: int, side: int, device: torch.device) -> Tensor:
    count = min(n, side)
    # While a model in bfloat16 is made that is the default dtype, which has too few digits.
    places = torch.linspace(0, n - 1, count, dtype=torch.float64, device="cpu")
    return places.round().long().to(device)


def _versions(named: dict[str, nn.Parameter]) -> dict[str, int]:
    return {name: tensor_version(one) or 0 for name, one in named.items()}


def _moved(owners: _Owners, model: nn.Module) -> dict[str, nn.Parameter]:
    names = {key: name for key, (owner, name) in owners.items() if id(owner()) == key}
    moved = dict[str, nn.Parameter]()
    for module in model.modules() if names else ():
        if is_of_program(module):
            own = [one for one in own_tensors(module) if one.is_floating_point()]
            if all(id(one) in names for one in own):
                moved |= {names[id(one)]: one for one in own if isinstance(one, nn.Parameter)}
    return moved
