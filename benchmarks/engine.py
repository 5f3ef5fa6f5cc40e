"""What our generation costs: against `model.generate` under SDPA, and against the naive way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.common import (
    NEW,
    Timing,
    bench_prompt,
    compared,
    milliseconds,
    sandwiched,
    time_flex,
)
from flexinspect.masks import mask_presets
from flexinspect.records.prompt import Prompt


def time_generate(model: Any, prompt: Prompt, new_tokens: int = NEW) -> Timing:
    """Time transformers' own greedy `generate` under SDPA, token by token."""
    input_ids = torch.tensor([prompt.ids], device=next(model.parameters()).device)
    started = time.perf_counter()
    return Timing.of(started, generate_stamps(model, input_ids, new_tokens))


def generate_stamps(
    model: Any, input_ids: Tensor, new_tokens: int, past_key_values: Any = None
) -> list[float]:
    """Run `generate` on ids (1, L), some perhaps cached; return when each token was known."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    stamps: list[float] = []

    class Stamp(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            if input_ids.device.type == "cuda":
                torch.cuda.synchronize()
            stamps.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        past_key_values=past_key_values,
        max_new_tokens=new_tokens,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([Stamp()]),
    )
    return stamps


def time_naive(model: Any, prompt: Prompt, new_tokens: int) -> Timing:
    """Time the way that published ensemble code takes, with uncompiled flex as it comes.

    No cache: the whole sequence again at each step. A block mask built in every layer at every
    step, for every head. Every attention module patched before and put back after each step.
    """
    spec = mask_presets.preset("segment-isolation", prompt.segments)
    limit = prompt.segments[-1].stop
    allowed = torch.from_numpy(spec.dense(limit))
    ids = torch.tensor([prompt.ids])
    stamps: list[float] = []
    started = time.perf_counter()
    with torch.no_grad():
        for _ in range(new_tokens):
            saved = _patch_layers(model, allowed)
            try:
                logits = model(input_ids=ids, use_cache=False).logits
            finally:
                for module, forward in saved:
                    module.forward = forward
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
            stamps.append(time.perf_counter())
    return Timing.of(started, stamps)


def _patch_layers(model: Any, allowed: Tensor) -> list[tuple[Any, Any]]:
    saved = []
    for layer in model.model.layers:
        saved.append((layer.self_attn, layer.self_attn.forward))
        layer.self_attn.forward = _naive_forward(layer.self_attn, allowed)
    return saved


def _naive_forward(module: Any, allowed: Tensor) -> Callable[..., tuple[Tensor, None]]:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    def forward(
        hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> tuple[Tensor, None]:
        batch, length, _width = hidden_states.shape
        shape = (batch, length, -1, module.head_dim)
        q, k, v = (
            projection(hidden_states).view(shape).transpose(1, 2)
            for projection in (module.q_proj, module.k_proj, module.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)

        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return allowed[q_idx, kv_idx]

        block_mask = create_block_mask(
            mask_mod, batch, q.shape[1], length, length, device=q.device.type
        )
        out = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)
        assert isinstance(out, Tensor)
        return module.o_proj(out.transpose(1, 2).reshape(batch, length, -1)), None

    return forward


def measure(model: Any, seconds: float, tokens: int, *, compiled: bool) -> dict[str, Any]:
    """Return decode and prefill of our generation against `generate` under SDPA."""
    prompt = bench_prompt(tokens)

    def ours() -> Timing:
        return time_flex(model, prompt, compiled=compiled, new_tokens=tokens)

    def plain() -> Timing:
        return time_generate(model, prompt, tokens)

    ours()  # compiles, where it does
    blocks = sandwiched(plain, {"flex": ours}, seconds=seconds)["flex"]
    sdpa, flex = ([getattr(one, name) for one in blocks] for name in ("after", "case"))
    return {
        "sdpa_decode_ms": milliseconds([s for t in sdpa for s in t.steps]),
        "flex_decode_ms": milliseconds([s for t in flex for s in t.steps]),
        "sdpa_prefill_ms": milliseconds([t.prefill for t in sdpa]),
        "flex_prefill_ms": milliseconds([t.prefill for t in flex]),
        "decode_ratio": compared(blocks, "median"),
        "prefill_ratio": compared(blocks, "prefill", "median"),
        "bound": {"decode": 1.08, "prefill": 1.1} if compiled else {"decode": 1.7, "prefill": 1.5},
    }


def measure_naive(model: Any, new_tokens: int = NEW) -> dict[str, Any]:
    """Return how many times faster our generation is than the naive way, whole generation."""
    prompt = bench_prompt(new_tokens)
    naive = time_naive(model, prompt, new_tokens).total
    ours = time_flex(model, prompt, new_tokens=new_tokens).total
    return {
        "tokens": new_tokens,
        "naive_s": round(naive, 2),
        "ours_s": round(ours, 2),
        "times_faster": round(naive / ours, 2),
        "bound": 10,
    }
