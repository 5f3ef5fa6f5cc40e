"""Forward hooks that the program put on its modules, and what they do in the reference.

A hook sees the rows of one forward of the program, of all batch rows. The reference runs the whole
text of one batch row at once, so it calls the hook once for each forward of the program, with the
rows of that forward; all batch rows are copies of the one that is judged. What the hook changes in
the judged row is changed in the reference. So a batch row that a hook leaves as it is, where it
changes its copy, is left out because of its place in the batch.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Any

import torch
from msgspec import Struct, field
from msgspec.structs import replace
from torch import Tensor, nn

from flexinspect_hooks.capture.quiet_modules import may_change
from flexinspect_hooks.python_internals.torch_private import MODULE_HOOKS

_LIBRARIES = ("flexinspect", "torch.", "accelerate.", "transformers.")
"""Beginnings of the names of modules whose hooks are no code of the program."""
MAX_ALONE = 4
"""Hooks that are tried without the others."""


class ProgramHook(Struct, frozen=True):
    """A hook of the program on the module `name`; a pre-hook changes the module's input."""

    name: str
    function: Any
    is_pre: bool
    has_kwargs: bool

    @property
    def where(self) -> str:
        """The hook's function and its line."""
        return code_text(self.function) or type(self.function).__name__

    @property
    def kind(self) -> str:
        """What torch calls such a hook."""
        return "forward pre-hook" if self.is_pre else "forward hook"

    def is_same(self, other: ProgramHook) -> bool:
        """Whether another one is the same function on the same module."""
        return self.function is other.function and (self.name, self.is_pre) == (
            other.name,
            other.is_pre,
        )


def hooks_of(model: nn.Module) -> tuple[ProgramHook, ...]:
    """Return the hooks of the program on modules of a model that may change what passes there."""
    found = []
    for name, module in model.named_modules():
        for attribute, flags in MODULE_HOOKS.items():
            for key, hook in getattr(module, attribute, {}).items():
                function = getattr(hook, "func", hook)
                own = not str(getattr(function, "__module__", "")).startswith(_LIBRARIES)
                if own and may_change(hook):
                    has_kwargs = key in getattr(module, flags[0], {})
                    found.append(ProgramHook(name, hook, "pre" in attribute, has_kwargs))
    return tuple(found)


