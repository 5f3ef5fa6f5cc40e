"""A capture session around a loop that is not ours: generations and tokens are found by themselves.

A step is reduced when its forward returns, and then waits for the next forward, which is fed what
the step chose. Where nobody feeds it, nobody saw it, and the record says so.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flexinspect.control import messages as control
from flexinspect.records import EventRecord, TokenRecord
from flexinspect.rules.cachekinds import CACHED_PROMPT
from flexinspect_hooks.attention import UNSEEN
from flexinspect_hooks.buffer import StepBuffer
from flexinspect_hooks.cacheowners import CacheOwners
from flexinspect_hooks.clock import StepContext, cached_length, query_length, stood_s
from flexinspect_hooks.control.passing import pass_gate
from flexinspect_hooks.fednotes import notes_of
from flexinspect_hooks.fedrows import ArgumentNames, FedRows
from flexinspect_hooks.generatecalls import wrap_generate
from flexinspect_hooks.handles import TAKEN_OUT, are_in
from flexinspect_hooks.kernelcalls import in_words, pass_over
from flexinspect_hooks.logits import reduce_chosen
from flexinspect_hooks.ownloops import has_encoder, is_followed, newest_row
from flexinspect_hooks.program import without_us
from flexinspect_hooks.recorder import FinishedStep, Sink
from flexinspect_hooks.saidwords import facts_of_config
from flexinspect_hooks.sequence import Fed, Place, Sequences
from flexinspect_hooks.session import CaptureSession
from flexinspect_hooks.story import Story, Wishes
from flexinspect_hooks.turns import OVERLAP, Turns
from flexinspect_hooks.watchparts import Company, Waiting


class WatchSession(CaptureSession):
    """While entered, records every root forward of `model`, whoever calls it."""

    def __init__(
        self,
        model: nn.Module,
        sink: Sink,
        wishes: Wishes,
        *,
        level: str,
        layers: Sequence[int] | None = None,
        company: Company | None = None,
    ) -> None:
        super().__init__(
            model,
            sink,
            level=level,
            layers=layers,
            text_of=wishes.words.text_of,
            recorder=company.recorder if company else None,
        )
        self.context.sees_kernels = True
        self._wishes = replace(wishes, config=facts_of_config(model))
        self._names = ArgumentNames(model)
        self._sequences = Sequences(company.numbers if company else None)
        self.model_name = company.name if company else ""
        self._owners, self._turns, self._overlapped = CacheOwners(), Turns(self.context), -2
        self._story: Story | None = None
        self._given: Callable[[], tuple[TokenRecord, ...]] = tuple
        self._waiting: Waiting | None = None
        self._told: set[str] = set()
        self._told_error: BaseException | None = None
        self._is_broken = self._is_followed = False
        self._calls = self._n_arrived = 0
        self._stood_s = 0.0
        self._prompt: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> WatchSession:
        """Copies of the model carry its hooks along, and they must not carry this."""
        return self

    # -- a forward -------------------------------------------------------------------------------

    def _open(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or module is not self._model:
            return  # of a graph as a whole nothing is seen; and a copy is another model
        with self._turns.lock:
            is_passed = self._turns.is_anothers()
            pass_over(is_passed=is_passed)
            if is_passed:
                self._tell_overlap()
            else:
                self._open_step(args, kwargs)

    def _tell_overlap(self) -> None:
        """Say, once for each generation, that a forward was passed over."""
        number = self._story.number if self._story is not None else -1
        if number != self._overlapped:
            self._overlapped, step = number, self._step
            if step is not None:
                step.events.append((UNSEEN, OVERLAP))
            else:
                self._event(UNSEEN, OVERLAP)

    def _open_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        started = time.perf_counter()
        self._stood_s = 0.0
        try:
            if self._step is not None:
                self._lose(self._step)
            self.context.left_by = ""
            self._remove_switched_off()
            step = self._arrive(args, self._names(args, kwargs), started)
        except Exception as error:
            # Whatever was passed, the user's forward goes on; this step is not recorded.
            self._event("step-unread", f"A step was not recorded: {type(error).__name__}: {error}")
            self._abandon()
            return
        try:
            self._begin_step(step)
        except BaseException:  # of a breakpoint: the forward never came, and may be run again
            self._sequences.undo()
            raise
        step.capture_s += time.perf_counter() - started - self._stood_s
        self.total_s += step.started - started - self._stood_s  # what found its place is part of it

    def _arrive(
        self, args: tuple[Any, ...], arguments: dict[str, Any], started: float
    ) -> StepContext:
        """Find out where a forward belongs, and let go of the step before."""
        self._n_arrived += 1
        n_rows = query_length(args, arguments)
        cache = arguments.get("past_key_values")
        cached, owner = cached_length(cache), self._owners.of(cache)
        rows = FedRows(arguments, n_rows, with_mask=not cached, stream=self._stream)
        place = self._sequences.place(Fed(n_rows, cached, rows.token_ids, owner))
        self._owners.claim(cache, place.generation)
        if place.begins:
            self._end()
            self._stand()
            self._begin(place, rows)
        else:
            self._settle(rows if place.chosen else None, place.pos, started)
            self._stand()
        self._clock.move(place.generation, place.step)
        step = self._clock.open(args, arguments, self.level)
        step.arguments = arguments
        step.is_scored = False  # what a loop does with the logits before it chooses is not seen
        self._note(step, place, rows)
        is_given = not (place.begins or place.chosen) and place.n_new > 0
        story = self._story
        assert story is not None
        self._given = (lambda: story.given(rows, place)) if is_given else tuple
        return step

    def _stand(self) -> None:
        """Wait at the gate; a forward that is stopped there never came."""
        try:
            self._stood_s = pass_gate(self.gate, self.place)
        except KeyboardInterrupt:
            self._sequences.undo()
            raise

    def _note(self, step: StepContext, place: Place, rows: FedRows) -> None:
        say = step.events.append
        step.events += notes_of(step, place, rows)
        if not place.begins:
            return
        if place.pos and self._prompt is not None and self._prompt.shape[1] >= place.pos:
            cached = self._prompt[0, : place.pos].tolist()
            text = f"The first {place.pos} tokens of the prompt are said to be cached already."
            self._event(CACHED_PROMPT, text, step, {"prompt": cached})
        if self._calls and not self._is_followed:
            text = "Beams and assisted generation are not followed: steps are recorded, and no "
            say(("not-followed", text + "token is said to be chosen by one of them."))
        assert self._story is not None
        for trouble in self._story.troubles:
            say(("segments", trouble))
            self._tell(trouble)

    def _forward_done(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or module is not self._model or not self.context.is_open:
            return
        started = time.perf_counter()
        self.context.is_open, step = False, self._step
        if step is None:
            return
        self.waited_s += stood_s() - step.stood_before
        try:
            # A call of generate copies the row before it changes it; another loop may not.
            row = step.logits = newest_row(output, self._model, copy=not self._calls)
            step.output = output
            self._owners.claim(getattr(output, "past_key_values", None), step.generation)
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
        self._waiting = Waiting(step, buffer, kept, on_device, self._given, ended)

    def _settle(self, rows: FedRows | None, pos: int, now: float | None = None) -> None:
        """Hand the waiting step to the writer thread; `rows` end with the token that it chose."""
        waiting, self._waiting = self._waiting, None
        story = self._story
        if waiting is None or story is None:
            return
        started = time.perf_counter()
        step, buffer, given = waiting.step, waiting.buffer, waiting.given
        ended = waiting.ended if now is None else now
        step.wall_ms = (ended - step.started) * 1e3
        if rows is not None and rows.ids is not None and waiting.row is not None:
            reduce_chosen(waiting.row, rows.ids[-1:], buffer)
        kept = self._ship(step, buffer, waiting.kept)

        def tokens() -> tuple[TokenRecord, ...]:
            return (*given(), *(story.chosen(rows, pos, step.step) if rows is not None else ()))

        step.capture_s += time.perf_counter() - started
        self.recorder.put(FinishedStep(step, buffer, tuple(kept), tokens))
        self.place = control.Place(step.generation, 0, step.step)
        self.capture_s += step.capture_s
        self.total_s += ended - step.started

    # -- a generation ----------------------------------------------------------------------------

    def _begin(self, place: Place, rows: FedRows) -> None:
        story = self._story = Story.begin(self._wishes, place, rows)
        story.record = replace(story.record, model=self.model_name)
        self.begin_generation(story.record)

    def _end(self, state: str = "finished", reason: str = "") -> None:
        """End the open generation with what is known of it."""
        waiting, story = self._waiting, self._story
        if story is None:
            return
        if self._is_broken and state == "finished":
            state, reason = "failed", "A forward did not return."
        if waiting is not None and not reason:
            reason = "what the last step chose was not fed, so it is not known"
        self._settle(None, 0)
        self._story, self._is_broken, at = None, False, time.time()
        self.recorder.put(lambda: story.end(state, reason, at))

    def _lose(self, step: StepContext) -> None:
        """Say that a forward never returned; it may be tried again."""
        fed = f"rows fed: {step.q_len}, keys cached: {step.kv_before}"
        error, self.context.left_by = self.context.left_by, ""
        why = f": {error}" if error else "."
        text = f"The forward of step {step.step} did not return ({fed}){why}"
        self._event("forward-failed", text, step, {"error": error} if error else None)
        self._abandon()
        self._sequences.undo()
        self._is_broken = True

    def finish(self, state: str, error: BaseException | None) -> None:
        """End what is open; an exception that goes through is told, at the step it left."""
        reason = in_words(error) if error is not None else ""
        if error is not None and state != "finished":
            self._tell_error(error)
        elif self._step is not None:
            self._lose(self._step)
        self._abandon()
        self._end(state, reason)
        self._sequences.end()

    def close(self, state: str, error: BaseException | None) -> None:
        """Finish, and say so when nothing was seen at all, or no more from some forward on."""
        self.finish(state, error)
        if not self.has_its_hooks:
            self._tell_hooks_gone()
        if not self._n_arrived:
            text = (
                "No forward of this model was seen: it was not called, or only through a part of "
                "it, or inside a compiled graph."
            )
            self._event(UNSEEN, text)
            self._tell(text)

    @property
    def is_called(self) -> bool:
        """Whether a call of `generate` is under way."""
        return self._calls > 0

    @property
    def has_its_hooks(self) -> bool:
        """Whether all that was put into the model's modules is still there."""
        return are_in(remove for _, remove in self._removes)

    def _tell_hooks_gone(self) -> None:
        text = f"{TAKEN_OUT}: what ran after that was not recorded, or not whole."
        self._event(UNSEEN, text)
        self._tell(text)

    def _tell_error(self, error: BaseException) -> None:
        if error is self._told_error:
            return
        self._told_error, step = error, self._step
        without_us(error)
        story, waiting = self._story, self._waiting
        generation = story.number if story is not None else None
        last = step or (waiting.step if waiting is not None else None)
        where = last.step if last is not None else None
        text, data = in_words(error), {"traceback": "".join(traceback.format_exception(error))}
        self.recorder.put(EventRecord("error", text, time.time(), generation, where, data))

    def _tell(self, sentence: str) -> None:
        """Say something on stderr, once."""
        if sentence not in self._told:
            self._told.add(sentence)
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
        with self._turns.lock:
            is_anothers = self._turns.is_anothers()
            if not is_anothers:
                self._turns.take()
                self._enter_call(args, kwargs)
        if is_anothers:
            return generate(*args, **kwargs)
        try:
            result = generate(*args, **kwargs)
        except BaseException as error:
            self._leave_call(None, error)
            raise
        self._leave_call(result, None)
        return result

    def _enter_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls += 1
        if self._calls > 1:
            return
        self._end()
        self._is_followed = is_followed(self._model, kwargs)
        prompt = next((v for v in (*args[:1], *map(kwargs.get, _PROMPTS)) if v is not None), None)
        n_prompt = 0
        if isinstance(prompt, Tensor) and prompt.dim() > 1 and not has_encoder(self._model):
            n_prompt = int(prompt.shape[1])
        self._prompt = prompt if n_prompt else None
        self._sequences.begin_call(n_prompt, followed=self._is_followed)

    def _leave_call(self, result: Any, error: BaseException | None) -> None:
        self._calls -= 1
        if self._calls:
            return
        self._turns.give_back()
        self._prompt = None
        if error is not None:
            is_stop = isinstance(error, KeyboardInterrupt)
            self.finish("interrupted" if is_stop else "failed", error)
            return
        try:
            self._take_last(result)
        except Exception as failure:
            what = f"{type(failure).__name__}: {failure}"
            self._event("step-unread", f"What generate returned was not read: {what}")
        self._end()
        self._sequences.end()
        self.pass_breakpoints()

    def _take_last(self, result: Any) -> None:
        """Settle the last step with the token at the end of what `generate` returned."""
        sequences, pos = getattr(result, "sequences", result), self._sequences.length
        if not self._is_followed or not isinstance(sequences, Tensor) or sequences.dim() != 2:
            return
        if self._story is not None and sequences.shape[1] > pos + 1 > 1:
            text = f"generate returned {sequences.shape[1]} tokens, and the forwards seen end at "
            self._event(UNSEEN, f"{text}{pos}: the others ran inside a compiled graph.")
        if sequences.shape[1] == pos + 1:
            last = {"input_ids": sequences[:1, pos:]}
            self._settle(FedRows(last, 1, with_mask=False, stream=self._stream), pos)


_PROMPTS = ("inputs", "input_ids")
