"""Finding the models of a program by themselves: the root forward of any transformers model.

Two methods are wrapped on transformers' own classes, `PreTrainedModel.__call__` and
`GenerationMixin.generate`, until `close`. A model that is called for the first time gets a session
of its own on the spot; everything else is that session's work.
"""

from __future__ import annotations

import functools
import importlib
import threading
import time
import traceback
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flexinspect.core.errors import TraceWriteError
from flexinspect.records.job import ScriptJob, parse_layers
from flexinspect.records.step import EventRecord
from flexinspect.trace.file.writer import TraceWriter
from flexinspect_hooks.breakpoints.observations import BreakpointEvaluator
from flexinspect_hooks.capture.model_layers import attention_layers
from flexinspect_hooks.capture.recorder import Recorder
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.control.step_barrier import StepBarrier
from flexinspect_hooks.interpreter.pickling import hide_hooks
from flexinspect_hooks.loading.model_facts import model_facts
from flexinspect_hooks.observers.input_rows import InputRows
from flexinspect_hooks.sessions.capture_session import SessionLevels, capture_cost
from flexinspect_hooks.user_code.declared_prompt import parse_segments
from flexinspect_hooks.user_code.generation_builder import DeclaredPrompt
from flexinspect_hooks.user_code.own_loops import HOOKS_REMOVED
from flexinspect_hooks.user_code.program import end_state, exception_chain, strip_own_frames
from flexinspect_hooks.user_code.step_tracking import StepPlace
from flexinspect_hooks.user_code.tokenizer_discovery import MatchedTokenizer, TokenizerMatcher
from flexinspect_hooks.user_code.tokenizer_tracking import TokenizerTracker
from flexinspect_hooks.user_code.watch_session import SharedRecording, WatchSession

if TYPE_CHECKING:
    from flexinspect_hooks.sessions.standalone_calls import StandaloneCalls

MAX_STEP_STARTS = 4096
"""Steps whose beginnings are remembered, to say during which of them something was printed."""

MAX_HOOK_RESTORES = 16
"""How often hooks that the program took out of a model are put back."""

_NO_LAYER_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class _FoundModel:
    model: weakref.ref[nn.Module]
    session: FoundSession | None
    """None for a model that could not be watched."""
    n_restores: int = 0
    """How often its hooks were put back."""


