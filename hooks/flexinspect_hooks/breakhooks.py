"""Breakpoints inside a forward: hooks on modules, and a look at each attention call.

Installed only while a breakpoint that needs them is switched on, and taken out with it, in the
model's thread between two forwards.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexinspect.breaks import Sighting, to_text
from flexinspect.breaks.book import Breakpoint
from flexinspect.breaks.globs import is_module
from flexinspect.breaks.tree import Seen, sights_in, wants_calls
from flexinspect.breaks.words import EMPTY_ROW, FALLBACK, INF, NAN
from flexinspect_hooks.breaking import Breaking, StepSights
from flexinspect_hooks.callchecks import bad_values, empty_rows, row_words
from flexinspect_hooks.callrefs import CallRef, of_kernel
from flexinspect_hooks.clock import StepContext
from flexinspect_hooks.hook import CaptureContext, Remove
from flexinspect_hooks.kernelcalls import Done

_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


class ModelBreaks:
    """The breakpoints of a process as one model's session judges them."""

    def __init__(
        self, breaking: Breaking, context: CaptureContext, settle: Callable[[], None]
    ) -> None:
        self._breaking, self._context, self._settle = breaking, context, settle
        self._version = -1
        self._breakpoints: tuple[Breakpoint, ...] = ()
        self._removes: list[Remove] = []
        self._looked: frozenset[str] = frozenset()
        self._call_kinds: frozenset[str] = frozenset()
        self._kinds_of: dict[int, tuple[str, frozenset[str]]] = {}
        self._sights: StepSights | None = None
        self._flex: set[int] = set()
        self._generation = -1

    def open(self, step: StepContext) -> None:
        """A step opens, in the model's thread; the time that a stop takes is not the step's."""
        is_changed = self._breaking.book.version != self._version
        if not is_changed and not self._breakpoints:
            return  # as in most runs, at the price of one comparison
        began = time.perf_counter()
        self.pass_on()
        stood = time.perf_counter() - began
        step.started, step.started_at = step.started + stood, step.started_at + stood
        step.capture_s -= stood
        if self._breaking.book.version != self._version:
            self._prepare()
        if not self._breakpoints:
            return
        if step.generation != self._generation:
            self._generation = step.generation
            self._flex.clear()
        self._sights = self._breaking.begin(step)
        self._sights.looked |= self._looked
        self._judge()

    @property
    def is_at_work(self) -> bool:
        """Whether any breakpoint was switched on when the last step opened."""
        return bool(self._breakpoints)

    def move_step(self, step: StepContext, branch: int) -> None:
        """Say that the step that is open belongs to another branch than it was opened in."""
        self._breaking.move(step, branch)

    def judge_again(self, trace: Path, step: StepContext, branch: int) -> None:
        """Judge a step that ran again and is in the trace already; in the writer thread."""
        self._breaking.judge_again(trace, step, branch)

    def pass_on(self) -> None:
        """Let whoever was met in the steps before stop now."""
        self._breaking.stopper.pass_on(self._settle, sys._getframe(1))

    def remove(self) -> None:
        """Take everything out."""
        while self._removes:
            self._removes.pop()()
        self._context.on_call = self._context.on_kernel = None
        self._sights = None

    # -- what is installed -----------------------------------------------------------------------

    def _prepare(self) -> None:
        self.remove()
        self._version = self._breaking.book.version
        self._breakpoints = self._breaking.book.enabled()
        wanted = {seen: met for met in self._breakpoints for seen in sights_in(met.expression)}
        by_name = {seen: met for seen, met in wanted.items() if _is_by_name(seen)}
        self._looked = frozenset(to_text(seen) for seen in by_name)
        self._kinds_of = self._install(by_name)
        self._call_kinds = frozenset(s.kind for s in wanted) & {EMPTY_ROW, FALLBACK}
        if (
            self._call_kinds
            or self._kinds_of
            or any(wants_calls(met.expression) for met in self._breakpoints)
        ):
            self._context.on_call = lambda call: self._guard(self._called, call)
            self._context.on_kernel = lambda done: self._guard(self._kernel_called, done)

    def _install(self, by_name: Mapping[Seen, Breakpoint]) -> dict[int, tuple[str, frozenset[str]]]:
        """Put a hook on every module that is named; returns their names and what is looked for."""
        found: dict[int, tuple[str, frozenset[str]]] = {}
        left = dict(by_name)
        for name, module in self._context.model.named_modules():
            seen = [one for one in by_name if one.place and is_module(one.place, name)]
            if not seen or not name:
                continue
            kinds = frozenset(one.kind for one in seen)
            found[id(module)] = name, kinds
            self._removes.append(module.register_forward_hook(self._look_at(name, kinds)).remove)
            for one in seen:
                left.pop(one, None)
        for one, met in left.items():
            self._breaking.note(met.id, self._nothing_named(one))
        return found

    def _nothing_named(self, seen: Seen) -> str:
        names = [name for name, _ in self._context.model.named_modules() if "attn" in name]
        example = f" (they are called {names[0]}, ...)" if names else ""
        return f"{to_text(seen)}: no module of the model has such a name{example}."

    # -- while the forward runs ------------------------------------------------------------------

    def _look_at(self, name: str, kinds: frozenset[str]) -> Callable[[nn.Module, Any, Any], None]:
        context, layer = self._context, self._layer_of(name)

        def look(module: nn.Module, args: Any, output: Any) -> None:
            # A graph must not hold anything of ours.
            if not torch.compiler.is_compiling() and context.is_open:
                self._guard(self._look, name, layer, kinds, output)

        return look

    def _layer_of(self, name: str) -> int | None:
        for layer, (block, _) in self._context.blocks.items():
            if name == block or name.startswith(f"{block}."):
                return layer
        number = _NUMBER.search(name)
        return int(number[1]) if number else None

    def _look(self, name: str, layer: int | None, kinds: frozenset[str], output: Any) -> None:
        if self._sights is None:
            return
        for kind in sorted(kinds, reverse=True):
            said = bad_values(kind, output)
            if said:
                self._saw(Sighting(kind, name, layer, f"{said} of {name}"))

    def _kernel_called(self, done: Done) -> None:
        """A kernel of own code returned, in the frame that called it."""
        if self._sights is None or done.layer is None or done.module is None:
            return
        call = of_kernel(done, done.layer, "direct", done.module)
        if call is not None:
            self._called(call)

    def _called(self, call: CallRef) -> None:
        """An attention call returned."""
        sights = self._sights
        if sights is None:
            return
        layer = call.layer
        known = sights.layers.setdefault(layer, {"layer": layer})
        known |= {"path": call.path, "q_len": call.query.shape[2], "kv_len": call.key.shape[2]}
        sights.looked |= self._call_kinds
        name, kinds = self._kinds_of.get(id(call.module), ("", frozenset()))
        for kind in kinds:
            said = bad_values(kind, call.output)
            if said:
                self._saw(Sighting(kind, name, layer, f"{said} of the attention in {name}"))
        self._look_at_call(call, sights)
        self._judge()

    def _look_at_call(self, call: CallRef, sights: StepSights) -> None:
        layer = call.layer
        if EMPTY_ROW in self._call_kinds and (rows := empty_rows(call)):
            first = int(sights.values["kv_len"]) - call.query.shape[2]
            said = row_words([first + row for row in rows])
            verb = "see" if len(rows) > 1 else "sees"
            self._saw(Sighting(EMPTY_ROW, self._name_of(call), layer, f"{said} {verb} no key"))
        if call.path.startswith("flex"):
            self._flex.add(layer)
        elif FALLBACK in self._call_kinds and (call.swallowed or layer in self._flex):
            why = (
                f"after {call.swallowed}" if call.swallowed else "where it ran FlexAttention before"
            )
            what = f"layer {layer} ran {call.path}, {why}"
            self._saw(Sighting(FALLBACK, self._name_of(call), layer, what))

    def _name_of(self, call: CallRef) -> str:
        names = (name for name, one in self._context.model.named_modules() if one is call.module)
        return next(names, "")

    def _saw(self, sighting: Sighting) -> None:
        if self._sights is not None and sighting not in self._sights.sightings:
            self._sights.sightings.append(sighting)
            if sighting.layer is not None:
                self._sights.layers.setdefault(sighting.layer, {"layer": sighting.layer})
            self._judge()

    def _guard(self, look: Callable[..., None], *args: Any) -> None:
        """Look, and whatever fails at it, let the model run on."""
        try:
            look(*args)
        except Exception as error:
            self._sights = None
            what = f"{type(error).__name__}: {error}"
            for met in self._breakpoints:
                self._breaking.note(met.id, f"{met.text} failed while the model ran: {what}")

    def _judge(self) -> None:
        """Judge what is known by now, if there is somebody who can stop here."""
        if self._sights is not None and self._breaking.stopper.can_stop_inside():
            self._breaking.look(self._sights, self._breakpoints, sys._getframe(1))


def _is_by_name(seen: Seen) -> bool:
    return seen.place is not None and seen.kind in (NAN, INF)
