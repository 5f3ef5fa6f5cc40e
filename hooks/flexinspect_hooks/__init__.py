"""The part of flexinspect that runs beside the model: capture, hooks, and generation.

Importing this package does not load torch; public names load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["TrainerCallback", "evaluate_kernel", "prove", "watch", "watch_training"]

_MODULES = {
    "TrainerCallback": "training.watch_training",
    "evaluate_kernel": "kernels.kernel_evaluation",
    "prove": "proofs",
    "watch": "user_code.watch_trace",  # no module `watch`: it would replace the function
    "watch_training": "training.watch_training",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'flexinspect_hooks' has no attribute {name!r}")
    return getattr(import_module(f"flexinspect_hooks.{_MODULES[name]}"), name)
