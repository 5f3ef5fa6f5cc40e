"""A dispatch mode logs every operation; FlexAttention cannot run under it, and not after it."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from flexinspect_hooks.broken_runs.kit import BrokenRunSetup, causal


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations."""

    n_calls = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n_calls += 1
        return call(*args, **(kwargs or {}))


def run(setup: BrokenRunSetup, *, repaired: bool) -> None:
    setup.register_attention(causal)
    with setup.recorded(segments=[], mask=None):
        if repaired:
            setup.generate()
            return
        try:
            with OperationCounter():  # type: ignore[no-untyped-call]
                setup.model(setup.input_ids, use_cache=False)
        except NotImplementedError as error:
            print("inside the logger:", type(error).__name__)
        try:
            setup.model(setup.input_ids, use_cache=False)
        except Exception as error:
            print("after it:", type(error).__name__)
