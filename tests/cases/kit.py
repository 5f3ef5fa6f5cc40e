"""What the case scripts share: a tiny model, ids, masks of cells, and a probe for leaks.

The scripts represent user code, so nothing here uses flexinspect. Everything runs on one
thread of a CPU and prints the same at each run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

BOS, VOCAB = 1, 300

torch.set_num_threads(1)
warnings.filterwarnings("ignore", "flex_attention called without torch.compile")


def tiny(attention: str = "eager", *, layers: int = 2, **config: Any) -> Any:
    """Return a Llama of 32 numbers per token, seeded, for an attention of that name."""
    torch.manual_seed(0)
    facts: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "bos_token_id": BOS,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**facts, **config})).eval().requires_grad_(False)
    model.set_attn_implementation(attention)
    return model


def ids(n: int, seed: int = 1, *, bos: bool = False) -> Tensor:
    """Return (1, n) ids of no special tokens, the first one a BOS on request."""
    input_ids = torch.randint(3, VOCAB, (1, n), generator=torch.Generator().manual_seed(seed))
    if bos:
        input_ids[0, 0] = BOS
    return input_ids


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers of a shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def logits_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return what gives the logits (rows, vocabulary) of ids (1, rows)."""
    return lambda input_ids: model(input_ids).logits[0]


def moved(forward: Callable[[Tensor], Tensor], input_ids: Tensor, at: int) -> Tensor:
    """Return how far each row of `forward(input_ids)` moves when one token is replaced."""
    other = input_ids.clone()
    other[:, at] = (other[:, at] + 11) % (VOCAB - 3) + 3
    return (forward(other) - forward(input_ids)).abs().amax(-1)


def rows_that(condition: Tensor) -> list[int]:
    """Return the numbers of the rows where a condition (rows,) holds."""
    return [int(row) for row in condition.nonzero().flatten()]


def causal(n: int) -> Tensor:
    """Return the cells (n, n) of a causal mask."""
    return torch.ones(n, n, dtype=torch.bool).tril()


def isolated(segments: Sequence[tuple[int, int]], n: int, generated: int) -> Tensor:
    """Return causal cells (n, n) within each segment; rows from `generated` on see all before."""
    same = torch.zeros(n, n, dtype=torch.bool)
    for start, stop in segments:
        same[start:stop, start:stop] = True
    same[generated:] = True
    return same & causal(n)


def mask_mod_up_to(offset: int) -> Callable[[Any, Any, Any, Any], Any]:
    """Return a `mask_mod` that opens, for each row, the keys up to its number plus an offset."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx <= q_idx + offset

    return mask_mod


def block_mask(cells: Tensor) -> BlockMask:
    """Return a BlockMask that opens these cells (rows, keys)."""
    return create_block_mask(
        lambda b, h, q_idx, kv_idx: cells[q_idx, kv_idx], None, None, *cells.shape, device="cpu"
    )


@dataclass
class OwnAttention:
    """A user's attention function: flex with a mask of its own, causal SDPA wherever that raises.

    Registered under a new name and without a mask function, as users do.
    """

    cells: Tensor
    failing: tuple[int, ...] = ()
    ran: list[tuple[int, str]] = field(default_factory=list)

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
        try:
            if module.layer_idx in self.failing:
                raise RuntimeError("the flex call failed")
            mask = block_mask(self.cells)
            out = flex_attention(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True)
            self.ran.append((module.layer_idx, "flex"))
        except RuntimeError:
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=True
            )
            self.ran.append((module.layer_idx, "sdpa"))
        return out.transpose(1, 2).contiguous(), None


def register_attention(cells: Tensor, name: str = "own") -> OwnAttention:
    """Register an `OwnAttention` under a name and return it."""
    attention = OwnAttention(cells)
    AttentionInterface.register(name, attention)
    return attention


def flex_without_compiler() -> None:
    """Let transformers use flex on a CPU without a compiler."""
    import transformers.integrations.flex_attention as theirs
    import transformers.masking_utils as masking

    make = masking.create_block_mask

    def call(query: Tensor, key: Tensor, value: Tensor, training: bool = False, **kw: Any) -> Any:
        return flex_attention(query, key, value, **kw)

    def create(*args: Any, _compile: bool | None = None, **kw: Any) -> BlockMask:
        return make(*args, **kw)

    theirs.compile_friendly_flex_attention = call
    masking.create_block_mask = create
