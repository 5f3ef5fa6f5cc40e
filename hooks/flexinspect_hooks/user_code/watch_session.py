"""Whose turn it is where several threads run one model: a session follows one at a time.

A thread has its turn while a forward of it is under way, and through a call of `generate`.

A step is reduced when its forward returns, and then waits for the next forward, which is fed what
the step chose. Where nobody feeds it, nobody saw it, and the record says so.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import RLock, get_ident
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect.control import messages as control
from flexinspect.records.step import EventRecord, TokenRecord
from flexinspect.rules.cache.cache_findings import CACHED_PROMPT_EVENT
from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.capture.hook import CaptureContext, Hook
from flexinspect_hooks.capture.recorder import FinishedStep, Recorder, Sink
from flexinspect_hooks.capture.step_clock import StepContext, cached_length, off_cpu_s, query_length
from flexinspect_hooks.observers.attention.attention_hook import UNSEEN_LAYERS
from flexinspect_hooks.observers.attention.kernel_calls import describe_error, set_unrecorded
from flexinspect_hooks.observers.input_rows import ArgumentNames, InputRows
from flexinspect_hooks.observers.logits_hook import reduce_chosen
from flexinspect_hooks.sessions.capture_session import CaptureSession, pass_barrier
from flexinspect_hooks.user_code.generation_builder import (
    DeclaredPrompt,
    GenerationBuilder,
    config_facts,
)
from flexinspect_hooks.user_code.own_loops import (
    HOOKS_REMOVED,
    are_installed,
    has_encoder,
    is_followed,
    newest_logits_row,
    wrap_generate,
)
from flexinspect_hooks.user_code.program import strip_own_frames
from flexinspect_hooks.user_code.step_tracking import (
    CacheOwners,
    ForwardInput,
    StepPlace,
    StepTracker,
    input_events,
)

THREAD_OVERLAP = (
    "A forward of another thread came while one of this generation was under way: one thread is "
    "followed at a time, and the other's forwards were not recorded."
)


class ThreadOwnership:
    """Knows which thread is followed. Hold `lock` between asking and beginning."""

    def __init__(self, context: CaptureContext) -> None:
        self.lock = RLock()
        self._context = context
        self._generate_thread = 0

    def is_other_thread_active(self) -> bool:
        """Say whether a thread that is still there has the turn, and it is not this one."""
        me = get_ident()
        others = [
            one for one in (self._generate_thread, self._context.thread) if one not in (0, me)
        ]
        return bool(others) and any(one in sys._current_frames() for one in others)

    def acquire(self) -> None:
        """This thread calls `generate`."""
        self._generate_thread = get_ident()

    def release(self) -> None:
        """The call is over."""
        self._generate_thread = 0


class WatchSession(CaptureSession):
    """While entered, records every root forward of `model`, whoever calls it."""

    def __init__(
        self,
        model: nn.Module,
        sink: Sink,
        declared_prompt: DeclaredPrompt,
        *,
        level: str,
        layers: Sequence[int] | None = None,
        shared_recording: SharedRecording | None = None,
    ) -> None:
        super().__init__(
            model,
            sink,
            level=level,
            layers=layers,
            text_of=declared_prompt.tokenizer.text_of,
            recorder=shared_recording.recorder if shared_recording else None,
        )
        self.context.sees_kernels = True
        self._declared_prompt = replace(declared_prompt, config=config_facts(model))
        self._names = ArgumentNames(model)
        self._tracker = StepTracker(
            shared_recording.generation_numbers if shared_recording else None
        )
        self.model_name = shared_recording.name if shared_recording else ""
        self._owners, self._thread_ownership, self._last_overlap = (
            CacheOwners(),
            ThreadOwnership(self.context),
            -2,
        )
        self._builder: GenerationBuilder | None = None
        self._input_tokens: Callable[[], tuple[TokenRecord, ...]] = tuple
        self._pending: PendingStep | None = None
        self._printed: set[str] = set()
        self._recorded_error: BaseException | None = None
        self._is_broken = self._is_followed = False
        self._generate_depth = self._n_forwards = 0
        self._paused_s = 0.0
        self._prompt: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> WatchSession:
        """Copies of the model carry its hooks along, and they must not carry this."""
        return self

    # -- a forward -------------------------------------------------------------------------------

    def _on_forward_start(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if torch.compiler.is_compiling() or module is not self._model:
            return  # of a graph as a whole nothing is seen; and a copy is another model
        with self._thread_ownership.lock:
            is_passed = self._thread_ownership.is_other_thread_active()
            set_unrecorded(is_unrecorded=is_passed)
            if is_passed:
                self._report_overlap()
            else:
                self._open_step(args, kwargs)

    def _report_overlap(self) -> None:
        """Say, once for each generation, that a forward was passed over."""
        number = self._builder.number if self._builder is not None else -1
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
            # Whatever was passed, the user's forward goes on; this step is not recorded.
            self._event("step-unread", f"A step was not recorded: {type(error).__name__}: {error}")
            self._abandon()
            return
        try:
            self._begin_step(step)
        except BaseException:  # of a breakpoint: the forward never came, and may be run again
            self._tracker.undo()
            raise
        step.capture_s += time.perf_counter() - started - self._paused_s
        self.total_s += (
            step.started - started - self._paused_s
        )  # what found its place is part of it

    def _locate_step(
        self, args: tuple[Any, ...], arguments: dict[str, Any], started: float
    ) -> StepContext:
        """Find out where a forward belongs, and let go of the step before."""
        self._n_forwards += 1
        n_rows = query_length(args, arguments)
        cache = arguments.get("past_key_values")
        cached, owner = cached_length(cache), self._owners.owner_of(cache)
        rows = InputRows(arguments, n_rows, with_mask=not cached, stream=self._stream)
        place = self._tracker.locate(ForwardInput(n_rows, cached, rows.token_ids, owner))
        self._owners.set_owner(cache, place.generation)
        if place.begins_generation:
            self._finish_generation()
            self._wait_at_barrier()
            self._start_generation(place, rows)
        else:
            self._finish_step(rows if place.is_chosen else None, place.pos, started)
            self._wait_at_barrier()
        self._clock.set_next_step(place.generation, place.step)
        step = self._clock.open(args, arguments, self.level)
        step.arguments = arguments
        step.is_scored = False  # what a loop does with the logits before it chooses is not seen
        self._add_step_events(step, place, rows)
        is_given = not (place.begins_generation or place.is_chosen) and place.n_new > 0
        story = self._builder
        assert story is not None
        self._input_tokens = (lambda: story.input_tokens(rows, place)) if is_given else tuple
        return step

    def _wait_at_barrier(self) -> None:
        """Wait at the gate; a forward that is stopped there never came."""
        try:
            self._paused_s = pass_barrier(self.barrier, self.place)
        except KeyboardInterrupt:
            self._tracker.undo()
            raise

    def _add_step_events(self, step: StepContext, place: StepPlace, rows: InputRows) -> None:
        say = step.events.append
        step.events += input_events(step, place, rows)
        if not place.begins_generation:
            return
        if place.pos and self._prompt is not None and self._prompt.shape[1] >= place.pos:
            cached = self._prompt[0, : place.pos].tolist()
            text = f"The first {place.pos} tokens of the prompt are said to be cached already."
            self._event(CACHED_PROMPT_EVENT, text, step, {"prompt": cached})
        if self._generate_depth and not self._is_followed:
            text = "Beams and assisted generation are not followed: steps are recorded, and no "
            say(("not-followed", text + "token is said to be chosen by one of them."))
        assert self._builder is not None
        for trouble in self._builder.problems:
            say(("segments", trouble))
            self._print_once(trouble)

    def _on_forward_end(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or module is not self._model or not self.context.is_open:
            return
        started = time.perf_counter()
        self.context.is_open, step = False, self._step
        if step is None:
            return
        self.waited_s += off_cpu_s() - step.off_cpu_before
        try:
            # A call of generate copies the row before it changes it; another loop may not.
            row = step.logits = newest_logits_row(
                output, self._model, copy=not self._generate_depth
            )
            step.output = output
            self._owners.set_owner(getattr(output, "past_key_values", None), step.generation)
            buffer = StepBuffer(self._device, self._stream)
            kept = self._reduce(step, buffer)
            step.drop_references()
        except Exception as error:
            self._event("step-unread", f"A step was not recorded: {type(error).__name__}: {error}")
            self._abandon()
            return
        self._step, self._is_broken = None, False
        on_device = row if row is not None and row.device.type != "cpu" else None
        ended = time.perf_counter()
        step.capture_s += ended - started
        self._pending = PendingStep(step, buffer, kept, on_device, self._input_tokens, ended)

    def _finish_step(self, rows: InputRows | None, pos: int, now: float | None = None) -> None:
        """Hand the waiting step to the writer thread; `rows` end with the token that it chose."""
        waiting, self._pending = self._pending, None
        story = self._builder
        if waiting is None or story is None:
            return
        started = time.perf_counter()
        step, buffer, given = waiting.step, waiting.buffer, waiting.input_tokens
        ended = waiting.ended if now is None else now
        step.wall_ms = (ended - step.started) * 1e3
        if rows is not None and rows.ids is not None and waiting.row is not None:
            reduce_chosen(waiting.row, rows.ids[-1:], buffer)
        kept = self._start_copy(step, buffer, waiting.kept)

        def tokens() -> tuple[TokenRecord, ...]:
            return (
                *given(),
                *(story.chosen_tokens(rows, pos, step.step) if rows is not None else ()),
            )

        step.capture_s += time.perf_counter() - started
        self.recorder.put(FinishedStep(step, buffer, tuple(kept), tokens))
        self.place = control.StepRef(step.generation, 0, step.step)
        self.capture_s += step.capture_s
        self.total_s += ended - step.started

    # -- a generation ----------------------------------------------------------------------------

    def _start_generation(self, place: StepPlace, rows: InputRows) -> None:
        story = self._builder = GenerationBuilder.begin(self._declared_prompt, place, rows)
        story.record = replace(story.record, model=self.model_name)
        self.begin_generation(story.record)

    def _finish_generation(self, state: str = "finished", reason: str = "") -> None:
        """End the open generation with what is known of it."""
        waiting, story = self._pending, self._builder
        if story is None:
            return
        if self._is_broken and state == "finished":
            state, reason = "failed", "A forward did not return."
        if waiting is not None and not reason:
            reason = "what the last step chose was not fed, so it is not known"
        self._finish_step(None, 0)
        self._builder, self._is_broken, at = None, False, time.time()
        self.recorder.put(lambda: story.end(state, reason, at))

    def _record_lost_forward(self, step: StepContext) -> None:
        """Say that a forward never returned; it may be tried again."""
        fed = f"rows fed: {step.q_len}, keys cached: {step.kv_before}"
        error, self.context.exit_reason = self.context.exit_reason, ""
        why = f": {error}" if error else "."
        text = f"The forward of step {step.step} did not return ({fed}){why}"
        self._event("forward-failed", text, step, {"error": error} if error else None)
        self._abandon()
        self._tracker.undo()
        self._is_broken = True

    def finish(self, state: str, error: BaseException | None) -> None:
        """End what is open; an exception that goes through is told, at the step it left."""
        reason = describe_error(error) if error is not None else ""
        if error is not None and state != "finished":
            self._record_error(error)
        elif self._step is not None:
            self._record_lost_forward(self._step)
        self._abandon()
        self._finish_generation(state, reason)
        self._tracker.end()

    def close(self, state: str, error: BaseException | None) -> None:
        """Finish, and say so when nothing was seen at all, or no more from some forward on."""
        self.finish(state, error)
        if not self.has_hooks_installed:
            self._report_hooks_removed()
        if not self._n_forwards:
            text = (
                "No forward of this model was seen: it was not called, or only through a part of "
                "it, or inside a compiled graph."
            )
            self._event(UNSEEN_LAYERS, text)
            self._print_once(text)

    @property
    def is_in_generate(self) -> bool:
        """Whether a call of `generate` is under way."""
        return self._generate_depth > 0

    @property
    def has_hooks_installed(self) -> bool:
        """Whether all that was put into the model's modules is still there."""
        return are_installed(remove for _, remove in self._removes)

    def _report_hooks_removed(self) -> None:
        text = f"{HOOKS_REMOVED}: what ran after that was not recorded, or not whole."
        self._event(UNSEEN_LAYERS, text)
        self._print_once(text)

    def _record_error(self, error: BaseException) -> None:
        if error is self._recorded_error:
            return
        self._recorded_error, step = error, self._step
        strip_own_frames(error)
        story, waiting = self._builder, self._pending
        generation = story.number if story is not None else None
        last = step or (waiting.step if waiting is not None else None)
        where = last.step if last is not None else None
        text, data = (
            describe_error(error),
            {"traceback": "".join(traceback.format_exception(error))},
        )
        self.recorder.put(EventRecord("error", text, time.time(), generation, where, data))

    def _print_once(self, sentence: str) -> None:
        """Say something on stderr, once."""
        if sentence not in self._printed:
            self._printed.add(sentence)
            print(f"flexinspect: {sentence}", file=sys.stderr)

    # -- a call of generate ----------------------------------------------------------------------

    def watch_generate(self) -> None:
        """Put a wrapper around the model's `generate`, which shows where it begins and its result.

        It is removed with the hooks.
        """
        remove = wrap_generate(self._model, self.call_generate)
        if remove is not None:
            self._removes.append((None, remove))

    def call_generate(
        self, generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the model's `generate` (bound), telling where it begins and its result."""
        if kwargs.get("custom_generate") is not None:  # a loop of their own
            return generate(*args, **kwargs)
        with self._thread_ownership.lock:
            is_anothers = self._thread_ownership.is_other_thread_active()
            if not is_anothers:
                self._thread_ownership.acquire()
                self._begin_generate(args, kwargs)
        if is_anothers:
            return generate(*args, **kwargs)
        try:
            result = generate(*args, **kwargs)
        except BaseException as error:
            self._end_generate(None, error)
            raise
        self._end_generate(result, None)
        return result

    def _begin_generate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._generate_depth += 1
        if self._generate_depth > 1:
            return
        self._finish_generation()
        self._is_followed = is_followed(self._model, kwargs)
        prompt = next(
            (v for v in (*args[:1], *map(kwargs.get, _PROMPT_ARGUMENTS)) if v is not None), None
        )
        n_prompt = 0
        if isinstance(prompt, Tensor) and prompt.dim() > 1 and not has_encoder(self._model):
            n_prompt = int(prompt.shape[1])
        self._prompt = prompt if n_prompt else None
        self._tracker.begin_generate(n_prompt, followed=self._is_followed)

    def _end_generate(self, result: Any, error: BaseException | None) -> None:
        self._generate_depth -= 1
        if self._generate_depth:
            return
        self._thread_ownership.release()
        self._prompt = None
        if error is not None:
            is_stop = isinstance(error, KeyboardInterrupt)
            self.finish("interrupted" if is_stop else "failed", error)
            return
        try:
            self._record_last_token(result)
        except Exception as failure:
            what = f"{type(failure).__name__}: {failure}"
            self._event("step-unread", f"What generate returned was not read: {what}")
        self._finish_generation()
        self._tracker.end()
        self.pass_breakpoints()

    def _record_last_token(self, result: Any) -> None:
        """Settle the last step with the token at the end of what `generate` returned."""
        sequences, pos = getattr(result, "sequences", result), self._tracker.length
        if not self._is_followed or not isinstance(sequences, Tensor) or sequences.dim() != 2:
            return
        if self._builder is not None and sequences.shape[1] > pos + 1 > 1:
            text = f"generate returned {sequences.shape[1]} tokens, and the forwards seen end at "
            self._event(UNSEEN_LAYERS, f"{text}{pos}: the others ran inside a compiled graph.")
        if sequences.shape[1] == pos + 1:
            last = {"input_ids": sequences[:1, pos:]}
            self._finish_step(InputRows(last, 1, with_mask=False, stream=self._stream), pos)


_PROMPT_ARGUMENTS = ("inputs", "input_ids")


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step whose forward is over and whose token is not known yet."""

    step: StepContext
    buffer: StepBuffer
    kept: list[tuple[Hook, Any]]
    row: Tensor | None
    input_tokens: Callable[[], tuple[TokenRecord, ...]]
    ended: float


@dataclass(frozen=True, slots=True)
class SharedRecording:
    """What models that are recorded into one trace share, and the `name` of one of them."""

    recorder: Recorder
    generation_numbers: Iterator[int]
    name: str
