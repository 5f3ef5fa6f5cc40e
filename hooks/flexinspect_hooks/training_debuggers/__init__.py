"""The training debuggers: thin, typed classes on top of the engine in `flexinspect_hooks.training`.

The engine computes; here its results get names, bounded histories, log lines and counts. Importing
this package does not load torch; public names load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexinspect_hooks.training_debuggers.async_logger import AsyncTrainingLogger
    from flexinspect_hooks.training_debuggers.debugger_base import debug_logging
    from flexinspect_hooks.training_debuggers.diffusion import DiffusionModelDebugger
    from flexinspect_hooks.training_debuggers.profiling import profile_model_performance
    from flexinspect_hooks.training_debuggers.pytorch_debugger import PyTorchDebugger, debug_context
    from flexinspect_hooks.training_debuggers.switch_board import (
        SwitchBoard,
        board_of_settings,
        disable_debugging,
        enable_debugging,
        get_debugging_status,
    )
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

_HOMES = {
    "AsyncTrainingLogger": "async_logger",
    "DiffusionModelDebugger": "diffusion",
    "EarlyStopping": "training_loop",
    "PyTorchDebugger": "pytorch_debugger",
    "SwitchBoard": "switch_board",
    "TrainingDebugger": "training_debugger",
    "TrainingLoop": "training_loop",
    "board_of_settings": "switch_board",
    "debug_context": "pytorch_debugger",
    "debug_logging": "debugger_base",
    "disable_debugging": "switch_board",
    "enable_debugging": "switch_board",
    "get_debugging_status": "switch_board",
    "profile_model_performance": "profiling",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(
            f"module 'flexinspect_hooks.training_debuggers' has no attribute {name!r}"
        )
    return getattr(import_module(f"flexinspect_hooks.training_debuggers.{_HOMES[name]}"), name)
