"""A new trace: its manifest and its writer. This module does not import torch."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexinspect.core import __version__
from flexinspect.core.errors import TraceWriteError, UsageError
from flexinspect.trace.file.writer import TraceWriter


def package_versions() -> dict[str, str]:
    """Return the versions of Python, flexinspect, and of torch and transformers once loaded."""
    versions = {"python": platform.python_version(), "flexinspect": __version__}
    for name in ("torch", "transformers"):
        if version := getattr(sys.modules.get(name), "__version__", None):
            versions[name] = str(version)
    return versions


def create_trace(
    path: str | Path,
    argv: Sequence[str],
    level: str,
    git: Any,
    *,
    overwrite: bool = False,
    **facts: Any,
) -> TraceWriter:
    """Create a trace with a manifest to run it again. Raises `UsageError` if that fails."""
    manifest = {
        "flexinspect": __version__,
        "argv": list(argv),
        "cwd": str(Path.cwd()),
        "pid": os.getpid(),
        "started_at": time.time(),
        "level": level,
        "versions": package_versions(),
        "host": {"platform": platform.platform(), "cpus": os.cpu_count()},
        "git": git,
        **facts,
    }
    try:
        return TraceWriter.create(path, manifest, overwrite=overwrite)
    except TraceWriteError as error:
        raise UsageError(error.message, hint=error.hint) from error
