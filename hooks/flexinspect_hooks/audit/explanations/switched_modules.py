"""Modules of the program that were switched while one text was computed, such as an adapter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn

from flexinspect_hooks.audit.evidence.audited_sequence import AuditedSequence, AuditedStep
from flexinspect_hooks.audit.evidence.row_comparison import relative
from flexinspect_hooks.audit.forward.module_state import Change, RowStates
from flexinspect_hooks.audit.forward.program_modules import ProgramModule, own_tensors
from flexinspect_hooks.audit.reference.reference_model import ReferenceModel
from flexinspect_hooks.capture.quiet_modules import quiet_module

AGAIN = (
    "from step {step} on: modules of the program were switched, and its forwards compute earlier "
    "rows again in the new state"
)
_LEAST, _ROUNDINGS = 1e-3, 8
"""A row is another one if it moves by so much of its norm, and by so many roundings."""
_ROWS, _MAX_TRIED = 4, 4
"""Rows, and modules that are called to see whether one value matters."""
_LAYER = re.compile(r"\.\d+\.")


class Switch(Struct, frozen=True):
    """A change of state from which on modules compute something else, and the names of these."""

    states: RowStates
    part: int
    names: tuple[str, ...]

    @property
    def first_row(self) -> int:
        """The first row that was computed in the new state."""
        return self.states.starts[self.part]


def find_switch(reference: ReferenceModel, states: RowStates) -> Switch | None:
    """Return the first change of state that changes what modules compute, None without one.

    A module that counts its calls changes its state in each step, and nothing else.
    """
    for part in range(1, len(states.starts)):
        changes = states.changes(part)
        names = [name for name in reference.taken if any(_may_reach(one, name) for one in changes)]
        before, now = (_outputs(reference, names, states, one) for one in (part - 1, part))
        different = tuple(name for name in names if _is_other(before[name], now[name]))
        if different:
            return Switch(states, part, different)
    return None


def _may_reach(change: Change, name: str) -> bool:
    """Whether a value is in a module, or in none alone."""
    return not change.owner or f"{change.owner}.".startswith(f"{name}.")


def _outputs(
    reference: ReferenceModel,
    names: Sequence[str],
    states: RowStates,
    part: int,
    instead: int | None = None,
) -> dict[str, Tensor | None]:
    """Return what modules give for random rows in a state, with one slot from the part before."""
    given = {name: (_program_of(reference, name), reference.taken_widths[name]) for name in names}
    with ExitStack() as stack:
        stack.enter_context(states.set(part))
        if instead is not None:
            stack.enter_context(states.set(part - 1, only=instead))
        return {name: _output(*module) for name, module in given.items()}


def first_step_computed_again(sequence: AuditedSequence, switch: Switch) -> AuditedStep | None:
    """Return the first step after a switch that computes rows of the time before it again."""
    later = (one for one in sequence.steps if one.first_row >= switch.first_row)
    return next((one for one in later if one.evidence.kv_before < one.first_row), None)


# -- what the finding says -------------------------------------------------------------------------


def describe_switch(
    reference: ReferenceModel, sequence: AuditedSequence, switch: Switch, generation: int
) -> dict[str, Any] | None:
    """Return what was switched, as the data of an event; None if not in this generation."""
    states, part, columns = switch.states, switch.part, sequence.input_rows
    step = next(one for one in sequence.steps if one.first_row >= switch.first_row)
    if step.evidence.generation != generation:
        return None
    changes = states.changes(part)
    changes = [one for one in changes if _matters(reference, switch, one)] or changes
    turned = dict(_turned(reference, switch))
    ends, names = {*turned.values()}, list(turned) or list(switch.names)
    values = dict.fromkeys((one.name, _text(one.before), _text(one.after)) for one in changes)
    classes = {type(_program_of(reference, name)).__name__ for name in names}
    return {
        "step": step.evidence.step,
        "pos": columns[switch.first_row],
        "before": [columns[states.starts[part - 1]], columns[switch.first_row - 1]],
        "use": ends.pop() if len(ends) == 1 else "",
        "modules": list(dict.fromkeys(_LAYER.sub(".*.", name, 1) for name in names)),
        "n_modules": len(names),
        "classes": sorted(classes),
        "values": [[*one] for one in values],
        "n_later": len(states.starts) - 1 - part,
    }


def _matters(reference: ReferenceModel, switch: Switch, change: Change) -> bool:
    """Whether a module computes something else if one value is that of the part before."""
    names = [name for name in switch.names if _may_reach(change, name)][:_MAX_TRIED]
    now, before = (
        _outputs(reference, names, switch.states, switch.part, instead)
        for instead in (None, change.slot)
    )
    return any(_is_other(before[name], now[name]) for name in names)


def _text(value: Any) -> str:
    return "not set" if type(value) is object else repr(value)


def _turned(reference: ReferenceModel, switch: Switch) -> Iterator[tuple[str, str]]:
    """Yield the adapters that a change of state turned on or off, and which of them."""
    part, states = switch.part, switch.states
    before, now = (_outputs(reference, switch.names, states, one) for one in (part - 1, part))
    for name in switch.names:
        children = _program_of(reference, name).children()
        base = next((one for one in children if isinstance(one, nn.Linear)), None)
        if base is None:
            continue
        alone = _output(base, base.in_features)
        is_off = [not _is_other(one, alone) for one in (before[name], now[name])]
        if is_off[0] != is_off[1]:
            yield name, "off" if is_off[1] else "on"


def _program_of(reference: ReferenceModel, name: str) -> nn.Module:
    module = reference.taken[name]
    return module.held if isinstance(module, ProgramModule) else module


def _output(module: nn.Module, width: int) -> Tensor | None:
    """Return the output for random rows (1, rows, width), None if the module takes others."""
    tensors = [one for one in own_tensors(module) if one.is_floating_point()]
    maker = torch.Generator().manual_seed(0)
    rows = torch.randn(1, _ROWS, width, generator=maker)
    rows = rows.to(tensors[0]) if tensors else rows
    with quiet_module(module):
        try:
            output = module(rows)
        except Exception:  # a module of the program may be of any kind
            return None
    return output if isinstance(output, Tensor) and output.dim() == 3 else None


def _is_other(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return False
    limit = max(_LEAST, _ROUNDINGS * torch.finfo(one.dtype).eps)
    return bool((relative(one[0], other[0]) > limit).any())
