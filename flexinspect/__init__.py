"""flexinspect: the debugger for FlexAttention generation.

Importing this package imports neither torch nor textual; public names are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flexinspect.core import __version__

__all__ = [
    "AsyncTrainingLogger",
    "DebugLevel",
    "DebugSwitches",
    "DiffusionModelDebugger",
    "EarlyStopping",
    "FlexInspectError",
    "ParaPharaseDataset",
    "ParaphraseDataset",
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
    "evaluate_kernel",
    "get_debugging_status",
    "open_trace",
    "profile_model_performance",
    "prove",
    "register_dataset",
    "watch",
    "watch_training",
]

if TYPE_CHECKING:
    from flexinspect.core.errors import FlexInspectError
    from flexinspect.inputs.datasets import register_dataset
    from flexinspect.inputs.user_datasets import ParaPharaseDataset, ParaphraseDataset
    from flexinspect.records.debug_switches import DebugLevel, DebugSwitches, TrainingPhase
    from flexinspect.trace.reader import TraceReader, open_trace

_MODULES = {
    "FlexInspectError": "flexinspect.core.errors",
    "ParaPharaseDataset": "flexinspect.inputs.user_datasets",
    "ParaphraseDataset": "flexinspect.inputs.user_datasets",
    "register_dataset": "flexinspect.inputs.datasets",
    "TraceReader": "flexinspect.trace.reader",
    "open_trace": "flexinspect.trace.reader",
    "DebugLevel": "flexinspect.records.debug_switches",
    "DebugSwitches": "flexinspect.records.debug_switches",
    "TrainingPhase": "flexinspect.records.debug_switches",
}
"""The modules of public names; the other names belong to the capture side."""


def __getattr__(name: str) -> Any:
    """Return a public name, imported on first use (PEP 562)."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name not in __all__:
        raise AttributeError(f"module 'flexinspect' has no attribute {name!r}")
    from flexinspect.core import plugins

    if name in plugins.names(plugins.CAPTURE):
        return plugins.load(plugins.CAPTURE, name)
    return getattr(plugins.load(plugins.CAPTURE, "training_debuggers"), name)
