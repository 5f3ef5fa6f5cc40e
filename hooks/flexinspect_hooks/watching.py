"""`flexinspect.watch`: the user's own code, unchanged, recorded into a trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from flexinspect import masks
from flexinspect.breaks import BreakpointBook
from flexinspect.errors import TraceWriteError, UsageError
from flexinspect.glance import Glance, glance
from flexinspect.masks import MaskRule
from flexinspect.text import visible
from flexinspect.trace.writer import TraceWriter
from flexinspect_hooks.breaking import Breaking, Stopper
from flexinspect_hooks.control.levels import SessionLevels
from flexinspect_hooks.control.running import Running
from flexinspect_hooks.control.verbs import About
from flexinspect_hooks.layers import attention_layers
from flexinspect_hooks.lost import trouble
from flexinspect_hooks.program import state_of
from flexinspect_hooks.recorder import Recorder
from flexinspect_hooks.session import check_level
from flexinspect_hooks.spans import Wish, read_wishes
from flexinspect_hooks.stoppers import CallingStopper, GateStopper
from flexinspect_hooks.story import IdWords, TokenizerWords, Wishes, Words
from flexinspect_hooks.watchbreaks import Call, OnBreak, say_on_stderr, who_stops
from flexinspect_hooks.watched import WatchedTrace, free_path, manifest_of, new_writer, quietly, say
from flexinspect_hooks.watchsession import WatchSession

_watched: set[int] = set()
"""Models that are being watched, by id."""


def watch(
    model: nn.Module,
    tokenizer: Any = None,
    *,
    out: str | Path | None = None,
    level: str = "advanced",
    segments: Iterable[Wish] | None = None,
    mask: str | MaskRule | None = None,
    layers: Sequence[int] | None = None,
    breakpoints: Iterable[str] = (),
    on_break: OnBreak = None,
    control: bool = False,
) -> Watch:
    """Record what `model` does while the `with` block runs, whatever code calls it.

    `out` is the trace, which must not exist (default: watch-DATE-TIME.flextrace in the current
    folder). `segments` are spans (start, stop, label) of the ids fed, or texts, or (text, label),
    to be found in them. `mask` is the mask that is meant, a preset's name or a `MaskRule`, to
    compare with what ran. `layers` are those whose activations level extreme stores (default: all).

    With `control` the `flexinspect ctl` command and others can pause the model meanwhile, and
    change the level.

    `breakpoints` are conditions as in docs/breakpoints.md. At a hit `on_break` is called with a
    `BreakpointHit`, in the model's thread; "pdb" opens Python's debugger in the user's frame. By
    default the model pauses with `control`, else pdb opens on a terminal, and elsewhere the hit is
    printed on stderr.

    Raises `UsageError` for what cannot be: an unknown level, preset or layer, a file in the way, a
    breakpoint that cannot be read.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"watch needs a torch module, and got a {type(model).__name__}.")
    check_level(level)
    if isinstance(mask, str):
        masks.check_preset(mask)
    elif mask is not None and not isinstance(mask, MaskRule):
        raise UsageError("mask must be the name of a preset or a flexinspect.masks.MaskRule.")
    path = free_path(out, "watch")
    wishes = Wishes(_words(tokenizer), read_wishes(segments), mask)
    stops = None if control and on_break is None else who_stops(on_break)
    chosen = _checked(layers, model)
    watched = Watch(model, path, wishes, level=level, layers=chosen, control=control, stops=stops)
    for text in breakpoints:
        watched.breakpoints.add(text, source="watch")
    return watched


