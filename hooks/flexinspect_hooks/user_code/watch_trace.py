"""The trace of a `with` block of `watch` or `watch_training`: path, writer, manifest, end."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexinspect.core.environment import git_state
from flexinspect.core.errors import FlexInspectError, UsageError
from flexinspect.core.text import print_message
from flexinspect.records.finding import Finding
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import TraceReader, open_trace
from flexinspect_hooks.capture.new_trace import run_manifest
from flexinspect_hooks.capture.recorder import Recorder
from flexinspect_hooks.loading.model_facts import model_facts


class WatchedTrace(ABC):
    """The handle of a trace at `path` that is recorded while a `with` block runs."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._writer: TraceWriter | None = None

    @property
    @abstractmethod
    def _recorder(self) -> Recorder | None:
        """The recorder while the block runs; None before and after."""

    def reader(self) -> TraceReader:
        """Open the trace; the caller closes it. Raises `TraceError` before the block."""
        recorder, writer = self._recorder, self._writer
        if recorder is None or writer is None:
            return open_trace(self.path)
        recorder.drain()
        return open_trace(writer.recording_path)

    def findings(self) -> list[Finding]:
        """Return the findings so far; in an open block without those of the newest step."""
        if self._writer is None:
            return []
        with self.reader() as reader:
            return reader.findings()


def free_path(out: str | Path | None, prefix: str) -> Path:
    """Return the path of a new trace: `out`, or PREFIX-DATE-TIME.flextrace, numbered if it exists.

    Raises `UsageError` for an `out` that exists.
    """
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


def build_manifest(model: nn.Module, level: str, **facts: Any) -> dict[str, Any]:
    """Return the manifest of a watched model: what is needed to run it again, and `facts`."""
    model_and_threads = {"model": model_facts(model), "threads": torch.get_num_threads()}
    git = git_state(Path.cwd())
    return run_manifest(sys.argv, level, git, **model_and_threads, **facts)


def run_all_safely(*calls: Callable[[], object]) -> None:
    """Run all calls, and print their errors: these must not replace an exception of the user."""
    for call in calls:
        try:
            call()
        except Exception as error:
            message = error.sentence() if isinstance(error, FlexInspectError) else f"{error!r}"
            print_message(f"the trace could not be ended properly: {message}")
