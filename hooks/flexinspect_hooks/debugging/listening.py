"""debugpy in this process: its server, and who is attached to it."""

from __future__ import annotations

import sys
from typing import Any

from flexinspect.debugger import DebuggerOptions
from flexinspect.errors import UsageError


def listen(options: DebuggerOptions) -> tuple[str, int]:
    """Let debugpy listen, and return the host and the port on which it does.

    Only this process is debugged: child processes are left as they are. Raises `UsageError` when
    it cannot listen there.
    """
    assert options.port is not None
    import debugpy

    debugpy.configure(subProcess=False)
    try:
        host, port = debugpy.listen((options.host, options.port))
    except (RuntimeError, OSError) as error:
        said = str(error).strip().splitlines()
        raise UsageError(
            f"debugpy cannot listen on {options.host}:{options.port}: {said[0] if said else error}",
            hint="Choose another port; --debugpy 0 takes any that is free.",
        ) from error
    from flexinspect_hooks.debugging.tracing import trace_only_while_attached

    trace_only_while_attached()
    return host, port


def wait_for_client() -> None:
    """Return when a client is attached and has set its breakpoints."""
    import debugpy

    debugpy.wait_for_client()


def is_attached() -> bool:
    """Say whether a client of debugpy is attached; loads nothing."""
    found = active_pydevd()
    return found is not None and bool(found.is_attached())


def active_pydevd() -> Any:
    """Return pydevd's debugger of this process, None where there is none; loads nothing."""
    if "pydevd" not in sys.modules:
        return None
    from _pydevd_bundle.pydevd_constants import get_global_debugger

    return get_global_debugger()