def code_text(function: Any) -> str:
    """Return the name and the line of a function of the program, empty for one of a library."""
    function = getattr(function, "__func__", function)
    function = getattr(function, "func", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    return f"{function.__qualname__} at {PurePath(code.co_filename).name}:{code.co_firstlineno}"


class HookSpan(Struct, frozen=True):
    """The rows of one forward of the program that a hook saw.

    `places` are the positions of the text whose rows stand for its rows: padding gets a copy of a
    row. Those from row `begin` on are `own`. They are in row `batch` of `n_batch`, and `step` is
    the number of the forward.
    """

    step: int
    places: tuple[int, ...]
    own: tuple[int, ...]
    begin: int
    batch: int
    n_batch: int

    @property
    def end(self) -> int:
        """The last row of the text."""
        return self.begin + len(self.own) - 1

    def among(self, known: Sequence[int]) -> HookSpan | None:
        """Return the span with those positions only that are `known`, None if there is none."""
        if len(known) == known[-1] + 1 > self.own[-1]:
            return self  # all are
        own = tuple(place for place in self.own if place in known)
        return replace(self, places=own, own=own, begin=0) if own else None


class HookEffect(Struct, frozen=True):
    """What a hook changed in a forward: positions of the text, batch rows, and by how much.

    `size` is the largest change relative to the norm of its row.
    """

    step: int
    positions: tuple[int, ...]
    batch_rows: tuple[int, ...]
    n_batch: int
    size: float


_Call = Callable[[Tensor, Any, Any], Any]
"""Calls a hook with the rows that it may change, and the arguments of its module."""


class HookInReference(Struct):
    """A hook of the program that runs on a module of the reference, for the forwards `spans`.

    `module` is the program's, which the hook gets, and `dtype` that of its hidden states.
    `is_first`: the value that is compared with the program's has the change in it. `effects` are
    those of the last run. A run raises whatever the hook raises, and `ValueError` for a hook that
    is no function of its input.
    """

    hook: ProgramHook
    module: nn.Module
    spans: Sequence[HookSpan]
    dtype: torch.dtype
    is_first: bool = True
    returns_tensor: bool = True
    is_checked: bool = False
    effects: dict[int, HookEffect] = field(default_factory=dict)
    _n: int = 0
    _logit_rows: Sequence[int] = ()

    def install(self, module: nn.Module, n: int, logit_rows: Sequence[int]) -> Callable[[], None]:
        """Put the hook on a module of the reference, and return what removes it.

        The module gives rows of all `n` positions, or only those of `logit_rows`.
        """
        self._n, self._logit_rows = n, logit_rows
        if self.hook.is_pre:
            before = self._before()
            return module.register_forward_pre_hook(before, with_kwargs=True).remove
        after = self._after()
        first = self.is_first
        return module.register_forward_hook(after, with_kwargs=True, prepend=first).remove

    def _before(self) -> Callable[..., Any]:
        def call(given: Tensor, args: Any, kwargs: Any) -> Any:
            args = (given, *args[1:]) if args else ()
            if not self.hook.has_kwargs:
                return self.hook.function(self.module, args)
            kwargs = kwargs if args else kwargs | {"hidden_states": given}
            pair = self.hook.function(self.module, args, kwargs)
            return pair if pair is None else (pair[0] or (pair[1].get("hidden_states"),))

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not args and not self.hook.has_kwargs:
                return None  # the hook sees no tensor
            rows = args[0] if args else kwargs.get("hidden_states")
            changed = self._changed(rows, call, args, kwargs)
            if changed is None:
                return None
            if args:
                return (changed, *args[1:]), kwargs
            return args, kwargs | {"hidden_states": changed}

        return before

    def _after(self) -> Callable[..., Any]:
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            rows = output[0] if isinstance(output, tuple) else output
            self.returns_tensor = not isinstance(output, tuple)

            def call(given: Tensor, args: Any, kwargs: Any) -> Any:
                whole = (given, *output[1:]) if isinstance(output, tuple) else given
                more = (kwargs,) if self.hook.has_kwargs else ()
                return self.hook.function(self.module, args, *more, whole)

            changed = self._changed(rows, call, args, kwargs)
            if changed is None:
                return None
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        return after

    def _changed(self, rows: Any, call: _Call, args: Any, kwargs: Any) -> Tensor | None:
        """Return rows (1, n, size) with the hook's change; None if it is made in them, or none.

        Raises `ValueError` for a hook that is no function of its input.
        """
        if not isinstance(rows, Tensor) or rows.dim() != 3 or not self.spans:
            return None
        known = list(range(self._n)) if rows.shape[1] == self._n else sorted(self._logit_rows)
        if rows.shape[1] != len(known):
            return None
        self.effects.clear()
        output, is_in_place = rows.clone(), False
        for span in self.spans:
            part = span.among(known)
            if part is None:
                continue
            given = self._rows_of_forward(rows, part, known)
            some = tuple(self._rows_of_forward(one, part, known) for one in args)
            more = {name: self._rows_of_forward(one, part, known) for name, one in kwargs.items()}
            with contextlib.redirect_stdout(io.StringIO()):
                if not self.is_checked:
                    self._check(call, given, some, more)
                before = given.clone()
                result = _first_tensor(call(given, some, more), given)
            is_in_place |= result is given
            change = (result - before).to(rows.dtype)
            own = change[part.batch, part.begin : part.end + 1]
            places = [known.index(place) for place in part.own]
            output[0, places] += own
            self._keep_effect(part, change, before)
        self.is_checked = True
        if not self.effects:
            return None
        if is_in_place:  # what else reads the tensor sees the change
            rows.copy_(output)
            return None
        return output

    def _rows_of_forward(self, value: Any, span: HookSpan, known: list[int]) -> Any:
        """Return the rows of one forward of a tensor, as the program's hook got them."""
        is_rows = isinstance(value, Tensor) and value.dim() == 3
        if not is_rows or value.shape[:2] != (1, len(known)):
            return value
        index = torch.tensor([known.index(place) for place in span.places], device=value.device)
        rows = value[0, index]
        rows = rows.to(self.dtype) if rows.is_floating_point() else rows
        return rows.expand(span.n_batch, -1, -1).clone()

    def _check(self, call: _Call, given: Tensor, args: Any, kwargs: Any) -> None:
        """Raise `ValueError` if the hook is no function of its input, as random numbers are not.

        The noise that limits are made of would have the hook's noise in it.
        """
        copies = given.clone(), given.clone()
        one, other = (_first_tensor(call(copy, args, kwargs), copy) for copy in copies)
        if not torch.equal(one, other):
            raise ValueError("The hook gives other values for the same input.")

    def _keep_effect(self, span: HookSpan, change: Tensor, before: Tensor) -> None:
        is_changed = (change != 0).any(-1)  # (batch, rows)
        if not bool(is_changed.any()):
            return
        own = is_changed[span.batch, span.begin : span.end + 1].tolist()
        norms = before.float().norm(dim=-1).clamp_min(1e-12)
        self.effects[span.step] = HookEffect(
            span.step,
            tuple(place for place, changed in zip(span.own, own, strict=True) if changed),
            tuple(is_changed.any(1).nonzero().flatten().tolist()),
            span.n_batch,
            float((change.float().norm(dim=-1) / norms).max()),
        )


def _first_tensor(returned: Any, given: Tensor) -> Tensor:
    """Return the tensor that a hook returned, that which it was given if it returned nothing."""
    if returned is None:
        return given
    first = returned[0] if isinstance(returned, tuple | list) else returned
    if not isinstance(first, Tensor) or first.shape != given.shape:
        raise ValueError("The hook returns something of another kind or shape.")
    return first


def hook_spans(steps: Sequence[Any], hook: ProgramHook) -> Iterator[HookSpan]:
    """Yield the rows of each step (`AuditedStep`) in which a hook was on its module.

    Raises `ValueError` if rows between the first and the last one of a step are not of the text.
    """
    for step in steps:
        evidence = step.evidence
        if not any(one.is_same(hook) for one in evidence.hooks):
            continue
        rows = evidence.rows.cpu()[step.kept]
        first, last = int(step.positions[0]), int(step.positions[-1])
        begin, end = int(rows[0]), int(rows[-1])
        if last - first != end - begin:
            raise ValueError("The step has gaps.")
        shift = first - begin
        places = tuple(min(max(row + shift, 0), last) for row in range(evidence.q_len))
        own = tuple(range(first, last + 1))
        yield HookSpan(evidence.step, places, own, begin, step.row, len(evidence.ids))


def describe_hook(hooked: HookInReference, columns: Sequence[int]) -> dict[str, Any]:
    """Return what a hook changed, as the data of an event; `columns` are those of the positions."""
    effects = [hooked.effects[step] for step in sorted(hooked.effects)]
    first = effects[0]
    rows = sorted({row for one in effects for row in one.batch_rows})
    return {
        "where": hooked.hook.where,
        "module": hooked.hook.name,
        "kind": hooked.hook.kind,
        "returns_tensor": hooked.returns_tensor and not hooked.hook.is_pre,
        "step": first.step,
        "n_steps": len(effects),
        "n_rows": sum(len(one.positions) for one in effects),
        "positions": [columns[place] for place in first.positions],
        "batch_rows": rows,
        "n_batch": max(one.n_batch for one in effects),
        "size": max(one.size for one in effects),
    }


def hook_choices(
    steps: Sequence[Any], modules: nn.Module, known: Sequence[str], dtype: torch.dtype
) -> Iterator[tuple[HookInReference, ...]]:
    """Yield hooks of the program that may act in the reference: all together, then each alone.

    `modules` holds the program's modules under their names, and `known` are those of the reference.
    The value of a module is compared with the program's as it is after the hook, or before it.
    """
    hooks = list[ProgramHook]()
    for step in steps:
        for hook in step.evidence.hooks:
            if hook.name in known and not any(hook.is_same(one) for one in hooks):
                hooks.append(hook)
    groups = [hooks] if hooks else []
    groups += [[one] for one in hooks[:MAX_ALONE]] if len(hooks) > 1 else []
    for group in groups:
        for is_first in (True, False):
            yield tuple(
                HookInReference(
                    hook,
                    modules.get_submodule(hook.name),
                    tuple(hook_spans(steps, hook)),
                    dtype,
                    is_first,
                )
                for hook in group
            )
