"""`flexinspect.watch`, and what it shares with `watch_training`: the trace of a `with` block.

`watch` records a model that code of the user runs, without changes to that code.
"""

from __future__ import annotations

import math
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from html import escape
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch
from torch import nn

from flexinspect.analysis.summary import TraceSummary, summarize_trace
from flexinspect.breakpoints.store import BreakpointStore
from flexinspect.core.environment import git_state
from flexinspect.core.errors import FlexInspectError, TraceWriteError, UsageError
from flexinspect.core.rank_environment import rank_facts, rank_path
from flexinspect.core.text import escape_unprintable, print_message
from flexinspect.masks.mask_presets import MaskSpec
from flexinspect.records.finding import Finding
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect_hooks.audit.evidence.step_evidence import EvidenceStore
from flexinspect_hooks.audit.program_audit import AuditOptions
from flexinspect_hooks.audit.session_audit import AuditBudget, PrintedProgress, audit_session
from flexinspect_hooks.breakpoints import actions
from flexinspect_hooks.breakpoints.observations import BreakpointEvaluator
from flexinspect_hooks.capture.model_layers import attention_layers, model_facts
from flexinspect_hooks.capture.new_trace import create_trace
from flexinspect_hooks.capture.rank_facts import current_rank, parallel_facts
from flexinspect_hooks.capture.recorder import Recorder, recording_error
from flexinspect_hooks.control.control_protocols import ControlTargets, SessionLevels
from flexinspect_hooks.control.server import CaptureControl
from flexinspect_hooks.loading.tokenizers import IdAdapter, TokenizerAdapter, Vocabulary
from flexinspect_hooks.observers.selected_modules import check_selectors
from flexinspect_hooks.sessions.capture_session import check_level
from flexinspect_hooks.user_code import generation_builder
from flexinspect_hooks.user_code.program import end_state
from flexinspect_hooks.user_code.watch_session import WatchSession

begin_callbacks: list[Callable[[Path], object]] = []
"""Called with the path of each trace whose block begins."""


class _Session(Protocol):
    recorder: Recorder
    level: str

    def cost(self) -> dict[str, float | int]: ...


S = TypeVar("S", bound=_Session)
Calls = list[Callable[[], object]]


class WatchedTrace(ABC, Generic[S]):
    """The handle of a trace at `path` that is recorded while a `with` block runs."""

    _watched: ClassVar[set[int]]  # `id` of each model that is being watched
    _function: ClassVar[str]  # the public function that makes the handle
    _messages: ClassVar[tuple[str, str]]
    """The error of a second block, and of a model that is being watched already."""
    _facts: ClassVar[Mapping[str, Any]]
    """What the manifest has besides the facts of the model and the run."""

    def __init__(self, model: nn.Module, path: Path, level: str) -> None:
        self.path = path.absolute()
        self._model, self._level = model, level
        self._writer: TraceWriter | None = None
        self._session: S | None = None

    @abstractmethod
    def _begin(self, writer: TraceWriter) -> S:
        """Start a session that records into `writer`."""

    @abstractmethod
    def _end_calls(self, session: S, state: str, error: BaseException | None) -> Calls:
        """Calls that end the session, of which each is done though others fail."""

    def __enter__(self) -> Self:
        over, busy = self._messages
        if self._writer is not None:
            raise UsageError(over, hint=f"Call flexinspect.{self._function} again.")
        if id(self._model) in self._watched:
            raise UsageError(busy)
        import transformers  # noqa: F401 (its version is in the manifest)

        facts: dict[str, Any] = {"model": model_facts(self._model), **self._facts}
        facts["threads"] = torch.get_num_threads()
        facts |= rank_facts(current_rank()) | parallel_facts(facts["model"])
        writer = create_trace(self.path, sys.argv, self._level, None, **facts)
        try:
            self._session = self._begin(writer)
        except BaseException:
            writer.close("failed")
            writer.discard()
            raise
        folder = Path.cwd()
        # git takes milliseconds for which the program does not wait.
        self._session.recorder.when_idle(lambda: writer.update_run(git=git_state(folder)))
        self._writer = writer
        self._watched.add(id(self._model))
        if writer.note:
            print_message(writer.note)
        for call in begin_callbacks:
            call(self.path)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        session, writer, state = self._session, self._writer, end_state(error)
        assert session is not None
        assert writer is not None
        self._watched.discard(id(self._model))
        self._session = None
        calls = self._end_calls(session, state, error)
        calls += [lambda: self._conclude(session, writer), lambda: self._close(writer, state)]
        for call in calls:
            try:
                call()
            except Exception as failure:  # must not replace an exception of the user
                message = repr(failure)
                if isinstance(failure, FlexInspectError):
                    message = failure.sentence()
                print_message(f"the trace could not be ended properly: {message}")

    def _close(self, writer: TraceWriter, state: str) -> None:
        """Close the trace, and print what there is to say of where it is now."""
        before = writer.note
        writer.close(state)
        if writer.note and writer.note != before:
            print_message(writer.note)

    def _conclude(self, session: S, writer: TraceWriter, **facts: Any) -> None:
        """Report a failure to record, and write the cost and `facts` into the manifest."""
        failure = recording_error(session.recorder, writer)
        if failure is not None:
            print_message(failure.sentence())
        with suppress(TraceWriteError):
            writer.update_run(cost=session.cost(), **facts)

    @property
    def level(self) -> str:
        """How much is recorded; a new value applies from the next step on."""
        return self._level

    @level.setter
    def level(self, level: str) -> None:
        self._level = check_level(level)
        if self._session is not None:
            self._session.level = level

    def reader(self) -> TraceReader:
        """Open the trace; the caller closes it. Raises `TraceError` before the block."""
        if self._session is None or self._writer is None:
            return open_trace(self.path)
        self._session.recorder.drain()
        return open_trace(self._writer.recording_path)

    def findings(self) -> list[Finding]:
        """Return the findings so far; in an open block without those of the newest step."""
        if self._writer is None:
            return []
        with self.reader() as reader:
            return reader.findings()


