"""A wrapper as users write it: patch every attention forward, forward, unpatch, at each step.

No cache, the whole sequence again; the mask lets paraphrases see themselves, and what is generated
see everything. Where flex raises, the forward that was replaced runs instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kit
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

SEGMENTS, PROMPT, NEW = [(1, 7), (8, 13)], 15, 4


class FlexWrapper:
    """Replaces the `forward` of each `self_attn` by one that calls flex with a mask of segments."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.originals: dict[int, Callable[..., Any]] = {}
        self.fallbacks = 0

    def segment_mask_mod(self) -> Callable[..., Any]:
        owner = torch.full((PROMPT + NEW,), -1)
        for number, (start, stop) in enumerate(SEGMENTS):
            owner[start:stop] = number

        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            is_shared = (owner[q_idx] < 0) | (owner[kv_idx] < 0)
            return (kv_idx <= q_idx) & (is_shared | (owner[q_idx] == owner[kv_idx]))

        return mask_mod

    def patched(self, layer: int, module: Any, mask_mod: Callable[..., Any]) -> Callable[..., Any]:
        original = self.originals[layer]

        def forward(hidden_states: Any, position_embeddings: Any = None, **kwargs: Any) -> Any:
            try:
                return self.attend(module, mask_mod, hidden_states, position_embeddings)
            except Exception:
                self.fallbacks += 1
                embeddings = {"position_embeddings": position_embeddings}
                return original(hidden_states, **embeddings, **kwargs)

        return forward

    def attend(self, module: Any, mask_mod: Any, hidden: Any, embeddings: Any) -> Any:
        shape = (*hidden.shape[:-1], -1, module.head_dim)
        query, key, value = (
            project(hidden).view(shape).transpose(1, 2)
            for project in (module.q_proj, module.k_proj, module.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *embeddings)
        groups = module.num_key_value_groups
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        n = hidden.shape[1]
        mask = create_block_mask(mask_mod, 1, query.shape[1], n, n, device="cpu")
        out = flex_attention(query, key, value, block_mask=mask)
        return module.o_proj(out.transpose(1, 2).reshape(*hidden.shape[:-1], -1)), None

    def patch(self) -> None:
        mask_mod = self.segment_mask_mod()
        for number, layer in enumerate(self.model.model.layers):
            self.originals[number] = layer.self_attn.forward
            layer.self_attn.forward = self.patched(number, layer.self_attn, mask_mod)

    def unpatch(self) -> None:
        for number, layer in enumerate(self.model.model.layers):
            layer.self_attn.forward = self.originals[number]

    def generate(self, input_ids: torch.Tensor) -> torch.Tensor:
        for _ in range(NEW):
            self.patch()
            try:
                logits = self.model(input_ids=input_ids, use_cache=False).logits
            finally:
                self.unpatch()
            input_ids = torch.cat([input_ids, logits[:, -1:].argmax(-1)], dim=1)
        return input_ids


model, prompt = kit.tiny("sdpa", layers=3), kit.ids(PROMPT, bos=True)
wrapper = FlexWrapper(model)
isolated = wrapper.generate(prompt)[0, PROMPT:]
print("generated:", isolated.tolist())
print("fallbacks:", wrapper.fallbacks)
plain = model.generate(prompt, max_new_tokens=NEW, do_sample=False)[0, PROMPT:]
print("the plain model's tokens:", plain.tolist())