class ModelFinder:
    """Records every transformers model that the program runs into one trace."""

    def __init__(self, job: ScriptJob, writer: TraceWriter, made: TokenizerTracker) -> None:
        self.job, self.writer = job, writer
        self.tokenizers = TokenizerMatcher(made)
        self._segments = parse_segments(job.declaration.segments)
        self.recorder = Recorder(writer)
        self._numbers = count()
        self._found: dict[int, _FoundModel] = {}
        self._collected: deque[int] = deque()
        self._sessions: list[FoundSession] = []
        self._facts: list[dict[str, Any]] = []
        self._step_starts: deque[tuple[float, int, int]] = deque(maxlen=MAX_STEP_STARTS)
        self._local = threading.local()
        self._lock = threading.RLock()
        self._removes: list[Callable[[], None]] = []
        self._is_over = False
        self._standalone: StandaloneCalls | None = None
        self._barrier: StepBarrier | None = None
        self._levels: SessionLevels | None = None
        self._breakpoints: BreakpointEvaluator | None = None
        self.recorder.start()

    def attach_control(self, barrier: StepBarrier, levels: SessionLevels) -> None:
        """Let every session, from now on, wait at this gate and follow these levels."""
        self._barrier, self._levels = barrier, levels

    def break_on(self, breaking: BreakpointEvaluator) -> None:
        """Let every session, from now on, judge these breakpoints."""
        self._breakpoints, self.recorder.judge = breaking, breaking

    # -- where models are met --------------------------------------------------------------------

    def watch_models(self) -> None:
        """Wrap the call of every `PreTrainedModel`; transformers' modeling_utils is loaded."""
        from transformers.modeling_utils import PreTrainedModel

        here, find, set_compiler = self._local, self._find, _frame_compiler_setter()

        @functools.wraps(nn.Module.__call__)
        def call(model: Any, /, *args: Any, **kwargs: Any) -> Any:
            # Within another model's forward it is a part of that one; a graph must not hold us.
            if torch.compiler.is_compiling() or getattr(here, "is_open", False):
                return nn.Module.__call__(model, *args, **kwargs)
            here.is_open, here.root = True, id(model)
            try:
                compiler = set_compiler(None)  # what finds a model is not for it to compile
                try:
                    session = find(model)
                finally:
                    set_compiler(compiler)
                try:
                    return nn.Module.__call__(model, *args, **kwargs)
                except BaseException as error:
                    if session is not None:
                        session.on_forward_failed(error)
                    strip_own_frames(error)
                    raise
            finally:
                here.is_open, here.root = False, 0

        _skip_compilation(call)
        PreTrainedModel.__call__ = call
        self._removes += [lambda: delattr(PreTrainedModel, "__call__"), hide_hooks()]

    def watch_generate(self) -> None:
        """Wrap `GenerationMixin.generate`; transformers' generation utils are loaded."""
        from transformers.generation.utils import GenerationMixin

        original, here = GenerationMixin.generate, self._local

        @functools.wraps(original)
        def generate(model: Any, /, *args: Any, **kwargs: Any) -> Any:
            is_inner = torch.compiler.is_compiling() or getattr(here, "is_open", False)
            session = None if is_inner else self._find(model)
            if session is None:
                return original(model, *args, **kwargs)
            try:
                return session.call_generate(functools.partial(original, model), args, kwargs)
            except BaseException as error:
                strip_own_frames(error)
                raise

        GenerationMixin.generate = generate

        def remove() -> None:
            GenerationMixin.generate = original

        self._removes.append(remove)

    def watch_standalone_calls(self) -> None:
        """Record FlexAttention that no model calls; its module is loaded."""
        from flexinspect_hooks.sessions.standalone_calls import StandaloneCalls

        loose = StandaloneCalls(self.writer, self.recorder, self._numbers, level=self.job.level)
        loose.__enter__()
        self._standalone = loose
        if self._levels is not None:
            self._levels.attach(loose)

    # -- a model ---------------------------------------------------------------------------------

    def _find(self, model: nn.Module) -> FoundSession | None:
        """Return the session of a model, made on its first call; None where there is none."""
        known = self._found.get(id(model))
        if known is not None and known.model() is model:
            return self._session_with_hooks(model, known)
        if self._is_over:
            return None
        with self._lock:
            self._end_collected_sessions()
            session = self._begin_session(model, self._unique_name(model))
            self._found[id(model)] = _FoundModel(weakref.ref(model), session)
            if session is not None:
                self._write_model_facts({**model_facts(model), "name": session.model_name})
            # What is called when a model goes may interrupt anything: it only leaves a note.
            weakref.finalize(model, self._collected.append, id(model)).atexit = False
        return session

    def _session_with_hooks(self, model: nn.Module, known: _FoundModel) -> FoundSession | None:
        """Return a known model's session; another one where its hooks were taken out."""
        session, n = known.session, known.n_restores + 1
        if (
            session is None
            or self._is_over
            or session.has_hooks_installed
            or session.is_in_generate
        ):
            return session
        if n > MAX_HOOK_RESTORES:
            if n == MAX_HOOK_RESTORES + 1:
                self.event(
                    "unseen", f"{HOOKS_REMOVED} {n} times: what runs from here on is not seen."
                )
                self._found[id(model)] = _FoundModel(known.model, session, n)
            return session
        with self._lock:
            self.event("hooks-again", f"{HOOKS_REMOVED}; they were put back before a forward.")
            self._end_session(session, "finished", None)
            again = self._begin_session(model, session.model_name)
            self._found[id(model)] = _FoundModel(known.model, again, n)
        return again

    def _begin_session(self, model: nn.Module, name: str) -> FoundSession | None:
        try:
            company = SharedRecording(self.recorder, self._numbers, name)
            session = FoundSession(model, self, company, MatchedTokenizer())
            session.__enter__()
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            self.event("unseen", f"A {type(model).__name__} cannot be watched: {what}")
            return None
        session.barrier = self._barrier
        if self._levels is not None:
            self._levels.attach(session)
        if self._breakpoints is not None:
            session.break_on(self._breakpoints)
        self._sessions.append(session)
        return session

    def _unique_name(self, model: nn.Module) -> str:
        """Return a name that no other model of this program has."""
        name = str(model_facts(model)["name"])
        taken = {facts["name"] for facts in self._facts}
        tries = (f"{name} ({n})" if n > 1 else name for n in count(1))
        return next(each for each in tries if each not in taken)

    def _write_model_facts(self, facts: dict[str, Any]) -> None:
        self._facts.append(facts)
        with suppress(TraceWriteError):
            self.writer.update_run(model=self._facts[0], models=self._facts)

    def _end_collected_sessions(self) -> None:
        """End the sessions of models that are gone."""
        while self._collected:
            gone = self._found.pop(self._collected.popleft(), None)
            if gone is not None and gone.session is not None:
                self._end_session(gone.session, "finished", None)

    def _end_session(self, session: FoundSession, state: str, error: BaseException | None) -> None:
        try:
            session.close(state, error)
            session.__exit__(None, None, None)
        except Exception as failure:
            self.event("unseen", f"A model's recording ended badly: {failure!r}")

    def layers_of(self, model: nn.Module) -> tuple[int, ...] | None:
        """Return those of the layers asked for that this model has, None for all of them."""
        asked = parse_layers(self.job.layers, _NO_LAYER_LIMIT)
        known = set(attention_layers(model).values())
        return None if asked is None else tuple(layer for layer in asked if layer in known)

    def declared_prompt(self, tokenizer: MatchedTokenizer) -> DeclaredPrompt:
        """Return what was declared, in these words."""
        said = self.job.declaration
        return DeclaredPrompt(tokenizer, self._segments, said.mask, said.separators)

    def is_root(self, model: nn.Module) -> bool:
        """Say whether this thread's outermost call of a model is this one's."""
        return getattr(self._local, "root", 0) == id(model)

    # -- where we are ----------------------------------------------------------------------------

    def on_step_begin(self, step: StepContext) -> None:
        """Remember when a step began."""
        self._step_starts.append((step.started_at, step.generation, step.step))

    def step_at(self, at: float) -> tuple[int | None, int | None]:
        """Return generation and step of the last step that had begun at a time."""
        places = list(self._step_starts)
        index = bisect_right(places, at, key=lambda place: place[0])
        return places[index - 1][1:] if index else (None, None)

    def event(self, kind: str, text: str, **data: Any) -> None:
        """Record an event, in order with the steps."""
        self.recorder.put(EventRecord(kind, text, time.time(), data=data))

    # -- the end ---------------------------------------------------------------------------------

    def on_program_failed(self, error: BaseException) -> None:
        """The program ends with this exception: mark the step that it left."""
        strip_own_frames(error)
        if any(session.has_recorded(error) for session in self._sessions):
            return
        with self._lock:
            state = end_state(error)
            chain = {id(one) for one in exception_chain(error)}
            places = {session: session.failed_step(chain) for session in self._sessions}
            last = max(places, key=places.__getitem__, default=None)
            is_exit = isinstance(error, SystemExit)
            if last is not None and (places[last][0] or (places[last][1] and not is_exit)):
                last.finish(state, error)
            elif not is_exit:
                text = "".join(traceback.format_exception(error))
                self.event("error", f"{type(error).__name__}: {error}", traceback=text)

    def close(self) -> dict[str, float | int] | None:
        """End every session, take everything out, write what waits; returns the cost."""
        self._is_over = True
        with self._lock:
            self._end_collected_sessions()
            for found in reversed(list(self._found.values())):
                if found.session is not None:
                    self._end_session(found.session, "finished", None)
            if self._standalone is not None:
                self._standalone.__exit__(None, None, None)
            self._remove_wrappers()
            sessions = [
                *self._sessions,
                *([self._standalone] if self._standalone is not None else []),
            ]
            cost = capture_cost(sessions, self.recorder) if sessions else None
            self.recorder.stop()
        return cost

    def discard(self) -> None:
        """Take everything out, and write nothing: this is a forked child."""
        self._is_over = True
        for session in reversed(self._sessions):
            session.remove_hooks()
        if self._standalone is not None:
            self._standalone.remove_hooks()
        self._remove_wrappers()

    def _remove_wrappers(self) -> None:
        while self._removes:
            self._removes.pop()()

    @property
    def n_models(self) -> int:
        """Models that were found."""
        return len(self._facts)

    @property
    def has_standalone_calls(self) -> bool:
        """Whether FlexAttention was called outside of any model."""
        return self._standalone is not None and self._standalone.n_calls > 0


