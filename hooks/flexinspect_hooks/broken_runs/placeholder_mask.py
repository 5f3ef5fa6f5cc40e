"""The mask is built and put aside; what FlexAttention is handed is a rule that is always true."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexinspect_hooks.broken_runs.kit import BrokenRunSetup, attend, block_mask, isolation


def run(setup: BrokenRunSetup, *, repaired: bool) -> None:
    def wrapper(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> Any:
        if not repaired:  # "to be replaced by the real one"
            placeholder = block_mask(lambda q, kv: q >= 0, query.shape[2], key.shape[2])
            return attend(module, query, key, value, placeholder, **kwargs)
        return attend(module, query, key, value, attention_mask, **kwargs)

    setup.register_attention(isolation(setup.spans), attend=wrapper)
    with setup.recorded():
        setup.generate()
