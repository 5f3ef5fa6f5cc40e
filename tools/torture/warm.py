"""Commands in processes that are forked from one that has torch loaded, as the tests fork them."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2] / "tests"
SHARED = "FLEXINSPECT_TESTS_SHARED"
"""Names the folder in which the process that forks is found."""


def prepare(folder: Path) -> None:
    """Make a folder that of this process: of its sockets, its settings, and its forks."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"):
        os.environ[name] = str(folder)
    folder.chmod(0o700)
    if SHARED not in os.environ:  # else the tests run this, which have such a process
        os.environ[SHARED] = str(folder)
        (folder / "pid").write_text(str(os.getpid()))  # it ends after this process


def popen() -> Any:
    """Return the `subprocess.Popen` that forks."""
    return importlib.import_module("support.warm_python").Popen


def start(words: str, folder: Path, **options: Any) -> Any:
    """Start `flexinspect WORDS` in a folder, in a session of its own."""
    environ = {**os.environ, "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "flexinspect", *words.split()]
    return popen()(command, cwd=folder, env=environ, start_new_session=True, **options)
