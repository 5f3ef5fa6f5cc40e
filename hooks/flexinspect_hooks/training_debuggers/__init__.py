"""The training debuggers: thin, typed classes on top of the engine in `flexinspect_hooks.training`.

The engine computes; here its results get names, bounded histories, log lines and counts. Importing
this package does not load torch; public names load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexinspect_hooks.training_debuggers.async_logger import AsyncTrainingLogger
    from flexinspect_hooks.training_debuggers.debug_functions import (
        SwitchBoard,
        board_of_settings,
        disable_debugging,
        enable_debugging,
        get_debugging_status,
    )
    from flexinspect_hooks.training_debuggers.debug_log import debug_logging
    from flexinspect_hooks.training_debuggers.diffusion import DiffusionModelDebugger
    from flexinspect_hooks.training_debuggers.profiling import profile_model_performance
    from flexinspect_hooks.training_debuggers.pytorch_debugger import PyTorchDebugger, debug_context
    from flexinspect_hooks.training_debuggers.training_debugger import TrainingDebugger
    from flexinspect_hooks.training_debuggers.training_loop import EarlyStopping, TrainingLoop

__all__ = [
    "AsyncTrainingLogger",
    "DiffusionModelDebugger",
    "EarlyStopping",
    "PyTorchDebugger",
    "SwitchBoard",
    "TrainingDebugger",
    "TrainingLoop",
    "board_of_settings",
    "debug_context",
    "debug_logging",
    "disable_debugging",
    "enable_debugging",
    "get_debugging_status",
    "profile_model_performance",
]

_MODULES = {
    "async_logger": "AsyncTrainingLogger",
    "debug_log": "debug_logging",
    "diffusion": "DiffusionModelDebugger",
    "profiling": "profile_model_performance",
    "pytorch_debugger": "PyTorchDebugger debug_context",
    "debug_functions": "SwitchBoard board_of_settings disable_debugging enable_debugging "
    "get_debugging_status",
    "training_debugger": "TrainingDebugger",
    "training_loop": "EarlyStopping TrainingLoop",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    for module, names in _MODULES.items():
        if name in names.split():
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
