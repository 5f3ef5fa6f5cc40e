"""The session of a model that code of the user runs: it finds generations, steps and tokens itself.

A step is reduced when its forward returns, and then waits for the next forward, whose input shows
the token that the step chose. If there is no such forward, the record says that the token is not
known.

If several threads run one model, a session records one thread at a time: while a forward of that
thread runs, and during a call of `generate`.
"""

from __future__ import annotations

import functools
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from threading import RLock, get_ident
from types import FrameType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flexinspect.core.errors import summarize_error
from flexinspect.core.text import print_message
from flexinspect.records.step import EventRecord, TokenRecord
from flexinspect.rules.cache.kv_cache import CACHED_PROMPT_EVENT
from flexinspect.rules.masks.unused_window import UNUSED_WINDOW_EVENT
from flexinspect.rules.numerics.changed_weights import CHANGED_EVENT
from flexinspect.rules.numerics.unmet_configuration import UNMET_EVENT
from flexinspect.rules.text.generate_options import GENERATE_EVENT, INITIALISED_EVENT
from flexinspect.rules.text.generated_length import LENGTH_EVENT
from flexinspect.rules.text.sampled_otherwise import SAMPLED_EVENT, SCORES_EVENT
from flexinspect.trace.file.writer import TraceWriter
from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.capture.failure_facts import failure_facts
from flexinspect_hooks.capture.hook import Hook
from flexinspect_hooks.capture.model_layers import has_own_attention
from flexinspect_hooks.capture.recorder import FinishedStep, Recorder
from flexinspect_hooks.capture.step_clock import StepContext, cached_length, query_length
from flexinspect_hooks.generate_calls.generate_call import generate_facts
from flexinspect_hooks.generate_calls.generate_checks import GenerateChecks
from flexinspect_hooks.generate_calls.processor_trials import own_processors
from flexinspect_hooks.generate_calls.sampled_rows import SampledRows, observe_samples
from flexinspect_hooks.generate_calls.state_between_calls import KeptStates
from flexinspect_hooks.observers.attention.attention_hook import UNSEEN_LAYERS
from flexinspect_hooks.observers.attention.kernel_calls import set_unrecorded
from flexinspect_hooks.observers.inputs_hook import ArgumentNames, InputRows
from flexinspect_hooks.observers.logits_hook import reduce_chosen
from flexinspect_hooks.python_internals.own_frames import strip_own_frames
from flexinspect_hooks.python_internals.patching import patch
from flexinspect_hooks.python_internals.torch_private import is_hook_installed
from flexinspect_hooks.sessions.capture_session import CaptureSession, newest_logits_row
from flexinspect_hooks.user_code.embedding_rows import RAW_EMBEDDINGS_EVENT, raw_embedding_facts
from flexinspect_hooks.user_code.generation_builder import DeclaredPrompt, GenerationBuilder
from flexinspect_hooks.user_code.step_tracking import (
    CacheOwners,
    ReadPosition,
    StepPlace,
    StepTracker,
)
from flexinspect_hooks.user_code.unread_settings import unmet_settings
from flexinspect_hooks.user_code.wished_window import unused_window

THREAD_OVERLAP = (
    "A forward of another thread began while one of this generation was running. One thread is "
    "recorded at a time; the other thread's forwards were not recorded."
)


NOT_FOLLOWED = (
    "Beam search and assisted generation are not followed: their steps are recorded without the "
    "tokens that they chose."
)


