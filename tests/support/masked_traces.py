"""Models whose attention runs masks that a test defines, as users patch them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface

from support.tiny import ids, make_model

SEGMENTS = [(1, 7, "first"), (7, 12, "second"), (12, 20, "third"), (20, 22, "cue")]
"""Position 0 is the segment `shared`: without a tokenizer nothing is known to be a BOS."""

PROMPT = 22

MaskMod = Callable[[int, Any, Any, Any], Any]
"""(layer, head, row, key) as positions to which cells are open."""


def prompt_ids(n: int = PROMPT, seed: int = 3) -> Tensor:
    return torch.tensor([ids(n, seed)])


def isolated(
    spans: Sequence[tuple[int, int]] = ((0, 1), (1, 7), (7, 12), (12, 20)), reader: int = 20
) -> MaskMod:
    """Return the mask of the preset `segment-isolation` for `SEGMENTS`, or for other spans."""
    owner = torch.full((512,), 99)
    for number, (start, stop) in enumerate(spans):
        owner[start:stop] = number

    def mask_mod(layer: int, h: Any, q: Any, kv: Any) -> Any:
        return (kv <= q) & ((owner[q] == owner[kv]) | (q >= reader))

    return mask_mod


def causal(layer: int, h: Any, q: Any, kv: Any) -> Any:
    return kv <= q


def only_in(layer: int, other: MaskMod, usual: MaskMod) -> MaskMod:
    """Return a mask that differs in one layer."""
    return lambda at, h, q, kv: (other if at == layer else usual)(at, h, q, kv)


@contextmanager
def own_attention(
    declared: MaskMod, *, heads: int | None = None, failing: Sequence[int] = ()
) -> Any:
    """Register flex with a mask; yields the name. A layer of `failing` falls back to SDPA."""

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Any:
        layer, offset = module.layer_idx, k.shape[2] - q.shape[2]

        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return declared(layer, h, q_idx + offset, kv_idx)

        scale = kw.get("scaling")
        try:
            if layer in failing:
                raise RuntimeError("no kernel for this layer")
            block_mask = create_block_mask(mask_mod, None, heads, q.shape[2], k.shape[2], "cpu")
            out = flex_attention(q, k, v, block_mask=block_mask, scale=scale, enable_gqa=True)
        except RuntimeError:
            causal_too = q.shape[2] > 1
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=causal_too, scale=scale, enable_gqa=True
            )
        return out.transpose(1, 2).contiguous(), None

    with registered(attention) as name:
        yield name


@contextmanager
def registered(attention: Callable[..., Any]) -> Any:
    """Register an attention function, and no mask function, under a new name."""
    AttentionInterface.register("mine", attention)
    try:
        yield "mine"
    finally:
        AttentionInterface._global_mapping.pop("mine")


def model_on(name: str, family: str = "llama", **overrides: Any) -> Any:
    model = make_model(family, **overrides)
    model.set_attn_implementation(name)
    return model


def generated(model: Any, prompt: Tensor, n: int = 4, **options: Any) -> Tensor:
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, **options}
    found: Tensor = model.generate(prompt, max_new_tokens=n, **options)
    return found
