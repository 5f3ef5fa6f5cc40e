"""flexinspect: the debugger for FlexAttention generation.

Importing this package imports neither torch nor textual; public names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexinspect.core import __version__

__all__ = [
    "AsyncTrainingLogger",
    "DebugLevel",
    "DebugSwitches",
    "DiffusionModelDebugger",
    "EarlyStopping",
    "FlexInspectError",
    "PyTorchDebugger",
    "SwitchBoard",
    "TraceReader",
    "TrainerCallback",
    "TrainingDebugger",
    "TrainingLoop",
    "TrainingPhase",
    "__version__",
    "board_of_settings",
    "debug_context",
    "debug_logging",
    "disable_debugging",
    "enable_debugging",
    "get_debugging_status",
    "open_trace",
    "profile_model_performance",
    "prove",
    "watch",
    "watch_training",
]

if TYPE_CHECKING:
    from flexinspect.core.errors import FlexInspectError
    from flexinspect.records.debug_switches import DebugLevel, DebugSwitches, TrainingPhase
    from flexinspect.trace.reader import TraceReader, open_trace

    TrainerCallback: Any
    AsyncTrainingLogger: Any
    DiffusionModelDebugger: Any
    EarlyStopping: Any
    PyTorchDebugger: Any
    SwitchBoard: Any
    TrainingDebugger: Any
    TrainingLoop: Any
    board_of_settings: Any
    debug_context: Any
    debug_logging: Any
    disable_debugging: Any
    enable_debugging: Any
    get_debugging_status: Any
    profile_model_performance: Any
    prove: Any
    watch: Any
    watch_training: Any


def __getattr__(name: str) -> Any:
    """Return a public name, imported on first use (PEP 562)."""
    if name == "FlexInspectError":
        from flexinspect.core.errors import FlexInspectError

        return FlexInspectError
    if name in ("TraceReader", "open_trace"):
        from flexinspect.trace import reader

        return getattr(reader, name)
    if name in ("TrainerCallback", "prove", "watch", "watch_training"):
        from flexinspect.core import plugins

        return plugins.load(plugins.CAPTURE, name)
    if name in ("DebugLevel", "DebugSwitches", "TrainingPhase"):
        from flexinspect.records import debug_switches

        return getattr(debug_switches, name)
    if name in __all__:  # the training debuggers; flexinspect_hooks has their types
        from flexinspect.core import plugins

        return getattr(plugins.load(plugins.CAPTURE, "training_debuggers"), name)
    raise AttributeError(f"module 'flexinspect' has no attribute {name!r}")
