"""A capture session: installs hooks on one model, and removes all of them at its end.

The root forward opens a step; when the step's token is known the step is reduced once and passed to
the writer thread. A hook that raises is recorded as an event and switched off; the user's forward
continues. After a session no handle, patch or thread is left.
"""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from flexinspect.control.messages import StepRef
from flexinspect.core.errors import UsageError
from flexinspect.core.text import plural
from flexinspect.inputs.module_selectors import parse_selectors
from flexinspect.records import step as records
from flexinspect.rules.engine import Rule, RuleRunner
from flexinspect.trace.file.writer import TraceWriter
from flexinspect_hooks.breakpoints.forward_hooks import ModelBreakpoints
from flexinspect_hooks.breakpoints.observations import BreakpointEvaluator
from flexinspect_hooks.capture.buffer import StepBuffer, side_stream
from flexinspect_hooks.capture.hook import (
    CaptureContext,
    Hook,
    Remove,
    built_in_hooks,
    built_in_rules,
)
from flexinspect_hooks.capture.model_layers import attention_layers, decoder_blocks, output_head
from flexinspect_hooks.capture.recorder import N_IMMEDIATE_STEPS, FinishedStep, Recorder
from flexinspect_hooks.capture.step_clock import StepClock, StepContext, off_cpu_s
from flexinspect_hooks.capture.write_window import WriteWindow
from flexinspect_hooks.capture.writer_slowdown import WriterSlowdown
from flexinspect_hooks.control.control_protocols import SessionLevels, chosen_layers
from flexinspect_hooks.control.step_barrier import StepBarrier, pass_barrier
from flexinspect_hooks.python_internals.threads import available_cores
from flexinspect_hooks.python_internals.torch_private import compilation_metrics, dynamo_counters
from flexinspect_hooks.step_writer.step_draft import StepEvent

_entered: list[CaptureSession] = []
"""Sessions that have hooks installed, in the order in which they were entered."""


