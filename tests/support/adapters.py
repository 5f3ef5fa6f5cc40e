"""debugpy's adapter as an editor starts it, for configurations that no run listens for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from support.dap import TIMEOUT_S
from support.debugged import eventually


@contextmanager
def adapter(env: Mapping[str, str] | None = None) -> Iterator[int]:
    """Yield the port on which an adapter waits for its client."""
    command = (sys.executable, "-m", "debugpy.adapter", "--host", "127.0.0.1", "--port", "0")
    patient = {"DEBUGPY_PROCESS_SPAWN_TIMEOUT": str(TIMEOUT_S)}  # gdb is slow on a busy machine
    with tempfile.TemporaryDirectory() as folder:
        # debugpy 1.8 never answers a client that connects before this file is written.
        endpoints = Path(folder, "endpoints.json")
        written = {**patient, "DEBUGPY_ADAPTER_ENDPOINTS": str(endpoints), **(env or {})}
        process = subprocess.Popen(command, env={**os.environ, **written})
        try:
            text = eventually(lambda: endpoints.exists() and endpoints.read_text("utf-8"))
            yield int(json.loads(text)["client"]["port"])
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:  # it waits for a debugger that never came
                process.kill()
                process.wait()
