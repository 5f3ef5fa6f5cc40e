"""One layer's call raises, and a plain causal call takes its place without a word."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from flexinspect_hooks.broken_runs.kit import BrokenRunSetup, attend, isolation

FAILING_LAYER = 2


def run(setup: BrokenRunSetup, *, repaired: bool) -> None:
    def careful(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> Any:
        try:
            if module.layer_idx == FAILING_LAYER and not repaired:
                attention_mask = attention_mask.to("meta")  # a mask on another device
            return attend(module, query, key, value, attention_mask, **kwargs)
        except Exception:
            causal = query.shape[2] > 1
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=causal, scale=kwargs["scaling"], enable_gqa=True
            )
            return out.transpose(1, 2).contiguous(), None

    setup.register_attention(isolation(setup.spans), attend=careful)
    with setup.recorded():
        setup.generate()
