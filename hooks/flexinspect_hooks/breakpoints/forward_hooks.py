"""Breakpoints inside a forward: hooks on modules, and checks of each attention call.

The hooks are installed only while a breakpoint that needs them is enabled; they are installed and
removed in the model's thread between two forwards.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexinspect.breakpoints import grammar
from flexinspect.breakpoints.evaluation import Observation
from flexinspect.breakpoints.grammar import matches_module, observations_in
from flexinspect.breakpoints.store import Breakpoint
from flexinspect.core.text import plural
from flexinspect_hooks.breakpoints.observations import BreakpointEvaluator, ObservedStep
from flexinspect_hooks.capture.hook import CaptureContext, Remove
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.observers.attention.call_references import AttentionCall
from flexinspect_hooks.observers.attention.kernel_calls import KernelCall

_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


class ModelBreakpoints:
    """Evaluates the breakpoints of a process in the session of one model."""

    def __init__(
        self, evaluator: BreakpointEvaluator, context: CaptureContext, drain: Callable[[], None]
    ) -> None:
        self.evaluator, self._context, self._drain = evaluator, context, drain
        self._version = -1
        self._breakpoints: tuple[Breakpoint, ...] = ()
        self._remove_hooks: list[Remove] = []
        self._checked: frozenset[str] = frozenset()
        self._call_kinds: frozenset[str] = frozenset()
        self._kinds_of: dict[int, tuple[str, frozenset[str]]] = {}
        self._observed_step: ObservedStep | None = None
        self._flex_layers: set[int] = set()
        self._generation = -1

    def on_step_start(self, step: StepContext) -> None:
        """Prepare for a step, in the model's thread. A stop is not part of the step's time."""
        if self.evaluator.store.version == self._version and not self._breakpoints:
            return  # as in most runs, at the cost of one comparison
        stop_started = time.perf_counter()
        self.deliver_hits()
        stopped_s = time.perf_counter() - stop_started
        step.started, step.started_at = step.started + stopped_s, step.started_at + stopped_s
        step.capture_s -= stopped_s
        if self.evaluator.store.version != self._version:
            self._prepare()
        if not self._breakpoints:
            return
        if step.generation != self._generation:
            self._generation = step.generation
            self._flex_layers.clear()
        self._observed_step = self.evaluator.begin_step(step)
        self._observed_step.checked |= self._checked
        self._evaluate()

    @property
    def is_active(self) -> bool:
        """Whether any breakpoint was enabled when the last step started."""
        return bool(self._breakpoints)

    def deliver_hits(self) -> None:
        """Stop now for hits of earlier steps."""
        self.evaluator.stop_action.deliver_hits(self._drain, sys._getframe(1))

    def remove(self) -> None:
        """Remove all hooks."""
        while self._remove_hooks:
            self._remove_hooks.pop()()
        self._context.on_call = self._context.on_kernel = None
        self._observed_step = None

    # -- installation ---------------------------------------------------------------------------

    def _prepare(self) -> None:
        self.remove()
        self._version = self.evaluator.store.version
        self._breakpoints = self.evaluator.store.enabled()
        wanted = {
            seen: met for met in self._breakpoints for seen in observations_in(met.expression)
        }
        by_name = {seen: met for seen, met in wanted.items() if seen.is_checked_by_name}
        self._checked = frozenset(grammar.to_text(seen) for seen in by_name)
        self._kinds_of = self._install(by_name)
        self._call_kinds = frozenset(s.kind for s in wanted) & {grammar.EMPTY_ROW, grammar.FALLBACK}
        calls_needed = any(grammar.needs_calls(met.expression) for met in self._breakpoints)
        if self._call_kinds or self._kinds_of or calls_needed:
            self._context.on_call = partial(self._guard, self._on_call)
            self._context.on_kernel = partial(self._guard, self._on_kernel_call)

    def _install(
        self, by_name: Mapping[grammar.ObservationCondition, Breakpoint]
    ) -> dict[int, tuple[str, frozenset[str]]]:
        """Hook every matching module; return name and observation kinds by the id of the module."""
        found: dict[int, tuple[str, frozenset[str]]] = {}
        left = dict(by_name)
        for name, module in self._context.model.named_modules():
            seen = [one for one in by_name if matches_module(one.module_pattern or "", name)]
            if not seen or not name:
                continue
            kinds = frozenset(one.kind for one in seen)
            found[id(module)] = name, kinds
            check = partial(self._check_output, name, self._layer_of(name), kinds)
            self._remove_hooks.append(self._context.on_output(module, partial(self._guard, check)))
            for one in seen:
                left.pop(one, None)
        for one, met in left.items():
            self.evaluator.report_once(met.info.id, self._no_such_module(one))
        return found

    def _no_such_module(self, seen: grammar.ObservationCondition) -> str:
        names = [name for name, _ in self._context.model.named_modules() if "attn" in name]
        example = f" (they are called {names[0]}, ...)" if names else ""
        return f"{grammar.to_text(seen)}: no module of the model has a matching name{example}."

    # -- while the forward runs ------------------------------------------------------------------

    def _layer_of(self, name: str) -> int | None:
        for layer, (block, _) in self._context.blocks.items():
            if name == block or name.startswith(f"{block}."):
                return layer
        number = _NUMBER.search(name)
        return int(number[1]) if number else None

    def _check_output(
        self, name: str, layer: int | None, kinds: frozenset[str], output: Any, part: str = ""
    ) -> None:
        for kind in sorted(kinds, reverse=True):
            if self._observed_step is not None and (text := describe_bad_values(kind, output)):
                self._observe(kind, name, layer, f"{text} of {part}{name}")

    def _on_kernel_call(self, done: KernelCall) -> None:
        """Handle the return of a kernel that the user's code called directly."""
        call = None if self._observed_step is None else AttentionCall.of_kernel(done, "direct")
        if call is not None:
            self._on_call(call)

    def _on_call(self, call: AttentionCall) -> None:
        """Handle the return of an attention call."""
        observed = self._observed_step
        if observed is None:
            return
        layer = call.layer
        known = observed.layers.setdefault(layer, {"layer": layer})
        known |= {"path": call.path, "q_len": call.query.shape[2], "kv_len": call.key.shape[2]}
        observed.checked |= self._call_kinds
        name, kinds = self._kinds_of.get(id(call.module), ("", frozenset()))
        self._check_output(name, layer, kinds, call.output, "the attention in ")
        self._check_call(call, observed)
        self._evaluate()

    def _check_call(self, call: AttentionCall, observed: ObservedStep) -> None:
        layer = call.layer
        if grammar.EMPTY_ROW in self._call_kinds and (rows := empty_rows(call)):
            first = int(observed.values["kv_len"]) - call.query.shape[2]
            text = format_rows([first + row for row in rows])
            verb = "attend" if len(rows) > 1 else "attends"
            self._observe(grammar.EMPTY_ROW, self._name_of(call), layer, f"{text} {verb} to no key")
        if call.path.startswith("flex"):
            self._flex_layers.add(layer)
        elif grammar.FALLBACK in self._call_kinds and (
            call.suppressed_exception or layer in self._flex_layers
        ):
            why = "where it ran FlexAttention before"
            if call.suppressed_exception:
                why = f"after {call.suppressed_exception}"
            text = f"layer {layer} ran {call.path}, {why}"
            self._observe(grammar.FALLBACK, self._name_of(call), layer, text)

    def _name_of(self, call: AttentionCall) -> str:
        names = (name for name, one in self._context.model.named_modules() if one is call.module)
        return next(names, "")

    def _observe(self, kind: str, module: str, layer: int | None, text: str) -> None:
        observed, observation = self._observed_step, Observation(kind, module, layer, text)
        if observed is not None and observation not in observed.observed:
            observed.observed.append(observation)
            if layer is not None:
                observed.layers.setdefault(layer, {"layer": layer})
            self._evaluate()

    def _guard(self, check: Callable[..., None], *args: Any) -> None:
        """Run a check; an exception in it disables checks for this step and is reported."""
        try:
            check(*args)
        except Exception as error:
            self._observed_step = None
            what = f"{type(error).__name__}: {error}"
            for met in self._breakpoints:
                self.evaluator.report_once(
                    met.info.id, f"{met.info.text} failed while the model ran: {what}"
                )

    def _evaluate(self) -> None:
        """Evaluate the observations so far, if the action can stop inside the forward."""
        if self._observed_step is not None and self.evaluator.stop_action.can_stop_in_forward():
            self.evaluator.evaluate_in_forward(
                self._observed_step, self._breakpoints, sys._getframe(1)
            )


