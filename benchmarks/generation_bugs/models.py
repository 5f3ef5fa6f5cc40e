"""What the programs share: small models with random weights, ids, masks and attention."""

from __future__ import annotations

import math
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex
import transformers
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface

torch.set_num_threads(1)
torch.set_grad_enabled(False)
transformers.logging.set_verbosity_error()
warnings.filterwarnings("ignore")
flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True

DEMO = Path(__file__).parents[2] / "flexinspect" / "data" / "demo"
VOCAB, BOS, HEADS, KV_HEADS = 300, 1, 4, 2
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": BOS,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def make(family: str = "llama", backend: str = "sdpa", **options: Any) -> Any:
    """Return a model of three layers with random weights."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**_COMMON, **options})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=backend).eval()


def demo() -> tuple[Any, Any]:
    """Return the small trained model and its tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO).eval(), tokenizer


def saved(model: Any) -> str:
    """Save a model, as its publisher would, and return the folder."""
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    return folder


def ids(n: int, seed: int = 3) -> Tensor:
    """Return (1, n) ids that begin with a BOS."""
    drawn = torch.randint(3, VOCAB, (1, n), generator=torch.Generator().manual_seed(seed))
    drawn[0, 0] = BOS
    return drawn


def greedy(model: Any, rows: Tensor, n: int = 5, cache: Any = None) -> list[int]:
    """Continue a prompt token by token, with a cache."""
    chosen = []
    for _ in range(n):
        output = model(rows, past_key_values=cache, use_cache=True)
        cache, rows = output.past_key_values, output.logits[:, -1:].argmax(-1)
        chosen.append(int(rows))
    return chosen


def register(model: Any, attention: Any, mask: Any = None, name: str = "mine") -> None:
    """Give a model an attention function, and a mask function (none: no mask reaches it)."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask or (lambda *args, **kwargs: None))
    model.set_attn_implementation(name)


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    allowed: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return attention by hand, (batch, rows, heads, width); causal without a mask."""
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, 1) for states in (key, value))
    scores = query @ key.mT * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if allowed is None:
        allowed = causal(*scores.shape[-2:])
    weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous()


def causal(n: int, m: int) -> Tensor:
    """Return which of m keys the newest n rows may see."""
    return torch.ones(n, m, dtype=torch.bool).tril(m - n)


def blocks(mask_mod: Any, n: int, m: int) -> BlockMask:
    """Return the block mask of a rule, for n rows and m keys."""
    return create_block_mask(mask_mod, None, None, n, m, device="cpu")


def run_flex(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Return FlexAttention, (batch, rows, heads, width)."""
    out = flex.flex_attention(query, key, value, enable_gqa=True, **options)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous()


SEGMENTS = ((1, 8), (8, 14))
"""Two questions in a prompt of 17 tokens: a BOS before them, a cue after them."""
CUE = 14


def segment_cells(n: int) -> Tensor:
    """Return the cells (n, n) in which the questions do not see each other."""
    number = torch.zeros(n, dtype=torch.long)
    for which, (start, stop) in enumerate(SEGMENTS, 1):
        number[start:stop] = which
    row, key = torch.arange(n)[:, None], torch.arange(n)[None]
    together = (number[:, None] == number[None]) | (key == 0) | (row >= CUE)
    return (key <= row) & together