class Watch(WatchedTrace):
    """The handle of a watched model: a context manager, and what is known of its trace."""

    def __init__(
        self,
        model: nn.Module,
        path: Path,
        wishes: Wishes,
        *,
        level: str,
        layers: Sequence[int] | None,
        control: bool,
        stops: Call | None,
    ) -> None:
        super().__init__(path)
        self._is_controlled = control
        self._running: Running | None = None
        self.breakpoints = BreakpointBook()
        """Those that are set; more may be added at any time."""
        self._stops = stops
        self._model, self._wishes = model, wishes
        self._level, self._layers = level, layers
        self._session: WatchSession | None = None

    # -- while watching --------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        if self._writer is not None:
            raise UsageError("This watch is over.", hint="Call flexinspect.watch again.")
        if id(self._model) in _watched:
            raise UsageError("This model is being watched already: one watch at a time.")
        writer = new_writer(self.path, _manifest(self._model, self._level))
        try:
            session = WatchSession(
                self._model, writer, self._wishes, level=self._level, layers=self._layers
            )
            session.__enter__()
            session.watch_generate()
            if self._is_controlled:
                self._running = _controlled(session, writer)
            self._break(session)
        except BaseException:
            writer.close("failed")
            writer.discard()
            raise
        self._writer, self._session = writer, session
        _watched.add(id(self._model))
        if writer.note:
            say(writer.note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        session, writer = self._session, self._writer
        assert session is not None
        assert writer is not None
        _watched.discard(id(self._model))
        self._session, state = None, state_of(error)
        if self._running is not None:
            self._running.close()
        quietly(
            lambda: session.close(state, error),
            lambda: session.__exit__(kind, error, trace),
            lambda: self._conclude(session, writer),
            lambda: writer.close(state),
        )
        if error is None:
            session.pass_breakpoints()

    def _break(self, session: WatchSession) -> None:
        """Judge breakpoints, and pause, or call who is to be called."""
        stopper: Stopper
        if self._stops is not None:
            stopper = CallingStopper(self._stops)
        else:
            assert self._running is not None
            stopper = GateStopper(self._running.gate, say_on_stderr, session.recorder.put)
        session.break_on(Breaking(self.breakpoints, stopper, session.recorder.put))
        if self._running is not None:
            self._running.parts.breakpoints = self.breakpoints

    def _conclude(self, session: WatchSession, writer: TraceWriter) -> None:
        failure = trouble(session.recorder, writer)
        if failure is not None:
            say(failure.sentence())
        with suppress(TraceWriteError):
            writer.update_run(cost=session.cost())

    @property
    def level(self) -> str:
        """How much is recorded, from the next forward on."""
        return self._level

    @level.setter
    def level(self, level: str) -> None:
        self._level = check_level(level)
        if self._session is not None:
            self._session.level = level

    # -- what is known ---------------------------------------------------------------------------

    @property
    def _recorder(self) -> Recorder | None:
        return None if self._session is None else self._session.recorder

    def __str__(self) -> str:
        seen = self._glance()
        return self._nothing_yet() if seen is None else seen.text()

    def _repr_html_(self) -> str:
        seen = self._glance()
        return escape(self._nothing_yet()) if seen is None else seen.html()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the summary in IPython, too; `repr` opens no file, because debuggers call it."""
        printer.text("..." if cycle else str(self))

    def _glance(self) -> Glance | None:
        if self._writer is None:
            return None
        with self.reader() as reader:
            return glance(reader, self.path)

    def _nothing_yet(self) -> str:
        return f"Nothing is recorded yet; the trace will be {visible(str(self.path))}."


def _controlled(session: WatchSession, writer: TraceWriter) -> Running:
    """Take commands for a session from now on."""
    stored = ",".join(map(str, session.context.layers))
    levels = SessionLevels(session.level, stored)
    title = type(session.context.model).__name__
    about = About("watch", title, str(writer.recording_path))
    running = Running(about, levels, is_served=True, serving=None, tell=say)
    levels.attach(session)
    session.gate = running.gate
    running.record_with(session.recorder)
    running.start()
    return running


def _words(tokenizer: Any) -> Words:
    if tokenizer is None:
        return IdWords()
    try:
        return TokenizerWords(tokenizer)
    except Exception as error:
        raise UsageError(
            f"The tokenizer ({type(tokenizer).__name__}) cannot be used: "
            f"{type(error).__name__}: {error}",
            hint="Give a transformers tokenizer, or none: then ids stand in place of words.",
        ) from error


def _checked(layers: Sequence[int] | None, model: nn.Module) -> tuple[int, ...] | None:
    if layers is None:
        return None
    known = set(attention_layers(model).values())
    unknown = sorted(set(layers) - known)
    if unknown:
        has = f"0 to {max(known)}" if known else "none"
        raise UsageError(f"The model has no attention layer {unknown[0]} (it has {has}).")
    return tuple(layers)


def _manifest(model: nn.Module, level: str) -> dict[str, Any]:
    import transformers

    found = manifest_of(model, level, watch=True, graphs_counted=True)
    found["versions"]["transformers"] = transformers.__version__
    return found
