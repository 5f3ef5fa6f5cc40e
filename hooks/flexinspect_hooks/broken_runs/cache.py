"""Broken runs whose fault is in decoding: the mask of a decode row, and the KV cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import DynamicCache, StaticCache

from flexinspect_hooks.broken_runs import broken_run_setup as common
from flexinspect_hooks.broken_runs.broken_run_setup import BrokenRunSetup

# -- the mask of a decode row ----------------------------------------------------------------------


def decode_without_offset(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """The mask treats a decode row as row 0, which attends to the first key only."""

    def make_mask(n_rows: int, n_keys: int, offset: int) -> BlockMask:
        return common.block_mask(common.causal, n_rows, n_keys, offset=offset if repaired else 0)

    setup.register_attention(common.causal, make_mask=make_mask)
    with setup.recorded(segments=[], mask=None):
        setup.generate()


def mask_one_short(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """A decode mask is built before the cache has grown, and an `except` hides the error."""

    def make_mask(n_rows: int, n_keys: int, offset: int) -> BlockMask:
        is_short = n_rows == 1 and not repaired
        return common.block_mask(common.causal, n_rows, n_keys - is_short, offset=offset)

    def attend_or_fall_back(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> Any:
        try:
            return common.flex_attend(module, query, key, value, attention_mask, **kwargs)
        except (ValueError, RuntimeError):
            return common.attend_with_sdpa(query, key, value, scale=kwargs["scaling"])

    setup.register_attention(common.causal, attend=attend_or_fall_back, make_mask=make_mask)
    with setup.recorded(segments=[], mask=None):
        setup.generate()


# -- the KV cache ----------------------------------------------------------------------------------


def empty_cache_slots(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """A static cache has more slots than tokens, and a decode row may attend to all slots."""
    n_slots = 128
    setup.model.set_attn_implementation("sdpa")
    cache = StaticCache(config=setup.model.config, max_cache_len=n_slots)
    slots = torch.arange(n_slots)[None]
    with setup.recorded(segments=[], mask=None):
        input_ids, n_filled = setup.input_ids, 0
        for _ in range(common.NEW_TOKENS):
            rows = torch.arange(n_filled, n_filled + input_ids.shape[1])[:, None]
            is_decode = input_ids.shape[1] == 1
            allowed = slots < n_slots if is_decode and not repaired else slots <= rows
            given = {"attention_mask": common.additive_mask(allowed), "position_ids": rows.T}
            logits = setup.model(input_ids, past_key_values=cache, **given).logits
            n_filled += input_ids.shape[1]
            input_ids = torch.argmax(logits[:, -1:], -1)


def lost_cache(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """A patched forward passes the cache on under a name that transformers no longer uses."""
    _log_attention(setup.model.model.layers[1].self_attn, repaired=repaired)
    with setup.recorded(segments=[], mask=None):
        setup.decode(past_key_values=DynamicCache(config=setup.model.config), use_cache=True)


def _log_attention(attention: Any, *, repaired: bool) -> None:
    """Patch an attention module to observe its arguments, as a logger does."""
    original = attention.forward

    def forward(hidden_states: Tensor, past_key_value: Any = None, **kwargs: Any) -> Any:
        cache = kwargs.pop("past_key_values", None)
        cache = cache if repaired else past_key_value  # no caller uses this name now: None
        return original(hidden_states, past_key_values=cache, **kwargs)

    attention.forward = forward


def no_cache(setup: BrokenRunSetup, *, repaired: bool) -> None:
    """Every step runs the whole sequence again, and each layer builds the same mask again."""
    n_steps = 5

    def attend_with_new_mask(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> Any:
        mask = common.block_mask(common.causal, query.shape[2], key.shape[2])
        return common.flex_attend(module, query, key, value, mask, **kwargs)

    setup.register_attention(common.causal, attend=None if repaired else attend_with_new_mask)
    with setup.recorded(segments=[], mask=None):
        if repaired:
            setup.generate(max_new_tokens=n_steps)
            return
        input_ids = setup.input_ids
        for _ in range(n_steps):
            logits = setup.model(input_ids).logits
            input_ids = torch.cat([input_ids, torch.argmax(logits[:, -1:], -1)], 1)