class CaptureSession:
    """While entered, records every root forward of `model` into `sink`.

    `level` is one of basic, advanced, extreme and may be changed between steps. `layers` are the
    layers whose activations are stored at extreme (None: all), `select` selects further modules
    (see `flexinspect.inputs.module_selectors`). `text_of` decodes one token id.
    `copy_logits` copies each step's row of logits, because loops may modify it in place before it
    is recorded; a loop that does not do so can save the copy. `hooks` and `rules` default to the
    registered ones. A `recorder` passed in must be started, and may be shared with other sessions.
    The session never keeps its model alive. Raises `UsageError` for an unknown level or a wrong
    selector.
    """

    def __init__(
        self,
        model: nn.Module,
        sink: TraceWriter,
        *,
        level: str = "advanced",
        layers: Sequence[int] | None = None,
        select: Sequence[str] = (),
        text_of: Callable[[int], str] = str,
        hooks: Sequence[Hook] | None = None,
        rules: Sequence[Rule] | None = None,
        copy_logits: bool = True,
        recorder: Recorder | None = None,
    ) -> None:
        self._copy_logits = copy_logits
        self.level = check_level(level)
        self.recorder = Recorder(sink) if recorder is None else recorder
        self._shares_recorder = recorder is not None
        self._rules, self._rule_runner = rules, RuleRunner()
        self.recorder.hook_errors.append(self._hook_failed)
        self._model_ref = weakref.ref(model)
        self._is_over = self._is_paused = self._has_switched_off = False
        self._hooks: list[Hook] = list(hooks or ())
        self._use_built_in = hooks is None
        self._methods: dict[str, list[tuple[Hook, Callable[..., Any]]]] = {}  # until hooks change
        self._removes: list[tuple[Hook | None, Remove]] = []
        self._clock = StepClock()
        self._forced_tokens: set[tuple[int, int]] = set()
        self._graphs = GraphCount()
        self._step: StepContext | None = None
        first = next(model.parameters(), None)
        self._device = torch.device("cpu") if first is None else first.device
        self._stream = side_stream(self._device)
        layer_of = attention_layers(model)
        self.context = CaptureContext(
            model=model,
            device=self._device,
            layer_of=layer_of,
            blocks=decoder_blocks(model, layer_of),
            layers=tuple(sorted(set(layer_of.values()))) if layers is None else tuple(layers),
            text_of=text_of,
            selectors=parse_selectors(select),
            record_event=lambda kind, text, facts: self._event(kind, text, self._step, facts),
        )
        self.barrier = StepBarrier()
        """Where forwards wait; by default no command ever reaches it."""
        self.place = StepRef()
        """The last finished step."""
        self.levels: SessionLevels | None = None
        """The level and layers that commands set, for each step that opens."""
        self._applied: tuple[str, str | None] | None = None  # of `SessionLevels.request`
        self._breaks: ModelBreakpoints | None = None
        self.capture_s = self.total_s = self.waited_s = 0.0
        self.slowdown, self._window = WriterSlowdown(), WriteWindow(self.recorder)

    def use_levels(self, levels: SessionLevels) -> None:
        """Record at the level and layers that `levels` has when a step opens."""
        levels.known_layers |= frozenset(self.context.layer_of.values())
        self.levels = levels

    @property
    def rule_runner(self) -> RuleRunner:
        """The runner of the session's rules, for events outside of its generations."""
        return self._rule_runner

    def has_seen_failure(self, errors: Sequence[str]) -> bool:
        """Whether one of these exceptions was raised by a kernel call that was observed."""
        observed = [getattr(hook, "kernels", None) for hook in self._hooks]
        return any(kernels.has_failed_with(errors) for kernels in observed if kernels is not None)

    @property
    def is_model_deleted(self) -> bool:
        """Whether the model was garbage-collected."""
        return self._model_ref() is None

    @property
    def _model(self) -> nn.Module:
        model = self._model_ref()
        assert model is not None, "the model was deleted"
        return model

    # -- begin and end ---------------------------------------------------------------------------

    def __enter__(self) -> CaptureSession:
        failed_hooks: dict[str, str] = {}
        if self._use_built_in:
            hooks, failed_hooks = built_in_hooks()
            is_user_code = self.context.sees_kernels
            self._hooks = [
                hook for hook in hooks if is_user_code or not getattr(hook, "own_code_only", False)
            ]
        rules = self._load_rules if self._rules is None else self._rules
        self._rule_runner = RuleRunner(rules, is_standalone=self.context.is_standalone)
        self.recorder.has_core = not self.cores_are_taken()
        if not self._shares_recorder:
            self.recorder.start()
        for name, error in failed_hooks.items():
            self._event("hook-disabled", f"{name}: {error}")
        model, context = self._model, self.context
        _entered.append(self)
        for hook in list(self._hooks):
            self._guard(hook, self._install, hook)
        start = model.register_forward_pre_hook(self._on_forward_start, with_kwargs=True)
        end = model.register_forward_hook(self._on_forward_end)
        self._removes += [(None, start.remove), (None, end.remove)]
        if self.recorder.has_core and self._device.type == "cpu":
            self._watch_output_head(model)
        # Weak references from now on, because the installed hooks may outlive the model.
        context.model = cast(nn.Module, weakref.proxy(model))
        context.blocks = {
            layer: (name, cast(nn.Module, weakref.proxy(block)))
            for layer, (name, block) in context.blocks.items()
        }
        return self

    def _load_rules(self) -> Sequence[Rule]:
        """Return the registered rules (writer thread); an event names each that failed."""
        rules, failed = built_in_rules()
        for name, error in failed.items():
            self._event("rule-disabled", f"{name}: {error}")
        return rules

    def _install(self, hook: Hook) -> None:
        for remove in hook.install(self.context):
            self._removes.append((hook, remove))

    def _watch_output_head(self, model: nn.Module) -> None:
        head = None
        with suppress(Exception):  # code of the model, which records nothing
            head = output_head(model)
        # Some models return their input embeddings here.
        if head is not None and not isinstance(head, nn.Embedding):
            self._removes.append((None, self._window.install(head, self.context)))

    def __exit__(self, *_: object) -> None:
        self._abandon()
        # The writer thread first: it may still use what a hook closes on removal.
        if self._shares_recorder:
            self.recorder.drain()
        else:
            self.recorder.stop()
        self.recorder.hook_errors.remove(self._hook_failed)
        self.remove_hooks()

    def remove_hooks(self) -> None:
        """Remove everything that was installed.

        Patches of several sessions are nested, so they are removed in reverse order: those of a
        session that ends before a later one stay until that one ends, but record no more steps.
        """
        if self._breaks is not None:
            self._breaks.remove()
        own = [remove for owner, remove in self._removes if owner is None]
        self._removes = [pair for pair in self._removes if pair[0] is not None]
        while own:
            own.pop()()
        self._is_over = True
        while _entered and _entered[-1]._is_over:
            last = _entered.pop()
            while last._removes:
                last._removes.pop()[1]()

    def break_on(self, breaking: BreakpointEvaluator) -> None:
        """Evaluate these breakpoints during forwards, and when steps are written."""
        self._breaks = ModelBreakpoints(breaking, self.context, self.recorder.drain)
        self.recorder.writer.evaluator = breaking

    def pass_breakpoints(self) -> None:
        """Stop at breakpoints that the last step hit. Raises `KeyboardInterrupt` to end the run."""
        if self._breaks is not None and self._breaks.is_active:
            self._breaks.deliver_hits()
            self._pass_barrier()

    def _pass_barrier(self) -> float:
        """Wait until the next forward may start; returns seconds. May raise `KeyboardInterrupt`."""
        return pass_barrier(self.barrier, self.place)

    # -- a generation ----------------------------------------------------------------------------

    def begin_generation(self, record: records.GenerationRecord) -> None:
        """Start a generation; its prompt is in the trace then, so that a crash does not lose it."""
        self._clock.set_next_step(record.generation)
        self._forced_tokens.clear()
        self.place = StepRef(record.generation)
        self.context.segments = record.segments
        self.recorder.begin_generation(record)
        for hook in list(self._hooks):
            self._guard(hook, hook.begin, self.context)
        self.recorder.drain()
        self.recorder.begin_rules(record, self._rule_runner)

    def end_generation(self, record: records.GenerationEnd) -> None:
        """End a generation or a branch; a step without a chosen token is dropped."""
        self._abandon()
        self.recorder.put(record)

    # -- branches, for a decoder that rewinds -----------------------------------------------------

    def begin_branch(
        self, record: records.BranchRecord, generation: records.GenerationRecord
    ) -> None:
        """Start a branch; `generation` is its generation as of the fork: mask and tokens."""
        self._forced_tokens |= records.forced_tokens(record.branch, record.fork_step, record.change)
        rules = self._rule_runner.for_branch(record.branch, self._forced_tokens)
        self.recorder.begin_branch(record, generation, rules)

    def set_next_step(self, branch: int, step: int) -> None:
        """Set which branch and step of the generation the next forward is."""
        generation = self._clock.generation
        self._clock.set_next_step(generation, step, branch)
        self.place = StepRef(generation, branch, step - 1)

    def move_step(self, branch: int) -> None:
        """Move the open step to another branch."""
        step = self._step
        if step is not None and step.branch != branch:
            if self._breaks is not None:
                self._breaks.evaluator.move_step(step, branch)
            step.branch = branch

    def drop_step(self, branch: int) -> None:
        """Drop the open step, which `branch` has already, and evaluate its breakpoints again."""
        step, breaks, trace = self._step, self._breaks, self.recorder.path
        if step is not None and breaks is not None and breaks.is_active and trace is not None:
            self.recorder.put(partial(breaks.evaluator.evaluate_again, trace, step, branch))
        self._abandon()

    @contextmanager
    def no_capture(self) -> Iterator[None]:
        """While entered, forwards are not recorded as steps."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    # -- a step ----------------------------------------------------------------------------------

    def _on_forward_start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_paused or torch.compiler.is_compiling():  # a compiled model is not recorded
            return
        self._pass_barrier()
        started = time.perf_counter()
        self._abandon()
        self._remove_switched_off()
        try:
            step = self._clock.open(args, kwargs, self.level)
        except Exception as error:
            # For any arguments the user's forward continues; this step is not recorded.
            self._step_unread(error)
            return
        step.arguments = kwargs
        self._begin_step(step)
        step.capture_s += time.perf_counter() - started

    def _apply_levels(self, step: StepContext) -> None:
        """Apply a level or layers that changed to a step that opens, and add events of changes."""
        request = self.levels.request if self.levels is not None else None
        if request is None or request is self._applied:
            return
        self._applied = level, requested = request
        if level != step.level:
            text = f"level {level} from step {step.step} on, {step.level} before"
            step.events.append((LEVEL_EVENT, text, {"level": level, "before": step.level}))
        self.level = step.level = level
        if requested is None:
            return
        layers = chosen_layers(requested, self.context.layer_of.values())
        if layers != self.context.layers:
            self.context.layers = layers
            text = f"activations of {len(layers)} layers are stored from step {step.step} on"
            step.events.append((LEVEL_EVENT, text, {"layers": list(layers)}))

    def _begin_step(self, step: StepContext) -> None:
        self._apply_levels(step)
        for hook, call in tuple(self._own_methods("open")):
            try:
                call(step)
            except Exception as error:
                self._hook_failed(hook, error, self._step)
        if self._breaks is not None:
            self._breaks.on_step_start(step)
        step.arguments = {}  # a forward that fails must not keep a cache alive
        self._step, self.context.is_open = step, True
        self.context.layers_s = 0.0
        step.writes_before = self.recorder.n_writes
        step.off_cpu_before = off_cpu_s()

    def _on_forward_end(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.context.is_open = False
        if self._step is not None:
            self._count_wait(self._step)
            self._step.logits = newest_logits_row(output, module, copy=self._copy_logits)

    def on_token_chosen(
        self,
        token: records.TokenRecord,
        scores: Tensor | None = None,
        processed: tuple[tuple[str, Tensor], ...] = (),
    ) -> None:
        """Close the step once its token, from `scores` (V,), is on the host: its time ends here.

        `processed` are the scores after each logits processor, with its name.
        """
        step = self._step
        if step is None:
            return
        started = time.perf_counter()
        step.wall_ms = (started - step.started) * 1e3
        step.token_id, step.scores, step.processed = token.token_id, scores, processed
        step.processors = tuple(name for name, _ in processed)
        finished, self._step = self._reduce(step), None
        finished.tokens = lambda: (token,)
        queued = self._queue_step(finished, started)
        ended = time.perf_counter()
        self.capture_s += ended - queued
        self.total_s += ended - step.started
        self._compare_with_quiet_steps(step)

    def _count_wait(self, step: StepContext) -> None:
        """Count the time that a forward waited, unless the writer worked in its window alone."""
        n_changes = self.recorder.n_writes - step.writes_before
        if not (self._window.close() and n_changes == 2):
            self.waited_s += off_cpu_s() - step.off_cpu_before

    def _compare_with_quiet_steps(self, step: StepContext) -> None:
        """Count a decode step whose time is known for what the writer thread costs."""
        if step.kv_before and step.step >= N_IMMEDIATE_STEPS:
            is_busy = step.writes_before % 2 > 0 or self.recorder.n_writes != step.writes_before
            self.slowdown.add(step.wall_ms / 1e3, is_busy=is_busy)

    def _queue_step(self, finished: FinishedStep, started: float) -> float:
        """Copy a step's values to the host, and queue it; the time from `started` was capture.

        Returns the time up to which `capture_s` counts: before the step was queued.
        """
        step = finished.context
        try:
            finished.buffer.start_copy()
        except Exception as error:  # then none of the values is recorded
            text = f"The step's values were lost: {type(error).__name__}: {error}"
            step.events.append(("step-not-recorded", text))
            finished.kept = ()
        step.capture_s += time.perf_counter() - started
        self.capture_s += step.capture_s
        queued = time.perf_counter()
        self.recorder.put(finished)  # from here on the step belongs to the writer thread
        self.place = StepRef(step.generation, step.branch, step.step)
        return queued

    def _reduce(self, step: StepContext) -> FinishedStep:
        has_graph = torch.is_grad_enabled()
        buffer, kept = StepBuffer(self._device, self._stream, has_graph=has_graph), []
        step.capture_s += self.context.layers_s
        step.events += self._graphs.on_step(step.phase)
        # Entering `no_grad` costs as much as a hook, and `generate` runs without gradients already.
        with torch.no_grad() if has_graph else nullcontext():
            for hook, call in tuple(self._own_methods("reduce")):
                buffer.owner = hook
                try:
                    kept.append((hook, call(step, buffer)))
                except Exception as error:
                    self._hook_failed(hook, error, self._step)
        step.drop_references()
        return FinishedStep(step, buffer, tuple(kept))

    def _own_methods(self, name: str) -> Sequence[tuple[Hook, Callable[..., Any]]]:
        """Return the hooks whose `open` or `reduce` does anything, with that method."""
        if name not in self._methods:
            needed = ("reduce", "record") if name == "reduce" else (name,)
            self._methods[name] = [
                (hook, getattr(hook, name))
                for hook in self._hooks
                if any(getattr(type(hook), one, None) is not getattr(Hook, one) for one in needed)
            ]
        return self._methods[name]

    def _step_unread(self, error: Exception) -> None:
        """Record that a step is not recorded; the user's forward continues."""
        text = f"A step was not recorded: {type(error).__name__}: {error}"
        self._event("step-not-recorded", text)
        self._abandon()

    def _abandon(self) -> None:
        """Drop a step without a token, after an exception or an interrupt."""
        self.context.is_open = False
        step, self._step = self._step, None
        if step is not None:
            step.drop_references()
            at, place = time.time(), (step.generation, step.step)
            for kind, text, *facts in step.events:
                if kind == LEVEL_EVENT:  # it holds for later steps, too
                    self.recorder.put(records.EventRecord(kind, text, at, *place, *facts))

    def cost(self) -> dict[str, float | int]:
        """Return the cost of capture so far, in seconds, and its `ratio` to the time without it.

        `capture_s` is time in the model's thread, `writer_s` CPU time of the writer thread. The
        ratio includes `writer_s` if torch uses every core, because then the writer takes cores from
        the model. Otherwise it includes how much longer steps take while the writer works
        (`WriterSlowdown`), because both need the interpreter; or, where that is not known,
        `waited_s`, the time that the model's thread waited in forwards, except those in which the
        writer worked in the `WriteWindow` alone.
        """
        return capture_cost([self], self.recorder)

    def _use_device(self, device: torch.device) -> None:
        """From now on steps are computed on `device`."""
        if device != self._device:
            self._device = self.context.device = device
            self._stream = side_stream(device)

    def cores_are_taken(self) -> bool:
        """Whether the model runs on every core, so that the writer slows it down."""
        return self._device.type == "cpu" and torch.get_num_threads() >= available_cores()

    # -- errors ----------------------------------------------------------------------------------

    def _guard(self, hook: Hook, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:
            self._hook_failed(hook, error, self._step)
            return None

    def _hook_failed(self, hook: Hook, error: BaseException, step: StepContext | None) -> None:
        if hook not in self._hooks:
            return
        self._hooks.remove(hook)
        self._methods.clear()
        self._has_switched_off = True
        where = f"step {step.step}" if step is not None else "installation"
        message = f"{type(error).__name__}: {error}"
        text = f"The hook '{hook.name}' failed at {where} and is off: {message}"
        if step is not None:
            step.events.append(("hook-disabled", text))
        self._event("hook-disabled", text, step)
        if not self.recorder.is_current():
            self._remove_switched_off()

    def _remove_switched_off(self) -> None:
        """Remove what switched-off hooks installed: in the model's thread, between forwards."""
        if not self._has_switched_off:
            return
        self._has_switched_off = False
        for owner, remove in list(self._removes):
            if owner is not None and owner not in self._hooks:
                self._removes.remove((owner, remove))
                remove()

    def _event(
        self,
        kind: str,
        text: str,
        step: StepContext | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        generation, number = (step.generation, step.step) if step is not None else (None, None)
        event = records.EventRecord(kind, text, time.time(), generation, number, facts or {})
        self.recorder.put_event(event, self._rule_runner)


def check_level(level: str) -> str:
    """Return the level. Raises `UsageError` for an unknown one."""
    if level not in records.LEVELS:
        raise UsageError(
            f"The level {level} is unknown; the levels are {', '.join(records.LEVELS)}."
        )
    return level


_MOST_SLOWED = 2.0
"""How many times its own CPU time the writer slows the model down at most: by switching threads."""


def capture_cost(sessions: Sequence[CaptureSession], recorder: Recorder) -> dict[str, float | int]:
    """Return the cost of sessions that share a recorder; see `CaptureSession.cost`."""
    capture_s = sum(session.capture_s for session in sessions)
    total_s = sum(session.total_s for session in sessions)
    cores_are_taken = any(session.cores_are_taken() for session in sessions)
    # A thread may wait for other reasons too, but for the writer at most as long as that runs.
    waited_s = max(min(sum(session.waited_s for session in sessions), recorder.writer_s), 0.0)
    rest_s = max(total_s - capture_s, 0.0)
    # In a short run the writer works mostly after the model has ended, and does not slow it down.
    slowed_s = recorder.writer_s if cores_are_taken else waited_s
    measured = [session.slowdown.seconds for session in sessions if session.total_s]
    known = [seconds for seconds in measured if seconds is not None]
    if known and len(known) == len(measured) and not cores_are_taken:
        # What few steps show may be far off.
        slowed_s = min(sum(known), _MOST_SLOWED * recorder.writer_s)
    slowed_s = min(slowed_s, rest_s / 2)
    without_s = rest_s - slowed_s
    return {
        "capture_s": round(capture_s, 6),
        "writer_s": round(recorder.writer_s, 6),
        "waited_s": round(waited_s, 6),
        "total_s": round(total_s, 6),
        "ratio": round((capture_s + slowed_s) / without_s, 5) if without_s else 0.0,
        "steps": recorder.n_steps,
    }


def newest_logits_row(output: Any, model: nn.Module, *, copy: bool) -> Tensor | None:
    """Return the newest row of logits (V,) of batch 0, None if the output has none."""
    logits = getattr(output, "logits", None)
    if logits is None:
        size = getattr(getattr(model, "config", None), "vocab_size", None)
        parts = output if isinstance(output, tuple) else (output,)
        tensors = [part for part in parts if isinstance(part, Tensor) and part.dim() == 3]
        logits = next((tensor for tensor in tensors if tensor.shape[2] == size), None)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or not logits.shape[1]:
        return None
    row = logits.view(-1) if logits.numel() == logits.shape[2] else logits[0, -1]
    if row.requires_grad:
        row = row.detach()
    return row.clone() if copy else row


LEVEL_EVENT = "level"
"""The kind of the event of a changed level or changed layers."""


# -- graphs of torch.compile: a recompilation during a run costs seconds --------------------------

RECOMPILE_LIMIT = "recompile-limit"

_GUARDED_MODS = (("mask_mod", "args[4]"), ("score_mod", "args[3]"))
"""Names of mask_mod and score_mod in guards: of a compiled call, and of an uncompiled one."""

_UNCOMPILED_FLEX = "_flex_attention_hop_wrapper"
"""The function that torch compiles, with backend eager, when uncompiled FlexAttention is called."""


def _n_refused() -> int:
    """Return how many compilations dynamo refused at its recompile limit."""
    refused = dynamo_counters().get("unimplemented", {})
    return sum(n for reason, n in refused.items() if "recompile" in reason[:40])


class GraphCount:
    """Compares the counters of dynamo before and after each step, without loading dynamo."""

    def __init__(self) -> None:
        self._n_graphs = dynamo_counters().get("stats", {}).get("unique_graphs", 0)
        self._n_reasons = sum(dynamo_counters().get("unimplemented", {}).values())
        self._n_refused = _n_refused()
        self._phases: set[str] = set()

    def on_step(self, phase: str) -> list[StepEvent]:
        """Return the events (kind, text, facts) of a step in which graphs were built.

        The first step of a phase compiles ("compiled"); any later one recompiles ("recompiled").
        A function that reached its recompile limit, and is not compiled any more, has an event too.
        The facts name the functions that were compiled and the guard that failed.
        """
        counters = dynamo_counters()
        n_graphs = counters["stats"].get("unique_graphs", 0) if "stats" in counters else 0
        n_reasons = sum(counters["unimplemented"].values()) if "unimplemented" in counters else 0
        first = phase not in self._phases
        if first:
            self._phases.add(phase)
        if n_graphs == self._n_graphs and n_reasons == self._n_reasons:
            return []
        n_refused = _n_refused()
        new, refused = n_graphs - self._n_graphs, n_refused - self._n_refused
        self._n_graphs, self._n_reasons, self._n_refused = n_graphs, n_reasons, n_refused
        if new <= 0 and refused <= 0:
            return []
        facts = _newest_compilations(max(new, 0) + max(refused, 0))
        events: list[StepEvent] = []
        if new > 0:
            kind, text = "compiled" if first else "recompiled", plural(new, "graph")
            sentence = f"torch.compile built {text}"
            if facts.get("of") == [_UNCOMPILED_FLEX]:
                sentence = f"uncompiled flex_attention built {text} for itself (normal)"
            events.append((kind, sentence, {"graphs": new, **facts}))
        if refused > 0:
            text = "torch.compile reached its recompile limit: the function runs uncompiled now"
            events.append((RECOMPILE_LIMIT, text, facts))
        return events


def _newest_compilations(n: int) -> Mapping[str, Any]:
    """Return the functions of the newest compilations and the last reason; empty if unknown."""
    facts: dict[str, Any] = {}
    with suppress(Exception):
        metrics = compilation_metrics()
        names = {_frame_id(entry): entry.co_name for entry in metrics if entry.co_name}
        newest = metrics[-n:]
        # A compilation that was refused has no name, but earlier ones of the same function do.
        facts["of"] = sorted({name for entry in newest if (name := names.get(_frame_id(entry)))})
        reasons = [entry.recompile_reason for entry in newest if entry.recompile_reason]
        if reasons:  # of the newest the first line, without the comment at its end
            reason = reasons[-1].partition("\n")[0].partition("  #")[0].strip()
            facts["reason"] = reason
            # The guard of a function fails when the function's code is another.
            if guarded := re.search(r"([\w.\[\]'\"]+)\.__code__", reason):
                name = guarded[1]
                mods = (mod for mod, argument in _GUARDED_MODS if mod in name or argument in name)
                facts["guard"] = f"{next(mods, name)} code object"
    return facts


def _frame_id(metrics: Any) -> str:
    return str(metrics.compile_id).partition("/")[0]
