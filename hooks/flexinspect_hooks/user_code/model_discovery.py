"""Finds the models of a program at their first root forwards, and the tokenizer of each.

Two methods of transformers' classes are wrapped until `close`: `PreTrainedModel.__call__` and
`GenerationMixin.generate`. A model that is called for the first time gets its own session, which
records it from then on.
"""

from __future__ import annotations

import functools
import threading
import time
import traceback
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from itertools import chain, count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from flexinspect.core import plugins
from flexinspect.core.errors import TraceWriteError, exception_chain
from flexinspect.records.step import EventRecord
from flexinspect.rules.attention.kernel_failures import SILENT_HOOK_EVENT
from flexinspect_hooks.audit.evidence.step_evidence import EvidenceStore
from flexinspect_hooks.audit.program_audit import AuditOptions
from flexinspect_hooks.audit.session_audit import AuditBudget, PrintedProgress, audit_session
from flexinspect_hooks.capture.failure_facts import failure_facts, is_deliberate
from flexinspect_hooks.capture.model_layers import attention_layers, model_facts
from flexinspect_hooks.capture.rank_facts import parallel_facts
from flexinspect_hooks.capture.recorder import Recorder
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.changed_weights.made_weights import MadeWeights
from flexinspect_hooks.control.control_protocols import chosen_layers
from flexinspect_hooks.generate_calls.generate_call import LoadingReports
from flexinspect_hooks.loading.tokenizers import IdAdapter, SafeAdapter
from flexinspect_hooks.observers.attention.kernel_calls import set_current_layer
from flexinspect_hooks.observers.inputs_hook import InputRows
from flexinspect_hooks.python_internals import torch_private
from flexinspect_hooks.python_internals.own_frames import strip_own_frames
from flexinspect_hooks.python_internals.patching import patch
from flexinspect_hooks.sessions.capture_session import capture_cost
from flexinspect_hooks.user_code.compiled_hooks import CompiledHooks
from flexinspect_hooks.user_code.generation_builder import DeclaredPrompt, parse_segments
from flexinspect_hooks.user_code.layer_loops import BaseModels, LayerLoops, on_logits
from flexinspect_hooks.user_code.program import end_state
from flexinspect_hooks.user_code.step_tracking import ReadPosition, StepPlace
from flexinspect_hooks.user_code.watch_session import HOOKS_REMOVED, WatchSession

if TYPE_CHECKING:
    from flexinspect.records.job import ScriptJob
    from flexinspect_hooks.sessions.captured_run import CapturedRun
    from flexinspect_hooks.sessions.standalone_calls import StandaloneCalls
    from flexinspect_hooks.user_code.program import TokenizerTracker

MAX_STEP_STARTS = 4096
"""Steps whose start times are kept, to assign printed output to steps."""

LAYER_LOOP_EVENT = "layer-loop"
LAYER_LOOP = (
    "The program calls the decoder layers, or their parts, itself: a step begins with the first "
    "one, and its logits are what the output embeddings return."
)
BASE_MODEL = (
    "The program calls the base model and the output embeddings itself: a step begins with the "
    "base model, and its logits are what the output embeddings return."
)

MAX_HOOK_RESTORES = 16
"""How often hooks that the program removed from a model are installed again."""


