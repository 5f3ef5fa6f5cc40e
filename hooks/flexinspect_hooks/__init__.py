"""The part of flexinspect that runs beside the model: capture, hooks, and generation.

Importing this package does not load torch; public names load on first use.
"""

from __future__ import annotations

from typing import Any

__all__ = ["TrainerCallback", "prove", "watch", "watch_training"]


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name == "watch":
        # The module must not be `flexinspect_hooks.watch`: its import would replace the function.
        from flexinspect_hooks.user_code.watch import watch

        return watch
    if name == "prove":
        from flexinspect_hooks.proofs import prove

        return prove
    if name == "watch_training":
        from flexinspect_hooks.training.watch_training import watch_training

        return watch_training
    if name == "TrainerCallback":
        from flexinspect_hooks.training.watch_training import TrainerCallback

        return TrainerCallback
    raise AttributeError(f"module 'flexinspect_hooks' has no attribute {name!r}")
