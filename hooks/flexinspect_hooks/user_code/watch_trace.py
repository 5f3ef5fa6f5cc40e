"""The trace of a `with` block of `watch` or `watch_training`: path, writer, manifest, end."""

from __future__ import annotations

import os
import platform
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexinspect.core import __version__
from flexinspect.core.environment import git_state
from flexinspect.core.errors import FlexInspectError, TraceWriteError, UsageError
from flexinspect.records.finding import Finding
from flexinspect.trace.file.writer import TraceWriter
from flexinspect.trace.reader import TraceReader, open_trace
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
    name = time.strftime(f"{prefix}-%Y%m%d-%H%M%S")
    path, number = Path(f"{name}.flextrace"), 2
    while path.exists():
        path, number = Path(f"{name}-{number}.flextrace"), number + 1
    return path


def new_writer(path: Path, manifest: dict[str, Any]) -> TraceWriter:
    """Create a trace. Raises `UsageError` if it cannot be written."""
    try:
        return TraceWriter.create(path, manifest)
    except TraceWriteError as error:
        raise UsageError(error.message, hint=error.hint) from error


def build_manifest(model: nn.Module, level: str, **facts: Any) -> dict[str, Any]:
    """Return the manifest: what is needed to run the program again, and `facts`."""
    return {
        "flexinspect": __version__,
        "argv": list(sys.argv),
        "cwd": str(Path.cwd()),
        "pid": os.getpid(),
        "started_at": time.time(),
        "model": model_facts(model),
        "level": level,
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "flexinspect": __version__,
            "torch": torch.__version__,
        },
        "host": {"platform": platform.platform(), "cpus": os.cpu_count()},
        "git": git_state(Path.cwd()),
        **facts,
    }


def print_message(text: str) -> None:
    """Print a message of flexinspect on stderr."""
    print(f"flexinspect: {text}", file=sys.stderr)


def run_all_safely(*calls: Callable[[], object]) -> None:
    """Run all calls, and print their errors: these must not replace an exception of the user."""
    for call in calls:
        try:
            call()
        except Exception as error:
            message = error.sentence() if isinstance(error, FlexInspectError) else f"{error!r}"
            print_message(f"the trace could not be ended properly: {message}")