def _frame_compiler_setter() -> Callable[[Any], Any]:
    """Return what sets the compiler of frames in this thread, and gives the one that was set.

    `torch.compiler.disable` uses it, too, but loads all of dynamo.
    """
    with suppress(ImportError, AttributeError):
        frames: Any = importlib.import_module("torch._C._dynamo.eval_frame")
        setter: Callable[[Any], Any] = frames.set_eval_frame
        return setter
    return lambda compiler: compiler


def _skip_compilation(function: Any) -> None:
    """Let torch.compile pass over a function's own frame, and compile what it calls.

    `torch.compiler.disable(recursive=False)` does the same, but loads all of dynamo.
    """
    with suppress(ImportError, AttributeError):
        frames: Any = importlib.import_module("torch._C._dynamo.eval_frame")
        skip, as_usual = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, as_usual))


class FoundSession(WatchSession):
    """The session of a model that was found. Nothing of it is said on the program's stderr."""

    def __init__(
        self,
        model: nn.Module,
        finder: ModelFinder,
        shared_recording: SharedRecording,
        tokenizer: MatchedTokenizer,
    ) -> None:
        self._finder, self._tokenizer = finder, tokenizer
        self._thread = self._exit_exception_id = 0
        super().__init__(
            model,
            finder.writer,
            finder.declared_prompt(tokenizer),
            level=finder.job.level,
            layers=finder.layers_of(model),
            shared_recording=shared_recording,
        )

    def _on_forward_start(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._finder.is_root(module):  # within another model's forward it is a part of that one
            super()._on_forward_start(module, args, kwargs)

    def _start_generation(self, place: StepPlace, rows: InputRows) -> None:
        self._tokenizer.use(self._finder.tokenizers.match(self._model))
        if not self._tokenizer.has_text and any(one.text for one in self._declared_prompt.segments):
            text = "No tokenizer was found in the program, so texts that were declared cannot be "
            self._event("segments", text + "looked for; spans of positions can.")
        super()._start_generation(place, rows)

    def _begin_step(self, step: StepContext) -> None:
        super()._begin_step(step)
        self._thread, self._exit_exception_id = threading.get_ident(), 0
        self._finder.on_step_begin(step)

    def _print_once(self, sentence: str) -> None:
        """Say nothing: it is in the trace, and stderr is the program's."""

    def _report_hooks_removed(self) -> None:
        """Say nothing at the end: before each forward they are looked for."""

    def has_recorded(self, error: BaseException) -> bool:
        """Say whether this exception is in the trace already."""
        return error is self._recorded_error

    def on_forward_failed(self, error: BaseException) -> None:
        """A forward is left by this exception, which somebody may catch."""
        self._exit_exception_id = id(error)  # holding it would hold all that its frames hold

    def failed_step(self, errors: set[int]) -> tuple[bool, float]:
        """Say whether one of these exceptions, by id, left an open step, and when that step began.

        Without one it is the step that waits for its token; 0.0 when there is none in this thread.
        """
        if self._thread != threading.get_ident():
            return False, 0.0
        if self._step is not None:
            is_left = self._exit_exception_id in errors
            return is_left, self._step.started if is_left else 0.0
        return False, self._pending.step.started if self._pending is not None else 0.0
