"""What `watch` and `watch_training` share: the trace of a `with` block, from path to end."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch
from torch import nn

from flexinspect.core.environment import git_state
from flexinspect.core.errors import FlexInspectError, TraceWriteError, UsageError
from flexinspect.core.text import print_message
from flexinspect.records.finding import Finding
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect_hooks.capture.new_trace import create_trace
from flexinspect_hooks.capture.recorder import Recorder, recording_error
from flexinspect_hooks.loading.model_facts import model_facts
from flexinspect_hooks.sessions.capture_session import check_level
from flexinspect_hooks.user_code.program import end_state


class _Session(Protocol):
    recorder: Recorder
    level: str

    def cost(self) -> dict[str, float | int]: ...


S = TypeVar("S", bound=_Session)


class WatchedTrace(ABC, Generic[S]):
    """The handle of a trace at `path` that is recorded while a `with` block runs."""

    _watched: ClassVar[set[int]]
    """`id` of each model that is being watched."""
    _function: ClassVar[str]
    """The public function that makes the handle."""
    _messages: ClassVar[tuple[str, str]]
    """What is said of a second block, and of a model that is being watched already."""
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
    def _end_calls(
        self, session: S, state: str, error: BaseException | None
    ) -> list[Callable[[], object]]:
        """Calls that end the session, of which each is done though others fail."""

    def __enter__(self) -> Self:
        over, busy = self._messages
        if self._writer is not None:
            raise UsageError(over, hint=f"Call flexinspect.{self._function} again.")
        if id(self._model) in self._watched:
            raise UsageError(busy)
        import transformers  # noqa: F401 (its version is in the manifest)

        facts: dict[str, Any] = {
            "model": model_facts(self._model),
            "threads": torch.get_num_threads(),
            **self._facts,
        }
        git = git_state(Path.cwd())
        writer = create_trace(self.path, sys.argv, self._level, git, **facts)
        try:
            self._session = self._begin(writer)
        except BaseException:
            writer.close("failed")
            writer.discard()
            raise
        self._writer = writer
        self._watched.add(id(self._model))
        if writer.note:
            print_message(writer.note)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        session, writer, state = self._session, self._writer, end_state(error)
        assert session is not None
        assert writer is not None
        self._watched.discard(id(self._model))
        self._session = None
        calls = self._end_calls(session, state, error)
        calls += [lambda: self._conclude(session, writer), lambda: writer.close(state)]
        for call in calls:
            try:
                call()
            except Exception as failure:  # must not replace an exception of the user
                message = repr(failure)
                if isinstance(failure, FlexInspectError):
                    message = failure.sentence()
                print_message(f"the trace could not be ended properly: {message}")

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
    """Return `out` (`UsageError` if it exists), or a new PREFIX-DATE-TIME.flextrace."""
    if out is not None:
        if Path(out).exists():
            raise UsageError(
                f"{Path(out)} exists already.", hint="Choose another out, or remove it."
            )
        return Path(out)
    return numbered_path(Path(time.strftime(f"{prefix}-%Y%m%d-%H%M%S.flextrace")))


def numbered_path(path: Path) -> Path:
    """Return a path that does not exist: this one, with a number if needed."""
    numbers, free = count(2), path
    while free.exists():
        free = path.with_name(f"{path.stem}-{next(numbers)}{path.suffix}")
    return free