class WatchSession(CaptureSession):
    """While entered, records every root forward of `model`, from any loop.

    Sessions of one trace share `recorder` and `generation_numbers`; `name` is that of this model.
    """

    prints = True
    """Whether messages are printed on stderr."""

    def __init__(
        self,
        model: nn.Module,
        sink: TraceWriter,
        declared_prompt: DeclaredPrompt,
        *,
        level: str,
        layers: Sequence[int] | None = None,
        select: Sequence[str] = (),
        recorder: Recorder | None = None,
        hooks: Sequence[Hook] | None = None,
        generation_numbers: Iterator[int] | None = None,
        name: str = "",
    ) -> None:
        decode = declared_prompt.tokenizer.text_of
        super().__init__(
            model,
            sink,
            level=level,
            layers=layers,
            select=select,
            text_of=decode,
            hooks=hooks,
            recorder=recorder,
        )
        self.context.sees_kernels = True
        self._declared_prompt = declared_prompt.with_config(model)
        self._names = ArgumentNames(model)
        self._tracker = StepTracker(generation_numbers)
        self.model_name = name
        self._owners = CacheOwners()
        self._thread_lock, self._generate_thread = RLock(), 0
        self._last_overlap = -2
        """The generation whose overlap was reported last; -1 stands for no generation."""
        self._builder: GenerationBuilder | None = None
        self._input_tokens: Callable[[], tuple[TokenRecord, ...]] = tuple
        self._pending: FinishedStep | None = None
        """The step whose forward has returned and whose token is not known yet."""
        self._pending_row: Tensor | None = None  # its newest row of logits, if on an accelerator
        self._printed: set[str] = set()
        self.recorded_error: BaseException | None = None
        """The last exception that is in the trace."""
        self._told_unmet = False
        self._is_broken = self._is_followed = self._is_leaving_generate = False
        self.is_compiled_call = False
        """Whether a call of the compiled model runs, whose step begins and ends around it."""
        self.generate_depth = self._n_forwards = 0
        self._paused_s = 0.0
        self._prompt: Tensor | None = None
        self._told: dict[str, Any] | None = None  # of the call of `generate`
        self._recorded_place: tuple[int | None, int | None] = (None, None)  # of `recorded_error`
        self._kept_states, self._samples = KeptStates(), SampledRows()
        self._asked: int | None = None
        self._n_prompt = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> WatchSession:
        """Return self: a copy of the model copies its hooks, but must not copy the session."""
        return self

    # -- a forward -------------------------------------------------------------------------------

    def _on_forward_start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or module is not self._model or self.is_compiled_call:
            return  # hooks are no part of a graph; a copy of the model is another model
        with self._thread_lock:
            is_unrecorded = self._is_other_thread_active()
            set_unrecorded(is_unrecorded=is_unrecorded)
            if is_unrecorded:
                self._report_overlap()
            else:
                self._open_step(args, kwargs)

    def _is_other_thread_active(self) -> bool:
        """Whether another live thread is recorded; hold `_thread_lock` until the step is open."""
        others = {self._generate_thread, self.context.thread} - {0, get_ident()}
        return bool(others) and any(thread in sys._current_frames() for thread in others)

    def _report_overlap(self) -> None:
        """Record once per generation that forwards of another thread are not recorded."""
        number = self._builder.record.generation if self._builder is not None else -1
        if number != self._last_overlap:
            self._last_overlap, step = number, self._step
            if step is not None:
                step.events.append((UNSEEN_LAYERS, THREAD_OVERLAP))
            else:
                self._event(UNSEEN_LAYERS, THREAD_OVERLAP)

    def _open_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        started = time.perf_counter()
        self._paused_s = 0.0
        try:
            if self._step is not None:
                self._record_lost_forward(self._step)
            self.context.exit_reason = ""
            self._remove_switched_off()
            step = self._locate_step(args, self._names(args, kwargs), started)
        except Exception as error:
            # For any arguments the user's forward continues; this step is not recorded.
            self._step_unread(error)
            return
        try:
            self._begin_step(step)
        except BaseException:  # of a breakpoint: the forward does not run, and may be tried again
            self._tracker.undo()
            raise
        step.capture_s += time.perf_counter() - started - self._paused_s
        # The time before the step's start, in which its place was found, counts as well.
        self.total_s += step.started - started - self._paused_s

    def _locate_step(self, args: Any, arguments: dict[str, Any], started: float) -> StepContext:
        """Find the generation and step of a forward, finish the step before, and open this one."""
        self._n_forwards += 1
        n_rows = query_length(args, arguments)
        cache = arguments.get("past_key_values")
        cached, owner = cached_length(cache), self._owners.owner_of(cache)
        buffer = StepBuffer(self._device, self._stream)
        rows = InputRows(arguments, n_rows, with_mask=not cached, buffer=buffer)
        place = self._tracker.locate(
            *(n_rows, cached, rows.token_ids, owner, self._position_reader(rows)),
            may_keep_keys=self._may_keep_keys,
        )
        self._owners.set_owner(cache, place.generation)
        if place.begins_generation:
            self._finish_generation()
        else:
            self._finish_step(rows if place.is_chosen else None, place.pos, started)
        try:
            self._paused_s = self._pass_barrier()
        except KeyboardInterrupt:  # the forward does not run
            self._tracker.undo()
            raise
        if place.begins_generation:
            self._start_generation(place, rows)
        builder = self._builder
        assert builder is not None
        self._clock.set_next_step(place.generation, place.step)
        n_before = place.pos if place.has_own_cache else cached
        step = self._clock.open_of(n_rows, n_before, self.level)
        step.arguments, step.read_positions = arguments, rows.read_positions
        step.is_scored = False  # how a loop processes the logits before it chooses is not known
        step.events += place.input_events(step, rows)
        if place.begins_generation:
            self._add_begin_events(step, place, builder.problems)
        is_input = not (place.begins_generation or place.is_chosen) and place.n_new > 0
        self._input_tokens = partial(builder.append_tokens, rows, place.pos) if is_input else tuple
        return step

    def _position_reader(self, rows: InputRows) -> ReadPosition:
        """Return what reads the position id of the newest row, see `StepTracker.locate`."""
        return rows.newest_position

    def _may_keep_keys(self) -> bool:
        """Whether the program may keep keys by itself, which no argument of the model shows."""
        return has_own_attention(self._model, self.context.layer_of)

    def _add_begin_events(self, step: StepContext, place: StepPlace, problems: list[str]) -> None:
        if place.pos and self._prompt is not None and self._prompt.shape[1] >= place.pos:
            cached = self._prompt[0, : place.pos].tolist()
            text = f"By its length the cache holds the first {place.pos} tokens of the prompt."
            self._event(CACHED_PROMPT_EVENT, text, step, {"prompt": cached})
        if self.generate_depth and self._told is not None:
            step.events.append((GENERATE_EVENT, "The options of generate.", self._told))
        if (raw := raw_embedding_facts(self._model, step.arguments)) is not None:
            text = "Rows of inputs_embeds are rows of the embedding table."
            step.events.append((RAW_EMBEDDINGS_EVENT, text, raw))
        if (window := unused_window(self._model)) is not None:
            text = "A sliding window of the configuration is in no layer."
            step.events.append((UNUSED_WINDOW_EVENT, text, window))
        for unmet in () if self._told_unmet else unmet_settings(self._model):
            text = "The model does not follow a setting of its configuration."
            step.events.append((UNMET_EVENT, text, unmet))
        self._told_unmet = True
        if (weights := self.initialised_weights()) is not None:
            text = "Weights that no checkpoint had were initialised."
            step.events.append((INITIALISED_EVENT, text, weights))
        if (changed := self.changed_weights()) is not None:
            text = "Weights changed since the model was made."
            step.events.append((CHANGED_EVENT, text, changed))
        if self.generate_depth and not self._is_followed:
            step.events.append(("generate-not-followed", NOT_FOLLOWED))
        for problem in problems:
            step.events.append(("segments-not-found", problem))
            self._print_once(problem)

    def initialised_weights(self) -> dict[str, Any] | None:
        """Return parameters that the loader of the model did not find, None if not known."""
        return None

    def changed_weights(self) -> dict[str, Any] | None:
        """Return parameters that changed since the model was made, None if not known."""
        return None

    def _on_forward_end(
        self, module: nn.Module, args: Any, output: Any, *, is_compiled: bool = False
    ) -> None:
        if torch.compiler.is_compiling() or module is not self._model or not self.context.is_open:
            return
        if self.is_compiled_call:  # a part of the model runs outside of the graph
            return
        started = time.perf_counter()
        self.context.is_open, step = False, self._step
        if step is None:
            return
        self._count_wait(step)
        try:
            # `generate` copies the row before it modifies it; another loop may not.
            copy = not self.generate_depth or is_compiled
            row = step.logits = newest_logits_row(output, self._model, copy=copy)
            step.output = output
            self._owners.set_owner(getattr(output, "past_key_values", None), step.generation)
            finished = self._reduce(step)
            finished.tokens = self._input_tokens
        except Exception as error:
            self._step_unread(error)
            return
        self._step, self._is_broken = None, False
        if self.level != "basic":
            self._samples.on_forward(step.step, row, is_generate=bool(self.generate_depth))
        ended = time.perf_counter()
        step.capture_s += ended - started
        step.wall_ms = (ended - step.started) * 1e3
        self._pending = finished
        self._pending_row = row if row is not None and row.device.type != "cpu" else None

    def _finish_step(self, rows: InputRows | None, pos: int, now: float | None = None) -> None:
        """Queue the pending step; `rows` end with its token, at `pos`, if that is known."""
        finished, self._pending, builder = self._pending, None, self._builder
        row, self._pending_row = self._pending_row, None
        if finished is None or builder is None:
            return
        started = time.perf_counter()
        step, input_tokens = finished.context, finished.tokens
        if now is not None:
            step.wall_ms = (now - step.started) * 1e3
            self._compare_with_quiet_steps(step)
        if rows is not None and rows.has_ids:
            self._samples.on_token(step.step, rows.newest_id)
            if row is not None:
                reduce_chosen(row, rows.newest_id(), finished.buffer)

        def tokens() -> tuple[TokenRecord, ...]:
            chosen = builder.append_tokens(rows, pos, step.step) if rows is not None else ()
            return (*input_tokens(), *chosen)

        finished.tokens = tokens
        self._queue_step(finished, started)
        self.total_s += step.wall_ms / 1e3

    # -- a generation ----------------------------------------------------------------------------

    def _start_generation(self, place: StepPlace, rows: InputRows) -> None:
        name = self.model_name
        self._builder = GenerationBuilder(self._declared_prompt, place, rows, name)
        self.begin_generation(self._builder.record)

    def _finish_generation(self, state: str = "finished", reason: str = "") -> None:
        """End the open generation; the token of its last step is not known."""
        pending, builder = self._pending, self._builder
        if builder is None:
            return
        if self._is_broken and state == "finished":
            state, reason = "failed", "A forward did not return."
        if pending is not None and not reason:
            reason = "no forward received the token that the last step chose, so it is not known"
        self._finish_step(None, 0)
        self._record_choices(builder)
        self._builder, self._is_broken, ended_at = None, False, time.time()
        self.recorder.put(lambda: builder.end(state, reason, ended_at))

    def _record_choices(self, builder: GenerationBuilder) -> None:
        """Record how tokens were chosen, where their scores are not the logits."""
        found = self._samples.take([one.token_id for one in builder.record.tokens])
        for kind, facts in zip((SAMPLED_EVENT, SCORES_EVENT), found, strict=True):
            if facts is not None:
                text = "The program chooses tokens by other numbers than the logits of its model."
                place = builder.record.generation, facts["step"]
                event = EventRecord(kind, text, time.time(), *place, facts)
                self.recorder.put_event(event, self._rule_runner)

    def _record_lost_forward(self, step: StepContext) -> None:
        """Record that a forward did not return; it may be tried again."""
        lengths = f"input rows: {step.q_len}, cached keys: {step.kv_before}"
        error, self.context.exit_reason = self.context.exit_reason, ""
        reason = f": {error}" if error else "."
        text = f"The forward of step {step.step} did not return ({lengths}){reason}"
        self._event("forward-failed", text, step, {"error": error} if error else None)
        self._abandon()
        self._tracker.undo()
        self._is_broken = True

    def finish(self, state: str, error: BaseException | None) -> None:
        """End the open step and generation; an exception is recorded at the step it left."""
        reason = summarize_error(error) if error is not None else ""
        if error is not None and state != "finished":
            self._record_error(error)
        elif self._step is not None:
            self._record_lost_forward(self._step)
        self._abandon()
        self._finish_generation(state, reason)
        self._tracker.end()

    def close(self, state: str, error: BaseException | None) -> None:
        """Finish, and report if no forward was recorded, or if the program removed hooks."""
        self.finish(state, error)
        unseen = []
        if self.prints and not self.has_hooks_installed:
            unseen = [f"{HOOKS_REMOVED}: later forwards were not recorded, or only in part."]
        if not self._n_forwards:
            unseen.append(NO_FORWARDS)
        for text in unseen:
            self._event(UNSEEN_LAYERS, text)
            self._print_once(text)

    @property
    def has_hooks_installed(self) -> bool:
        """Whether all hooks of the session are still installed in the model's modules."""
        owners = (getattr(remove, "__self__", None) for _, remove in self._removes)
        return all(is_hook_installed(one) for one in owners if isinstance(one, RemovableHandle))

    def record_uncaught(self, error: BaseException) -> None:
        """Record again, as what ended the program, an exception that seemed to be caught."""
        data, place = failure_facts(error), self._recorded_place
        event = EventRecord("error", summarize_error(error), time.time(), *place, data)
        self.recorder.put_event(event, self._rule_runner)

    def _record_error(self, error: BaseException) -> None:
        if error is self.recorded_error:
            return
        self.recorded_error, builder, pending = error, self._builder, self._pending
        strip_own_frames(error)
        last = self._step or (pending.context if pending is not None else None)
        generation = builder.record.generation if builder is not None else None
        step = last.step if last is not None else None
        data = failure_facts(error)
        if self._is_leaving_generate:
            data["during"] = "generate"
        data["traceback"] = "".join(traceback.format_exception(error))
        text, now = summarize_error(error), time.time()
        self._recorded_place = generation, step
        event = EventRecord("error", text, now, generation, step, data)
        self.recorder.put_event(event, self._rule_runner)

    def _print_once(self, sentence: str) -> None:
        if self.prints and sentence not in self._printed:
            self._printed.add(sentence)
            print_message(sentence)

    def watch_samples(self) -> None:
        """Look at the probabilities from which the program samples."""
        self._removes.append((None, observe_samples(self._samples)))

    # -- a call of generate ----------------------------------------------------------------------

    def watch_generate(self) -> None:
        """Wrap the model's `generate`, if any, to know its prompt and its result."""
        model, call = self._model, self.call_generate
        original = getattr(model, "generate", None)
        if not callable(original):
            return

        @functools.wraps(getattr(original, "__func__", original))
        def generate(this: Any, *args: Any, **kwargs: Any) -> Any:
            if this is not model:
                return type(this).generate(this, *args, **kwargs)
            return call(original, args, kwargs)

        # A bound method, so that a copy of the model calls its own `generate`, not this model's.
        self._removes.append((None, patch(model, "generate", MethodType(generate, model))))

    def call_generate(self, generate: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the model's `generate` (bound), and record it as one generation."""
        if kwargs.get("custom_generate") is not None:  # another decoding loop
            return generate(*args, **kwargs)
        with self._thread_lock:
            is_recorded = not self._is_other_thread_active()
            if is_recorded:
                self._generate_thread = get_ident()
                self._begin_generate(args, kwargs)
        if not is_recorded:
            return generate(*args, **kwargs)
        states = self._kept_states if self._is_followed else None
        checks = GenerateChecks(kwargs, states) if self._has_own_code(kwargs) else None
        try:
            with checks.watch() if checks is not None else nullcontext():
                result = generate(*args, **kwargs)
        except BaseException as error:
            self._end_generate(None, error)
            raise
        for event in checks.events(self._prompt, result) if checks is not None else ():
            self._event(event.kind, event.text, None, event.facts)
        self._end_generate(result, None)
        return result

    def _has_own_code(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether a call of `generate` has processors or criteria that are looked at."""
        names = ("logits_processor", "stopping_criteria")
        return self.level != "basic" and any(own_processors(kwargs.get(name)) for name in names)

    def _begin_generate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.generate_depth += 1
        if self.generate_depth > 1:
            return
        self._finish_generation()
        self._is_followed = _follows_row_0(self._model, kwargs)
        self._asked = asked_tokens(self._model, kwargs)
        self._told = generate_facts(self._model, kwargs)
        candidates = (*args[:1], kwargs.get("inputs"), kwargs.get("input_ids"))
        prompt = next((value for value in candidates if value is not None), None)
        n_prompt = 0
        # With an encoder, the prompt goes there, and the decoder begins with a token of its own.
        config = getattr(self._model, "config", None)
        has_encoder = bool(getattr(config, "is_encoder_decoder", False))
        if isinstance(prompt, Tensor) and prompt.dim() > 1 and not has_encoder:
            n_prompt = int(prompt.shape[1])
        self._prompt = prompt if n_prompt else None
        self._tracker.begin_generate(n_prompt, followed=self._is_followed)

    def _end_generate(self, result: Any, error: BaseException | None) -> None:
        self.generate_depth -= 1
        if self.generate_depth:
            return
        prompt, self._prompt = self._prompt, None
        self._n_prompt = 0 if prompt is None else int(prompt.shape[1])
        self._generate_thread = 0
        if error is not None:
            is_stop = isinstance(error, KeyboardInterrupt)
            self._is_leaving_generate = True
            self.finish("interrupted" if is_stop else "failed", error)
            self._is_leaving_generate = False
            return
        try:
            self._check_length(result)
            self._record_last_token(result)
        except Exception as failure:
            message = f"{type(failure).__name__}: {failure}"
            self._event("step-not-recorded", f"The result of generate could not be read: {message}")
        self._finish_generation()
        self._tracker.end()
        self.pass_breakpoints()

    def _check_length(self, result: Any) -> None:
        """Report more new tokens than `max_new_tokens` of the outermost call allowed."""
        sequences = getattr(result, "sequences", result)
        if not self._asked or not self._n_prompt or not isinstance(sequences, Tensor):
            return
        produced = int(sequences.shape[-1]) - self._n_prompt
        if produced > self._asked:
            text = f"generate was asked for at most {self._asked} new tokens, and returned "
            facts = {"asked": self._asked, "produced": produced}
            self._event(LENGTH_EVENT, f"{text}{produced}", None, facts)

    def _record_last_token(self, result: Any) -> None:
        """Finish the last step with the last token that `generate` returned."""
        sequences, pos = getattr(result, "sequences", result), self._tracker.length
        if not self._is_followed or not isinstance(sequences, Tensor) or sequences.dim() != 2:
            return
        if self._builder is not None and sequences.shape[1] > pos + 1 > 1:
            text = (
                f"generate returned {sequences.shape[1]} tokens, but the recorded forwards end at "
                f"{pos}: the others ran inside a compiled graph."
            )
            self._event(UNSEEN_LAYERS, text)
        if sequences.shape[1] == pos + 1:
            last = {"input_ids": sequences[:1, pos:]}
            buffer = StepBuffer(self._device, self._stream)
            self._finish_step(InputRows(last, 1, with_mask=False, buffer=buffer), pos)


# -- helpers for a model that code of the user runs ------------------------------------------------


def asked_tokens(model: nn.Module, kwargs: Mapping[str, Any]) -> int | None:
    """Return `max_new_tokens` of the outermost `generate` of a model that runs; None if unknown.

    A class may override `generate`, and pass on another number than it was asked for.
    """
    asked = kwargs.get("max_new_tokens")
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_locals.get("self") is model:
            facts = frame.f_locals
            others = (value for value in facts.values() if isinstance(value, dict))
            named = (one["max_new_tokens"] for one in (facts, *others) if "max_new_tokens" in one)
            asked = next(named, asked)
        frame = frame.f_back
    return asked if isinstance(asked, int) else None


_UNFOLLOWED_ARGUMENTS = ("assistant_model", "prompt_lookup_num_tokens", "penalty_alpha")


def _follows_row_0(model: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether `generate` appends the token that row 0 chose: no beams, assistants or look-ups."""
    configs = (kwargs.get("generation_config"), getattr(model, "generation_config", None))

    def option(name: str) -> Any:
        values = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
        return next((value for value in values if value is not None), None)

    is_single = (option("num_beams") or 1) == 1
    return is_single and not any(option(name) for name in _UNFOLLOWED_ARGUMENTS)


NO_FORWARDS = (
    "No forward of this model was seen: it was not called, or only through a part of it, or inside "
    "a compiled graph."
)
HOOKS_REMOVED = "The program removed hooks of flexinspect from the model"