def free_path(out: str | Path | None, prefix: str) -> Path:
    """Return the path of a new trace: `out`, or PREFIX-DATE-TIME.flextrace, numbered if it exists.

    In a distributed run the name ends with the rank. Raises `UsageError` for an `out` that exists.
    """
    rank = current_rank()
    if out is not None:
        path = rank_path(Path(out), rank)
        if path.exists():
            raise UsageError(f"{path} exists already.", hint="Choose another out, or remove it.")
        return path
    name = time.strftime(f"{prefix}-%Y%m%d-%H%M%S.flextrace")
    return numbered_path(rank_path(Path(name), rank))


def numbered_path(path: Path) -> Path:
    """Return a path that does not exist: this one, with a number if needed."""
    numbers, free = count(2), path
    while free.exists():
        free = path.with_name(f"{path.stem}-{next(numbers)}{path.suffix}")
    return free


# -- watch -----------------------------------------------------------------------------------------


def watch(
    model: nn.Module,
    tokenizer: Any = None,
    *,
    out: str | Path | None = None,
    level: str = "advanced",
    segments: Iterable[generation_builder.SegmentArgument] | None = None,
    mask: str | MaskSpec | None = None,
    layers: Sequence[int] | None = None,
    select: Iterable[str] = (),
    breakpoints: Iterable[str] = (),
    on_break: actions.OnBreakOption = None,
    control: bool = False,
    audit: bool | float = False,
) -> Watch:
    """Record every forward of `model` while the `with` block runs, whatever code calls it.

    `out` is the trace, which must not exist (default: watch-DATE-TIME.flextrace in the current
    folder); in a distributed run "-rankN" is added to its name. `segments` are spans (start, stop,
    label) of the prompt's positions, or texts, or (text, label), which are searched in the prompt.
    `mask` is the declared mask, a preset's name or a `MaskSpec`, to compare with the executed mask.
    `layers` are those whose activations are stored at level extreme (default: all), `select` are
    selectors of further modules, such as "module=mlp.* op=Linear dtype=bfloat16".

    With `control` the `flexinspect ctl` command and other clients can pause the model, and change
    the level.

    `breakpoints` are conditions as in docs/breakpoints.md. At a hit `on_break` is called with a
    `BreakpointHit`, in the model's thread; "pdb" opens Python's debugger in the user's frame. By
    default the model pauses with `control`; without it, pdb opens if there is a terminal, else the
    hit is printed on stderr.

    With `audit` the steps are compared with an untouched copy of the model's architecture when the
    block ends, as at the end of `flexinspect run script.py` (see docs/audit.md): for at most 10 s,
    or that many seconds, or a fifth of the block's time if that is more. What differs is among
    `findings()`. An interrupted block is not audited.

    Raises `UsageError` for an unknown level, preset or layer, an `audit` at level basic or of no
    positive number of seconds, a selector that is wrong or matches
    no module, an `out` that exists, an invalid segment, and a breakpoint that cannot be parsed.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"watch needs a torch module, and got a {type(model).__name__}.")
    check_level(level)
    options = _audit_options(audit, level)
    generation_builder.check_declared_mask(mask)
    specs, chosen = generation_builder.parse_segments(segments), _check_layers(layers, model)
    selectors = tuple(select)
    check_selectors(model, selectors)
    prompt = generation_builder.DeclaredPrompt(_tokenizer_adapter(tokenizer), specs, mask)
    open_session = partial(
        WatchSession, model, declared_prompt=prompt, layers=chosen, select=selectors
    )
    on_hit = None if control and on_break is None else actions.hit_callback(on_break)
    path = free_path(out, "watch")
    watched = Watch(model, path, level, open_session, on_hit, control=control, audit=options)
    for text in breakpoints:
        watched.breakpoints.add(text)
    return watched


class Watch(WatchedTrace[WatchSession]):
    """The handle of a watched model: a context manager, and a summary of its trace."""

    _watched: ClassVar[set[int]] = set()
    _function = "watch"
    _messages = ("This watch is over.", "This model is being watched already: one watch at a time.")
    _facts: ClassVar[Mapping[str, Any]] = {"watch": True, "graphs_counted": True}

    def __init__(
        self,
        model: nn.Module,
        path: Path,
        level: str,
        open_session: Callable[..., WatchSession],
        on_hit: actions.HitCallback | None,
        *,
        control: bool,
        audit: AuditOptions | None = None,
    ) -> None:
        super().__init__(model, path, level)
        self._audit = audit
        self._budget: AuditBudget | None = None
        self._open_session, self._on_hit, self._is_controlled = open_session, on_hit, control
        self._running: CaptureControl | None = None
        self.breakpoints = BreakpointStore()
        """The breakpoints that are set; more may be added at any time."""

    # -- while watching --------------------------------------------------------------------------

    def _begin(self, writer: TraceWriter) -> WatchSession:
        session = self._open_session(sink=writer, level=self._level)
        if self._audit is not None:
            store, self._budget = EvidenceStore(), AuditBudget(self._audit)
            store.weights.find_model = weakref.ref(self._model)
            session.context.evidence = store
        session.__enter__()
        session.watch_generate()
        session.watch_samples()
        put, action = session.recorder.put, None
        if self._is_controlled:
            levels = SessionLevels(session.level, ",".join(map(str, session.context.layers)))
            title, trace = type(self._model).__name__, str(writer.recording_path)
            targets = ControlTargets("watch", title, trace, levels, breakpoints=self.breakpoints)
            self._running = running = CaptureControl(targets, print_message)
            session.use_levels(levels)
            session.barrier = running.barrier
            running.attach_recorder(session.recorder)
            running.start()
            action = actions.PauseAction(running.barrier, print_message, put)
        stop = action if self._on_hit is None else actions.CallbackAction(self._on_hit)
        assert stop is not None  # without control there is a function to call
        session.break_on(BreakpointEvaluator(self.breakpoints, stop, put))
        return session

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        session = self._session
        if self._running is not None:
            self._running.close()
        super().__exit__(kind, error, trace)
        if error is None and session is not None:
            session.pass_breakpoints()

    def _end_calls(self, session: WatchSession, state: str, error: BaseException | None) -> Calls:
        calls: Calls = [lambda: session.close(state, error)]
        store, budget = session.context.evidence, self._budget
        if store is not None and budget is not None and state != "interrupted":
            progress, rules = PrintedProgress(), session.rule_runner
            calls.append(lambda: audit_session(store, session.recorder, rules, budget, progress))
        return [*calls, session.__exit__]

    # -- summary ---------------------------------------------------------------------------------

    def __str__(self) -> str:
        return self._render(TraceSummary.text, str)

    def _repr_html_(self) -> str:
        return self._render(TraceSummary.html, escape)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the summary in IPython. `repr` does not, because debuggers call it."""
        printer.text("..." if cycle else str(self))

    def _render(self, render: Callable[[TraceSummary], str], quote: Callable[[str], str]) -> str:
        if self._writer is None:
            path = escape_unprintable(str(self.path))
            return quote(f"Nothing is recorded yet; the trace will be {path}.")
        with self.reader() as reader:
            return render(summarize_trace(reader, self.path))


