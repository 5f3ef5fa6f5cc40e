"""A user's attention function, whose faults a test chooses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface

Choose = Callable[[int, int, int], str]
"""What to do in a layer, for rows and keys: see `Own`."""

_numbers = itertools.count(1)


def causal_from(offset: int) -> Callable[..., Any]:
    return lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + offset


def isolating(spans: list[tuple[int, int]]) -> Callable[[int], Callable[..., Any]]:
    """Return what makes causal mask_mods under which spans of positions do not see each other."""
    owner = torch.full((512,), -1)
    for number, (start, stop) in enumerate(spans):
        owner[start:stop] = number

    def make(offset: int) -> Callable[..., Any]:
        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            mine, other = owner[q_idx + offset], owner[kv_idx]
            return (kv_idx <= q_idx + offset) & ((mine < 0) | (other < 0) | (mine == other))

        return mask_mod

    return make


class Own:
    """Runs flex under its own `mask_mod(offset)`, or what `choose` returns for a layer and lengths.

    "flex"; "sdpa": without any exception; "caught": it raises, and causal sdpa is run instead;
    "caught kernel": the kernel itself raises, and so on; "unmasked": it raises, and flex is run
    without a mask; "looked up": a cache of masks has a KeyError, and flex is run as always;
    "raise": it is not caught.
    """

    def __init__(
        self,
        model: Any,
        choose: Choose = lambda layer, rows, keys: "flex",
        *,
        mask_mod: Callable[[int], Callable[..., Any]] = causal_from,
        heads: int | None = None,
    ) -> None:
        self._choose, self._mask_mod, self._heads = choose, mask_mod, heads
        self.masks: dict[tuple[int, int], Any] = {}
        """Masks that are built once for all layers, by lengths, where `share` is set."""
        self.share = True
        name = f"own_{next(_numbers)}"
        AttentionInterface.register(name, self)
        model.set_attn_implementation(name)

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        lengths = (query.shape[2], key.shape[2])
        todo = self._choose(module.layer_idx, *lengths)
        tensors = (query, key, value)
        if todo == "sdpa":
            return _sdpa(*tensors, scaling), None
        try:
            if todo in ("caught", "unmasked", "raise"):
                raise RuntimeError(f"expected all tensors on one device, layer {module.layer_idx}")
            mask = self._mask(lengths, todo)
            if todo == "caught kernel":
                mask = self._mask((lengths[0], lengths[1] + 1), todo)
        except KeyError:
            mask = self._mask(lengths, "flex")
            return _flex(*tensors, mask, scaling), None
        except RuntimeError:
            if todo == "raise":
                raise
            if todo == "unmasked":
                return _flex(*tensors, None, scaling), None
            return _sdpa(*tensors, scaling), None
        try:
            return _flex(*tensors, mask, scaling), None
        except (ValueError, RuntimeError):
            return _sdpa(*tensors, scaling), None

    def _mask(self, lengths: tuple[int, int], todo: str) -> Any:
        if todo == "looked up":
            raise KeyError(lengths)
        if lengths in self.masks and self.share:
            return self.masks[lengths]
        mask_mod = self._mask_mod(lengths[1] - lengths[0])
        made = create_block_mask(mask_mod, None, self._heads, *lengths, device="cpu")
        self.masks[lengths] = made
        return made


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float | None) -> Tensor:
    gqa = query.shape[1] != key.shape[1]
    out = flex_attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=gqa)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous()


def _sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    out = F.scaled_dot_product_attention(
        *(query, key, value),
        is_causal=query.shape[2] > 1,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous()
