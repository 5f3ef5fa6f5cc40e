"""debugpy in this process: its server, and whether a client is attached.

Before Python 3.12 debugpy traces from the moment it listens, which costs microseconds per function
call, and a decode step has thousands of calls. So tracing is off while no client is attached. From
Python 3.12 on debugpy uses `sys.monitoring`, which costs nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from flexinspect.core.errors import UsageError
from flexinspect.records.job import DebuggerOptions


def listen(options: DebuggerOptions) -> tuple[str, int]:
    """Start the debugpy server, and return its host and port.

    Child processes are not debugged. Raises `UsageError` when debugpy cannot listen there.
    """
    assert options.port is not None
    import debugpy

    debugpy.configure(subProcess=False)
    try:
        host, port = debugpy.listen((options.host, options.port))
    except (RuntimeError, OSError) as error:
        reason = (str(error).strip().splitlines() or [str(error)])[0]
        raise UsageError(
            f"debugpy cannot listen on {options.host}:{options.port}: {reason}",
            hint="Choose another port; --debugpy 0 picks a free one.",
        ) from error
    if stop_tracing_on_detach():
        _stop_tracing_this_thread()
    return host, port


def wait_for_client() -> None:
    """Wait until a client of debugpy, such as VSCode, has attached."""
    import debugpy

    debugpy.wait_for_client()


def is_attached() -> bool:
    """Return whether a client of debugpy is attached. Imports nothing."""
    debugger = active_pydevd()
    return debugger is not None and bool(debugger.is_attached())


def active_pydevd() -> Any:
    """Return pydevd's debugger of this process, or None. Imports nothing unless it is loaded."""
    if "pydevd" not in sys.modules:
        return None
    from _pydevd_bundle.pydevd_constants import get_global_debugger

    return get_global_debugger()


def stop_tracing_on_detach() -> bool:
    """Stop tracing whenever a client detaches. Returns False if pydevd does not support it."""
    import pydevd_tracing
    from _pydevd_bundle.pydevd_constants import PYDEVD_USE_SYS_MONITORING
    from pydevd import PyDB

    # Without pydevd's helper for other threads, tracing could not be turned on again.
    if PYDEVD_USE_SYS_MONITORING or pydevd_tracing._load_python_helper_lib() is None:
        return False
    if not hasattr(PyDB.on_disconnect, "__wrapped__"):

        def enable_tracing(debugger: Any) -> None:
            pydevd_tracing.set_trace_to_threads(debugger.trace_dispatch)
            debugger.set_tracing_for_untraced_contexts()

        def disable_tracing(debugger: Any) -> None:
            pydevd_tracing.set_trace_to_threads(_stop_tracing_this_thread)

        # This event lets a waiting program continue, so tracing must be enabled before it.
        PyDB.on_configuration_done = _wrap_method(PyDB.on_configuration_done, before=enable_tracing)
        # An editor that attached by process id may end its adapter without a disconnect.
        for name in ("on_disconnect", "dispose_and_kill_all_pydevd_threads"):
            setattr(PyDB, name, _wrap_method(getattr(PyDB, name), after=disable_tracing))
    return True


def _wrap_method(
    method: Callable[..., Any],
    before: Callable[[Any], None] = lambda debugger: None,
    after: Callable[[Any], None] = lambda debugger: None,
) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(debugger: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            before(debugger)
        finally:  # a waiting program must not wait forever
            result = method(debugger, *args, **kwargs)
        after(debugger)
        return result

    return wrapper


def _stop_tracing_this_thread(*trace_event: Any) -> None:
    """Turn off the tracing of the current thread, which only that thread can do."""
    import pydevd_tracing

    pydevd_tracing.SetTrace(None)
