"""flexinspect: the debugger for FlexAttention generation.

Importing this package loads neither torch nor textual; public names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"
__all__ = [
    "FlexInspectError",
    "TraceReader",
    "TrainerCallback",
    "__version__",
    "open_trace",
    "prove",
    "watch",
    "watch_training",
]

if TYPE_CHECKING:
    from flexinspect.errors import FlexInspectError
    from flexinspect.trace.reader import TraceReader, open_trace

    TrainerCallback: Any
    prove: Any
    watch: Any
    watch_training: Any


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name == "FlexInspectError":
        from flexinspect.errors import FlexInspectError

        return FlexInspectError
    if name in ("TraceReader", "open_trace"):
        from flexinspect.trace import reader

        return getattr(reader, name)
    if name in ("TrainerCallback", "prove", "watch", "watch_training"):
        from flexinspect import plugins

        return plugins.load("flexinspect.capture", name)
    raise AttributeError(f"module 'flexinspect' has no attribute {name!r}")
