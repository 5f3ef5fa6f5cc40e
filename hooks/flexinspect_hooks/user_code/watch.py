"""`flexinspect.watch`: records a model that code of the user runs, without changes to that code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from flexinspect.analysis.summary import TraceSummary, summarize_trace
from flexinspect.breakpoints.store import BreakpointStore
from flexinspect.core.errors import UsageError
from flexinspect.core.text import escape_unprintable, print_message
from flexinspect.masks.algebra import MaskSpec
from flexinspect.trace.file.writer import TraceWriter
from flexinspect_hooks.breakpoints import actions
from flexinspect_hooks.breakpoints.observations import BreakpointEvaluator
from flexinspect_hooks.capture.model_layers import attention_layers
from flexinspect_hooks.control.control_protocols import ControlTargets, SessionLevels
from flexinspect_hooks.control.server import CaptureControl
from flexinspect_hooks.loading.tokenizers import IdAdapter, TokenizerAdapter, Vocabulary
from flexinspect_hooks.sessions.capture_session import check_level
from flexinspect_hooks.user_code import generation_builder
from flexinspect_hooks.user_code.watch_session import WatchSession
from flexinspect_hooks.user_code.watch_trace import WatchedTrace, free_path


def watch(
    model: nn.Module,
    tokenizer: Any = None,
    *,
    out: str | Path | None = None,
    level: str = "advanced",
    segments: Iterable[generation_builder.SegmentArgument] | None = None,
    mask: str | MaskSpec | None = None,
    layers: Sequence[int] | None = None,
    breakpoints: Iterable[str] = (),
    on_break: actions.OnBreakOption = None,
    control: bool = False,
) -> Watch:
    """Record every forward of `model` while the `with` block runs, whatever code calls it.

    `out` is the trace, which must not exist (default: watch-DATE-TIME.flextrace in the current
    folder). `segments` are spans (start, stop, label) of the prompt's positions, or texts, or
    (text, label), which are searched in the prompt. `mask` is the declared mask, a preset's name or
    a `MaskSpec`, to compare with the executed mask. `layers` are those whose activations are stored
    at level extreme (default: all).

    With `control` the `flexinspect ctl` command and other clients can pause the model, and change
    the level.

    `breakpoints` are conditions as in docs/breakpoints.md. At a hit `on_break` is called with a
    `BreakpointHit`, in the model's thread; "pdb" opens Python's debugger in the user's frame. By
    default the model pauses with `control`; without it, pdb opens if there is a terminal, else the
    hit is printed on stderr.

    Raises `UsageError` for an unknown level, preset or layer, an `out` that exists, an invalid
    segment, and a breakpoint that cannot be parsed.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"watch needs a torch module, and got a {type(model).__name__}.")
    check_level(level)
    generation_builder.check_declared_mask(mask)
    watched = Watch(
        model,
        free_path(out, "watch"),
        generation_builder.DeclaredPrompt(
            _tokenizer_adapter(tokenizer), generation_builder.parse_segments(segments), mask
        ),
        level=level,
        layers=_check_layers(layers, model),
        control=control,
        on_hit=None if control and on_break is None else actions.hit_callback(on_break),
    )
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
        declared_prompt: generation_builder.DeclaredPrompt,
        *,
        level: str,
        layers: Sequence[int] | None,
        control: bool,
        on_hit: actions.HitCallback | None,
    ) -> None:
        super().__init__(model, path, level)
        self._is_controlled = control
        self._running: CaptureControl | None = None
        self.breakpoints = BreakpointStore()
        """The breakpoints that are set; more may be added at any time."""
        self._on_hit, self._declared_prompt, self._layers = on_hit, declared_prompt, layers

    # -- while watching --------------------------------------------------------------------------

    def _begin(self, writer: TraceWriter) -> WatchSession:
        session = WatchSession(
            self._model, writer, self._declared_prompt, level=self._level, layers=self._layers
        )
        session.__enter__()
        session.watch_generate()
        put, action = session.recorder.put, None
        if self._is_controlled:
            stored_layers = ",".join(map(str, session.context.layers))
            levels = SessionLevels(session.level, stored_layers)
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

    def _end_calls(
        self, session: WatchSession, state: str, error: BaseException | None
    ) -> list[Callable[[], object]]:
        return [lambda: session.close(state, error), session.__exit__]

    # -- summary ---------------------------------------------------------------------------------

    def __str__(self) -> str:
        return self._render(TraceSummary.text, str)

    def _repr_html_(self) -> str:
        return self._render(TraceSummary.html, escape)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the summary in IPython. `repr` does not, because debuggers call it."""
        printer.text("..." if cycle else str(self))

    def _render(
        self, render: Callable[[TraceSummary], str], render_text: Callable[[str], str]
    ) -> str:
        if self._writer is None:
            path = escape_unprintable(str(self.path))
            return render_text(f"Nothing is recorded yet; the trace will be {path}.")
        with self.reader() as reader:
            return render(summarize_trace(reader, self.path))


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