class ModelFinder:
    """Records every transformers model that the program runs into one trace."""

    def __init__(self, run: CapturedRun, job: ScriptJob, tokenizers: TokenizerTracker) -> None:
        self._run, self.job, self.writer, self.tokenizers = run, job, run.writer, tokenizers
        self.segments = parse_segments(job.declaration.segments)
        self.recorder = Recorder(run.writer)
        self.numbers = count()
        self._found: WeakKeyDictionary[nn.Module, FoundSession | None] = WeakKeyDictionary()
        """Each model's session, None for one that cannot be watched."""
        self._sessions: list[FoundSession] = []
        self._open: list[FoundSession] = []  # those of the sessions that have not ended
        self._facts: list[dict[str, Any]] = []
        self.step_starts: deque[tuple[float, int, int]] = deque(maxlen=MAX_STEP_STARTS)
        """When the last steps began, or those of a training ended, with generation and number."""
        self.local = threading.local()
        """`root` is the `id` of the outermost model that the thread calls, None for none."""
        self._lock = threading.RLock()
        self._wrappers = ExitStack()
        self._is_over = False
        self.audits: AuditBudget | None = None
        if job.audit_seconds > 0 and job.level != "basic":
            self.audits = AuditBudget(AuditOptions(job.audit_seconds, job.audit_dtype))
        self._end = ("finished", "")
        """How the program ended: the state, and what it raised."""
        self._standalone: StandaloneCalls | None = None
        self.loading = LoadingReports()
        self.made = MadeWeights()
        self._layer_loops = LayerLoops(self.made.models, self._find_untrained, self.local)
        self.made.on_made.append(self._layer_loops.follow)
        self._base_models = BaseModels(self.made.models)
        self._trainings: Any = None
        """The `TrainingFinder`, which is above this package; None before the first optimizer."""
        run.attach_recorder(self.recorder)
        self.recorder.start()

    # -- wrappers that find models ---------------------------------------------------------------

    def watch_models(self) -> None:
        """Wrap the call of every `PreTrainedModel`; transformers.modeling_utils must be loaded."""
        from transformers.modeling_utils import PreTrainedModel

        local, find, set_compiler = self.local, self._find, torch_private.frame_compiler_setter()
        compiled_hooks = CompiledHooks()

        @functools.wraps(nn.Module.__call__)
        def call(model: Any, /, *args: Any, **kwargs: Any) -> Any:
            # Inside another model's forward the model is a part of that one, and a compiled graph
            # must not contain this wrapper.
            if torch.compiler.is_compiling() or getattr(local, "root", None):
                return nn.Module.__call__(model, *args, **kwargs)
            if self._trainings is not None and self._is_training(model):
                return nn.Module.__call__(model, *args, **kwargs)
            local.root = id(model)
            try:
                compiler = set_compiler(None)  # dynamo must not compile `_find`
                try:
                    owner = self._base_models.owner_of(model)
                    if owner is not None and not callable(compiler) and not _is_compiled(model):
                        return self._call_base(owner, model, args, kwargs)
                    session = find(model)
                    is_graph = callable(compiler) or _is_compiled(model)
                    if session is not None and is_graph:
                        session.begin_compiled(args, kwargs)
                finally:
                    set_compiler(compiler)
                try:
                    if session is None or not is_graph:
                        return nn.Module.__call__(model, *args, **kwargs)
                    if callable(compiler):
                        with compiled_hooks.check(model, session.report_silent_hook):
                            output = nn.Module.__call__(model, *args, **kwargs)
                    else:
                        output = nn.Module.__call__(model, *args, **kwargs)
                    set_compiler(None)
                    try:
                        session.end_compiled(args, output)
                    finally:
                        set_compiler(compiler)
                    return output
                except BaseException as error:
                    if session is not None:
                        session.is_compiled_call = False
                        # Only its id: the exception would keep the objects of its frames alive.
                        session.exit_exception_id = id(error)
                    strip_own_frames(error)
                    raise
            finally:
                local.root = None

        torch_private.skip_frame(call)
        self._wrappers.callback(patch(PreTrainedModel, "__call__", call))
        self._wrappers.callback(self.loading.watch())
        self._wrappers.callback(self.made.watch())
        self._wrappers.callback(self._layer_loops.close)
        self._wrappers.callback(torch_private.hide_hooks())

    def _call_base(self, owner: nn.Module, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a base model, whose output the program gives to the output embeddings of `owner`."""
        session = self._find(owner)
        if session is None:
            return nn.Module.__call__(model, *args, **kwargs)
        session.begin_in_base(args, kwargs)
        try:
            output = nn.Module.__call__(model, *args, **kwargs)
        except BaseException as error:
            # Only its id: the exception would keep the objects of its frames alive.
            session.exit_exception_id = id(error)
            strip_own_frames(error)
            raise
        session.end_base(output)
        return output

    def watch_generate(self) -> None:
        """Wrap `GenerationMixin.generate`; transformers.generation.utils must be loaded."""
        from transformers.generation.utils import GenerationMixin

        original, local = GenerationMixin.generate, self.local

        @functools.wraps(original)
        def generate(model: Any, /, *args: Any, **kwargs: Any) -> Any:
            is_inner = torch.compiler.is_compiling() or getattr(local, "root", None)
            session = None if is_inner else self._find(model)
            if session is None:
                return original(model, *args, **kwargs)
            try:
                return session.call_generate(functools.partial(original, model), args, kwargs)
            except BaseException as error:
                strip_own_frames(error)
                raise

        self._wrappers.callback(patch(GenerationMixin, "generate", generate))

    def watch_standalone_calls(self) -> None:
        """Record standalone calls of FlexAttention; its module must be loaded."""
        from flexinspect_hooks.sessions.standalone_calls import StandaloneCalls

        session = StandaloneCalls(self.writer, self.recorder, self.numbers, level=self.job.level)
        session.__enter__()
        self._standalone = session
        session.use_levels(self._run.levels)

    def watch_trainings(self) -> None:
        """Record what each optimizer of the program trains."""
        make = plugins.load(plugins.CAPTURE, "training-finder")
        report = functools.partial(self.event, "not-recorded")
        levels, recorder = self._run.levels, self.recorder
        self._trainings = make(self.writer, recorder, self.numbers, levels, report)
        self._trainings.is_generating = lambda: any(one.generate_depth for one in self._open)
        self._trainings.on_step_end = self._note_step_end
        self._trainings.barrier = self._run.control.barrier
        self._trainings.watch()

    def add_optimizer(self, optimizer: Any) -> None:
        """Note an optimizer that the program has made."""
        self.made.drop_factors()  # a training writes to parameters all the time
        self._trainings.add_optimizer(optimizer)

    def _is_training(self, model: nn.Module) -> bool:
        """Whether a call of a model belongs to a training, and not to a generation."""
        if self._trainings is None or not self._trainings.trains(model):
            return False
        session = self._found.get(model)
        return session is None or not session.generate_depth

    # -- a model ---------------------------------------------------------------------------------

    def _find_untrained(self, model: nn.Module) -> FoundSession | None:
        """Return the session of a model whose layers are called, None while it is trained."""
        return None if self._is_training(model) else self._find(model)

    def _find(self, model: nn.Module) -> FoundSession | None:
        """Return the session of a model, created at its first call; None if it has none."""
        if model in self._found:
            return self._with_hooks(model, self._found[model])
        if self._is_over:
            return None
        with self._lock:
            for collected in [one for one in self._open if one.is_model_deleted]:
                self._end_session(collected)
            name = str(model_facts(model)["name"])
            names = chain([name], (f"{name} ({n})" for n in count(2)))
            taken = {facts["name"] for facts in self._facts}
            unique = next(candidate for candidate in names if candidate not in taken)
            session = self._found[model] = self._begin_session(model, unique)
            if session is not None:
                self._facts.append({**model_facts(model), "name": session.model_name})
                with suppress(TraceWriteError):
                    sizes = parallel_facts(self._facts[0])
                    self.writer.update_run(model=self._facts[0], models=self._facts, **sizes)
        return session

    def _with_hooks(self, model: nn.Module, session: FoundSession | None) -> FoundSession | None:
        """Return a known model's session, or a new one if the program removed its hooks."""
        if session is None or self._is_over or session.generate_depth:
            return session
        if session.has_hooks_installed or session.n_restores > MAX_HOOK_RESTORES:
            return session
        session.n_restores = n = session.n_restores + 1
        if n > MAX_HOOK_RESTORES:
            text = f"{HOOKS_REMOVED} {n} times: later forwards are not recorded."
            self.event("not-recorded", text)
            return session
        with self._lock:
            text = f"{HOOKS_REMOVED}; they were installed again before a forward."
            self.event("hooks-reinstalled", text)
            self._end_session(session)
            again = self._found[model] = self._begin_session(model, session.model_name, n)
        return again

    def _begin_session(self, model: nn.Module, name: str, n: int = 0) -> FoundSession | None:
        try:
            session = FoundSession(model, self, name, n)
            session.__enter__()
            session.watch_samples()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            self.event("not-recorded", f"A {type(model).__name__} cannot be watched: {message}")
            return None
        self._run.attach_session(session)
        self._sessions.append(session)
        self._open.append(session)
        return session

    def _end_session(self, session: FoundSession) -> None:
        self._open.remove(session)
        try:
            session.close("finished", None)
            self._audit(session)
            session.__exit__()
        except Exception as failure:
            text = f"A model's recording could not be ended properly: {failure!r}"
            self.event("not-recorded", text)

    def _audit(self, session: FoundSession) -> None:
        """Audit the steps of a model that ended, without recording the forwards of the audit."""
        store, before = session.context.evidence, getattr(self.local, "root", None)
        if store is None or self.audits is None:
            return
        self.local.root = id(store)  # so that no forward is that of a found model
        try:
            if store.steps:
                self.event("phase", "auditing the steps that ran")
            progress = PrintedProgress()
            audit_session(store, self.recorder, session.rule_runner, self.audits, progress)
        finally:
            self.local.root = before

    # -- steps and events ------------------------------------------------------------------------

    def _note_step_end(self, generation: int, step: int) -> None:
        """Note the end of a training step: a program prints its loss after it."""
        self.step_starts.append((time.time(), generation, step))

    def step_at(self, at: float) -> tuple[int | None, int | None]:
        """Return (generation, step) of the last step that was noted before a time, else Nones."""
        starts = list(self.step_starts)
        index = bisect_right(starts, at, key=lambda start: start[0])
        return starts[index - 1][1:] if index else (None, None)

    def event(self, kind: str, text: str, **data: Any) -> None:
        """Record an event, in order with the steps."""
        self.recorder.put(EventRecord(kind, text, time.time(), data=data))

    # -- the end ---------------------------------------------------------------------------------

    def on_program_failed(self, error: BaseException) -> None:
        """Record the exception that ends the program, at the step that it interrupted."""
        strip_own_frames(error)
        self._end = (end_state(error), f"{type(error).__name__}: {error}")
        known = [session for session in self._sessions if session.recorded_error is error]
        if known:
            if is_deliberate(error):  # not caught, as it may have seemed when it was recorded
                known[0].record_uncaught(error)
            return
        with self._lock:
            state = end_state(error)
            chain = {id(link) for link in exception_chain(error)}
            steps = {session: session.failed_step(chain) for session in self._sessions}
            last = max(steps, key=steps.__getitem__, default=None)
            is_exit = isinstance(error, SystemExit)
            if last is not None and (steps[last][0] or (steps[last][1] and not is_exit)):
                last.finish(state, error)
            elif not is_exit:
                self._record_failure(error)

    def _record_failure(self, error: BaseException) -> None:
        """Record an exception that ended the program outside of all forwards."""
        data = failure_facts(error)
        data["traceback"] = "".join(traceback.format_exception(error))
        event = EventRecord("error", f"{type(error).__name__}: {error}", time.time(), data=data)
        recorded = [one for one in (self._standalone, *self._sessions) if one is not None]
        # The rules that know the failed kernel call report both as one.
        last = next((one for one in recorded if one.has_seen_failure(data["chain"])), None)
        if last is None:
            self.recorder.put(event)
        else:
            self.recorder.put_event(event, last.rule_runner)

    def close(self) -> dict[str, float | int] | None:
        """End every session, remove all wrappers and hooks, write queued steps; return the cost."""
        self._is_over = True
        with self._lock:
            for session in reversed(list(self._open)):
                self._end_session(session)
            if self._standalone is not None:
                self._standalone.__exit__()
            if self._trainings is not None:
                self._trainings.close(*self._end)
            self._wrappers.close()
            sessions = [session for session in (*self._sessions, self._standalone) if session]
            trained = [] if self._trainings is None else self._trainings.sessions
            self.recorder.stop()
            cost = capture_cost(sessions, self.recorder) if sessions else None
            if trained and not self._facts:
                own, total = (sum(getattr(o, n) for o in trained) for n in ("own_s", "total_s"))
                ratio = round(own / max(total - own, 1e-9), 5)
                times = {"capture_s": round(own, 6), "total_s": round(total, 6)}
                cost = {**times, "ratio": ratio, "steps": self.recorder.n_steps}
        return cost

    def discard(self) -> None:
        """Remove all wrappers and hooks without writing anything, in a forked child."""
        self._is_over = True
        for session in reversed(self._sessions):
            session.remove_hooks()
        if self._standalone is not None:
            self._standalone.remove_hooks()
        if self._trainings is not None:
            self._trainings.discard()
        self._wrappers.close()

    @property
    def has_found_anything(self) -> bool:
        """Whether a model or a training was found, or FlexAttention called outside of a model."""
        is_trained = self._trainings is not None and self._trainings.has_steps
        has_calls = self._standalone is not None and self._standalone.n_calls > 0
        return bool(self._facts) or is_trained or has_calls


def _is_compiled(model: nn.Module) -> bool:
    """Whether `model.compile()` was called."""
    return getattr(model, "_compiled_call_impl", None) is not None


def _part_hook(session: weakref.ref[FoundSession], layer: int) -> Any:
    """Return a hook on the part of a layer that is called first. Copies of it keep no session."""

    def on_part(module: nn.Module, args: tuple[Any, ...]) -> None:
        found = session()
        if found is not None and not torch.compiler.is_compiling():
            found.enter_layer(layer, args[0] if args else None)

    return on_part


def _last_layer_hook(session: weakref.ref[FoundSession]) -> Any:
    """Return a hook on the last layer. Copies of it keep no session."""

    def on_layer(module: nn.Module, args: Any) -> None:
        found = session()
        if found is not None and not torch.compiler.is_compiling():
            found.enter_last_layer()

    return on_layer


class FoundSession(WatchSession):
    """The session of a model that was found; it prints nothing, and reports no removed hooks."""

    prints = False  # nor are removed hooks reported: they are checked before each forward

    def __init__(self, model: nn.Module, finder: ModelFinder, name: str, n_restores: int) -> None:
        self._finder, declared = finder, finder.job.declaration
        self._thread, self.n_restores = 0, n_restores
        self._first_part: str | None = None
        """The part of a layer with which steps begin, "" for whole layers, None for forwards."""
        self._watched_parts = set[str]()
        self._layer_places: dict[int, tuple[int | None, weakref.ref[nn.Module]]] = {}
        """Of each layer whose parts are called, the layer before it and its attention module."""
        self._layer_output: SimpleNamespace | None = None
        """What a step gives that began with a layer, None for any other."""
        self._is_in_last_layer = False
        """Whether the last layer has begun in a step that began with a layer."""
        self.exit_exception_id = 0
        """The `id` of the exception that the last forward raised; the program may catch it."""
        super().__init__(
            model,
            finder.writer,
            DeclaredPrompt(IdAdapter(), finder.segments, declared.mask, declared.separators),
            level=finder.job.level,
            layers=chosen_layers(finder.job.layers, attention_layers(model).values()),
            select=finder.job.select,
            recorder=finder.recorder,
            generation_numbers=finder.numbers,
            name=name,
        )
        if finder.audits is not None:
            store = self.context.evidence = EvidenceStore()
            store.weights.find_model = self._model_ref
            store.weights.moved_of = finder.made.moved_of(model)
            store.replaced_weights = finder.made.replaced_of(model)

    def _on_forward_start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # Otherwise the model is a part of another model.
        if getattr(self._finder.local, "root", None) == id(module):
            self._end_in_layer(None)
            self.context.is_in_parts = False
            super()._on_forward_start(module, args, kwargs)

    def begin_in_layer(self, arguments: dict[str, Any], part: str) -> None:
        """Open a step whose layers the program calls itself; `arguments` are those of a forward.

        The part of the first layer that begins a step is the first one that is called.
        """
        if part and self._layer_output is not None and self._first_part != part:
            return
        self._open_in_layer(arguments, part, LAYER_LOOP)

    def begin_in_base(self, args: Any, kwargs: Any) -> None:
        """Open a step whose base model the program calls, and then the output embeddings."""
        self._open_in_layer(self._names(args, kwargs), "", BASE_MODEL)

    def end_base(self, output: Any) -> None:
        """Note that the base model has returned `output`, which the output embeddings may get."""
        if self._layer_output is not None:
            cache = getattr(output, "past_key_values", None)
            if cache is not None:
                self._layer_output.past_key_values = cache

    def _open_in_layer(self, arguments: dict[str, Any], part: str, text: str) -> None:
        self._end_in_layer(None)
        is_first = self._first_part is None
        if is_first:
            remove = on_logits(self._model, self._on_logits)
            self._removes += [] if remove is None else [(None, remove)]
            self._watch_last_layer()
        if part and part not in self._watched_parts:
            self._watch_parts(part)
        self._first_part, self.context.is_in_parts = part, bool(part)
        self._is_in_last_layer = len(self.context.blocks) < 2
        super()._on_forward_start(self._model, (), arguments)
        if self._step is not None:
            self._layer_output = SimpleNamespace(
                logits=None, past_key_values=arguments.get("past_key_values")
            )
            if part:
                self.enter_layer(min(self.context.blocks), None)
            if is_first:
                self._step.events.append((LAYER_LOOP_EVENT, text))

    def _watch_parts(self, part: str) -> None:
        """Note when the later layers begin: `part` is the name of the part that is called first."""
        self._watched_parts.add(part)
        known = self.context.layer_of
        before: int | None = None
        for layer, (_, block) in sorted(self.context.blocks.items()):
            attention = next(one for one in block.modules() if known.get(id(one)) == layer)
            self._layer_places[layer] = before, weakref.ref(attention)
            is_later, before = before is not None, layer
            module = getattr(block, part, None) if is_later else None
            if isinstance(module, nn.Module):
                hook = _part_hook(weakref.ref(self), layer)
                self._removes.append((None, module.register_forward_pre_hook(hook).remove))

    def enter_layer(self, layer: int, hidden: Any) -> None:
        """Note that a layer begins, with the hidden states after the one before."""
        if self._layer_output is None or not self.context.is_open:
            return
        before, attention = self._layer_places[layer]
        self._is_in_last_layer |= layer == max(self.context.blocks)
        set_current_layer(layer, attention())
        keep = self.context.keep_hidden
        if before is not None and isinstance(hidden, Tensor) and keep is not None:
            keep(before, hidden)

    def _position_reader(self, rows: InputRows) -> ReadPosition:
        """Take one row for the next one of the text, where the program keeps keys by itself."""
        if self.context.is_in_parts and rows.position_ids() is None:
            return lambda: self._tracker.length
        return super()._position_reader(rows)

    def _may_keep_keys(self) -> bool:
        return self.context.is_in_parts or super()._may_keep_keys()

    def _watch_last_layer(self) -> None:
        if self.context.blocks:
            _, block = self.context.blocks[max(self.context.blocks)]
            hook = _last_layer_hook(weakref.ref(self))
            self._removes.append((None, block.register_forward_pre_hook(hook).remove))

    def enter_last_layer(self) -> None:
        """Note that the last layer begins."""
        self._is_in_last_layer = True

    def _on_logits(self, logits: Tensor) -> None:
        """End the open step; logits before the last layer are those of a lens, or an early exit."""
        if self._is_in_last_layer:
            self._end_in_layer(logits)
        elif self._layer_output is not None:
            self._layer_output.logits = logits

    def _end_in_layer(self, logits: Tensor | None) -> None:
        """End the step that began with a layer, if one is open."""
        output, self._layer_output = self._layer_output, None
        if output is not None:
            set_current_layer(None, None)
            output.logits = output.logits if logits is None else logits
            self._on_forward_end(self._model, (), output)

    def _finish_generation(self, state: str = "finished", reason: str = "") -> None:
        if state == "finished":
            self._end_in_layer(None)
        super()._finish_generation(state, reason)

    def finish(self, state: str, error: BaseException | None) -> None:
        """End the open step and generation; an exception is recorded at the step it left."""
        if error is None:
            self._end_in_layer(None)
        super().finish(state, error)

    def _start_generation(self, place: StepPlace, rows: InputRows) -> None:
        tokenizer = SafeAdapter(self._finder.tokenizers.match(self._model))
        self.context.text_of = tokenizer.text_of
        self._declared_prompt = replace(self._declared_prompt, tokenizer=tokenizer)
        if not tokenizer.has_text and any(one.text for one in self._declared_prompt.segments):
            text = (
                "No tokenizer was found in the program, so declared texts cannot be searched in "
                "the prompt. Declare spans of positions instead."
            )
            self._event("segments-not-found", text)
        super()._start_generation(place, rows)

    def _begin_step(self, step: StepContext) -> None:
        super()._begin_step(step)
        self._thread, self.exit_exception_id = threading.get_ident(), 0
        self._finder.step_starts.append((step.started_at, step.generation, step.step))

    def begin_compiled(self, args: Any, kwargs: Any) -> None:
        """Open the step of a call of the compiled model, whose hooks do not run in the graph."""
        self.is_compiled_call = False
        self._on_forward_start(self._model, args, kwargs)
        self.is_compiled_call = True

    def end_compiled(self, args: Any, output: Any) -> None:
        """End the step of a call of the compiled model."""
        self.is_compiled_call = False
        # A graph may write into the same output again.
        self._on_forward_end(self._model, args, output, is_compiled=True)

    def report_silent_hook(self, facts: Mapping[str, Any]) -> None:
        """Record that a hook of the program does not run in the compiled model."""
        blocks = [name for name, _ in self.context.blocks.values()]
        # Of other modules it is not known whether they take part in a call.
        if any(f"{facts['module']}.".startswith(f"{name}.") for name in blocks):
            text = f"A hook on {facts['module']} did not fire in a call of the compiled model."
            self._event(SILENT_HOOK_EVENT, text, None, facts)

    def initialised_weights(self) -> dict[str, Any] | None:
        """Return parameters that the loader of the model did not find, None if there are none."""
        return self._finder.loading.initialised(self._model)

    def changed_weights(self) -> dict[str, Any] | None:
        """Return parameters that the program changed since the model was made, None for none."""
        return self._finder.made.changed(self._model)

    def failed_step(self, errors: set[int]) -> tuple[bool, float]:
        """Return whether one of these exceptions, by id, left an open step, and its start time.

        Without an open step it is the start time of the step that waits for its token. The time is
        0.0 if there is no such step in this thread.
        """
        if self._thread != threading.get_ident():
            return False, 0.0
        if self._step is not None:
            # No module tells that a loop over its layers was left.
            was_left = self.exit_exception_id in errors or self._layer_output is not None
            return was_left, self._step.started if was_left else 0.0
        pending = self._pending
        return False, 0.0 if pending is None else pending.context.started