_MAX_NAMED_ROWS = 4
"""Most rows that a message lists."""

_MAX_DEPTH = 3


def describe_bad_values(kind: str, output: Any) -> str:
    """Return the number of NaNs or infinities in a module's outputs, and their rows, as text.

    Empty if there is none. Rows are those of batch 0 of (batch, rows, ...).
    """
    for tensor in _float_tensors(output):
        flags = torch.isnan(tensor) if kind == grammar.NAN else torch.isinf(tensor)
        n = int(flags.sum())
        if n:
            values = plural(n, f"{'NaN' if kind == grammar.NAN else 'infinite'} value")
            if flags.dim() != 3:
                return values
            rows = torch.nonzero(flags[0].any(-1)).flatten().tolist()
            where = f"in {format_rows(rows)}" if rows else "(in another row of the batch)"
            return f"{values} {where}"
    return ""


def _float_tensors(output: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif depth < _MAX_DEPTH and isinstance(output, tuple | list | dict):
        for one in output.values() if isinstance(output, dict) else output:
            yield from _float_tensors(one, depth + 1)


def format_rows(rows: list[int]) -> str:
    """Return "row 3", "rows 3, 4, 5" or "rows 3, 4, 5, 6 and 12 more"."""
    named = ", ".join(map(str, rows[:_MAX_NAMED_ROWS]))
    more = f" and {len(rows) - _MAX_NAMED_ROWS} more" if len(rows) > _MAX_NAMED_ROWS else ""
    return f"row{'s' if len(rows) > 1 else ''} {named}{more}"


def empty_rows(call: AttentionCall) -> list[int]:
    """Return the rows of batch 0 of an attention call that attend to no key in some head.

    Determined from the kernel's LSE if it is available, otherwise from a dense mask, otherwise from
    an output of exact zeros, which FlexAttention returns for an empty row.
    """
    if call.lse is not None:
        closed = torch.isneginf(call.lse[0]).any(0)
    elif isinstance(call.mask, Tensor):
        closed = _masked_rows(call.mask)
    elif call.path.startswith("flex"):
        closed = (call.output[0] == 0).all(-1).any(-1)
    else:
        return []
    rows: list[int] = torch.nonzero(closed).flatten().tolist()
    return rows


def _masked_rows(mask: Tensor) -> Tensor:
    """Return which rows of a dense mask (..., rows, keys) are fully masked in some head."""
    while mask.dim() > 3:
        mask = mask[0]
    if mask.dtype == torch.bool:
        closed = ~mask.any(-1)
    elif mask.is_floating_point():
        closed = (mask <= torch.finfo(mask.dtype).min).all(-1)
    else:
        return torch.zeros(mask.shape[-2], dtype=torch.bool, device=mask.device)
    return closed.any(0) if closed.dim() > 1 else closed
