"""Broken runs whose fault is around the kernel: fallback, compilation, memory and observers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from flexinspect_hooks.broken_runs import broken_run_setup as common
from flexinspect_hooks.broken_runs.broken_run_setup import BrokenRunSetup


def silent_fallback(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """One layer's call raises, and an `except` runs plain causal attention without a message."""
    failing_layer = 2

    def attend_or_fall_back(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> Any:
        try:
            if module.layer_idx == failing_layer and not repaired:
                attention_mask = attention_mask.to("meta")  # a mask on another device
            return common.flex_attend(module, query, key, value, attention_mask, **kwargs)
        except Exception:
            is_causal, scale = query.shape[2] > 1, kwargs["scaling"]
            return common.attend_with_sdpa(query, key, value, is_causal=is_causal, scale=scale)

    setup.register_attention(common.isolation(setup.spans), attend=attend_or_fall_back)
    with setup.recorded():
        setup.generate()


def graph_every_step(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """The mask_mod of each decode step is new code, so no graph compiled before fits it."""

    def make_mask(n_rows: int, n_keys: int, offset: int) -> BlockMask:
        mask_mod = _generate_mask_mod(offset)
        return create_block_mask(mask_mod, None, None, n_rows, n_keys, device="cpu")

    setup.register_attention(common.causal, make_mask=None if repaired else make_mask)
    with setup.recorded(is_traced=True, segments=[], mask=None):
        setup.generate(max_new_tokens=8)


def _generate_mask_mod(offset: int) -> Any:
    """A mask_mod from source code that is written and compiled by Python for one offset."""
    namespace: dict[str, Any] = {}
    exec(f"def mask_mod(b, h, q_idx, kv_idx): return kv_idx <= q_idx + {offset}", namespace)
    return namespace["mask_mod"]


def heads_in_the_mask(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """The mask is built for each sequence and head, though its mask_mod uses neither."""
    n_tokens, n_sequences = 1000, 2
    n_heads = int(setup.model.config.num_attention_heads)
    row = (setup.ids * (n_tokens // len(setup.ids) + 1))[:n_tokens]

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx <= q_idx

    def make_mask(n_rows: int, n_keys: int, offset: int) -> BlockMask:
        return create_block_mask(mask_mod, n_sequences, n_heads, n_rows, n_keys, device="cpu")

    setup.register_attention(common.causal, make_mask=None if repaired else make_mask)
    with setup.recorded(segments=[], mask=None):
        setup.model(torch.tensor([row] * n_sequences), use_cache=False)


def not_the_weights(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """A patched attention returns its output twice, once in place of the weights."""
    setup.model.set_attn_implementation("eager")
    attention = setup.model.model.layers[0].self_attn
    original = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output, weights = original(*args, **kwargs)
        return output, weights if repaired else output

    attention.forward = forward
    with setup.recorded(segments=[], mask=None):
        setup.model(setup.input_ids, output_attentions=True, use_cache=False)


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, as a logger does."""

    n_calls = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n_calls += 1
        return call(*args, **(kwargs or {}))


def logger_breaks_flex(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """A dispatch mode logs every operation; FlexAttention fails under it and also afterwards."""
    setup.register_attention(common.causal)
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
