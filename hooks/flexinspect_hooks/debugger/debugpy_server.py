"""debugpy in this process: its server, and who is attached to it.

debugpy traces from the moment it listens, at microseconds per call of any function, which a decode
step has thousands of. From Python 3.12 on it watches in another way, which costs nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from flexinspect.core.errors import UsageError
from flexinspect.records.debugger_options import DebuggerOptions


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


def trace_only_while_attached() -> None:
    """Stop tracing until a client has attached, and again when it has left."""
    import pydevd_tracing

    if stop_tracing_on_detach():
        pydevd_tracing.SetTrace(None)


def stop_tracing_on_detach() -> bool:
    """Stop tracing whenever a client leaves, whoever let debugpy in; False where that cannot be."""
    import pydevd_tracing
    from _pydevd_bundle.pydevd_constants import PYDEVD_USE_SYS_MONITORING
    from pydevd import PyDB

    # Without its helper for other threads, tracing that was off could not be turned on.
    if PYDEVD_USE_SYS_MONITORING or pydevd_tracing._load_python_helper_lib() is None:
        return False
    if not hasattr(PyDB.on_disconnect, "__wrapped__"):
        # That the client is ready is what lets a waiting program go on: tracing comes first.
        PyDB.on_configuration_done = _wrap_method(
            PyDB.on_configuration_done, before=_enable_tracing
        )
        PyDB.on_disconnect = _wrap_method(PyDB.on_disconnect, after=_disable_tracing)
        # An editor that attached by process id may take its adapter with it, and says no word.
        PyDB.dispose_and_kill_all_pydevd_threads = _wrap_method(
            PyDB.dispose_and_kill_all_pydevd_threads, after=_disable_tracing
        )
    return True


def _wrap_method(
    method: Callable[..., Any],
    before: Callable[[Any], None] = lambda debugger: None,
    after: Callable[[Any], None] = lambda debugger: None,
) -> Callable[..., Any]:
    @functools.wraps(method)
    def all_three(debugger: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            before(debugger)
        finally:  # a program that waits must not wait for ever
            result = method(debugger, *args, **kwargs)
        after(debugger)
        return result

    return all_three


def _enable_tracing(debugger: Any) -> None:
    import pydevd_tracing

    pydevd_tracing.set_trace_to_threads(debugger.trace_dispatch)
    debugger.set_tracing_for_untraced_contexts()


def _disable_tracing(debugger: Any) -> None:
    import pydevd_tracing

    pydevd_tracing.set_trace_to_threads(_untrace_thread)


def _untrace_thread(frame: FrameType, event: str, arg: Any) -> None:
    """Turn the tracing of the running thread off, which only that thread can do."""
    import pydevd_tracing

    pydevd_tracing.SetTrace(None)
