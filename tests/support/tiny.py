"""Tiny random models of the families that transformers routes through its attention interface."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flexinspect.records.prompt import PromptTokenIds

VOCAB = 300
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 9},
    "gemma2": {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 16},
    "phi3": {},
    "gpt_neox": {},
}


def make_model(family: str, **overrides: Any) -> Any:
    """Return a small model of a family, eval, seeded, without gradients."""
    torch.manual_seed(0)
    options = {**COMMON, **FAMILIES.get(family, {}), **overrides}
    config = AutoConfig.for_model(family, **options)
    # Gemma 2 caps its scores, for which transformers offers no SDPA.
    backend = "eager" if family == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=backend)
    return model.eval().requires_grad_(False)


def ids(n: int, seed: int) -> tuple[int, ...]:
    """Return n token ids that are no special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, VOCAB, (n,), generator=generator).tolist())


def make_pieces(**overrides: Any) -> PromptTokenIds:
    """Return pieces with BOS, a shared text, three paraphrases of unlike length and a cue."""
    parts: dict[str, Any] = {
        "bos": (1,),
        "shared": ids(4, 9),
        "paraphrases": (ids(7, 1), ids(5, 2), ids(8, 3)),
        "separator": ids(1, 4),
        "cue": ids(2, 5),
        **overrides,
    }
    return PromptTokenIds(**parts)