def _audit_options(audit: bool | float, level: str) -> AuditOptions | None:
    """Return the options of an audit, None without one. Raises `UsageError`."""
    if audit is False:
        return None
    if level == "basic":
        what = "An audit needs level advanced: at level basic no rows are kept."
        raise UsageError(what, hint='Call watch(..., level="advanced", audit=True).')
    if audit is True:
        return AuditOptions()
    if not isinstance(audit, int | float) or not 0 < audit < math.inf:
        what = f"audit is {audit!r}, and must be True, or seconds above 0."
        raise UsageError(what, hint="Leave it out for no audit.")
    return AuditOptions(float(audit))


def _tokenizer_adapter(tokenizer: Any) -> TokenizerAdapter:
    if tokenizer is None:
        return IdAdapter()
    try:
        return Vocabulary(tokenizer)
    except Exception as error:
        raise UsageError(
            f"The tokenizer ({type(tokenizer).__name__}) cannot be used: "
            f"{type(error).__name__}: {error}",
            hint="Pass a transformers tokenizer, or None to show token ids in place of text.",
        ) from error


def _check_layers(layers: Sequence[int] | None, model: nn.Module) -> tuple[int, ...] | None:
    if layers is None:
        return None
    known = set(attention_layers(model).values())
    unknown = sorted(set(layers) - known)
    if unknown:
        has = f"0 to {max(known)}" if known else "none"
        raise UsageError(f"The model has no attention layer {unknown[0]} (it has {has}).")
    return tuple(layers)
